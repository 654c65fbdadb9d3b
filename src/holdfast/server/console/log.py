"""The log page of a topic: its messages by offset or time, whichever groups have handled them, or none."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from holdfast.api.contents import Contents, record_of
from holdfast.broker.upkeep import reading
from holdfast.errors import InvalidRequest
from holdfast.protocol.messages import InGroup
from holdfast.server.console.queues import group_for, head_of
from holdfast.server.console.rendering import ShownPayload, page, payload, plain, preview, render
from holdfast.server.http.messages import Response
from holdfast.server.service import Call

_LIMIT: Final = 50
_SHOWN_BYTES: Final = 4 * 1024  # of each body; the whole one can be downloaded
_READ_BYTES: Final = 16 * 1024 * 1024


class LogQuery(InGroup, kw_only=True):
    """Where to start: at an offset, or at a time in UTC; without either, a page before the end."""

    partition: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    offset: Annotated[int, Meta(ge=0, le=2**62)] | None = None
    time: Annotated[str, Meta(max_length=40)] = ""


class LogRow(msgspec.Struct, frozen=True, kw_only=True):
    """A message in the log, with the start of its body."""

    id: str
    offset: int
    time_ns: int
    key: str
    headers: list[tuple[str, str]]
    preview: str
    payload: ShownPayload


class LogPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a partition's log, from `first` on; `next` is where the part behind it starts, None at the end."""

    rows: list[LogRow]
    start: int
    end: int
    first: int
    next: int | None


@page("/ui/queues/{queue}/log", query=LogQuery)
async def log(call: Call) -> Response:
    """The messages of a partition, a page at a time."""
    query: LogQuery = call.query
    group = await group_for(call, query.group)
    head = await head_of(call, group)
    part, problem = None, ""
    try:
        if query.partition >= len(head["info"].partitions):
            raise InvalidRequest(f"{head['queue']} has no partition {query.partition}: choose one that it has")
        part = await asyncio.to_thread(_part, call, query)
    except InvalidRequest as error:
        problem = str(error)
    facts: dict[str, Any] = {"query": query, "part": part, "problem": problem, "page_of": _LIMIT}
    return render(call, "log.html", status=400 if problem else 200, section="log", **facts, **head)


def _part(call: Call, query: LogQuery) -> LogPart:
    name = call.path["queue"]
    with reading(call.service.engine.using, name) as topic:
        log = topic.partition(query.partition).log
        start, end = log.start, log.end
        wanted = log.find_time(_time_ns(query.time)) if query.time else query.offset
    first = max(start, min(end - _LIMIT if wanted is None else wanted, end))
    read = call.service.port.read_now
    found = read(name, query.partition, first, _LIMIT, _READ_BYTES, on_damage="skip")
    behind = found[-1].offset + 1 if found else end
    return LogPart(
        rows=[_row(each) for each in found], start=start, end=end, first=first, next=behind if behind < end else None
    )


def _time_ns(text: str) -> int:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidRequest(f"time={text!r} cannot be used: write it like 2026-11-17T10:30, in UTC") from None
    return round((found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp() * 1e9)


def _row(found: Contents[Any]) -> LogRow:
    value = record_of(found).value
    assert found.offset is not None  # it is in the log
    return LogRow(
        id=found.id,
        offset=found.offset,
        time_ns=found.timestamp_ns,
        key=plain(found.key),
        headers=[(name, plain(each)) for name, each in found.headers.pairs],
        preview=preview(value),
        payload=payload(value, most=_SHOWN_BYTES),
    )
