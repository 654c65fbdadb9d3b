"""A durable message queue for Python: what it acknowledged it never lets go of."""

from holdfast import aio
from holdfast.broker.group import Compacted, QueueStats
from holdfast.broker.metrics import Observer
from holdfast.embedded.dead import DeadGroup
from holdfast.embedded.drafts import NewMessage
from holdfast.embedded.group import Message
from holdfast.embedded.listed import DeadLetter
from holdfast.embedded.publisher import Stored
from holdfast.embedded.queue import Queue
from holdfast.embedded.queue import open_queue as open  # noqa: A004  as in the standard library: gzip.open, shelve.open
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
    HoldfastError,
    InvalidRequest,
    LeaseLost,
    MessageTooLarge,
    NotAQueue,
    OffsetOutOfRange,
    Unavailable,
)
from holdfast.settings import QueueSettings

__version__ = "0.1.0"

__all__ = [
    "BadBody",
    "BadSettings",
    "Busy",
    "Closed",
    "Compacted",
    "Conflict",
    "CorruptData",
    "DeadGroup",
    "DeadLetter",
    "DiskFailed",
    "DiskFull",
    "Empty",
    "HoldfastError",
    "InvalidRequest",
    "LeaseLost",
    "Message",
    "MessageTooLarge",
    "NewMessage",
    "NotAQueue",
    "Observer",
    "OffsetOutOfRange",
    "Queue",
    "QueueSettings",
    "QueueStats",
    "Stored",
    "Unavailable",
    "aio",
    "open",
]
