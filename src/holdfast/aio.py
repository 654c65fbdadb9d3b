"""The faces for tasks: `async with holdfast.aio.open("jobs") as queue`, or `open_broker`, or `connect`."""

import importlib
from typing import TYPE_CHECKING, Any

from holdfast.api.aio.consumer import AsyncConsumer
from holdfast.api.aio.group import AsyncGroup
from holdfast.api.aio.message import AsyncMessage
from holdfast.api.aio.producer import AsyncProducer
from holdfast.api.aio.queue import AsyncQueue
from holdfast.client.aio_opening import connect, open, open_broker  # noqa: A004  the same names as for threads
from holdfast.embedded.aio_broker import AsyncBroker

if TYPE_CHECKING:
    from holdfast.client.aio_broker import AsyncRemoteBroker

__all__ = [
    "AsyncBroker",
    "AsyncConsumer",
    "AsyncGroup",
    "AsyncMessage",
    "AsyncProducer",
    "AsyncQueue",
    "AsyncRemoteBroker",
    "connect",
    "open",
    "open_broker",
]

# An owner of a folder has no use for it, and does not load it.
_LATER = {
    "AsyncRemoteBroker": "holdfast.client.aio_broker",
}


def __dir__() -> list[str]:
    """The public names, loaded or not: what tab completion shows."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_LATER[name]), name)
    return found
