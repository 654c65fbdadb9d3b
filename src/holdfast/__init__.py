"""A durable message queue for Python that needs nothing but a folder."""

import importlib
from typing import TYPE_CHECKING, Any

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
    Forbidden,
    HoldfastError,
    InvalidRequest,
    LeaseLost,
    LockHeld,
    MessageTooLarge,
    NotAQueue,
    NotFound,
    OffsetOutOfRange,
    QueueFull,
    TopicExists,
    Unauthenticated,
    Unavailable,
    UnknownGroup,
    UnknownTopic,
)

if TYPE_CHECKING:
    from holdfast import aio
    from holdfast.api.drafts import NewMessage, Stored
    from holdfast.api.listing import DeadGroup, DeadLetter
    from holdfast.api.locks import Document, Lock, LockInfo
    from holdfast.api.schedules import Firing, Schedule
    from holdfast.api.sync.broker import Broker
    from holdfast.api.sync.consumer import Consumer
    from holdfast.api.sync.group import Group, Queue
    from holdfast.api.sync.message import Message
    from holdfast.api.sync.producer import Producer
    from holdfast.api.topics import GroupInfo, StreamMessage, TopicInfo
    from holdfast.broker.backup.restoring import Verified
    from holdfast.broker.metrics import Compacted, Observer, QueueStats
    from holdfast.broker.samples import Sample, Samples
    from holdfast.broker.tracing import TraceStep
    from holdfast.broker.workers import WorkerInfo
    from holdfast.client.backups import Backup, Restored, backup, backups, restore, verify
    from holdfast.client.opening import connect
    from holdfast.client.sync.opening import open_broker
    from holdfast.client.sync.opening import open_queue as open  # noqa: A004  as in the standard library: gzip.open, shelve.open
    from holdfast.model import Pause, Retained
    from holdfast.settings import BrokerSettings, ConsumerSettings, ProducerSettings, QueueSettings, TopicSettings
    from holdfast.worker import Reject, Retry, Worker, WorkerHealth

__version__ = "0.1.0"

__all__ = [
    "Backup",
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
    "Document",
    "Empty",
    "Fenced",
    "Firing",
    "Forbidden",
    "Group",
    "GroupInfo",
    "HoldfastError",
    "InvalidRequest",
    "LeaseLost",
    "Lock",
    "LockHeld",
    "LockInfo",
    "Message",
    "MessageTooLarge",
    "NewMessage",
    "NotAQueue",
    "NotFound",
    "Observer",
    "OffsetOutOfRange",
    "Pause",
    "Producer",
    "ProducerSettings",
    "Queue",
    "QueueFull",
    "QueueSettings",
    "QueueStats",
    "Reject",
    "Restored",
    "Retained",
    "Retry",
    "Sample",
    "Samples",
    "Schedule",
    "Stored",
    "StreamMessage",
    "TopicExists",
    "TopicInfo",
    "TopicSettings",
    "TraceStep",
    "Unauthenticated",
    "Unavailable",
    "UnknownGroup",
    "UnknownTopic",
    "Verified",
    "Worker",
    "WorkerHealth",
    "WorkerInfo",
    "aio",
    "backup",
    "backups",
    "connect",
    "open",
    "open_broker",
    "restore",
    "verify",
]


# Where the other names are: loaded by those who use them. A worker of Spark's has no use for a broker.
_LATER = {
    "Backup": "holdfast.client.backups",
    "Broker": "holdfast.api.sync.broker",
    "BrokerSettings": "holdfast.settings",
    "Compacted": "holdfast.broker.metrics",
    "Consumer": "holdfast.api.sync.consumer",
    "ConsumerSettings": "holdfast.settings",
    "DeadGroup": "holdfast.api.listing",
    "DeadLetter": "holdfast.api.listing",
    "Document": "holdfast.api.locks",
    "Firing": "holdfast.api.schedules",
    "Group": "holdfast.api.sync.group",
    "GroupInfo": "holdfast.api.topics",
    "Lock": "holdfast.api.locks",
    "LockInfo": "holdfast.api.locks",
    "Message": "holdfast.api.sync.message",
    "NewMessage": "holdfast.api.drafts",
    "Observer": "holdfast.broker.metrics",
    "Pause": "holdfast.model",
    "Producer": "holdfast.api.sync.producer",
    "ProducerSettings": "holdfast.settings",
    "Queue": "holdfast.api.sync.group",
    "QueueSettings": "holdfast.settings",
    "QueueStats": "holdfast.broker.metrics",
    "Reject": "holdfast.worker",
    "Restored": "holdfast.client.backups",
    "Retained": "holdfast.model",
    "Retry": "holdfast.worker",
    "Sample": "holdfast.broker.samples",
    "Samples": "holdfast.broker.samples",
    "Schedule": "holdfast.api.schedules",
    "Stored": "holdfast.api.drafts",
    "StreamMessage": "holdfast.api.topics",
    "TopicInfo": "holdfast.api.topics",
    "TopicSettings": "holdfast.settings",
    "TraceStep": "holdfast.broker.tracing",
    "Verified": "holdfast.broker.backup.restoring",
    "Worker": "holdfast.worker",
    "WorkerHealth": "holdfast.worker",
    "WorkerInfo": "holdfast.broker.workers",
    "backup": "holdfast.client.backups",
    "backups": "holdfast.client.backups",
    "connect": "holdfast.client.opening",
    "open": "holdfast.client.sync.opening:open_queue",
    "open_broker": "holdfast.client.sync.opening",
    "restore": "holdfast.client.backups",
    "verify": "holdfast.client.backups",
}


def __dir__() -> list[str]:
    """The public names, loaded or not: what tab completion shows."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name == "aio":  # brings asyncio with it
        return importlib.import_module("holdfast.aio")
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _LATER[name].partition(":")
    found = globals()[name] = getattr(importlib.import_module(module), attribute or name)
    return found
