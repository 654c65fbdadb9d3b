"""A server: a broker, the routes to it, and the sockets where it listens."""

from __future__ import annotations

import asyncio
import errno
import logging
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final, Protocol

from holdfast.api.aio.broker import AsyncBroker
from holdfast.env import World
from holdfast.env.disk import replaceable
from holdfast.env.sockets import listen_unix
from holdfast.errors import BadSettings, HoldfastError, Unavailable
from holdfast.server.access.callers import Access
from holdfast.server.api import (
    admin,
    dead,
    enqueue,
    groups,
    locks,
    payloads,
    producers,
    queues,
    streams,
    topics,
    traces,
)
from holdfast.server.api.description import description_routes
from holdfast.server.app import App, Auditor, Meter
from holdfast.server.http.admission import Limits
from holdfast.server.http.server import Counts, HttpServer
from holdfast.server.routing import Routes
from holdfast.server.service import Service
from holdfast.settings import ServerSettings

# For servers that count nothing: those of processes that only share a folder.


class NoMeter:
    """Is told of everything, and keeps nothing."""

    def request_done(
        self, route: str, method: str, status: int, seconds: float, bytes_in: int, bytes_out: int
    ) -> None: ...

    def connection_opened(self) -> None: ...

    def connection_closed(self) -> None: ...

    def connection_refused(self, reason: str) -> None: ...

    def counted(self, route: str, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        return chunks


# What every server offers; metrics, pages and the audit log come on top where they are wanted.


API: Final[Sequence[Routes]] = (
    enqueue.routes,
    queues.routes,
    payloads.routes,
    streams.routes,
    dead.routes,
    topics.routes,
    dead.delayed_routes,
    producers.routes,
    groups.routes,
    locks.routes,
    traces.routes,
    admin.settings_routes,
    admin.routes,
    admin.health_routes,
)


logger = logging.getLogger(__name__)


class MeterAndCounts(Meter, Counts, Protocol):
    """Who is told of answers and connections."""


class Server:
    """Serves one broker. `start` and `close` it from the loop that it runs on."""

    def __init__(
        self,
        world: World,
        broker: AsyncBroker,
        settings: ServerSettings,
        *,
        meter: MeterAndCounts | None = None,
        auditor: Auditor | None = None,
        more: Sequence[Routes] = (),
    ) -> None:
        self.settings = settings
        self.broker = broker
        self.service = Service(world, broker, settings)
        self.access = Access(settings, world)
        self.service.tokens_problem = self.access.tokens_problem
        self._meter = meter or NoMeter()
        described = description_routes(lambda: self.app.router.routes)
        self.app = App(self.service, self.access, [*API, *more, described], self._meter, auditor)
        self.http = HttpServer(self.app.handle, self.app.refuse, limits_of(settings), self._meter)
        self.service.connections = lambda: len(self.http.connections)

    async def listen(self, tls: ssl.SSLContext | None = None) -> list[str]:
        """Listen where the settings say; answers with the addresses for people."""
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
        """Take no more calls, let nobody wait, finish what is under way; answers whether all of it was."""
        self.service.leave()
        finished = await self.http.close(self.settings.drain_ms / 1000)
        await self.service.publishing.settle()
        self.service.pool.close()
        return finished

    async def close(self) -> bool:
        """Drain, then sync and let go of the folder."""
        finished = await self.drain()
        await self.service.scans.close()
        await self.broker.close()
        return finished


def _socket_at(path: str) -> object:
    """A Unix socket at the path, where nobody can put another in its place; BadSettings where there can be none."""
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
    """Why it cannot listen where it was told to; the loops word it each in their own way."""
    place = f"{settings.host}:{settings.port}"
    if error.errno == errno.EADDRINUSE:
        return Unavailable(
            f"the server cannot listen at {place}: another program does already. Stop that one, or choose another "
            "port with --port, or port in [server]; 0 is any that is free"
        )
    if error.errno == errno.EACCES:
        return BadSettings(f"the server cannot listen at {place}: ports below 1024 are for root. Choose a higher one")
    return BadSettings(f"the server cannot listen at {place}: {error.strerror or error}. See whether host is right")


def limits_of(settings: ServerSettings) -> Limits:
    """What a connection is held to."""
    return Limits(
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
    """The fastest loop there is: uvloop's, where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop
