"""The lives of messages: of one, of those that fit, and in numbers."""

from __future__ import annotations

from collections import deque
from typing import Final

from holdfast.api.traces import Question
from holdfast.broker.folder.layout import topic_of_id
from holdfast.broker.tracing.log import Tallied, TraceStats
from holdfast.broker.tracing.steps import TraceStep
from holdfast.local.traces import places_in, steps_in
from holdfast.protocol.traces import StatsQuery, Steps, TraceQuery, TracesQuery
from holdfast.server.calls import Call
from holdfast.server.routing import Routes
from holdfast.server.scans import Full, Scan

routes = Routes("traces")

_END: Final = 2**62  # behind all that is in a log


@routes.add("GET", "/v1/traces/{message_id}", action="read", scope="any", query=TraceQuery, answers=Steps)
async def trace(call: Call) -> Steps:
    """The life of a message step by step, page by page with `after`; empty where it was not sampled."""
    query: TraceQuery = call.query
    message_id = call.path["message_id"]
    call.principal.check("read", topic_of_id(message_id))
    found: list[TraceStep] = []
    looking = call.service.engine.looking_for_trace(message_id)

    def some(scan: Scan) -> bool:
        """Look for it for a while; whether there is more to look at."""
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
    told = int(query.after or 0)
    stop = told + query.limit
    return Steps(steps=found[told:stop], next=str(stop) if stop < len(found) else "")


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
    """The last steps that fit among the places that one call may look at, at the end or before an earlier page."""
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


@routes.add("GET", "/v1/traces/stats", action="read", scope="any", query=StatsQuery, answers=TraceStats)
async def stats(call: Call) -> TraceStats:
    """How long messages waited and were worked on, how often they were tried, what failed."""
    query: StatsQuery = call.query
    call.principal.check("read", query.topic)
    question = Question(topic=query.topic, since=query.since, until=query.until)
    tallied, after = Tallied(), -1

    def some(scan: Scan) -> bool:
        """Count for a while; whether there is more to count."""
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
