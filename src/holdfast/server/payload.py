"""A body as an answer: a large one goes out piece by piece, and is nowhere held as a whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Final

from holdfast.large import CHUNK_BYTES, LargeValue
from holdfast.protocol.media import RAW
from holdfast.server.http.messages import Response, StreamResponse

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
