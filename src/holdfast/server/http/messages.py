"""Requests and responses: strict checks of heads, bodies read as they arrive, framing of answers."""

from __future__ import annotations

import ipaddress
import re
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from functools import lru_cache
from http import HTTPStatus
from typing import Any, Final, Protocol, TypeAlias
from urllib.parse import unquote

import zstandard

from holdfast.env.process import asyncio
from holdfast.errors import Forbidden, InvalidRequest, MessageTooLarge, Unavailable
from holdfast.large import CHUNK_BYTES, LargeValue
from holdfast.protocol.media import RAW
from holdfast.server.limits import ConnectionLimits

# Compressed bodies. A few hundred bytes can decompress to gigabytes, so the output is counted as it is produced:
# against the limit on bodies and, above `FREE_BYTES`, against the size of the input.

FREE_BYTES: Final = 1024 * 1024  # any body may decompress to this size

_AT_ONCE: Final = 1024
_MOST_WINDOW_BYTES: Final = 8 * 1024 * 1024


class Unpacker:
    """Decompresses a body that was sent as gzip or zstd."""

    def __init__(self, name: str, most_bytes: int, most_ratio: int) -> None:
        self._name = name
        self._most_bytes = most_bytes
        self._most_ratio = most_ratio
        self._came = self._went = 0
        self._packed: Any
        if name == "gzip":
            self._packed = zlib.decompressobj(wbits=31)
        else:
            self._packed = zstandard.ZstdDecompressor(max_window_size=_MOST_WINDOW_BYTES).decompressobj()

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Decompress the next part, piece by piece. Raises MessageTooLarge as soon as the output exceeds a limit."""
        try:
            # In small steps, so that the limits are checked often: a kilobyte may decompress to megabytes.
            for i in range(0, len(chunk), _AT_ONCE):
                if self._packed.eof:
                    raise self._broken("there is more data after its end")
                piece = chunk[i : i + _AT_ONCE]
                found = self._packed.decompress(piece)
                self._came += len(piece)
                self._went += len(found)
                self._check()
                if found:
                    yield found
        except (zlib.error, zstandard.ZstdError) as error:
            raise self._broken(str(error)) from None

    def end(self) -> None:
        """Raise InvalidRequest if the body is incomplete or has trailing bytes."""
        if not self._packed.eof:
            raise self._broken("it ends before it is complete")
        if self._packed.unused_data:
            raise self._broken("there is more data after its end")

    def _check(self) -> None:
        if self._went > self._most_bytes:
            raise too_large(self._most_bytes)
        if self._went > FREE_BYTES and self._went > self._came * self._most_ratio:
            raise MessageTooLarge(
                f"the request's body decompresses to more than {self._most_ratio} times what was sent, which is the "
                "limit "
                f"(max_unpack_ratio) above {FREE_BYTES} bytes; nothing was done. Send less, or send it as "
                "it is"
            )

    def _broken(self, why: str) -> InvalidRequest:
        return InvalidRequest(
            f"the body is not {self._name} as its content-encoding says: {why}. Nothing was done; send it in that "
            "encoding, or without the header"
        )


def unpacker(encoding: str, most_bytes: int, most_ratio: int) -> Unpacker | None:
    """The unpacker for a content encoding; None if there is none. Raises Refused for an unknown one."""
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return None
    if name not in ("gzip", "zstd"):
        raise Refused(f"the content-encoding {encoding!r} is not supported; send gzip, zstd or none", status=415)
    return Unpacker(name, most_bytes, most_ratio)


def too_large(most_bytes: int) -> MessageTooLarge:
    """The error for a body over the limit, as sent or decompressed."""
    return MessageTooLarge(
        f"the request's body has more than {most_bytes} bytes, which is the limit; nothing was done. Send less"
    )


@lru_cache(maxsize=64)
def _media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


HIGH_BYTES: Final = 256 * 1024  # bytes received and not read yet, at which reading is paused
_TURN_BYTES: Final = 1024 * 1024
_SMALL_BYTES: Final = 64 * 1024  # a body up to this size needs no room in the caller's share of memory


class BodySource(Protocol):
    """The connection that a request's body arrives on."""

    def go_on(self) -> None:
        """Resume reading."""

    def expect(self) -> None:
        """Send 100 Continue to a client that waits for it before it sends the body."""


class _Nowhere:
    """The source of requests that came from no connection."""

    def go_on(self) -> None:
        """All of it is there, nobody waits, and there is nothing to close."""

    expect = abort = go_on


NOWHERE: Final = _Nowhere()


class Request:
    """One request. Its headers are complete; its body may still be arriving."""

    __slots__ = (
        "_chunks",
        "_waiter",
        "ask_room",
        "buffered",
        "certificate",
        "complete",
        "encrypted",
        "error",
        "failure",
        "gone",
        "headers",
        "in_reserve",
        "keep_alive",
        "key",
        "method",
        "on_end",
        "path",
        "peer",
        "query",
        "received",
        "source",
        "target",
    )

    def __init__(self, source: BodySource, peer: str, certificate: Any) -> None:
        self.source = source
        self.peer = peer
        self.certificate = certificate
        self.encrypted = certificate is not None
        self.method = ""
        self.target = b""
        self.path = ""
        self.query = ""
        self.headers: dict[str, str] = {}
        self.keep_alive = True
        self.in_reserve = False  # whether its connection is one of those reserved for health checks and admins
        self.complete = False
        self.gone = False
        self.error: Refused | None = None
        self.key: bytes | None = None  # of its head, if that may be kept
        self.failure: Exception | None = None  # why it could not be answered at once, although that was tried
        self.on_end: Callable[[], None] | None = None  # may raise to refuse a body that took long
        self.ask_room: Callable[[int], Awaitable[None]] | None = None  # waits for room in memory
        self.received = 0
        self.buffered = 0
        self._chunks: list[bytes] = []
        self._waiter: asyncio.Future[None] | None = None

    def header(self, name: str) -> str:
        """A header by its lowercase name; empty if there is none."""
        return self.headers.get(name, "")

    @property
    def media(self) -> str:
        """The media type of the body, without its parameters."""
        return _media_type(self.headers.get("content-type", ""))

    @property
    def packed(self) -> bool:
        """Whether the body is compressed."""
        encoding = self.headers.get("content-encoding")
        return encoding is not None and encoding.strip().lower() not in ("", "identity")

    def feed(self, chunk: bytes) -> None:
        """Add a part of the body."""
        self.received += len(chunk)
        self.buffered += len(chunk)
        self._chunks.append(chunk)
        if self._waiter is not None:
            self._wake()

    def end(self) -> None:
        """The body is complete."""
        self.complete = True
        if self._waiter is not None:
            self._wake()

    def fail(self, error: Refused) -> None:
        """Stop reading the body; the reader gets this error."""
        self.error = error
        self._wake()

    def lose(self) -> None:
        """The client has disconnected."""
        self.gone = True
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def raw_chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives, without decompressing it. Pieces that wait are joined."""
        while True:
            while self._chunks:
                if self.error is not None:
                    raise self.error
                chunk = self._taken()
                if not self.complete and self.buffered < HIGH_BYTES:
                    self.source.go_on()
                yield chunk
            if self.complete:
                if self.on_end is not None:
                    self.on_end()
                return
            if self.error is not None:
                raise self.error
            if self.gone:
                raise Refused("the client went away in the middle of its request", status=400)
            self.source.expect()
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def _taken(self) -> bytes:
        content = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self.buffered = 0
        return content

    async def chunks(self, most_bytes: int, most_ratio: int) -> AsyncIterator[bytes]:
        """Yield the body as it arrives, decompressed. Raises MessageTooLarge above `most_bytes`."""
        packed = unpacker(self.header("content-encoding"), most_bytes, most_ratio)
        if packed is None:
            total = 0
            async for chunk in self.raw_chunks():
                total += len(chunk)
                if total > most_bytes:
                    raise too_large(most_bytes)
                yield chunk
            return
        since = 0
        async for chunk in self.raw_chunks():
            for content in packed.feed(chunk):
                yield content
                since += len(content)
                if since > _TURN_BYTES:  # give other tasks a turn
                    since = 0
                    await asyncio.sleep(0)
        packed.end()

    @property
    def content(self) -> bytes:
        """The body of a request that is complete, which stays to be read."""
        return self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)

    async def read(self, most_bytes: int, most_ratio: int) -> bytes:
        """The whole body, decompressed."""
        if self.complete and "content-encoding" not in self.headers and self.on_end is None:  # the usual case
            if self.buffered > most_bytes:
                raise too_large(most_bytes)
            chunks, self._chunks = self._chunks, []
            self.buffered = 0
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)
        if not self.packed:
            return await self.read_raw(most_bytes)
        length = self.length
        most = most_bytes if length is None else min(most_bytes, max(length * most_ratio, FREE_BYTES))
        return await self._whole(self.chunks(most_bytes, most_ratio), most)

    async def read_raw(self, most_bytes: int) -> bytes:
        """The whole body as it was sent, without decompressing it."""
        if self.complete:
            if self.buffered > most_bytes:
                raise too_large(most_bytes)
            if self.on_end is not None:
                self.on_end()
            return self._taken() if self._chunks else b""
        length = self.length
        return await self._whole(self.raw_chunks(), most_bytes if length is None else min(most_bytes, length))

    async def _whole(self, chunks: AsyncIterator[bytes], most_bytes: int) -> bytes:
        """Join the chunks of a body of at most `most_bytes`. Waits for room as soon as the body is not small."""
        asked = (self.length or 0) > _SMALL_BYTES
        if asked:
            await self.need_room(most_bytes)
        found, total = [], 0
        async for chunk in chunks:
            total += len(chunk)
            if total > most_bytes:
                raise too_large(most_bytes)
            found.append(chunk)
            if total > _SMALL_BYTES and not asked:
                asked = True
                await self.need_room(most_bytes)
        return b"".join(found)

    @property
    def length(self) -> int | None:
        """The Content-Length; None if the client sent none."""
        text = self.headers.get("content-length", "")
        return int(text) if text.isdigit() else None

    async def need_room(self, size: int) -> None:
        """Wait until `size` bytes of the body may be in memory. Reading is paused meanwhile."""
        if self.ask_room is not None:
            await self.ask_room(size)

    def unpacked(self, content: bytes, most_bytes: int, most_ratio: int) -> Iterator[bytes]:
        """Decompress a body from `read_raw`, piece by piece."""
        packed = unpacker(self.header("content-encoding"), most_bytes, most_ratio)
        if packed is None:
            yield content
            return
        yield from packed.feed(content)
        packed.end()


Undelivered = Callable[[], Awaitable[None]]


class Response:
    """A complete answer. `undelivered` is called if it did not reach the client, `release` in any case."""

    __slots__ = ("body", "headers", "media", "release", "status", "undelivered")

    def __init__(
        self,
        status: int = 200,
        body: bytes = b"",
        media: str = "",
        *,
        headers: list[tuple[str, str]] | None = None,
        undelivered: Undelivered | None = None,
    ) -> None:
        self.status = status
        self.body = body
        self.media = media
        self.headers = headers or []
        self.undelivered = undelivered
        self.release: Callable[[], None] | None = None  # called when the answer is no longer in memory


# An answer as it is sent, and its `undelivered` and `release`.
RenderedAnswer: TypeAlias = tuple[bytes, Undelivered | None, Callable[[], None] | None]


class DeferredAnswer:
    """An answer that only waits for the disk: the rest of a handler, which goes on when a future is done.

    That takes no task, and costs a third of one. It is for handlers that wait for futures and nothing else: there is no
    current task while they run, and nothing can cancel them.
    """

    __slots__ = ("_steps", "_then", "at_end", "at_loss", "failure", "render", "value")

    def __init__(self, steps: Coroutine[Any, Any, Any] | None) -> None:
        self._steps = steps
        self._then: Callable[[DeferredAnswer], None] | None = None
        self.at_end: Callable[[], None] | None = None  # called when it is over, whatever came of it
        self.at_loss: Callable[[], None] | None = None  # called if the client goes away before it is over
        self.value: Any = None  # what the handler returned; None: it can do nothing, and has done nothing
        self.failure: Exception | None = None
        self.render: Callable[[Any], RenderedAnswer | Exception] | None = None  # of what the handler returned

    def run(self, then: Callable[[DeferredAnswer], None]) -> None:
        """Begin, and call `then` at the end, which may be at once."""
        self._then = then
        self._step(None)

    def rendered(self) -> RenderedAnswer | Exception | None:
        """The answer, at the end; or why there is none."""
        if self.failure is not None or self.value is None or self.render is None:
            return self.failure
        return self.render(self.value)

    def _step(self, _: object) -> None:
        assert self._steps is not None
        try:
            waiting = self._steps.send(None)
        except StopIteration as end:
            self.value = end.value
        except asyncio.CancelledError:
            self.failure = Unavailable(
                "the server is stopping, and may or may not have done this: check, then try again"
            )
        except Exception as error:
            self.failure = error
        else:
            waiting.add_done_callback(self._step)
            return
        self._end()

    def _end(self) -> None:
        if self.at_end is not None:
            self.at_end()
        then, self._then = self._then, None
        assert then is not None
        then(self)


async def close_chunks(chunks: AsyncIterator[bytes]) -> None:
    """Close the iterator behind a streamed answer. If it is a generator, its cleanup runs now."""
    close = getattr(chunks, "aclose", None)
    if close is not None:
        await close()


class StreamResponse:
    """An answer sent in pieces. Without a `length` it is sent chunked."""

    __slots__ = ("chunks", "headers", "length", "media", "status")

    def __init__(
        self,
        chunks: AsyncIterator[bytes],
        media: str,
        *,
        status: int = 200,
        headers: list[tuple[str, str]] | None = None,
        length: int | None = None,
    ) -> None:
        self.chunks = chunks
        self.media = media
        self.status = status
        self.headers = headers or []
        self.length = length


ANSWER_BYTES: Final = 16 * 1024 * 1024  # bytes of bodies in one answer, unless a single message is larger


def payload(
    value: bytes | LargeValue,
    *,
    headers: list[tuple[str, str]] | None = None,
    undelivered: Callable[[], Awaitable[None]] | None = None,
) -> Response | StreamResponse:
    """An answer with a message body. A large one is streamed and never held in memory as a whole.

    `undelivered` is called if not all of it was sent.
    """
    if isinstance(value, bytes):
        return Response(200, value, RAW, headers=headers, undelivered=undelivered)
    return StreamResponse(_pieces(value, undelivered), RAW, headers=headers, length=len(value))


async def _pieces(value: LargeValue, undelivered: Callable[[], Awaitable[None]] | None) -> AsyncIterator[bytes]:
    whole = False
    pieces = value.chunks(CHUNK_BYTES)
    try:
        # On a thread, because it may read from the disk.
        while piece := await asyncio.to_thread(_next, pieces):
            yield piece
        whole = True
    finally:
        if not whole and undelivered is not None:
            await undelivered()


def _next(pieces: Iterator[bytes]) -> bytes:
    return next(pieces, b"")


# Heads of requests and answers.

# A Host header holds a name or an address and maybe a port; nothing else that a URL allows there is accepted.
_HOST: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]{2,45})\]|([A-Za-z0-9_][A-Za-z0-9._-]{0,252}))(?::([0-9]{0,5}))?")
_KEPT: Final = 64  # a server has few names, and every call sends one
_MOST_PORT: Final = 65_535


@lru_cache(maxsize=_KEPT)
def parse_host(text: str) -> tuple[str, int | None] | None:
    """The lowercase name and the port (None if missing) of a Host header; None if it is not valid."""
    found = _HOST.fullmatch(text)
    if found is None:
        return None
    address, name, digits = found.groups()
    if address is not None and not _is_ipv6(address):
        return None
    port = int(digits) if digits else None
    if port is not None and port > _MOST_PORT:
        return None
    return (address or name).lower(), port


def _is_ipv6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False


class Refused(InvalidRequest):
    """The request is not acceptable as HTTP; `status` is the status of the answer."""

    def __init__(self, message: str, *, status: int, headers: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers


class TooLarge(Refused):
    """The body is larger than the limit on any body."""

    code = MessageTooLarge.code


class TooMany(Refused):
    """The limit on connections is reached."""

    code = Unavailable.code
    retryable = True


def no_room() -> TooMany:
    """The error for a connection over the limit."""
    return TooMany(
        "there are too many connections, in all (max_connections) or from one address (max_connections_per_address); "
        "this one is closed. Try again in a second, reuse connections, or close those that you "
        "do not need",
        status=503,
        headers=(("retry-after", "1"),),
    )


class NotTheSameUser(Refused):
    """A process of another user has connected to a socket that is for one user."""

    code = Forbidden.code


# For browsers: the media type is what it says, and pages of other sites may not embed the answer.
_ALWAYS: Final = "x-content-type-options: nosniff\r\ncross-origin-resource-policy: same-origin\r\n"
ALWAYS_SAID: Final = frozenset({"x-content-type-options", "cross-origin-resource-policy"})
_CACHING: Final = "cache-control"

_SAYING_CACHING: Final = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n{_ALWAYS}" for status in HTTPStatus
}
_STATUS_LINES: Final = {status: f"{lines}{_CACHING}: no-store\r\n" for status, lines in _SAYING_CACHING.items()}
_NO_BODY: Final = frozenset({204, 304})

_MOST_TEXT: Final = 1024

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


@lru_cache(maxsize=_KEPT)
def _start(status: int, media: str, *, caching: bool = True) -> str:
    """The lines that begin the head of an answer."""
    lines = (_STATUS_LINES if caching else _SAYING_CACHING)[status]
    return f"{lines}content-type: {media}\r\n" if media else lines


@lru_cache(maxsize=_KEPT)
def start_bytes(status: int, media: str) -> bytes:
    """The bytes that begin an answer on a connection that goes on, up to the digits of its length."""
    return f"{_start(status, media)}content-length: ".encode("latin-1")


def whole_answer(start: bytes, body: bytes, correlation_id: bytes) -> bytes:
    """An answer that has no headers of its own: the same bytes as those of `head`, and the body."""
    return b"%b%d\r\nx-correlation-id: %b\r\n\r\n%b" % (start, len(body), correlation_id, body)


def head(
    status: int,
    media: str,
    headers: Sequence[tuple[str, str]],
    *,
    length: int | None,
    keep_alive: bool,
) -> bytes:
    """The status line and headers of an answer. It is chunked if it has no length, and no-store by default."""
    lines = [_start(status, media)]
    if length is None:
        lines.append("transfer-encoding: chunked\r\n")
    elif status not in _NO_BODY:
        lines.append(f"content-length: {length}\r\n")
    if not keep_alive:
        lines.append("connection: close\r\n")
    for name, value in headers:
        if "\r" in value or "\n" in value:
            raise ValueError(f"the header {name} would have ended early: {value!r}")
        if name == _CACHING:
            lines[0] = _start(status, media, caching=False)
        lines.append(f"{name}: {value}\r\n")
    lines.append("\r\n")
    return "".join(lines).encode("latin-1", "replace")


def header_text(text: str) -> str:
    """Any text as the value of a header. Characters not allowed there are escaped; long texts are cut."""
    if not (text.isascii() and text.isprintable()):
        text = "".join(letter if " " <= letter <= "~" else letter.encode("unicode_escape").decode() for letter in text)
    return text[:_MOST_TEXT]


def chunk(content: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(content), content)


LAST_CHUNK: Final = b"0\r\n\r\n"


# Nearly every request has these headers, in one of two spellings. Looking them up is faster than decoding them again.
_USUAL: Final = (
    "accept",
    "accept-encoding",
    "authorization",
    "connection",
    "content-length",
    "content-type",
    "host",
    "traceparent",
    "user-agent",
    "x-correlation-id",
)
NAMES: Final = {spelt.encode(): name for name in _USUAL for spelt in (name, name.title())}


def check_head(headers: Mapping[str, str], version: str) -> None:
    """Raise Refused for a head that a proxy in front could interpret differently."""
    host = headers.get("host")
    if host is None:
        if version != "1.0":
            raise Refused("the request has no Host header, which HTTP/1.1 asks for", status=400)
    elif parse_host(host) is None:
        raise Refused("the Host header is not a name or address with a port", status=400)
    if "transfer-encoding" not in headers:
        return
    if version == "1.0":
        raise Refused("HTTP/1.0 has no transfer-encoding: send a content-length", status=400)
    codings = [coding.strip().lower() for coding in headers["transfer-encoding"].split(",")]
    if codings[-1] != "chunked":
        raise Refused("the last transfer-encoding must be chunked, or it is not clear where the body ends", status=400)
    if len(codings) > 1:
        raise Refused("the only transfer-encoding here is chunked; send gzip as content-encoding", status=501)


def unquoted(path: str) -> str:
    """The path, percent-decoded. An escaped slash stays escaped, so that it does not end a name."""
    parts = [unquote(part).replace("/", "%2F") for part in path.split("/")]
    return "/".join(parts)


def large_head(limits: ConnectionLimits) -> Refused:
    return Refused(f"the request's headers have more than {limits.header_bytes} bytes, which is the limit", status=431)


class Meter:
    """Gets notified of connections and answers. This one counts nothing; it is for servers that only share a folder."""

    def connection_opened(self) -> None: ...

    def connection_closed(self) -> None: ...

    def connection_refused(self, reason: str) -> None: ...

    def request_done(
        self, route: str, method: str, status: int, took_ns: int, bytes_in: int, bytes_out: int
    ) -> None: ...

    def counted(self, route: str, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The chunks of a streamed answer, counted as they go out."""
        return chunks
