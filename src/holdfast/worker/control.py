"""The one who looks after a running worker: time limits, silence, and an end in order."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Final

from holdfast.errors import HoldfastError
from holdfast.worker.backoff import Backoff
from holdfast.worker.bridge import Bridge
from holdfast.worker.crew import Crew, Tasks, Threads
from holdfast.worker.handling import Handling, facts
from holdfast.worker.health import Counts, WorkerHealth
from holdfast.worker.hooks import Hooks
from holdfast.worker.lane import Lane
from holdfast.worker.options import Options
from holdfast.worker.outcomes import DEFER, Settlement
from holdfast.worker.runs import Run, Runs
from holdfast.worker.slots import Slots

logger = logging.getLogger(__name__)

OK: Final = 0
UNFINISHED: Final = 1
SILENT: Final = 4

# For what should take no time, but may hang: a disk, a server, an event loop.
_PATIENCE_S: Final = 5.0
_CLOSING_S: Final = 15.0


class Control:
    """A worker that runs. `run` is the life of its own thread; everything else may be called from others."""

    def __init__(self, options: Options, bridge: Bridge) -> None:
        self._options = options
        self._bridge = bridge
        self._clock = options.world.clock
        self._look = threading.Event()
        self._stopping = False
        self._status = "starting"
        self._code = OK
        self._asides: list[threading.Thread] = []
        self.error: Exception | None = None
        self.counts = Counts()
        self._hooks = Hooks(self.counts, options.on_start, options.on_stop, options.on_error)
        self._runs = Runs(self._clock, options.time_limit_ms, self._look.set)
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
            self._crew = Tasks(self._handling.work_async, self._through, bridge)
        else:
            self._crew = Threads(self._handling.work, self._through)
        self._lanes = [self._lane(origin) for origin in options.origins]
        self._slots = Slots(options.concurrency, self._lanes)

    def run(self, over: Callable[[], None]) -> None:
        """Live until told to stop, or until nothing can come any more; then call `over`."""
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
        """Begin to end."""
        self._stopping = True
        self._look.set()

    def result(self) -> int:
        """The exit code; raises what ended the worker."""
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

    def _lane(self, origin: Any) -> Lane:
        return Lane(
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

    def _begin(self, run: Run) -> None:
        self._runs.add(run)
        self._crew.start(run)

    def _through(self, run: Run) -> None:
        """It is over, or nobody waits for it any more: the next one may come."""
        if self._runs.remove(run):
            self._slots.give(run.lane)

    def _receive_failed(self, error: Exception) -> None:
        self.counts.add("restarts")
        self._hooks.report(error, None, self._bridge)

    def _broken(self, error: Exception) -> None:
        """There is no way to go on."""
        logger.error("worker ends: %s: %s", type(error).__name__, error, exc_info=_unexpected(error))
        if self.error is None:
            self.error = error
        self._hooks.report(error, None, self._bridge)
        self.stop()

    def _started(self) -> bool:
        """Tell the user that it begins, as often as it takes; then begin, unless it is to end already."""
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
            self._clock.wait(self._look, left_s)

    def _watch(self) -> None:
        limit_s = self._options.exit_after_silence_s
        while True:
            self._look.clear()
            self._check_time_limits()
            if limit_s is not None and (silent_s := max(lane.silent_s for lane in self._lanes)) > limit_s:
                logger.error("worker ends: it could not ask for messages for %.1f s", silent_s)
                self._code = SILENT
                return
            if self._stopping:
                return
            waits_s = (self._runs.next_s(), None if limit_s is None else limit_s / 4)
            self._clock.wait(self._look, min((wait_s for wait_s in waits_s if wait_s is not None), default=None))

    def _check_time_limits(self) -> None:
        for run in self._runs.overdue():
            first, run.overtime = not run.overtime, True
            if first and run.task is not None:
                self._crew.stop(run)  # it may tidy up, and then ends as others do
            else:
                error = self._handling.timeout()
                if not self._give_up(run, Settlement("nack", error), error):
                    continue  # it ended just now
            if first:
                self.counts.add("timed_out")
                logger.warning("handler had its time", extra=facts(run))

    def _give_up(self, run: Run, settlement: Settlement, error: Exception | None = None) -> bool:
        """Leave the handler alone with its work: its message goes to others, its slot to another message."""
        if not run.claim("control"):
            return False
        self._through(run)
        self._crew.stop(run)

        def settle() -> None:
            late = self._handling.settle(run, settlement)
            for told in (error, late):
                if told is not None:
                    self._hooks.report(told, run.message, self._bridge)

        self._aside(settle)
        return True

    def _aside(self, call: Callable[[], None]) -> threading.Thread:
        """Something that may hang."""
        thread = threading.Thread(target=call, name="holdfast-worker-aside", daemon=True)
        self._asides = [*(each for each in self._asides if each.is_alive()), thread]
        thread.start()
        return thread

    def _end(self) -> None:
        """Take nothing more, let handlers finish, give back what is left, let go of everything."""
        self._status = "draining"
        self._stopping = True
        for lane in self._lanes:
            lane.stop()
        self._runs.close()
        self._slots.close()
        finished = self._drain(self._options.drain_s)
        if not finished:
            self._cut_off()
        in_order = self._let_go() and finished
        self._crew.end()
        self._bridge.end()
        if self._code == OK and not in_order:
            self._code = UNFINISHED
        if self.error is None:  # else the error that `run` raises says how it ended
            logger.info("worker ended", extra={"code": self._code, "handled": self.counts["handled"]})

    def _let_go(self) -> bool:
        """Give back what is left, say good-bye, close what is ours; answers whether all of that went well."""
        until_ns = self._until_ns(self._options.poll_s + _PATIENCE_S)
        for lane in self._lanes:
            if lane.given:
                lane.join(self._left_s(until_ns))
        finished = self._drain(self._left_s(until_ns))  # what was just being taken is given back
        for thread in self._asides:
            thread.join(self._left_s(until_ns))
            finished = finished and not thread.is_alive()
        stopped: list[bool] = []
        self._aside(lambda: stopped.append(self._hooks.stop(self._bridge))).join(self._options.drain_s + _PATIENCE_S)
        in_order = finished and stopped == [True]
        return self._close(_CLOSING_S if in_order else 1.0) and in_order

    def _until_ns(self, seconds: float) -> int:
        return self._clock.monotonic_ns() + round(seconds * 1e9)

    def _left_s(self, until_ns: int) -> float:
        return max(0.0, (until_ns - self._clock.monotonic_ns()) / 1e9)

    def _drain(self, seconds: float) -> bool:
        """Wait until nothing runs any more, but not for ever; answers whether that is so."""
        until_ns = self._until_ns(seconds)
        while self._runs:
            self._look.clear()
            self._check_time_limits()
            left_s = self._left_s(until_ns)
            if not left_s:
                return not self._runs
            if self._runs:
                next_s = self._runs.next_s()
                self._clock.wait(self._look, left_s if next_s is None else min(left_s, next_s))
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
        """Let go of the queues that are ours; that also wakes those who still wait for a message."""
        failures: list[Exception] = []

        def close() -> None:
            for lane in self._lanes:
                try:
                    lane.close()
                except Exception as error:
                    failures.append(error)
                    logger.error("queue could not be closed", extra={"queue": str(lane)}, exc_info=error)

        until_ns = self._until_ns(seconds)
        thread = self._aside(close)
        thread.join(self._left_s(until_ns))
        for lane in self._lanes:
            lane.join(self._left_s(until_ns))
        return not thread.is_alive() and not failures


_NOT_COUNTED: Final = {"status", "seconds_since_last_receive", "silent_seconds", "running"}


def _unexpected(error: Exception) -> Exception | None:
    """An error that is none of ours has a story to tell."""
    return None if isinstance(error, HoldfastError) else error
