"""Fairness: a caller that floods the server with calls slows down only itself.

All calls run on one event loop, and work that waits for the disk runs on a few threads. Both serve calls in order of
arrival, so a caller with sixty connections would be served sixty times before the next one. Hence three rules for
callers with a token:

- In one iteration of the loop, only a few calls of a caller start; the rest start in later iterations (`CallTurns`). A
  call that has started is never held up, so that many calls can still share one sync of the disk.
- A long call works in slices and yields in between. In one iteration of the loop, one slice runs for each caller,
  however many such calls it makes (`other_turns`).
- Only a few threads work for one caller at a time; its other work waits in a queue (`FairThreads`). That leaves
  threads, and the interpreter lock, to other callers.

Work that is long to compute runs in a `Pool`, and searches through many messages run as `Scans`.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

from holdfast.env.threads import DaemonThreads
from holdfast.env.world import Wanted
from holdfast.errors import TooManyWaiters
from holdfast.local.listing import Mark
from holdfast.local.search import Full

CALLER: Final[ContextVar[str | None]] = ContextVar("caller", default=None)  # the caller that the current task works for

_AT_ONCE: Final = 3
_THREADS_EACH: Final = 2

_Result = TypeVar("_Result")
_Work: TypeAlias = tuple[Future[Any], Callable[[], Any]]


class CallTurns:
    """Limits how many calls of one caller start in one iteration of the event loop."""

    def __init__(self, at_once: int = _AT_ONCE) -> None:
        self._at_once = at_once
        self._begun: dict[str, int] = {}
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}
        self._round_is_due = False

    def begin(self, caller: str) -> asyncio.Future[None] | None:
        """A future to wait for before the call begins; None if it may begin now."""
        if self.try_begin(caller):
            return None
        turn = asyncio.get_running_loop().create_future()
        self._lines.setdefault(caller, deque()).append(turn)
        return turn

    def try_begin(self, caller: str) -> bool:
        """Whether the call may begin now. If not, it is not in line either."""
        if not self._round_is_due:
            self._round_is_due = True
            asyncio.get_running_loop().call_soon(self._next_round)
        begun = self._begun.get(caller, 0)
        if begun >= self._at_once or caller in self._lines:
            return False
        self._begun[caller] = begun + 1
        return True

    def _next_round(self) -> None:
        self._begun.clear()
        for caller, line in list(self._lines.items()):
            begun = 0
            while line and begun < self._at_once:
                turn = line.popleft()
                if not turn.done():  # the client may have disconnected
                    turn.set_result(None)
                    begun += 1
            self._begun[caller] = begun
            if not line:
                del self._lines[caller]
        self._round_is_due = bool(self._begun)
        if self._round_is_due:
            asyncio.get_running_loop().call_soon(self._next_round)


class _Slices:
    """For each caller, its calls that wait to run their next slice."""

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
            if not turn.done():  # the client may have disconnected
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


class FairThreads(DaemonThreads):
    """A thread pool in which one caller has a few threads at a time. Work without a caller is not limited."""

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
        # A list that the work empties: a future keeps its callbacks, which would keep an error and the request body.
        work = [given]

        def end(begun: Future[None]) -> None:
            # Cancelled before it started: the server is stopping. Nothing can be started from here, because the
            # executor holds its lock during shutdown.
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
        """Submit the caller's next work, behind that of other callers."""
        while (first := self._next(caller)) is not None:
            try:
                self._begin(caller, first)
            except RuntimeError:  # the server is stopping
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
    """Do the work, and remove it from the list: an error keeps this frame and its callers' frames alive."""
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


# Threads for long computations, so that the event loop stays free for other calls.
#
# They are separate from the threads that wait for the disk, so neither waits for the other. Python switches threads
# between bytecodes, but not inside one long call of a C function. So input is counted before it is decoded, and long
# output is encoded in parts.

_THREADS: Final = 2
_THREADS_EACH_POOL: Final = 1  # leaves one thread to other callers


class Job:
    """One piece of work, and whether its caller still waits for it."""

    __slots__ = ("unwanted",)

    def __init__(self) -> None:
        self.unwanted = False

    def check(self) -> None:
        """Raise Unwanted if the caller is gone. Long work calls this now and then."""
        if self.unwanted:
            raise Unwanted


class Unwanted(Exception):
    """The caller no longer waits for the result."""


class Pool:
    """Runs work on two threads, each for a different caller. Other work waits in line."""

    def __init__(self) -> None:
        self._threads = FairThreads(_THREADS_EACH_POOL, _THREADS, "holdfast-bodies")
        self.waiting = 0  # calls that wait for a result

    async def run(self, work: Callable[..., _Result], *arguments: Any) -> _Result:
        """Call `work` with a Job and the arguments on a thread, and return its result."""
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
            del running  # its error keeps this frame alive, and with it the arguments of the work

    def close(self) -> None:
        """Accept no more work. Work that has started is finished."""
        self._threads.shutdown(wait=False, cancel_futures=True)


# Scans: calls that search many messages, limited so that they do not slow down all others.
#
# few at a time     on separate threads (`scan_workers`), so that no other call waits for them
# in turn           callers take turns, each with its oldest scan first, however many one of them has sent
# with pauses       every few messages the thread releases the interpreter lock to the event loop
# bounded           a page ends after `scan_messages` messages and says where to continue; longer work is done in
#                   pieces, each of which waits in line again
# cancelled         a scan ends at the next message once its caller is gone

_Found = TypeVar("_Found")

MOST_WAITING: Final = 32  # scans of one caller
_MOST_IN_ALL: Final = 16 * MOST_WAITING
_STRETCH: Final = 32  # messages between two pauses
_PAUSE_S: Final = 0.00005  # long enough for the event loop to wake up


class Scan(Wanted):
    """One scan, seen from the thread that it runs on."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.looked = 0
        self.mark: Mark | None = None  # the last message that was looked at
        self.damaged = 0  # messages skipped because they are damaged
        self._steps = 0
        self._never = threading.Event()

    def look(self, partition: int, offset: int, due_ms: int = 0, number: int = 0) -> None:
        """Call this before looking at a message. Raises Full if the scan must end here."""
        if self.looked == self.most:
            raise Full
        self.looked += 1
        self.mark = Mark(partition, offset, due_ms, number)
        self.step()

    def lost(self, messages: int) -> None:
        """Count messages that were skipped because they are damaged."""
        self.damaged += messages

    def step(self) -> None:
        """Call this before each piece of work; pauses now and then."""
        super().step()
        self._steps += 1
        if not self._steps % _STRETCH:
            self._never.wait(_PAUSE_S)


class Scans:
    """The scans that run and those that wait for a thread. To be used from the server's event loop only."""

    def __init__(self, workers: int, messages: int) -> None:
        self.workers = workers
        self.messages = messages
        self.running = 0
        self.refused = 0
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by caller; the first caller is next
        self._pool = DaemonThreads(workers, "holdfast-scan")

    @property
    def waiting(self) -> int:
        """The number of scans that wait for a thread."""
        return sum(map(len, self._waiting.values()))

    async def run(self, caller: str, work: Callable[..., _Found], *arguments: Any) -> _Found:
        """Call `work` with a Scan and the arguments on a thread, when it is the caller's turn; return its result."""
        await self._turn(caller)
        scan = Scan(self.messages)
        loop = asyncio.get_running_loop()
        try:
            running: Future[_Found] = self._pool.submit(scan.run, partial(work, scan, *arguments))
        except BaseException:
            self._end()
            raise
        # The place is free only when the thread is, not as soon as the caller stops waiting.
        running.add_done_callback(lambda _: _soon(loop, self._end))
        try:
            return await asyncio.wrap_future(running)
        finally:
            scan.abandoned = True  # has no effect if it has ended
            del running  # its error keeps this frame alive, and with it the messages

    async def _turn(self, caller: str) -> None:
        if self.running < self.workers and not self._waiting:
            self.running += 1
            return
        own = len(self._waiting.get(caller, ()))
        if own >= MOST_WAITING or self.waiting >= _MOST_IN_ALL:
            self.refused += 1
            raise TooManyWaiters(
                f"{self.running} searches are running and {self.waiting} are waiting, {own} of them yours, which is "
                "the limit; nothing was searched. Try again in a second, with fewer at a time"
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._end()  # cancelled just after its turn came
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
        """A thread is free: start the oldest scan of the next caller."""
        while self._waiting:
            caller = next(iter(self._waiting))
            mine = self._waiting.pop(caller)
            turn = mine.popleft()
            if mine:
                self._waiting[caller] = mine  # behind all other callers
            if not turn.done():
                turn.set_result(None)
                return
        self.running -= 1

    async def close(self) -> None:
        """Accept no more scans, and wait for those that run."""
        await asyncio.to_thread(self._pool.shutdown, wait=True, cancel_futures=True)


def _soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(call)
