"""The topics of an engine in this process, with their groups and traces: what tasks and threads share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, ParamSpec, TypeVar
from weakref import WeakSet

import msgspec

from holdfast.api.arguments import Question, moment_ns
from holdfast.api.contents import Contents, PartitionHome
from holdfast.api.drafts import Bodies, MessageOptions, NewMessage, Stored, kind_of, moment_at
from holdfast.api.topics import GroupInfo, PartitionInfo, QueueRequest, TopicInfo, changes_to
from holdfast.broker.changes import change_topic, grow_topic
from holdfast.broker.delivery import Delivery
from holdfast.broker.engine import BrokerEngine
from holdfast.broker.folder.contents import differing_settings
from holdfast.broker.folder.layout import DEFAULT_GROUP
from holdfast.broker.group import QueueGroup
from holdfast.broker.metrics import Compacted
from holdfast.broker.partition import Partition
from holdfast.broker.samples import TOTAL, Samples
from holdfast.broker.streams import Reset, ResetEffect, To, effect_of, lag_of
from holdfast.broker.topic import Topic
from holdfast.broker.tracing import TraceStep
from holdfast.broker.tracing.log import Search, TraceStats
from holdfast.broker.upkeep import reading
from holdfast.codec.samples import SeriesKey
from holdfast.env.process import asyncio, futures
from holdfast.env.world import Wanted
from holdfast.errors import (
    CorruptData,
    DamagedRange,
    DiskFull,
    HoldfastError,
    InvalidRequest,
    TopicExists,
    UnknownGroup,
    UnknownTopic,
)
from holdfast.local.publisher import Publisher
from holdfast.model import Durability, Retained, extra_bytes
from holdfast.settings import BrokerSettings, TopicSettings
from holdfast.storage.compaction import KeysCompacted
from holdfast.storage.retention import tiered_bytes
from holdfast.storage.view import OnDamage

if TYPE_CHECKING:
    from holdfast.env.threads import DaemonThreads

# Descriptions of topics and their groups.


def refuse_shard(shard: int | None) -> None:
    """Raise InvalidRequest if there is a shard to choose: a folder is no cluster."""
    if shard is not None:
        raise InvalidRequest("this is not a cluster, so there are no shards to choose from; connect to a node")


def describe(engine: BrokerEngine, topic: Topic) -> TopicInfo:
    """Return the description of a topic."""
    partitions = [partition_info(number, partition) for number, partition in enumerate(topic.partitions)]
    return TopicInfo(
        name=topic.name,
        id=topic.id,
        created_at=moment_at(topic.created_ms),
        partitions=partitions,
        groups=sorted(topic.groups),
        stream_groups=[group.name for group in engine.streams.on(topic)],
        settings=differing_settings(topic.settings, TopicSettings()),
    )


def partition_info(number: int, partition: Partition) -> PartitionInfo:
    """Return the description of a partition."""
    segments = partition.log.segments()
    return PartitionInfo(
        number=number,
        start=partition.log.start,
        end=partition.log.end,
        bytes=sum(segment.bytes for segment in segments),
        segments=len(segments),
        tiered_bytes=tiered_bytes(segments),
        problem="" if partition.lost is None else str(partition.lost),
    )


def groups_on(engine: BrokerEngine, topic: Topic) -> list[GroupInfo]:
    """Return the groups of a topic, in both modes, and the queries that read it."""
    found = []
    now_ns = engine.world.clock.now_ns()
    for group in topic.groups.values():
        stats = group.stats()
        ages = [
            lag_of(delivery.partition.log, (topic.name, delivery.number), delivery.group.floor, now_ns).seconds
            for delivery in group.deliveries
        ]
        found.append(
            GroupInfo(
                name=group.name,
                topic=topic.name,
                mode="queue",
                lag=stats.ready + stats.leased + stats.delayed,
                members=group.members(),
                lag_seconds=max(ages),
                paused=group.paused,
            )
        )
    return [*found, *streams_on(engine, topic)]


def streams_on(engine: BrokerEngine, topic: Topic) -> list[GroupInfo]:
    """Return what reads a topic without taking messages, groups in stream mode and queries, and what cannot be read."""
    found = []
    for stream in engine.streams.on(topic):
        facts = stream.describe()
        lags = [lag for lag in facts.lag if lag.topic == topic.name]
        found.append(
            GroupInfo(
                name=stream.name,
                topic=topic.name,
                mode="stream",
                lag=sum(lag.messages for lag in lags),
                members=sum(topic.name in member.topics for member in facts.members),
                lag_seconds=max((lag.seconds for lag in lags), default=0.0),
            )
        )
    return [*found, *_damaged_on(engine, topic), *_queries_on(engine, topic)]


def _damaged_on(engine: BrokerEngine, topic: Topic) -> Iterator[GroupInfo]:
    """Iterate over groups that cannot be opened; in stream mode all, as their topics are unknown."""
    now_ns = engine.world.clock.now_ns()
    modes: tuple[tuple[Literal["queue", "stream"], Mapping[str, CorruptData]], ...] = (
        ("queue", topic.damaged),
        ("stream", engine.streams.damaged),
    )
    for mode, damaged in modes:
        for name, error in sorted(damaged.items()):
            lags = [
                lag_of(partition.log, (topic.name, number), partition.log.start, now_ns)
                for number, partition in enumerate(topic.partitions)
            ]
            yield GroupInfo(
                name=name,
                topic=topic.name,
                mode=mode,
                lag=sum(lag.messages for lag in lags),
                members=0,
                lag_seconds=max(lag.seconds for lag in lags),
                problem=str(error),
            )


def _queries_on(engine: BrokerEngine, topic: Topic) -> Iterator[GroupInfo]:
    for query, lags in engine.queries.on(topic):
        yield GroupInfo(
            name=query.group,
            topic=topic.name,
            mode="query",
            lag=sum(lag.messages for lag in lags),
            members=1,
            lag_seconds=max(lag.seconds for lag in lags),
            renewed_seconds=(query.renewed_ms_ago or 0) / 1000,
            timeout_seconds=query.ttl_ms / 1000,
        )


# Searches in the traces of an engine.


def search_in(engine: BrokerEngine, question: Question, limit: int, *, last: bool) -> list[TraceStep]:
    """Return the matching steps."""
    wanted = _wanted(engine, question)
    engine.check_open()
    return engine.traces.search(wanted, limit, last=last)


def steps_in(
    engine: BrokerEngine, question: Question, places: range, look: Callable[[int], None]
) -> Iterator[TraceStep]:
    """Iterate over the matching steps in these places of the log; calls `look` with each place before it is read."""
    wanted = _wanted(engine, question)
    engine.check_open()
    return engine.traces.steps(wanted, places, look)


def places_in(engine: BrokerEngine, question: Question) -> range:
    """Return the places in the trace log that may have matching steps."""
    wanted = _wanted(engine, question)
    engine.check_open()
    return engine.traces.extent(wanted)


def stats_in(engine: BrokerEngine, question: Question) -> TraceStats:
    """Summarize the matching steps."""
    wanted = _wanted(engine, question)
    engine.check_open()
    return engine.traces.stats(wanted)


def samples_in(engine: BrokerEngine, topic: str | None, group: str | None, span_ms: int) -> Samples:
    """Return the samples of a group, of a topic, or of all topics together."""
    engine.check_open()
    if topic is None:
        return engine.sampler.store.read(TOTAL, span_ms / 1000)
    with engine.using(topic) as found:
        name = group if group is not None else DEFAULT_GROUP if DEFAULT_GROUP in found.groups else ""
        streams = [stream.name for stream in engine.streams.on(found)]
        if name in found.groups:
            key = SeriesKey("queue", topic, name, found.id)
        elif name in streams:
            key = SeriesKey("stream", topic, name, found.id)
        elif not name:
            key = SeriesKey("topic", topic, "", found.id)
        else:
            raise UnknownGroup(f"no group {name} reads {topic}; `groups()` of the broker lists those that do")
    return engine.sampler.store.read(key, span_ms / 1000)


def _wanted(engine: BrokerEngine, question: Question) -> Search:
    wanted: dict[str, Any] = {
        name: value for name, value in msgspec.structs.asdict(question).items() if value is not None
    }
    for name in ("since", "until"):
        if name in wanted:
            wanted[f"{name}_ns"] = moment_ns(wanted.pop(name), name, engine.world.clock.now_ns())
    return Search(**wanted)


_Group = TypeVar("_Group")


class LocalBroker:
    """One opened data folder."""

    def __init__(self, engine: BrokerEngine, body_type: Any = None, *, with_threads: bool = True) -> None:
        self.engine = engine
        self.body_type = body_type
        self.bodies = Bodies(body_type)
        self.mono_ns = engine.world.clock.monotonic_ns
        self.with_threads = with_threads  # false in simulated time
        self._publishers: dict[str, Publisher] = {}
        self._sending: WeakSet[Any] = WeakSet()  # producers, which may have messages that are not stored yet

    @property
    def place(self) -> str:
        """The data folder."""
        return self.engine.folder

    @property
    def settings(self) -> BrokerSettings:
        return self.engine.settings

    @property
    def closed(self) -> bool:
        return self.engine.closed

    @property
    def shared(self) -> bool:
        """Whether other processes can use the topics through the folder's socket."""
        return self.engine.stand_in is not None

    def after_fork(self) -> Any:
        """Return the port for a child after a fork: a client of the parent if the folder is shared."""
        return self if self.engine.stand_in is None else self.engine.stand_in(self)

    # Topics

    def create_topic_now(
        self, name: str, partitions: int | None, changes: Mapping[str, Any], *, exist_ok: bool
    ) -> TopicInfo:
        """Create a topic."""
        given = {} if partitions is None else {"partitions": partitions}
        try:
            self.engine.create_topic(name, None, {**changes, **given})
        except TopicExists:
            if not exist_ok:
                raise
        return self.describe_topic_now(name)

    def partitions_with(self, name: str, count: int) -> int:
        """Return how many partitions the topic will have with `count` more."""
        with self.engine.using(name) as topic:
            return change_topic(self.engine, name, {"partitions": len(topic.partitions) + count})

    def describe_topic_now(self, name: str) -> TopicInfo:
        """Return the partitions, groups and settings of a topic."""
        with reading(self.engine.using, name) as found:
            info = describe(self.engine, found.topic)
            if name == info.name:
                return info
            letters = [partition_info(number, each) for number, each in enumerate(found.partitions())]
            return msgspec.structs.replace(
                info, name=name, partitions=letters, groups=[], stream_groups=[], settings={}
            )

    def delete_topic_now(self, name: str) -> None:
        """Delete a topic."""
        self.engine.delete_topic(name)
        self._publishers.pop(name, None)

    def compact_topic_now(self, name: str) -> KeysCompacted:
        """Compact the topic by key: only the last message of each key is kept."""
        with self.engine.using(name) as topic:
            if topic.settings.cleanup == "delete":
                raise InvalidRequest(
                    f"topic {name} is not compacted by key, because that would remove messages. "
                    'Use alter_topic(cleanup="compact") if only the last message of each key is wanted'
                )
            self.engine.streams.bring_pins(topic)
            return topic.compact_keys(roll=True)

    def apply_retention_now(self, name: str) -> Retained:
        """Delete what the topic's retention settings no longer keep."""
        with self.engine.using(name) as topic:
            self.engine.streams.bring_pins(topic)
            return topic.apply_retention()

    def compact_groups_now(self, name: str) -> Compacted:
        """Delete what every group of the topic has handled; nothing if the topic has no groups."""
        with self.engine.using(name) as topic:
            self.engine.tick()
            segments = freed_bytes = 0
            if topic.groups:
                segments, freed_bytes = topic.trim()
            elif self.engine.streams.on(topic):
                topic.duplicates.save()
                for partition in topic.partitions:
                    partition.save()
                    partition.log.roll()
                    trimmed = partition.log.trim(partition.log.end)  # what the groups have not read is pinned
                    segments, freed_bytes = segments + trimmed.segments, freed_bytes + trimmed.bytes
            journals = sum(delivery.compact() for group in topic.groups.values() for delivery in group.deliveries)
            return Compacted(segments=segments, bytes=freed_bytes, journal_bytes=journals + topic.compact_dead())

    # Messages

    def unfit_now(self, name: str, messages: Iterable[NewMessage]) -> int | None:
        """Return the index of the first message that cannot be stored; None if there is none, as far as is known."""
        with self.engine.using(name) as topic:
            publisher, most_bytes = self.publisher(topic), topic.settings.max_message_bytes
            for i, message in enumerate(messages):
                try:
                    draft = publisher.draft(message)
                except HoldfastError:
                    return i
                if len(draft.value) + len(draft.key or b"") > most_bytes:
                    return i
        return None

    def publisher(self, topic: Topic) -> Publisher:
        """Return the publisher of the topic, which the caller keeps in use."""
        publisher = self._publishers.get(topic.name)
        if publisher is None or publisher.topic is not topic:
            # Topics that were closed must not stay in memory because of an old publisher.
            self._publishers = {other: each for other, each in list(self._publishers.items()) if not each.topic.closed}
            publisher = self._publishers[topic.name] = Publisher(topic, self.bodies, self.engine.world.clock)
        return publisher

    def publish_now(
        self, topic: str, body: Any, partition: int | None, durability: Durability | None, given: MessageOptions | None
    ) -> Stored | None:
        """Store plain bytes, or a body with options, if that needs no waiting; otherwise return None."""
        used = self.engine.enter_open(topic)
        if used is None:
            return None
        try:
            return self.publisher(used).put_now(body, durability, given, partition)
        finally:
            used.users -= 1

    def read_now(
        self,
        name: str,
        number: int,
        offset: int | None,
        limit: int,
        most_bytes: int | None = None,
        *,
        on_damage: OnDamage = "raise",
    ) -> list[Contents[Any]]:
        """Return messages of a partition from an offset on, up to the first damage."""
        with reading(self.engine.using, name) as found_topic:
            log = found_topic.partition(number).log
            home = PartitionHome(name, number)
            found: list[Contents[Any]] = []
            size = 0
            start = log.start if offset is None else offset
            try:
                for record in log.records(start, on_damage=on_damage, whole=False):
                    found.append(Contents(home, self.bodies, record))
                    size += len(record.value) + extra_bytes(record)
                    if len(found) == limit or (most_bytes is not None and size > most_bytes):
                        break
            except DamagedRange:
                if not found:
                    raise  # return the messages before it first; the next read raises
            return found

    # Groups

    def open_group(
        self,
        kind: Callable[[BrokerEngine, QueueGroup, Bodies], _Group],
        topic: str,
        name: str,
        start: str,
        bodies: Bodies,
        changes: Mapping[str, Any],
        check: Callable[[BrokerEngine, Topic, str], None] | None = None,
    ) -> _Group:
        """Return the group in queue mode as an object of this kind, if `check` allows it."""
        with self.engine.using(topic) as opened:
            self.engine.streams.check_free(name, opened)
            if check is not None:
                check(self.engine, opened, name)
            # Inside, because from now on the port holds the topic, which could be closed at any moment otherwise.
            return kind(self.engine, opened.group(name, start=start, changes=changes), bodies)

    def open_queue(self, kind: Callable[[BrokerEngine, QueueGroup, Bodies], _Group], request: QueueRequest) -> _Group:
        """Open the default group of a topic. Both are created if needed."""
        settings, changes, body_type = request.settings, request.changes, request.body_type
        wanted = changes_to(settings, {}, changes)
        name = self.engine.queue_name(request.name, create=request.create)
        try:
            self.engine.create_topic(name, None, wanted)
        except TopicExists:
            wanted = changes_to(settings, self.describe_topic_now(name).settings, changes)
            if wanted:
                count = change_topic(self.engine, name, wanted)
                while grow_topic(self.engine, name, count):
                    pass
        queue = self.open_group(kind, name, DEFAULT_GROUP, "earliest", Bodies(body_type), {})
        with self.engine.using(name) as topic:
            keep_bodies(self.engine, topic, body_type)
        return queue

    def existing_group_now(
        self, kind: Callable[[BrokerEngine, QueueGroup, Bodies], _Group], topic: str, name: str, bodies: Bodies
    ) -> _Group:
        """Open an existing group in queue mode, brought up to date. Raises UnknownGroup if it does not exist."""
        with self.engine.using(topic) as opened:
            self.engine.streams.check_free(name, opened)
            if name not in opened.groups:
                raise UnknownGroup(f"{topic} has no group {name}: open it with `group` to create it")
            found = kind(self.engine, opened.group(name), bodies)
        self.engine.tick()  # the upkeep may not have had its first turn yet
        return found

    def groups_now(self, name: str | None) -> list[GroupInfo]:
        """Return the groups of one topic, or of all topics, in queue mode and in stream mode."""
        found: list[GroupInfo] = []
        for each in self.engine.topics() if name is None else [name]:
            try:
                with self.engine.using(each) as topic:
                    found += groups_on(self.engine, topic)
            except UnknownTopic:
                if name is not None:  # otherwise it was deleted in the meantime
                    raise
        return sorted(found, key=lambda info: (info.name, info.topic))

    def delete_group_now(self, name: str, topic: str | None) -> None:
        """Delete a group."""
        if topic is not None:
            with self.engine.using(topic) as opened:
                if opened.has_group(name):
                    opened.delete_group(name)
                    return
                if any(stream.name == name for stream in self.engine.streams.on(opened)):
                    raise InvalidRequest(
                        f"the group {name} reads {topic} in stream mode, and maybe other topics: it is deleted as a "
                        "whole. Leave the topic out to do that"
                    )
        elif name in self.engine.streams.names():
            self.engine.streams.delete(name)
            return
        elif self.engine.queries.remove(name):
            return
        where = "" if topic is None else f" on {topic}"
        raise UnknownGroup(
            f"there is no group {name}{where or ' in stream mode'}; one in queue mode is deleted by its name and its "
            "topic's"
        )

    def reset_offsets_now(self, group: str, name: str, to: To, number: int | None, *, dry_run: bool) -> list[Reset]:
        """Move the position of a group."""
        with self.engine.using(name) as topic:
            known = topic.groups.get(group)
            if known is None:
                self._check_not_query(group, topic)
                return self.engine.streams.group(group).reset(name, to, partition=number, dry_run=dry_run)
            found = []
            for each in topic.usable_numbers() if number is None else [topic.usable(number)]:
                delivery = known.delivery(each)
                before, after = delivery.group.floor, to.find(delivery.partition.log)
                if not dry_run:
                    delivery.seek(after)
                    delivery.journal.log.sync()  # as in stream mode: it was asked for by hand, and is seldom
                found.append(Reset(topic=name, partition=delivery.number, before=before, after=after))
            return found

    def effects_now(self, group: str, resets: Sequence[Reset]) -> list[ResetEffect]:
        """Return what resets would do to the messages of a group; a group in queue mode knows each of them."""
        found = []
        for reset in resets:
            with self.engine.using(reset.topic) as topic:
                known = topic.groups.get(group)
                counts = None if known is None else _seek_counts(known.delivery(reset.partition), reset.after)
            found.append(effect_of(reset, counts))
        return found

    def _check_not_query(self, group: str, topic: Topic) -> None:
        streams = self.engine.streams.names()
        if group not in streams and any(query.group == group for query, _ in self.engine.queries.on(topic)):
            raise InvalidRequest(
                f"{group} is a query that reads {topic.name} from another process and stores its own positions: "
                "use that query's options to start it elsewhere"
            )


def _seek_counts(delivery: Delivery, target: int) -> tuple[int, int]:
    """Return how many handled messages a seek delivers again, and how many unhandled ones it skips.

    Messages in flight stay where they are either way.
    """
    group, end = delivery.group, delivery.partition.log.end
    again = max(min(group.floor, end) - target, 0) + group.done.range_cardinality(max(target, group.floor), end)
    if target <= group.floor:
        return again, 0
    held = sum(offset < target for held in (group.leases, group.burials) for offset in held)
    done = group.done.range_cardinality(group.floor, target)
    return again, target - group.floor - done - held


def keep_bodies(engine: BrokerEngine, topic: Topic, body_type: Any) -> None:
    """Store the kind of bodies of a queue, for workers. If the disk is full, it works without."""
    kind = kind_of(body_type)
    if kind is not None and topic.settings.bodies is None:
        with suppress(OSError, DiskFull):
            engine.alter_topic(topic.name, {"bodies": kind})


# Slow operations on a topic, on separate threads: opening it, creating a group, adding partitions, deleting it.
#
# The event loop has few threads, and everything else needs them. So tasks queue up per topic before they get a thread:
# no matter how many want a topic that is being opened, one thread works on it, and none waits for it.


_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")

_MOST_THREADS: Final = 32  # topics on which tasks may be at work at the same time


class _Turn:
    __slots__ = ("lock", "users")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.users = 0


class TopicThread:
    """Runs the slow operations of one topic."""

    __slots__ = ("_threads", "_topic")

    def __init__(self, threads: TopicThreads, topic: str) -> None:
        self._threads = threads
        self._topic = topic

    async def aside(self, work: Callable[_Given, _Result], *given: _Given.args, **options: _Given.kwargs) -> _Result:
        """Run the work when it is the topic's turn, and return its result."""
        return await self._threads.run(self._topic, partial(work, *given, **options))


class TopicThreads:
    """Runs calls on threads, for each topic one at a time. For the tasks of one event loop at a time."""

    def __init__(self) -> None:
        self._turns: dict[str, _Turn] = {}
        self._pool: DaemonThreads | None = None

    def at(self, topic: str) -> TopicThread:
        """Return the runner of one topic."""
        return TopicThread(self, topic)

    async def run(self, topic: str, call: Callable[..., _Result], *arguments: Any) -> _Result:
        """Call it when it is the topic's turn. If the task is cancelled, it ends at its next checkpoint."""
        wanted = Wanted()
        turn = self._turns.get(topic)
        if turn is None:
            turn = self._turns[topic] = _Turn()
        turn.users += 1
        try:
            await turn.lock.acquire()
            try:
                begun = self._submit(copy_context().run, wanted.run, partial(call, *arguments))
            except BaseException:
                turn.lock.release()
                raise
        except BaseException:
            self._leave(topic, turn)
            raise
        loop = asyncio.get_running_loop()
        begun.add_done_callback(lambda _: _tell(loop, self._done, topic, turn))
        try:
            return await asyncio.wrap_future(begun)
        finally:
            wanted.abandoned = True  # no effect if it has finished

    def close(self) -> None:
        """Stop the threads, each when its work is done."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False)

    def _submit(self, call: Callable[..., _Result], *arguments: Any) -> futures.Future[_Result]:
        if self._pool is None:
            from holdfast.env.threads import DaemonThreads  # loads what few programs need

            self._pool = DaemonThreads(_MOST_THREADS, "holdfast-topics")
        return self._pool.submit(call, *arguments)

    def _done(self, topic: str, turn: _Turn) -> None:
        turn.lock.release()
        self._leave(topic, turn)

    def _leave(self, topic: str, turn: _Turn) -> None:
        turn.users -= 1
        if not turn.users and self._turns.get(topic) is turn:
            del self._turns[topic]


def _tell(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *arguments: Any) -> None:
    with suppress(RuntimeError):  # the loop is closed: nobody waits there any more
        loop.call_soon_threadsafe(call, *arguments)
