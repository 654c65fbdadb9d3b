"""A request as it comes in, and the two kinds of answers: whole, or as a stream."""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, Protocol

import zstandard

from holdfast.errors import InvalidRequest, MessageTooLarge
from holdfast.server.http.refused import Refused

_HIGH_BYTES: Final = 256 * 1024  # received and not taken: then the client waits


class Source(Protocol):
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
        "buffered",
        "certificate",
        "complete",
        "encrypted",
        "error",
        "gone",
        "headers",
        "keep_alive",
        "method",
        "path",
        "peer",
        "query",
        "received",
        "source",
        "target",
    )

    def __init__(self, source: Source, peer: str, certificate: Any) -> None:
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
        self.complete = False
        self.gone = False
        self.error: Refused | None = None
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
        return self.header("content-type").partition(";")[0].strip().lower()

    @property
    def is_full(self) -> bool:
        """Whether so much of the body waits here that the client had better wait, too."""
        return self.buffered >= _HIGH_BYTES

    def feed(self, chunk: bytes) -> None:
        """A part of the body has come."""
        self.received += len(chunk)
        self.buffered += len(chunk)
        self._chunks.append(chunk)
        self._wake()

    def end(self) -> None:
        """The body is whole."""
        self.complete = True
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
        """The body as it comes, as it was sent."""
        while True:
            while self._chunks:
                if self.error is not None:
                    raise self.error
                chunk = self._chunks.popleft()
                self.buffered -= len(chunk)
                if not self.complete and not self.is_full:
                    self.source.go_on()
                yield chunk
            if self.complete:
                return
            if self.error is not None:
                raise self.error
            if self.gone:
                raise Refused("the client went away in the middle of its request", status=400)
            self.source.expect()
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    async def chunks(self, most_bytes: int) -> AsyncIterator[bytes]:
        """The body as it comes, unpacked where it was compressed, held to a size."""
        unpack = _unpacker(self.header("content-encoding"), most_bytes)
        total = 0
        async for chunk in self.raw_chunks():
            content = unpack(chunk) if unpack is not None else chunk
            total += len(content)
            if total > most_bytes:
                raise _too_large(most_bytes)
            if content:
                yield content

    async def read(self, most_bytes: int) -> bytes:
        """The whole body."""
        if self.complete and "content-encoding" not in self.headers:  # the usual case, without detours
            if self.buffered > most_bytes:
                raise _too_large(most_bytes)
            content = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
            self._chunks.clear()
            self.buffered = 0
            return content
        return b"".join([chunk async for chunk in self.chunks(most_bytes)])


def _too_large(most_bytes: int) -> MessageTooLarge:
    return MessageTooLarge(f"the request's body has more than {most_bytes} bytes, which is the limit; nothing was done")


def _unpacker(encoding: str, most_bytes: int) -> Callable[[bytes], bytes] | None:
    """What undoes the content encoding; never more comes out of it than may be, whatever went in."""
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return None
    if name == "gzip":
        inflate = zlib.decompressobj(wbits=31)

        def unzip(chunk: bytes) -> bytes:
            try:
                content = inflate.decompress(chunk, most_bytes + 1)
            except zlib.error as error:
                raise InvalidRequest(f"the body is not gzip as its content-encoding says: {error}") from None
            return content

        return unzip
    if name == "zstd":
        return _unpacker_zstd(most_bytes)
    raise Refused(f"the content-encoding {encoding!r} is not known; send gzip, zstd or none", status=415)


def _unpacker_zstd(most_bytes: int) -> Callable[[bytes], bytes]:
    packed = zstandard.ZstdDecompressor(max_window_size=8 * 1024 * 1024)
    left = packed.decompressobj()

    def unpack(chunk: bytes) -> bytes:
        # A little at a time: this decompressor has no limit on what comes out of one call.
        content = []
        size = 0
        try:
            for i in range(0, len(chunk), 1024):
                content.append(left.decompress(chunk[i : i + 1024]))
                size += len(content[-1])
                if size > most_bytes:
                    break
        except zstandard.ZstdError as error:
            raise InvalidRequest(f"the body is not zstd as its content-encoding says: {error}") from None
        return b"".join(content)

    return unpack


Undelivered = Callable[[], Awaitable[None]]


class Response:
    """A whole answer. `undelivered` is called when it cannot reach the client any more."""

    __slots__ = ("body", "headers", "media", "status", "undelivered")

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
