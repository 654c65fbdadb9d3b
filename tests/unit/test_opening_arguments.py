"""What opens a folder opens a server, too: one call, the same arguments."""

from __future__ import annotations

import inspect

import pytest

from holdfast.client.aio_opening import open as aio_open
from holdfast.client.aio_opening import open_broker as aio_open_broker
from holdfast.client.opening import open_broker, open_queue
from holdfast.local import opening


@pytest.mark.parametrize(
    ("here", "there"),
    [
        (opening.open_queue, open_queue),
        (opening.open_broker, open_broker),
        (opening.open_queue, aio_open),
        (opening.open_broker, aio_open_broker),
    ],
)
def test_what_opens_a_folder_opens_an_address_and_takes_more(here, there):
    added = {"share", "token", "tls", "timeout"}
    assert [each for each in arguments(there) if each[0] not in added] == arguments(here)


def arguments(function: object) -> list[tuple[str, object, object]]:
    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    return [(each.name, each.kind, each.default) for each in parameters]
