"""The broker for tasks: the same names, awaited. The event loop never waits for the disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from datetime import datetime
from functools import partial
from os import PathLike
from typing import Any, Literal, TypeVar

from holdfast.api.aio.consumer import AsyncConsumer
from holdfast.api.aio.group import AsyncGroup
from holdfast.api.aio.locks import AsyncDocuments, AsyncLocks
from holdfast.api.aio.opening import AsyncOpening
from holdfast.api.aio.producer import AsyncProducer
from holdfast.api.aio.queue import AsyncQueue
from holdfast.api.contents import Contents
from holdfast.api.drafts import HeadersLike, NewMessage, Seconds, Stored, Text, message_of
from holdfast.api.streams import AsyncStream, stream_options
from holdfast.broker.engine import BrokerEngine, grow_topic
from holdfast.broker.folder.layout import DEAD_SUFFIX, check_readable_name, check_topic_name
from holdfast.broker.group import QueueGroup
from holdfast.broker.metrics import Observer
from holdfast.broker.streams.positions import Reset
from holdfast.broker.topic import Topic
from holdfast.embedded.aio_topics import TopicThreads
from holdfast.embedded.broker_face import BrokerFace, open_broker_face
from holdfast.embedded.opening import Opening
from holdfast.embedded.topics import GroupInfo, TopicInfo
from holdfast.embedded.traces import AsyncTraceFace
from holdfast.env import World
from holdfast.local.aio.consumer import AsyncLocalConsumerPort
from holdfast.local.aio.locks import AsyncLocalLocksPort
from holdfast.local.opening import async_group_here, async_queue_here
from holdfast.local.producer import LocalProducerPort
from holdfast.local.upload import Upload
from holdfast.model import CodecName, Durability, Retained
from holdfast.producing.core import producer_settings
from holdfast.settings import BrokerSettings, QueueSettings
from holdfast.storage.compaction import KeysCompacted

_Result = TypeVar("_Result")
_Served = TypeVar("_Served")


class AsyncBroker(AsyncTraceFace, BrokerFace):
    """The topics of a data folder, for the tasks of any event loop."""

    def __init__(self, engine: BrokerEngine, body_type: Any, *, with_threads: bool = True) -> None:
        super().__init__(engine, body_type, with_threads=with_threads)
        self._topic_threads = TopicThreads()

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
        made = partial(self._queue, async_queue_here, create=create)
        if name is None:
            return await _aside(made, name, body_type, settings, changes)
        return await self._at(name, made, name, body_type, settings, changes)

    async def create_topic(
        self, name: str, *, partitions: int | None = None, exist_ok: bool = False, **changes: Any
    ) -> TopicInfo:
        """Make a topic. `changes` are its settings by name, such as retention_hours=168; TopicExists if it is there."""
        return await self._at(name, partial(self._create_topic, exist_ok=exist_ok), name, partitions, changes)

    async def alter_topic(self, name: str, **changes: Any) -> TopicInfo:
        """Change settings of a topic; they count at once, and are kept. `partitions` can only grow."""
        return await self._grown(name, await self._at(name, self._change_topic, name, changes))

    async def add_partitions(self, name: str, count: int) -> TopicInfo:
        """Give the topic so many more partitions. From now on keys may go to other partitions than before."""
        return await self._grown(name, await self._at(name, self._count_with, name, count))

    async def _grown(self, name: str, wanted: int) -> TopicInfo:
        """Add partitions, some at a time: a task that is cancelled stops between two steps."""
        while await self._at(name, grow_topic, self._engine, name, wanted):
            pass
        return await self.describe_topic(name)

    async def describe_topic(self, name: str) -> TopicInfo:
        """What a topic is and holds."""
        await self._opened(check_readable_name(name).removesuffix(DEAD_SUFFIX))
        return await _aside(self._describe_topic, name)

    async def topics(self) -> list[str]:
        """The names of all topics."""
        return await _aside(self._topics)

    async def delete_topic(self, name: str) -> None:
        """Take a topic away, with all its messages, groups and dead letters."""
        await self._at(name, self._delete_topic, name)

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
        return (await self.publish_many(topic, [message], partition=partition, durability=durability, codec=codec))[0]

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
        began_ns = self._mono_ns()
        await self._opened(topic)
        with self._engine.using(topic) as used:
            publisher = self._publisher(used)
            if publisher.all_plain(messages, codec):
                number = publisher.turn(partition)
                appended = await publisher.log(number).append_async(messages, durability=durability)  # type: ignore[arg-type]
                return publisher.plain_many(number, messages, appended, began_ns)
            parts = publisher.publish(messages, durability, codec, partition, verb="publish_many")
            await publisher.wait_async(parts)
            return publisher.stored(parts, began_ns)

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
        """Store what an (async) iterator of bytes or a binary file gives as one message, without holding it in memory.

        `options` are those of `publish`, but `codec`. What is too large is refused at once where `size_hint` says
        how many bytes will come.
        """
        await self._opened(topic)
        with self._engine.using(topic) as used:
            publisher = self._publisher(used)
            upload = Upload(self._engine.world, publisher, stream_options(options), partition, size_hint)
            return await upload.run_async(stream, durability)

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
        await self._opened(check_readable_name(topic).removesuffix(DEAD_SUFFIX))
        read = partial(self._read, topic, partition, offset, limit, on_damage=on_damage)
        return await _aside(read)

    async def group(
        self, topic: str, name: str, *, start: str = "earliest", body_type: Any = None, **changes: Any
    ) -> AsyncGroup[Any]:
        """The group in queue mode, made where there is none: with all that is kept, or ("latest") with what comes.

        `changes` are settings of this group by name, such as key_order=True or max_attempts=3; they are kept.
        """
        return await self._at(topic, self._group, async_group_here, topic, name, start, body_type, changes)

    async def _served_group(
        self,
        kind: Callable[[BrokerEngine, QueueGroup, Any], _Served],
        topic: str,
        name: str,
        *,
        check: Callable[[BrokerEngine, Topic, str], None],
        start: str = "earliest",
        changes: Mapping[str, Any] | None = None,
    ) -> _Served:
        """The group in queue mode as another kind of object, for those who serve it to others, if they may have it."""
        await _aside(self._engine.key.get)  # which may have to be made: not when a message is on its way
        return await self._at(topic, self._group, kind, topic, name, start, None, changes or {}, check)

    def producer(
        self, *, name: str | None = None, resume: bool = False, body_type: Any = None, **changes: Any
    ) -> AsyncProducer:
        """A producer that gathers messages into batches; `changes` are its settings, such as linger_ms=5, acks="all".

        One with a name fences an earlier one of that name. With `resume` it is given the same messages in the same
        order again after a crash, and stores those that are not stored yet.
        """
        producer = AsyncProducer(
            LocalProducerPort(self._engine),
            producer_settings(self._engine.settings.producer, changes),
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
        member = partial(AsyncLocalConsumerPort.open, self._engine)
        body_type = self._body_type(body_type)
        return AsyncOpening(partial(AsyncConsumer[Any].open, member, topics, group, body_type=body_type, **options))

    async def compact_topic(self, name: str) -> KeysCompacted:
        """Of each key keep the last message, now; offsets never change. For topics whose cleanup asks for it."""
        return await _aside(self._compact_topic, name)

    async def apply_retention(self, name: str) -> Retained:
        """Drop now what the topic's retention settings let go, as upkeep does in time; answers with what is gone."""
        return await _aside(self._apply_retention, name)

    async def groups(self, topic: str | None = None) -> list[GroupInfo]:
        """The groups of a topic, or of all, in both modes."""
        return await _aside(self._groups, topic)

    async def delete_group(self, name: str, topic: str | None = None) -> None:
        """Forget a group and all that it knows: on one topic in queue mode, or a group in stream mode as a whole."""
        await _aside(self._delete_group, name, topic)

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
        return await _aside(partial(self._reset_offsets, dry_run=dry_run), group, topic, to, partition)

    @property
    def locks(self) -> AsyncLocks:
        """Locks with leases and fencing numbers, for whoever shares this folder."""
        return AsyncLocks(AsyncLocalLocksPort(self._engine))

    @property
    def documents(self) -> AsyncDocuments:
        """State documents, each a JSON value with a version."""
        return AsyncDocuments(AsyncLocalLocksPort(self._engine))

    async def sync(self) -> None:
        """Return when everything said so far, acks included, is on disk."""
        await _aside(self._engine.sync)

    async def close(self) -> None:
        """Let producers send what they have, sync, let go of the folder. Closing twice is fine.

        Messages in hand come back at the next opening.
        """
        async with AsyncExitStack() as closing:
            closing.callback(self._topic_threads.close)
            closing.push_async_callback(_aside, self._close)
            for producer in list(self._sending):
                closing.push_async_callback(producer.close)

    async def _opened(self, topic: str) -> None:
        """See to it that the topic is open: that reads files, and may take a while."""
        if not self._engine.is_open(topic):
            await self._at(topic, self._engine.topic, topic)

    async def _at(self, topic: str, call: Callable[..., _Result], *arguments: Any) -> _Result:
        """What may take long for one topic, and must not hold up others."""
        return await self._topic_threads.run(check_topic_name(topic), call, *arguments)

    async def __aenter__(self) -> AsyncBroker:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


async def _aside(call: Callable[..., _Result], *arguments: Any) -> _Result:
    """Something that may wait for the disk, on a thread."""
    return await asyncio.to_thread(call, *arguments)


def open_broker(
    folder: str | PathLike[str] | None = None,
    *,
    create: bool = True,
    durability: Durability | None = None,
    body_type: Any = None,
    settings: BrokerSettings | None = None,
    settings_file: str | PathLike[str] | None = None,
    observer: Observer | None = None,
    world: World | None = None,
    trust_folder: bool | None = None,
) -> Opening[AsyncBroker]:
    """Own the topics in a data folder; `holdfast.open_broker` says what the arguments mean."""
    return Opening(
        partial(
            open_broker_face,
            AsyncBroker,
            folder,
            create=create,
            durability=durability,
            body_type=body_type,
            settings=settings,
            settings_file=settings_file,
            observer=observer,
            world=world,
            trust_folder=trust_folder,
        )
    )
