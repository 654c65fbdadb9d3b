"""The server and its folder: room on disk, how long syncs take, what is in force; and what administrators did."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from holdfast.config.settings_file import DEFAULT, Effective, Origin, Setting
from holdfast.env.process import descriptor_limit, open_descriptors
from holdfast.protocol.messages import Wire
from holdfast.server.api.admin import effective_of
from holdfast.server.audit import Audit
from holdfast.server.calls import Call
from holdfast.server.console.rendering import render
from holdfast.server.http.messages import Response
from holdfast.server.metrics import sync_times
from holdfast.server.routing import Routes
from holdfast.server.service import Service
from holdfast.settings import BrokerSettings

_SAID: Final = Origin("environment", "said at the start")


class HealthQuery(Wire, kw_only=True):
    """Whether to show every setting, or only those that somebody set."""

    all: bool = False


class AuditPageQuery(Wire, kw_only=True):
    """How many of the newest acts."""

    limit: Annotated[int, Meta(ge=1, le=1_000)] = 100


health_routes = Routes("console")


@health_routes.add("GET", "/ui/health", action="read", query=HealthQuery, hidden=True)
async def health(call: Call) -> Response:
    """How the server does."""
    service = call.service
    settings = list(_settings(service))
    changed = [each for each in settings if each.origin != DEFAULT]
    clock = service.world.clock
    return render(
        call,
        "health.html",
        query=call.query,
        folder=service.folder,
        began_ns=service.began_ns,
        uptime_s=(clock.monotonic_ns() - service.began_monotonic_ns) / 1e9,
        connections=service.connections(),
        most_connections=service.settings.max_connections,
        descriptors=open_descriptors(),
        most_descriptors=descriptor_limit(),
        waiting=service.waits.waiting,
        most_waiting=service.waits.most,
        leaving=service.leaving,
        settings=settings if call.query.all else changed,
        every=len(settings),
        **await asyncio.to_thread(_disk, call),
    )


def _settings(service: Service) -> Iterator[Setting]:
    """All that is in force; what is no default and comes from nowhere was said to whoever started the server."""
    usual = {each.name: each.value for each in Effective(broker=BrokerSettings()).settings()}
    for each in effective_of(service).settings():
        is_said = each.origin == DEFAULT and each.value != usual[each.name]
        yield msgspec.structs.replace(each, origin=_SAID) if is_said else each


def _disk(call: Call) -> dict[str, Any]:
    engine = call.service.engine
    topics = engine.open_topics()
    segments = [segment for topic in topics for partition in topic.partitions for segment in partition.log.segments()]
    return {
        "free_bytes": engine.world.disk.free_bytes(engine.folder),
        "syncs": sync_times(engine),
        "topics": len(engine.topics()),
        "open_topics": len(topics),
        "partitions": sum(len(topic.partitions) for topic in topics),
        "segments": len(segments),
        "log_bytes": sum(segment.bytes for segment in segments),
        "traces_lost": engine.traces.log.lost,
    }


def audit_page_routes(audit: Audit | None) -> Routes:
    """The page of the audit log; without one it says so."""
    routes = Routes("console")

    @routes.add("GET", "/ui/audit", action="admin", query=AuditPageQuery, hidden=True)
    async def acts(call: Call) -> Response:
        """What administrators did."""
        limit = call.query.limit
        found = None if audit is None else await asyncio.to_thread(audit.last, limit)
        refused = [] if audit is None else await asyncio.to_thread(audit.refusals.last, limit)
        return render(call, "audit.html", acts=found, refused=refused, query=call.query)

    return routes
