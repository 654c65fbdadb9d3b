"""The first page, with the counts and rates of every queue; the health page; the audit log."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from itertools import islice, pairwise
from typing import Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta

from holdfast.broker.engine import BrokerEngine
from holdfast.broker.group import QueueGroup
from holdfast.broker.streams.offsets import lag_of
from holdfast.broker.topic import Topic
from holdfast.config.settings_file import DEFAULT, Effective, Origin, Setting
from holdfast.env.process import descriptor_limit, open_descriptors
from holdfast.errors import HoldfastError
from holdfast.protocol.messages import Wire
from holdfast.server.api.admin import effective_of
from holdfast.server.audit import Audit
from holdfast.server.console.rendering import render
from holdfast.server.http.messages import Response
from holdfast.server.metrics import sync_times
from holdfast.server.routing import Routes
from holdfast.server.service import Call, Service
from holdfast.settings import BrokerSettings

# Recent rates, from samples of the engine's counters that are kept in memory.

EVERY_S: Final = 5.0
KEPT: Final = 121  # samples: ten minutes
MOST: Final = 500  # groups in a sample

WIDTH: Final = 120  # of a sparkline, in SVG units
HEIGHT: Final = 24

Key: TypeAlias = tuple[str, str]
Counts: TypeAlias = tuple[int, int, int]

_NONE: Final[Counts] = (0, 0, 0)


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """The rates into and out of a group over time, in messages per second; `buried` is the total number."""

    into: list[float]
    out: list[float]
    buried: int

    @property
    def into_now(self) -> float:
        return _lately(self.into)

    @property
    def out_now(self) -> float:
        return _lately(self.out)


class QueueRates:
    """The latest samples of the counters of all open topics."""

    def __init__(self, engine: BrokerEngine) -> None:
        self._engine = engine
        self._samples: deque[tuple[float, dict[Key, Counts]]] = deque(maxlen=KEPT)
        self.since_ns = 0

    def begin(self) -> None:
        """Start sampling, now and every few seconds, unless it has started. Call it on the event loop."""
        if not self.since_ns:
            self.since_ns = self._engine.world.clock.now_ns()
            self._go_on(asyncio.get_running_loop())

    def _go_on(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._engine.closed:
            self.sample(loop.time())
            loop.call_later(EVERY_S, self._go_on, loop)

    def sample(self, at_s: float) -> None:
        """Take a sample. Reads no files."""
        found: dict[Key, Counts] = {}
        for topic in self._engine.open_topics():
            published = topic.metrics.published.value
            found[topic.name, ""] = published, 0, 0
            for group in list(topic.groups.values()):
                found[topic.name, group.name] = published, group.metrics.acked.value, group.metrics.buried.value
            if len(found) > MOST:
                break
        self._samples.append((at_s, dict(islice(found.items(), MOST))))

    @property
    def seconds(self) -> float:
        """The time that the samples cover."""
        return self._samples[-1][0] - self._samples[0][0] if self._samples else 0.0

    def of(self, topic: str, group: str = "") -> Flow:
        """The rates of a group; without a group, those into the topic."""
        key, into, out, buried = (topic, group), [], [], 0
        for (before_s, before), (after_s, after) in pairwise(list(self._samples)):
            passed_s = max(after_s - before_s, 0.001)
            grown = [_growth(old, new) for old, new in zip(before.get(key, _NONE), after.get(key, _NONE), strict=True)]
            into.append(grown[0] / passed_s)
            out.append(grown[1] / passed_s)
            buried += grown[2]
        return Flow(into=into, out=out, buried=buried)


def _growth(before: int, after: int) -> int:
    """The growth of a counter. A smaller value means that it restarted at 0, when its topic was opened again."""
    return after - before if after >= before else after


def _lately(line: list[float]) -> float:
    last = line[-3:]
    return sum(last) / len(last) if last else 0.0


def points(line: list[float], most: float) -> str:
    """The points of an SVG polyline for a line of values, with the newest at the right edge."""
    return " ".join(
        f"{_across(i, line):.1f},{HEIGHT - 1 - (HEIGHT - 2) * (value / most if most else 0):.1f}"
        for i, value in enumerate(line)
    )


def area(line: list[float], most: float) -> str:
    """The points of an SVG polygon for the area under a line of values."""
    if not line:
        return ""
    return f"{_across(0, line):.1f},{HEIGHT} {points(line, most)} {WIDTH},{HEIGHT}"


def _across(i: int, line: list[float]) -> float:
    return WIDTH - WIDTH / (KEPT - 2) * (len(line) - 1 - i)


OLD_S: Final = 15 * 60  # the age from which a message is shown in red


class OverviewQuery(Wire, kw_only=True):
    """The queues to show: those with this text in their names, from this number on."""

    name: Annotated[str, Meta(max_length=200)] = ""
    start: Annotated[int, Meta(ge=0, le=10_000_000)] = 0
    limit: Annotated[int, Meta(ge=1, le=1_000)] = 100


class Spark(msgspec.Struct, frozen=True, kw_only=True):
    """A sparkline: messages in as an area, messages out as a line, and both current rates."""

    into: str
    out: str
    into_now: float
    out_now: float


class QueueRow(msgspec.Struct, frozen=True, kw_only=True):
    """One queue group of one topic. A topic without one has a row with an empty group."""

    topic: str
    group: str = ""
    messages: int = 0
    ready: int = 0
    leased: int = 0
    delayed: int = 0
    dead: int = 0
    age_s: float = 0.0
    waiters: int = 0
    spark: Spark
    buried: int = 0
    damaged: int = 0
    problem: str = ""

    @property
    def is_old(self) -> bool:
        return self.age_s >= OLD_S

    @property
    def dead_grows(self) -> bool:
        return self.dead > 0 and self.buried > 0


def overview_routes(rates: QueueRates) -> Routes:
    """The routes of the first page."""
    routes = Routes("console")

    @routes.add("GET", "/ui", action="read", scope="any", query=OverviewQuery, hidden=True)
    async def overview(call: Call) -> Response:
        """All queues with their counts and rates."""
        query: OverviewQuery = call.query
        rates.begin()
        known = [name for name in await call.service.port.topics() if call.principal.sees(name)]
        wanted = [name for name in known if query.name.lower() in name.lower()]
        some = wanted[query.start : query.start + query.limit]
        rows = await asyncio.to_thread(_rows, call, rates, some)
        return render(
            call,
            "overview.html",
            rows=rows,
            query=query,
            known=len(known),
            wanted=len(wanted),
            totals=_totals(rows),
            folder=call.service.folder,
            since_ns=rates.since_ns,
            seconds=rates.seconds,
            old_s=OLD_S,
        )

    return routes


def _totals(rows: list[QueueRow]) -> dict[str, int]:
    return {name: sum(getattr(row, name) for row in rows) for name in ("ready", "leased", "delayed", "dead")}


def _rows(call: Call, rates: QueueRates, topics: list[str]) -> list[QueueRow]:
    engine = call.service.engine
    rows: list[QueueRow] = []
    for name in topics:
        try:
            with engine.using(name) as topic:
                groups = [each for each in topic.groups.values() if call.principal.may_use_queue_group(each.name)]
                messages = sum(partition.log.end - partition.log.start for partition in topic.partitions)
                if not groups:
                    problem = _problem(topic)
                    rows.append(
                        QueueRow(topic=name, messages=messages, spark=spark_of(rates.of(name)), problem=problem)
                    )
                rows += [row_of(topic, group, rates, engine.world.clock.now_ns()) for group in groups]
        except HoldfastError as error:  # a topic that cannot be opened must not hide the others
            rows.append(QueueRow(topic=name, spark=spark_of(rates.of(name)), problem=str(error)))
    return rows


def row_of(topic: Topic, group: QueueGroup, rates: QueueRates, now_ns: int) -> QueueRow:
    """The row of a group."""
    stats = group.stats()
    flow = rates.of(topic.name, group.name)
    return QueueRow(
        topic=topic.name,
        group=group.name,
        messages=stats.end - stats.start,
        ready=stats.ready,
        leased=stats.leased,
        delayed=stats.delayed,
        dead=stats.dead,
        age_s=max(
            lag_of(delivery.partition.log, (topic.name, delivery.number), delivery.group.floor, now_ns).seconds
            for delivery in group.deliveries
        ),
        waiters=stats.waiters,
        spark=spark_of(flow),
        buried=flow.buried,
        damaged=stats.damaged,
        problem=_problem(topic),
    )


def _problem(topic: Topic) -> str:
    """The partitions of a topic that are stopped, and why; empty if there are none."""
    return "; ".join(f"partition {number} stands still: {error}" for number, error in topic.lost.items())


def spark_of(flow: Flow) -> Spark:
    """A sparkline with both lines on the same scale."""
    most = max([*flow.into, *flow.out], default=0.0)
    return Spark(
        into=area(flow.into, most),
        out=points(flow.out, most),
        into_now=flow.into_now,
        out_now=flow.out_now,
    )


# Health of the server and its folder, and the audit log.

_SAID: Final = Origin("environment", "said at the start")


class HealthQuery(Wire, kw_only=True):
    """Whether to show all settings or only those that were changed."""

    all: bool = False


class AuditPageQuery(Wire, kw_only=True):
    """The number of latest acts to show."""

    limit: Annotated[int, Meta(ge=1, le=1_000)] = 100


health_routes = Routes("console")


@health_routes.add("GET", "/ui/health", action="read", query=HealthQuery, hidden=True)
async def health(call: Call) -> Response:
    """The state of the server: its folder, limits and settings."""
    service = call.service
    settings = list(_settings(service))
    changed = [each for each in settings if each.origin != DEFAULT]
    clock = service.world.clock
    return render(
        call,
        "health.html",
        query=call.query,
        folder=service.folder,
        began_ns=service.began_ns,
        uptime_s=(clock.monotonic_ns() - service.began_monotonic_ns) / 1e9,
        connections=service.connections(),
        most_connections=service.settings.max_connections,
        descriptors=open_descriptors(),
        most_descriptors=descriptor_limit(),
        waiting=service.waits.waiting,
        most_waiting=service.waits.most,
        leaving=service.leaving,
        settings=settings if call.query.all else changed,
        every=len(settings),
        **await asyncio.to_thread(_disk, call),
    )


def _settings(service: Service) -> Iterator[Setting]:
    """The settings in force. One that differs from its default without a known origin was passed at the start."""
    usual = {each.name: each.value for each in Effective(broker=BrokerSettings()).settings()}
    for each in effective_of(service).settings():
        is_said = each.origin == DEFAULT and each.value != usual[each.name]
        yield msgspec.structs.replace(each, origin=_SAID) if is_said else each


def _disk(call: Call) -> dict[str, Any]:
    engine = call.service.engine
    topics = engine.open_topics()
    segments = [segment for topic in topics for partition in topic.partitions for segment in partition.log.segments()]
    return {
        "free_bytes": engine.world.disk.free_bytes(engine.folder),
        "syncs": sync_times(engine),
        "topics": len(engine.topics()),
        "open_topics": len(topics),
        "partitions": sum(len(topic.partitions) for topic in topics),
        "segments": len(segments),
        "log_bytes": sum(segment.bytes for segment in segments),
        "traces_lost": engine.traces.log.lost,
    }


def audit_page_routes(audit: Audit | None) -> Routes:
    """The routes of the audit page, which also says so if there is no audit log."""
    routes = Routes("console")

    @routes.add("GET", "/ui/audit", action="admin", query=AuditPageQuery, hidden=True)
    async def acts(call: Call) -> Response:
        """The latest administrative acts and refused calls."""
        limit = call.query.limit
        found = None if audit is None else await asyncio.to_thread(audit.last, limit)
        refused = [] if audit is None else await asyncio.to_thread(audit.refusals.last, limit)
        return render(call, "audit.html", acts=found, refused=refused, query=call.query)

    return routes
