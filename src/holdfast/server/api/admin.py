"""Health, status, settings, metrics, traces, samples and the audit log of the server."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import cache, partial
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

import holdfast
from holdfast.api.arguments import Question
from holdfast.api.topics import check_changes
from holdfast.broker.engine import BrokerEngine
from holdfast.broker.folder.contents import kept_settings
from holdfast.broker.folder.layout import SETTINGS, TOPICS, topic_folder, topic_of_id
from holdfast.broker.samples import Samples
from holdfast.broker.tracing import TraceStep
from holdfast.broker.tracing.log import Tallied, TraceStats
from holdfast.broker.workers import Order, WorkerInfo, WorkerReport
from holdfast.config.settings_file import DEFAULT, Effective, Origin, Setting
from holdfast.env.process import descriptor_limit, open_descriptors
from holdfast.errors import Unavailable
from holdfast.local.broker import places_in, samples_in, steps_in
from holdfast.local.search import Full
from holdfast.protocol.media import JSON
from holdfast.protocol.messages import InGroup, ServerValue, Wire
from holdfast.protocol.topics import (
    Acts,
    AlterTopic,
    GroupSamplesQuery,
    LimitQuery,
    SamplesQuery,
    SettingsTold,
    SettingTold,
    StandbyStatus,
    StatsQuery,
    Status,
    Steps,
    StoreStatus,
    TopicSettingsQuery,
    TraceQuery,
    TracesQuery,
    WaitersAt,
    WaitersTold,
    WorkerOrder,
    WorkersOrdered,
    WorkersTold,
)
from holdfast.server.api.takes import existing_group
from holdfast.server.audit import Audit
from holdfast.server.http.messages import Response
from holdfast.server.routing import Route, Routes
from holdfast.server.service import Call, Service
from holdfast.server.turns import Scan
from holdfast.server.waiting import caller_of

# Health, readiness and metrics.


health_routes = Routes("health")


class Health(ServerValue, kw_only=True):
    """The server is alive."""

    status: str


class MetricsQuery(msgspec.Struct):
    """What Prometheus may add to its address is nothing to us."""


@health_routes.add("GET", "/healthz", action="open")
async def healthz(call: Call) -> Health:
    """The process is alive and answers."""
    return Health(status="alive")


@health_routes.add("GET", "/readyz", action="open", errors=("unavailable",))
async def readyz(call: Call) -> Health:
    """The server accepts calls: its folder is open, no disk has failed, and it is not shutting down."""
    if call.service.leaving:
        raise Unavailable("the server is shutting down; call another one, or try again when it is back")
    if call.service.port.closed:
        raise Unavailable("the data folder is closed; see the server's log, then restart the server")
    chain = call.service.engine.store
    if chain is not None and chain.failure is not None:
        raise Unavailable(f"this server no longer owns its folder: {chain.failure.strerror}. Restart it")
    stopped = stopped_part(call.service.engine)
    if stopped is not None:
        raise Unavailable(
            f"the disk failed under {stopped}, which accepts nothing more; check the disk, then restart the server"
        )
    return Health(status="ready")


def stopped_part(engine: BrokerEngine) -> str | None:
    """What a failed sync has stopped permanently; None if nothing."""
    for topic in engine.open_topics():
        logs = [partition.log for partition in topic.partitions]
        logs += [delivery.journal.log for group in topic.groups.values() for delivery in group.deliveries]
        if not all(log.usable for log in logs) and not topic.closed:
            return f"the topic {topic.name}"
    return None


def metrics_routes(render: Callable[[str], tuple[bytes, str]], *, asks: bool) -> Routes:
    """The route of the metrics; with `asks` it needs a token."""
    found = Routes("health")

    @found.add("GET", "/metrics", action="read" if asks else "open", query=MetricsQuery, gives=("text/plain",))
    async def metrics(call: Call) -> Response:
        """Return all metrics in Prometheus format."""
        body, media = await asyncio.to_thread(render, call.request.header("accept"))
        return Response(200, body, media, headers=[("cache-control", "no-store")])

    return found


routes = Routes("admin")


@routes.add("GET", "/v1/admin/status", action="read")
async def status(call: Call) -> Status:
    """Return the status of the server: its uptime, its folder, its connections."""
    service = call.service
    topics = await asyncio.to_thread(service.engine.topics)
    free = await asyncio.to_thread(service.world.disk.free_bytes, service.folder)
    clock = service.world.clock
    return Status(
        version=holdfast.__version__,
        folder=service.folder,
        started_at=datetime.fromtimestamp(service.began_ns / 1e9, UTC),
        uptime_seconds=(clock.monotonic_ns() - service.began_monotonic_ns) / 1e9,
        disk_free_bytes=free,
        connections=service.connections(),
        max_connections=service.settings.max_connections,
        descriptors=open_descriptors(),
        max_descriptors=descriptor_limit(),
        waiters=service.waits.waiting,
        max_waiters=service.waits.most,
        streams=len(service.windows),
        members=len(service.members),
        topics=len(topics),
        leaving=service.leaving,
        tokens_problem=service.tokens_problem(),
        store=await asyncio.to_thread(_store_status, service.engine),
    )


def _store_status(engine: BrokerEngine) -> StoreStatus | None:
    chain = engine.store
    if chain is None:
        return None
    from holdfast.env.chain.ownership import process_text

    return StoreStatus(
        name=chain.store.name,
        owner=process_text(engine.world.ids.process_note()) if chain.failure is None else "",
        epoch=chain.epoch,
        objects=chain.committed,
        silent_seconds=chain.silent_s,
        unsent_bytes=chain.unsent_bytes,
        problem="" if chain.failure is None else str(chain.failure.strerror),
        standbys=[StandbyStatus(**msgspec.structs.asdict(each)) for each in chain.standbys()],
    )


@routes.add("POST", "/v1/admin/sync", action="admin", status=204, act=True, errors=("disk_full",))
async def sync(call: Call) -> None:
    """Return once everything acknowledged so far, including acks, is on disk."""
    await call.service.port.sync()


@routes.add("GET", "/v1/admin/waiters", action="read", query=LimitQuery)
async def waiters(call: Call) -> WaitersTold:
    """List who is waiting for messages, by topic and group, those with the most waiters first."""
    query: LimitQuery = call.query
    waits = call.service.waits
    busy = sorted(waiters_by_group(call), key=lambda line: -line.waiters)
    return WaitersTold(waiting=waits.waiting, max_waiters=waits.most, lines=busy[: query.limit])


def waiters_by_group(call: Call) -> list[WaitersAt]:
    """The groups that calls or streams wait for, as far as the caller may see them."""
    service, principal = call.service, call.principal
    lines = [
        WaitersAt(
            topic=group.topic,
            group=group.group,
            waiters=len(group.queue_group.waiters),
            streams=service.windows.of(group),
        )
        for group in service.groups()
        if principal.sees(group.topic) and principal.may_use_queue_group(group.group)
    ]
    return [line for line in lines if line.waiters or line.streams]


# Workers that report themselves, and what operators tell them.


workers_routes = Routes("workers")


@workers_routes.add(
    "POST", "/v1/queues/{queue}/workers", action="consume", query=InGroup, body=WorkerReport, errors=("unknown_group",)
)
async def report_worker(call: Call) -> WorkerOrder:
    """Report what a worker of the queue is doing; the response says whether to drain, stop or resume."""
    group = await existing_group(call)
    workers = call.service.engine.workers
    return WorkerOrder(order=workers.report(caller_of(call.principal), group.topic, group.group, call.body))


@workers_routes.add("GET", "/v1/workers", action="read", scope="any")
async def workers(call: Call) -> WorkersTold:
    """List the workers that have reported within the last hour, for the queues that you may see."""
    return WorkersTold(workers=workers_shown(call))


def workers_shown(call: Call) -> list[WorkerInfo]:
    """The workers on queues that the caller may see."""
    principal = call.principal
    return call.service.engine.workers.all(
        lambda topic, group: principal.sees(topic) and principal.may_use_queue_group(group)
    )


async def _may_order(call: Call) -> None:
    call.target = call.path["worker"]
    call.service.engine.workers.check_order(call.path["worker"], partial(_check_order, call))


def _check_order(call: Call, topic: str, group: str) -> None:
    """Raise Forbidden unless the caller may tell workers of this queue what to do."""
    call.principal.check("admin", topic)
    call.principal.check_queue_group(group)


_ORDER: Final[dict[str, Any]] = {
    "action": "admin",
    "scope": "any",
    "allowed": _may_order,
    "answers": WorkersOrdered,
    "act": True,
    "errors": ("not_found",),
}


def _ordered(call: Call, order: Order) -> WorkersOrdered:
    workers = call.service.engine.workers
    names = {worker.id: worker.name for worker in workers_shown(call)}
    call.target = names.get(call.path["worker"], call.target)
    return WorkersOrdered(ids=workers.order(call.path["worker"], order, partial(_check_order, call)))


@workers_routes.add("POST", "/v1/workers/{worker}/drain", **_ORDER)
async def drain_worker(call: Call) -> WorkersOrdered:
    """Drain the workers of this name: when they next report, they finish their current messages and stay idle."""
    return _ordered(call, "drain")


@workers_routes.add("POST", "/v1/workers/{worker}/resume", **_ORDER)
async def resume_worker(call: Call) -> WorkersOrdered:
    """Let drained workers of this name take messages again."""
    return _ordered(call, "resume")


@workers_routes.add("POST", "/v1/workers/{worker}/stop", **_ORDER)
async def stop_worker(call: Call) -> WorkersOrdered:
    """Stop the workers of this name: they finish their current messages and exit."""
    return _ordered(call, "stop")


# The settings in force with their origins, and changes to topics' settings.


settings_routes = Routes("settings")


def effective_of(service: Service) -> Effective:
    """The settings in force with their origins, as far as these are known."""
    return service.effective or Effective(
        broker=service.port.settings, server=service.settings, data_dir=service.folder
    )


@settings_routes.add("GET", "/v1/settings", action="read")
async def settings(call: Call) -> SettingsTold:
    """List every setting of the server and the broker that is in force, and where it comes from."""
    return _settings_answer(effective_of(call.service).settings())


@settings_routes.add("GET", "/v1/topics/{topic}/settings", action="read", query=TopicSettingsQuery)
async def topic_settings(call: Call) -> SettingsTold:
    """List the settings of a topic, and where each comes from."""
    query: TopicSettingsQuery = call.query
    return _settings_answer(
        await asyncio.to_thread(settings_of_topic, call.service, call.path["topic"], every=query.all)
    )


@settings_routes.add(
    "PATCH", "/v1/topics/{topic}/settings", action="admin", body=AlterTopic, act=True, errors=("bad_settings",)
)
async def alter_settings(call: Call) -> SettingsTold:
    """Change settings of a topic; they take effect at once and are stored."""
    given: AlterTopic = call.body
    await call.service.port.alter_topic(call.path["topic"], check_changes(given.settings))
    return _settings_answer(await asyncio.to_thread(settings_of_topic, call.service, call.path["topic"], every=True))


def settings_of_topic(service: Service, name: str, *, every: bool) -> list[Setting]:
    """The settings of a topic, each with where it comes from; without `every`, those that are not defaults."""
    with service.engine.using(name) as topic:
        place = f"{TOPICS}/{name}/{SETTINGS}"
        kept = kept_settings(service.world, f"{topic_folder(service.folder, name)}/{SETTINGS}")
        own = {each.name: each for each in effective_of(service).topic_settings(name, kept, place)}
        own["partitions"] = Setting("partitions", len(topic.partitions), Origin("folder", place))
        if not every:
            return list(own.values())
        return list(_all(own, msgspec.structs.asdict(topic.settings)))


def _all(own: dict[str, Setting], followed: dict[str, object]) -> Iterator[Setting]:
    for name, value in followed.items():
        yield own.get(name) or Setting(name, value, DEFAULT)


def _settings_answer(found: Iterable[Setting]) -> SettingsTold:
    return SettingsTold(
        settings=[
            SettingTold(name=each.name, value=each.value, origin=str(each.origin), kind=each.origin.kind)
            for each in found
        ]
    )


# The audit log over HTTP.


class AuditQuery(Wire, kw_only=True):
    """How many of the newest actions, and of the newest refusals."""

    limit: Annotated[int, Meta(ge=1, le=1_000)] = 100


def audit_routes(audit: Audit) -> Routes:
    """The route of the audit log."""
    routes = Routes("admin")

    @routes.add("GET", "/v1/admin/audit", action="admin", query=AuditQuery)
    async def acts(call: Call) -> Acts:
        """Return the latest administrative actions: who did what to which topic, when, and the result; and refusals."""
        query: AuditQuery = call.query
        return Acts(
            acts=await asyncio.to_thread(audit.last, query.limit),
            refused=await asyncio.to_thread(audit.refusals.last, query.limit),
        )

    return routes


# Traces: of one message, of those that match, and statistics.


trace_routes = Routes("traces")

_END: Final = 2**62  # beyond the end of any log


@trace_routes.add("GET", "/v1/traces/{message_id}", action="read", scope="any", query=TraceQuery)
async def trace(call: Call) -> Steps:
    """Return the steps of a message, empty if it was not sampled; `after` gets the next page."""
    query: TraceQuery = call.query
    message_id = call.path["message_id"]
    call.principal.check("read", topic_of_id(message_id))
    found: list[TraceStep] = []
    looking = call.service.engine.looking_for_trace(message_id)

    def some(scan: Scan) -> bool:
        """Search for a while. Returns whether there is more to search."""
        passed = 0
        while passed < scan.most:
            try:
                passed += next(looking)
            except StopIteration as end:
                found.extend(step for step in end.value if is_shown(call, step))
                return False
        return True

    while await call.scan(some):
        pass
    first = int(query.after or 0)
    stop = first + query.limit
    return Steps(steps=found[first:stop], next=str(stop) if stop < len(found) else "")


def is_shown(call: Call, step: TraceStep) -> bool:
    """Whether the caller may see the step's topic, and may use its group if it has one."""
    return call.principal.sees(step.topic) and call.principal.may_use_queue_group(step.group or None)


@trace_routes.add("GET", "/v1/traces", action="read", scope="any", query=TracesQuery)
async def search(call: Call) -> Steps:
    """Find steps, oldest first; `after` gets the next page. If you may not read all topics, you must name one."""
    query: TracesQuery = call.query
    call.principal.check("read", query.topic)
    question = Question(
        topic=query.topic,
        group=query.group,
        event=query.event,
        holder=query.holder,
        error=query.error,
        since=query.since,
        until=query.until,
    )
    return await call.scan(_last_page if query.last else _page, call, question)


def _page(scan: Scan, call: Call, question: Question) -> Steps:
    query: TracesQuery = call.query
    found: list[TraceStep] = []
    places = range(int(query.after or -1) + 1, _END)
    try:
        for step in steps_in(call.service.engine, question, places, lambda offset: scan.look(0, offset)):
            if is_shown(call, step):
                found.append(step)
            if len(found) == query.limit:
                return Steps(steps=found, next=_place(scan))
    except Full:
        return Steps(steps=found, next=_place(scan))
    return Steps(steps=found)


def _last_page(scan: Scan, call: Call, question: Question) -> Steps:
    """The last matching steps within the limit of one call, at the end or before an earlier page."""
    query: TracesQuery = call.query
    engine = call.service.engine
    there = places_in(engine, question)
    stop = min(int(query.after or there.stop), there.stop)
    start = max(stop - scan.most, there.start)
    found: deque[tuple[int, TraceStep]] = deque(maxlen=query.limit)
    for step in steps_in(engine, question, range(start, stop), lambda offset: scan.look(0, offset)):
        if is_shown(call, step) and scan.mark is not None:
            found.append((scan.mark.offset, step))
    if len(found) == query.limit:
        start = found[0][0]
    return Steps(steps=[step for _, step in found], next=str(start) if start > there.start else "")


def _place(scan: Scan) -> str:
    return "" if scan.mark is None else str(scan.mark.offset)


@trace_routes.add("GET", "/v1/traces/stats", action="read", scope="any", query=StatsQuery)
async def stats(call: Call) -> TraceStats:
    """Summarize how long messages waited and were handled, how many attempts they took, and what failed."""
    query: StatsQuery = call.query
    call.principal.check("read", query.topic)
    question = Question(topic=query.topic, since=query.since, until=query.until)
    tallied, after = Tallied(), -1

    def some(scan: Scan) -> bool:
        """Count for a while. Returns whether there is more to count."""
        nonlocal after
        try:
            places = range(after + 1, _END)
            for step in steps_in(call.service.engine, question, places, lambda offset: scan.look(0, offset)):
                tallied.add(step)
        except Full:
            after = after if scan.mark is None else scan.mark.offset
            return True
        return False

    while await call.scan(some):
        pass
    return tallied.stats()


# Samples: how queues fared over the last days.


sample_routes = Routes("samples")


@sample_routes.add("GET", "/v1/samples", action="read", query=SamplesQuery)
async def total_samples(call: Call) -> Samples:
    """Return rates, backlog and handling times of all topics together, over time."""
    query: SamplesQuery = call.query
    return await asyncio.to_thread(samples_in, call.service.engine, None, None, round(query.last * 1000))


@sample_routes.add(
    "GET", "/v1/queues/{queue}/samples", action="read", query=GroupSamplesQuery, errors=("unknown_group",)
)
async def samples_of_group(call: Call) -> Samples:
    """Return rates, backlog and handling times of one group of a topic, over time."""
    query: GroupSamplesQuery = call.query
    return await asyncio.to_thread(group_samples, call, call.path["queue"], query.group, query.last)


def group_samples(call: Call, topic: str, group: str | None, span_s: float) -> Samples:
    """The samples of a group. Raises Forbidden if the caller may not use it."""
    principal = call.principal
    if group is not None and not principal.may_use_group(group):
        principal.check_queue_group(group)  # first: what there is in neither mode is nobody's business either
    found = samples_in(call.service.engine, topic, group, round(span_s * 1000))
    if found.mode == "stream":
        principal.check_group(found.group)
    elif found.mode == "queue":
        principal.check_queue_group(found.group)
    return found


# The API's own description is made when somebody first asks for it, so that a server listens sooner.

_POLICY: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def description_routes(all_routes: Callable[[], Sequence[Route]]) -> Routes:
    """Routes that describe these routes and themselves, as an OpenAPI document and as a page."""
    routes = Routes("description")

    @cache
    def described() -> dict[str, Any]:
        from holdfast.server.openapi import document

        return document(all_routes())

    @cache
    def described_page() -> bytes:
        from holdfast.server.openapi import page

        return page(described()).encode()

    @routes.add("GET", "/openapi.json", action="open", gives=(JSON,))
    async def openapi(call: Call) -> Response:
        """This description, as an OpenAPI document."""
        content = msgspec.json.encode(await asyncio.to_thread(described))
        return Response(200, content, JSON, headers=[("cache-control", "no-cache")])

    @routes.add("GET", "/docs", action="open", hidden=True)
    async def docs(call: Call) -> Response:
        """The same for people."""
        content = await asyncio.to_thread(described_page)
        headers = [("cache-control", "no-cache"), ("content-security-policy", _POLICY)]
        return Response(200, content, "text/html; charset=utf-8", headers=headers)

    return routes
