"""Consumers of streams behind a server: for threads, and for tasks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, Generic, Self

from holdfast.api.contents import Body
from holdfast.api.drafts import Seconds
from holdfast.broker.streams.positions import PartitionLag
from holdfast.client.client import Client
from holdfast.client.consuming import RemoteConsuming, RemoteStreamMessage
from holdfast.client.ways import run
from holdfast.errors import Closed
from holdfast.membership.assignment import TopicPartition
from holdfast.model import Durability


class RemoteConsumer(RemoteConsuming[Body], Generic[Body]):
    """Reads the partitions that its group gives it. For one thread at a time: give each a consumer of its own.

    What `poll` answered counts as handled with the next `poll`; in a loop over the consumer, with the next message.
    """

    @classmethod
    def open(cls, client: Client, topics: str | Iterable[str], group: str, **options: Any) -> Self:
        """Join the group, which is made where there is none."""
        consumer = cls(client, topics, group, **options)
        run(consumer._join())
        return consumer

    def poll(self, timeout: Seconds | None = None, max_records: int | None = None) -> list[RemoteStreamMessage[Body]]:
        """What is there, up to `max_records`, from all our partitions; waits for at least one, [] after the time."""
        found = run(self._poll(max_records, timeout))
        self._hand_out(found)
        return found

    def __iter__(self) -> Iterator[RemoteStreamMessage[Body]]:
        """Every message as it comes, until the consumer is closed."""
        while True:
            try:
                message = self._pull()
                if message is None:
                    self._ahead.extend(run(self._poll(None, None)))
                    continue
            except Closed:
                if self.closed:
                    return
                raise
            yield message

    def commit(
        self,
        messages: Iterable[RemoteStreamMessage[Body]] | None = None,
        *,
        offsets: Mapping[TopicPartition, int] | None = None,
        durability: Durability | None = None,
    ) -> None:
        """Note that all we got is handled; or only these messages and all before them; or these offsets.

        Fenced if a partition is not ours any more: then somebody else goes on from the commit before.
        """
        run(self._commit(messages, offsets, durability))

    def committed(self, topic: str, partition: int) -> int | None:
        """The offset at which the group goes on after a restart, None before it began there."""
        return run(self._committed(topic, partition))

    def seek(self, topic: str, partition: int, offset: int) -> None:
        """Go on at the offset."""
        run(self._seek(topic, partition, offset=offset))

    def seek_to_start(self, topic: str | None = None, partition: int | None = None) -> None:
        """Go on with the oldest messages kept: of one partition, of a topic, or of all that are ours."""
        run(self._seek(topic, partition, to="start"))

    def seek_to_end(self, topic: str | None = None, partition: int | None = None) -> None:
        """Go on with what comes from now on: of one partition, of a topic, or of all that are ours."""
        run(self._seek(topic, partition, to="end"))

    def seek_to_time(self, time: datetime, topic: str | None = None, partition: int | None = None) -> None:
        """Go on with the first message of this time or later."""
        run(self._seek(topic, partition, time=time))

    def lag(self) -> list[PartitionLag]:
        """How far behind we are in each partition that is ours, in messages and seconds."""
        return run(self._lag())

    def close(self) -> None:
        """Commit (with auto_commit), leave the group. A static member keeps its place until its session ends.

        Called by another thread than the one that polls, it does not commit what that one has in hand.
        """
        run(self._close(failed=False))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        run(self._close(failed=kind is not None))


class AsyncRemoteConsumer(RemoteConsuming[Body], Generic[Body]):
    """Reads the partitions that its group gives it. For one task at a time: give each a consumer of its own.

    What `poll` answered counts as handled with the next `poll`; in a loop over the consumer, with the next message.
    """

    @classmethod
    async def open(cls, client: Client, topics: str | Iterable[str], group: str, **options: Any) -> Self:
        """Join the group, which is made where there is none."""
        consumer = cls(client, topics, group, **options)
        await consumer._join()
        return consumer

    async def poll(
        self, timeout: Seconds | None = None, max_records: int | None = None
    ) -> list[RemoteStreamMessage[Body]]:
        """What is there, up to `max_records`, from all our partitions; waits for at least one, [] after the time."""
        found = await self._poll(max_records, timeout)
        self._hand_out(found)
        return found

    async def __aiter__(self) -> AsyncIterator[RemoteStreamMessage[Body]]:
        """Every message as it comes, until the consumer is closed."""
        while True:
            try:
                message = self._pull()
                if message is None:
                    self._ahead.extend(await self._poll(None, None))
                    continue
            except Closed:
                if self.closed:
                    return
                raise
            yield message

    async def commit(
        self,
        messages: Iterable[RemoteStreamMessage[Body]] | None = None,
        *,
        offsets: Mapping[TopicPartition, int] | None = None,
        durability: Durability | None = None,
    ) -> None:
        """Note that all we got is handled; or only these messages and all before them; or these offsets.

        Fenced if a partition is not ours any more: then somebody else goes on from the commit before.
        """
        await self._commit(messages, offsets, durability)

    async def committed(self, topic: str, partition: int) -> int | None:
        """The offset at which the group goes on after a restart, None before it began there."""
        return await self._committed(topic, partition)

    async def seek(self, topic: str, partition: int, offset: int) -> None:
        """Go on at the offset."""
        await self._seek(topic, partition, offset=offset)

    async def seek_to_start(self, topic: str | None = None, partition: int | None = None) -> None:
        """Go on with the oldest messages kept: of one partition, of a topic, or of all that are ours."""
        await self._seek(topic, partition, to="start")

    async def seek_to_end(self, topic: str | None = None, partition: int | None = None) -> None:
        """Go on with what comes from now on: of one partition, of a topic, or of all that are ours."""
        await self._seek(topic, partition, to="end")

    async def seek_to_time(self, time: datetime, topic: str | None = None, partition: int | None = None) -> None:
        """Go on with the first message of this time or later."""
        await self._seek(topic, partition, time=time)

    async def lag(self) -> list[PartitionLag]:
        """How far behind we are in each partition that is ours, in messages and seconds."""
        return await self._lag()

    async def close(self) -> None:
        """Commit (with auto_commit), leave the group. A static member keeps its place until its session ends.

        Called by another task than the one that polls, it does not commit what that one has in hand.
        """
        await self._close(failed=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self._close(failed=kind is not None)
