"""Requests and responses: heads parsed strictly, bodies read as they come, answers framed."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import zlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from http import HTTPStatus
from typing import Any, Final, Protocol
from urllib.parse import unquote

import zstandard

from holdfast.errors import Forbidden, InvalidRequest, MessageTooLarge, Unavailable
from holdfast.large import CHUNK_BYTES, LargeValue
from holdfast.protocol.media import RAW
from holdfast.server.limits import ConnectionLimits

# Bodies that come compressed: never more comes out of them than may be, whatever went in.
#
# A few hundred bytes can stand for gigabytes. What comes out is counted as it comes: against the limit on bodies, and,
# above what nobody notices, against what went in.


FREE_BYTES: Final = 1024 * 1024  # so much may come out of anything

_AT_ONCE: Final = 1024
_MOST_WINDOW_BYTES: Final = 8 * 1024 * 1024


class Unpacker:
    """Undoes one content encoding."""

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
        """What comes out of the next part, piece by piece; MessageTooLarge as soon as it is too much."""
        try:
            # A little at a time: what comes out of a kilobyte can be waited for.
            for i in range(0, len(chunk), _AT_ONCE):
                if self._packed.eof:
                    raise self._broken("more follows behind its end")
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
        """Refuse a body that ended too early, or too late."""
        if not self._packed.eof:
            raise self._broken("it ends too early")
        if self._packed.unused_data:
            raise self._broken("more follows behind its end")

    def _check(self) -> None:
        if self._went > self._most_bytes:
            raise too_large(self._most_bytes)
        if self._went > FREE_BYTES and self._went > self._came * self._most_ratio:
            raise MessageTooLarge(
                f"the request's body unpacks to more than {self._most_ratio} times what was sent, which is the limit "
                f"(max_unpack_ratio) above {FREE_BYTES} bytes; nothing was done. Send less at a time, or send it as "
                "it is"
            )

    def _broken(self, why: str) -> InvalidRequest:
        return InvalidRequest(f"the body is not {self._name} as its content-encoding says: {why}. Nothing was done")


def unpacker(encoding: str, most_bytes: int, most_ratio: int) -> Unpacker | None:
    """What undoes the content encoding of a request; None where there is none."""
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return None
    if name not in ("gzip", "zstd"):
        raise Refused(f"the content-encoding {encoding!r} is not known; send gzip, zstd or none", status=415)
    return Unpacker(name, most_bytes, most_ratio)


def too_large(most_bytes: int) -> MessageTooLarge:
    """The error for a body that is larger than may be, as it is or unpacked."""
    return MessageTooLarge(f"the request's body has more than {most_bytes} bytes, which is the limit; nothing was done")


@lru_cache(maxsize=64)
def _media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


HIGH_BYTES: Final = 256 * 1024  # received and not taken: then the client waits
_TURN_BYTES: Final = 1024 * 1024
_SMALL_BYTES: Final = 64 * 1024  # a body up to this size is held in memory without asking for room


class BodySource(Protocol):
    """The connection that a request's body comes from."""

    def go_on(self) -> None:
        """Let more of the body come."""

    def expect(self) -> None:
        """Tell a client that waits for leave to send its body that it may."""


class Request:
    """One request. Its headers are there; its body may still be coming."""

    __slots__ = (
        "_chunks",
        "_waiter",
        "ask_room",
        "buffered",
        "certificate",
        "complete",
        "encrypted",
        "error",
        "gone",
        "headers",
        "in_reserve",
        "keep_alive",
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
        self.in_reserve = False  # it came on a connection that is kept for health checks and admins
        self.complete = False
        self.gone = False
        self.error: Refused | None = None
        self.on_end: Callable[[], None] | None = None  # who may still refuse a body that was long in coming
        self.ask_room: Callable[[int], Awaitable[None]] | None = None  # before much of a body is held in memory
        self.received = 0
        self.buffered = 0
        self._chunks: deque[bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def header(self, name: str) -> str:
        """A header by its name in small letters; empty where there is none."""
        return self.headers.get(name, "")

    @property
    def media(self) -> str:
        """The media type of the body, without its parameters."""
        return _media_type(self.headers.get("content-type", ""))

    @property
    def packed(self) -> bool:
        """Whether the body comes compressed."""
        encoding = self.headers.get("content-encoding")
        return encoding is not None and encoding.strip().lower() not in ("", "identity")

    def feed(self, chunk: bytes) -> None:
        """A part of the body has come."""
        self.received += len(chunk)
        self.buffered += len(chunk)
        self._chunks.append(chunk)
        if self._waiter is not None:
            self._wake()

    def end(self) -> None:
        """The body is whole."""
        self.complete = True
        if self._waiter is not None:
            self._wake()

    def fail(self, error: Refused) -> None:
        """The rest of the body is not wanted any more."""
        self.error = error
        self._wake()

    def lose(self) -> None:
        """The client is gone."""
        self.gone = True
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def raw_chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes, as it was sent; what has come in many small pieces, as one."""
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
        """The body as it comes, unpacked where it was compressed, held to a size."""
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
                if since > _TURN_BYTES:  # others have their turn, whatever comes out of it
                    since = 0
                    await asyncio.sleep(0)
        packed.end()

    async def read(self, most_bytes: int, most_ratio: int) -> bytes:
        """The whole body."""
        if self.complete and "content-encoding" not in self.headers and self.on_end is None:  # the usual case
            if self.buffered > most_bytes:
                raise too_large(most_bytes)
            chunks, self._chunks = self._chunks, deque()
            self.buffered = 0
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)
        if not self.packed:
            return await self.read_raw(most_bytes)
        length = self.length
        most = most_bytes if length is None else min(most_bytes, max(length * most_ratio, FREE_BYTES))
        return await self._whole(self.chunks(most_bytes, most_ratio), most)

    async def read_raw(self, most_bytes: int) -> bytes:
        """The whole body as it was sent."""
        if self.complete:
            if self.buffered > most_bytes:
                raise too_large(most_bytes)
            if self.on_end is not None:
                self.on_end()
            return self._taken() if self._chunks else b""
        length = self.length
        return await self._whole(self.raw_chunks(), most_bytes if length is None else min(most_bytes, length))

    async def _whole(self, chunks: AsyncIterator[bytes], most_bytes: int) -> bytes:
        """All of a body that may have so many bytes, for which there must be room as soon as it is not small."""
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
        """How many bytes will come, if the client said it."""
        text = self.headers.get("content-length", "")
        return int(text) if text.isdigit() else None

    async def need_room(self, size: int) -> None:
        """Wait until so much of the body may be in memory; the client is not listened to meanwhile."""
        if self.ask_room is not None:
            await self.ask_room(size)

    def unpacked(self, content: bytes, most_bytes: int, most_ratio: int) -> Iterator[bytes]:
        """What a body that was read as it was sent stands for, piece by piece."""
        packed = unpacker(self.header("content-encoding"), most_bytes, most_ratio)
        if packed is None:
            yield content
            return
        yield from packed.feed(content)
        packed.end()


Undelivered = Callable[[], Awaitable[None]]


class Response:
    """A whole answer. `undelivered` is called when it cannot reach the client any more, `let_go` in any case."""

    __slots__ = ("body", "headers", "let_go", "media", "status", "undelivered")

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
        self.let_go: Callable[[], None] | None = None  # it is not in memory any more


async def close_chunks(chunks: AsyncIterator[bytes]) -> None:
    """End what makes the pieces of an answer, which may be a generator that has something to give back."""
    close = getattr(chunks, "aclose", None)
    if close is not None:
        await close()


class StreamResponse:
    """An answer in pieces, as they come; of a known length, or until it ends."""

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


# A body as an answer: a large one goes out piece by piece, and is nowhere held as a whole.


ANSWER_BYTES: Final = 16 * 1024 * 1024  # of bodies, in one answer, unless a single message is larger


def payload(
    value: bytes | LargeValue,
    *,
    headers: list[tuple[str, str]] | None = None,
    undelivered: Callable[[], Awaitable[None]] | None = None,
) -> Response | StreamResponse:
    """A body as an answer; where it does not get to its end, `undelivered` is called."""
    if isinstance(value, bytes):
        return Response(200, value, RAW, headers=headers, undelivered=undelivered)
    return StreamResponse(_pieces(value, undelivered), RAW, headers=headers, length=len(value))


async def _pieces(value: LargeValue, undelivered: Callable[[], Awaitable[None]] | None) -> AsyncIterator[bytes]:
    whole = False
    pieces = value.chunks(CHUNK_BYTES)
    try:
        # On a thread: what was not read for a while comes from the disk.
        while piece := await asyncio.to_thread(_next, pieces):
            yield piece
        whole = True
    finally:
        if not whole and undelivered is not None:
            await undelivered()


def _next(pieces: Iterator[bytes]) -> bytes:
    return next(pieces, b"")


# Heads of requests and answers: header names, checks that refuse a request as HTTP, status lines.


# What a Host header may say: a name or an address, and a port; nothing else that a URL could hold there.


_HOST: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]{2,45})\]|([A-Za-z0-9_][A-Za-z0-9._-]{0,252}))(?::([0-9]{0,5}))?")
_KEPT: Final = 64  # a server goes by few names, and every call says one
_MOST_PORT: Final = 65_535


@lru_cache(maxsize=_KEPT)
def parse_host(text: str) -> tuple[str, int | None] | None:
    """Name and port in small letters, None where there is no port; None for what is no host at all."""
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


# Requests that are refused for what they are as HTTP, whatever they ask for.


class Refused(InvalidRequest):
    """The request cannot be answered as HTTP; `status` says how that is told."""

    def __init__(self, message: str, *, status: int, headers: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers


class TooLarge(Refused):
    """The body is larger than any may be."""

    code = MessageTooLarge.code


class TooMany(Refused):
    """There is no room for one more connection now."""

    code = Unavailable.code
    retryable = True


def no_room() -> TooMany:
    """What to say to a client for which there is no connection."""
    return TooMany(
        "there are too many connections, in all (max_connections) or from one address (max_connections_per_address); "
        "this one is closed. Try again in a second, keep connections and use them again, or close those that you "
        "do not need",
        status=503,
        headers=(("retry-after", "1"),),
    )


class NotTheSameUser(Refused):
    """Somebody else's process has come to a socket that is for one user."""

    code = Forbidden.code


# The first lines of an answer, as bytes.


# What every answer says to browsers: it is what it is called, and nothing of it is for pages of other sites.
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


def head(
    status: int,
    media: str,
    headers: Sequence[tuple[str, str]],
    *,
    length: int | None,
    keep_alive: bool,
) -> bytes:
    """Status line and headers; without a length the body comes in chunks. What does not say otherwise is not kept."""
    lines = [_STATUS_LINES[status]]
    if media:
        lines.append(f"content-type: {media}\r\n")
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
            lines[0] = _SAYING_CACHING[status]
        lines.append(f"{name}: {value}\r\n")
    lines.append("\r\n")
    return "".join(lines).encode("latin-1", "replace")


def header_text(text: str) -> str:
    """Any text as the value of a header: what has no place there is spelled out."""
    if not (text.isascii() and text.isprintable()):
        text = "".join(letter if " " <= letter <= "~" else letter.encode("unicode_escape").decode() for letter in text)
    return text[:_MOST_TEXT]


def chunk(content: bytes) -> bytes:
    """One piece of a body that comes in chunks."""
    return b"%x\r\n%b\r\n" % (len(content), content)


LAST_CHUNK: Final = b"0\r\n\r\n"


# Nearly every request has these, in one of two spellings: to look them up is faster than to make them again.
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
    """Refuse a head that a proxy on the way could read in another way than we do."""
    host = headers.get("host")
    if host is None:
        if version != "1.0":
            raise Refused("the request has no Host header, which HTTP/1.1 asks for", status=400)
    elif parse_host(host) is None:
        raise Refused("the Host header is no name or address with a port", status=400)
    if "transfer-encoding" not in headers:
        return
    if version == "1.0":
        raise Refused("HTTP/1.0 knows no transfer-encoding: send a content-length", status=400)
    codings = [coding.strip().lower() for coding in headers["transfer-encoding"].split(",")]
    if codings[-1] != "chunked":
        raise Refused("the last transfer-encoding must be chunked, or nobody knows where the body ends", status=400)
    if len(codings) > 1:
        raise Refused("the only transfer-encoding here is chunked; say gzip as content-encoding", status=501)


def unquoted(path: str) -> str:
    """The path with its escapes undone; an escaped slash stays one, so that it is no end of a name."""
    parts = [unquote(part).replace("/", "%2F") for part in path.split("/")]
    return "/".join(parts)


def large_head(limits: ConnectionLimits) -> Refused:
    return Refused(f"the request's headers have more than {limits.header_bytes} bytes, which is the limit", status=431)
