"""How a worker is, in numbers."""

from __future__ import annotations

import threading
from collections import Counter

import msgspec


class WorkerHealth(msgspec.Struct, frozen=True, kw_only=True):
    """What `worker.health()` answers. Counts are since the start."""

    status: str  # "starting", "running", "silent", "draining" or "stopped"
    seconds_since_last_receive: float  # of the queue that has not answered for the longest time, empty or not
    silent_seconds: float  # the same, but only as long as there was a free slot to ask with
    running: int
    handled: int
    failed: int  # the handler raised
    rejected: int  # the handler raised Reject
    retried: int  # the handler raised Retry
    timed_out: int  # the handler ran for longer than its time limit
    lost: int  # the lease was gone when the handler ended
    unsettled: int  # the handler ended, but the queue could not be told: the message comes again
    given_back: int  # taken, and not begun before the end
    cut_off: int  # still running at the end of the drain
    restarts: int  # receiving failed, and was tried again
    hook_errors: int

    @property
    def ok(self) -> bool:
        """Whether the worker does what it is there for."""
        return self.status in {"starting", "running", "draining"}


class Counts:
    """What was counted; any thread may add to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    def __getitem__(self, name: str) -> int:
        return self._counts[name]
