"""A durable message queue for Python: what it acknowledged it never lets go of."""

import importlib
from typing import TYPE_CHECKING, Any

from holdfast.broker.group import Compacted, QueueStats
from holdfast.broker.metrics import Observer
from holdfast.broker.traces import TraceStep
from holdfast.embedded.broker import Broker, open_broker
from holdfast.embedded.consumer import Consumer
from holdfast.embedded.dead import DeadGroup
from holdfast.embedded.drafts import NewMessage
from holdfast.embedded.feeds import StreamMessage
from holdfast.embedded.group import Group, Message
from holdfast.embedded.listed import DeadLetter
from holdfast.embedded.producer import Producer
from holdfast.embedded.publisher import Stored
from holdfast.embedded.queue import Queue
from holdfast.embedded.queue import open_queue as open  # noqa: A004  as in the standard library: gzip.open, shelve.open
from holdfast.embedded.topics import GroupInfo, TopicInfo
from holdfast.errors import (
    BadBody,
    BadSettings,
    Busy,
    Closed,
    Conflict,
    CorruptData,
    DiskFailed,
    DiskFull,
    Empty,
    Fenced,
    HoldfastError,
    InvalidRequest,
    LeaseLost,
    MessageTooLarge,
    NotAQueue,
    OffsetOutOfRange,
    QueueFull,
    TopicExists,
    Unavailable,
    UnknownGroup,
    UnknownTopic,
)
from holdfast.settings import BrokerSettings, ConsumerSettings, ProducerSettings, QueueSettings, TopicSettings

if TYPE_CHECKING:
    from holdfast import aio

__version__ = "0.1.0"

__all__ = [
    "BadBody",
    "BadSettings",
    "Broker",
    "BrokerSettings",
    "Busy",
    "Closed",
    "Compacted",
    "Conflict",
    "Consumer",
    "ConsumerSettings",
    "CorruptData",
    "DeadGroup",
    "DeadLetter",
    "DiskFailed",
    "DiskFull",
    "Empty",
    "Fenced",
    "Group",
    "GroupInfo",
    "HoldfastError",
    "InvalidRequest",
    "LeaseLost",
    "Message",
    "MessageTooLarge",
    "NewMessage",
    "NotAQueue",
    "Observer",
    "OffsetOutOfRange",
    "Producer",
    "ProducerSettings",
    "Queue",
    "QueueFull",
    "QueueSettings",
    "QueueStats",
    "Stored",
    "StreamMessage",
    "TopicExists",
    "TopicInfo",
    "TopicSettings",
    "TraceStep",
    "Unavailable",
    "UnknownGroup",
    "UnknownTopic",
    "aio",
    "open",
    "open_broker",
]


def __getattr__(name: str) -> Any:
    # The faces for tasks are loaded by those who use them: they bring asyncio with them.
    if name == "aio":
        return importlib.import_module("holdfast.aio")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
