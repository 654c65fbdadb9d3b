"""Topics, groups, locks and documents on the wire; and the server itself: how it does, and the traces it keeps."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from holdfast.api.locks import LockInfo
from holdfast.api.topics import GroupInfo, TopicInfo
from holdfast.broker.inspect import TopicStanding
from holdfast.broker.streams import GroupFacts, PartitionLag
from holdfast.broker.tracing import TraceStep
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
    """A position in a partition: the offset of the next message to handle."""

    offset: Number


class Assigned(ServerValue, kw_only=True):
    """A partition assigned to the member, and the offset of the next message that it will get from it."""

    topic: str
    partition: int
    position: int


class Join(Wire, kw_only=True):
    """A consumer that joins: which topics it reads, and settings such as {"session_ms": 10000, "start": "latest"}.

    The server never commits on its own, because messages in a response that was lost must not count as handled.
    """

    topics: Annotated[list[Name], Meta(min_length=1, max_length=1_000)]
    instance_id: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    owner: Owner | None = None
    settings: dict[str, Any] = msgspec.field(default_factory=dict)


class Joined(ServerValue, kw_only=True):
    """The member, and its partitions. It is removed if it sends neither a heartbeat nor a poll for `session_ms`."""

    member: str
    assignment: list[Assigned]
    epoch: int
    session_ms: int
    heartbeat_ms: int


class Beat(ServerValue, kw_only=True):
    """The partitions assigned to the member; it releases and takes over partitions when it polls."""

    assignment: list[Assigned]
    epoch: int


class Poll(Wire, kw_only=True):
    """A request for messages. `poll` counts up from 1; the same number again returns the same messages.

    The offsets in `commit` are committed first. Nothing is returned from `paused` partitions.
    """

    poll: Annotated[int, Meta(ge=1, le=2**53)]
    max_records: Limit | None = None
    wait: Wait = 0
    commit: Annotated[list[Offset], ManyPlaces] = msgspec.field(default_factory=list)
    paused: Annotated[list[At], ManyPlaces] = msgspec.field(default_factory=list)


class Polled(ServerValue, kw_only=True):
    """Messages, and the member's partitions. Offsets of `refused` partitions, which it has lost, were not committed."""

    messages: list[Said]
    assignment: list[Assigned]
    epoch: int
    refused: list[At] = msgspec.field(default_factory=list)


class CommitOffsets(Wire, kw_only=True):
    """The offsets to commit, for all these partitions or for none."""

    offsets: Annotated[list[Offset], Meta(min_length=1, max_length=10_000)]
    durability: Durability | None = None


class CommitDone(ServerValue, kw_only=True):
    """How many partitions were committed."""

    committed: int


class MoveMember(Wire, kw_only=True):
    """Where the member continues: at the start, the end, an offset or a time; without a partition, in all of them."""

    topic: Name | None = None
    partition: PartitionNumber | None = None
    to: Literal["start", "end"] | None = None
    offset: Number | None = None
    time: Instant | None = None


class OnTopic(Wire, kw_only=True):
    """The topic; all topics by default."""

    topic: Name | None = None


class GroupsQuery(OnTopic, kw_only=True):
    """Which groups to list: those of a topic, or all, up to a limit."""

    limit: Limit = 1_000


class Groups(ServerValue, kw_only=True):
    """Groups in both modes, and queries; one entry for each topic that they read."""

    groups: list[GroupInfo]


class GroupTold(ServerValue, kw_only=True):
    """A group: its topics, its lag on each, and in stream mode its members."""

    name: str
    topics: list[GroupInfo]
    stream: GroupFacts | None = None


class GroupOffsets(ServerValue, kw_only=True):
    """The group's position in each partition, and its lag."""

    offsets: list[PartitionLag]


class ResetOffsets(Wire, kw_only=True):
    """The new position: the start, the end, an offset or a time; `dry_run` only shows what would be done."""

    topic: Name
    to: Literal["earliest", "latest"] | None = None
    offset: Number | None = None
    time: Instant | None = None
    partition: PartitionNumber | None = None
    dry_run: bool = False


class ResetTold(ServerValue, kw_only=True):
    """The effect of a reset on one partition: `messages` are delivered again, or skipped if the number is negative."""

    topic: str
    partition: int
    before: int | None
    after: int
    messages: int


class ResetDone(ServerValue, kw_only=True):
    """What was reset, or would be reset."""

    partitions: list[ResetTold]
    dry_run: bool = False


Partitions = Annotated[int, Meta(ge=1, le=10_000)]
ProducerNumber = Annotated[str, Meta(pattern=r"^[0-9]{1,19}$")]  # has 63 bits, which not every JSON can hold
Epoch = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Sequence = Annotated[int, Meta(ge=0, le=2**32 - 1)]


class TopicsQuery(Wire, kw_only=True):
    """Which topics to list: how many, and after which name."""

    limit: Limit = 1_000
    after: Name | None = None


class Topics(ServerValue, kw_only=True):
    """The topics that you may see, by name; `more` is true if others follow."""

    topics: list[TopicInfo]
    more: bool = False


class CreateTopic(Wire, kw_only=True):
    """A topic's name, how many partitions it has, and its settings, such as {"retention_hours": 168}."""

    name: Name
    partitions: Partitions | None = None
    settings: Settings = msgspec.field(default_factory=dict)
    exist_ok: bool = False
    shard: Annotated[int, Meta(ge=0, le=1_023)] | None = None  # of a cluster; by default, the name decides


class AlterTopic(Wire, kw_only=True):
    """Settings to change; they take effect at once and are stored."""

    settings: Annotated[Settings, Meta(min_length=1)]


class AddPartitions(Wire, kw_only=True):
    """How many partitions to add."""

    count: Partitions


class CreateGroup(Wire, kw_only=True):
    """A group in queue mode: where a new one starts, and the settings in which it differs from its topic."""

    start: Literal["earliest", "latest"] = "earliest"
    settings: Settings = msgspec.field(default_factory=dict)


class GroupSettings(ServerValue, kw_only=True):
    """A group in queue mode, and its settings."""

    name: str
    topic: str
    settings: Settings


class ReadQuery(Wire, kw_only=True):
    """Where to start reading (by default at the oldest message), how much, and how long to wait for messages."""

    offset: Number | None = None
    limit: Limit = 100
    wait: Wait = 0
    bodies: bool = True
    on_damage: Literal["raise", "skip"] = "raise"


class FramesQuery(Wire, kw_only=True):
    """Which frames: those with messages from `offset` up to, but not including, `stop`; and about how many bytes."""

    offset: Number
    stop: Number | None = None
    bytes: Annotated[int, Meta(ge=1)] = 8 * 1024 * 1024


class ReadMessages(ServerValue, kw_only=True):
    """Messages of a partition, where to continue, and the range of offsets that the partition holds."""

    messages: list[Said]
    next_offset: int
    start: int
    end: int


class BeginProducer(Wire, kw_only=True):
    """A new producer. A named one fences earlier ones with its name; with `resume`, it continues their numbers."""

    name: Name | None = None
    resume: bool = False


class ProducerBegun(ServerValue, kw_only=True):
    """The producer. `since` is the epoch from which its sequence numbers count."""

    id: ProducerNumber
    epoch: int = 0
    since: int = 0


class AppendQuery(Wire, kw_only=True):
    """The producer, and the number of its first message here among all that it has sent to this partition."""

    producer: ProducerNumber
    sequence: Sequence
    epoch: Epoch = 0
    durability: Durability | None = None
    codec: Codec | None = None


class Written(ServerValue, kw_only=True):
    """The offsets of the messages, in order; empty if they were stored too long ago to know."""

    offsets: list[int]
    durability: Durability
    duplicate: bool = False


class SequenceQuery(Wire, kw_only=True):
    """The producer, the epoch from which its sequence numbers count, and the messages whose offsets you want."""

    producer: ProducerNumber
    since: Epoch = 0
    first: Sequence = 0
    count: Annotated[int, Meta(ge=0, le=MOST_MESSAGES)] = 0


class NextSequence(ServerValue, kw_only=True):
    """The number that the producer's next message for this partition must have, and the offsets of earlier ones.

    An offset is null if the message was stored too long ago to know, or is not stored.
    """

    sequence: int
    offsets: list[int | None] = msgspec.field(default_factory=list)


class TopicSettingsQuery(Wire, kw_only=True):
    """Whether to return all settings, or only those that were set for this topic."""

    all: bool = True


class SettingTold(ServerValue, kw_only=True):
    """A setting in force, and where it comes from: "default", a file, a variable, or the folder itself.

    "limit" is a default that was lowered, because the process may not open enough files for it.
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
    """One topic; or how many topics to list, and after which name."""

    limit: Limit = 1_000
    after: Name | None = None


class Standings(ServerValue, kw_only=True):
    """Topics with their partitions and groups; `delayed` counts, by topic, the messages that are not due yet.

    If there are more topics, pass `next` as `after` to get the next page.
    """

    topics: list[TopicStanding]
    delayed: dict[str, int] = msgspec.field(default_factory=dict)
    next: str = ""


# The server itself on the wire: how it does, who waits, and the traces it keeps.


class StandbyStatus(ServerValue, kw_only=True):
    """A process that waits to take over the folder, and the most that it can be behind: in objects, and in time."""

    process: str
    number: int
    lag_objects: int
    lag_seconds: float


class StoreStatus(ServerValue, kw_only=True):
    """The store that the folder lives in, as its owner sees it. `problem` says why it is no longer the owner."""

    name: str
    owner: str = ""
    epoch: int
    objects: int
    silent_seconds: float
    unsent_bytes: int
    problem: str = ""
    standbys: list[StandbyStatus] = msgspec.field(default_factory=list)


class Status(ServerValue, kw_only=True):
    """The status of the server. `tokens_problem` says why a changed tokens file is not used; the old one applies."""

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
    """How many to return."""

    limit: Limit = 100


class SamplesQuery(Wire, kw_only=True):
    """How many seconds back: up to seven days, in steps of 5 seconds, a minute or a quarter of an hour."""

    last: Annotated[float, Meta(gt=0, le=604_800)] = 900


class GroupSamplesQuery(SamplesQuery, kw_only=True):
    """The group, in queue or stream mode; without one, the default group, or the topic if it has none."""

    group: Name | None = None


class WaitersAt(ServerValue, kw_only=True):
    """The callers waiting for messages of a group."""

    topic: str
    group: str
    waiters: int
    streams: int


class WaitersTold(ServerValue, kw_only=True):
    """All waiting callers, and the limit."""

    waiting: int
    max_waiters: int
    lines: list[WaitersAt]


class WorkerOrder(ServerValue, kw_only=True):
    """The order that the worker has not carried out yet."""

    order: Order | None = None


class WorkersTold(ServerValue, kw_only=True):
    """The workers that have reported within the last hour, for the queues that you may see."""

    workers: list[WorkerInfo]


class WorkersOrdered(ServerValue, kw_only=True):
    """The ids of the workers that got the order."""

    ids: list[str]


# Traces on the wire.


Place = Annotated[str, Meta(pattern=r"^[0-9]{1,19}$")]  # what a page named as `next`
Words = Annotated[str, Meta(min_length=1, max_length=1_000)]


class StatsQuery(Wire, kw_only=True):
    """The topic and the period."""

    topic: Name | None = None
    since: Instant | None = None
    until: Instant | None = None


class TracesQuery(StatsQuery, kw_only=True):
    """Which steps to find: the first that match, from the start or after a position; or the last, before a position."""

    group: Name | None = None
    event: Words | None = None
    holder: Words | None = None
    error: Words | None = None
    limit: Limit = 100
    last: bool = False
    after: Place | None = None


class TraceQuery(Wire, kw_only=True):
    """Which steps of a message to return: all, or those after an earlier page."""

    limit: Limit = 10_000
    after: Place | None = None


class Steps(ServerValue, kw_only=True):
    """Steps of messages, oldest first. If there may be more, pass `next` as `after` to get the next page.

    When you ask for the last steps, the next page has earlier ones. A page can have few steps, or none, and still be
    followed by more: one call examines only a limited number.
    """

    steps: list[TraceStep]
    next: str = ""


# Locks and state documents.


LeaseId = Annotated[str, Meta(min_length=1, max_length=300)]


class AcquireLock(Wire, kw_only=True):
    """A request for a lock: for whom, for how long, and how long to wait (0: not at all, -1: as long as allowed)."""

    owner: Owner | None = None
    lease: Lease = 30
    wait: Wait = 0
    if_not_exists: bool = False


class KeepLock(Wire, kw_only=True):
    """The lease to renew, and for how long from now; by default, for as long as before."""

    lease_id: LeaseId
    lease: Lease | None = None


class ReleaseLock(Wire, kw_only=True):
    """The lease to release."""

    lease_id: LeaseId


class LockReleased(ServerValue, kw_only=True):
    """Whether the lock was held."""

    released: bool


class HeldLocks(ServerValue, kw_only=True):
    """The locks that are held, by name."""

    locks: list[LockInfo]


class WriteDocument(Wire, kw_only=True):
    """The new value of a document: any JSON value."""

    value: Any


class DocumentQuery(Wire, kw_only=True):
    """Conditions: the document has this version (0: does not exist), and this lease is still valid."""

    version: Number | None = None
    lease_id: LeaseId | None = None


class DocumentNames(ServerValue, kw_only=True):
    """The names of the documents that you may see."""

    names: list[str]


class DocumentRemoved(ServerValue, kw_only=True):
    """Whether there was a document."""

    removed: bool


# The audit log: a line on disk, and what the server answers from it.


BEGUN: Final = "begun"
DONE: Final = "done"


class Act(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the audit log. `count` is the number of messages, or other things, that were affected."""

    time: datetime
    id: str
    principal: str
    peer: str
    action: str
    route: str
    target: str
    parameters: dict[str, Any]
    correlation_id: str
    outcome: str = BEGUN
    count: int | None = None


# What each act did, in words: {n} is how many, {target} the queue, topic, group or lock.
_WORDS: Final = {
    "PUT /v1/queues/{queue}": "created or changed the queue {target}",
    "POST /v1/topics": "created the topic {target}",
    "PATCH /v1/topics/{topic}": "changed settings of {target}",
    "PATCH /v1/topics/{topic}/settings": "changed settings of {target}",
    "POST /v1/topics/{topic}/partitions": "added partitions to {target}",
    "DELETE /v1/topics/{topic}": "deleted {target}",
    "PUT /v1/topics/{topic}/groups/{group}": "created or changed the group {group} of {target}",
    "DELETE /v1/groups/{group}": "deleted the group {group}",
    "POST /v1/groups/{group}/reset": "moved the group {group} ({n})",
    "POST /v1/queues/{queue}/seek": "moved the position of {target}",
    "POST /v1/queues/{queue}/purge": "purged {n} of {target}",
    "POST /v1/queues/{queue}/compact": "compacted {target}",
    "POST /v1/topics/{topic}/compact": "compacted {target}",
    "POST /v1/topics/{topic}/apply-retention": "applied retention to {target}",
    "POST /v1/queues/{queue}/dead/redrive": "redrove {n} of {target}",
    "POST /v1/queues/{queue}/dead/purge": "purged {n} of the dead letters of {target}",
    "DELETE /v1/queues/{queue}/messages/{id}": "cancelled {id}",
    "DELETE /v1/topics/{topic}/delayed/{id}": "cancelled {id}",
    "POST /v1/queues/{queue}/messages/{id}/takeBack": "took back {id} from its worker",
    "POST /v1/queues/{queue}/messages/{id}/runNow": "ran {id} now",
    "DELETE /v1/locks/{name}": "released the lock {target} by force",
    "POST /v1/admin/sync": "synced everything to disk",
    "POST /v1/queues/{queue}/pause": "paused {target}",
    "POST /v1/queues/{queue}/resume": "resumed {target}",
    "PUT /v1/schedules/{schedule}": "created or changed the schedule {schedule}",
    "DELETE /v1/schedules/{schedule}": "deleted the schedule {schedule}",
    "POST /v1/schedules/{schedule}/pause": "paused the schedule {schedule}",
    "POST /v1/schedules/{schedule}/resume": "resumed the schedule {schedule}",
    "POST /v1/schedules/{schedule}/run": "ran the schedule {schedule} now",
    "POST /v1/workers/{worker}/drain": "told the worker {target} to drain",
    "POST /v1/workers/{worker}/stop": "told the worker {target} to stop",
    "POST /v1/workers/{worker}/resume": "told the worker {target} to take messages again",
}
_VERBS: Final = {
    "added": "add",
    "applied": "apply",
    "cancelled": "cancel",
    "changed": "change",
    "compacted": "compact",
    "created": "create",
    "deleted": "delete",
    "moved": "move",
    "paused": "pause",
    "purged": "purge",
    "ran": "run",
    "redrove": "redrive",
    "released": "release",
    "resumed": "resume",
    "synced": "sync",
    "told": "tell",
    "took": "take",
}


def words_of(act: Act) -> str:
    """What an act did, in words; its route if there are none."""
    number = "some messages" if act.count is None else "1 message" if act.count == 1 else f"{act.count:,} messages"
    facts = {name: str(value) for name, value in act.parameters.items()}
    facts |= {"n": number, "target": act.target or facts.get("queue", "") or facts.get("topic", "")}
    try:
        said = _WORDS.get(act.route, act.route).format_map(facts)
    except (KeyError, ValueError, IndexError):
        return f"{act.route} {act.target}".strip()
    to = act.parameters.get("to")
    if to and "redrove" in said:
        said = f"{said} into {to}"
    if act.parameters.get("dry_run") is True:
        return f"checked what would happen: {_infinitive(said)}"
    return said if act.outcome in (DONE, BEGUN) else f"tried to {_infinitive(said)}"


def _infinitive(said: str) -> str:
    """The words of an act that was not carried out."""
    verb, _, rest = said.partition(" ")
    return f"{_VERBS.get(verb, verb)} {rest.replace('or changed', 'or change', 1)}".strip()


class Acts(ServerValue, kw_only=True):
    """Administrative actions, the newest first; one with the outcome "begun" is running, or a crash interrupted it.

    `refused` lists calls that were not allowed, separately, so that they cannot crowd out the others.
    Only a limited number per minute is recorded for each caller; an entry with a `count` stands for that many more.
    """

    acts: list[Act]
    refused: list[Act] = msgspec.field(default_factory=list)
