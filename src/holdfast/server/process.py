"""The life of a server process: open the folder, listen, serve until told to stop, drain, close."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

from holdfast.broker.engine import BrokerEngine
from holdfast.config.settings_file import Effective
from holdfast.env import World
from holdfast.env.process import environment
from holdfast.errors import BadSettings
from holdfast.local.aio.broker import AsyncLocalBrokerPort
from holdfast.local.aio.opening import open_broker_port_async
from holdfast.server.access.callers import check_listening
from holdfast.server.access.tls import tls_context
from holdfast.server.api.admin import audit_routes, metrics_routes
from holdfast.server.audit import Audit, CallAuditor, open_audit
from holdfast.server.console.pages import console_routes
from holdfast.server.console.rendering import error_page
from holdfast.server.metrics import ServerMetrics
from holdfast.server.server import Server
from holdfast.server.turns import FairThreads
from holdfast.settings import BrokerSettings, ServerSettings
from holdfast.telemetry.export import TraceExport
from holdfast.telemetry.otel import ENDPOINT, TRACES_ENDPOINT, export

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
    """Serve a folder until told to stop. Returns whether all calls in progress were finished."""
    for warning in check_listening(settings):
        logger.warning(warning)
    asyncio.get_running_loop().set_default_executor(FairThreads())
    tls = tls_context(settings, world.clock)
    port = await open_broker_port_async(folder, settings=broker_settings)
    try:
        audit = open_audit(world, port.place, settings)
        server = make_server(world, port, settings, audit=audit)
        server.service.effective = effective
        addresses = await server.listen(tls)
        if opened is not None:
            opened(server.service.engine, audit, server.access.tokens_problem)
    except BaseException:
        await port.close()
        raise
    ready(addresses)
    try:
        await told_to_go
        logger.info(
            "going", extra={"connections": len(server.http.connections), "waiting": server.service.waits.waiting}
        )
        finished = await server.drain()
    finally:
        await port.close()
        audit.close()
    if not finished:
        logger.warning("calls were cut off", extra={"drain_ms": settings.drain_ms})
    return finished


def make_server(
    world: World, port: AsyncLocalBrokerPort, settings: ServerSettings, *, audit: Audit | None = None
) -> Server:
    """A server with everything: the API, the metrics, the pages."""
    engine = port.engine
    metrics = ServerMetrics(engine, most_groups=settings.metrics_groups)
    metrics.trace_export = start_export(engine, settings.otlp_endpoint, environment())
    audit = audit or open_audit(world, port.place, settings)
    more = [metrics_routes(metrics.render, asks=settings.metrics_auth), audit_routes(audit)]
    if settings.console:
        more += console_routes(engine, audit)
    server = Server(
        world,
        port,
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


_DISABLED: Final = "OTEL_SDK_DISABLED"


def start_export(engine: BrokerEngine, endpoint: str | None, environment: Mapping[str, str]) -> TraceExport | None:
    """Export to the endpoint of the settings, or of OpenTelemetry's variables; None where nobody asked for it.

    A setting that cannot be followed is an error. A variable may be meant for another program of the same machine.
    """
    if endpoint is not None:
        return export(engine, endpoint=endpoint)
    asked = environment.get(ENDPOINT) or environment.get(TRACES_ENDPOINT)
    if not asked or environment.get(_DISABLED, "").strip().lower() == "true":
        return None
    try:
        return export(engine)
    except BadSettings as error:
        logger.warning("traces are not exported", extra={"error": str(error)})
        return None
