"""A worker: opens its queues, enforces time limits, notices silence, reports itself, shuts down in order."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from queue import SimpleQueue
from typing import Any, Final, Protocol, Self, cast

import holdfast
from holdfast.api.drafts import Seconds, duration_ms
from holdfast.broker.workers import MOST_RUNNING, REPORT_S, Order, RunningMessage, WorkerReport, WorkerStatus
from holdfast.env import World, real_world
from holdfast.env.process import first_signal
from holdfast.errors import Closed, HoldfastError, InvalidRequest
from holdfast.worker.handling import (
    Crew,
    HandlerRun,
    Handling,
    HealthPage,
    Hooks,
    Runs,
    Tasks,
    Threads,
    WorkerCounts,
    WorkerHealth,
    WorkerLane,
    facts,
    unexpected,
)
from holdfast.worker.sources import (
    DEFER,
    Backoff,
    Bridge,
    Settlement,
    Slots,
    WorkerOptions,
    checked_concurrency,
    checked_hook,
    checked_name,
    is_async,
    optional_seconds,
    origins_of,
    seconds,
)

logger = logging.getLogger(__name__)

OK: Final = 0
UNFINISHED: Final = 1
SILENT: Final = 4

# Limits for steps that should take no time but may hang: on a disk, a server, an event loop.
_PATIENCE_S: Final = 5.0
_CLOSING_S: Final = 15.0


class Control:
    """A running worker. `run` is the body of its thread; the other methods may be called from any thread."""

    def __init__(self, options: WorkerOptions, bridge: Bridge) -> None:
        self._options = options
        self._bridge = bridge
        self._clock = options.world.clock
        self._wake = threading.Event()
        self._stopping = False
        self._status = "starting"
        self._code = OK
        self._background: list[threading.Thread] = []
        self.error: Exception | None = None
        self.counts = WorkerCounts()
        self._hooks = Hooks(self.counts, options.on_start, options.on_stop, options.on_error)
        self._runs = Runs(self._clock, options.time_limit_ms, self._wake.set)
        self._handling = Handling(
            options.handler,
            runs=self._runs,
            counts=self.counts,
            hooks=self._hooks,
            bridge=bridge,
            limit=f"{(options.time_limit_ms or 0) / 1000:g} s",
        )
        self._crew: Crew
        if options.is_async:
            self._crew = Tasks(self._handling.work_async, self._run_ended, bridge)
        else:
            self._crew = Threads(self._handling.work, self._run_ended)
        self._lanes = [self._lane(origin) for origin in options.origins]
        self._slots = Slots(options.concurrency, self._lanes)
        self._reporter = Reporter(
            options.world,
            bridge,
            name=options.name,
            concurrency=options.concurrency,
            lanes=self._lanes,
            runs=self._runs,
            counts=self.counts,
            status=self._reported_status,
            obey=self._obey,
        )

    def run(self, over: Callable[[], None]) -> None:
        """Work until stopped, or until no more messages can come; then call `over`."""
        try:
            if self._started():
                self._watch()
        except Exception as error:
            self._broken(error)
        finally:
            try:
                self._end()
            finally:
                self._status = "stopped"
                over()

    def stop(self) -> None:
        """Begin to shut down."""
        self._stopping = True
        self._wake.set()

    def result(self) -> int:
        """Return the exit code; raises the error that ended the worker."""
        if self.error is not None:
            raise self.error
        return self._code

    def health(self) -> WorkerHealth:
        silent_s = max(lane.silent_s for lane in self._lanes)
        status = self._status
        if self._slots.held and status == "running":
            status = "draining" if self._runs else "drained"
        elif status in {"starting", "running"} and silent_s > self._options.silence_s:
            status = "silent"
        names = [name for name in WorkerHealth.__struct_fields__ if name not in _NOT_COUNTED]
        return WorkerHealth(
            status=status,
            seconds_since_last_receive=round(max(lane.unanswered_s for lane in self._lanes), 3),
            silent_seconds=round(silent_s, 3),
            running=self._runs.running,
            **{name: self.counts[name] for name in names},
        )

    def _reported_status(self) -> WorkerStatus:
        """The status for others: they tell a worker that ends from one that was drained and stays."""
        status = self.health().status
        return "stopping" if status == "draining" and self._stopping else cast(WorkerStatus, status)

    def _obey(self, order: Order) -> None:
        """Do what an operator said. A drained worker takes nothing and stays, until it is told to resume or stop."""
        logger.info("worker was told to %s", order)
        if order == "stop":
            self.stop()
        else:
            self._slots.hold(held=order == "drain")
        self._reporter.soon()

    def _lane(self, origin: Any) -> WorkerLane:
        return WorkerLane(
            origin,
            world=self._options.world,
            bridge=self._bridge,
            poll_s=self._options.poll_s,
            lease=self._options.lease,
            holder=self._options.name,
            alone=len(self._options.origins) == 1,
            start_run=self._begin,
            failed=self._receive_failed,
            broken=self._broken,
        )

    def _begin(self, run: HandlerRun) -> None:
        self._runs.add(run)
        self._crew.start(run)

    def _run_ended(self, run: HandlerRun) -> None:
        """Free the slot of a run that has ended or was given up; does nothing the second time."""
        if self._runs.remove(run):
            self._slots.give(run.lane)

    def _receive_failed(self, error: Exception) -> None:
        self.counts.add("restarts")
        self._hooks.report(error, None, self._bridge)

    def _broken(self, error: Exception) -> None:
        """End the worker: this error cannot be recovered from."""
        logger.error("worker ends: %s: %s", type(error).__name__, error, exc_info=unexpected(error))
        if self.error is None:
            self.error = error
        self._hooks.report(error, None, self._bridge)
        self.stop()

    def _started(self) -> bool:
        """Call `on_start` until it succeeds, then start the lanes; returns False if stopped before that."""
        backoff = Backoff(self._options.world.ids)
        while not self._stopping:
            try:
                self._hooks.start(self._bridge)
                break
            except Exception as error:
                self._hooks.report(error, None, self._bridge)
                self._pause(backoff.next_s())
        if self._stopping:
            return False
        for lane in self._lanes:
            lane.start(self._slots)
        self._status = "running"
        self._reporter.start()
        logger.info("worker started", extra={"queues": [str(lane) for lane in self._lanes]})
        return True

    def _pause(self, seconds: float) -> None:
        until_ns = self._until_ns(seconds)
        while not self._stopping and (left_s := self._left_s(until_ns)):
            self._clock.wait(self._wake, left_s)

    def _watch(self) -> None:
        limit_s = self._options.exit_after_silence_s
        while True:
            self._wake.clear()
            self._check_time_limits()
            if limit_s is not None and (silent_s := max(lane.silent_s for lane in self._lanes)) > limit_s:
                logger.error("worker ends: it could not receive messages for %.1f s", silent_s)
                self._code = SILENT
                return
            if self._stopping:
                return
            waits_s = (self._runs.next_s(), None if limit_s is None else limit_s / 4)
            self._clock.wait(self._wake, min((wait_s for wait_s in waits_s if wait_s is not None), default=None))

    def _check_time_limits(self) -> None:
        for run in self._runs.overdue():
            first, run.overtime = not run.overtime, True
            if first and run.task is not None:
                self._crew.stop(run)  # a task is cancelled first, so that it can clean up and end like any other
            else:
                error = self._handling.timeout()
                if not self._give_up(run, Settlement("nack", error), error):
                    continue  # it has just ended
            if first:
                self.counts.add("timed_out")
                logger.warning("handler exceeded its time limit", extra=facts(run))

    def _give_up(self, run: HandlerRun, settlement: Settlement, error: Exception | None = None) -> bool:
        """Give up on a handler: its message becomes available to others, its slot to another message."""
        if not run.claim("control"):
            return False
        self._run_ended(run)
        self._crew.stop(run)

        def settle() -> None:
            late = self._handling.settle(run, settlement)
            for reported in (error, late):
                if reported is not None:
                    self._hooks.report(reported, run.message, self._bridge)

        self._in_background(settle)
        return True

    def _in_background(self, call: Callable[[], None]) -> threading.Thread:
        """Run something that may hang in a thread of its own."""
        thread = threading.Thread(target=call, name="holdfast-worker-background", daemon=True)
        self._background = [*(each for each in self._background if each.is_alive()), thread]
        thread.start()
        return thread

    def _end(self) -> None:
        """Stop receiving, let handlers finish, give back the rest, release everything."""
        self._status = "draining"
        self._stopping = True
        # In this order: no lane asks for more, no handler starts, and only then lanes waiting for a slot are woken.
        for lane in self._lanes:
            lane.stop()
        self._runs.close()
        self._slots.close()
        self._reporter.soon()
        finished = self._drain(self._options.drain_s)
        if not finished:
            self._cut_off()
        in_order = self._release() and finished
        self._crew.end()
        self._bridge.end()
        if self._code == OK and not in_order:
            self._code = UNFINISHED
        if self.error is None:  # else the error that `run` raises says how it ended
            logger.info("worker ended", extra={"code": self._code, "handled": self.counts["handled"]})

    def _release(self) -> bool:
        """Give back what is left, call `on_stop`, close what we opened; returns whether all of it succeeded."""
        until_ns = self._until_ns(self._options.poll_s + _PATIENCE_S)
        # Our own queues are closed below, which wakes their lanes. A borrowed queue stays open, so its lane is waited
        # for until its poll has ended.
        for lane in self._lanes:
            if lane.borrowed:
                lane.join(self._left_s(until_ns))
        finished = self._drain(self._left_s(until_ns))  # a lane may have received messages while it was stopping
        for thread in self._background:
            thread.join(self._left_s(until_ns))
            finished = finished and not thread.is_alive()
        stopped: list[bool] = []
        self._in_background(lambda: stopped.append(self._hooks.stop(self._bridge))).join(
            self._options.drain_s + _PATIENCE_S
        )
        in_order = finished and stopped == [True]
        self._status = "stopped"
        self._reporter.end()  # while the queues are open
        return self._close(_CLOSING_S if in_order else 1.0) and in_order

    def _until_ns(self, seconds: float) -> int:
        return self._clock.monotonic_ns() + round(seconds * 1e9)

    def _left_s(self, until_ns: int) -> float:
        return max(0.0, (until_ns - self._clock.monotonic_ns()) / 1e9)

    def _drain(self, seconds: float) -> bool:
        """Wait until no handler is running, for at most `seconds`; returns whether that was reached."""
        until_ns = self._until_ns(seconds)
        while self._runs:
            self._wake.clear()
            self._check_time_limits()
            left_s = self._left_s(until_ns)
            if not left_s:
                return not self._runs
            if self._runs:
                next_s = self._runs.next_s()
                self._clock.wait(self._wake, left_s if next_s is None else min(left_s, next_s))
        return True

    def _cut_off(self) -> None:
        for run in self._runs.all():
            if run.began_ns is None:
                self._give_up(run, DEFER)
                continue
            reason = f"shutdown: the worker ended, and waited {self._options.drain_s:g} s for its handler"
            if self._give_up(run, Settlement("nack", reason)):
                self.counts.add("cut_off")
                logger.error("handler did not finish in time; its message returns to the queue", extra=facts(run))

    def _close(self, seconds: float) -> bool:
        """Close the queues we opened, which also wakes lanes waiting for a message; returns whether it succeeded."""
        failures: list[Exception] = []

        def close() -> None:
            for lane in self._lanes:
                try:
                    lane.close()
                except Exception as error:
                    failures.append(error)
                    logger.error("queue could not be closed", extra={"queue": str(lane)}, exc_info=error)

        until_ns = self._until_ns(seconds)
        thread = self._in_background(close)
        thread.join(self._left_s(until_ns))
        for lane in self._lanes:
            lane.join(self._left_s(until_ns))
        return not thread.is_alive() and not failures


_NOT_COUNTED: Final = {"status", "seconds_since_last_receive", "silent_seconds", "running"}


class Worker:
    """Runs a handler for each message of one or more queues.

    If the handler returns, the message is acked. If it raises, the message is nacked with the error and retried.

    A worker runs once; create a new one to run again.

    Args:
        handler: A function, or an async function, that takes a message.
        queue: An open queue or group, a folder, a URL, or a list of these; with `at`, the name of a queue there.
        name: The name under which it reports itself to its queues, for `broker.workers()`, and holds messages; host
            and process by default.
        at: A data folder or the URL of a server.
        group: With `at`, the group to use on each queue.
        body_type: The type of bodies for queues that the worker opens, as for `holdfast.open`.
        concurrency: How many handlers run at once.
        lease: The lease of each message, which is renewed while its handler runs; by default the queue's own.
        time_limit: How long a handler may run.
        drain: How long handlers may keep running after the worker is stopped.
        poll: How long one call waits for a message.
        silence: After this long without an answer from a queue, `health` reports "silent".
        exit_after_silence: After this long without an answer, the worker ends with exit code 4.
        on_start: Called before the first message, without arguments.
        on_stop: Called at the end, without arguments.
        on_error: Called with the error, and with the message or None.
        health_port: A port on 127.0.0.1 for `GET /healthz`; 0 for any free one.
        world: A clock and randomness for tests.

    Raises:
        InvalidRequest: One of the arguments cannot be used.
    """

    def __init__(
        self,
        handler: Callable[[Any], Any],
        *,
        queue: Any,
        name: str | None = None,
        at: Any = None,
        group: str | None = None,
        body_type: Any = None,
        concurrency: int = 8,
        lease: Seconds | None = None,
        time_limit: Seconds | None = None,
        drain: Seconds = 25,
        poll: Seconds = 1,
        silence: Seconds = 60,
        exit_after_silence: Seconds | None = None,
        on_start: Callable[[], Any] | None = None,
        on_stop: Callable[[], Any] | None = None,
        on_error: Callable[[BaseException, Any], Any] | None = None,
        health_port: int | None = None,
        world: World | None = None,
    ) -> None:
        for_tasks = is_async(handler)
        origins = origins_of(queue, at=at, group=group, body_type=body_type, for_tasks=for_tasks)
        self._options = WorkerOptions(
            handler=handler,
            name=checked_name(name),
            is_async=for_tasks,
            origins=origins,
            concurrency=checked_concurrency(concurrency, len(origins)),
            lease=None if lease is None else seconds(lease, "lease", minimum_ms=1),
            time_limit_ms=None if time_limit is None else duration_ms(time_limit, "time_limit", minimum_ms=1),
            drain_s=seconds(drain, "drain"),
            poll_s=seconds(poll, "poll", minimum_ms=1),
            silence_s=seconds(silence, "silence", minimum_ms=1),
            exit_after_silence_s=optional_seconds(exit_after_silence, "exit_after_silence"),
            on_start=checked_hook(on_start, "on_start"),
            on_stop=checked_hook(on_stop, "on_stop"),
            on_error=checked_hook(on_error, "on_error"),
            world=world or real_world(),
        )
        self._health_port = health_port
        self._lock = threading.Lock()
        self._control: Control | None = None
        self._page: HealthPage | None = None
        self._over = threading.Event()

    def run(self, *, signals: bool = True) -> int:
        """Work until `stop` is called or SIGTERM or SIGINT arrives. A second signal ends the process at once.

        Args:
            signals: Whether to handle signals. With False, or outside the main thread, only `stop` ends the worker.

        Returns:
            The exit code: 0 if everything that was received was also finished.

        Raises:
            HoldfastError: The error that ended the worker, if there was one.
        """
        # A signal handler may interrupt this thread anywhere, even while it holds a lock; SimpleQueue.put is reentrant.
        reported: SimpleQueue[int | None] = SimpleQueue()
        with first_signal(reported.put) if signals else nullcontext():
            control = self._begin(Bridge(), lambda: reported.put(None))
            try:
                while reported.get() is not None:
                    control.stop()
            except BaseException:  # KeyboardInterrupt, if we do not handle signals
                control.stop()
                self._over.wait()
                raise
        return control.result()

    async def run_async(self, *, signals: bool = True) -> int:
        """Async version of `run`; async handlers run in this event loop.

        Args:
            signals: Whether to handle signals, as for `run`.

        Returns:
            The exit code: 0 if everything that was received was also finished.

        Raises:
            HoldfastError: The error that ended the worker, if there was one.
        """
        loop = asyncio.get_running_loop()
        over = asyncio.Event()

        def tell(call: Callable[[], object]) -> None:
            loop.call_soon_threadsafe(call)

        with first_signal(lambda _: tell(self.stop)) if signals else nullcontext():
            control = self._begin(Bridge(loop), lambda: tell(over.set))
            try:
                await over.wait()
            except asyncio.CancelledError:
                control.stop()
                await over.wait()
                raise
        return control.result()

    def start(self) -> None:
        """Start working in the background. End it with `stop` and `wait`, or use the worker as a context manager.

        Raises:
            Closed: It was started before: a worker runs once.
        """
        self._begin(Bridge(), lambda: None)

    def stop(self) -> None:
        """Stop receiving, and end when the running handlers have finished or `drain` has passed. Returns at once."""
        if self._control is not None:
            self._control.stop()

    def wait(self, timeout: Seconds | None = None) -> int | None:
        """Wait until the worker has ended.

        Args:
            timeout: How long to wait; without a limit by default.

        Returns:
            The exit code, or None after `timeout`.

        Raises:
            HoldfastError: The error that ended the worker, if there was one.
            InvalidRequest: It was not started.
        """
        if self._control is None:
            raise InvalidRequest("the worker was not started: call start() first")
        if not self._over.wait(optional_seconds(timeout, "timeout")):
            return None
        return self._control.result()

    def health(self) -> WorkerHealth:
        """Return the worker's status and counts.

        Returns:
            The status, and counts since the start.
        """
        control = self._control
        return (control or Control(self._options, Bridge())).health()

    @property
    def health_port(self) -> int | None:
        """The port of the health page, or None if there is none (yet)."""
        return None if self._page is None else self._page.port

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
        self.wait()

    def _begin(self, bridge: Bridge, over: Callable[[], None]) -> Control:
        with self._lock:
            if self._control is not None:
                raise Closed("a worker runs only once: create a new one")
            control = Control(self._options, bridge)
            if self._health_port is not None:
                self._page = HealthPage(control.health, self._health_port)
            self._control = control

        def ended() -> None:
            if self._page is not None:
                self._page.close()
            self._over.set()
            over()

        threading.Thread(target=control.run, args=(ended,), name="holdfast-worker", daemon=True).start()
        return control


# A worker's reports of itself, from a thread of its own, and the orders that come back. They never stop the work.


_LAST_S: Final = 1.0  # the last report may take so long; nobody waits longer for it


class ReportingLane(Protocol):
    """A queue of the worker, as far as reports need it."""

    @property
    def port(self) -> Any:
        """The open queue's port; None while the queue is not open."""


class Reporter:
    """Reports the worker to each of its queues every few seconds, and at once when its status changes."""

    def __init__(
        self,
        world: World,
        bridge: Bridge,
        *,
        name: str | None,
        concurrency: int,
        lanes: Sequence[ReportingLane],
        runs: Runs,
        counts: WorkerCounts,
        status: Callable[[], WorkerStatus],
        obey: Callable[[Order], None],
    ) -> None:
        self._clock = world.clock
        self._bridge = bridge
        self._lanes = lanes
        self._runs = runs
        self._counts = counts
        self._status = status
        self._obey = obey
        process = world.ids.process_note()
        self._facts: dict[str, Any] = {
            "id": world.ids.random_bytes(8).hex(),
            "name": name or f"{process['host']}:{process['pid']}",
            "host": str(process["host"])[:200],
            "pid": process["pid"],
            "version": holdfast.__version__,
            "started_ms": world.clock.now_ns() // 1_000_000,
            "concurrency": concurrency,
        }
        self._wake = threading.Event()
        self._ending = False
        self._told = ""
        self._thread = threading.Thread(target=self._live, name="holdfast-worker-reports", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def soon(self) -> None:
        """Report now: something has changed."""
        self._wake.set()

    def end(self) -> None:
        """Report once more, and end. Waits only a moment for that."""
        self._ending = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(_LAST_S)

    def _live(self) -> None:
        while not self._ending:
            self._wake.clear()
            self._report_all()
            self._clock.wait(self._wake, REPORT_S)
        self._report_all()

    def _report_all(self) -> None:
        orders: list[Order] = []
        for lane in self._lanes:
            try:
                port = lane.port
                if port is not None and not port.closed:
                    order = self._bridge.wait(port.report_worker(self._report(lane)))
                    orders += [] if order is None else [order]
            except Exception as error:  # an older server, one that is down, a missing right: the work goes on
                self._note(error)
        for order in dict.fromkeys(orders):
            self._obey(order)

    def _report(self, lane: Any) -> WorkerReport:
        now_ns = self._clock.monotonic_ns()
        running = [run for run in self._runs.all() if run.lane is lane and run.began_ns is not None]
        return WorkerReport(
            **self._facts,
            status=self._status(),
            running=list(_told(running[:MOST_RUNNING], now_ns)),
            running_count=len(running),
            handled=self._counts["handled"],
            failed=self._counts["failed"],
        )

    def _note(self, error: Exception) -> None:
        """Log an error once, not at every report."""
        said = f"{type(error).__name__}: {error}"
        if said != self._told:
            self._told = said
            unexpected = None if isinstance(error, HoldfastError) else error
            logger.debug("worker is not listed: %s", said, extra={"worker": self._facts["name"]}, exc_info=unexpected)


def _told(runs: Iterable[HandlerRun], now_ns: int) -> Iterable[RunningMessage]:
    for run in runs:
        began_ns = run.began_ns or now_ns
        yield RunningMessage(id=str(run.message.id)[:300], seconds=round(max(now_ns - began_ns, 0) / 1e9, 3))
