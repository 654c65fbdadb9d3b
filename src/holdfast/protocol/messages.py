"""Messages and queues on the wire: what is put, taken and settled, how queues are described, and their dead letters."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from holdfast.api.arguments import MOST_REASON_CHARS
from holdfast.api.listing import DeadGroup
from holdfast.broker.tracing.log import TraceStep
from holdfast.delivery.group import Failure
from holdfast.model import Pause

Name = Annotated[str, Meta(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")]
Receipt = Annotated[str, Meta(max_length=300)]
Seconds = Annotated[float, Meta(ge=0, le=100 * 365 * 24 * 3600)]
Lease = Annotated[float, Meta(gt=0, le=30 * 24 * 3600)]
Wait = Annotated[float, Meta(ge=-1, le=30 * 24 * 3600)]
Count = Annotated[int, Meta(ge=1, le=10_000)]
Number = Annotated[int, Meta(ge=0, le=2**53)]
PartitionNumber = Annotated[int, Meta(ge=0, le=10_000)]
Instant = Annotated[datetime, Meta(tz=True)]
Priority = Annotated[int, Meta(ge=0, le=9)]
AttemptId = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[!-~]+$")]  # ASCII that can be seen
Owner = Annotated[str, Meta(max_length=200)]
Durability = Literal["fsync", "os", "interval"]
Codec = Literal["none", "zstd", "lz4", "gzip"]

MOST_MESSAGES: Final = 100_000  # of one call; a server may be set to take fewer
MOST_HEADERS: Final = 1_000  # of one message


class Wire(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A value that is sent to the server: what it does not know is refused."""


class ServerValue(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A value that the server answers: what a client does not know, it passes over."""


class Header(Wire, kw_only=True):
    """A header of a message: its value is text, or bytes."""

    name: Annotated[str, Meta(min_length=1, max_length=1000)]
    value: str | None = None
    data: bytes | None = None


# A map is what most programs have at hand; a list knows bytes, and names that are there more than once.
HeaderList = Annotated[list[Header], Meta(max_length=MOST_HEADERS)]
HeaderMap = Annotated[dict[Annotated[str, Meta(min_length=1, max_length=1000)], str], Meta(max_length=MOST_HEADERS)]


class Options(Wire, kw_only=True):
    """What goes with one message, besides its body."""

    key: str | None = None
    key_data: bytes | None = None
    headers: HeaderList | HeaderMap = []
    priority: Priority = 0
    delay: Seconds | None = None
    at: Instant | None = None
    ttl: Annotated[float, Meta(gt=0, le=100 * 365 * 24 * 3600)] | None = None
    dedup_id: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    dedup_data: bytes | None = None
    correlation_id: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None


def headers_of(message: Options) -> list[Header]:
    """The headers of a message, whichever way they were given."""
    given = message.headers
    if isinstance(given, dict):
        return [Header(name=name, value=value) for name, value in given.items()]
    return given


class NewMessage(Options, kw_only=True):
    """One message to be stored. Its body is bytes (`body`, base64 in JSON), a text or a JSON value.

    `tombstone` deletes a key in a topic that is compacted.
    """

    body: bytes | None = None
    text: str | None = None
    json: Any | UnsetType = UNSET
    tombstone: bool = False


class Batch(Wire, kw_only=True):
    """Messages to be stored; those that go to one partition all or not at all.

    Messages that have nothing but a body may be given as `bodies` (bytes, base64 in JSON) instead: that is faster.
    """

    messages: Annotated[list[NewMessage], Meta(max_length=MOST_MESSAGES)] = []
    bodies: Annotated[list[bytes], Meta(max_length=MOST_MESSAGES)] = []


def batch_of(messages: Sequence[NewMessage]) -> Batch:
    """Messages as they are sent together: by their bodies alone where there is nothing else."""
    bodies = [message.body for message in messages if message.body is not None]
    if len(bodies) == len(messages) and all(message == NewMessage(body=message.body) for message in messages):
        return Batch(bodies=bodies)
    return Batch(messages=list(messages))


class Stored(ServerValue, kw_only=True):
    """Where a message is now, and what it survives; a duplicate's id is that of the first one."""

    id: str
    topic: str
    durability: Durability
    partition: int = 0
    offset: int | None = None
    delayed_id: int | None = None
    duplicate: bool = False


class StoredBatch(ServerValue, kw_only=True):
    """The answer for each message of a batch, in its order."""

    stored: list[Stored]


class State(ServerValue, kw_only=True):
    """The document that goes with a message until it is acked."""

    value: Any = None
    version: int = 0


class Said(ServerValue, kw_only=True):
    """What a stored message says."""

    id: str
    topic: str
    offset: int
    timestamp_ns: int
    body: bytes = b""
    partition: int = 0
    key: str | None = None
    key_data: bytes | None = None
    headers: list[Header] = []
    priority: int = 0
    correlation_id: str = ""
    expires_at_ms: int = 0
    due_at_ms: int = 0
    tombstone: bool = False
    original_id: str = ""  # of a redriven message: what it was when it was published first
    size: int = 0  # of the body; where `body` is left out, it is to be asked for by itself
    omitted: bool = False


class Delivery(Said, kw_only=True):
    """A message in a consumer's hands: its receipt settles it, its fence is higher than any before."""

    receipt: str
    fence: int
    attempt: int
    holder: str
    lease_ms: int
    state: State | None = None


class Deliveries(ServerValue, kw_only=True):
    """What was received; nothing where the time was over."""

    messages: list[Delivery]


class Take(Wire, kw_only=True):
    """What a consumer asks for. A wait of -1 is for as long as it takes (the server has a limit), 0 not at all.

    `attempt_id` names the call, for a caller that gets no answer: the same call with the same id, while the leases of
    the first one hold, is answered with the same messages and receipts, and costs no further attempt.
    """

    count: Count = 1
    wait: Wait = 0
    owner: Owner | None = None
    lease: Lease | None = None
    group: Name | None = None
    state: bool = False
    attempt_id: AttemptId | None = None


class Subscribe(Wire, kw_only=True):
    """A stream of messages: at most `prefetch` of them are with the consumer, unsettled, at any time."""

    prefetch: Annotated[int, Meta(ge=1, le=10_000)] = 1
    owner: Owner | None = None
    lease: Lease | None = None
    group: Name | None = None
    state: bool = False
    heartbeat: Annotated[float, Meta(ge=0.1, le=3600)] = 15


class Receipts(Wire, kw_only=True):
    """Messages in hand, by their receipts."""

    receipts: Annotated[list[Receipt], Meta(min_length=1, max_length=10_000)]
    group: Name | None = None
    durability: Durability | None = None  # of what is said of them; the group's own where none is given


class Ack(Receipts, kw_only=True):
    """The work is done."""


class Nack(Receipts, kw_only=True):
    """The work is not done: it failed, nobody settled it (`drop`), or (`defer`) it was not begun.

    The attempt counts, but for `defer`. Without a `delay` a deferred message is ready at once, the others wait for the
    backoff (`drop`: for `dropped_delay_ms`, where that is set).
    """

    intent: Literal["failure", "drop", "defer"] = "failure"
    delay: Seconds | None = None
    error: Annotated[str, Meta(max_length=1_000_000)] | None = None


class Reject(Receipts, kw_only=True):
    """The work can never be done: to the dead letters."""

    reason: Annotated[str, Meta(max_length=1_000_000)] | None = None


class Extend(Receipts, kw_only=True):
    """The work takes longer: the lease begins anew. A lease of 0 gives the messages back now, as a `defer` does."""

    lease: Annotated[float, Meta(ge=0, le=30 * 24 * 3600)] | None = None


class Settled(ServerValue, kw_only=True):
    """How many messages in hand were settled."""

    settled: int


class SaveState(Wire, kw_only=True):
    """Keep a document with a message in hand, if its version is still this one; without a value it is dropped."""

    receipt: Receipt
    version: Number
    value: Any | UnsetType = UNSET
    group: Name | None = None
    durability: Durability | None = None


# Queues on the wire: how they stand, what is in them, how they are made and moved; and their dead letters.


Limit = Annotated[int, Meta(ge=1, le=10_000)]
After = Annotated[str, Meta(max_length=100)]  # what a page named as `next`
Where = Annotated[str, Meta(max_length=10_000)]
Phase = Literal["ready", "leased", "delayed", "dead", "done"]
Settings = dict[str, Any]


class InGroup(Wire, kw_only=True):
    """Which group of the queue is meant; the one that every queue has, where none is named."""

    group: Name | None = None


class PeekQuery(InGroup, kw_only=True):
    """How many of the next messages to show."""

    count: Limit = 1


class ListQuery(InGroup, kw_only=True):
    """Which messages to show: in a phase, and as a condition chooses (see `holdfast ls --where`)."""

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


class Messages(ServerValue, kw_only=True):
    """Messages that are looked at."""

    messages: list[Said]


class ListedMessages(ServerValue, kw_only=True):
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

    leased_at_ms: int = 0
    first_delivery_ms: int = 0
    last_delivery_ms: int = 0
    failures: list[Failure] = msgspec.field(default_factory=list)
    state: Any = None
    history: list[TraceStep] = msgspec.field(default_factory=list)


class Cancelled(ServerValue, kw_only=True):
    """Whether a message was taken back; it is too late once somebody works on it."""

    cancelled: bool


class MessageChanged(ServerValue, kw_only=True):
    """Whether the message was changed; false if there was nothing to do, as it is in another phase by now."""

    changed: bool


class Seek(InGroup, kw_only=True):
    """Where the group goes on: at the start, at the end, at an offset or at a time."""

    to: Literal["start", "end"] | None = None
    offset: Number | None = None
    time: Instant | None = None
    partition: PartitionNumber | None = None


class Sought(ServerValue, kw_only=True):
    """Where the group goes on now."""

    offset: int


class CreateQueue(Wire, kw_only=True):
    """A queue's settings by name, such as {"max_attempts": 3}; and how many partitions it has."""

    partitions: Annotated[int, Meta(ge=1, le=10_000)] | None = None
    settings: Settings = msgspec.field(default_factory=dict)


class Compacted(ServerValue, kw_only=True):
    """What was freed."""

    segments: int
    bytes: int
    journal_bytes: int


class PauseGroup(InGroup, kw_only=True):
    """Why the group is paused, for people; it is shown wherever the group is."""

    reason: Annotated[str, Meta(max_length=MOST_REASON_CHARS)] = ""


class PauseTold(ServerValue, kw_only=True):
    """Since when the group is paused, and why, or null; `changed` is false if it was so before the call."""

    changed: bool
    paused: Pause | None


class Purged(ServerValue, kw_only=True):
    """How many messages were dropped."""

    purged: int


class Committed(ServerValue, kw_only=True):
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


class Letters(ServerValue, kw_only=True):
    """Dead letters, oldest first; `next` is what `after` goes on from, if there may be more.

    That may be so of a page with few letters, or none: one call looks at so many (`scanned`) and no more.
    So many were `damaged`, and are left out.
    """

    letters: list[Letter]
    next: str = ""
    scanned: int = 0
    damaged: int = 0


class DeadGroups(ServerValue, kw_only=True):
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


class RedriveTold(ServerValue, kw_only=True):
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


class SearchQuery(Wire, kw_only=True):
    """What to search for, in all queues that the caller may read: terms that must all hold.

    A term is an id, `key=VALUE`, a header as `NAME=VALUE`, a part of a JSON body as `$.order.id=7`, `time=2026-11-17`
    (or `time>`, `time<`, `age<1h`), `queue=TEXT`, or a text. `where CONDITION` takes a condition as it is.
    """

    q: Annotated[str, Meta(min_length=1, max_length=1_000)]
    limit: Annotated[int, Meta(ge=1, le=1_000)] = 50
    after: Annotated[str, Meta(max_length=1_000)] = ""


class FoundMessage(Listed, kw_only=True):
    """A message that was found, without its body. `group` is the group whose phase it has."""

    phase: Literal["ready", "leased", "delayed", "done", "dead"] = "ready"
    group: str = "default"


class QueueSearched(ServerValue, kw_only=True):
    """How many messages of a queue this call looked at, of how many; `whole` if it came to the end."""

    queue: str
    searched: int = 0
    messages: int = 0
    whole: bool = False
    problem: str = ""


class SearchAnswer(ServerValue, kw_only=True):
    """The messages that were found, and what was looked at to find them.

    One call looks at a bounded number of messages. `next` is what `after` goes on from; it is empty once all was
    searched. `left` are queues that were not reached, and `left_out` is how many more there are. Topics without a group
    in queue mode are not searched. `where` is the condition that was searched for.
    """

    messages: list[FoundMessage]
    next: str = ""
    scanned: int = 0
    scanned_in_all: int = 0
    queues: list[QueueSearched] = msgspec.field(default_factory=list)
    left: list[str] = msgspec.field(default_factory=list)
    left_out: int = 0
    not_queues: list[str] = msgspec.field(default_factory=list)
    where: str = ""
