"""Fairness: a caller that floods the server with calls slows down only itself.

All calls run on one event loop, and what waits for the disk on a few threads. Both serve whoever comes first, so a
caller with sixty connections would be served sixty times before the next one. Hence three rules for callers with a
token:

- In one round of the loop so many calls of a caller begin; more of them begin in the next rounds (`CallTurns`). A call
  that has begun is never held up, so that many may still wait for one sync of the disk together.
- A call with much to do does it in slices, and gives the others their turn in between. In one round of the loop one
  slice is done for a caller, however many such calls it makes (`other_turns`).
- So many threads work for one caller at a time; more of its work stands in a line of its own (`FairThreads`). Some
  threads are always left to others, and so is the interpreter, which one thread has at a time.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

from holdfast.env.world import Wanted
from holdfast.errors import TooManyWaiters
from holdfast.local.listing import Mark

CALLER: Final[ContextVar[str | None]] = ContextVar("caller", default=None)  # for whom this is done

_AT_ONCE: Final = 3
_THREADS_EACH: Final = 2

_Result = TypeVar("_Result")
_Work: TypeAlias = tuple[Future[Any], Callable[[], Any]]


class CallTurns:
    """Which calls begin in this round of the event loop."""

    def __init__(self, at_once: int = _AT_ONCE) -> None:
        self._at_once = at_once
        self._begun: dict[str, int] = {}
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}
        self._round_is_due = False

    def begin(self, caller: str) -> asyncio.Future[None] | None:
        """A future to wait for before the call begins; None if it may begin now."""
        if not self._round_is_due:
            self._round_is_due = True
            asyncio.get_running_loop().call_soon(self._next_round)
        begun = self._begun.get(caller, 0)
        if begun < self._at_once and caller not in self._lines:
            self._begun[caller] = begun + 1
            return None
        turn = asyncio.get_running_loop().create_future()
        self._lines.setdefault(caller, deque()).append(turn)
        return turn

    def _next_round(self) -> None:
        self._begun.clear()
        for caller, line in list(self._lines.items()):
            begun = 0
            while line and begun < self._at_once:
                turn = line.popleft()
                if not turn.done():  # its client may be gone
                    turn.set_result(None)
                    begun += 1
            self._begun[caller] = begun
            if not line:
                del self._lines[caller]
        self._round_is_due = bool(self._begun)
        if self._round_is_due:
            asyncio.get_running_loop().call_soon(self._next_round)


class _Slices:
    """Whose slice is next, of one caller's calls that have given others their turn."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}

    def line_up(self, caller: str) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        if caller not in self._lines:
            self._lines[caller] = deque()
            loop.call_soon(self._next, caller)
        self._lines[caller].append(turn)
        return turn

    def _next(self, caller: str) -> None:
        line = self._lines[caller]
        while line:
            turn = line.popleft()
            if not turn.done():  # its client may be gone
                turn.set_result(None)
                break
        if line:
            asyncio.get_running_loop().call_soon(self._next, caller)
        else:
            del self._lines[caller]


_slices: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, _Slices]] = WeakKeyDictionary()


async def other_turns() -> None:
    """Give other calls a turn before the next slice of this one."""
    caller = CALLER.get()
    if caller is None:
        await asyncio.sleep(0)
        return
    loop = asyncio.get_running_loop()
    slices = _slices.get(loop)
    if slices is None:
        slices = _slices[loop] = _Slices()
    await slices.line_up(caller)


class FairThreads(ThreadPoolExecutor):
    """Threads of which one caller has a few at a time. Work that is nobody's is done as it comes."""

    def __init__(self, each: int = _THREADS_EACH, threads: int | None = None, name: str = "holdfast") -> None:
        super().__init__(threads, name)
        self._each = each
        self._line_lock = threading.Lock()
        self._running: dict[str, int] = {}
        self._lines: dict[str, deque[_Work]] = {}

    def submit(self, fn: Callable[..., _Result], /, *args: Any, **kwargs: Any) -> Future[_Result]:
        caller = CALLER.get()
        if caller is None:
            return super().submit(fn, *args, **kwargs)
        future: Future[_Result] = Future()
        with self._line_lock:
            if self._running.get(caller, 0) >= self._each:
                self._lines.setdefault(caller, deque()).append((future, lambda: fn(*args, **kwargs)))
                return future
            self._running[caller] = self._running.get(caller, 0) + 1
        try:
            self._begin(caller, (future, lambda: fn(*args, **kwargs)))
        except BaseException:
            self._finished(caller)
            raise
        return future

    def _begin(self, caller: str, given: _Work) -> None:
        # Emptied by the work: a future remembers its callbacks, and would hold an error and the body it was made of.
        work = [given]

        def end(begun: Future[None]) -> None:
            # The server ends, and it was not begun. Nothing can be begun from here: whoever ends holds a lock.
            if begun.cancelled():
                with self._line_lock:
                    line = self._lines.pop(caller, ())
                for future, _ in (*work, *line):
                    future.cancel()

        super().submit(self._work, caller, work).add_done_callback(end)

    def _work(self, caller: str, given: list[_Work]) -> None:
        try:
            _do(given)
        finally:
            self._finished(caller)

    def _finished(self, caller: str) -> None:
        """A thread has done something for the caller: it may do the next thing, behind what others want."""
        while (first := self._next(caller)) is not None:
            try:
                self._begin(caller, first)
            except RuntimeError:  # the server ends
                first[0].cancel()
            else:
                return

    def _next(self, caller: str) -> _Work | None:
        with self._line_lock:
            line = self._lines.get(caller)
            if line:
                first = line.popleft()
                if not line:
                    del self._lines[caller]
                return first
            self._running[caller] -= 1
            if not self._running[caller]:
                del self._running[caller]
            return None


def _do(given: list[_Work]) -> None:
    """Do the work, and take it out of what was given: an error keeps this frame and those that called it."""
    future, work = given.pop()
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:
        future.set_exception(error)
        del future, work
    else:
        future.set_result(result)


# Threads for what takes long to compute: the event loop, and with it every other caller, has its turn meanwhile.
#
# They are few, and its own: whoever waits for the disk on a thread waits for none of these. What runs here gives up the
# interpreter to whoever wants it, as long as no single call of it takes long: so whatever is decoded is counted first,
# and what is long is encoded part by part.


_THREADS: Final = 2
_THREADS_EACH_POOL: Final = 1  # so that one is left for others, and each caller's work goes by turns


class Job:
    """One piece of work, and whether anybody still waits for it."""

    __slots__ = ("unwanted",)

    def __init__(self) -> None:
        self.unwanted = False

    def check(self) -> None:
        """To be called now and then by what takes long: it ends here when the caller is gone."""
        if self.unwanted:
            raise Unwanted


class Unwanted(Exception):
    """Nobody waits for the result any more."""


class Pool:
    """Runs work beside the event loop, two at a time and of two callers; what else there is waits in line."""

    def __init__(self) -> None:
        self._threads = FairThreads(_THREADS_EACH_POOL, _THREADS, "holdfast-bodies")
        self.waiting = 0  # how many wait for what they gave it

    async def run(self, work: Callable[..., _Result], *arguments: Any) -> _Result:
        """What the work answers; its first argument is a Job."""
        job = Job()
        self.waiting += 1
        running = asyncio.get_running_loop().run_in_executor(self._threads, work, job, *arguments)
        try:
            return await running
        except asyncio.CancelledError:
            job.unwanted = True
            raise
        finally:
            self.waiting -= 1
            del running  # its error keeps this frame, and with it what the work was given

    def close(self) -> None:
        """Take no more work; what has begun comes to its end."""
        self._threads.shutdown(wait=False, cancel_futures=True)


# Scans: calls that look through many messages, kept from taking the server's time from all others.
#
# few at a time     on threads of their own (`scan_workers`), so that no other call waits for one of them
# in turn           each caller's oldest first, one caller after the other, however many one of them has sent
# with pauses       every few messages the interpreter is free, so that the event loop goes on at once
# not without end   a page ends at `scan_messages` looked at, and says where to go on; longer work is done in
#                   pieces, each of which stands in line again
# for somebody      as soon as the caller is gone the scan ends, at the next message


_Found = TypeVar("_Found")

# Of one caller, and of all together.
MOST_WAITING: Final = 32
_MOST_IN_ALL: Final = 16 * MOST_WAITING
# How many messages are looked at between two pauses, and how long those are: long enough for the loop to wake up.
_STRETCH: Final = 32
_PAUSE_S: Final = 0.00005


class Full(Exception):
    """A scan has looked at as many messages as one may."""


class Scan(Wanted):
    """One scan, seen from the thread that it runs on."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.looked = 0
        self.mark: Mark | None = None  # the last place that was looked at
        self.damaged = 0  # how many messages were left out because they are damaged
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
        super().step()
        self._steps += 1
        if not self._steps % _STRETCH:
            self._never.wait(_PAUSE_S)


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
            running: Future[_Found] = self._pool.submit(scan.run, partial(work, scan, *arguments))
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
