"""Scans: calls that look through many messages, kept from taking the server's time from all others.

few at a time     on threads of their own (`scan_workers`), so that no other call waits for one of them
in turn           each caller's oldest first, one caller after the other, however many one of them has sent
with pauses       every few messages the interpreter is free, so that the event loop goes on at once
not without end   a page ends at `scan_messages` looked at, and says where to go on; longer work is done in
                  pieces, each of which stands in line again
for somebody      as soon as the caller is gone the scan ends, at the next message
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, TypeVar

from holdfast.env.world import checkpoints
from holdfast.errors import TooManyWaiters
from holdfast.local.listing import Mark

_Found = TypeVar("_Found")

# Of one caller, and of all together.
MOST_WAITING: Final = 32
_MOST_IN_ALL: Final = 16 * MOST_WAITING
# How many messages are looked at between two pauses, and how long those are: long enough for the loop to wake up.
_STRETCH: Final = 32
_PAUSE_S: Final = 0.00005


class Abandoned(BaseException):
    """Nobody waits for this scan any more. No error that anybody should catch on the way."""


class Full(Exception):
    """A scan has looked at as many messages as one may."""


class Scan:
    """One scan, seen from the thread that it runs on."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.looked = 0
        self.mark: Mark | None = None  # the last place that was looked at
        self.damaged = 0  # how many messages were left out because they are damaged
        self.abandoned = False
        self._steps = 0
        self._never = threading.Event()

    def look(self, partition: int, offset: int, due_ms: int = 0, number: int = 0) -> None:
        """The next message is about to be looked at."""
        if self.looked == self.most:
            raise Full
        self.looked += 1
        self.mark = Mark(partition, offset, due_ms, number)
        self.step()

    def lost(self, messages: int) -> None:
        """So many were damaged, and left out."""
        self.damaged += messages

    def step(self) -> None:
        """Some more work is about to be done."""
        if self.abandoned:
            raise Abandoned
        self._steps += 1
        if not self._steps % _STRETCH:
            self._never.wait(_PAUSE_S)

    def run(self, work: Callable[..., _Found], *arguments: Any) -> _Found:
        with checkpoints(self.step):
            self.step()
            return work(self, *arguments)


class Scans:
    """Who scans, and who waits for that. For the one event loop of a server."""

    def __init__(self, workers: int, messages: int) -> None:
        self.workers = workers
        self.messages = messages
        self.running = 0
        self.refused = 0
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by caller; the first one's turn is next
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="holdfast-scan")

    @property
    def waiting(self) -> int:
        """How many wait for their turn."""
        return sum(map(len, self._waiting.values()))

    async def run(self, caller: str, work: Callable[..., _Found], *arguments: Any) -> _Found:
        """What the work finds; it is called with a Scan, on a thread, when it is the caller's turn."""
        await self._turn(caller)
        scan = Scan(self.messages)
        loop = asyncio.get_running_loop()
        try:
            running: Future[_Found] = self._pool.submit(scan.run, work, *arguments)
        except BaseException:
            self._end()
            raise
        # Its place is free when its thread is, and not already when nobody waits for it any more.
        running.add_done_callback(lambda _: _soon(loop, self._end))
        try:
            return await asyncio.wrap_future(running)
        finally:
            scan.abandoned = True  # has no effect where it is over
            del running  # its error keeps this frame, and with it what was looked at

    async def _turn(self, caller: str) -> None:
        if self.running < self.workers and not self._waiting:
            self.running += 1
            return
        own = len(self._waiting.get(caller, ()))
        if own >= MOST_WAITING or self.waiting >= _MOST_IN_ALL:
            self.refused += 1
            raise TooManyWaiters(
                f"{self.running} searches run and {self.waiting} wait, {own} of them yours, which is the limit; "
                "nothing was looked at. Try again in a second, with fewer at a time"
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._end()  # it was its turn at this moment
            else:
                self._leave(caller, turn)
            raise

    def _leave(self, caller: str, turn: asyncio.Future[None]) -> None:
        mine = self._waiting.get(caller)
        if mine is not None and turn in mine:
            mine.remove(turn)
            if not mine:
                del self._waiting[caller]

    def _end(self) -> None:
        """A thread is free: the next caller's oldest scan is next."""
        while self._waiting:
            caller = next(iter(self._waiting))
            mine = self._waiting.pop(caller)
            turn = mine.popleft()
            if mine:
                self._waiting[caller] = mine  # behind all others
            if not turn.done():
                turn.set_result(None)
                return
        self.running -= 1

    async def close(self) -> None:
        """Take nothing more, and wait until nothing is looked at."""
        await asyncio.to_thread(self._pool.shutdown, wait=True, cancel_futures=True)


def _soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(call)
