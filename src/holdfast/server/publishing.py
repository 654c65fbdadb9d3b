"""Stores the messages of a call: a few at once, many on a thread.

While many are on their way to a topic, whatever else is sent there goes by the threads as well. It would find a lock of
a partition taken, and the event loop would wait for it, and everybody for the event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from holdfast.api.drafts import PublishRequest, Stored
from holdfast.broker.partition import Partition
from holdfast.broker.producers import KnownBatch
from holdfast.local.aio.broker import AsyncLocalBrokerPort
from holdfast.local.publisher import Publisher
from holdfast.model import Appended, CodecName, Durability, Producer
from holdfast.server.turns import Job, Pool

_MANY: Final = 1_000
_LARGE_BYTES: Final = 256 * 1024
_HEADER_BYTES: Final = 64  # what a header costs

_Result = TypeVar("_Result")


class ServedPublishing:
    """Stores messages in the topics of a data folder."""

    def __init__(self, port: AsyncLocalBrokerPort, pool: Pool) -> None:
        self._port = port
        self._pool = pool
        self._busy: Counter[str] = Counter()  # topics that many messages are on their way to
        self._under_way: set[asyncio.Task[Any]] = set()

    async def publish(
        self,
        topic: str,
        messages: list[Any],
        *,
        partition: int | None,
        durability: Durability | None,
        codec: CodecName | None,
    ) -> list[Stored]:
        """Store messages; those of one partition all or not at all."""
        if topic not in self._busy and not is_large(messages):
            if len(messages) == 1 and codec is None and type(messages[0]) is bytes:
                stored = await self._port.publish_plain(topic, messages[0], partition, durability)
                if stored is not None:
                    return [stored]
            return await self._port.publish(topic, PublishRequest(messages, partition, durability, codec))

        async def store() -> list[Stored]:
            began_ns = self._port.mono_ns()
            engine = self._port.engine
            if not engine.is_open(topic):
                await asyncio.to_thread(engine.topic, topic)  # opening reads files
            with self._on_its_way(topic), engine.using(topic) as used:
                publisher = self._port.publisher(used)
                if publisher.all_plain(messages, codec):
                    number = publisher.turn(partition)
                    log = publisher.log(number)
                    appended = await self._aside(lambda: log.write(messages, durability=durability))
                    await log.wait_async(appended)
                    return await self._aside(lambda: publisher.plain_many(number, messages, appended, began_ns))
                parts = await self._aside(
                    lambda: publisher.publish(messages, durability, codec, partition, verb="publish_many")
                )
                await publisher.wait_async(parts)
                return await self._aside(lambda: publisher.stored(parts, began_ns))

        return await self._to_its_end(store())

    async def append(
        self,
        topic: str,
        partition: Partition,
        publisher: Publisher,
        messages: list[Any],
        producer: Producer,
        durability: Durability | None,
        codec: CodecName | None,
    ) -> tuple[Appended, KnownBatch | None]:
        """Store a producer's messages in a partition, or learn that they are there already."""

        def write() -> tuple[Appended, KnownBatch | None]:
            batch = publisher.batch(messages, codec)
            appended, known = partition.append(batch, producer, durability=durability, codec=codec)
            if known is None:
                publisher.count(batch)
            return appended, known

        async def store() -> tuple[Appended, KnownBatch | None]:
            with self._on_its_way(topic):
                appended, known = await self._aside(write)
            await partition.log.wait_async(appended)
            return appended, known

        if topic in self._busy or is_large(messages):
            return await self._to_its_end(store())
        appended, known = write()
        await partition.log.wait_async(appended)
        return appended, known

    async def settle(self) -> None:
        """Return when everything in progress is stored. Called before the folder is closed."""
        while self._under_way:
            await asyncio.wait(self._under_way)

    @contextmanager
    def _on_its_way(self, topic: str) -> Iterator[None]:
        self._busy[topic] += 1
        try:
            yield
        finally:
            self._busy[topic] -= 1
            if not self._busy[topic]:
                del self._busy[topic]

    async def _aside(self, work: Callable[[], _Result]) -> _Result:
        def run(_: Job) -> _Result:
            return work()

        return await self._pool.run(run)

    async def _to_its_end(self, storing: Coroutine[Any, Any, _Result]) -> _Result:
        """Whether or not the caller stays: what is written is synced, and those who wait for it are told."""
        task = asyncio.get_running_loop().create_task(storing)
        self._under_way.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()  # whoever asked has been told of it, or is gone


def is_large(messages: list[Any]) -> bool:
    """Whether it takes long to store them."""
    if len(messages) > _MANY:
        return True
    size = 0
    for message in messages:
        if type(message) is bytes:
            size += len(message)
        else:
            size += len(message.body or b"") + _HEADER_BYTES * len(message.headers or ())
    return size > _LARGE_BYTES
