"""Messages that come as a stream: spooled beside their log, and stored as one message when all of it is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Iterator

from holdfast.api.drafts import NewMessage, Stored
from holdfast.api.streams import AsyncStream, Stream, check_size_hint, pieces_of
from holdfast.broker.messages import head_bytes
from holdfast.env import World
from holdfast.local.publisher import Part, Publisher
from holdfast.model import Durability
from holdfast.storage.batches import Spool


class Upload:
    """One message on its way. What is wrong with it is said before the first byte is read, as far as it can be."""

    def __init__(
        self, world: World, publisher: Publisher, options: NewMessage, partition: object, size_hint: int | None
    ) -> None:
        publisher.topic.check_open()
        check_size_hint(size_hint)
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
            self._take(pieces_of(stream))
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
                await asyncio.to_thread(self._take, pieces_of(stream))
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
