"""The console of a folder that another process owns: requests to a port are relayed to the owner's socket.

Only this user can connect to the owner's socket, so every caller there has all rights. But any web page in a browser
can reach the port. So the relay makes the same checks as a server without tokens: is the request from one of our pages?
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final

import httptools

from holdfast.env.sockets import check_listener, short_name
from holdfast.errors import Forbidden, HoldfastError, Unavailable
from holdfast.protocol.media import JSON, ErrorAnswer, encode, fault_of
from holdfast.server.callers import check_host, check_origin
from holdfast.server.console.rendering import ONLY_LOOKS
from holdfast.server.http.connection import Answer
from holdfast.server.http.listening import HttpServer
from holdfast.server.http.messages import ALWAYS_SAID, Meter, Refused, Request, Response, StreamResponse
from holdfast.server.limits import limits_of
from holdfast.server.routing import status_of
from holdfast.settings import ServerSettings

_HOST: Final = "127.0.0.1"
_CHUNK: Final = 64 * 1024
_OURS: Final = frozenset({"connection", "content-length", "content-type", "transfer-encoding", "keep-alive"})
_SAID_ANYWAY: Final = _OURS | ALWAYS_SAID
_LOOKS: Final = frozenset({"GET", "HEAD"})


class Relay:
    """Relays requests to the owner of a folder."""

    def __init__(self, socket: str, settings: ServerSettings) -> None:
        self._socket = socket
        self._settings = settings

    async def handle(self, request: Request) -> Answer:
        """Send a request to the owner and return its answer."""
        try:
            check_origin(request.header("origin"), request.header("host"))
            check_host(request.header("host"), (_HOST,))
            if self._settings.read_only and request.method not in _LOOKS:
                raise Forbidden(
                    "this console is read-only, because it was started with --read-only: restart it without that option"
                )
            return await self._answer(request)
        except HoldfastError as error:
            return refusal(error)

    async def _answer(self, request: Request) -> Answer:
        body = await request.read(self._settings.max_request_bytes, self._settings.max_unpack_ratio)
        try:
            with short_name(self._socket) as name:
                reader, writer = await asyncio.open_unix_connection(name)
            try:
                check_listener(writer.get_extra_info("socket").fileno(), self._socket)
            except BaseException:
                writer.close()
                raise
        except OSError as error:
            raise Unavailable(
                f"the owner of the folder does not respond at {self._socket}: {error.strerror or error}; "
                "if it has ended, start `holdfast ui` again"
            ) from None
        answer = _OwnerAnswer(reader, writer)
        try:
            writer.write(_head(request, len(body), only_looks=self._settings.read_only) + body)
            await answer.read_head()
        except BaseException:
            writer.close()
            raise
        status, headers = answer.parser.get_status_code(), dict(answer.headers)
        if request.method == "HEAD" or status in (204, 304):
            writer.close()
            return Response(status, b"", headers.get("content-type", ""), headers=answer.passed_on())
        length = headers.get("content-length")
        return StreamResponse(
            answer.chunks(),
            headers.get("content-type", ""),
            status=status,
            headers=answer.passed_on(),
            length=None if length is None else int(length),
        )


class _OwnerAnswer:
    """The owner's answer, read as it arrives."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.parser: Any = httptools.HttpResponseParser(self)
        self.headers: list[tuple[str, str]] = []
        self._whole_head = self._ended = False
        self._bodies: list[bytes] = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.decode("latin-1").lower(), value.decode("latin-1")))

    def on_headers_complete(self) -> None:
        self._whole_head = True

    def on_body(self, content: bytes) -> None:
        self._bodies.append(content)

    def on_message_complete(self) -> None:
        self._ended = True

    def passed_on(self) -> list[tuple[str, str]]:
        return [(name, value) for name, value in self.headers if name not in _SAID_ANYWAY]

    async def read_head(self) -> None:
        while not self._whole_head:
            content = await self._reader.read(_CHUNK)
            if not content:
                raise Unavailable("the owner of the folder has ended; start `holdfast ui` again")
            self.parser.feed_data(content)

    async def chunks(self) -> AsyncIterator[bytes]:
        try:
            while True:
                bodies, self._bodies = self._bodies, []
                for content in bodies:
                    yield content
                if self._ended:
                    return
                more = await self._reader.read(_CHUNK)
                if not more:
                    return
                self.parser.feed_data(more)
        finally:
            self._writer.close()


def _head(request: Request, length: int, *, only_looks: bool) -> bytes:
    lines = [f"{request.method} {request.target.decode('latin-1')} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in request.headers.items() if name not in _OURS]
    if "content-type" in request.headers:
        lines.append(f"content-type: {request.headers['content-type']}")
    if only_looks:
        lines.append(f"{ONLY_LOOKS}: 1")
    lines += ["connection: close", f"content-length: {length}", "", ""]
    return "\r\n".join(lines).encode("latin-1")


def refusal(error: HoldfastError) -> Response:
    """The answer for an error."""
    status = error.status if isinstance(error, Refused) else status_of(error)
    return Response(status, encode(ErrorAnswer(error=fault_of(error)), JSON), JSON)


async def relay(
    socket: str, settings: ServerSettings, *, ready: Callable[[Sequence[str]], None], stop_asked: Awaitable[object]
) -> None:
    """Relay between a local port and the owner's socket until `stop_asked` is done."""
    server = HttpServer(Relay(socket, settings).handle, refusal, limits_of(settings), Meter())
    ((host, port),) = await server.listen(_HOST, settings.port)
    ready([f"http://{host}:{port}"])
    try:
        await stop_asked
    finally:
        await server.close(1.0)
