"""The broker behind a server, for tasks: the same names, awaited."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Literal

from holdfast.api.aio.consumer import AsyncConsumer
from holdfast.api.aio.group import AsyncGroup
from holdfast.api.aio.locks import AsyncDocuments, AsyncLocks
from holdfast.api.aio.opening import AsyncOpening
from holdfast.api.aio.producer import AsyncProducer
from holdfast.api.aio.queue import AsyncQueue
from holdfast.api.contents import Contents
from holdfast.api.drafts import HeadersLike, NewMessage, Seconds, Stored, Text, message_of
from holdfast.api.streams import AsyncStream, stream_options
from holdfast.broker.streams.positions import Reset
from holdfast.broker.tracing.log import TraceStats
from holdfast.broker.tracing.steps import TraceStep
from holdfast.client.broker_face import RemoteBrokerFace
from holdfast.client.streams import publish_stream
from holdfast.embedded.aio_broker import AsyncBroker
from holdfast.embedded.topics import GroupInfo, TopicInfo
from holdfast.model import CodecName, Durability, Retained
from holdfast.producing.core import producer_settings
from holdfast.remote.aio.consumer import AsyncRemoteConsumerPort
from holdfast.remote.aio.locks import AsyncRemoteLocksPort
from holdfast.remote.opening import async_group_there, async_queue_there
from holdfast.remote.producer import RemoteProducerPort
from holdfast.settings import ProducerSettings, QueueSettings
from holdfast.storage.compaction import KeysCompacted

When = datetime | timedelta


class AsyncRemoteBroker(RemoteBrokerFace):
    """The topics of a server, for the tasks of any event loop."""

    async def queue(
        self,
        name: str | None = None,
        *,
        create: bool = True,
        body_type: Any = None,
        settings: QueueSettings | None = None,
        **changes: Any,
    ) -> AsyncQueue[Any]:
        """The queue by this name, made where there is none (unless create=False); see `holdfast.open`."""
        return await self._queue(
            async_queue_there, name, create=create, body_type=body_type, settings=settings, changes=changes
        )

    async def create_topic(
        self, name: str, *, partitions: int | None = None, exist_ok: bool = False, **changes: Any
    ) -> TopicInfo:
        """Make a topic. `changes` are its settings by name, such as retention_hours=168; TopicExists if it is there."""
        return await self._create_topic(name, partitions, changes, exist_ok=exist_ok)

    async def alter_topic(self, name: str, **changes: Any) -> TopicInfo:
        """Change settings of a topic; they count at once, and are kept. `partitions` can only grow."""
        return await self._alter_topic(name, changes)

    async def add_partitions(self, name: str, count: int) -> TopicInfo:
        """Give the topic so many more partitions. From now on keys may go to other partitions than before."""
        return await self._add_partitions(name, count)

    async def describe_topic(self, name: str) -> TopicInfo:
        """What a topic is and holds."""
        return await self._describe_topic(name)

    async def topics(self) -> list[str]:
        """The names of all topics."""
        return await self._topics()

    async def delete_topic(self, name: str) -> None:
        """Take a topic away, with all its messages, groups and dead letters."""
        await self._delete_topic(name)

    async def publish(
        self,
        topic: str,
        body: Any,
        *,
        key: Text | None = None,
        headers: HeadersLike | None = None,
        priority: int = 0,
        delay: Seconds | None = None,
        at: datetime | None = None,
        ttl: Seconds | None = None,
        dedup_id: Text | None = None,
        correlation_id: str | None = None,
        partition: int | None = None,
        durability: Durability | None = None,
        codec: CodecName | None = None,
    ) -> Stored:
        """Store a message in the partition of its key, in the next one in turn, or in the one you choose."""
        message = message_of(body, key, headers, priority, delay, at, ttl, dedup_id, correlation_id)
        return (await self._publish(topic, [message], partition, durability, codec))[0]

    async def publish_many(
        self,
        topic: str,
        messages: Iterable[Any | NewMessage],
        *,
        partition: int | None = None,
        durability: Durability | None = None,
        codec: CodecName | None = None,
    ) -> list[Stored]:
        """Store messages; those that go to one partition all or not at all. Without keys they stay together."""
        return await self._publish(topic, messages, partition, durability, codec)

    async def publish_stream(
        self,
        topic: str,
        stream: AsyncStream,
        size_hint: int | None = None,
        *,
        partition: int | None = None,
        durability: Durability | None = None,
        **options: Any,
    ) -> Stored:
        """Store what a binary file or an iterator of bytes gives as one message.

        `options` are those of `publish`, but `codec`.
        """
        return await publish_stream(
            self._client.publishing, topic, stream, stream_options(options), partition, size_hint, durability
        )

    async def read(
        self,
        topic: str,
        *,
        partition: int = 0,
        offset: int | None = None,
        limit: int = 100,
        on_damage: Literal["raise", "skip"] = "raise",
    ) -> list[Contents[Any]]:
        """Messages of a partition from an offset on, whoever has them; nothing changes.

        Where the next ones are damaged, DamagedRange says where to read on; with on_damage="skip" they are left out.
        """
        return await self._read(topic, partition, offset, limit, on_damage)

    async def group(
        self, topic: str, name: str, *, start: str = "earliest", body_type: Any = None, **changes: Any
    ) -> AsyncGroup[Any]:
        """The group in queue mode, made where there is none: with all that is kept, or ("latest") with what comes.

        `changes` are settings of this group by name, such as key_order=True or max_attempts=3; they are kept.
        """
        return await self._group(async_group_there, topic, name, start, body_type, changes)

    def producer(
        self, *, name: str | None = None, resume: bool = False, body_type: Any = None, **changes: Any
    ) -> AsyncProducer:
        """A producer that gathers messages into batches; `changes` are its settings, such as linger_ms=5, acks="all".

        One with a name fences an earlier one of that name. With `resume` it is given the same messages in the same
        order again after a crash, and stores those that are not stored yet.
        """
        producer = AsyncProducer(
            RemoteProducerPort(self._client),
            producer_settings(ProducerSettings(), changes),
            name=name,
            resume=resume,
            body_type=self._body_type(body_type),
        )
        self._sending.add(producer)
        return producer

    def consumer(
        self, topics: str | Iterable[str], *, group: str, body_type: Any = None, **options: Any
    ) -> AsyncOpening[AsyncConsumer[Any]]:
        """A member of a group in stream mode, which is made where there is none.

        `options` are settings, such as auto_commit=False or max_records=100, and instance_id, holder, on_assigned,
        on_revoked.
        """
        member = partial(AsyncRemoteConsumerPort.open, self._client)
        body_type = self._body_type(body_type)
        return AsyncOpening(partial(AsyncConsumer[Any].open, member, topics, group, body_type=body_type, **options))

    async def compact_topic(self, name: str) -> KeysCompacted:
        """Of each key keep the last message, now; offsets never change. For topics whose cleanup asks for it."""
        return await self._compact_topic(name)

    async def apply_retention(self, name: str) -> Retained:
        """Drop now what the topic's retention settings let go, as upkeep does in time; answers with what is gone."""
        return await self._apply_retention(name)

    async def groups(self, topic: str | None = None) -> list[GroupInfo]:
        """The groups of a topic, or of all, in both modes."""
        return await self._groups(topic)

    async def delete_group(self, name: str, topic: str | None = None) -> None:
        """Forget a group and all that it knows: on one topic in queue mode, or a group in stream mode as a whole."""
        await self._delete_group(name, topic)

    async def reset_offsets(
        self,
        group: str,
        topic: str,
        *,
        to: str | int | datetime,
        partition: int | None = None,
        dry_run: bool = False,
    ) -> list[Reset]:
        """Let a group go on from "earliest", "latest", a time or an offset; with `dry_run` only say what would be."""
        return await self._reset_offsets(group, topic, to, partition, dry_run=dry_run)

    async def trace(self, message_id: str) -> list[TraceStep]:
        """The life of a message step by step, with that of the messages that it was redriven into or out of.

        It is empty where the message was not sampled; see the topic's setting trace_sample.
        """
        return await self._trace(message_id)

    async def search_traces(
        self,
        *,
        topic: str | None = None,
        group: str | None = None,
        event: str | None = None,
        holder: str | None = None,
        error: str | None = None,
        since: When | None = None,
        until: When | None = None,
        limit: int = 100,
        last: bool = False,
    ) -> list[TraceStep]:
        """The steps that fit, oldest first: the first `limit` of them, or the last. A time may be "so long ago"."""
        question = {"topic": topic, "group": group, "event": event, "holder": holder, "error": error}
        return await self._search_traces({**question, "since": since, "until": until}, limit, last=last)

    async def trace_stats(
        self, *, topic: str | None = None, since: When | None = None, until: When | None = None
    ) -> TraceStats:
        """How long messages waited and were worked on, how often they were tried, what failed."""
        return await self._trace_stats({"topic": topic, "since": since, "until": until})

    @property
    def locks(self) -> AsyncLocks:
        """Locks with leases and fencing numbers, for whoever uses this server."""
        return AsyncLocks(AsyncRemoteLocksPort(self._client))

    @property
    def documents(self) -> AsyncDocuments:
        """State documents, each a JSON value with a version."""
        return AsyncDocuments(AsyncRemoteLocksPort(self._client))

    async def sync(self) -> None:
        """Return when everything said so far, acks included, is on disk."""
        await self._sync()

    async def close(self) -> None:
        """Let producers send what they have, give back what was dropped, let go. Closing twice is fine."""
        for producer in list(self._sending):
            await producer.close()
        await self._client.close_async()

    async def __aenter__(self) -> AsyncRemoteBroker:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


# One program, wherever the queue is: what takes the one takes the other.
AsyncBroker.register(AsyncRemoteBroker)
