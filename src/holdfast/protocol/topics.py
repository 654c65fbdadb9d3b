"""Topics, partitions and groups on the wire: how they are described, created, changed and committed to.

Also locks and state documents, and the server itself: how it does, who waits, and the traces it keeps.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from holdfast.api.locks import LockInfo
from holdfast.api.topics import GroupInfo, TopicInfo
from holdfast.broker.inspect.status import TopicStanding
from holdfast.broker.streams.offsets import GroupFacts, PartitionLag
from holdfast.broker.tracing.log import TraceStep
from holdfast.broker.workers import Order, WorkerInfo
from holdfast.protocol.messages import (
    MOST_MESSAGES,
    Codec,
    Durability,
    Instant,
    Lease,
    Limit,
    Name,
    Number,
    Owner,
    PartitionNumber,
    Said,
    ServerValue,
    Settings,
    Wait,
    Wire,
)

# Groups on the wire: members of a stream that live elsewhere, what they poll and commit, where groups stand.


ManyPlaces = Meta(max_length=10_000)


class At(Wire, kw_only=True):
    """One partition."""

    topic: Name
    partition: PartitionNumber = 0


class Offset(At, kw_only=True):
    """A place in a partition: the offset of the next message to be handled."""

    offset: Number


class Assigned(ServerValue, kw_only=True):
    """A partition that is the member's, and the offset of the next message that it will get there."""

    topic: str
    partition: int
    position: int


class Join(Wire, kw_only=True):
    """A consumer that joins: which topics it reads, and settings such as {"session_ms": 10000, "start": "latest"}.

    Commits come from the consumer: what an answer carried that got lost must not count as handled.
    """

    topics: Annotated[list[Name], Meta(min_length=1, max_length=1_000)]
    instance_id: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    owner: Owner | None = None
    settings: dict[str, Any] = msgspec.field(default_factory=dict)


class Joined(ServerValue, kw_only=True):
    """The member, and what it reads. It is put out when neither heartbeat nor poll came for `session_ms`."""

    member: str
    assignment: list[Assigned]
    epoch: int
    session_ms: int
    heartbeat_ms: int


class Beat(ServerValue, kw_only=True):
    """What is the member's now; it gives back and takes over when it polls."""

    assignment: list[Assigned]
    epoch: int


class Poll(Wire, kw_only=True):
    """The member asks for messages. `poll` counts up from 1: the same number again answers with the same messages.

    What it has handled is committed first. From `paused` partitions nothing comes.
    """

    poll: Annotated[int, Meta(ge=1, le=2**53)]
    max_records: Limit | None = None
    wait: Wait = 0
    commit: Annotated[list[Offset], ManyPlaces] = msgspec.field(default_factory=list)
    paused: Annotated[list[At], ManyPlaces] = msgspec.field(default_factory=list)


class Polled(ServerValue, kw_only=True):
    """Messages, and what is the member's by now. `refused` was not committed: it is not the member's any more."""

    messages: list[Said]
    assignment: list[Assigned]
    epoch: int
    refused: list[At] = msgspec.field(default_factory=list)


class CommitOffsets(Wire, kw_only=True):
    """How far the member came, for all these partitions or for none."""

    offsets: Annotated[list[Offset], Meta(min_length=1, max_length=10_000)]
    durability: Durability | None = None


class CommitDone(ServerValue, kw_only=True):
    """How many partitions were committed."""

    committed: int


class MoveMember(Wire, kw_only=True):
    """Where the member reads on: at the start, at the end, at an offset or at a time; without a place, everywhere."""

    topic: Name | None = None
    partition: PartitionNumber | None = None
    to: Literal["start", "end"] | None = None
    offset: Number | None = None
    time: Instant | None = None


class OnTopic(Wire, kw_only=True):
    """Which topic is meant, or all."""

    topic: Name | None = None


class GroupsQuery(OnTopic, kw_only=True):
    """The groups of a topic, or of all; so many."""

    limit: Limit = 1_000


class Groups(ServerValue, kw_only=True):
    """Groups in both modes, and queries; one entry for each topic that they read."""

    groups: list[GroupInfo]


class GroupTold(ServerValue, kw_only=True):
    """A group: on which topics it is and how far behind, and in stream mode its members."""

    name: str
    topics: list[GroupInfo]
    stream: GroupFacts | None = None


class GroupOffsets(ServerValue, kw_only=True):
    """Where the group goes on in each partition, and how far that is behind."""

    offsets: list[PartitionLag]


class ResetOffsets(Wire, kw_only=True):
    """Where the group goes on: at one of the ends, an offset or a time; with `dry_run` only say what would be."""

    topic: Name
    to: Literal["earliest", "latest"] | None = None
    offset: Number | None = None
    time: Instant | None = None
    partition: PartitionNumber | None = None
    dry_run: bool = False


class ResetTold(ServerValue, kw_only=True):
    """What a reset does to one partition; `messages` come again, or are passed over if below 0."""

    topic: str
    partition: int
    before: int | None
    after: int
    messages: int


class ResetDone(ServerValue, kw_only=True):
    """What was reset, or would be."""

    partitions: list[ResetTold]
    dry_run: bool = False


Partitions = Annotated[int, Meta(ge=1, le=10_000)]
ProducerNumber = Annotated[str, Meta(pattern=r"^[0-9]{1,19}$")]  # has 63 bits, which not every JSON can hold
Epoch = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Sequence = Annotated[int, Meta(ge=0, le=2**32 - 1)]


class TopicsQuery(Wire, kw_only=True):
    """Which topics to tell of: so many, behind that name."""

    limit: Limit = 1_000
    after: Name | None = None


class Topics(ServerValue, kw_only=True):
    """The topics that the caller may see, by name; `more` says that there are more behind the last of them."""

    topics: list[TopicInfo]
    more: bool = False


class CreateTopic(Wire, kw_only=True):
    """A topic's name, how many partitions it has, and its settings, such as {"retention_hours": 168}."""

    name: Name
    partitions: Partitions | None = None
    settings: Settings = msgspec.field(default_factory=dict)
    exist_ok: bool = False


class AlterTopic(Wire, kw_only=True):
    """Settings to be changed; they count at once, and are kept."""

    settings: Annotated[Settings, Meta(min_length=1)]


class AddPartitions(Wire, kw_only=True):
    """How many partitions are to be added."""

    count: Partitions


class CreateGroup(Wire, kw_only=True):
    """A group in queue mode: where a new one begins, and what it does in another way than its topic."""

    start: Literal["earliest", "latest"] = "earliest"
    settings: Settings = msgspec.field(default_factory=dict)


class GroupSettings(ServerValue, kw_only=True):
    """A group in queue mode, and the settings that it follows."""

    name: str
    topic: str
    settings: Settings


class ReadQuery(Wire, kw_only=True):
    """From where to read (the start, where nothing is said), how much, and how long to wait for something there."""

    offset: Number | None = None
    limit: Limit = 100
    wait: Wait = 0
    bodies: bool = True
    on_damage: Literal["raise", "skip"] = "raise"


class FramesQuery(Wire, kw_only=True):
    """Which frames: those that hold messages from `offset` on and before `stop`, and about how many bytes of them."""

    offset: Number
    stop: Number | None = None
    bytes: Annotated[int, Meta(ge=1)] = 8 * 1024 * 1024


class ReadMessages(ServerValue, kw_only=True):
    """Messages of a partition, where to read on, and what the partition holds."""

    messages: list[Said]
    next_offset: int
    start: int
    end: int


class BeginProducer(Wire, kw_only=True):
    """A producer begins; one with a name fences those of that name before it. `resume`: it counts on from them."""

    name: Name | None = None
    resume: bool = False


class ProducerBegun(ServerValue, kw_only=True):
    """Who the producer is. `since` is the epoch from which its sequences count."""

    id: ProducerNumber
    epoch: int = 0
    since: int = 0


class AppendQuery(Wire, kw_only=True):
    """Who sends the messages, and which number the first of them has among all it sent to this partition."""

    producer: ProducerNumber
    sequence: Sequence
    epoch: Epoch = 0
    durability: Durability | None = None
    codec: Codec | None = None


class Written(ServerValue, kw_only=True):
    """Where the messages are, in their order; empty where they were stored too long ago to say."""

    offsets: list[int]
    durability: Durability
    duplicate: bool = False


class SequenceQuery(Wire, kw_only=True):
    """The producer, the epoch from which its sequences count, and the messages of which the offsets are wanted."""

    producer: ProducerNumber
    since: Epoch = 0
    first: Sequence = 0
    count: Annotated[int, Meta(ge=0, le=MOST_MESSAGES)] = 0


class NextSequence(ServerValue, kw_only=True):
    """The number that the producer's next message for this partition must have, and where those before it are.

    An offset is null where the message was stored too long ago to say, or is not stored.
    """

    sequence: int
    offsets: list[int | None] = msgspec.field(default_factory=list)


class TopicSettingsQuery(Wire, kw_only=True):
    """Whether to tell of all settings, or only of those that were given to this topic."""

    all: bool = True


class SettingTold(ServerValue, kw_only=True):
    """A setting in force, and where it comes from: "default", a file, a variable, or the folder itself.

    Of kind "limit" is a default that was lowered: the process may not open as many files as it would take.
    """

    name: str
    value: Any
    origin: str
    kind: Literal["default", "file", "environment", "folder", "limit"] = "default"


class SettingsTold(ServerValue, kw_only=True):
    """Settings in force."""

    settings: list[SettingTold]
    path: str | UnsetType = UNSET


# How topics stand, on the wire.


class StandingQuery(OnTopic, kw_only=True):
    """Which topic is meant; or so many of all, behind that name."""

    limit: Limit = 1_000
    after: Name | None = None


class Standings(ServerValue, kw_only=True):
    """Topics with their partitions and groups; `delayed` are the messages that no group has got yet, by topic.

    `next` is what `after` goes on from, if there are more topics.
    """

    topics: list[TopicStanding]
    delayed: dict[str, int] = msgspec.field(default_factory=dict)
    next: str = ""


# The server itself on the wire: how it does, who waits, and the traces it keeps.


class StoreStatus(ServerValue, kw_only=True):
    """The store that the folder lives in, as its owner sees it. `problem` says why it is not the owner any more."""

    name: str
    epoch: int
    objects: int
    silent_seconds: float
    unsent_bytes: int
    problem: str = ""


class Status(ServerValue, kw_only=True):
    """How the server does. `tokens_problem` says why a changed tokens file is not used; the old one holds then."""

    version: str
    folder: str
    started_at: Instant
    uptime_seconds: float
    disk_free_bytes: int
    connections: int
    max_connections: int = 0
    descriptors: int = 0
    max_descriptors: int = 0
    waiters: int
    max_waiters: int
    streams: int
    members: int
    topics: int
    leaving: bool = False
    tokens_problem: str = ""
    store: StoreStatus | None = None


class LimitQuery(Wire, kw_only=True):
    """How many to tell of."""

    limit: Limit = 100


class SamplesQuery(Wire, kw_only=True):
    """Of how many seconds up to now: up to seven days, in steps of 5 seconds, a minute or a quarter of an hour."""

    last: Annotated[float, Meta(gt=0, le=604_800)] = 900


class GroupSamplesQuery(SamplesQuery, kw_only=True):
    """Which group is meant, in queue mode or stream mode; without one the default group, or else the topic."""

    group: Name | None = None


class WaitersAt(ServerValue, kw_only=True):
    """Who stands in line for messages of a group."""

    topic: str
    group: str
    waiters: int
    streams: int


class WaitersTold(ServerValue, kw_only=True):
    """Everybody who waits, and how many may."""

    waiting: int
    max_waiters: int
    lines: list[WaitersAt]


class WorkerOrder(ServerValue, kw_only=True):
    """What the worker was told to do and has not done yet."""

    order: Order | None = None


class WorkersTold(ServerValue, kw_only=True):
    """The workers that report themselves, or did within the last hour, as far as the caller may see their queues."""

    workers: list[WorkerInfo]


class WorkersOrdered(ServerValue, kw_only=True):
    """The ids of the workers that were told."""

    ids: list[str]


# Traces on the wire.


Place = Annotated[str, Meta(pattern=r"^[0-9]{1,19}$")]  # what a page named as `next`
Words = Annotated[str, Meta(min_length=1, max_length=1_000)]


class StatsQuery(Wire, kw_only=True):
    """Of which topic, and of which time."""

    topic: Name | None = None
    since: Instant | None = None
    until: Instant | None = None


class TracesQuery(StatsQuery, kw_only=True):
    """Which steps to find: the first ones that fit, from the start or behind a place, or the last, before one."""

    group: Name | None = None
    event: Words | None = None
    holder: Words | None = None
    error: Words | None = None
    limit: Limit = 100
    last: bool = False
    after: Place | None = None


class TraceQuery(Wire, kw_only=True):
    """Which steps of a message to tell: all, or behind those of an earlier page."""

    limit: Limit = 10_000
    after: Place | None = None


class Steps(ServerValue, kw_only=True):
    """Steps of messages, oldest first; `next` is what `after` goes on from, if there may be more: of the last steps,
    earlier ones.

    That may be so of a page with few steps, or none: one call looks at so many and no more.
    """

    steps: list[TraceStep]
    next: str = ""


# Locks and state documents.


LeaseId = Annotated[str, Meta(min_length=1, max_length=300)]


class AcquireLock(Wire, kw_only=True):
    """Who wants the lock, for how long, and how long they wait: 0 not at all, -1 for as long as the server allows."""

    owner: Owner | None = None
    lease: Lease = 30
    wait: Wait = 0
    if_not_exists: bool = False


class KeepLock(Wire, kw_only=True):
    """The lease that is to go on, and for how long from now; as long as before where nothing is said."""

    lease_id: LeaseId
    lease: Lease | None = None


class ReleaseLock(Wire, kw_only=True):
    """The lease that is to end."""

    lease_id: LeaseId


class LockReleased(ServerValue, kw_only=True):
    """Whether somebody had the lock."""

    released: bool


class HeldLocks(ServerValue, kw_only=True):
    """The locks that somebody holds, by name."""

    locks: list[LockInfo]


class WriteDocument(Wire, kw_only=True):
    """What a document is to be: any JSON value."""

    value: Any


class DocumentQuery(Wire, kw_only=True):
    """Only if the document has this version (0: if there is none), and only while this lease is good."""

    version: Number | None = None
    lease_id: LeaseId | None = None


class DocumentNames(ServerValue, kw_only=True):
    """The names of the documents that the caller may see."""

    names: list[str]


class DocumentRemoved(ServerValue, kw_only=True):
    """Whether there was a document."""

    removed: bool
