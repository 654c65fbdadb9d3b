"""The first page: every queue with what stands where, how old the oldest is, and what comes and goes."""

from __future__ import annotations

import asyncio
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from holdfast.broker.group import QueueGroup
from holdfast.broker.positions import lag_of
from holdfast.broker.topic import Topic
from holdfast.errors import HoldfastError
from holdfast.protocol.messages import Wire
from holdfast.server.calls import Call
from holdfast.server.console.rates import Flow, Rates, area, points
from holdfast.server.console.rendering import render
from holdfast.server.http.messages import Response
from holdfast.server.routing import Routes

OLD_S: Final = 15 * 60  # a message that waits for longer is shown in red


class OverviewQuery(Wire, kw_only=True):
    """Which queues to show: those with this in their names, from there on."""

    name: Annotated[str, Meta(max_length=200)] = ""
    start: Annotated[int, Meta(ge=0, le=10_000_000)] = 0
    limit: Annotated[int, Meta(ge=1, le=1_000)] = 100


class Spark(msgspec.Struct, frozen=True, kw_only=True):
    """What came in as an area, what was handled as a line, and what they say in numbers."""

    into: str
    out: str
    into_now: float
    out_now: float


class QueueRow(msgspec.Struct, frozen=True, kw_only=True):
    """One group of one topic; a topic without a group in queue mode has only its log."""

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


def overview_routes(rates: Rates) -> Routes:
    """The first page, with rates from these samples."""
    routes = Routes("console")

    @routes.add("GET", "/ui", action="read", scope="any", query=OverviewQuery, hidden=True)
    async def overview(call: Call) -> Response:
        """All queues at a glance."""
        query: OverviewQuery = call.query
        rates.begin()
        known = [name for name in await call.service.broker.topics() if call.principal.sees(name)]
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


def _rows(call: Call, rates: Rates, topics: list[str]) -> list[QueueRow]:
    engine = call.service.broker._engine
    rows: list[QueueRow] = []
    for name in topics:
        try:
            with engine.using(name) as topic:
                groups = [each for each in topic.groups.values() if call.principal.may_use_queue_group(each.name)]
                messages = sum(partition.log.end - partition.log.start for partition in topic.partitions)
                if not groups:
                    rows.append(QueueRow(topic=name, messages=messages, spark=spark_of(rates.of(name))))
                rows += [row_of(topic, group, rates, engine.world.clock.now_ns()) for group in groups]
        except HoldfastError as error:  # one that cannot be opened must not hide the others
            rows.append(QueueRow(topic=name, spark=spark_of(rates.of(name)), problem=str(error)))
    return rows


def row_of(topic: Topic, group: QueueGroup, rates: Rates, now_ns: int) -> QueueRow:
    """How a group stands."""
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
            lag_of(station.partition.log, (topic.name, station.number), station.delivery.group.floor, now_ns).seconds
            for station in group.stations
        ),
        waiters=stats.waiters,
        spark=spark_of(flow),
        buried=flow.buried,
        damaged=stats.damaged,
    )


def spark_of(flow: Flow) -> Spark:
    """Both lines to one scale."""
    most = max([*flow.into, *flow.out], default=0.0)
    return Spark(
        into=area(flow.into, most),
        out=points(flow.out, most),
        into_now=flow.into_now,
        out_now=flow.out_now,
    )
