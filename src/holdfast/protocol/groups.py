"""Groups on the wire: members of a stream that live elsewhere, what they poll and commit, where groups stand."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from holdfast.api.topics import GroupInfo
from holdfast.broker.streams.offsets import GroupFacts, PartitionLag
from holdfast.protocol.messages import Durability, Instant, Name, Number, Owner, PartitionNumber, Said, Told, Wait, Wire
from holdfast.protocol.queues import Limit

ManyPlaces = Meta(max_length=10_000)


class At(Wire, kw_only=True):
    """One partition."""

    topic: Name
    partition: PartitionNumber = 0


class Offset(At, kw_only=True):
    """A place in a partition: the offset of the next message to be handled."""

    offset: Number


class Assigned(Told, kw_only=True):
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


class Joined(Told, kw_only=True):
    """The member, and what it reads. It is put out when neither heartbeat nor poll came for `session_ms`."""

    member: str
    assignment: list[Assigned]
    epoch: int
    session_ms: int
    heartbeat_ms: int


class Beat(Told, kw_only=True):
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


class Polled(Told, kw_only=True):
    """Messages, and what is the member's by now. `refused` was not committed: it is not the member's any more."""

    messages: list[Said]
    assignment: list[Assigned]
    epoch: int
    refused: list[At] = msgspec.field(default_factory=list)


class CommitOffsets(Wire, kw_only=True):
    """How far the member came, for all these partitions or for none."""

    offsets: Annotated[list[Offset], Meta(min_length=1, max_length=10_000)]
    durability: Durability | None = None


class CommitDone(Told, kw_only=True):
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


class Groups(Told, kw_only=True):
    """Groups in both modes, and queries; one entry for each topic that they read."""

    groups: list[GroupInfo]


class GroupTold(Told, kw_only=True):
    """A group: on which topics it is and how far behind, and in stream mode its members."""

    name: str
    topics: list[GroupInfo]
    stream: GroupFacts | None = None


class GroupOffsets(Told, kw_only=True):
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


class ResetTold(Told, kw_only=True):
    """What a reset does to one partition; `messages` come again, or are passed over if below 0."""

    topic: str
    partition: int
    before: int | None
    after: int
    messages: int


class ResetDone(Told, kw_only=True):
    """What was reset, or would be."""

    partitions: list[ResetTold]
    dry_run: bool = False
