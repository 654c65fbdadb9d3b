"""Running the handler for one message, in a thread or as a task, and settling the message by how it ended."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import SimpleQueue
from typing import Any, Final, Literal, Protocol

import msgspec

from holdfast.env import Clock
from holdfast.errors import InvalidRequest, LeaseLost
from holdfast.worker.sources import DEFER, Bridge, Reject, Retry, Settlement, WorkerQueue, is_wish, settlement_after

# Messages that a worker has in hand, and until when their handlers may run.


Claimant = Literal["handler", "control"]

# An async handler that was cancelled may tidy up for so long.
_TIDY_NS: Final = 5_000_000_000


class HandlerRun:
    """One message on its way through the handler. Whoever claims it first settles it: the handler's end, or control."""

    def __init__(self, message: Any, source: WorkerQueue, lane: Hashable) -> None:
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
        self._runs: set[HandlerRun] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def running(self) -> int:
        """How many handlers run."""
        return sum(run.began_ns is not None for run in self.all())

    def all(self) -> list[HandlerRun]:
        with self._lock:
            return list(self._runs)

    def add(self, run: HandlerRun) -> None:
        """It was taken."""
        with self._lock:
            self._runs.add(run)

    def begin(self, run: HandlerRun) -> bool:
        """Its handler begins; False where it is too late for that."""
        with self._lock:
            if self._closed:
                return False
            run.began_ns = now_ns = self._clock.monotonic_ns()
            if self._limit_ns is not None:
                run.deadline_ns = now_ns + self._limit_ns
            return True

    def remove(self, run: HandlerRun) -> bool:
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

    def overdue(self) -> list[HandlerRun]:
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


# Those who run handlers: threads for plain functions, tasks for async ones. Both begin what they are given at once.


class Crew(Protocol):
    """Who runs handlers."""

    def start(self, run: HandlerRun) -> None:
        """Run the handler soon."""

    def stop(self, run: HandlerRun) -> None:
        """Stop the handler, if it can be stopped."""

    def end(self) -> None:
        """Nothing more comes."""


class Threads:
    """As many threads as were ever needed at once. They do not keep the process alive: a handler may hang for ever."""

    def __init__(self, work: Callable[[HandlerRun], None], through: Callable[[HandlerRun], None]) -> None:
        self._work = work
        self._through = through
        self._lock = threading.Lock()
        self._idle = 0
        self._count = 0
        self._given: SimpleQueue[HandlerRun | None] = SimpleQueue()

    def start(self, run: HandlerRun) -> None:
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                self._count += 1
                threading.Thread(target=self._live, name=f"holdfast-handler-{self._count}", daemon=True).start()
        self._given.put(run)

    def stop(self, run: HandlerRun) -> None:
        """A thread cannot be stopped: it is left behind, and ends with its handler."""

    def end(self) -> None:
        for _ in range(self._count):
            self._given.put(None)

    def _live(self) -> None:
        while (run := self._given.get()) is not None:
            self._work(run)
            if run.abandoned:
                return  # another one is in its place
            with self._lock:
                self._idle += 1  # first: whoever takes the free slot finds this thread
            self._through(run)
            del run  # not while waiting for the next one: the message may have to be dropped


class Tasks:
    """A task for each handler that runs."""

    def __init__(
        self, work: Callable[[HandlerRun], Awaitable[None]], through: Callable[[HandlerRun], None], bridge: Bridge
    ) -> None:
        self._work = work
        self._through = through
        self._bridge = bridge

    def start(self, run: HandlerRun) -> None:
        self._bridge.loop.call_soon_threadsafe(self._begin, run)

    def stop(self, run: HandlerRun) -> None:
        self._bridge.loop.call_soon_threadsafe(self._cancel, run)

    def end(self) -> None:
        """There is nobody who waits."""

    def _begin(self, run: HandlerRun) -> None:
        run.task = self._bridge.loop.create_task(self._live(run))

    def _cancel(self, run: HandlerRun) -> None:
        # On the loop: between the handler's end and its claim nothing else happens there.
        if run.task is not None and (not run.claimed or run.abandoned):
            run.task.cancel()

    async def _live(self, run: HandlerRun) -> None:
        await self._work(run)
        self._through(run)


logger = logging.getLogger(__name__)


class Handling:
    """The handler, and all that is done around it."""

    def __init__(
        self,
        handler: Callable[[Any], Any],
        *,
        runs: Runs,
        counts: WorkerCounts,
        hooks: Hooks,
        bridge: Bridge,
        limit: str,
    ) -> None:
        self._handler = handler
        self._runs = runs
        self._counts = counts
        self._hooks = hooks
        self._bridge = bridge
        self._limit = limit

    def work(self, run: HandlerRun) -> None:
        """Handle a message in this thread."""
        if not self._runs.begin(run):
            self.give_back(run)
            return
        error = self._called(run.message)
        if not run.claim("handler"):
            return
        late = self.settle(run, settlement_after(error))
        for told in self._told(run, error, late):
            self._hooks.report(told, run.message, self._bridge)

    async def work_async(self, run: HandlerRun) -> None:
        """Handle a message in this task."""
        if not self._runs.begin(run):
            await self._give_back_async(run)
            return
        error = await self._awaited(run)
        if not run.claim("handler"):
            return
        late: Exception | None = None
        try:
            if not run.message.settled:
                await run.source.settle_async(run.message, settlement_after(error))
        except Exception as refused:
            late = refused
        for told in self._told(run, error, late):
            await self._hooks.report_async(told, run.message)

    def settle(self, run: HandlerRun, settlement: Settlement) -> Exception | None:
        """Settle a message that its handler did not settle itself; answers with what went wrong."""
        try:
            if not run.message.settled:
                run.source.settle(run.message, settlement)
        except Exception as refused:
            return refused
        return None

    def give_back(self, run: HandlerRun) -> None:
        """The handler was not begun: as if the message had not been touched."""
        if run.claim("handler"):
            self._counts.add("given_back")
            self._log_not_told(run, self.settle(run, DEFER))

    async def _give_back_async(self, run: HandlerRun) -> None:
        if run.claim("handler"):
            self._counts.add("given_back")
            try:
                await run.source.settle_async(run.message, DEFER)
            except Exception as refused:
                self._log_not_told(run, refused)

    def _called(self, message: Any) -> BaseException | None:
        """How the handler ended. Nothing that it raises may end the thread: `sys.exit` in a handler is a failure."""
        try:
            answer = self._handler(message)
            if inspect.iscoroutine(answer):
                answer.close()
                return TypeError("the handler is a plain function that returned a coroutine: make it async def")
        except BaseException as error:
            return error
        return None

    async def _awaited(self, run: HandlerRun) -> BaseException | None:
        try:
            await self._handler(run.message)
        except BaseException as error:
            return self.timeout() if run.overtime else error
        return None

    def timeout(self) -> TimeoutError:
        """What a message is nacked with whose handler had its time."""
        return TimeoutError(f"the handler ran for longer than its time limit of {self._limit}")

    def _told(self, run: HandlerRun, error: BaseException | None, late: Exception | None) -> list[BaseException]:
        """Count and log how it ended; answers with what the user is to be told of."""
        told: list[BaseException] = []
        if error is None:
            if late is None:
                self._counts.add("handled")
        elif isinstance(error, Reject):
            self._counts.add("rejected")
        elif isinstance(error, Retry):
            self._counts.add("retried")
        else:
            if not run.overtime:  # that was counted when its time was over
                self._counts.add("failed")
                logger.warning("handler failed", extra=facts(run), exc_info=error)
            told.append(error)
        if late is not None:
            self._log_not_told(run, late)
            told.append(late)
        assert not any(map(is_wish, told))
        return told

    def _log_not_told(self, run: HandlerRun, refused: Exception | None) -> None:
        if isinstance(refused, LeaseLost):
            self._counts.add("lost")
            logger.warning("lease lost before the handler ended: %s", refused, extra=facts(run))
        elif refused is not None:
            self._counts.add("unsettled")
            logger.error("message could not be settled, it will come again", extra=facts(run), exc_info=refused)


def facts(run: HandlerRun) -> dict[str, Any]:
    """Which message, for the log."""
    message = run.message
    return {"queue": str(run.lane), "id": message.id, "attempt": message.attempt}


# What the user wants to be told of. An error in a hook is told of, too, and never ends the worker.


class Hooks:
    """The functions of the user, plain or async."""

    def __init__(
        self,
        counts: WorkerCounts,
        on_start: Callable[[], Any] | None,
        on_stop: Callable[[], Any] | None,
        on_error: Callable[[BaseException, Any], Any] | None,
    ) -> None:
        self._counts = counts
        self._on_start = on_start
        self._on_stop = on_stop
        self._on_error = on_error

    def start(self, bridge: Bridge) -> None:
        """Raises what the hook raises: nothing may be taken before it went well."""
        try:
            if self._on_start is not None:
                bridge.wait(self._on_start())
        except Exception as error:
            self._failed("on_start", error)
            raise

    def stop(self, bridge: Bridge) -> bool:
        """Answers whether it went well."""
        try:
            if self._on_stop is not None:
                bridge.wait(self._on_stop())
        except Exception as error:
            self._failed("on_stop", error)
            self.report(error, None, bridge)
            return False
        return True

    def report(self, error: BaseException, message: Any, bridge: Bridge) -> None:
        """Tell of an error, from a thread."""
        try:
            if self._on_error is not None:
                bridge.wait(self._on_error(error, message))
        except Exception as failure:
            self._failed("on_error", failure)

    async def report_async(self, error: BaseException, message: Any) -> None:
        """The same from a task."""
        try:
            if self._on_error is not None:
                answer = self._on_error(error, message)
                if inspect.isawaitable(answer):
                    await answer
        except (Exception, asyncio.CancelledError) as failure:
            self._failed("on_error", failure)

    def _failed(self, name: str, error: BaseException) -> None:
        self._counts.add("hook_errors")
        logger.error("hook %s failed", name, exc_info=error)


# How a worker is, in numbers.


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


class WorkerCounts:
    """What was counted; any thread may add to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    def __getitem__(self, name: str) -> int:
        return self._counts[name]


# A small page for those who look after processes: GET /healthz says 200 or 503, and why, as JSON.


_HOST: Final = "127.0.0.1"


class HealthPage:
    """The page, on a port of this machine only, in threads of its own: whatever the handlers do, it answers."""

    def __init__(self, health: Callable[[], WorkerHealth], port: int) -> None:
        class Handler(_Handler):
            answer = staticmethod(health)

        if type(port) is not int or not 0 <= port <= 65_535:
            raise InvalidRequest(f"health_port={port!r} cannot be used: give a port, or 0 for any that is free")
        try:
            self._server = ThreadingHTTPServer((_HOST, port), Handler)
        except OSError as error:
            raise InvalidRequest(
                f"the health page cannot listen on {_HOST}:{port}: {error.strerror or error}; choose another port"
            ) from None
        self.port: int = self._server.server_address[1]
        threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="holdfast-worker-health", daemon=True
        ).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    answer: Callable[[], WorkerHealth]
    timeout = 5  # for those who connect and say nothing
    protocol_version = "HTTP/1.0"

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/healthz":
            self._send(404, b'{"error": {"code": "not_found", "message": "there is only /healthz here"}}')
            return
        health = self.answer()
        self._send(200 if health.ok else 503, msgspec.json.encode(health))

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """A line for each look would bury the others."""
