"""A worker's reports of itself, from a thread of its own, and the orders that come back. They never stop the work."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol

import holdfast
from holdfast.broker.workers import MOST_RUNNING, REPORT_S, Order, RunningMessage, WorkerReport, WorkerStatus
from holdfast.env import World
from holdfast.errors import HoldfastError
from holdfast.worker.handling import HandlerRun, Runs, WorkerCounts
from holdfast.worker.sources import Bridge

logger = logging.getLogger(__name__)

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
