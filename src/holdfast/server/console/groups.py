"""Groups of both modes: how far behind each is, who reads, and where it goes on."""

from __future__ import annotations

import asyncio
from typing import Annotated, Final

from msgspec import Meta

from holdfast.api.topics import GroupInfo
from holdfast.broker.streams.positions import GroupFacts
from holdfast.protocol.messages import Wire
from holdfast.server.api.groups import _facts, _offsets, is_shown
from holdfast.server.calls import Call
from holdfast.server.console.overview import OLD_S
from holdfast.server.console.rendering import render
from holdfast.server.http.messages import Response
from holdfast.server.routing import Routes

routes = Routes("console")

_MOST: Final = 500


class GroupsPageQuery(Wire, kw_only=True):
    """Which groups to show: those with this in their name or their topic's."""

    name: Annotated[str, Meta(max_length=200)] = ""


@routes.add("GET", "/ui/groups", action="read", scope="any", query=GroupsPageQuery, hidden=True)
async def groups(call: Call) -> Response:
    """All groups and how far behind they are."""
    query: GroupsPageQuery = call.query
    wanted = query.name.lower()
    found = [
        info
        for info in await call.service.port.groups(None)
        if is_shown(call, info) and (wanted in info.name.lower() or wanted in info.topic.lower())
    ]
    found.sort(key=lambda info: (info.topic, info.name))
    return render(
        call,
        "groups.html",
        rows=found[:_MOST],
        left_out=max(len(found) - _MOST, 0),
        query=query,
        old_s=OLD_S,
        may_seek={info.topic: call.principal.may("admin", info.topic) for info in found},
    )


@routes.add("GET", "/ui/groups/{group}", action="read", scope="any", hidden=True)
async def group(call: Call) -> Response:
    """One group: its place in each partition, and in stream mode its members."""
    name = call.path["group"]
    infos: list[GroupInfo] = [
        info for info in await call.service.port.groups(None) if info.name == name and is_shown(call, info)
    ]
    facts: GroupFacts | None = await asyncio.to_thread(_facts, call)
    offsets = [lag for lag in await asyncio.to_thread(_offsets, call, None) if call.principal.sees(lag.topic)]
    return render(
        call,
        "group.html",
        name=name,
        infos=infos,
        facts=facts,
        offsets=offsets,
        old_s=OLD_S,
        may_seek={info.topic: call.principal.may("admin", info.topic) for info in infos},
    )
