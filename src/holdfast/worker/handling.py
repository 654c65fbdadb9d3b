"""Takes messages from a queue, runs the handler for each, and settles the message by how the handler ended."""

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

from holdfast.api import port_of
from holdfast.api.drafts import Seconds
from holdfast.env import Clock, World
from holdfast.errors import Closed, HoldfastError, InvalidRequest, LeaseLost, UnknownGroup, UnknownTopic
from holdfast.worker.sources import (
    DEFER,
    Backoff,
    Bridge,
    QueueOrigin,
    Reject,
    Retry,
    Settlement,
    Slots,
    WorkerQueue,
    settlement_after,
)

Claimant = Literal["handler", "control"]

# How long a cancelled async handler may take to clean up.
_TIDY_NS: Final = 5_000_000_000


class HandlerRun:
    """One message being handled. Its handler and control may both want to settle it: the first to claim it does."""

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
        """Claim the right to settle the message; returns False if the other side has it."""
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
        """Whether control gave up waiting for the handler."""
        return self._claimed_by == "control"


class Runs:
    """The messages a worker has received and not finished, and the time limits of their handlers."""

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
        """Number of handlers that are running."""
        return sum(run.began_ns is not None for run in self.all())

    def all(self) -> list[HandlerRun]:
        with self._lock:
            return list(self._runs)

    def add(self, run: HandlerRun) -> None:
        """Register a message that was just received."""
        with self._lock:
            self._runs.add(run)

    def begin(self, run: HandlerRun) -> bool:
        """Start the handler's time limit; returns False if the worker is ending and the handler must not start."""
        with self._lock:
            if self._closed:
                return False
            run.began_ns = now_ns = self._clock.monotonic_ns()
            if self._limit_ns is not None:
                run.deadline_ns = now_ns + self._limit_ns
            return True

    def remove(self, run: HandlerRun) -> bool:
        """Forget a run that is over; returns False if it was already removed."""
        with self._lock:
            if run not in self._runs:
                return False
            self._runs.remove(run)
            last = self._closed and not self._runs
        if last:
            self._wake()
        return True

    def close(self) -> None:
        """Let no more handlers start."""
        with self._lock:
            self._closed = True

    def overdue(self) -> list[HandlerRun]:
        """Return the runs past their deadline. A task gets one extension to clean up after it was cancelled."""
        now_ns = self._clock.monotonic_ns()
        found = []
        for run in self.all():
            if run.deadline_ns is not None and run.deadline_ns <= now_ns:
                run.deadline_ns = now_ns + _TIDY_NS if run.task is not None and not run.overtime else None
                found.append(run)
        return found

    def next_s(self) -> float | None:
        """Seconds until the next deadline can pass; None without a time limit.

        Handlers that start in the meantime have later deadlines, so it is enough to look again then.
        """
        if self._limit_ns is None:
            return None
        now_ns = self._clock.monotonic_ns()
        deadlines = [run.deadline_ns for run in self.all() if run.deadline_ns is not None]
        return max(0, min(deadlines, default=now_ns + self._limit_ns) - now_ns) / 1e9


class Crew(Protocol):
    """Runs handlers: plain functions in threads, async ones as tasks."""

    def start(self, run: HandlerRun) -> None:
        """Run the handler soon."""

    def stop(self, run: HandlerRun) -> None:
        """Stop the handler, if it can be stopped."""

    def end(self) -> None:
        """Let the threads end: nothing more will be started."""


class Threads:
    """Runs handlers in threads, as many as were ever needed at once.

    They are daemon threads: a handler may hang forever, and must not keep the process alive.
    """

    def __init__(self, work: Callable[[HandlerRun], None], on_end: Callable[[HandlerRun], None]) -> None:
        self._work = work
        self._on_end = on_end
        self._lock = threading.Lock()
        self._idle = 0
        self._count = 0
        self._pending: SimpleQueue[HandlerRun | None] = SimpleQueue()

    def start(self, run: HandlerRun) -> None:
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                self._count += 1
                threading.Thread(target=self._live, name=f"holdfast-handler-{self._count}", daemon=True).start()
        self._pending.put(run)

    def stop(self, run: HandlerRun) -> None:
        """Do nothing: a thread cannot be stopped. It is left behind and ends with its handler."""

    def end(self) -> None:
        for _ in range(self._count):
            self._pending.put(None)

    def _live(self) -> None:
        while (run := self._pending.get()) is not None:
            self._work(run)
            if run.abandoned:
                return  # another thread has taken its place
            with self._lock:
                self._idle += 1  # before the slot is freed, so that its next message reuses this thread
            self._on_end(run)
            del run  # do not keep the message alive while waiting: dropping it may have to return it to the queue


class Tasks:
    """Runs each handler as a task."""

    def __init__(
        self, work: Callable[[HandlerRun], Awaitable[None]], on_end: Callable[[HandlerRun], None], bridge: Bridge
    ) -> None:
        self._work = work
        self._on_end = on_end
        self._bridge = bridge

    def start(self, run: HandlerRun) -> None:
        self._bridge.loop.call_soon_threadsafe(self._begin, run)

    def stop(self, run: HandlerRun) -> None:
        self._bridge.loop.call_soon_threadsafe(self._cancel, run)

    def end(self) -> None:
        """Do nothing: there are no idle threads."""

    def _begin(self, run: HandlerRun) -> None:
        run.task = self._bridge.loop.create_task(self._live(run))

    def _cancel(self, run: HandlerRun) -> None:
        # On the loop nothing can run between a handler's end and its claim, so a settling task is never cancelled.
        if run.task is not None and (not run.claimed or run.abandoned):
            run.task.cancel()

    async def _live(self, run: HandlerRun) -> None:
        await self._work(run)
        self._on_end(run)


logger = logging.getLogger(__name__)


class Handling:
    """Runs the user's handler and settles its message."""

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
        for reported in self._record_outcome(run, error, late):
            self._hooks.report(reported, run.message, self._bridge)

    async def work_async(self, run: HandlerRun) -> None:
        """Async version of `work`."""
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
        for reported in self._record_outcome(run, error, late):
            await self._hooks.report_async(reported, run.message)

    def settle(self, run: HandlerRun, settlement: Settlement) -> Exception | None:
        """Settle the message unless the handler already did; returns the error if that failed."""
        try:
            if not run.message.settled:
                run.source.settle(run.message, settlement)
        except Exception as refused:
            return refused
        return None

    def give_back(self, run: HandlerRun) -> None:
        """Return a message whose handler was not started, without counting an attempt."""
        if run.claim("handler"):
            self._counts.add("given_back")
            self._log_unsettled(run, self.settle(run, DEFER))

    async def _give_back_async(self, run: HandlerRun) -> None:
        if run.claim("handler"):
            self._counts.add("given_back")
            try:
                await run.source.settle_async(run.message, DEFER)
            except Exception as refused:
                self._log_unsettled(run, refused)

    def _called(self, message: Any) -> BaseException | None:
        """Run the handler and return its error. Nothing may end the thread: `sys.exit` in a handler is a failure."""
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
        """The error that a message is nacked with after its time limit."""
        return TimeoutError(f"the handler ran for longer than its time limit of {self._limit}")

    def _record_outcome(
        self, run: HandlerRun, error: BaseException | None, late: Exception | None
    ) -> list[BaseException]:
        """Count and log how a handler ended; returns the errors to report to the user's `on_error`."""
        reported: list[BaseException] = []
        if error is None:
            if late is None:
                self._counts.add("handled")
        elif isinstance(error, Reject):
            self._counts.add("rejected")
        elif isinstance(error, Retry):
            self._counts.add("retried")
        else:
            if not run.overtime:  # else it was counted when its time limit passed
                self._counts.add("failed")
                logger.warning("handler failed", extra=facts(run), exc_info=error)
            reported.append(error)
        if late is not None:
            self._log_unsettled(run, late)
            reported.append(late)
        return reported

    def _log_unsettled(self, run: HandlerRun, refused: Exception | None) -> None:
        if isinstance(refused, LeaseLost):
            self._counts.add("lost")
            logger.warning("lease lost before the handler finished: %s", refused, extra=facts(run))
        elif refused is not None:
            self._counts.add("unsettled")
            logger.error("message could not be settled and will be redelivered", extra=facts(run), exc_info=refused)


def facts(run: HandlerRun) -> dict[str, Any]:
    """Identify the message in log records."""
    message = run.message
    return {"queue": str(run.lane), "id": message.id, "attempt": message.attempt}


def unexpected(error: Exception) -> Exception | None:
    """Return the error if its traceback is worth logging: one of ours says all in its message."""
    return None if isinstance(error, HoldfastError) else error


_LOOK_FOR_QUEUE_S: Final = 5.0  # the longest pause between two looks for a queue that does not exist yet


class WorkerLane:
    """Receives from one queue whenever slots are free, and retries after errors.

    Calls `start_run` for each message, `failed` for each error it recovers from, and `broken` for one that it cannot.
    """

    def __init__(
        self,
        origin: QueueOrigin,
        *,
        world: World,
        bridge: Bridge,
        poll_s: float,
        lease: Seconds | None,
        holder: str | None,
        alone: bool,
        start_run: Callable[[HandlerRun], None],
        failed: Callable[[Exception], None],
        broken: Callable[[Exception], None],
    ) -> None:
        self._origin = origin
        self._clock = world.clock
        self._bridge = bridge
        self._poll_s = poll_s
        self._lease = lease
        self._holder = holder
        self._alone = alone
        self._start_run = start_run
        self._failed = failed
        self._broken = broken
        self._backoff = Backoff(world.ids)
        self._missing = Backoff(world.ids, _LOOK_FOR_QUEUE_S)
        self._reported_missing = False
        self._stopping = threading.Event()
        self._source: WorkerQueue | None = None
        self._answered_ns = self._clock.monotonic_ns()
        self._asking_since_ns: int | None = self._answered_ns
        self._thread = threading.Thread(target=self._live, name=f"holdfast-lane-{self}", daemon=True)

    def __str__(self) -> str:
        return self._origin.name

    def start(self, slots: Slots) -> None:
        """Start receiving."""
        self._slots = slots
        self._thread.start()

    def stop(self) -> None:
        """Stop receiving. Messages that arrive in a call under way are given back."""
        self._stopping.set()

    def join(self, timeout_s: float) -> None:
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def close(self) -> None:
        """Close the queue, if we opened it."""
        self._origin.close(self._bridge)

    @property
    def port(self) -> Any:
        """The open queue's port; None while the queue is not open."""
        return None if self._source is None else port_of(self._source.face)

    @property
    def borrowed(self) -> bool:
        """Whether the queue was opened by the caller, who will also close it."""
        return self._origin.borrowed

    @property
    def unanswered_s(self) -> float:
        """Seconds since the queue last answered, with or without messages."""
        return (self._clock.monotonic_ns() - self._answered_ns) / 1e9

    @property
    def silent_s(self) -> float:
        """Seconds a receive has gone unanswered; 0 while all slots are in use, since then none is made."""
        since_ns = self._asking_since_ns
        return 0.0 if since_ns is None else (self._clock.monotonic_ns() - since_ns) / 1e9

    def _live(self) -> None:
        while not self._stopping.is_set():
            try:
                self._round()
            except Exception as error:
                if self._stopping.is_set():
                    return  # closing the queue is how a waiting receive is ended
                if self._source is None and isinstance(error, UnknownTopic):
                    self._wait_for_queue(error)
                elif self._is_final(error):
                    self._broken(error)
                    return
                else:
                    self._wait_after(error)

    def _round(self) -> None:
        """Receive once. With several queues, a lane waits with one slot only, and takes more just for what is there."""
        source = self._open()
        if self._alone:
            self._take(source, self._slots.total, self._poll_s)
        elif not self._take(source, self._slots.total, 0):
            self._take(source, 1, self._poll_s)

    def _open(self) -> WorkerQueue:
        if self._source is None or (self._source.closed and not self._origin.borrowed):
            self._source = self._origin.open(self._bridge)
        return self._source

    def _take(self, source: WorkerQueue, most: int, timeout_s: float) -> bool:
        """Receive messages for the free slots; returns whether there were any."""
        held = self._slots.take(self, most)
        if not held:
            return True  # the slots are closed: the worker is ending
        taken: list[Any] = []
        try:
            if self._asking_since_ns is None:
                self._asking_since_ns = self._clock.monotonic_ns()
            taken = source.take(held, timeout_s=timeout_s, lease=self._lease, holder=self._holder)
            self._answered_ns = self._clock.monotonic_ns()
            self._asking_since_ns = None
            self._backoff.reset()
        finally:
            self._slots.give(self, held - len(taken))
        for message in taken:
            if self._slots.held:  # drained while it waited: what came meanwhile is for others
                source.settle(message, DEFER)
                self._slots.give(self)
            else:
                self._start_run(HandlerRun(message, source, self))
        return bool(taken)

    def _is_final(self, error: Exception) -> bool:
        """Whether retrying cannot help: the arguments are wrong, or the caller closed the queue."""
        if self._source is None:
            return not (isinstance(error, OSError) or (isinstance(error, HoldfastError) and error.retryable))
        return self._origin.borrowed and isinstance(error, (Closed, UnknownGroup, UnknownTopic)) and self._source.closed

    def _wait_for_queue(self, error: UnknownTopic) -> None:
        """Wait for a queue that does not exist yet: its producer may start after us. Reported once."""
        if not self._reported_missing:
            self._reported_missing = True
            logger.warning("the queue does not exist yet, waiting for it: %s", error, extra={"queue": str(self)})
            self._failed(error)
        self._pause(self._missing.next_s())

    def _wait_after(self, error: Exception) -> None:
        pause_s = self._backoff.next_s()
        logger.warning(
            "receiving failed, trying again in %.1f s: %s: %s",
            pause_s,
            type(error).__name__,
            error,
            extra={"queue": str(self)},
        )
        self._failed(error)
        self._pause(pause_s)

    def _pause(self, pause_s: float) -> None:
        until_ns = self._clock.monotonic_ns() + round(pause_s * 1e9)
        while not self._stopping.is_set() and (left_ns := until_ns - self._clock.monotonic_ns()) > 0:
            self._clock.wait(self._stopping, left_ns / 1e9)


class Hooks:
    """The user's hooks, plain or async. An error in a hook is logged and counted, and never ends the worker."""

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
        """Call `on_start`; raises its error, since nothing may be received before it succeeds."""
        try:
            if self._on_start is not None:
                bridge.wait(self._on_start())
        except Exception as error:
            self._failed("on_start", error)
            raise

    def stop(self, bridge: Bridge) -> bool:
        """Call `on_stop`; returns whether it succeeded."""
        try:
            if self._on_stop is not None:
                bridge.wait(self._on_stop())
        except Exception as error:
            self._failed("on_stop", error)
            self.report(error, None, bridge)
            return False
        return True

    def report(self, error: BaseException, message: Any, bridge: Bridge) -> None:
        """Call `on_error`, from a thread."""
        try:
            if self._on_error is not None:
                bridge.wait(self._on_error(error, message))
        except Exception as failure:
            self._failed("on_error", failure)

    async def report_async(self, error: BaseException, message: Any) -> None:
        """Async version of `report`."""
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


class WorkerHealth(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `worker.health()`. Counts are since the start."""

    status: str  # "starting", "running", "silent", "draining", "drained" (idle until it is told to resume), "stopped"
    seconds_since_last_receive: float  # since the slowest queue last answered, with or without messages
    silent_seconds: float  # the same, counting only time in which a slot was free to receive with
    running: int
    handled: int
    failed: int  # the handler raised
    rejected: int  # the handler raised Reject
    retried: int  # the handler raised Retry
    timed_out: int  # the handler ran for longer than its time limit
    lost: int  # the lease had been lost when the handler ended
    unsettled: int  # the handler ended but settling failed: the message will be redelivered
    given_back: int  # received but not started before shutdown
    cut_off: int  # still running when the drain time was over
    restarts: int  # receiving failed and was retried
    hook_errors: int

    @property
    def ok(self) -> bool:
        """Whether the worker is working as intended."""
        return self.status in {"starting", "running", "draining", "drained"}


class WorkerCounts:
    """Counters that any thread may increment."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    def __getitem__(self, name: str) -> int:
        return self._counts[name]


_HOST: Final = "127.0.0.1"


class HealthPage:
    """Serves GET /healthz (200 or 503, with the health as JSON) on loopback, in threads of its own.

    It answers whatever the handlers do.
    """

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
    timeout = 5  # seconds, for clients that connect and send nothing
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
        """Do not log each request: probes would drown everything else."""
