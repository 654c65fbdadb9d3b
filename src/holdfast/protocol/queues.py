"""Queues on the wire: how they stand, what is in them, how they are made and moved; and their dead letters."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from holdfast.api.listing import DeadGroup
from holdfast.broker.tracing.log import TraceStep
from holdfast.delivery.group import Failure
from holdfast.protocol.messages import Instant, Name, Number, PartitionNumber, Said, Told, Wire

Limit = Annotated[int, Meta(ge=1, le=10_000)]
After = Annotated[str, Meta(max_length=100)]  # what a page named as `next`
Where = Annotated[str, Meta(max_length=10_000)]
Phase = Literal["ready", "leased", "delayed", "dead"]
Settings = dict[str, Any]


class InGroup(Wire, kw_only=True):
    """Which group of the queue is meant; the one that every queue has, where none is named."""

    group: Name | None = None


class PeekQuery(InGroup, kw_only=True):
    """How many of the next messages to show."""

    count: Limit = 1


class ListQuery(InGroup, kw_only=True):
    """Which messages to show: in a phase, and as a condition chooses (see `holdfast list --where`)."""

    phase: Phase = "ready"
    where: Where | None = None
    limit: Limit = 100
    bodies: bool = True
    after: After | None = None


class Listed(Said, kw_only=True):
    """A message that is looked at: where it stands, and what went wrong with it. Without an offset it is delayed."""

    offset: int | None = None  # type: ignore[assignment]
    phase: Phase = "ready"
    attempts: int = 0
    holder: str = ""
    reason: str = ""
    error: str = ""
    due_ms: int = 0
    lease_until_ms: int = 0


class Messages(Told, kw_only=True):
    """Messages that are looked at."""

    messages: list[Said]


class ListedMessages(Told, kw_only=True):
    """Messages that are looked at, with where they stand; `next` is what `after` goes on from, if there may be more.

    That may be so of a page with few messages, or none: one call looks at so many (`scanned`) and no more.
    So many were `damaged`, and are left out.
    """

    messages: list[Listed]
    next: str = ""
    scanned: int = 0
    damaged: int = 0


class LookupQuery(InGroup, kw_only=True):
    """Which message is meant: by its id, or by that of the dead letter that it became."""

    id: Annotated[str, Meta(min_length=1, max_length=300)]


class Whole(Listed, kw_only=True):
    """Everything that is known of a message. Times are milliseconds since 1970, 0 where there is none."""

    phase: Literal["ready", "leased", "delayed", "done", "dead"] = "ready"  # type: ignore[assignment]
    leased_at_ms: int = 0
    first_delivery_ms: int = 0
    last_delivery_ms: int = 0
    failures: list[Failure] = msgspec.field(default_factory=list)
    state: Any = None
    history: list[TraceStep] = msgspec.field(default_factory=list)


class Cancelled(Told, kw_only=True):
    """Whether a message was taken back; it is too late once somebody works on it."""

    cancelled: bool


class Seek(InGroup, kw_only=True):
    """Where the group goes on: at the start, at the end, at an offset or at a time."""

    to: Literal["start", "end"] | None = None
    offset: Number | None = None
    time: Instant | None = None
    partition: PartitionNumber | None = None


class Sought(Told, kw_only=True):
    """Where the group goes on now."""

    offset: int


class CreateQueue(Wire, kw_only=True):
    """A queue's settings by name, such as {"max_attempts": 3}; and how many partitions it has."""

    partitions: Annotated[int, Meta(ge=1, le=10_000)] | None = None
    settings: Settings = msgspec.field(default_factory=dict)


class Compacted(Told, kw_only=True):
    """What was freed."""

    segments: int
    bytes: int
    journal_bytes: int


class Purged(Told, kw_only=True):
    """How many messages were dropped."""

    purged: int


class Committed(Told, kw_only=True):
    """For each partition the end of the contiguous run of messages that are settled, from the start on."""

    offsets: dict[str, int]


class WatchQuery(InGroup, kw_only=True):
    """What a watcher is told: each message as it comes (with its body, if asked for), and how the queue stands."""

    bodies: bool = False
    stats: Annotated[float, Meta(ge=0, le=3600)] = 5.0


# Dead letters and delayed messages on the wire.


LetterId = Annotated[str, Meta(min_length=1, max_length=300)]


class DeadQuery(InGroup, kw_only=True):
    """Which dead letters to show."""

    where: Where | None = None
    limit: Limit = 100
    bodies: bool = True
    after: After | None = None


class DeadGroupsQuery(InGroup, kw_only=True):
    """Which dead letters to group."""

    where: Where | None = None
    limit: Limit = 100


class Letter(Listed, kw_only=True):
    """A message that died: as it was, with every error, the reason and its original place."""

    original_id: str
    original_offset: int
    original_timestamp: Instant
    dead_at: Instant
    failures: list[Failure] = msgspec.field(default_factory=list)
    first_delivery: Instant | None = None
    last_delivery: Instant | None = None
    state: Any = None


class Letters(Told, kw_only=True):
    """Dead letters, oldest first; `next` is what `after` goes on from, if there may be more.

    That may be so of a page with few letters, or none: one call looks at so many (`scanned`) and no more.
    So many were `damaged`, and are left out.
    """

    letters: list[Letter]
    next: str = ""
    scanned: int = 0
    damaged: int = 0


class DeadGroups(Told, kw_only=True):
    """Dead letters by reason and kind of error, the most frequent first."""

    groups: list[DeadGroup]


class Purge(InGroup, kw_only=True):
    """Which dead letters to drop for good: by id, by a condition, or all; with `dry_run` only say which."""

    ids: Annotated[list[LetterId], Meta(max_length=100_000)] | None = None
    where: Where | None = None
    limit: Annotated[int, Meta(ge=0, le=2**53)] | None = None
    dry_run: bool = False


class Redrive(Purge, kw_only=True):
    """Which dead letters to put back, and how many a second; `to` another topic, where they become new messages."""

    to: Name | None = None

    rate: Annotated[float, Meta(gt=0, le=1_000_000)] | None = None


class RedriveTold(Told, kw_only=True):
    """What a redrive or a purge found and did; in a stream, how far it is, and `ended` in the last line."""

    matched: int
    done: int
    ids: list[str] = msgspec.field(default_factory=list)
    ended: bool = True


class DelayedQuery(Wire, kw_only=True):
    """How many delayed messages to show, behind which place, and whether with their bodies."""

    limit: Limit = 100
    bodies: bool = True
    after: After | None = None
