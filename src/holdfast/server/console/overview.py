"""The first page: what needs attention, and every queue with its counts and rates; the health page; the audit log."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias
from urllib.parse import quote, urlencode

import msgspec
from msgspec import Meta

from holdfast.api.topics import GroupInfo
from holdfast.broker.engine import BrokerEngine
from holdfast.broker.folder.layout import DEFAULT_GROUP
from holdfast.broker.group import QueueGroup
from holdfast.broker.metrics import Histogram, Times
from holdfast.broker.samples import Samples
from holdfast.broker.streams import lag_of
from holdfast.broker.topic import Topic
from holdfast.config.settings_file import DEFAULT, Effective, Origin, Setting
from holdfast.errors import HoldfastError
from holdfast.local.broker import samples_in, streams_on
from holdfast.model import Pause
from holdfast.protocol.messages import Wire
from holdfast.protocol.topics import Status, words_of
from holdfast.server.api import admin
from holdfast.server.api.groups import is_shown
from holdfast.server.audit import Act, Audit, is_routine
from holdfast.server.console.charts import NO_FLOW, RANGES, Flow, Range, Spark, charts_of, flow_of, spark_of
from holdfast.server.console.rendering import age, base_of, count, render, size, spanning_page
from holdfast.server.http.messages import Response
from holdfast.server.routing import Routes
from holdfast.server.service import Call
from holdfast.settings import BrokerSettings
from holdfast.storage.retention import tiered_bytes

OLD_S: Final = 15 * 60  # the age from which a message is shown in red
MOST_SHOWN: Final = 12
_LOW_BYTES: Final = 1024**3  # less free space than this is little, whatever the settings say


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
    oldest_ns: int = 0  # when the oldest unhandled message was sent; 0 if there is none
    waiters: int = 0
    spark: Spark
    buried: int = 0
    damaged: int = 0
    stalled: bool = False
    problem: str = ""
    upkeep_error: str = ""
    paused: Pause | None = None

    @property
    def is_old(self) -> bool:
        return self.age_s >= OLD_S

    @property
    def dead_grows(self) -> bool:
        return self.dead > 0 and self.buried > 0


class Concern(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that needs attention: what, in which words, and where it can be handled."""

    what: str
    text: str
    href: str
    link: str


def concerns(rows: Sequence[QueueRow], groups: Sequence[GroupInfo]) -> list[Concern]:
    """What is wrong with these queues and groups, the worst first."""
    found = [*_damage(rows, groups), *_upkeep(rows), *_stalled(rows, groups), *_old(rows), *_dead(rows), *_paused(rows)]
    return list(dict.fromkeys(found))  # what concerns a topic is in the rows of all its groups


def disk_concern(engine: BrokerEngine, free_bytes: int) -> list[Concern]:
    """That the disk is nearly full, if it is."""
    least = engine.settings.topic.min_free_bytes
    if free_bytes >= max(_LOW_BYTES, 2 * least):
        return []
    text = f"{size(free_bytes)} free; below {size(least)} (min_free_bytes) new messages are refused"
    return [Concern(what="The disk is nearly full", text=text, href="/ui/health", link="Health")]


def link_of(topic: str, group: str = "", page: str = "") -> str:
    """The address of a page of a queue."""
    asked = f"?{urlencode({'group': group})}" if group not in ("", DEFAULT_GROUP) else ""
    return f"/ui/queues/{quote(topic, safe='')}{page}{asked}"


def _name(row: QueueRow) -> str:
    return row.topic if row.group in ("", DEFAULT_GROUP) else f"{row.topic}, group {row.group}"


def _damage(rows: Sequence[QueueRow], groups: Sequence[GroupInfo]) -> Iterator[Concern]:
    for row in rows:
        link, href = "Open the queue", link_of(row.topic)
        if row.problem:
            yield Concern(what=f"{row.topic} is damaged", text=row.problem, href=href, link=link)
        if row.damaged:
            text = f"{_messages(row.damaged)} cannot be read; run `holdfast check` on the folder"
            yield Concern(what=f"{row.topic} is damaged", text=text, href=href, link=link)
    for info in groups:
        if info.problem:
            what = f"Group {info.name} on {info.topic} is stopped"
            yield Concern(what=what, text=info.problem, href=_group_link(info), link="Open the group")


def _upkeep(rows: Sequence[QueueRow]) -> Iterator[Concern]:
    for row in rows:
        if row.upkeep_error:
            what = f"Maintenance of {row.topic} is failing"
            yield Concern(what=what, text=row.upkeep_error, href=link_of(row.topic), link="Open the queue")


def _stalled(rows: Sequence[QueueRow], groups: Sequence[GroupInfo]) -> Iterator[Concern]:
    for row in rows:
        if row.stalled:
            text = f"{_messages(row.ready)} ready, and none was handled recently; {_takers(row)}"
            yield Concern(what=f"{_name(row)} is stalled", text=text, href="/ui/workers", link="Workers")
    for info in groups:
        if info.lag and info.lag_seconds >= OLD_S and not info.problem:
            kind = "Query" if info.mode == "query" else "Group"
            text = f"{_messages(info.lag)} and {age(info.lag_seconds)} behind"
            if info.mode == "stream" and not info.members:
                text += "; it has no members"
            what = f"{kind} {info.name} on {info.topic} is falling behind"
            yield Concern(what=what, text=text, href=_group_link(info), link="Open the group")


def _old(rows: Sequence[QueueRow]) -> Iterator[Concern]:
    for row in rows:
        if row.is_old and not row.stalled:
            text = f"the oldest message has waited for {age(row.age_s)}"
            href = link_of(row.topic, row.group, "/charts")
            yield Concern(what=f"{_name(row)} is late", text=text, href=href, link="Charts")


def _dead(rows: Sequence[QueueRow]) -> Iterator[Concern]:
    for row in rows:
        if row.dead_grows:
            text = f"{count(row.buried)} more in the last 15 min, {count(row.dead)} in all"
            href = link_of(row.topic, row.group, "/dead")
            yield Concern(what=f"{_name(row)} has new dead letters", text=text, href=href, link="Dead letters")


def _paused(rows: Sequence[QueueRow]) -> Iterator[Concern]:
    for row in rows:
        if row.paused is not None:
            why = f"{row.paused.reason}; " if row.paused.reason else ""
            text = f"{why}{_messages(row.ready)} ready, and none is delivered until it is resumed"
            yield Concern(
                what=f"{_name(row)} is paused", text=text, href=link_of(row.topic, row.group), link="Open the queue"
            )


def is_stalled(flow: Flow, ready: int, age_s: float) -> bool:
    """Whether messages wait for long and none was handled since samples are taken, or for 15 minutes."""
    return ready > 0 and age_s >= OLD_S and not flow.handled


def _takers(row: QueueRow) -> str:
    return f"consumers waiting: {count(row.waiters)}" if row.waiters else "no consumer is waiting"


def _messages(number: int) -> str:
    return "1 message" if number == 1 else f"{count(number)} messages"


def _group_link(info: GroupInfo) -> str:
    return f"/ui/groups/{quote(info.name, safe='')}"


# The first page.


Sort: TypeAlias = Literal["name", "ready", "leased", "delayed", "dead", "oldest", "in", "out"]

_SORTS: Final[dict[Sort, Callable[[QueueRow], float]]] = {
    "ready": lambda row: row.ready,
    "leased": lambda row: row.leased,
    "delayed": lambda row: row.delayed,
    "dead": lambda row: row.dead,
    "oldest": lambda row: row.age_s,
    "in": lambda row: row.spark.into_now,
    "out": lambda row: row.spark.out_now,
}
_MOST_SORTED: Final = 1_000  # every queue that is sorted has to be opened


class OverviewQuery(Wire, kw_only=True):
    """The queues to show: those with this text in their names, sorted, from this number on."""

    name: Annotated[str, Meta(max_length=200)] = ""
    sort: Sort = "name"
    range: Range = "15m"
    start: Annotated[int, Meta(ge=0, le=10_000_000)] = 0
    limit: Annotated[int, Meta(ge=1, le=1_000)] = 100


class OverviewFacts(msgspec.Struct, kw_only=True):
    """What the first page shows, before it is sorted: the topics on it, and the rows of as many as it takes."""

    names: list[str]
    known: int
    wanted: int
    rows: list[QueueRow]
    groups: list[GroupInfo]
    samples: Samples | None = None
    free_bytes: int | None = None
    concerns: list[Concern] = []


def show_overview(call: Call, facts: OverviewFacts) -> Response:
    """The first page."""
    query: OverviewQuery = call.query
    by = _SORTS.get(query.sort)
    every = facts.rows
    rows = every if by is None else sorted(every, key=by, reverse=True)[query.start : query.start + query.limit]
    found = facts.concerns + concerns(every, facts.groups)
    samples = facts.samples
    return render(
        call,
        "overview.html",
        rows=rows,
        groups=facts.groups[:_MOST_GROUPS],
        more_groups=max(len(facts.groups) - _MOST_GROUPS, 0),
        concerns=found[:MOST_SHOWN],
        more_concerns=max(len(found) - MOST_SHOWN, 0),
        query=query,
        known=facts.known,
        wanted=facts.wanted,
        listed=facts.wanted if by is None else len(every),
        shown=len(facts.names),
        totals=totals_of(every),
        folder=call.service.folder,
        base=base_of(call),
        seconds=max((row.spark.seconds for row in rows), default=0.0),
        ranges=RANGES,
        old_s=OLD_S,
        charts=None if samples is None else charts_of(samples, query.range, most=2),
        free_bytes=facts.free_bytes,
    )


@spanning_page("/ui", OverviewFacts, show_overview, scope="any", query=OverviewQuery)
async def overview(call: Call) -> OverviewFacts:
    """What needs attention, how everything fared, and all queues with their counts and rates."""
    query: OverviewQuery = call.query
    known = [name for name in await asyncio.to_thread(call.service.engine.topics) if call.principal.sees(name)]
    wanted = [name for name in known if query.name.lower() in name.lower()]
    last = query.start + query.limit
    start = 0 if call.service.is_shard else query.start  # which of all topics come first, no shard can say
    some = wanted[start:last] if query.sort not in _SORTS else wanted[:_MOST_SORTED]
    every, groups = await asyncio.to_thread(_rows, call, some)
    found = OverviewFacts(names=some, known=len(known), wanted=len(wanted), rows=every, groups=groups)
    if call.principal.may("read"):
        await asyncio.to_thread(_add_everything, call, query.range, found)
    return found


_MOST_GROUPS: Final = 20


def _add_everything(call: Call, chosen: Range, facts: OverviewFacts) -> None:
    """What only those see who may read all topics: the total over time, and the disk."""
    engine = call.service.engine
    facts.free_bytes = engine.world.disk.free_bytes(engine.folder)
    facts.concerns = disk_concern(engine, facts.free_bytes)
    facts.samples = samples_in(engine, None, None, RANGES[chosen] * 1000)


def totals_of(rows: list[QueueRow]) -> dict[str, int]:
    """The counts of all topics. What several groups read counts once, as the group has it that is behind most."""
    worst: dict[str, QueueRow] = {}
    for row in rows:
        before = worst.get(row.topic)
        if before is None or _unhandled(row) > _unhandled(before):
            worst[row.topic] = row
    totals = {name: sum(getattr(row, name) for row in worst.values()) for name in ("ready", "leased", "delayed")}
    return {**totals, "dead": sum(row.dead for row in rows)}


def _unhandled(row: QueueRow) -> int:
    return row.ready + row.leased + row.delayed


def _rows(call: Call, topics: list[str]) -> tuple[list[QueueRow], list[GroupInfo]]:
    """The queues, and the groups that read them as streams, furthest behind first."""
    engine = call.service.engine
    rows: list[QueueRow] = []
    streams: list[GroupInfo] = []
    for name in topics:
        try:
            with engine.using(name) as topic:
                groups = [each for each in topic.groups.values() if call.principal.may_use_queue_group(each.name)]
                streams += [info for info in streams_on(engine, topic) if is_shown(call, info)]
                if not groups:
                    rows.append(_bare_row(engine, topic))
                rows += [row_of(engine, topic, group) for group in groups]
        except HoldfastError as error:  # a topic that cannot be opened must not hide the others
            rows.append(QueueRow(topic=name, spark=spark_of(NO_FLOW), problem=str(error)))
    streams.sort(key=lambda info: (-info.lag_seconds, -info.lag, info.topic, info.name))
    return rows, streams


def _bare_row(engine: BrokerEngine, topic: Topic) -> QueueRow:
    return QueueRow(
        topic=topic.name,
        messages=sum(partition.log.end - partition.log.start for partition in topic.partitions),
        spark=spark_of(flow_of(engine, topic.name, topic.id)),
        damaged=sum(len(partition.log.damaged()) for partition in topic.partitions),
        problem=_problem(topic),
        upkeep_error=topic.logged_error,
    )


def row_of(engine: BrokerEngine, topic: Topic, group: QueueGroup) -> QueueRow:
    """The row of a group."""
    stats, now_ns = group.stats(), engine.world.clock.now_ns()
    flow = flow_of(engine, topic.name, topic.id, group.name)
    age_s = max(
        lag_of(delivery.partition.log, (topic.name, delivery.number), delivery.group.floor, now_ns).seconds
        for delivery in group.deliveries
    )
    return QueueRow(
        topic=topic.name,
        group=group.name,
        messages=stats.end - stats.start,
        ready=stats.ready,
        leased=stats.leased,
        delayed=stats.delayed,
        dead=stats.dead,
        age_s=age_s,
        oldest_ns=now_ns - round(age_s * 1e9) if age_s else 0,
        waiters=stats.waiters,
        spark=spark_of(flow),
        buried=flow.buried,
        damaged=stats.damaged,
        stalled=stats.paused is None and is_stalled(flow, stats.ready, age_s),
        problem=_problem(topic),
        upkeep_error=topic.logged_error,
        paused=stats.paused,
    )


def _problem(topic: Topic) -> str:
    """The partitions of a topic that are stopped, and why; empty if there are none."""
    return "; ".join(f"partition {number} is stopped: {error}" for number, error in topic.lost.items())


# Health of the server and its folder, and the audit log.

_SAID: Final = Origin("environment", "given at startup")


class HealthQuery(Wire, kw_only=True):
    """Whether to show all settings or only those that were changed."""

    all: bool = False


class AuditPageQuery(Wire, kw_only=True):
    """The number of latest acts to look at, and which of them to show: with this text, and routine ones too."""

    limit: Annotated[int, Meta(ge=1, le=10_000)] = 1_000
    text: Annotated[str, Meta(max_length=200)] = ""
    routine: bool = False


class HealthFacts(msgspec.Struct, kw_only=True):
    """The state of a server, and of what is open of its folder."""

    began_ns: int
    server: Status
    settings: list[Setting]
    syncs: Times
    open_topics: int
    partitions: int
    segments: int
    log_bytes: int
    tiered_bytes: int
    traces_lost: int


def show_health(call: Call, facts: HealthFacts) -> Response:
    """The page of the server's state."""
    changed = [each for each in facts.settings if each.origin != DEFAULT]
    found = {name: getattr(facts, name) for name in HealthFacts.__struct_fields__}
    shown = {"settings": facts.settings if call.query.all else changed, "every": len(facts.settings)}
    return render(call, "health.html", query=call.query, **found | shown)


@spanning_page("/ui/health", HealthFacts, show_health, query=HealthQuery)
async def health(call: Call) -> HealthFacts:
    """The state of the server: its folder, limits and settings."""
    return HealthFacts(
        began_ns=call.service.began_ns,
        server=await admin.status(call),
        settings=settings_shown(admin.effective_of(call.service)),
        **await asyncio.to_thread(_disk, call),
    )


def settings_shown(effective: Effective) -> list[Setting]:
    """The settings in force. One that differs from its default without a known origin was passed at the start."""
    usual = {each.name: each.value for each in Effective(broker=BrokerSettings()).settings()}
    return [
        msgspec.structs.replace(each, origin=_SAID)
        if each.origin == DEFAULT and each.value != usual[each.name]
        else each
        for each in effective.settings()
    ]


def _disk(call: Call) -> dict[str, Any]:
    engine = call.service.engine
    topics = engine.open_topics()
    segments = [segment for topic in topics for partition in topic.partitions for segment in partition.log.segments()]
    return {
        "syncs": sync_times(engine),
        "open_topics": len(topics),
        "partitions": sum(len(topic.partitions) for topic in topics),
        "segments": len(segments),
        "log_bytes": sum(segment.bytes for segment in segments),
        "tiered_bytes": tiered_bytes(segments),
        "traces_lost": engine.traces.log.lost,
    }


def sync_times(engine: BrokerEngine) -> Times:
    """The durations of disk syncs of all open topics, each since it was opened."""
    total = Histogram()
    for topic in engine.open_topics():
        total.merge(topic.metrics.sync_seconds)
    return total.snapshot()


_MOST_ACTS: Final = 500


def _with_text(acts: list[tuple[Act, str]], text: str) -> list[tuple[Act, str]]:
    """The acts with all words of the text in who did what, to what, and with which outcome."""
    words = text.lower().split()

    def has_all(act: Act, said: str) -> bool:
        line = f"{act.principal} {act.peer} {said} {act.target} {act.outcome} {act.route}".lower()
        return all(word in line for word in words)

    return [(act, said) for act, said in acts if has_all(act, said)]


class AuditFacts(msgspec.Struct, kw_only=True):
    """The latest acts and refused calls, newest first, and whether they are kept at all."""

    kept: bool
    acts: list[Act]
    refused: list[Act]


def show_audit(call: Call, facts: AuditFacts) -> Response:
    """The page of acts and refused calls."""
    query: AuditPageQuery = call.query
    meant = [(act, words_of(act)) for act in facts.acts if query.routine or not is_routine(act)]
    return render(
        call,
        "audit.html",
        kept=facts.kept,
        acts=_with_text(meant, query.text)[:_MOST_ACTS],
        refused=_with_text([(act, words_of(act)) for act in facts.refused], query.text)[:_MOST_ACTS],
        routine=len(facts.acts) - len(meant),
        looked=len(facts.acts),
        query=query,
    )


def audit_page(audit: Audit | None) -> Routes:
    """The audit page, which also says so if there is no audit log."""
    routes = Routes("console")

    @spanning_page("/ui/audit", AuditFacts, show_audit, on=routes, action="admin", query=AuditPageQuery)
    async def acts(call: Call) -> AuditFacts:
        """The latest administrative acts and refused calls."""
        limit = call.query.limit
        return AuditFacts(
            kept=audit is not None,
            acts=[] if audit is None else await asyncio.to_thread(audit.last, limit),
            refused=[] if audit is None else await asyncio.to_thread(audit.refusals.last, limit),
        )

    return routes
