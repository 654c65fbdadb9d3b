"""The page of a queue: its messages by phase, with a filter; its policy; and the pages that go with it."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from holdfast.api.topics import TopicInfo
from holdfast.broker.folder.layout import DEFAULT_GROUP
from holdfast.broker.folder.policy import differing_settings
from holdfast.errors import HoldfastError, InvalidRequest
from holdfast.protocol.messages import Name
from holdfast.protocol.queues import InGroup
from holdfast.server.api.topics import described
from holdfast.server.calls import Call
from holdfast.server.console.overview import OLD_S, QueueRow, Rates, row_of, spark_of
from holdfast.server.console.rendering import render
from holdfast.server.console.search import DONE_PLACES, MessageRow, Tab, group_for, rows
from holdfast.server.http.messages import Response
from holdfast.server.routing import Routes
from holdfast.server.served import ServedGroup
from holdfast.settings import TopicSettings

_TABS: Final = ("ready", "leased", "delayed", "dead", "done")
_POLICY: Final = (
    "durability",
    "lease_ms",
    "max_attempts",
    "backoff_ms",
    "backoff_factor",
    "retention_ms",
    "retention_done_bytes",
    "dead_retention_ms",
    "key_order",
    "trace_sample",
)


class QueueQuery(InGroup, kw_only=True):
    """Which messages to show."""

    tab: Tab = "ready"
    where: Annotated[str, Meta(max_length=10_000)] = ""
    limit: Annotated[int, Meta(ge=1, le=2_000)] = 50
    after: Annotated[str, Meta(max_length=100)] = ""


class SendQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Nothing to say but which group one came from."""

    group: Name | None = None


async def head_of(call: Call, rates: Rates, group: ServedGroup | None) -> dict[str, Any]:
    """What stands above every page of a queue."""
    rates.begin()
    info = await described(call, call.path["queue"])
    name = call.path["queue"]
    if group is None:
        messages = info.messages
        row = QueueRow(topic=name, messages=messages, spark=spark_of(rates.of(name)))
    else:
        now_ns = call.service.world.clock.now_ns()
        row = await asyncio.to_thread(row_of, group.queue_group.topic, group.queue_group, rates, now_ns)
    chosen = None if group is None or group.group == DEFAULT_GROUP else group.group
    return {
        "queue": name,
        "info": info,
        "row": row,
        "group": chosen,
        "old_s": OLD_S,
        "may_here": {action: call.principal.may(action, name) for action in ("publish", "consume", "admin")},
    }


def policy_of(info: TopicInfo, group: ServedGroup | None) -> list[tuple[str, str, bool]]:
    """The settings that matter most, and all that were changed: name, value, whether it was changed."""
    if group is None:
        return [(name, _told(name, value), True) for name, value in info.settings.items()]
    settings = group.settings
    changed = differing_settings(settings, TopicSettings())
    known = msgspec.structs.asdict(settings)
    names = [name for name in _POLICY if name in known] + [name for name in changed if name not in _POLICY]
    return [(name, _told(name, known[name]), name in changed) for name in names]


def _told(name: str, value: Any) -> str:
    if value is None:
        return "none"
    if name.endswith("_ms") and isinstance(value, int) and value >= 1000:
        return f"{value / 1000:,.10g} s"
    return str(value).lower() if isinstance(value, bool) else str(value)


def queue_routes(rates: Rates) -> Routes:
    """The pages of one queue."""
    routes = Routes("console")

    @routes.add("GET", "/ui/queues/{queue}", action="read", query=QueueQuery, hidden=True)
    async def queue(call: Call) -> Response:
        """The messages of a queue in one phase, as a condition chooses."""
        query: QueueQuery = call.query
        group = await group_for(call, query.group)
        found: list[MessageRow] = []
        problem = more = ""
        damaged = 0
        if group is not None:
            try:
                where = query.where.strip() or None
                found, more, damaged = await call.scan(rows, group, query.tab, where, query.limit, query.after)
            except InvalidRequest as error:
                problem = str(error)
        head = await head_of(call, rates, group)
        return render(
            call,
            "queue.html",
            status=400 if problem else 200,
            section="messages",
            query=query,
            tabs=_TABS,
            rows=found,
            more=more,
            damaged=damaged,
            scanned=call.service.settings.scan_messages,
            problem=problem,
            policy=policy_of(head["info"], group),
            done_places=DONE_PLACES,
            **head,
        )

    @routes.add("GET", "/ui/queues/{queue}/tail", action="read", query=InGroup, hidden=True)
    async def tail(call: Call) -> Response:
        """Messages as they come."""
        group = await group_for(call, call.query.group)
        return render(call, "tail.html", section="tail", **await head_of(call, rates, group))

    @routes.add("GET", "/ui/queues/{queue}/send", action="publish", query=SendQuery, hidden=True)
    async def send(call: Call) -> Response:
        """A form for a new message."""
        try:
            group = await group_for(call, call.query.group)
        except HoldfastError:
            group = None
        return render(call, "send.html", section="send", **await head_of(call, rates, group))

    return routes
