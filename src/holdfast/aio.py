"""The faces for tasks: `async with holdfast.aio.open("jobs") as queue`, or `open_broker`."""

from holdfast.embedded.aio import AsyncQueue, open  # noqa: A004  the same name as for threads
from holdfast.embedded.aio_broker import AsyncBroker, open_broker
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
    "open",
    "open_broker",
]
