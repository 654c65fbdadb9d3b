"""The server itself: how it does, who waits, and everything on disk now."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import holdfast
from holdfast.env.descriptors import descriptor_limit, open_descriptors
from holdfast.protocol.admin import LimitQuery, Status, WaitersAt, WaitersTold
from holdfast.server.calls import Call
from holdfast.server.routing import Routes

routes = Routes("admin")


@routes.add("GET", "/v1/admin/status", action="read", answers=Status)
async def status(call: Call) -> Status:
    """How the server does: since when, on which folder, with how many callers."""
    service = call.service
    topics = await service.broker.topics()
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
    )


@routes.add("POST", "/v1/admin/sync", action="admin", status=204, act=True, errors=("disk_full",))
async def sync(call: Call) -> None:
    """Return when everything said so far, acks included, is on disk."""
    await call.service.broker.sync()


@routes.add("GET", "/v1/admin/waiters", action="read", query=LimitQuery, answers=WaitersTold)
async def waiters(call: Call) -> WaitersTold:
    """Who waits for messages, by topic and group, the longest lines first."""
    query: LimitQuery = call.query
    service = call.service
    lines = [
        WaitersAt(
            topic=group.topic,
            group=group.group,
            waiters=len(group._group.waiters),
            streams=service.windows.of(group),
        )
        for group in service.groups()
        if call.principal.may_use_queue_group(group.group)
    ]
    busy = sorted((line for line in lines if line.waiters or line.streams), key=lambda line: -line.waiters)
    return WaitersTold(waiting=service.waits.waiting, max_waiters=service.waits.most, lines=busy[: query.limit])
