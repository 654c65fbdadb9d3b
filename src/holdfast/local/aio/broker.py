"""The topics of an engine in this process, for tasks. The event loop never waits for the disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import cached_property, partial  # noqa: F401  threads use both
from typing import Any, TypeVar

from holdfast.api.aio.opening import aside_while_wanted  # async only
from holdfast.api.aio.producer import AsyncProducer
from holdfast.api.arguments import Question
from holdfast.api.bodies import Bodies
from holdfast.api.consumers import MemberRequest
from holdfast.api.contents import Contents
from holdfast.api.drafts import NewMessage, PublishRequest, Stored, StreamRequest
from holdfast.api.topics import GroupInfo, QueueRequest, TopicInfo
from holdfast.broker.engine import BrokerEngine, change_topic, grow_topic
from holdfast.broker.folder.layout import DEAD_SUFFIX, check_topic_name
from holdfast.broker.group import Compacted, QueueGroup
from holdfast.broker.streams.offsets import Reset, ResetEffect, To
from holdfast.broker.topic import Topic
from holdfast.broker.tracing.log import TraceStats, TraceStep

# sync: from functools import partial
# sync: from holdfast.producing.rounds import ThreadRounds
from holdfast.local.aio.consumer import AsyncLocalConsumerPort
from holdfast.local.aio.group import AsyncLocalGroupPort
from holdfast.local.aio.locks import AsyncLocalLocksPort
from holdfast.local.broker import LocalBroker, search_in, stats_in
from holdfast.local.producer import LocalProducerPort
from holdfast.local.publisher import SpooledUpload
from holdfast.local.topic_threads import TopicThread, TopicThreads
from holdfast.model import Durability, Retained
from holdfast.producing.core import producer_settings
from holdfast.producing.rounds import ThreadRounds  # noqa: F401  threads have them
from holdfast.storage.compaction import KeysCompacted
from holdfast.storage.view import OnDamage

_Served = TypeVar("_Served")  # async only


class AsyncLocalBrokerPort(LocalBroker):
    """A broker's port on an engine in this process."""

    # async only
    @cached_property
    def topic_threads(self) -> TopicThreads:
        """Where opening a topic, and what else may take long for one, holds up nothing else."""
        return TopicThreads()

    # async only
    def at(self, topic: str) -> TopicThread:
        """Where to do what may take long for the topic."""
        return self.topic_threads.at(check_topic_name(topic))

    # async only
    async def _opened(self, topic: str) -> None:
        """See to it that the topic is open: that reads files, and may take a while."""
        if not self.engine.is_open(topic):
            await self.at(topic).aside(self.engine.topic, topic)

    # async only
    async def served_group(
        self,
        kind: Callable[[BrokerEngine, QueueGroup, Bodies], _Served],
        topic: str,
        name: str,
        *,
        check: Callable[[BrokerEngine, Topic, str], None],
        start: str = "earliest",
        changes: Mapping[str, Any] | None = None,
    ) -> _Served:
        """The group in queue mode as another kind of object, for those who serve it to others, if they may have it."""
        await asyncio.to_thread(self.engine.key.get)  # which may have to be made: not when a message is on its way
        return await self.at(topic).aside(self.open_group, kind, topic, name, start, self.bodies, changes or {}, check)

    async def queue(self, request: QueueRequest) -> AsyncLocalGroupPort:
        """The default group of a topic, both made where there is none."""
        if request.name is None:  # async only
            return await asyncio.to_thread(self.open_queue, AsyncLocalGroupPort, request)
        return await self.at(request.name).aside(self.open_queue, AsyncLocalGroupPort, request)

    async def group(
        self, topic: str, name: str, start: str, bodies: Bodies, changes: Mapping[str, Any]
    ) -> AsyncLocalGroupPort:
        """A group in queue mode, made where there is none."""
        return await self.at(topic).aside(self.open_group, AsyncLocalGroupPort, topic, name, start, bodies, changes)

    async def existing_group(self, topic: str, name: str, bodies: Bodies) -> AsyncLocalGroupPort:
        """A group in queue mode; UnknownGroup where there is none."""
        return await self.at(topic).aside(self.existing_group_now, AsyncLocalGroupPort, topic, name, bodies)

    async def member(self, request: MemberRequest) -> AsyncLocalConsumerPort:
        """A member of a group in stream mode, which has not joined yet."""
        return await AsyncLocalConsumerPort.open(self.engine, request)

    def producer(self, name: str | None, body_type: Any, changes: Mapping[str, Any], *, resume: bool) -> AsyncProducer:
        """A producer; it is closed with the port."""
        settings = producer_settings(self.engine.settings.producer, changes)
        rounds = None  # sync: rounds = partial(ThreadRounds, thread=self.with_threads)
        port = LocalProducerPort(self.engine)
        producer = AsyncProducer(port, settings, name=name, resume=resume, body_type=body_type, rounds=rounds)
        self._sending.add(producer)
        return producer

    def locks(self) -> AsyncLocalLocksPort:
        """The locks and documents."""
        return AsyncLocalLocksPort(self.engine)

    async def create_topic(
        self, name: str, partitions: int | None, changes: Mapping[str, Any], *, exist_ok: bool
    ) -> TopicInfo:
        """Make a topic."""
        return await self.at(name).aside(self.create_topic_now, name, partitions, changes, exist_ok=exist_ok)

    async def alter_topic(self, name: str, changes: Mapping[str, Any]) -> TopicInfo:
        """Change settings of a topic."""
        return await self._grown(name, await self.at(name).aside(change_topic, self.engine, name, changes))

    async def add_partitions(self, name: str, count: int) -> TopicInfo:
        """Give the topic more partitions."""
        return await self._grown(name, await self.at(name).aside(self.partitions_with, name, count))

    async def _grown(self, name: str, wanted: int) -> TopicInfo:
        """Add partitions, some at a time: a task that is cancelled stops between two steps."""
        while await self.at(name).aside(grow_topic, self.engine, name, wanted):
            pass
        return await self.describe_topic(name)

    async def describe_topic(self, name: str) -> TopicInfo:
        """What a topic is and holds."""
        await self._opened(name.removesuffix(DEAD_SUFFIX))  # async only
        return await aside_while_wanted(self.describe_topic_now, name)

    async def topics(self) -> list[str]:
        """The names of all topics."""
        return await asyncio.to_thread(self.engine.topics)

    async def delete_topic(self, name: str) -> None:
        """Take a topic away."""
        await self.at(name).aside(self.delete_topic_now, name)

    async def compact_topic(self, name: str) -> KeysCompacted:
        """Of each key keep the last message."""
        return await asyncio.to_thread(self.compact_topic_now, name)

    async def apply_retention(self, name: str) -> Retained:
        """Drop what the topic's retention settings let go."""
        return await asyncio.to_thread(self.apply_retention_now, name)

    async def compact_groups(self, name: str) -> Compacted:
        """Drop what every group of the topic has handled."""
        return await asyncio.to_thread(self.compact_groups_now, name)

    async def unfit(self, topic: str, messages: Sequence[NewMessage]) -> int | None:
        """The index of the first message that cannot be stored; None where all of them can."""
        return await asyncio.to_thread(self.unfit_now, topic, messages)

    async def publish_plain(
        self, topic: str, body: bytes, partition: int | None, durability: Durability | None
    ) -> Stored | None:
        """Store a message that is nothing but its bytes; None where it has to go the long way."""
        await self._opened(topic)  # async only
        with self.engine.using(topic) as used:
            publisher = self.publisher(used)
            began_ns = publisher.plain_since()
            if not began_ns:
                return None
            number = publisher.turn(partition)
            appended = await publisher.log(number).append_one_async(body, durability)
            return publisher.plain_stored(number, body, appended, began_ns)

    async def publish(self, topic: str, request: PublishRequest) -> list[Stored]:
        """Store bodies or NewMessages: all that go to one partition, or none of them."""
        began_ns = self.mono_ns()
        await self._opened(topic)  # async only
        with self.engine.using(topic) as used:
            publisher = self.publisher(used)
            messages, durability, codec = request.messages, request.durability, request.codec
            if publisher.all_plain(messages, codec):
                number = publisher.turn(request.partition)
                appended = await publisher.log(number).append_async(messages, durability=durability)  # type: ignore[arg-type]
                return publisher.plain_many(number, messages, appended, began_ns)
            parts = publisher.publish(messages, durability, codec, request.partition, verb="publish_many")
            await publisher.wait_async(parts)
            return publisher.stored(parts, began_ns)

    async def upload(self, topic: str, request: StreamRequest) -> Stored:
        """Store all that the stream gives as one message."""
        await self._opened(topic)  # async only
        with self.engine.using(topic) as used:
            return await SpooledUpload(self.engine.world, self.publisher(used), request).run_async()

    async def read(
        self, topic: str, partition: int, offset: int | None, limit: int, on_damage: OnDamage
    ) -> list[Contents[Any]]:
        """Messages of a partition from an offset on."""
        await self._opened(topic.removesuffix(DEAD_SUFFIX))  # async only
        return await asyncio.to_thread(self.read_now, topic, partition, offset, limit, on_damage=on_damage)

    async def groups(self, topic: str | None) -> list[GroupInfo]:
        """The groups of a topic, or of all, in both modes."""
        return await asyncio.to_thread(self.groups_now, topic)

    async def delete_group(self, name: str, topic: str | None) -> None:
        """Forget a group: on one topic in queue mode, or one in stream mode as a whole."""
        await asyncio.to_thread(self.delete_group_now, name, topic)

    async def reset_offsets(
        self, group: str, topic: str, to: To, partition: int | None, *, dry_run: bool
    ) -> list[Reset]:
        """Let a group go on from elsewhere, or say what that would be."""
        return await asyncio.to_thread(self.reset_offsets_now, group, topic, to, partition, dry_run=dry_run)

    async def effects(self, group: str, resets: Sequence[Reset]) -> list[ResetEffect]:
        """What resets would do to the messages of a group."""
        return await asyncio.to_thread(self.effects_now, group, resets)

    async def trace(self, message_id: str) -> list[TraceStep]:
        """The life of a message."""
        return await asyncio.to_thread(self.engine.trace, message_id)

    async def search_traces(self, question: Question, limit: int, *, last: bool) -> list[TraceStep]:
        """The steps that fit: the first ones, or the last."""
        return await asyncio.to_thread(search_in, self.engine, question, limit, last=last)

    async def trace_stats(self, question: Question) -> TraceStats:
        """The steps that fit, in numbers."""
        return await asyncio.to_thread(stats_in, self.engine, question)

    async def sync(self) -> None:
        """Return when everything said so far is on disk."""
        await asyncio.to_thread(self.engine.sync)

    async def close(self) -> None:
        """Let producers send what they have, sync, and let go of the folder."""
        async with AsyncExitStack() as closing:
            closing.callback(self.topic_threads.close)  # async only
            closing.push_async_callback(
                asyncio.to_thread, self.engine.close
            )  # sync: closing.callback(self.engine.close)
            for producer in list(self._sending):
                closing.push_async_callback(producer.close)
