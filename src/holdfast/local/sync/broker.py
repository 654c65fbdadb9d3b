# Generated from aio/broker.py by tools/sync.py: do not edit it, edit that one and run "make sync".
"""An engine in this process as a port: its topics, consumers and locks, for threads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Self

from holdfast.api.arguments import Question
from holdfast.api.contents import Contents
from holdfast.api.drafts import Bodies, NewMessage, PublishRequest, Stored, StreamRequest
from holdfast.api.locks import Document, Lock, LockInfo, LockRequest
from holdfast.api.sync.broker import Broker
from holdfast.api.sync.group import Queue
from holdfast.api.topics import GroupInfo, MemberRequest, QueueRequest, SeekTarget, StreamMessage, TopicInfo
from holdfast.broker.changes import change_topic, grow_topic
from holdfast.broker.engine import BrokerEngine
from holdfast.broker.group import QueueGroup
from holdfast.broker.metrics import Compacted
from holdfast.broker.samples import Samples
from holdfast.broker.streams import PartitionLag, Reset, ResetEffect, To
from holdfast.broker.tracing import TraceStep
from holdfast.broker.tracing.log import TraceStats
from holdfast.broker.waiters import ThreadWaiter
from holdfast.broker.workers import Order, WorkerInfo
from holdfast.later import module
from holdfast.local.broker import LocalBroker, refuse_shard, samples_in, search_in, stats_in
from holdfast.local.group import require_current
from holdfast.local.member import StreamMember, member_of
from holdfast.local.opening import open_broker_port
from holdfast.local.publisher import LocalProducerPort, SpooledUpload
from holdfast.local.sync.group import LocalGroupPort
from holdfast.membership import TopicPartition
from holdfast.model import Durability, Retained
from holdfast.storage.view import OnDamage

if TYPE_CHECKING:
    from holdfast import locking
    from holdfast.api.listing import SearchPage
    from holdfast.api.schedules import Firing, Schedule, ScheduleRequest
    from holdfast.api.schemas import SchemaRequest
    from holdfast.api.sync.producer import Producer
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


class LocalBrokerPort(LocalBroker):
    """A broker's port on an engine in this process."""

    def queue(self, request: QueueRequest) -> LocalGroupPort:
        """Open the default group of a topic. Both are created if needed."""
        return self.open_queue(LocalGroupPort, request)

    def group(self, topic: str, name: str, start: str, bodies: Bodies, changes: Mapping[str, Any]) -> LocalGroupPort:
        """Open a group in queue mode, which is created if needed."""
        return self.open_group(LocalGroupPort, topic, name, start, bodies, changes)

    def existing_group(self, topic: str, name: str, bodies: Bodies) -> LocalGroupPort:
        """Open an existing group in queue mode. Raises UnknownGroup if it does not exist."""
        return self.existing_group_now(LocalGroupPort, topic, name, bodies)

    def member(self, request: MemberRequest) -> LocalConsumerPort:
        """Return a member of a group in stream mode that has not joined yet."""
        return LocalConsumerPort.open(self.engine, request)

    def producer(self, name: str | None, body_type: Any, changes: Mapping[str, Any], *, resume: bool) -> Producer:
        """Return a producer, which is closed with the port."""
        # Few programs have one; the others need not load it.
        from holdfast.api.sync.producer import Producer
        from holdfast.producing.core import producer_settings
        from holdfast.producing.rounds import ThreadRounds

        settings = producer_settings(self.engine.settings.producer, changes)
        rounds = partial(ThreadRounds, thread=self.with_threads)
        port = LocalProducerPort(self.engine)
        producer = Producer(port, settings, name=name, resume=resume, body_type=body_type, rounds=rounds)
        self._sending.add(producer)
        return producer

    def locks(self) -> LocalLocksPort:
        """The locks and documents."""
        return LocalLocksPort(self.engine)

    def schedules(self) -> LocalSchedulesPort:
        """The schedules."""
        return LocalSchedulesPort(self.engine, self.bodies)

    def schemas(self) -> LocalSchemasPort:
        """The registry of schemas."""
        return LocalSchemasPort(self.engine)

    def transactions(self) -> LocalTransactionsPort:
        """The transactions."""
        return LocalTransactionsPort(self)

    def create_topic(
        self, name: str, partitions: int | None, changes: Mapping[str, Any], *, exist_ok: bool, shard: int | None = None
    ) -> TopicInfo:
        """Create a topic; a folder has no shards to choose from."""
        refuse_shard(shard)
        return self.create_topic_now(name, partitions, changes, exist_ok=exist_ok)

    def move_topic(self, name: str, shard: int, progress: Callable[[int, int], None] | None) -> TopicInfo:
        """Refuse it: a folder has no shards."""
        refuse_shard(shard)
        return self.describe_topic(name)

    def alter_topic(self, name: str, changes: Mapping[str, Any]) -> TopicInfo:
        """Change settings of a topic."""
        return self._grown(name, change_topic(self.engine, name, changes))

    def add_partitions(self, name: str, count: int) -> TopicInfo:
        """Add partitions to a topic."""
        return self._grown(name, self.partitions_with(name, count))

    def _grown(self, name: str, wanted: int) -> TopicInfo:
        """Add partitions, some at a time: a thread that is cancelled stops between two steps."""
        while grow_topic(self.engine, name, wanted):
            pass
        return self.describe_topic(name)

    def describe_topic(self, name: str) -> TopicInfo:
        """Return the partitions, groups and settings of a topic."""
        require_current(self.engine)
        return self.describe_topic_now(name)

    def topics(self) -> list[str]:
        """Return the names of all topics."""
        require_current(self.engine)
        return self.engine.topics()

    def delete_topic(self, name: str) -> None:
        """Delete a topic."""
        self.delete_topic_now(name)

    def compact_topic(self, name: str) -> KeysCompacted:
        """Compact the topic by key: only the last message of each key is kept."""
        return self.compact_topic_now(name)

    def apply_retention(self, name: str) -> Retained:
        """Delete what the topic's retention settings no longer keep."""
        return self.apply_retention_now(name)

    def compact_groups(self, name: str) -> Compacted:
        """Delete what every group of the topic has handled."""
        return self.compact_groups_now(name)

    def unfit(self, topic: str, messages: Sequence[NewMessage]) -> int | None:
        """Return the index of the first message that cannot be stored; None if all of them can."""
        return self.unfit_now(topic, messages)

    def publish_plain(
        self, topic: str, body: bytes, partition: int | None, durability: Durability | None
    ) -> Stored | None:
        """Store a message without options on the fast path; returns None if that is not possible."""
        with self.engine.using(topic) as used:
            publisher = self.publisher(used)
            began_ns = publisher.plain_since()
            if not began_ns:
                return None
            number = publisher.turn(partition)
            appended = publisher.log(number).append_one(body, durability)
            return publisher.plain_stored(number, body, appended, began_ns)

    def publish(self, topic: str, request: PublishRequest) -> Sequence[Stored]:
        """Store bodies or NewMessages. Of those that go to one partition, all are stored or none."""
        began_ns = self.mono_ns()
        with self.engine.using(topic) as used:
            publisher = self.publisher(used)
            messages, durability, codec = request.messages, request.durability, request.codec
            single = publisher.write_single(messages, durability, codec, request.partition)
            if single is not None:
                if single.held:
                    publisher.log(single.number).wait(single.appended)
                return [publisher.single_stored(single, began_ns)]
            if publisher.all_plain(messages, codec):
                number = publisher.turn(request.partition)
                appended = publisher.log(number).append(messages, durability=durability)  # type: ignore[arg-type]
                return publisher.plain_many(number, messages, appended, began_ns)
            parts = publisher.publish(messages, durability, codec, request.partition, verb="publish_many")
            publisher.wait(parts)
            return publisher.stored(parts, began_ns)

    def upload(self, topic: str, request: StreamRequest) -> Stored:
        """Store one message whose body is read from the stream."""
        with self.engine.using(topic) as used:
            return SpooledUpload(self.engine.world, self.publisher(used), request).run()

    def read(
        self, topic: str, partition: int, offset: int | None, limit: int, on_damage: OnDamage
    ) -> list[Contents[Any]]:
        """Return messages of a partition from an offset on."""
        require_current(self.engine)
        return self.read_now(topic, partition, offset, limit, on_damage=on_damage)

    def groups(self, topic: str | None) -> list[GroupInfo]:
        """Return the groups of one topic, or of all topics, in queue mode and in stream mode."""
        require_current(self.engine)
        return self.groups_now(topic)

    def workers(self) -> list[WorkerInfo]:
        """Return the workers that report themselves, or did within the last hour."""
        return self.engine.workers.all()

    def order_worker(self, name: str, order: Order) -> list[str]:
        """Tell the workers of this name, or the one with this id, what to do; return their ids."""
        return self.engine.workers.order(name, order)

    def delete_group(self, name: str, topic: str | None) -> None:
        """Delete a group: in queue mode on one topic, or in stream mode as a whole."""
        self.delete_group_now(name, topic)

    def reset_offsets(self, group: str, topic: str, to: To, partition: int | None, *, dry_run: bool) -> list[Reset]:
        """Move the position of a group; with `dry_run`, only return what would change."""
        return self.reset_offsets_now(group, topic, to, partition, dry_run=dry_run)

    def effects(self, group: str, resets: Sequence[Reset]) -> list[ResetEffect]:
        """Return what resets would do to the messages of a group."""
        require_current(self.engine)
        return self.effects_now(group, resets)

    def trace(self, message_id: str) -> list[TraceStep]:
        """Return the traced steps of a message."""
        require_current(self.engine)
        return self.engine.trace(message_id)

    def search(self, text: str, limit: int, after: str) -> SearchPage:
        """Search the messages of all queues for what somebody typed."""
        require_current(self.engine)
        from holdfast.local.search import search_folder

        return search_folder(self, text, limit, after)

    def search_traces(self, question: Question, limit: int, *, last: bool) -> list[TraceStep]:
        """Return the matching steps: the first ones, or the last."""
        return search_in(self.engine, question, limit, last=last)

    def trace_stats(self, question: Question) -> TraceStats:
        """Summarize the matching steps."""
        return stats_in(self.engine, question)

    def samples(self, topic: str | None, group: str | None, span_ms: int) -> Samples:
        """Return the samples of a group, of a topic, or of all topics together, up to now."""
        return samples_in(self.engine, topic, group, span_ms)

    def sync(self) -> None:
        """Wait until everything done so far is on disk."""
        self.engine.sync()

    def close(self) -> None:
        """Let producers send what they have, sync, and let go of the folder."""
        with ExitStack() as closing:
            closing.callback(self.engine.close)
            for producer in list(self._sending):
                closing.callback(producer.close)


# A member of a stream group in this process. The event loop never waits for the disk.


class LocalConsumerPort(StreamMember):
    """A member of a stream group in this process."""

    @classmethod
    def open(cls, engine: BrokerEngine, request: MemberRequest) -> Self:
        """Return a member that has not joined yet; the group is created if needed."""
        group, settings = member_of(engine, request)
        return cls(engine, group, request, settings)

    def join(self) -> None:
        self._follow()

    def poll(
        self, count: int, timeout_ms: int | None, returned: Collection[TopicPartition] = ()
    ) -> list[StreamMessage[Any]]:
        self._begin_poll()
        until_ns = None if timeout_ms is None else self._clock.monotonic_ns() + timeout_ms * 1_000_000
        found = self._next(count, until_ns)
        passed = self._passed()
        if passed:
            self._keep_passed(passed)
        return found

    def attend(self) -> bool:
        if self._must_commit:
            self._auto_commit(self.partitions)
        return self._must_follow

    def commit(self, offsets: Mapping[TopicPartition, int], durability: Durability | None = None) -> None:
        appended = self._write(offsets, durability)
        if appended is not None:
            self.stream_group.offsets.wait(appended)

    def committed(self, topic: str, partition: int) -> int | None:
        return self._committed(topic, partition)

    def seek(self, where: SeekTarget, returned: Collection[TopicPartition] = ()) -> None:
        self._move(self._positions(where))

    def lag(self) -> list[PartitionLag]:
        return self._lag()

    def leave(self, *, for_good: bool = False) -> None:
        """Commit what is handled and leave; a static member keeps its place, unless it goes for good."""
        self.left = True
        self._line.wake_all()
        self._leave(for_good=for_good)

    def _follow(self) -> None:
        """Do what the group says: give back, take over, join again."""
        from holdfast.api.sync.ports import tell

        steps = self._steps()
        while (step := next(steps, None)) is not None:
            tell(*step)

    def _next(self, count: int, until_ns: int | None) -> list[StreamMessage[Any]]:
        """Messages that are there, or come in time; [] otherwise."""
        waiter = ThreadWaiter(self._clock)
        self._polling = True
        try:
            while True:
                if self._must_commit:
                    self._auto_commit(self.partitions)
                if self._must_follow:
                    self._follow()
                require_current(self.engine)
                with self._line.in_line(waiter):
                    found = self._fetch(count)  # what arrived before we lined up would not wake us
                    if found or self._is_over(until_ns):
                        return found
                    if not self._must_follow:
                        waiter.wait(self._wait_s(until_ns))
                self.check_open()
        finally:
            self._polling = False
            self._polled_ms = self._now_ms()


# Locks and documents of an engine in this process.


class LocalLocksPort:
    """The locks and documents of a data folder that this process owns."""

    def __init__(self, engine: BrokerEngine) -> None:
        self.engine = engine

    @property
    def holder(self) -> str:
        return self.engine.holder

    def acquire(self, wanted: LockRequest) -> Lock:
        locks, clock = self._locks(), self.engine.world.clock
        waiter, patience = ThreadWaiter(clock), lock_views.Patience(clock, wanted.wait_ms)
        ticket = locks.ask(lock_views.command_of(wanted), waiter if wanted.waits else None)
        try:
            while not ticket.over:
                left_s = patience.left_s(locks, ticket)
                if not ticket.over:
                    waiter.wait(left_s)
            locks.journal.log.wait(locks.settle(ticket))
        except BaseException:
            locks.leave(ticket)
            raise
        return lock_views.granted_lock(locks, ticket)

    def keepalive(self, lease_id: str, lease_ms: int | None) -> Lock:
        locks = self._locks()
        proof = locks.proof(lease_id)
        decided = locks.renew(locking.Renew(proof, lease_ms))
        self._written(locks, decided)
        assert decided.held is not None
        return lock_views.lock_of(locks, proof.name, decided.held, locks.moment())

    def release(self, lease_id: str) -> None:
        locks = self._locks()
        locks.release(locks.proof(lease_id))

    def force_release(self, name: str) -> bool:
        return self._locks().force_release(name)

    def describe(self, name: str) -> LockInfo:
        locks = self._locks()
        require_current(self.engine)
        return lock_views.info_of(locks.describe(name), locks.moment())

    def held_locks(self) -> list[LockInfo]:
        locks = self._locks()
        require_current(self.engine)
        return [lock_views.info_of(standing, locks.moment()) for standing in locks.standings()]

    def keep(self, lock: Lock) -> lock_views.LocalKeptLock:
        return lock_views.LocalKeptLock(self.engine, lock)

    def document(self, name: str) -> Document | None:
        locks = self._locks()
        require_current(self.engine)
        decided = locks.document(name)
        self._written(locks, decided)
        return lock_views.decided_document(name, decided)

    def update_document(self, name: str, content: bytes, version: int | None, lease_id: str | None) -> Document:
        locks = self._locks()
        command = locking.ReplaceDocument(name, content, version, None if lease_id is None else locks.proof(lease_id))
        # A large one takes a while to write, and again to read.
        decided = locks.change(command)
        self._written(locks, decided)
        document = lock_views.decided_document(name, decided)
        assert document is not None
        return document

    def remove_document(self, name: str, version: int | None, lease_id: str | None) -> bool:
        locks = self._locks()
        decided = locks.change(locking.Remove(name, version, None if lease_id is None else locks.proof(lease_id)))
        self._written(locks, decided)
        if decided.refused is not None:
            raise decided.refused
        return decided.content is not None

    def document_names(self) -> list[str]:
        require_current(self.engine)
        return list(self._locks().documents())

    def _locks(self) -> FolderLocks:
        """The first call opens the journal, which reads files."""
        return self.engine.locks()

    def _written(self, locks: FolderLocks, decided: Decided) -> None:
        """Wait until a decision is on disk: until then no caller may learn of it, refused or not."""
        if decided.appended is not None:
            locks.journal.log.wait(decided.appended)


# Schedules of an engine in this process.


class LocalSchedulesPort:
    """The schedules of a data folder that this process owns."""

    def __init__(self, engine: BrokerEngine, bodies: Bodies) -> None:
        self.engine = engine
        self._bodies = bodies

    def put(self, request: ScheduleRequest) -> Schedule:
        return schedule_views.put_schedule(self.engine, self._bodies, request)

    def get(self, name: str) -> Schedule | None:
        require_current(self.engine)
        return schedule_views.get_schedule(self.engine, name)

    def all(self) -> list[Schedule]:
        require_current(self.engine)
        return schedule_views.all_schedules(self.engine)

    def delete(self, name: str) -> bool:
        return self.engine.schedules().delete(name)

    def pause(self, name: str, *, paused: bool) -> Schedule:
        return schedule_views.pause_schedule(self.engine, name, paused=paused)

    def run_now(self, name: str) -> Firing:
        return schedule_views.run_schedule(self.engine, name)

    def next_dues(self, name: str, count: int) -> list[datetime]:
        require_current(self.engine)
        return schedule_views.next_dues(self.engine, name, count)


class LocalSchemasPort:
    """The registry of schemas of a data folder that this process owns."""

    def __init__(self, engine: BrokerEngine) -> None:
        self.engine = engine

    def register(self, request: SchemaRequest) -> SchemaVersion:
        return self.engine.body_checks.schemas().register(*request)

    def problems(self, request: SchemaRequest, version: VersionNumber | None) -> list[str]:
        require_current(self.engine)
        return self.engine.body_checks.schemas().problems(*request, version)

    def find(self, request: SchemaRequest) -> SchemaVersion:
        require_current(self.engine)
        return self.engine.body_checks.schemas().find(*request)

    def version(self, subject: str, version: VersionNumber, *, deleted: bool) -> SchemaVersion:
        require_current(self.engine)
        return self.engine.body_checks.schemas().version(subject, version, deleted=deleted)

    def by_id(self, number: int) -> SchemaVersion:
        require_current(self.engine)
        return self.engine.body_checks.schemas().by_id(number)

    def subjects(self, *, deleted: bool) -> list[str]:
        require_current(self.engine)
        return self.engine.body_checks.schemas().subjects(deleted=deleted)

    def versions(self, subject: str, *, deleted: bool) -> list[int]:
        require_current(self.engine)
        found = self.engine.body_checks.schemas().versions(subject, deleted=deleted)
        return [each.version for each in found]

    def delete(self, subject: str, version: VersionNumber | None, *, permanent: bool) -> list[int]:
        return self.engine.body_checks.schemas().delete(subject, version, permanent=permanent)

    def level(self, subject: str | None) -> Level:
        require_current(self.engine)
        return self.engine.body_checks.schemas().level(subject)

    def set_level(self, level: Level | None, subject: str | None) -> None:
        self.engine.body_checks.schemas().set_level(subject, level)


# What is in a folder, opened here, for threads.


def queue_here(engine: BrokerEngine, group: QueueGroup, body_type: Any, *, alone: bool = False) -> Queue[Any]:
    """A queue for threads on an engine in this process, which is closed with it where it is `alone` there."""
    return Queue(LocalGroupPort(engine, group, Bodies(body_type), alone=alone))


def open_broker(folder: str | PathLike[str] | None = None, **options: Any) -> Broker:
    """Own the topics in a data folder; `holdfast.open_broker` says what the options mean."""
    return _open_broker_aside(folder, options)


def _open_broker_aside(folder: str | PathLike[str] | None, options: Mapping[str, Any]) -> Broker:
    open_port = partial(open_broker_port, LocalBrokerPort, folder, **options)
    port = open_port()
    return Broker(port)


class LocalTransactionsPort:
    """The transactions of a data folder that this process owns."""

    def __init__(self, port: LocalBrokerPort) -> None:
        self._port = port
        self.engine = port.engine
        self.mono_ns = port.mono_ns

    @property
    def place(self) -> str:
        return self.engine.folder

    def begin(self, name: str | None) -> tuple[str, int]:
        return transaction_views.begin(self.engine, name)

    def commit(self, request: TransactionRequest) -> list[Stored]:
        return transaction_views.commit(self._port, request)

    def all(self) -> list[TransactionInfo]:
        return transaction_views.all_transactions(self.engine)

    def forget(self, name: str) -> bool:
        return self.engine.transactions().forget(name)
