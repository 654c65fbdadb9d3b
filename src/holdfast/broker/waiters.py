"""The line of consumers that wait for a message, threads and tasks alike: first come, first served."""

from __future__ import annotations

import contextlib
import threading
from bisect import bisect_left
from collections.abc import Iterator
from itertools import count
from operator import attrgetter
from typing import Final, Protocol

from holdfast.env import Clock
from holdfast.env.process import asyncio

_TICKET: Final = attrgetter("ticket")
_COUNT: Final = attrgetter("count")
_LATE_NS: Final = 1_000_000_000


class Waiter(Protocol):
    """A waiting consumer."""

    woken: bool
    ticket: int  # its place in line; 0 before it has joined
    count: int  # the most messages it takes

    def wake(self) -> None: ...

    def is_late(self) -> bool:
        """Whether it was woken a while ago and has not looked for messages since."""


class Waiters:
    """A line of waiters. A waiter that is woken and takes nothing must pass the wake-up on to the next.

    A waiter that looks for messages and finds none returns to its old place in line. Until then it keeps its claim to
    ready messages, ahead of everyone behind it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: an abandoned task may leave the line at any moment
        self._line: list[Waiter] = []  # asleep
        self._tickets = count(1)
        self._on_the_way: dict[Waiter, None] = {}  # woken but not back yet, in the order they were woken
        self._late: list[Waiter] = []  # woken too long ago: their claims no longer count
        self._greedy = 0  # number of waiters in `standing` that want more than one message
        self.standing: list[Waiter] = []  # asleep or woken; never replaced, because the API objects share it
        self.turn = threading.Lock()  # held while a consumer checks what is left for it, and takes it

    def __bool__(self) -> bool:
        return bool(self._line)

    def __len__(self) -> int:
        return len(self._line)

    def wake(self, many: int = 1) -> None:
        """Wake the first waiters and take them out of the line."""
        with self._lock:
            first = self._line[:many]
            del self._line[:many]
            for waiter in first:
                self._on_the_way[waiter] = None
                waiter.wake()

    def wake_all(self) -> None:
        self.wake(len(self._line))

    def stand(self, waiter: Waiter) -> None:
        """Join the line at the end, or at the waiter's old place."""
        with self._lock:
            waiter.woken = False
            if not waiter.ticket:
                waiter.ticket = next(self._tickets)
            self._arrived(waiter)
            _insert(self._line, waiter)
            if _insert(self.standing, waiter):
                self._greedy += waiter.count != 1

    @contextlib.contextmanager
    def in_line(self, waiter: Waiter) -> Iterator[None]:
        """Wait in line during the block; if it raises, an unused wake-up goes to the next waiter."""
        self.stand(waiter)
        done = False
        try:
            yield
            done = True
        finally:
            with self._lock:
                self._arrived(waiter)
                _remove(self._line, waiter)
                if _remove(self.standing, waiter):
                    self._greedy -= waiter.count != 1
            if not done and waiter.woken:
                self.wake()

    def first(self) -> Waiter | None:
        """The first sleeping waiter."""
        with self._lock:
            return self._line[0] if self._line else None

    def is_first(self, waiter: Waiter | None) -> bool:
        """Whether nobody is ahead of it."""
        return self.standing[:1] == [waiter]

    def claims_before(self, waiter: Waiter | None) -> int:
        """Number of messages claimed by the waiters ahead of it (None: by all waiters).

        Late waiters, such as tasks of a blocked event loop, do not count. Thousands may be in line and each of them
        calls this, so it counts without looking at each one.
        """
        with self._lock:
            self._note_late()
            return self._claims(self.standing, waiter) - self._claims(self._late, waiter)

    def _claims(self, line: list[Waiter], waiter: Waiter | None) -> int:
        end = len(line) if waiter is None else bisect_left(line, waiter.ticket, key=_TICKET)
        return sum(map(_COUNT, line[:end])) if self._greedy else end

    def _note_late(self) -> None:
        """Move late waiters to `_late`, where they stay until they come back."""
        while self._on_the_way:
            waiter = next(iter(self._on_the_way))
            if not waiter.is_late():
                return  # nor are those woken after it
            del self._on_the_way[waiter]
            _insert(self._late, waiter)

    def _arrived(self, waiter: Waiter) -> None:
        if waiter in self._on_the_way:
            del self._on_the_way[waiter]
        elif self._late:
            _remove(self._late, waiter)


def _insert(line: list[Waiter], waiter: Waiter) -> bool:
    """Insert by ticket; False if it was already there."""
    at = bisect_left(line, waiter.ticket, key=_TICKET)
    if line[at : at + 1] == [waiter]:
        return False
    line.insert(at, waiter)
    return True


def _remove(line: list[Waiter], waiter: Waiter) -> bool:
    """Remove by ticket; False if it was not there."""
    at = bisect_left(line, waiter.ticket, key=_TICKET)
    if line[at : at + 1] != [waiter]:
        return False
    del line[at]
    return True


class _OnClock:
    """Common part of waiting threads and tasks."""

    def __init__(self, clock: Clock, count: int = 1) -> None:
        self._clock = clock
        self._woken_ns = 0
        self.woken = False
        self.ticket = 0
        self.count = count

    def is_late(self) -> bool:
        return self.woken and self._clock.monotonic_ns() - self._woken_ns > _LATE_NS


class ThreadWaiter(_OnClock):
    """A waiting thread."""

    def __init__(self, clock: Clock, count: int = 1) -> None:
        super().__init__(clock, count)
        self._event = threading.Event()

    def wake(self) -> None:
        self._woken_ns = self._clock.monotonic_ns()
        self.woken = True
        self._event.set()

    def wait(self, timeout_s: float | None) -> None:
        """Return when woken or after the timeout, or sometimes earlier."""
        self._clock.wait(self._event, timeout_s)
        self._event.clear()


class TaskWaiter(_OnClock):
    """A waiting task; `wake` may be called from any thread."""

    def __init__(self, clock: Clock, count: int = 1) -> None:
        super().__init__(clock, count)
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def wake(self) -> None:
        self._woken_ns = self._clock.monotonic_ns()
        self.woken = True
        try:
            here = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            here = False
        if here:  # call_soon_threadsafe costs several system calls
            self._event.set()
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the task with it
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self, timeout_s: float | None) -> None:
        await self._clock.wait_async(self._event, timeout_s)
        self._event.clear()
