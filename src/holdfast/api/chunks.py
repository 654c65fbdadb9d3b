"""A body in pieces: for a thread that writes it elsewhere, or for a task that sends it while others go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Final, Protocol

from holdfast.errors import InvalidRequest

_MOST_BYTES: Final = 64 << 20


class InPieces(Protocol):
    """A value that is not held in memory: in a file, or behind a server."""

    def chunks(self, size: int) -> Iterator[bytes]:
        """Its bytes, so many at a time."""


class Chunks:
    """Pieces of a value, all of the same size but the last; ChecksumMismatch instead of that where it is spoiled."""

    def __init__(self, value: bytes | InPieces, size: int) -> None:
        if type(size) is not int or not 1 <= size <= _MOST_BYTES:
            raise InvalidRequest(f"size={size!r} cannot be used: give a number of bytes from 1 to {_MOST_BYTES}")
        self._value = value
        self._size = size

    def __iter__(self) -> Iterator[bytes]:
        value, size = self._value, self._size
        if not isinstance(value, bytes):
            return value.chunks(size)
        return (value[at : at + size] for at in range(0, len(value), size))

    async def __aiter__(self) -> AsyncIterator[bytes]:
        chunks = iter(self)
        if isinstance(self._value, bytes):
            for chunk in chunks:
                yield chunk
        else:  # each may have to be waited for: it comes from the disk, or from a server
            while (part := await asyncio.to_thread(next, chunks, None)) is not None:
                yield part
