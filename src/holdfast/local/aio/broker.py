"""An engine in this process as a port: its topics, consumers and locks, for tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import datetime
from functools import cached_property, partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Self, TypeVar

from holdfast.api import AsyncOpening
from holdfast.api.aio.broker import AsyncBroker
from holdfast.api.aio.group import AsyncQueue
from holdfast.api.arguments import Question
from holdfast.api.contents import Contents
from holdfast.api.drafts import Bodies, NewMessage, PublishRequest, Stored, StreamRequest
from holdfast.api.locks import Document, Lock, LockInfo, LockRequest
from holdfast.api.topics import GroupInfo, MemberRequest, QueueRequest, SeekTarget, StreamMessage, TopicInfo
from holdfast.broker.changes import change_topic, grow_topic
from holdfast.broker.engine import BrokerEngine
from holdfast.broker.folder.layout import DEAD_SUFFIX, check_topic_name
from holdfast.broker.group import QueueGroup
from holdfast.broker.metrics import Compacted
from holdfast.broker.samples import Samples
from holdfast.broker.streams import PartitionLag, Reset, ResetEffect, To
from holdfast.broker.topic import Topic
from holdfast.broker.tracing import TraceStep
from holdfast.broker.tracing.log import TraceStats
from holdfast.broker.waiters import TaskWaiter
from holdfast.broker.workers import Order, WorkerInfo
from holdfast.env.threads import aside, aside_while_wanted, opened_aside
from holdfast.later import module
from holdfast.local.aio.group import AsyncLocalGroupPort
from holdfast.local.broker import LocalBroker, TopicThread, TopicThreads, refuse_shard, samples_in, search_in, stats_in
from holdfast.local.group import require_current_async
from holdfast.local.member import StreamMember, member_of
from holdfast.local.opening import close_engine, open_broker_port
from holdfast.local.publisher import LocalProducerPort, SpooledUpload
from holdfast.membership import TopicPartition
from holdfast.model import Durability, Retained
from holdfast.storage.view import OnDamage

if TYPE_CHECKING:
    from holdfast import locking
    from holdfast.api.aio.producer import AsyncProducer
    from holdfast.api.listing import SearchPage
    from holdfast.api.schedules import Firing, Schedule, ScheduleRequest
    from holdfast.api.schemas import SchemaRequest
    from holdfast.api.transactions import TransactionInfo, TransactionRequest
    from holdfast.broker.locks import Decided, FolderLocks
    from holdfast.local import locks as lock_views
    from holdfast.local import schedules as schedule_views
    from holdfast.local import transactions as transaction_views
    from holdfast.schemas.registry import Level, SchemaVersion, VersionNumber
    from holdfast.storage.compaction import KeysCompacted
else:  # few programs lock anything, or have schedules
    locking = module("holdfast.locking")
    lock_views = module("holdfast.local.locks")
    schedule_views = module("holdfast.local.schedules")
    transaction_views = module("holdfast.local.transactions")


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
        """See to it that the topic is open, and a store has room: both may take a while."""
        if self.engine.store is not None:
            await self.engine.store.ready()
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
        """Open the default group of a topic. Both are created if needed."""
        if request.name is None:  # async only
            return await asyncio.to_thread(self.open_queue, AsyncLocalGroupPort, request)
        return await self.at(request.name).aside(self.open_queue, AsyncLocalGroupPort, request)

    async def group(
        self, topic: str, name: str, start: str, bodies: Bodies, changes: Mapping[str, Any]
    ) -> AsyncLocalGroupPort:
        """Open a group in queue mode, which is created if needed."""
        return await self.at(topic).aside(self.open_group, AsyncLocalGroupPort, topic, name, start, bodies, changes)

    async def existing_group(self, topic: str, name: str, bodies: Bodies) -> AsyncLocalGroupPort:
        """Open an existing group in queue mode. Raises UnknownGroup if it does not exist."""
        return await self.at(topic).aside(self.existing_group_now, AsyncLocalGroupPort, topic, name, bodies)

    async def member(self, request: MemberRequest) -> AsyncLocalConsumerPort:
        """Return a member of a group in stream mode that has not joined yet."""
        return await AsyncLocalConsumerPort.open(self.engine, request)

    def producer(self, name: str | None, body_type: Any, changes: Mapping[str, Any], *, resume: bool) -> AsyncProducer:
        """Return a producer, which is closed with the port."""
        # Few programs have one; the others need not load it.
        from holdfast.api.aio.producer import AsyncProducer
        from holdfast.producing.core import producer_settings

        # sync: from holdfast.producing.rounds import ThreadRounds
        settings = producer_settings(self.engine.settings.producer, changes)
        rounds = None  # sync: rounds = partial(ThreadRounds, thread=self.with_threads)
        port = LocalProducerPort(self.engine)
        producer = AsyncProducer(port, settings, name=name, resume=resume, body_type=body_type, rounds=rounds)
        self._sending.add(producer)
        return producer

    def locks(self) -> AsyncLocalLocksPort:
        """The locks and documents."""
        return AsyncLocalLocksPort(self.engine)

    def schedules(self) -> AsyncLocalSchedulesPort:
        """The schedules."""
        return AsyncLocalSchedulesPort(self.engine, self.bodies)

    def schemas(self) -> AsyncLocalSchemasPort:
        """The registry of schemas."""
        return AsyncLocalSchemasPort(self.engine)

    def transactions(self) -> AsyncLocalTransactionsPort:
        """The transactions."""
        return AsyncLocalTransactionsPort(self)

    async def create_topic(
        self, name: str, partitions: int | None, changes: Mapping[str, Any], *, exist_ok: bool, shard: int | None = None
    ) -> TopicInfo:
        """Create a topic; a folder has no shards to choose from."""
        refuse_shard(shard)
        return await self.at(name).aside(self.create_topic_now, name, partitions, changes, exist_ok=exist_ok)

    async def move_topic(self, name: str, shard: int, progress: Callable[[int, int], None] | None) -> TopicInfo:
        """Refuse it: a folder has no shards."""
        refuse_shard(shard)
        return await self.describe_topic(name)

    async def alter_topic(self, name: str, changes: Mapping[str, Any]) -> TopicInfo:
        """Change settings of a topic."""
        return await self._grown(name, await self.at(name).aside(change_topic, self.engine, name, changes))

    async def add_partitions(self, name: str, count: int) -> TopicInfo:
        """Add partitions to a topic."""
        return await self._grown(name, await self.at(name).aside(self.partitions_with, name, count))

    async def _grown(self, name: str, wanted: int) -> TopicInfo:
        """Add partitions, some at a time: a task that is cancelled stops between two steps."""
        while await self.at(name).aside(grow_topic, self.engine, name, wanted):
            pass
        return await self.describe_topic(name)

    async def describe_topic(self, name: str) -> TopicInfo:
        """Return the partitions, groups and settings of a topic."""
        await require_current_async(self.engine)
        await self._opened(name.removesuffix(DEAD_SUFFIX))  # async only
        return await aside_while_wanted(self.describe_topic_now, name)

    async def topics(self) -> list[str]:
        """Return the names of all topics."""
        await require_current_async(self.engine)
        return await asyncio.to_thread(self.engine.topics)

    async def delete_topic(self, name: str) -> None:
        """Delete a topic."""
        await self.at(name).aside(self.delete_topic_now, name)

    async def compact_topic(self, name: str) -> KeysCompacted:
        """Compact the topic by key: only the last message of each key is kept."""
        return await asyncio.to_thread(self.compact_topic_now, name)

    async def apply_retention(self, name: str) -> Retained:
        """Delete what the topic's retention settings no longer keep."""
        return await asyncio.to_thread(self.apply_retention_now, name)

    async def compact_groups(self, name: str) -> Compacted:
        """Delete what every group of the topic has handled."""
        return await asyncio.to_thread(self.compact_groups_now, name)

    async def unfit(self, topic: str, messages: Sequence[NewMessage]) -> int | None:
        """Return the index of the first message that cannot be stored; None if all of them can."""
        return await asyncio.to_thread(self.unfit_now, topic, messages)

    async def publish_plain(
        self, topic: str, body: bytes, partition: int | None, durability: Durability | None
    ) -> Stored | None:
        """Store a message without options on the fast path; returns None if that is not possible."""
        await self._opened(topic)  # async only
        with self.engine.using(topic) as used:
            publisher = self.publisher(used)
            began_ns = publisher.plain_since()
            if not began_ns:
                return None
            number = publisher.turn(partition)
            appended = await publisher.log(number).append_one_async(body, durability)
            return publisher.plain_stored(number, body, appended, began_ns)

    async def publish(self, topic: str, request: PublishRequest) -> Sequence[Stored]:
        """Store bodies or NewMessages. Of those that go to one partition, all are stored or none."""
        began_ns = self.mono_ns()
        await self._opened(topic)  # async only
        with self.engine.using(topic) as used:
            publisher = self.publisher(used)
            messages, durability, codec = request.messages, request.durability, request.codec
            single = publisher.write_single(messages, durability, codec, request.partition)
            if single is not None:
                if single.held:
                    await publisher.log(single.number).wait_async(single.appended)
                return [publisher.single_stored(single, began_ns)]
            if publisher.all_plain(messages, codec):
                number = publisher.turn(request.partition)
                appended = await publisher.log(number).append_async(messages, durability=durability)  # type: ignore[arg-type]
                return publisher.plain_many(number, messages, appended, began_ns)
            parts = publisher.publish(messages, durability, codec, request.partition, verb="publish_many")
            await publisher.wait_async(parts)
            return publisher.stored(parts, began_ns)

    async def upload(self, topic: str, request: StreamRequest) -> Stored:
        """Store one message whose body is read from the stream."""
        await self._opened(topic)  # async only
        with self.engine.using(topic) as used:
            return await SpooledUpload(self.engine.world, self.publisher(used), request).run_async()

    async def read(
        self, topic: str, partition: int, offset: int | None, limit: int, on_damage: OnDamage
    ) -> list[Contents[Any]]:
        """Return messages of a partition from an offset on."""
        await require_current_async(self.engine)
        await self._opened(topic.removesuffix(DEAD_SUFFIX))  # async only
        return await asyncio.to_thread(self.read_now, topic, partition, offset, limit, on_damage=on_damage)

    async def groups(self, topic: str | None) -> list[GroupInfo]:
        """Return the groups of one topic, or of all topics, in queue mode and in stream mode."""
        await require_current_async(self.engine)
        return await asyncio.to_thread(self.groups_now, topic)

    async def workers(self) -> list[WorkerInfo]:
        """Return the workers that report themselves, or did within the last hour."""
        return self.engine.workers.all()

    async def order_worker(self, name: str, order: Order) -> list[str]:
        """Tell the workers of this name, or the one with this id, what to do; return their ids."""
        return self.engine.workers.order(name, order)

    async def delete_group(self, name: str, topic: str | None) -> None:
        """Delete a group: in queue mode on one topic, or in stream mode as a whole."""
        await asyncio.to_thread(self.delete_group_now, name, topic)

    async def reset_offsets(
        self, group: str, topic: str, to: To, partition: int | None, *, dry_run: bool
    ) -> list[Reset]:
        """Move the position of a group; with `dry_run`, only return what would change."""
        return await asyncio.to_thread(self.reset_offsets_now, group, topic, to, partition, dry_run=dry_run)

    async def effects(self, group: str, resets: Sequence[Reset]) -> list[ResetEffect]:
        """Return what resets would do to the messages of a group."""
        await require_current_async(self.engine)
        return await asyncio.to_thread(self.effects_now, group, resets)

    async def trace(self, message_id: str) -> list[TraceStep]:
        """Return the traced steps of a message."""
        await require_current_async(self.engine)
        return await asyncio.to_thread(self.engine.trace, message_id)

    async def search(self, text: str, limit: int, after: str) -> SearchPage:
        """Search the messages of all queues for what somebody typed."""
        await require_current_async(self.engine)
        from holdfast.local.search import search_folder

        return await asyncio.to_thread(search_folder, self, text, limit, after)

    async def search_traces(self, question: Question, limit: int, *, last: bool) -> list[TraceStep]:
        """Return the matching steps: the first ones, or the last."""
        return await asyncio.to_thread(search_in, self.engine, question, limit, last=last)

    async def trace_stats(self, question: Question) -> TraceStats:
        """Summarize the matching steps."""
        return await asyncio.to_thread(stats_in, self.engine, question)

    async def samples(self, topic: str | None, group: str | None, span_ms: int) -> Samples:
        """Return the samples of a group, of a topic, or of all topics together, up to now."""
        return await asyncio.to_thread(samples_in, self.engine, topic, group, span_ms)

    async def sync(self) -> None:
        """Wait until everything done so far is on disk."""
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


# A member of a stream group in this process. The event loop never waits for the disk.


class AsyncLocalConsumerPort(StreamMember):
    """A member of a stream group in this process."""

    @classmethod
    async def open(cls, engine: BrokerEngine, request: MemberRequest) -> Self:
        """Return a member that has not joined yet; the group is created if needed."""
        group, settings = await aside(member_of, engine, request)
        return cls(engine, group, request, settings)

    async def join(self) -> None:
        await self._follow()

    async def poll(
        self, count: int, timeout_ms: int | None, returned: Collection[TopicPartition] = ()
    ) -> list[StreamMessage[Any]]:
        self._begin_poll()
        until_ns = None if timeout_ms is None else self._clock.monotonic_ns() + timeout_ms * 1_000_000
        found = await self._next(count, until_ns)
        passed = self._passed()
        if passed:
            await aside(self._keep_passed, passed)
        return found

    async def attend(self) -> bool:
        if self._must_commit:
            await aside(self._auto_commit, self.partitions)
        return self._must_follow

    async def commit(self, offsets: Mapping[TopicPartition, int], durability: Durability | None = None) -> None:
        appended = await aside(self._write, offsets, durability)
        if appended is not None:
            await self.stream_group.offsets.wait_async(appended)

    async def committed(self, topic: str, partition: int) -> int | None:
        return await aside(self._committed, topic, partition)

    async def seek(self, where: SeekTarget, returned: Collection[TopicPartition] = ()) -> None:
        self._move(await aside(self._positions, where))

    async def lag(self) -> list[PartitionLag]:
        return await aside(self._lag)

    async def leave(self, *, for_good: bool = False) -> None:
        """Commit what is handled and leave; a static member keeps its place, unless it goes for good."""
        self.left = True
        self._line.wake_all()
        await aside(self._leave, for_good=for_good)

    async def _follow(self) -> None:
        """Do what the group says: give back, take over, join again."""
        from holdfast.api.aio.ports import tell

        steps = self._steps()
        while (step := await aside(next, steps, None)) is not None:
            await tell(*step)

    async def _next(self, count: int, until_ns: int | None) -> list[StreamMessage[Any]]:
        """Messages that are there, or come in time; [] otherwise."""
        waiter = TaskWaiter(self._clock)
        self._polling = True
        try:
            while True:
                if self._must_commit:
                    await aside(self._auto_commit, self.partitions)
                if self._must_follow:
                    await self._follow()
                await require_current_async(self.engine)
                with self._line.in_line(waiter):
                    found = self._fetch(count)  # what arrived before we lined up would not wake us
                    if found or self._is_over(until_ns):
                        return found
                    if not self._must_follow:
                        await waiter.wait(self._wait_s(until_ns))
                self.check_open()
        finally:
            self._polling = False
            self._polled_ms = self._now_ms()


# Locks and documents of an engine in this process.


class AsyncLocalLocksPort:
    """The locks and documents of a data folder that this process owns."""

    def __init__(self, engine: BrokerEngine) -> None:
        self.engine = engine

    @property
    def holder(self) -> str:
        return self.engine.holder

    async def acquire(self, wanted: LockRequest) -> Lock:
        locks, clock = await self._locks(), self.engine.world.clock
        waiter, patience = TaskWaiter(clock), lock_views.Patience(clock, wanted.wait_ms)
        ticket = locks.ask(lock_views.command_of(wanted), waiter if wanted.waits else None)
        try:
            while not ticket.over:
                left_s = patience.left_s(locks, ticket)
                if not ticket.over:
                    await waiter.wait(left_s)
            await locks.journal.log.wait_async(locks.settle(ticket))
        except BaseException:
            locks.leave(ticket)
            raise
        return lock_views.granted_lock(locks, ticket)

    async def keepalive(self, lease_id: str, lease_ms: int | None) -> Lock:
        locks = await self._locks()
        proof = locks.proof(lease_id)
        decided = locks.renew(locking.Renew(proof, lease_ms))
        await self._written(locks, decided)
        assert decided.held is not None
        return lock_views.lock_of(locks, proof.name, decided.held, locks.moment())

    async def release(self, lease_id: str) -> None:
        locks = await self._locks()
        locks.release(locks.proof(lease_id))

    async def force_release(self, name: str) -> bool:
        return (await self._locks()).force_release(name)

    async def describe(self, name: str) -> LockInfo:
        locks = await self._locks()
        await require_current_async(self.engine)
        return lock_views.info_of(locks.describe(name), locks.moment())

    async def held_locks(self) -> list[LockInfo]:
        locks = await self._locks()
        await require_current_async(self.engine)
        return [lock_views.info_of(standing, locks.moment()) for standing in locks.standings()]

    def keep(self, lock: Lock) -> lock_views.LocalKeptLock:
        return lock_views.LocalKeptLock(self.engine, lock)

    async def document(self, name: str) -> Document | None:
        locks = await self._locks()
        await require_current_async(self.engine)
        decided = locks.document(name)
        await self._written(locks, decided)
        return lock_views.decided_document(name, decided)

    async def update_document(self, name: str, content: bytes, version: int | None, lease_id: str | None) -> Document:
        locks = await self._locks()
        command = locking.ReplaceDocument(name, content, version, None if lease_id is None else locks.proof(lease_id))
        # A large one takes a while to write, and again to read.
        decided = await aside(locks.change, command)
        await self._written(locks, decided)
        document = await aside(lock_views.decided_document, name, decided)
        assert document is not None
        return document

    async def remove_document(self, name: str, version: int | None, lease_id: str | None) -> bool:
        locks = await self._locks()
        decided = locks.change(locking.Remove(name, version, None if lease_id is None else locks.proof(lease_id)))
        await self._written(locks, decided)
        if decided.refused is not None:
            raise decided.refused
        return decided.content is not None

    async def document_names(self) -> list[str]:
        await require_current_async(self.engine)
        return list((await self._locks()).documents())

    async def _locks(self) -> FolderLocks:
        """The first call opens the journal, which reads files."""
        if self.engine.store is not None:  # async only
            await self.engine.store.ready()
        if not self.engine.has_locks:  # async only
            await asyncio.to_thread(self.engine.locks)
        return self.engine.locks()

    async def _written(self, locks: FolderLocks, decided: Decided) -> None:
        """Wait until a decision is on disk: until then no caller may learn of it, refused or not."""
        if decided.appended is not None:
            await locks.journal.log.wait_async(decided.appended)


# Schedules of an engine in this process.


class AsyncLocalSchedulesPort:
    """The schedules of a data folder that this process owns."""

    def __init__(self, engine: BrokerEngine, bodies: Bodies) -> None:
        self.engine = engine
        self._bodies = bodies

    async def put(self, request: ScheduleRequest) -> Schedule:
        return await aside(schedule_views.put_schedule, self.engine, self._bodies, request)

    async def get(self, name: str) -> Schedule | None:
        await require_current_async(self.engine)
        return await aside(schedule_views.get_schedule, self.engine, name)

    async def all(self) -> list[Schedule]:
        await require_current_async(self.engine)
        return await aside(schedule_views.all_schedules, self.engine)

    async def delete(self, name: str) -> bool:
        return await aside(self.engine.schedules().delete, name)

    async def pause(self, name: str, *, paused: bool) -> Schedule:
        return await aside(schedule_views.pause_schedule, self.engine, name, paused=paused)

    async def run_now(self, name: str) -> Firing:
        return await aside(schedule_views.run_schedule, self.engine, name)

    async def next_dues(self, name: str, count: int) -> list[datetime]:
        await require_current_async(self.engine)
        return await aside(schedule_views.next_dues, self.engine, name, count)


class AsyncLocalSchemasPort:
    """The registry of schemas of a data folder that this process owns."""

    def __init__(self, engine: BrokerEngine) -> None:
        self.engine = engine

    async def register(self, request: SchemaRequest) -> SchemaVersion:
        return await aside(self.engine.body_checks.schemas().register, *request)

    async def problems(self, request: SchemaRequest, version: VersionNumber | None) -> list[str]:
        await require_current_async(self.engine)
        return await aside(self.engine.body_checks.schemas().problems, *request, version)

    async def find(self, request: SchemaRequest) -> SchemaVersion:
        await require_current_async(self.engine)
        return await aside(self.engine.body_checks.schemas().find, *request)

    async def version(self, subject: str, version: VersionNumber, *, deleted: bool) -> SchemaVersion:
        await require_current_async(self.engine)
        return await aside(self.engine.body_checks.schemas().version, subject, version, deleted=deleted)

    async def by_id(self, number: int) -> SchemaVersion:
        await require_current_async(self.engine)
        return await aside(self.engine.body_checks.schemas().by_id, number)

    async def subjects(self, *, deleted: bool) -> list[str]:
        await require_current_async(self.engine)
        return await aside(self.engine.body_checks.schemas().subjects, deleted=deleted)

    async def versions(self, subject: str, *, deleted: bool) -> list[int]:
        await require_current_async(self.engine)
        found = await aside(self.engine.body_checks.schemas().versions, subject, deleted=deleted)
        return [each.version for each in found]

    async def delete(self, subject: str, version: VersionNumber | None, *, permanent: bool) -> list[int]:
        return await aside(self.engine.body_checks.schemas().delete, subject, version, permanent=permanent)

    async def level(self, subject: str | None) -> Level:
        await require_current_async(self.engine)
        return await aside(self.engine.body_checks.schemas().level, subject)

    async def set_level(self, level: Level | None, subject: str | None) -> None:
        await aside(self.engine.body_checks.schemas().set_level, subject, level)


# What is in a folder, opened here, for tasks.


def queue_here_async(
    engine: BrokerEngine, group: QueueGroup, body_type: Any, *, alone: bool = False
) -> AsyncQueue[Any]:
    """A queue for tasks on an engine in this process, which is closed with it where it is `alone` there."""
    return AsyncQueue(AsyncLocalGroupPort(engine, group, Bodies(body_type), alone=alone))


def open_broker_async(folder: str | PathLike[str] | None = None, **options: Any) -> AsyncOpening[AsyncBroker]:
    """Own the topics in a data folder; `holdfast.open_broker` says what the options mean."""
    return AsyncOpening(_open_broker_aside, folder, options)


async def _open_broker_aside(folder: str | PathLike[str] | None, options: Mapping[str, Any]) -> AsyncBroker:
    open_port = partial(open_broker_port, AsyncLocalBrokerPort, folder, **options)
    port = await opened_aside(open_port, close_engine)  # sync: port = open_port()
    return AsyncBroker(port)


async def open_broker_port_async(  # async only
    folder: str | PathLike[str] | None, **options: Any
) -> AsyncLocalBrokerPort:
    """The port of a data folder, for a server or a protocol of its own."""
    return await opened_aside(partial(open_broker_port, AsyncLocalBrokerPort, folder, **options), close_engine)


class AsyncLocalTransactionsPort:
    """The transactions of a data folder that this process owns."""

    def __init__(self, port: AsyncLocalBrokerPort) -> None:
        self._port = port
        self.engine = port.engine
        self.mono_ns = port.mono_ns

    @property
    def place(self) -> str:
        return self.engine.folder

    async def begin(self, name: str | None) -> tuple[str, int]:
        return await aside(transaction_views.begin, self.engine, name)

    async def commit(self, request: TransactionRequest) -> list[Stored]:
        return await aside(transaction_views.commit, self._port, request)

    async def all(self) -> list[TransactionInfo]:
        return await aside(transaction_views.all_transactions, self.engine)

    async def forget(self, name: str) -> bool:
        return await aside(self.engine.transactions().forget, name)
