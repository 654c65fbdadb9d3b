"""The topics of a server, for tasks. Each method makes one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.api.aio.ports import AsyncConsumerPort
from holdfast.api.aio.producer import AsyncProducer
from holdfast.api.arguments import Question
from holdfast.api.contents import Contents
from holdfast.api.drafts import Bodies, NewMessage, PublishRequest, Stored, StreamRequest, kind_of
from holdfast.api.listing import SearchPage
from holdfast.api.locks import Document, Lock, LockInfo, LockRequest
from holdfast.api.schedules import Firing, Schedule, ScheduleRequest
from holdfast.api.schemas import SchemaRequest
from holdfast.api.topics import (
    GroupInfo,
    MemberRequest,
    QueueRequest,
    TopicInfo,
    changes_to,
    check_partitions,
    topic_settings,
)
from holdfast.api.transactions import TransactionInfo, TransactionRequest
from holdfast.broker.folder.layout import DEFAULT_GROUP, UNNAMED, check_topic_name, parse_lease
from holdfast.broker.metrics import Compacted
from holdfast.broker.samples import Samples
from holdfast.broker.streams import Reset, ResetEffect, To, effect_of
from holdfast.broker.tracing import TraceStep
from holdfast.broker.workers import Order, WorkerInfo
from holdfast.client.calling import Ask, path_of
from holdfast.errors import (
    BadSettings,
    Conflict,
    DamagedRange,
    DiskFull,
    Forbidden,
    InvalidRequest,
    LeaseLost,
    LockHeld,
    NotAQueue,
    NotFound,
    Unavailable,
    UnknownGroup,
    UnknownTopic,
)
from holdfast.model import BodyKind, Durability, Retained
from holdfast.producing.core import producer_settings
from holdfast.protocol import topics as wire
from holdfast.protocol.cluster import MoveTopic, TopicMoved
from holdfast.protocol.media import JSON
from holdfast.protocol.messages import CreateQueue, NextDues, ScheduleDeleted, ScheduleList, SearchAnswer
from holdfast.protocol.schemas import (
    Compatible,
    LevelAnswer,
    LevelSet,
    VersionAnswer,
    registry_path,
    schema_body,
    version_of,
)
from holdfast.protocol.topics import Steps, WorkersOrdered, WorkersTold
from holdfast.protocol.transactions import (
    BeginTransaction,
    TransactionBegun,
    TransactionCommitted,
    TransactionDeleted,
    TransactionList,
)
from holdfast.remote.aio.consumer import AsyncRemoteConsumerPort
from holdfast.remote.aio.group import AsyncRemoteGroupPort
from holdfast.remote.aio.spread import AsyncSpreadConsumerPort
from holdfast.remote.broker import (
    MOST_READ,
    RemoteBroker,
    RemoteKeptLock,
    commit_of,
    plain,
    put_schedule_of,
    reset_of,
    resets_from,
)
from holdfast.remote.client import AsyncCalls, Client, RemoteProducerPort
from holdfast.remote.records import contents_from, publish_stream, search_page_from
from holdfast.settings import ProducerSettings, TopicSettings

if TYPE_CHECKING:
    from holdfast.broker.tracing.log import TraceStats
    from holdfast.schemas.registry import Level, SchemaVersion, VersionNumber
    from holdfast.storage.compaction import KeysCompacted
    from holdfast.storage.view import OnDamage


class AsyncRemoteBrokerPort(RemoteBroker):
    """A broker's port on a server."""

    def __init__(self, client: Client, body_type: Any = None, durability: Durability | None = None) -> None:
        super().__init__(client, body_type, durability)
        self._calls = AsyncCalls(client)

    async def _ask(
        self, method: str, path: str, answers: Any, body: Any = None, *, again: bool = True, wait_s: float = 0.0
    ) -> Any:
        return await self._calls.ask(method, path, answers, body, again=again, wait_s=wait_s)

    async def queue(self, request: QueueRequest) -> AsyncRemoteGroupPort:
        """Open the default group of a topic. Both are created if needed."""
        settings, changes, body_type = request.settings, request.changes, request.body_type
        wanted = changes_to(settings, {}, changes)  # bad settings are refused before anything is created
        name = check_topic_name(await self._only_topic() if request.name is None else request.name)
        info: TopicInfo | None = None
        try:
            info = await self.describe_topic(name)
            wanted = changes_to(settings, info.settings, changes)
        except UnknownTopic:
            if not request.create:
                raise NotAQueue(
                    f"the server at {self.place} has no queue {name}; open it with create=True to create one"
                ) from None
        except Forbidden:
            if wanted:
                raise
            return self._queue_port(name, body_type, TopicSettings())
        if info is None or wanted or DEFAULT_GROUP not in info.groups:
            try:
                info = await self._make_queue(name, info, wanted)
            except Forbidden:
                if info is None or wanted:
                    raise  # otherwise its default group is made as soon as somebody receives
        info = await self._keep_bodies(name, info, kind_of(body_type))
        return self._queue_port(name, body_type, topic_settings(info.settings))

    def _queue_port(self, name: str, body_type: Any, known: TopicSettings) -> AsyncRemoteGroupPort:
        bodies, durability = Bodies(body_type), self.durability
        return AsyncRemoteGroupPort(self.client, name, DEFAULT_GROUP, bodies, known, durability=durability)

    async def _keep_bodies(self, name: str, info: TopicInfo, kind: BodyKind | None) -> TopicInfo:
        """Store the kind of bodies, for workers. If that is not possible, the queue works without."""
        if kind is None or info.settings.get("bodies") is not None:
            return info
        try:
            return await self._make_queue(name, info, {"bodies": kind})
        except (BadSettings, Forbidden, DiskFull):  # an older server; one who may not change the queue; no room for it
            return info

    async def _make_queue(self, name: str, info: TopicInfo | None, changes: Mapping[str, Any]) -> TopicInfo:
        given = plain(changes)
        partitions = given.pop("partitions", None)
        check_partitions(partitions)
        body = CreateQueue(partitions=partitions, settings=given)
        try:
            made: TopicInfo = await self._ask("PUT", path_of("queues", name), TopicInfo, body)
        except Forbidden:
            if info is None or changes:
                raise
            return info
        self.client.publishing.forget(name)
        return made

    async def _only_topic(self) -> str:
        """Return the only topic of the server, or the default name of a queue."""
        found = await self.topics()
        if len(found) > 1:
            raise InvalidRequest(
                f"{self.place} has {len(found)} topics; choose one with topic={found[0]!r}, or use a broker"
            )
        return found[0] if found else self.client.default_topic

    async def group(
        self, topic: str, name: str, start: str, bodies: Bodies, changes: Mapping[str, Any]
    ) -> AsyncRemoteGroupPort:
        """Open a group in queue mode, which is created if needed."""
        settings: Mapping[str, Any] = {}
        body = wire.CreateGroup(start=start, settings=plain(changes))  # type: ignore[arg-type]
        try:
            path = path_of("topics", topic, "groups", name)
            made: wire.GroupSettings = await self._ask("PUT", path, wire.GroupSettings, body)
            settings = made.settings
        except Forbidden:
            if changes or start != "earliest":
                raise  # otherwise it is made as soon as somebody receives who may make groups, or is there already
        return AsyncRemoteGroupPort(self.client, topic, name, bodies, topic_settings(settings))

    async def existing_group(self, topic: str, name: str, bodies: Bodies) -> AsyncRemoteGroupPort:
        """Open an existing group in queue mode. Raises UnknownGroup if it does not exist."""
        settings: Mapping[str, Any] = {}
        try:
            info = await self.describe_topic(topic)
        except Forbidden:
            pass  # a caller that may only consume cannot list groups
        else:
            settings = info.settings
            if name in info.stream_groups:
                raise InvalidRequest(
                    f"the group {name} reads {topic} in stream mode; use `holdfast consume`, or choose another name"
                )
            if name not in info.groups:
                raise UnknownGroup(f"{topic} has no group {name}: open it with `group` to create it")
        return AsyncRemoteGroupPort(self.client, topic, name, bodies, topic_settings(settings))

    async def member(self, request: MemberRequest) -> AsyncConsumerPort:
        """Return a member of a group in stream mode that has not joined yet."""
        if len(request.topics) > 1:
            return AsyncSpreadConsumerPort(self.client, request)
        return await AsyncRemoteConsumerPort.open(self.client, request)

    def producer(self, name: str | None, body_type: Any, changes: Mapping[str, Any], *, resume: bool) -> AsyncProducer:
        """Return a producer, which is closed with the port."""
        settings, port = producer_settings(ProducerSettings(), changes), RemoteProducerPort(self.client)
        producer = AsyncProducer(port, settings, name=name, resume=resume, body_type=body_type)
        self._sending.add(producer)
        return producer

    def locks(self) -> AsyncRemoteLocksPort:
        """The locks and documents."""
        return AsyncRemoteLocksPort(self.client)

    def schedules(self) -> AsyncRemoteSchedulesPort:
        """The schedules."""
        return AsyncRemoteSchedulesPort(self.client, self.bodies)

    def schemas(self) -> AsyncRemoteSchemasPort:
        """The registry of schemas."""
        return AsyncRemoteSchemasPort(self.client)

    def transactions(self) -> AsyncRemoteTransactionsPort:
        """The transactions."""
        return AsyncRemoteTransactionsPort(self.client)

    async def create_topic(
        self, name: str, partitions: int | None, changes: Mapping[str, Any], *, exist_ok: bool, shard: int | None = None
    ) -> TopicInfo:
        """Create a topic; in a cluster, in a shard."""
        check_partitions(partitions)
        body = wire.CreateTopic(
            name=name, partitions=partitions, settings=plain(changes), exist_ok=exist_ok, shard=shard
        )
        info: TopicInfo = await self._ask("POST", path_of("topics"), TopicInfo, body, again=exist_ok)
        return info

    async def move_topic(self, name: str, shard: int, progress: Callable[[int, int], None] | None) -> TopicInfo:
        """Move a topic to another shard of a cluster; each call continues what the one before it began."""
        moved = False
        while not moved:
            body = MoveTopic(to=shard, wait=_MOVE_WAIT_S)
            path = path_of("topics", name, "move")
            told: TopicMoved = await self._ask("POST", path, TopicMoved, body, wait_s=_MOVE_WAIT_S)
            if progress is not None:
                progress(told.copied, told.total)
            moved = told.moved
        return await self.describe_topic(name)

    async def alter_topic(self, name: str, changes: Mapping[str, Any]) -> TopicInfo:
        """Change settings of a topic."""
        body = wire.AlterTopic(settings=plain(changes))
        info: TopicInfo = await self._ask("PATCH", path_of("topics", name), TopicInfo, body)
        self.client.publishing.forget(name)
        return info

    async def add_partitions(self, name: str, count: int) -> TopicInfo:
        """Add partitions to a topic."""
        path = path_of("topics", name, "partitions")
        info: TopicInfo = await self._ask("POST", path, TopicInfo, wire.AddPartitions(count=count), again=False)
        self.client.publishing.forget(name)
        return info

    async def describe_topic(self, name: str) -> TopicInfo:
        """Return the partitions, groups and settings of a topic."""
        info: TopicInfo = await self._ask("GET", path_of("topics", name), TopicInfo)
        return info

    async def topics(self) -> list[str]:
        """Return the names of all topics."""
        found: list[str] = []
        more = True
        while more:
            after = found[-1] if found else None
            some: wire.Topics = await self._ask("GET", path_of("topics", after=after), wire.Topics)
            found += [info.name for info in some.topics]
            more = some.more and bool(some.topics)
        return found

    async def delete_topic(self, name: str) -> None:
        """Delete a topic."""
        try:
            await self._ask("DELETE", path_of("topics", name), None)
        except UnknownTopic as error:
            if not getattr(error, "repeated", False):  # otherwise an earlier attempt has done it
                raise
        self.client.publishing.forget(name)

    async def compact_topic(self, name: str) -> KeysCompacted:
        """Compact the topic by key: only the last message of each key is kept."""
        from holdfast.storage.compaction import KeysCompacted

        done: KeysCompacted = await self._ask("POST", path_of("topics", name, "compact"), KeysCompacted)
        return done

    async def apply_retention(self, name: str) -> Retained:
        """Delete what the topic's retention settings no longer keep."""
        gone: Retained = await self._ask("POST", path_of("topics", name, "apply-retention"), Retained)
        return gone

    async def compact_groups(self, name: str) -> Compacted:
        """Delete what every group of the topic has handled."""
        segments = freed_bytes = journal_bytes = 0
        for group in (await self.describe_topic(name)).groups:
            freed = await (await self.existing_group(name, group, self.bodies)).compact()
            segments, freed_bytes = segments + freed.segments, freed_bytes + freed.bytes
            journal_bytes += freed.journal_bytes
        return Compacted(segments=segments, bytes=freed_bytes, journal_bytes=journal_bytes)

    async def unfit(self, topic: str, messages: Sequence[NewMessage]) -> int | None:
        """Return 0 for a single message, otherwise None: only the server knows which one it refuses."""
        return 0 if len(messages) == 1 else None

    async def publish_plain(
        self, topic: str, body: bytes, partition: int | None, durability: Durability | None
    ) -> Stored | None:
        """Return None: there is no fast path to a server."""
        return None

    async def publish(self, topic: str, request: PublishRequest) -> list[Stored]:
        """Store bodies or NewMessages. Of those that go to one partition, all are stored or none."""
        durability = request.durability or self.durability
        request = msgspec.structs.replace(request, durability=durability)
        return await self._calls.run(self.client.publishing.publish(check_topic_name(topic), request, self.bodies))

    async def upload(self, topic: str, request: StreamRequest) -> Stored:
        """Store one message whose body is read from the stream."""
        return await self._calls.run(publish_stream(self.client.publishing, topic, request, self.durability))

    async def read(
        self, topic: str, partition: int, offset: int | None, limit: int, on_damage: OnDamage
    ) -> list[Contents[Any]]:
        """Return messages of a partition from an offset on."""
        if type(partition) is not int or partition < 0:
            raise UnknownTopic(f"topic {topic} has no partition {partition!r}: give a number from 0 on")
        found: list[Contents[Any]] = []
        while len(found) < limit:
            query: dict[str, Any] = {"offset": offset, "limit": min(limit - len(found), MOST_READ)}
            if on_damage != "raise":  # an older server knows nothing of it
                query["on_damage"] = on_damage
            path = path_of("topics", topic, "partitions", partition, "messages", **query)
            try:
                some: wire.ReadMessages = await self._ask("GET", path, wire.ReadMessages)
            except DamagedRange:
                if found:
                    break  # return the messages before it first; the next read raises
                raise
            found += [contents_from(self.client, self.bodies, each) for each in some.messages]
            if not some.messages or some.next_offset >= some.end:
                break
            offset = some.next_offset
        return found

    async def groups(self, topic: str | None) -> list[GroupInfo]:
        """Return the groups of one topic, or of all topics, in queue mode and in stream mode."""
        path = path_of("groups", topic=topic, limit=MOST_READ)
        found: wire.Groups = await self._ask("GET", path, wire.Groups)
        return found.groups

    async def workers(self) -> list[WorkerInfo]:
        """Return the workers that report themselves, or did within the last hour."""
        found: WorkersTold = await self._ask("GET", path_of("workers"), WorkersTold)
        return found.workers

    async def order_worker(self, name: str, order: Order) -> list[str]:
        """Tell the workers of this name, or the one with this id, what to do; return their ids."""
        told: WorkersOrdered = await self._ask("POST", path_of("workers", name, order), WorkersOrdered)
        return told.ids

    async def delete_group(self, name: str, topic: str | None) -> None:
        """Delete a group: in queue mode on one topic, or in stream mode as a whole."""
        await self._ask("DELETE", path_of("groups", name, topic=topic), None, again=False)

    async def reset_offsets(
        self, group: str, topic: str, to: To, partition: int | None, *, dry_run: bool
    ) -> list[Reset]:
        """Move the position of a group; with `dry_run`, only return what would change."""
        body = reset_of(topic, to, partition, dry_run=dry_run)
        return resets_from(await self._ask("POST", path_of("groups", group, "reset"), wire.ResetDone, body))

    async def effects(self, group: str, resets: Sequence[Reset]) -> list[ResetEffect]:
        """Return what resets would do, counted by offsets: only the server knows each message."""
        return [effect_of(reset) for reset in resets]

    async def trace(self, message_id: str) -> list[TraceStep]:
        """Return the traced steps of a message."""
        found: list[TraceStep] = []
        after: str | None = None
        while after != "":
            some: Steps = await self._ask("GET", path_of("traces", message_id, after=after), Steps)
            found, after = found + some.steps, some.next
        return found

    async def search(self, text: str, limit: int, after: str) -> SearchPage:
        """Search the messages of all queues for what somebody typed."""
        answer: SearchAnswer = await self._ask("GET", path_of("search", q=text, limit=limit, after=after), SearchAnswer)
        return search_page_from(self.client, self.bodies, answer)

    async def search_traces(self, question: Question, limit: int, *, last: bool) -> list[TraceStep]:
        """Return the matching steps: the first ones, or the last."""
        asked = self._searched(question)
        found: list[TraceStep] = []
        after: str | None = None
        while len(found) < limit and after != "":
            most = min(limit - len(found), MOST_READ)
            path = path_of("traces", **asked, limit=most, last=last, after=after)
            some: Steps = await self._ask("GET", path, Steps)
            found, after = (some.steps + found if last else found + some.steps), some.next
        return found

    async def trace_stats(self, question: Question) -> TraceStats:
        """Summarize the matching steps."""
        from holdfast.broker.tracing.log import TraceStats

        stats: TraceStats = await self._ask("GET", path_of("traces", "stats", **self._searched(question)), TraceStats)
        return stats

    async def samples(self, topic: str | None, group: str | None, span_ms: int) -> Samples:
        """Return the samples of a group, of a topic, or of all topics together, up to now."""
        parts = ("samples",) if topic is None else ("queues", topic, "samples")
        found: Samples = await self._ask("GET", path_of(*parts, group=group, last=span_ms / 1000), Samples)
        return found

    async def sync(self) -> None:
        """Wait until everything done so far is on disk."""
        await self._ask("POST", path_of("admin", "sync"), None)

    async def close(self) -> None:
        """Flush producers and close the client."""
        for producer in list(self._sending):
            await producer.close()
        await self.client.close_async()


_MOST_WAIT_S: Final = 20.0
_MOVE_WAIT_S: Final = 0.5  # how often the progress of a move is asked for


class AsyncRemoteLocksPort:
    """The locks and documents of a server."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._calls = AsyncCalls(client)

    @property
    def holder(self) -> str:
        return self._client.holder

    async def acquire(self, wanted: LockRequest) -> Lock:
        """Acquire a lock. Each call waits for some seconds and then lines up again, until the deadline."""
        clock = self._client.world.clock
        until_ns = None if wanted.wait_ms is None else clock.monotonic_ns() + wanted.wait_ms * 1_000_000
        path = path_of("locks", wanted.name, "acquire")
        while True:
            left_s = _MOST_WAIT_S if until_ns is None else max((until_ns - clock.monotonic_ns()) / 1e9, 0)
            wait_s = min(left_s, _MOST_WAIT_S) if wanted.waits else 0
            body = wire.AcquireLock(
                owner=wanted.owner, lease=wanted.lease_ms / 1000, wait=wait_s, if_not_exists=wanted.if_not_exists
            )
            try:
                lock: Lock = await self._calls.ask("POST", path, Lock, body, wait_s=wait_s)
            except LockHeld:
                if not wanted.waits or (until_ns is not None and clock.monotonic_ns() >= until_ns):
                    raise
                continue
            return lock

    async def keepalive(self, lease_id: str, lease_ms: int | None) -> Lock:
        body = wire.KeepLock(lease_id=lease_id, lease=None if lease_ms is None else lease_ms / 1000)
        kept: Lock = await self._calls.ask("POST", _path(lease_id, "keepalive"), Lock, body)
        return kept

    async def release(self, lease_id: str) -> None:
        try:
            await self._calls.ask("POST", _path(lease_id, "release"), None, wire.ReleaseLock(lease_id=lease_id))
        except LeaseLost as error:
            if not getattr(error, "repeated", False):  # otherwise an earlier attempt has done it
                raise

    async def force_release(self, name: str) -> bool:
        done: wire.LockReleased = await self._calls.ask("DELETE", path_of("locks", name), wire.LockReleased)
        return done.released

    async def describe(self, name: str) -> LockInfo:
        info: LockInfo = await self._calls.ask("GET", path_of("locks", name), LockInfo)
        return info

    async def held_locks(self) -> list[LockInfo]:
        found: wire.HeldLocks = await self._calls.ask("GET", path_of("locks"), wire.HeldLocks)
        return found.locks

    def keep(self, lock: Lock) -> RemoteKeptLock:
        return RemoteKeptLock(self._client, lock)

    async def document(self, name: str) -> Document | None:
        try:
            found: Document = await self._calls.ask("GET", path_of("state", name), Document)
        except NotFound:
            return None
        return found

    async def update_document(self, name: str, content: bytes, version: int | None, lease_id: str | None) -> Document:
        path = path_of("state", name, version=version, lease_id=lease_id)
        # Sent as JSON: msgpack has more types, and would store what a folder refuses.
        ask = Ask(method="PUT", path=path, body=b'{"value":%b}' % content, media=JSON, answers=Document)
        try:
            document: Document = await self._calls.call(ask)
        except (Conflict, LeaseLost) as error:
            if not getattr(error, "repeated", False):
                raise
            # The attempt before, whose answer was lost, may have done it; and others may have written since.
            found = await self.document(name)
            if found is None or found.version <= (version or 0) or found.value != msgspec.json.decode(content):
                raise Unavailable(
                    f"whether document {name} was written is not known: the connection broke before the server said "
                    "so, and now it has another value. Get it again, then decide"
                ) from error
            document = found
        return document

    async def remove_document(self, name: str, version: int | None, lease_id: str | None) -> bool:
        path = path_of("state", name, version=version, lease_id=lease_id)
        done: wire.DocumentRemoved = await self._calls.ask("DELETE", path, wire.DocumentRemoved)
        return done.removed

    async def document_names(self) -> list[str]:
        found: wire.DocumentNames = await self._calls.ask("GET", path_of("state"), wire.DocumentNames)
        return found.names


def _path(lease_id: str, verb: str) -> str:
    return path_of("locks", parse_lease(lease_id).name, verb)


class AsyncRemoteSchedulesPort:
    """The schedules of a server."""

    def __init__(self, client: Client, bodies: Bodies) -> None:
        self._calls = AsyncCalls(client)
        self._bodies = bodies

    async def put(self, request: ScheduleRequest) -> Schedule:
        body = put_schedule_of(request, self._bodies)
        schedule: Schedule = await self._calls.ask("PUT", path_of("schedules", request.name), Schedule, body)
        return schedule

    async def get(self, name: str) -> Schedule | None:
        try:
            found: Schedule = await self._calls.ask("GET", path_of("schedules", name), Schedule)
        except NotFound:
            return None
        return found

    async def all(self) -> list[Schedule]:
        found: ScheduleList = await self._calls.ask("GET", path_of("schedules"), ScheduleList)
        return found.schedules

    async def delete(self, name: str) -> bool:
        done: ScheduleDeleted = await self._calls.ask("DELETE", path_of("schedules", name), ScheduleDeleted)
        return done.deleted

    async def pause(self, name: str, *, paused: bool) -> Schedule:
        path = path_of("schedules", name, "pause" if paused else "resume")
        schedule: Schedule = await self._calls.ask("POST", path, Schedule)
        return schedule

    async def run_now(self, name: str) -> Firing:
        firing: Firing = await self._calls.ask("POST", path_of("schedules", name, "run"), Firing, again=False)
        return firing

    async def next_dues(self, name: str, count: int) -> list[datetime]:
        found: NextDues = await self._calls.ask("GET", path_of("schedules", name, "next", count=count), NextDues)
        return found.times


class AsyncRemoteSchemasPort:
    """The registry of schemas of a server, by the API of Confluent's registry."""

    def __init__(self, client: Client) -> None:
        self._calls = AsyncCalls(client)

    async def register(self, request: SchemaRequest) -> SchemaVersion:
        path = registry_path("subjects", request.subject, "versions")
        return version_of(await self._calls.ask("POST", path, VersionAnswer, schema_body(request)))

    async def problems(self, request: SchemaRequest, version: VersionNumber | None) -> list[str]:
        last = () if version is None else (str(version),)
        path = registry_path("compatibility", "subjects", request.subject, "versions", *last, verbose="true")
        found: Compatible = await self._calls.ask("POST", path, Compatible, schema_body(request))
        return list(found.messages)

    async def find(self, request: SchemaRequest) -> SchemaVersion:
        path = registry_path("subjects", request.subject)
        return version_of(await self._calls.ask("POST", path, VersionAnswer, schema_body(request)))

    async def version(self, subject: str, version: VersionNumber, *, deleted: bool) -> SchemaVersion:
        path = registry_path("subjects", subject, "versions", str(version), deleted=deleted)
        return version_of(await self._calls.ask("GET", path, VersionAnswer))

    async def by_id(self, number: int) -> SchemaVersion:
        return version_of(await self._calls.ask("GET", registry_path("schemas", "ids", str(number)), VersionAnswer))

    async def subjects(self, *, deleted: bool) -> list[str]:
        found: list[str] = await self._calls.ask("GET", registry_path("subjects", deleted=deleted), list[str])
        return found

    async def versions(self, subject: str, *, deleted: bool) -> list[int]:
        path = registry_path("subjects", subject, "versions", deleted=deleted)
        found: list[int] = await self._calls.ask("GET", path, list[int])
        return found

    async def delete(self, subject: str, version: VersionNumber | None, *, permanent: bool) -> list[int]:
        last = () if version is None else ("versions", str(version))
        path = registry_path("subjects", subject, *last, permanent=permanent)
        found: list[int] | int = await self._calls.ask("DELETE", path, list[int] | int, again=False)
        return [found] if isinstance(found, int) else found

    async def level(self, subject: str | None) -> Level:
        last, query = ((), {}) if subject is None else ((subject,), {"defaultToGlobal": "true"})
        found: LevelAnswer = await self._calls.ask("GET", registry_path("config", *last, **query), LevelAnswer)
        return found.compatibility_level

    async def set_level(self, level: Level | None, subject: str | None) -> None:
        path = registry_path("config", *(() if subject is None else (subject,)))
        if level is None:
            await self._calls.ask("DELETE", path, LevelAnswer | str)
        else:
            await self._calls.ask("PUT", path, LevelSet, LevelSet(compatibility=level))


class AsyncRemoteTransactionsPort:
    """The transactions of a server."""

    def __init__(self, client: Client) -> None:
        self._calls = AsyncCalls(client)
        self._client = client
        self.mono_ns = client.world.clock.monotonic_ns

    @property
    def place(self) -> str:
        return self._client.caller.address.text

    async def begin(self, name: str | None) -> tuple[str, int]:
        if name is None:
            return UNNAMED + self._client.world.ids.random_bytes(16).hex(), 1
        body = BeginTransaction(name=name)
        begun: TransactionBegun = await self._calls.ask("POST", path_of("transactions"), TransactionBegun, body)
        return begun.name, begun.epoch

    async def commit(self, request: TransactionRequest) -> list[Stored]:
        path, body = path_of("transactions", "commit"), commit_of(request)
        done: TransactionCommitted = await self._calls.ask("POST", path, TransactionCommitted, body)
        return [
            Stored(each.topic, each.offset, each.delayed_id, each.duplicate, each.durability, each.partition)
            for each in done.stored
        ]

    async def all(self) -> list[TransactionInfo]:
        found: TransactionList = await self._calls.ask("GET", path_of("transactions"), TransactionList)
        return found.transactions

    async def forget(self, name: str) -> bool:
        path = path_of("transactions", name)
        done: TransactionDeleted = await self._calls.ask("DELETE", path, TransactionDeleted)
        return done.deleted
