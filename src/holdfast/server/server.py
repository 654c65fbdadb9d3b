"""The server: how it starts and stops, and the process that runs it."""

from __future__ import annotations

import asyncio
import errno
import logging
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

from holdfast.broker.engine import BrokerEngine
from holdfast.config.settings_file import Effective
from holdfast.env import World
from holdfast.env.disk import replaceable
from holdfast.env.process import environment
from holdfast.env.sockets import listen_unix
from holdfast.errors import BadSettings, HoldfastError, Unavailable
from holdfast.local.aio.broker import AsyncLocalBrokerPort
from holdfast.local.aio.opening import open_broker_port_async
from holdfast.server.access.callers import Access, check_listening, tls_context
from holdfast.server.api import admin, dead, enqueue, groups, locks, queues, streams, topics
from holdfast.server.api.admin import audit_routes, description_routes, metrics_routes
from holdfast.server.app import Auditor, ServerApp
from holdfast.server.audit import Audit, CallAuditor, open_audit
from holdfast.server.console.pages import console_routes
from holdfast.server.console.rendering import error_page
from holdfast.server.http.connection import HttpServer, Meter
from holdfast.server.limits import ConnectionLimits
from holdfast.server.metrics import ServerMetrics
from holdfast.server.routing import Routes
from holdfast.server.service import Service
from holdfast.server.turns import FairThreads
from holdfast.settings import BrokerSettings, ServerSettings
from holdfast.telemetry.export import TraceExport
from holdfast.telemetry.otel import ENDPOINT, TRACES_ENDPOINT, export

# The routes of every server. Metrics, console and audit log are added where they are enabled.
API: Final[Sequence[Routes]] = (
    enqueue.routes,
    queues.routes,
    queues.payload_routes,
    streams.routes,
    dead.routes,
    topics.routes,
    dead.delayed_routes,
    enqueue.producer_routes,
    groups.routes,
    locks.routes,
    admin.trace_routes,
    admin.settings_routes,
    admin.routes,
    admin.health_routes,
)


logger = logging.getLogger(__name__)


class Server:
    """Serves one data folder. `start` and `close` it from the loop that it runs on."""

    def __init__(
        self,
        world: World,
        port: AsyncLocalBrokerPort,
        settings: ServerSettings,
        *,
        meter: Meter | None = None,
        auditor: Auditor | None = None,
        more: Sequence[Routes] = (),
    ) -> None:
        self.settings = settings
        self.port = port
        self.service = Service(world, port, settings)
        self.access = Access(settings, world)
        self.service.tokens_problem = self.access.tokens_problem
        self._meter = meter or Meter()
        described = description_routes(lambda: self.app.router.routes)
        self.app = ServerApp(self.service, self.access, [*API, *more, described], self._meter, auditor)
        self.http = HttpServer(self.app.handle, self.app.refuse, limits_of(settings), self._meter)
        self.service.connections = lambda: len(self.http.connections)

    async def listen(self, tls: ssl.SSLContext | None = None) -> list[str]:
        """Listen on the addresses in the settings. Returns them as URLs."""
        scheme = "http" if tls is None else "https"
        found = []
        try:
            addresses = await self.http.listen(self.settings.host, self.settings.port, tls)
        except OSError as error:
            raise _not_there(self.settings, error) from None
        for host, port in addresses:
            found.append(f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}")
        if self.settings.socket is not None:
            await self.http.listen_on(_socket_at(self.settings.socket))
            found.append(f"unix:{self.settings.socket}")
        return found

    async def drain(self) -> bool:
        """Take no more calls, end those that wait, finish the others. Returns whether all were finished."""
        self.service.leave()
        finished = await self.http.close(self.settings.drain_ms / 1000)
        await self.service.publishing.settle()
        self.service.pool.close()
        return finished

    async def close(self) -> bool:
        """Drain, then sync and close the folder."""
        finished = await self.drain()
        await self.service.scans.close()
        await self.port.close()
        return finished


def _socket_at(path: str) -> object:
    """Open a Unix socket at the path. Raises BadSettings if that fails, or if another user could replace it."""
    try:
        why = replaceable(path)
        if why is None:
            return listen_unix(path)
    except OSError as error:
        why = error.strerror or str(error)
    raise BadSettings(
        f"the server cannot listen at {path}: {why}. Choose another place for the socket, such as a folder of its own"
    )


def _not_there(settings: ServerSettings, error: OSError) -> HoldfastError:
    """The error for an address that cannot be listened on, worded the same for all event loops."""
    place = f"{settings.host}:{settings.port}"
    if error.errno == errno.EADDRINUSE:
        return Unavailable(
            f"the server cannot listen at {place}: another program does already. Stop that one, or choose another "
            "port with --port, or port in [server]; 0 is any that is free"
        )
    if error.errno == errno.EACCES:
        return BadSettings(f"the server cannot listen at {place}: ports below 1024 are for root. Choose a higher one")
    return BadSettings(f"the server cannot listen at {place}: {error.strerror or error}. See whether host is right")


def limits_of(settings: ServerSettings) -> ConnectionLimits:
    """The limits of a connection."""
    return ConnectionLimits(
        header_bytes=settings.max_header_bytes,
        body_bytes=settings.max_request_bytes,
        header_s=settings.header_timeout_ms / 1000,
        body_grace_s=settings.body_timeout_ms / 1000,
        body_bytes_per_s=settings.min_body_bytes_per_s,
        idle_s=settings.idle_timeout_ms / 1000,
        write_s=settings.write_timeout_ms / 1000,
        connections=settings.max_connections,
        connections_per_address=settings.max_connections_per_address,
    )


def event_loop() -> Callable[[], asyncio.AbstractEventLoop]:
    """The factory of the fastest event loop available: uvloop's if it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


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
    """Open a folder and serve it until `told_to_go` is done, then drain and close it.

    Returns whether all calls in progress were finished.
    """
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
    """A server with the API, metrics, audit log and, if enabled, the console."""
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
    """Export traces to the endpoint in the settings or in OpenTelemetry's environment variables; None without one.

    A setting that cannot be used is an error. For a variable there is only a warning: it may be meant for another
    program on the machine.
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
