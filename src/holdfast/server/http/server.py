"""All connections of a server: listening, deadlines and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

from holdfast.server.http.admission import ConnectionAdmission, ConnectionLimits
from holdfast.server.http.connection import Answer, HttpConnection
from holdfast.server.http.head import Refused
from holdfast.server.http.messages import Request, Response

_LOOK_EVERY_S: Final = 0.5
_BACKLOG: Final = 1024
_LAST_WORDS_S: Final = 2.0
# From 3.13 on a loop would remove the socket's file when it closes, known by its name and inode. The name may be one by
# way of a descriptor that is closed, and a successor's socket may be there already: who made the file removes it.
_KEEP_FILE: Final[dict[str, Any]] = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}


class Meter:
    """Who is told of connections and answers. This one keeps nothing: servers that only share a folder have it."""

    def connection_opened(self) -> None: ...

    def connection_closed(self) -> None: ...

    def connection_refused(self, reason: str) -> None: ...

    def request_done(
        self, route: str, method: str, status: int, seconds: float, bytes_in: int, bytes_out: int
    ) -> None: ...

    def counted(self, route: str, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The pieces of an answer, which are counted as they go out."""
        return chunks


class HttpServer:
    """Listens, and hands each request to `handle`."""

    def __init__(
        self,
        handle: Callable[[Request], Awaitable[Answer]],
        refuse: Callable[[Refused], Response],
        limits: ConnectionLimits,
        meter: Meter,
    ) -> None:
        self.handle = handle
        self.refuse = refuse
        self.limits = limits
        self.connections: set[HttpConnection] = set()
        self._admission = ConnectionAdmission(limits)
        self._meter = meter
        self._servers: list[asyncio.Server] = []
        self._watch: asyncio.Task[None] | None = None

    async def listen(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> list[tuple[str, int]]:
        """Listen at an address; answers with the addresses, which tell a port that was chosen."""
        server = await self._loop.create_server(
            self._connect,
            host,
            port,
            ssl=tls,
            backlog=_BACKLOG,
            ssl_handshake_timeout=None if tls is None else self.limits.header_s,
        )
        self._add(server)
        return [socket.getsockname()[:2] for socket in server.sockets]

    async def listen_on(self, listening: object) -> None:
        """Listen at a Unix socket that is open already."""
        options = {"sock": listening, "backlog": _BACKLOG, **_KEEP_FILE}
        self._add(await self._loop.create_unix_server(self._connect, **options))

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    def _connect(self) -> HttpConnection:
        return HttpConnection(self, self._loop)

    def _add(self, server: asyncio.Server) -> None:
        self._servers.append(server)
        if self._watch is None:
            self._watch = self._loop.create_task(self._cut_off_overdue())

    async def _cut_off_overdue(self) -> None:
        """One look at all of them now and then costs less than a timer for each request."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            now = self._loop.time()
            for connection in list(self.connections):
                if connection.deadline is not None and connection.deadline < now:
                    connection.overdue()

    def opened(self, connection: HttpConnection) -> None:
        self._admission.admit(connection, self.connections)
        self.connections.add(connection)
        self._meter.connection_opened()

    def closed(self, connection: HttpConnection) -> None:
        self.connections.discard(connection)
        self._admission.leave(connection)
        self._meter.connection_closed()

    def cut_off(self, why: str) -> None:
        self._meter.connection_refused(why)

    def stop_listening(self) -> None:
        """Take no new connections; those that rest are closed, the others after the request that is under way."""
        for server in self._servers:
            server.close()
        self._servers.clear()
        for connection in list(self.connections):
            connection.leave()

    async def close(self, limit_s: float) -> bool:
        """End, when all that is under way is answered or the time is over; answers whether all of it was."""
        self.stop_listening()
        until = self._loop.time() + limit_s
        while any(connection.busy for connection in self.connections) and self._loop.time() < until:
            await asyncio.sleep(0.01)
        unfinished = [connection for connection in self.connections if connection.busy]
        for connection in list(self.connections):
            connection.abort()
        # What was cut off gives back what it has in hand: while there is still a folder to note it in.
        tasks = [connection.task for connection in unfinished if connection.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=_LAST_WORDS_S)
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
        return not unfinished
