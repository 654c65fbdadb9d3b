"""What opens a folder opens a server, too: one call, the same arguments."""

from __future__ import annotations

import inspect

import pytest

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
