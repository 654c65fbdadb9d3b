"""Workers that report themselves: who they are, what each of them is doing, and what they were told to do.

Every worker reports every few seconds, for each of its queues, and gets an order in the answer, if there is one. All of
it is kept in memory only: a worker reports again within seconds after a restart of the owner, and an order that was
lost can be given again.

Reports come from callers that need not trust one another. A worker is known by its caller and by a random id of its
own, so nobody can report in another's name, and no report can end or replace another caller's worker. What one caller
may report is limited; beyond that, its own workers that are gone are forgotten first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Annotated, Final, Literal, TypeAlias, get_args

import msgspec
from msgspec import Meta

from holdfast.env import Clock
from holdfast.errors import Forbidden, InvalidRequest, NotFound

REPORT_S: Final = 5.0  # between two reports of a worker
LOST_MS: Final = 30_000  # after so long without a report, a worker counts as lost
KEPT_MS: Final = 3_600_000  # so long it is listed afterwards
MOST_WORKERS: Final = 10_000
MOST_WORKERS_EACH: Final = 1_000  # of one caller
MOST_QUEUES: Final = 100  # of one worker
MOST_REPORTS: Final = 20_000  # that are kept: one for each queue of each worker
MOST_REPORTS_EACH: Final = 5_000  # of one caller
MOST_RUNNING: Final = 20  # messages that a report names, of each queue; a worker may handle more

Order: TypeAlias = Literal["drain", "stop", "resume"]
WorkerStatus: TypeAlias = Literal["starting", "running", "silent", "draining", "drained", "stopping", "stopped"]
WorkerState: TypeAlias = Literal["starting", "running", "silent", "draining", "drained", "stopping", "stopped", "lost"]

_ShortText: TypeAlias = Annotated[str, Meta(max_length=200)]
_Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**53)]
_Time: TypeAlias = Annotated[int, Meta(ge=0, le=2**47)]  # in the year 6429, which is still a date

# The statuses by which a worker shows that it has obeyed.
_OBEYED: Final[dict[str, frozenset[str]]] = {
    "drain": frozenset({"draining", "drained", "stopping", "stopped"}),
    "stop": frozenset({"stopping", "stopped"}),
    "resume": frozenset({"starting", "running", "silent", "stopping", "stopped"}),
}


class RunningMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message that a handler is working on, and for how long."""

    id: Annotated[str, Meta(max_length=300)]
    seconds: Annotated[float, Meta(ge=0, le=1_000_000_000)]  # JSON has no word for infinity


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's report about itself and its work on one queue. The counts cover all its queues."""

    id: Annotated[str, Meta(min_length=1, max_length=64)]
    name: Annotated[str, Meta(min_length=1, max_length=200)]
    host: _ShortText = ""
    pid: _Count = 0
    version: _ShortText = ""
    started_ms: _Time = 0
    concurrency: _Count = 0
    status: WorkerStatus = "running"
    running: Annotated[list[RunningMessage], Meta(max_length=MOST_RUNNING)] = msgspec.field(default_factory=list)
    running_count: _Count = 0
    handled: _Count = 0
    failed: _Count = 0


class WorkerQueueInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A queue that a worker works on, and what it is doing there: `running` names the first few messages."""

    topic: str
    group: str
    running: list[RunningMessage]
    running_count: int = 0


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as it last reported, `seen_seconds` ago. `order` is an order that it has not carried out yet.

    A worker that has not reported for 30 seconds is `lost`. It is listed for an hour, as is one that has stopped.
    """

    id: str
    name: str
    host: str
    pid: int
    version: str
    started_ms: int
    concurrency: int
    state: WorkerState
    queues: list[WorkerQueueInfo]
    handled: int
    failed: int
    seen_seconds: float
    order: Order | None = None


def _anybody(topic: str, group: str) -> None:
    """The check of those who may tell every worker what to do."""


class _Known:
    """One worker, as it last reported itself."""

    def __init__(self) -> None:
        self.report: WorkerReport
        self.queues: dict[tuple[str, str], WorkerReport] = {}
        self.order: Order | None = None
        self.seen_ms = 0


class WorkerRegistry:
    """The workers of a data folder and of everybody who uses it through its owner. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[tuple[Hashable, str], _Known] = {}

    def report(self, caller: Hashable, topic: str, group: str, report: WorkerReport) -> Order | None:
        """Note a report; returns what the worker is to do, if it was told anything that it has not done yet."""
        now_ms = self._now_ms()
        with self._lock:
            known = self._known.get((caller, report.id))
            if known is None or (topic, group) not in known.queues:
                known = self._room_for(caller, report, now_ms)
            known.report = known.queues[topic, group] = report
            known.seen_ms = now_ms
            if known.order is not None and report.status in _OBEYED[known.order]:
                known.order = None
            return known.order

    def all(self, shown: Callable[[str, str], bool] = lambda topic, group: True) -> list[WorkerInfo]:
        """The workers by name, as far as their queues are to be shown; one with none of these is left out."""
        now_ms = self._now_ms()
        with self._lock:
            self._forget_old(now_ms)
            found = [
                _info(known, queues, now_ms)
                for known in self._known.values()
                if (queues := {place: report for place, report in known.queues.items() if shown(*place)})
            ]
        return sorted(found, key=lambda info: (info.name, info.started_ms, info.id))

    def order(self, name: str, order: Order, check: Callable[[str, str], None] = _anybody) -> list[str]:
        """Tell the workers of this name, or the one with this id, what to do at their next report; returns their ids.

        `check` raises if the caller may not give orders on a queue. Workers on such a queue are left out;
        if no other is left, that is raised. Raises NotFound.
        """
        if order not in get_args(Order):
            raise InvalidRequest(f"order={order!r} cannot be used: give one of {', '.join(get_args(Order))}")
        with self._lock:
            meant = self._allowed(name, check)
            for known in meant:
                known.order = None if known.report.status in _OBEYED[order] else order
        return [known.report.id for known in meant]

    def check_order(self, name: str, check: Callable[[str, str], None]) -> None:
        """Raise as `order` would, and tell nobody anything."""
        with self._lock:
            self._allowed(name, check)

    def _allowed(self, name: str, check: Callable[[str, str], None]) -> list[_Known]:
        """The workers of this name without those of others: who took the same name must not keep them from orders."""
        allowed, refusal = [], None
        for known in self._meant(name, self._now_ms()):
            try:
                for place in known.queues:
                    check(*place)
            except Forbidden as error:
                refusal = error
            else:
                allowed.append(known)
        if not allowed and refusal is not None:
            raise refusal
        return allowed

    def _meant(self, name: str, now_ms: int) -> list[_Known]:
        meant = [
            known
            for known in self._known.values()
            if name in (known.report.name, known.report.id) and _state(known, now_ms) not in ("lost", "stopped")
        ]
        if not meant:
            raise NotFound(f"no worker {name} is reporting now; `holdfast workers` lists those that are")
        return meant

    def states(self) -> dict[str, int]:
        """The number of workers in each state, for metrics."""
        now_ms = self._now_ms()
        counts = dict.fromkeys(get_args(WorkerState), 0)
        with self._lock:
            self._forget_old(now_ms)
            for known in self._known.values():
                counts[_state(known, now_ms)] += 1
        return counts

    def _now_ms(self) -> int:
        return self._clock.monotonic_ns() // 1_000_000

    def _room_for(self, caller: Hashable, report: WorkerReport, now_ms: int) -> _Known:
        """The worker, with room for one more queue. Forgets what is gone, of this caller first of all."""
        known = self._known.get((caller, report.id))
        if known is not None and len(known.queues) >= MOST_QUEUES:
            raise InvalidRequest(
                f"the worker {report.name} already reports {MOST_QUEUES} queues, which is the limit: use fewer "
                "queues per worker"
            )
        self._forget_old(now_ms)
        key, new = (caller, report.id), int(known is None)
        own = [each for each in self._known if each[0] == caller]
        if not self._fits(own, MOST_WORKERS_EACH - new, MOST_REPORTS_EACH, key, now_ms):
            raise InvalidRequest(
                f"{len(own)} workers of this caller are reporting, which is the limit. This one works, but is not "
                "listed"
            )
        if not self._fits(list(self._known), MOST_WORKERS - new, MOST_REPORTS, key, now_ms):
            raise InvalidRequest(
                f"{len(self._known)} workers are reporting, which is the limit. This one works, but is not listed"
            )
        return self._known.setdefault(key, known or _Known())

    def _fits(
        self, keys: list[tuple[Hashable, str]], most: int, most_reports: int, but: tuple[Hashable, str], now_ms: int
    ) -> bool:
        """Whether one more report fits with those of these workers; if need be, forgets some that are gone."""
        while len(keys) > most or sum(len(self._known[key].queues) for key in keys) >= most_reports:
            gone = self._forget_gone([key for key in keys if key != but], now_ms)
            if gone is None:
                return False
            keys.remove(gone)
        return True

    def _forget_gone(self, keys: list[tuple[Hashable, str]], now_ms: int) -> tuple[Hashable, str] | None:
        gone = [key for key in keys if _state(self._known[key], now_ms) in ("lost", "stopped")]
        first = min(gone, key=lambda key: self._known[key].seen_ms, default=None)
        if first is not None:
            del self._known[first]
        return first

    def _forget_old(self, now_ms: int) -> None:
        for key in [key for key, known in self._known.items() if now_ms - known.seen_ms >= KEPT_MS]:
            del self._known[key]


def _state(known: _Known, now_ms: int) -> WorkerState:
    status = known.report.status
    return "lost" if status != "stopped" and now_ms - known.seen_ms >= LOST_MS else status


def _info(known: _Known, queues: dict[tuple[str, str], WorkerReport], now_ms: int) -> WorkerInfo:
    report = known.report
    return WorkerInfo(
        id=report.id,
        name=report.name,
        host=report.host,
        pid=report.pid,
        version=report.version,
        started_ms=report.started_ms,
        concurrency=report.concurrency,
        state=_state(known, now_ms),
        queues=list(_queues(queues)),
        handled=report.handled,
        failed=report.failed,
        seen_seconds=(now_ms - known.seen_ms) / 1000,
        order=known.order,
    )


def _queues(queues: dict[tuple[str, str], WorkerReport]) -> Iterator[WorkerQueueInfo]:
    for (topic, group), report in sorted(queues.items()):
        yield WorkerQueueInfo(topic=topic, group=group, running=report.running, running_count=report.running_count)
