"""What `import holdfast` promises: these names, and no others by accident."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import holdfast
import holdfast.aio
import holdfast.testing
from holdfast import errors
from holdfast.api.aio import message as aio_message
from holdfast.api.aio.schedules import AsyncSchedules
from holdfast.api.aio.transactions import AsyncTransaction, AsyncTransactions
from holdfast.api.sync import message
from holdfast.api.sync.schedules import Schedules
from holdfast.api.sync.transactions import Transaction, Transactions

ERRORS = {
    "BadBody",
    "BadSettings",
    "Busy",
    "Closed",
    "Conflict",
    "CorruptData",
    "DiskFailed",
    "DiskFull",
    "Empty",
    "Fenced",
    "Forbidden",
    "HoldfastError",
    "InvalidRequest",
    "LeaseLost",
    "LockHeld",
    "MessageTooLarge",
    "NotAQueue",
    "NotFound",
    "OffsetOutOfRange",
    "QueueFull",
    "TopicExists",
    "Unauthenticated",
    "Unavailable",
    "UnknownGroup",
    "UnknownTopic",
}
BACKUPS = {"backup", "backups", "restore", "verify"}
VALUES = {
    "Backup",
    "Broker",
    "BrokerSettings",
    "Compacted",
    "Consumer",
    "ConsumerSettings",
    "DeadGroup",
    "DeadLetter",
    "Document",
    "Firing",
    "Group",
    "GroupInfo",
    "Lock",
    "LockInfo",
    "Message",
    "NewMessage",
    "Observer",
    "Pause",
    "Producer",
    "ProducerSettings",
    "Queue",
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
    "TopicInfo",
    "TopicSettings",
    "TraceStep",
    "Verified",
    "Worker",
    "WorkerHealth",
    "WorkerInfo",
}


def test_holdfast_exports_what_it_promised():
    assert set(holdfast.__all__) == ERRORS | VALUES | BACKUPS | {"aio", "connect", "open", "open_broker"}
    assert set(holdfast.aio.__all__) == BACKUPS | {
        "AsyncBroker",
        "AsyncConsumer",
        "AsyncGroup",
        "AsyncMessage",
        "AsyncProducer",
        "AsyncQueue",
        "connect",
        "open",
        "open_broker",
    }
    assert set(holdfast.testing.__all__) == {"Drained", "QueueKit", "VirtualClock"}


def test_every_exported_name_is_there_and_listed_once_in_order():
    for module in (holdfast, holdfast.aio, holdfast.testing):
        assert list(module.__all__) == sorted(set(module.__all__))
        assert all(hasattr(module, name) for name in module.__all__)


@pytest.mark.parametrize("module", ["holdfast", "holdfast.aio"])
def test_tab_completion_in_a_fresh_interpreter_shows_every_public_name(module: str):
    program = f"""
import {module}, rlcompleter
completer, found = rlcompleter.Completer({{"holdfast": __import__("holdfast")}}), []
while (word := completer.complete("{module}.", len(found))) is not None:
    found.append(word)
print(*(word.removeprefix("{module}.").rstrip("()") for word in found))
assert set({module}.__all__) <= set(dir({module}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert set(sys.modules[module].__all__) <= set(done.stdout.split())


def test_every_exported_error_is_the_one_that_is_raised():
    for name in ERRORS:
        assert getattr(holdfast, name) is getattr(errors, name)


def test_every_error_has_a_code_of_its_own():
    found = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__]
    codes = [kind.code for kind in found]
    assert len(set(codes)) == len(codes)


def test_both_faces_have_the_same_methods():
    for sync, task in (
        (holdfast.Queue, holdfast.aio.AsyncQueue),
        (holdfast.Message, holdfast.aio.AsyncMessage),
        (holdfast.Consumer, holdfast.aio.AsyncConsumer),
        (message.Locks, aio_message.AsyncLocks),
        (message.Documents, aio_message.AsyncDocuments),
        (message.HeldLock, aio_message.AsyncHeldLock),
        (Schedules, AsyncSchedules),
        (Transaction, AsyncTransaction),
        (Transactions, AsyncTransactions),
    ):
        methods = {name for name in dir(sync) if not name.startswith("_")}
        assert methods == {name for name in dir(task) if not name.startswith("_")}
        for name in methods:
            one, other = getattr(sync, name), getattr(task, name)
            if inspect.isfunction(one):
                assert arguments(one) == arguments(other), f"{sync.__name__}.{name}"


def arguments(method) -> list[tuple[str, object, object]]:
    """Names, kinds and defaults."""
    return [(one.name, one.kind, one.default) for one in inspect.signature(method).parameters.values()]
