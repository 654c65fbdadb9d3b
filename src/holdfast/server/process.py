"""The life of a server process: own the folder, listen, say so, serve until told to go, drain, let go."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from holdfast.broker.broker import BrokerEngine
from holdfast.embedded.aio_broker import AsyncBroker, open_broker
from holdfast.embedded.effective import Effective
from holdfast.env import World
from holdfast.env.environ import environment
from holdfast.server.access import check_listening
from holdfast.server.api.audit import audit_routes
from holdfast.server.api.health import metrics_routes
from holdfast.server.audit import Audit, open_audit
from holdfast.server.auditing import CallAuditor
from holdfast.server.console.pages import console_routes
from holdfast.server.console.rendering import error_page
from holdfast.server.metrics import ServerMetrics
from holdfast.server.otel import start_export
from holdfast.server.server import Server
from holdfast.server.tls import tls_context
from holdfast.server.turns import FairThreads
from holdfast.settings import BrokerSettings, ServerSettings

logger = logging.getLogger(__name__)


async def serve(
    world: World,
    folder: str,
    broker_settings: BrokerSettings,
    settings: ServerSettings,
    *,
    ready: Callable[[Sequence[str]], None],
    told_to_go: Awaitable[object],
    opened: Callable[[BrokerEngine, Audit, Callable[[], str]], None] | None = None,
    effective: Effective | None = None,
) -> bool:
    """Serve a folder until told to go; answers whether all that was under way then was finished."""
    for warning in check_listening(settings):
        logger.warning(warning)
    asyncio.get_running_loop().set_default_executor(FairThreads())
    tls = tls_context(settings, world.clock)
    broker = await open_broker(folder, settings=broker_settings)
    try:
        audit = open_audit(world, broker.folder, settings)
        server = make_server(world, broker, settings, audit=audit)
        server.service.effective = effective
        addresses = await server.listen(tls)
        if opened is not None:
            opened(broker._engine, audit, server.access.tokens_problem)
    except BaseException:
        await broker.close()
        raise
    ready(addresses)
    try:
        await told_to_go
        logger.info(
            "going", extra={"connections": len(server.http.connections), "waiting": server.service.waits.waiting}
        )
        finished = await server.drain()
    finally:
        await broker.close()
        audit.close()
    if not finished:
        logger.warning("calls were cut off", extra={"drain_ms": settings.drain_ms})
    return finished


def make_server(world: World, broker: AsyncBroker, settings: ServerSettings, *, audit: Audit | None = None) -> Server:
    """A server with everything: the API, the metrics, the pages."""
    metrics = ServerMetrics(broker._engine, most_groups=settings.metrics_groups)
    metrics.trace_export = start_export(broker._engine, settings.otlp_endpoint, environment())
    audit = audit or open_audit(world, broker.folder, settings)
    more = [metrics_routes(metrics.render, asks=settings.metrics_auth), audit_routes(audit)]
    if settings.console:
        more += console_routes(broker._engine, audit)
    server = Server(
        world,
        broker,
        settings,
        meter=metrics,
        auditor=CallAuditor(audit),
        more=more,
    )
    if settings.console:
        server.app.error_page = error_page
    service = server.service
    metrics.gauge("http_waiting", "Calls that wait for messages.", lambda: service.waits.waiting)
    metrics.gauge(
        "http_windows_unsettled",
        "Messages that streams have sent and nobody has settled.",
        lambda: len(service.windows),
    )
    metrics.gauge(
        "tokens_file_unusable",
        "1 while the tokens file, as it is now, cannot be used, and what it said before holds.",
        lambda: float(bool(server.access.tokens_problem())),
    )
    return server
