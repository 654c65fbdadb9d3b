"""The faces for tasks: `async with holdfast.aio.open("jobs") as queue`, or `open_broker`, or `connect`."""

from holdfast.api.aio.broker import AsyncBroker
from holdfast.api.aio.consumer import AsyncConsumer
from holdfast.api.aio.group import AsyncGroup, AsyncQueue
from holdfast.api.aio.message import AsyncMessage
from holdfast.api.aio.producer import AsyncProducer
from holdfast.client.aio.backups import backup, backups, restore, verify
from holdfast.client.aio.opening import connect, open_broker
from holdfast.client.aio.opening import open_queue as open  # noqa: A004  the same name as for threads

__all__ = [
    "AsyncBroker", "AsyncConsumer", "AsyncGroup", "AsyncMessage", "AsyncProducer", "AsyncQueue",
    "backup", "backups", "connect", "open", "open_broker", "restore", "verify",
]  # fmt: skip


def __dir__() -> list[str]:
    """The public names, loaded or not: what tab completion shows."""
    return sorted({*globals(), *__all__})
