"""The faces for tasks: `async with holdfast.aio.open("jobs") as queue`, or `open_broker`, or `connect`."""

from holdfast.client.aio_opening import connect, open, open_broker  # noqa: A004  the same names as for threads
from holdfast.embedded.aio import AsyncQueue
from holdfast.embedded.aio_broker import AsyncBroker
from holdfast.embedded.aio_consumer import AsyncConsumer
from holdfast.embedded.aio_group import AsyncGroup, AsyncMessage
from holdfast.embedded.aio_producer import AsyncProducer

__all__ = [
    "AsyncBroker",
    "AsyncConsumer",
    "AsyncGroup",
    "AsyncMessage",
    "AsyncProducer",
    "AsyncQueue",
    "connect",
    "open",
    "open_broker",
]
