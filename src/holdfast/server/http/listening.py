"""Listening for connections, and what they all have in common: their deadlines, their number, their end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ssl
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias

from holdfast.env.disk import replaceable
from holdfast.env.sockets import listen_unix
from holdfast.errors import BadSettings, HoldfastError, Unavailable
from holdfast.server.http.connection import Answer, HttpConnection
from holdfast.server.http.heads import KnownHead, KnownHeads
from holdfast.server.http.messages import DeferredAnswer, Meter, Refused, RenderedAnswer, Request, Response
from holdfast.server.limits import ConnectionAdmission, ConnectionLimits
from holdfast.settings import ServerSettings

_LOOK_EVERY_S: Final = 0.5
_BACKLOG: Final = 1024
_LAST_WORDS_S: Final = 2.0
# Since Python 3.13 a loop removes the socket's file on close, by name. That name may go through a descriptor that is
# closed by then, and the next owner's socket may be there already. So the code that created the file removes it.
_KEEP_FILE: Final[dict[str, Any]] = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}


def socket_at(path: str) -> object:
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


def not_there(settings: ServerSettings, error: OSError) -> HoldfastError:
    """The error for an address that cannot be listened on, worded the same for all event loops."""
    place = f"{settings.host}:{settings.port}"
    if error.errno == errno.EADDRINUSE:
        return Unavailable(
            f"the server cannot listen at {place}: another program already does. Stop that one, or choose another "
            "port with --port, or port in [server]; 0 means any free port"
        )
    if error.errno == errno.EACCES:
        return BadSettings(f"the server cannot listen at {place}: ports below 1024 are for root. Choose a higher one")
    return BadSettings(f"the server cannot listen at {place}: {error.strerror or error}. Check the setting host")


# Answers a request with a known head: its sequence number and body, the peer and its certificate. None or an error if
# it takes more than one step; the error is then the answer.
AnswerKnown: TypeAlias = Callable[
    [KnownHead, int | None, bytes, str, Any], RenderedAnswer | DeferredAnswer | Exception | None
]


def _never(*_: object) -> None:
    """Answer nothing at once."""


class HttpServer:
    """Accepts connections and passes each request to `handle`."""

    def __init__(
        self,
        handle: Callable[[Request], Awaitable[Answer]],
        refuse: Callable[[Refused], Response],
        limits: ConnectionLimits,
        meter: Meter,
        answer_known: AnswerKnown = _never,
        heads: KnownHeads | None = None,
    ) -> None:
        self.handle = handle
        self.answer_known = answer_known
        self.heads = KnownHeads() if heads is None else heads
        self.refuse = refuse
        self.limits = limits
        self.connections: set[HttpConnection] = set()
        self._admission = ConnectionAdmission(limits)
        self._meter = meter
        self._servers: list[asyncio.Server] = []
        self._watch: asyncio.Task[None] | None = None

    async def listen(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> list[tuple[str, int]]:
        """Listen on an address. Returns the bound addresses, which tell the port if `port` is 0."""
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
        """Listen on a Unix socket that is already open."""
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
        """Close overdue connections. Checking all of them now and then costs less than a timer for each request."""
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
        """Accept no new connections. Close idle ones now, and the others after their current request."""
        for server in self._servers:
            server.close()
        self._servers.clear()
        for connection in list(self.connections):
            connection.leave()

    async def close(self, limit_s: float) -> bool:
        """Stop when all requests in progress are answered, or after `limit_s`. Returns whether all were answered."""
        self.stop_listening()
        until = self._loop.time() + limit_s
        while any(connection.busy for connection in self.connections) and self._loop.time() < until:
            await asyncio.sleep(0.01)
        unfinished = [connection for connection in self.connections if connection.busy]
        for connection in list(self.connections):
            connection.abort()
        # Calls that were cut off give back their messages, which must happen while the folder is still open.
        tasks = [connection.task for connection in unfinished if connection.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=_LAST_WORDS_S)
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
        return not unfinished
