"""Consumers that wait for a message, first come, first served: threads and tasks alike."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from bisect import bisect_left
from collections.abc import Iterator
from itertools import count
from operator import attrgetter
from typing import Final, Protocol

from holdfast.env import Clock

_TICKET: Final = attrgetter("ticket")
_COUNT: Final = attrgetter("count")
_LATE_NS: Final = 1_000_000_000


class Waiter(Protocol):
    """One who waits."""

    woken: bool
    ticket: int  # its place among those who wait; 0 before it has stood in line
    count: int  # how many messages it takes at most

    def wake(self) -> None: ...

    def is_late(self) -> bool:
        """Whether it was woken a while ago and has not come since."""


class Waiters:
    """The line of those who wait. Whoever is woken and takes nothing must let the next one be woken.

    Who steps out to look, and comes back with nothing, stands again where it stood. All the while it has a claim to
    what is ready, before everybody behind it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a task that is given up leaves the line, and that may be at any moment
        self._line: list[Waiter] = []  # those asleep
        self._tickets = count(1)
        self._on_the_way: dict[Waiter, None] = {}  # woken and not come since, in the order of their waking
        self._late: list[Waiter] = []  # those of them whose claims count for nothing any more
        self._greedy = 0  # how many of those who stand ask for more than one message
        # These, and those who were woken and have not looked yet. It is always the same list: faces look at it.
        self.standing: list[Waiter] = []
        self.turn = threading.Lock()  # held by who looks whether something is left for it, and takes it

    def __bool__(self) -> bool:
        return bool(self._line)

    def __len__(self) -> int:
        return len(self._line)

    def wake(self, many: int = 1) -> None:
        """Wake the first ones in line; each leaves it."""
        with self._lock:
            first = self._line[:many]
            del self._line[:many]
            for waiter in first:
                self._on_the_way[waiter] = None
                waiter.wake()

    def wake_all(self) -> None:
        self.wake(len(self._line))

    def stand(self, waiter: Waiter) -> None:
        """Stand in line, as the last one or where it stood before."""
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
        """Stand in line; afterwards a wake-up that was not used goes to the next one."""
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
        """The first of those asleep."""
        with self._lock:
            return self._line[0] if self._line else None

    def is_first(self, waiter: Waiter | None) -> bool:
        """Whether nobody stands before it."""
        return self.standing[:1] == [waiter]

    def claims_before(self, waiter: Waiter | None) -> int:
        """How many messages those may take who stand before it (None: before whoever is not in line).

        Nobody waits for one who does not come, such as a task whose event loop stands still. Thousands may stand
        here, and each of them asks: they are counted, not looked at one by one.
        """
        with self._lock:
            self._note_late()
            return self._claims(self.standing, waiter) - self._claims(self._late, waiter)

    def _claims(self, line: list[Waiter], waiter: Waiter | None) -> int:
        end = len(line) if waiter is None else bisect_left(line, waiter.ticket, key=_TICKET)
        return sum(map(_COUNT, line[:end])) if self._greedy else end

    def _note_late(self) -> None:
        """Whoever is late stays so until it comes: each is noted once."""
        while self._on_the_way:
            waiter = next(iter(self._on_the_way))
            if not waiter.is_late():
                return  # nor is anybody who was woken after it
            del self._on_the_way[waiter]
            _insert(self._late, waiter)

    def _arrived(self, waiter: Waiter) -> None:
        if waiter in self._on_the_way:
            del self._on_the_way[waiter]
        elif self._late:
            _remove(self._late, waiter)


def _insert(line: list[Waiter], waiter: Waiter) -> bool:
    """Whether it was not there before."""
    at = bisect_left(line, waiter.ticket, key=_TICKET)
    if line[at : at + 1] == [waiter]:
        return False
    line.insert(at, waiter)
    return True


def _remove(line: list[Waiter], waiter: Waiter) -> bool:
    """Whether it was there."""
    at = bisect_left(line, waiter.ticket, key=_TICKET)
    if line[at : at + 1] != [waiter]:
        return False
    del line[at]
    return True


class _OnClock:
    """What threads and tasks that wait have in common."""

    def __init__(self, clock: Clock, count: int = 1) -> None:
        self._clock = clock
        self._woken_ns = 0
        self.woken = False
        self.ticket = 0
        self.count = count

    def is_late(self) -> bool:
        return self.woken and self._clock.monotonic_ns() - self._woken_ns > _LATE_NS


class ThreadWaiter(_OnClock):
    """A thread that waits."""

    def __init__(self, clock: Clock, count: int = 1) -> None:
        super().__init__(clock, count)
        self._event = threading.Event()

    def wake(self) -> None:
        self._woken_ns = self._clock.monotonic_ns()
        self.woken = True
        self._event.set()

    def wait(self, timeout_s: float | None) -> None:
        """Return when woken, when the time is over, or now and then."""
        self._clock.wait(self._event, timeout_s)
        self._event.clear()


class TaskWaiter(_OnClock):
    """A task that waits; woken from any thread."""

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
        if here:  # a call to the loop from outside takes several system calls
            self._event.set()
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits there any more
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self, timeout_s: float | None) -> None:
        await self._clock.wait_async(self._event, timeout_s)
        self._event.clear()
