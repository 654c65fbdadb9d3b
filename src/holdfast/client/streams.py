"""Messages that come as a stream, through a server: they are gathered here, and sent as one."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator
from typing import Any, Final

from holdfast.client.publishing import Publishing
from holdfast.embedded.bodies import Bodies
from holdfast.embedded.publisher import Stored
from holdfast.embedded.streaming import AsyncStream, stream_options
from holdfast.errors import InvalidRequest
from holdfast.model import Durability

_PIECE_BYTES: Final = 256 * 1024
_BYTES: Final = Bodies(bytes)


async def publish_stream(
    publishing: Publishing,
    topic: str,
    stream: AsyncStream,
    partition: int | None,
    size_hint: int | None,
    durability: Durability | None,
    options: dict[str, Any],
) -> Stored:
    """Store all that the stream gives as one message."""
    from msgspec.structs import replace

    if size_hint is not None and (type(size_hint) is not int or size_hint < 0):
        raise InvalidRequest(f"size_hint={size_hint!r} cannot be used: give a number of bytes, or None")
    message = stream_options(options)
    pieces = []
    async for piece in _pieces(stream):
        if not isinstance(piece, (bytes, bytearray, memoryview)):
            raise InvalidRequest(f"a stream gives bytes, not {type(piece).__name__}; nothing was stored")
        pieces.append(bytes(piece))
    whole = replace(message, body=b"".join(pieces))
    (stored,) = await publishing.publish(topic, [whole], _BYTES, partition=partition, durability=durability)
    return stored


async def _pieces(stream: AsyncStream) -> AsyncIterator[Any]:
    if isinstance(stream, AsyncIterable):
        async for piece in stream:
            yield piece
        return
    read = getattr(stream, "read", None)
    if read is None:
        for piece in stream:
            yield piece
        return
    while piece := read(_PIECE_BYTES):
        yield piece
