"""Messages that come as a stream: spooled beside their log, and stored as one message when all of it is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Iterable, Iterator
from functools import partial
from typing import Any, BinaryIO, Final, TypeAlias

from holdfast.broker.messages import head_bytes
from holdfast.embedded.drafts import NewMessage
from holdfast.embedded.publisher import Part, Publisher, Stored
from holdfast.env import World
from holdfast.errors import InvalidRequest
from holdfast.model import Durability
from holdfast.storage.spool import Spool

Stream: TypeAlias = BinaryIO | Iterable[bytes]
AsyncStream: TypeAlias = AsyncIterable[bytes] | Stream

_PIECE_BYTES: Final = 256 * 1024


class Upload:
    """One message on its way. What is wrong with it is said before the first byte is read, as far as it can be."""

    def __init__(
        self, world: World, publisher: Publisher, options: NewMessage, partition: object, size_hint: object
    ) -> None:
        publisher.topic.check_open()
        if size_hint is not None and (type(size_hint) is not int or size_hint < 0):
            raise InvalidRequest(f"size_hint={size_hint!r} cannot be used: give a number of bytes, or None")
        self._publisher = publisher
        self._options = options
        self._began_ns = world.clock.monotonic_ns()
        draft = publisher.draft(options, b"")
        self._number = publisher.route(draft, partition)
        log = self._log = publisher.log(self._number)
        self._spool = Spool(world, log.folder, log.settings, head_bytes=head_bytes(draft), size_hint=size_hint)

    def run(self, stream: Stream, durability: Durability | None) -> Stored:
        """Take all of the stream, and store it."""
        with self._spool:
            self._take(_pieces(stream))
            parts = self._store(durability)
        self._publisher.wait(parts)
        return self._publisher.stored(parts, self._began_ns)[0]

    async def run_async(self, stream: AsyncStream, durability: Durability | None) -> Stored:
        """The same for a task: threads wait for the disk, and for a stream that is none of tasks."""
        with self._spool as spool:
            if isinstance(stream, AsyncIterable):
                async for piece in stream:
                    if spool.add(piece):
                        await asyncio.to_thread(spool.write_gathered)
            else:
                await asyncio.to_thread(self._take, _pieces(stream))
            in_memory = spool.in_memory  # then storing it waits for nothing
            parts = self._store(durability) if in_memory else await asyncio.to_thread(self._store, durability)
        await self._publisher.wait_async(parts)
        return self._publisher.stored(parts, self._began_ns)[0]

    def _take(self, pieces: Iterator[object]) -> None:
        for piece in pieces:
            if self._spool.add(piece):
                self._spool.write_gathered()

    def _store(self, durability: Durability | None) -> list[Part]:
        # Once more: a delay, or a time to live, begins now.
        draft = self._publisher.draft(self._options, self._spool.value())
        if (durability or self._log.settings.durability) == "fsync":
            self._spool.sync()  # before anybody waits for us
        return self._publisher.write_one(self._number, draft, durability)


def stream_options(options: dict[str, Any]) -> NewMessage:
    """What a message has besides its body; all that `put` takes but `codec`."""
    known = set(NewMessage.__struct_fields__) - {"body"}
    for name in options:
        if name not in known:
            hint = ": a stream is stored as it comes; compress it before" if name == "codec" else ""
            raise InvalidRequest(f"{name} cannot be used here{hint}; known are {', '.join(sorted(known))}")
    return NewMessage(body=b"", **options)


def _pieces(stream: object) -> Iterator[object]:
    read = getattr(stream, "read", None)
    if callable(read):
        return iter(partial(read, _PIECE_BYTES), b"")
    if isinstance(stream, (bytes, bytearray, memoryview, str)) or not isinstance(stream, Iterable):
        raise InvalidRequest(
            f"a stream is a binary file or gives pieces of bytes; {type(stream).__name__} does not. "
            "Use put or publish for a body that is in memory"
        )
    return iter(stream)
