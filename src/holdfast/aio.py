"""The faces for tasks: `async with holdfast.aio.open("jobs") as queue`, or `open_broker`, or `connect`."""

import importlib
from typing import TYPE_CHECKING, Any

from holdfast.client.aio_opening import connect, open, open_broker  # noqa: A004  the same names as for threads
from holdfast.embedded.aio import AsyncQueue
from holdfast.embedded.aio_broker import AsyncBroker
from holdfast.embedded.aio_consumer import AsyncConsumer
from holdfast.embedded.aio_group import AsyncGroup, AsyncMessage
from holdfast.embedded.aio_producer import AsyncProducer

if TYPE_CHECKING:
    from holdfast.client.aio_broker import AsyncRemoteBroker
    from holdfast.client.aio_group import AsyncRemoteGroup, AsyncRemoteMessage, AsyncRemoteQueue

__all__ = [
    "AsyncBroker",
    "AsyncConsumer",
    "AsyncGroup",
    "AsyncMessage",
    "AsyncProducer",
    "AsyncQueue",
    "AsyncRemoteBroker",
    "AsyncRemoteGroup",
    "AsyncRemoteMessage",
    "AsyncRemoteQueue",
    "connect",
    "open",
    "open_broker",
]

# An owner of a folder has no use for these, and does not load them.
_LATER = {
    "AsyncRemoteBroker": "holdfast.client.aio_broker",
    "AsyncRemoteGroup": "holdfast.client.aio_group",
    "AsyncRemoteMessage": "holdfast.client.aio_group",
    "AsyncRemoteQueue": "holdfast.client.aio_group",
}


def __dir__() -> list[str]:
    """The public names, loaded or not: what tab completion shows."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_LATER[name]), name)
    return found
