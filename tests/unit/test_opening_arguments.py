"""What opens a folder opens a server, too: one call, the same arguments."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import holdfast
import holdfast.aio
from holdfast.client.aio.opening import open_broker as aio_open_broker
from holdfast.client.aio.opening import open_queue as aio_open
from holdfast.client.sync.opening import open_broker, open_queue
from holdfast.local.opening import open_broker_port, open_queue_port


@pytest.mark.parametrize(
    ("here", "there"),
    [
        (open_queue_port, open_queue),
        (open_broker_port, open_broker),
        (open_queue_port, aio_open),
        (open_broker_port, aio_open_broker),
    ],
)
def test_what_opens_a_folder_opens_an_address_and_takes_more(here, there):
    more = {"share", "token", "tls", "timeout"}
    found = {name: default for name, default in arguments(there).items() if name not in more}
    known = {name: default for name, default in arguments(here).items() if name != "kind"}
    assert found.pop("folder") in (None, inspect.Parameter.empty)  # a settings file may name it
    known.pop("folder")
    assert found == known


def arguments(function: object) -> dict[str, object]:
    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    return {each.name: each.default for each in parameters}


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        (holdfast.Queue, r"use holdfast\.open\(folder\)"),
        (holdfast.Group, r"use holdfast\.open_broker\(folder\)\.group\("),
        (holdfast.Broker, r"use holdfast\.open_broker\(folder\)$"),
        (holdfast.Consumer, r"use holdfast\.open_broker\(folder\)\.consumer\("),
        (holdfast.Producer, r"use holdfast\.open_broker\(folder\)\.producer\("),
        (holdfast.aio.AsyncQueue, r"use holdfast\.aio\.open\(folder\)"),
        (holdfast.aio.AsyncBroker, r"use holdfast\.aio\.open_broker\(folder\)$"),
        (holdfast.aio.AsyncConsumer, r"use holdfast\.aio\.open_broker\(folder\)\.consumer\("),
        (holdfast.aio.AsyncProducer, r"use holdfast\.aio\.open_broker\(folder\)\.producer\("),
    ],
)
def test_a_class_that_is_given_a_folder_names_the_call_that_opens_it(kind, way):
    for folder in ("jobs", Path("jobs"), "http://127.0.0.1:7700/jobs"):
        with pytest.raises(TypeError, match=way):
            kind(folder)


def test_a_queue_that_is_made_with_nothing_or_with_options_names_open():
    for options in ({}, {"durability": "os"}):
        with pytest.raises(TypeError, match=r"use holdfast\.open\(folder\)"):
            holdfast.Queue(**options)
