"""Consumers that wait for a message, first come, first served: threads and tasks alike."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import count
from operator import attrgetter
from typing import Final, Protocol

from holdfast.env import Clock

_TICKET: Final = attrgetter("ticket")


class Waiter(Protocol):
    """One who waits."""

    woken: bool
    ticket: int  # its place among those who wait; 0 before it has stood in line

    def wake(self) -> None: ...


class Waiters:
    """The line of those who wait. Whoever is woken and takes nothing must let the next one be woken.

    Who steps out to look, and comes back with nothing, stands again where it stood.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._line: list[Waiter] = []
        self._tickets = count(1)

    def __bool__(self) -> bool:
        return bool(self._line)

    def __len__(self) -> int:
        return len(self._line)

    def wake(self, many: int = 1) -> None:
        """Wake the first ones in line; each leaves it."""
        with self._lock:
            first, self._line = self._line[:many], self._line[many:]
            for waiter in first:
                waiter.wake()

    def wake_all(self) -> None:
        self.wake(len(self._line))

    @contextlib.contextmanager
    def in_line(self, waiter: Waiter) -> Iterator[None]:
        """Stand in line; afterwards a wake-up that was not used goes to the next one."""
        with self._lock:
            waiter.woken = False
            if not waiter.ticket:
                waiter.ticket = next(self._tickets)
            insort(self._line, waiter, key=_TICKET)
        try:
            yield
        except BaseException:
            if waiter.woken:
                self.wake()
            raise
        finally:
            with self._lock:
                at = bisect_left(self._line, waiter.ticket, key=_TICKET)
                if at < len(self._line) and self._line[at] is waiter:
                    del self._line[at]


class ThreadWaiter:
    """A thread that waits."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._event = threading.Event()
        self.woken = False
        self.ticket = 0

    def wake(self) -> None:
        self.woken = True
        self._event.set()

    def wait(self, timeout_s: float | None) -> None:
        """Return when woken, when the time is over, or now and then."""
        self._clock.wait(self._event, timeout_s)
        self._event.clear()


class TaskWaiter:
    """A task that waits; woken from any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self.woken = False
        self.ticket = 0

    def wake(self) -> None:
        self.woken = True
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits there any more
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self, timeout_s: float | None) -> None:
        await self._clock.wait_async(self._event, timeout_s)
        self._event.clear()
