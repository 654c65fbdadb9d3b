"""Messages that a worker has in hand, and until when their handlers may run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Hashable
from typing import Any, Final, Literal

from holdfast.env import Clock
from holdfast.worker.sources import Source

Claimant = Literal["handler", "control"]

# An async handler that was cancelled may tidy up for so long.
_TIDY_NS: Final = 5_000_000_000


class Run:
    """One message on its way through the handler. Whoever claims it first settles it: the handler's end, or control."""

    def __init__(self, message: Any, source: Source, lane: Hashable) -> None:
        self.message = message
        self.source = source
        self.lane = lane
        self.began_ns: int | None = None
        self.deadline_ns: int | None = None
        self.overtime = False
        self.task: asyncio.Task[None] | None = None
        self._claimed_by: Claimant | None = None
        self._lock = threading.Lock()

    def claim(self, by: Claimant) -> bool:
        """Whether it is for the caller to settle the message."""
        with self._lock:
            if self._claimed_by is None:
                self._claimed_by = by
                return True
            return False

    @property
    def claimed(self) -> bool:
        return self._claimed_by is not None

    @property
    def abandoned(self) -> bool:
        """Whether control has given up on the handler."""
        return self._claimed_by == "control"


class Runs:
    """All of them."""

    def __init__(self, clock: Clock, time_limit_ms: int | None, wake: Callable[[], None]) -> None:
        self._clock = clock
        self._limit_ns = None if time_limit_ms is None else time_limit_ms * 1_000_000
        self._wake = wake
        self._lock = threading.Lock()
        self._runs: set[Run] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def running(self) -> int:
        """How many handlers run."""
        return sum(run.began_ns is not None for run in self.all())

    def all(self) -> list[Run]:
        with self._lock:
            return list(self._runs)

    def add(self, run: Run) -> None:
        """It was taken."""
        with self._lock:
            self._runs.add(run)

    def begin(self, run: Run) -> bool:
        """Its handler begins; False where it is too late for that."""
        with self._lock:
            if self._closed:
                return False
            run.began_ns = now_ns = self._clock.monotonic_ns()
            if self._limit_ns is not None:
                run.deadline_ns = now_ns + self._limit_ns
            return True

    def remove(self, run: Run) -> bool:
        """It is over; False where it was before."""
        with self._lock:
            if run not in self._runs:
                return False
            self._runs.remove(run)
            last = self._closed and not self._runs
        if last:
            self._wake()
        return True

    def close(self) -> None:
        """No handler begins from now on."""
        with self._lock:
            self._closed = True

    def overdue(self) -> list[Run]:
        """Those whose handlers had their time; each is given a last moment to tidy up."""
        now_ns = self._clock.monotonic_ns()
        found = []
        for run in self.all():
            if run.deadline_ns is not None and run.deadline_ns <= now_ns:
                run.deadline_ns = now_ns + _TIDY_NS if run.task is not None and not run.overtime else None
                found.append(run)
        return found

    def next_s(self) -> float | None:
        """In how many seconds one may have had its time: those that begin meanwhile have theirs later than that."""
        if self._limit_ns is None:
            return None
        now_ns = self._clock.monotonic_ns()
        deadlines = [run.deadline_ns for run in self.all() if run.deadline_ns is not None]
        return max(0, min(deadlines, default=now_ns + self._limit_ns) - now_ns) / 1e9
