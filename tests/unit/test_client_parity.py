"""The faces of a folder and of a server are the same: what one has, the other has, with the same arguments."""

from __future__ import annotations

import inspect

import pytest

from holdfast.client.aio_broker import AsyncRemoteBroker
from holdfast.client.aio_opening import open as aio_open
from holdfast.client.aio_opening import open_broker as aio_open_broker
from holdfast.client.broker import RemoteBroker
from holdfast.client.opening import open_broker, open_queue
from holdfast.embedded import aio_broker as embedded_aio_broker
from holdfast.embedded import broker as embedded_broker
from holdfast.embedded.aio_broker import AsyncBroker
from holdfast.embedded.broker import Broker
from holdfast.local import opening

PAIRS = [
    (Broker, RemoteBroker),
    (AsyncBroker, AsyncRemoteBroker),
]
# Made by their brokers; and what only a thread, a fork or the end of the program calls.
INSIDE = {"open", "round", "await_all", "call_when_done", "disown", "end"}
SPECIAL = {"__enter__", "__exit__", "__aenter__", "__aexit__", "__iter__", "__aiter__", "__await__"}


def names(kind: type) -> set[str]:
    found = {name for name in dir(kind) if not name.startswith("_") or name in SPECIAL}
    return found - set(dir(object))


@pytest.mark.parametrize(("here", "there"), PAIRS, ids=lambda kind: kind.__name__)
def test_what_one_face_has_the_other_has_too(here, there):
    missing = names(here) - names(there) - INSIDE
    assert missing == set(), f"{there.__name__} lacks {sorted(missing)}"
    more = names(there) - names(here) - INSIDE
    assert more == set(), f"{here.__name__} lacks {sorted(more)}"


@pytest.mark.parametrize(("here", "there"), PAIRS, ids=lambda kind: kind.__name__)
def test_their_methods_take_the_same_arguments(here, there):
    for name in sorted(names(here) & names(there) - INSIDE):
        mine, theirs = inspect.getattr_static(here, name), inspect.getattr_static(there, name)
        if isinstance(mine, property) or not callable(mine):
            continue
        assert arguments(mine) == arguments(theirs), f"{there.__name__}.{name}"
        assert inspect.iscoroutinefunction(mine) == inspect.iscoroutinefunction(theirs), (
            f"{there.__name__}.{name} is awaited, or not"
        )


@pytest.mark.parametrize(
    ("here", "there"),
    [
        (opening.open_queue, open_queue),
        (embedded_broker.open_broker, open_broker),
        (opening.open_queue, aio_open),
        (embedded_aio_broker.open_broker, aio_open_broker),
    ],
)
def test_what_opens_a_folder_opens_an_address_and_takes_more(here, there):
    added = {"share", "token", "tls", "timeout"}
    assert [each for each in arguments(there) if each[0] not in added] == arguments(here)


def arguments(function: object) -> list[tuple[str, object, object]]:
    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    return [(each.name, each.kind, each.default) for each in parameters]
