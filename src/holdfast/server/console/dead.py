"""Dead letters by what they died of: seen together, put back or dropped together."""

from __future__ import annotations

import re
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from holdfast.api.listing import DeadGroup, DeadKinds
from holdfast.errors import InvalidRequest, NotFound
from holdfast.protocol.queues import InGroup
from holdfast.server.api.dead import each_letter
from holdfast.server.calls import Call
from holdfast.server.console.overview import QueueRates
from holdfast.server.console.queues import group_for, head_of
from holdfast.server.console.rendering import render
from holdfast.server.http.messages import Response
from holdfast.server.routing import Routes

_MOST_GROUPS: Final = 200
_CUT: Final = 200  # letters of a kind of error; what is longer was cut
_DETAIL: Final = r"""(?:0x[0-9a-fA-F]+|'[^']*'|"[^"]*"|[0-9]+|…)"""
_MOST_PARTS: Final = 12  # a condition has to stay short: what begins alike for so long counts as alike


class DeadPageQuery(InGroup, kw_only=True):
    """Which dead letters to group."""

    where: Annotated[str, Meta(max_length=10_000)] = ""


class DeadKind(msgspec.Struct, frozen=True, kw_only=True):
    """Dead letters that died of the same, and the condition that chooses them."""

    group: DeadGroup
    where: str


def dead_routes(rates: QueueRates) -> Routes:
    """The page of a queue's dead letters."""
    routes = Routes("console")

    @routes.add("GET", "/ui/queues/{queue}/dead", action="read", query=DeadPageQuery, hidden=True)
    async def dead(call: Call) -> Response:
        """Dead letters by kind of error, the most frequent first."""
        query: DeadPageQuery = call.query
        group = await group_for(call, query.group)
        if group is None:
            raise NotFound(f"{call.path['queue']} has no group in queue mode, so it has no dead letters")
        where, problem, found = query.where.strip(), "", []
        try:
            grouping = DeadKinds()
            await each_letter(call, group, where or None, None, grouping.add)
            found = grouping.groups()
        except InvalidRequest as error:
            problem = str(error)
        kinds = [DeadKind(group=each, where=both(where, where_of(each))) for each in found[:_MOST_GROUPS]]
        return render(
            call,
            "dead.html",
            status=400 if problem else 200,
            section="dead",
            query=query,
            kinds=kinds,
            letters=sum(each.count for each in found),
            left_out=max(len(found) - _MOST_GROUPS, 0),
            problem=problem,
            **await head_of(call, rates, group),
        )

    return routes


def where_of(kind: DeadGroup) -> str:
    """The condition that chooses the dead letters of one kind, to be read and changed by people."""
    reason = f'reason == "{kind.reason}"'
    if not kind.error:
        return f'{reason} and error == ""'
    parts = kind.error.split("…")
    pattern = "^" + _DETAIL.join(map(re.escape, parts[:_MOST_PARTS]))
    if len(kind.error) < _CUT and len(parts) <= _MOST_PARTS:
        pattern += r"(?:\n|$)"
    return f"{reason} and error ~ {_quoted(pattern)}"


def both(one: str, other: str) -> str:
    """Two conditions as one."""
    return f"({one}) and {other}" if one else other


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
