"""The lives of messages: of one, of those that fit, and in numbers."""

from __future__ import annotations

from holdfast.api.traces import Question, check_search
from holdfast.broker.folder.layout import topic_of_id
from holdfast.broker.tracing.log import TraceStats, TraceStep
from holdfast.errors import InvalidRequest
from holdfast.local.traces import search_in, stats_in, steps_in
from holdfast.protocol.traces import StatsQuery, Steps, TracesQuery
from holdfast.server.calls import Call
from holdfast.server.routing import Routes
from holdfast.server.scans import Full, Scan

routes = Routes("traces")


@routes.add("GET", "/v1/traces/{message_id}", action="read", scope="any", answers=Steps)
async def trace(call: Call) -> Steps:
    """The life of a message step by step; empty where it was not sampled."""
    message_id = call.path["message_id"]
    call.principal.check("read", topic_of_id(message_id))
    found = await call.scan(lambda _: call.service.engine.trace(message_id))
    return Steps(steps=[step for step in found if is_shown(call, step)])


def is_shown(call: Call, step: TraceStep) -> bool:
    """Whether a step is one of a topic that the caller may see, and of a group that they may use, if of any."""
    return call.principal.sees(step.topic) and call.principal.may_use_queue_group(step.group or None)


@routes.add("GET", "/v1/traces", action="read", scope="any", query=TracesQuery, answers=Steps)
async def search(call: Call) -> Steps:
    """Steps that fit, oldest first; page by page with `after`. Who may not read every topic must name one."""
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
    if not query.last:
        return await call.scan(_page, call, question)
    if query.after is not None:
        raise InvalidRequest("after goes on from the first steps, last asks for the last ones: choose one of them")
    check_search(query.limit, query.last)
    engine = call.service.engine
    found = await call.scan(lambda _: search_in(engine, question, query.limit, last=True))
    return Steps(steps=[step for step in found if is_shown(call, step)])


def _page(scan: Scan, call: Call, question: Question) -> Steps:
    query: TracesQuery = call.query
    found: list[TraceStep] = []
    after = -1 if query.after is None else int(query.after)
    try:
        for step in steps_in(call.service.engine, question, after, lambda offset: scan.look(0, offset)):
            if is_shown(call, step):
                found.append(step)
            if len(found) == query.limit:
                return Steps(steps=found, next=_place(scan))
    except Full:
        return Steps(steps=found, next=_place(scan))
    return Steps(steps=found)


def _place(scan: Scan) -> str:
    return "" if scan.mark is None else str(scan.mark.offset)


@routes.add("GET", "/v1/traces/stats", action="read", scope="any", query=StatsQuery, answers=TraceStats)
async def stats(call: Call) -> TraceStats:
    """How long messages waited and were worked on, how often they were tried, what failed."""
    query: StatsQuery = call.query
    call.principal.check("read", query.topic)
    question = Question(topic=query.topic, since=query.since, until=query.until)
    return await call.scan(lambda _: stats_in(call.service.engine, question))
