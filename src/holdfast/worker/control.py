"""Supervises a running worker: receives from its queues, enforces time limits, notices silence, shuts down in order."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Final

from holdfast.api.drafts import Seconds
from holdfast.env import World
from holdfast.errors import Closed, HoldfastError, UnknownTopic
from holdfast.worker.handling import (
    Crew,
    HandlerRun,
    Handling,
    Hooks,
    Runs,
    Tasks,
    Threads,
    WorkerCounts,
    WorkerHealth,
    facts,
)
from holdfast.worker.sources import DEFER, Backoff, Bridge, QueueOrigin, Settlement, Slots, WorkerOptions, WorkerQueue

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
        if status in {"starting", "running"} and silent_s > self._options.silence_s:
            status = "silent"
        names = [name for name in WorkerHealth.__struct_fields__ if name not in _NOT_COUNTED]
        return WorkerHealth(
            status=status,
            seconds_since_last_receive=round(max(lane.unanswered_s for lane in self._lanes), 3),
            silent_seconds=round(silent_s, 3),
            running=self._runs.running,
            **{name: self.counts[name] for name in names},
        )

    def _lane(self, origin: Any) -> WorkerLane:
        return WorkerLane(
            origin,
            world=self._options.world,
            bridge=self._bridge,
            poll_s=self._options.poll_s,
            lease=self._options.lease,
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
        logger.error("worker ends: %s: %s", type(error).__name__, error, exc_info=_unexpected(error))
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
                logger.error("handler did not end in time, its message is given back", extra=facts(run))

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


def _unexpected(error: Exception) -> Exception | None:
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
            taken = source.take(held, timeout_s=timeout_s, lease=self._lease)
            self._answered_ns = self._clock.monotonic_ns()
            self._asking_since_ns = None
            self._backoff.reset()
        finally:
            self._slots.give(self, held - len(taken))
        for message in taken:
            self._start_run(HandlerRun(message, source, self))
        return bool(taken)

    def _is_final(self, error: Exception) -> bool:
        """Whether retrying cannot help: the arguments are wrong, or the caller closed the queue."""
        if self._source is None:
            return not (isinstance(error, OSError) or (isinstance(error, HoldfastError) and error.retryable))
        return self._origin.borrowed and isinstance(error, (Closed, UnknownTopic)) and self._source.closed

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
