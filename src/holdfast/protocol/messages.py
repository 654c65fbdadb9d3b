"""Messages and queues on the wire: what is put, taken and settled, how queues are described, and their dead letters."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from holdfast.api.arguments import MOST_REASON_CHARS
from holdfast.api.listing import DeadGroup
from holdfast.api.schedules import Schedule
from holdfast.broker.tracing import TraceStep
from holdfast.model import DURABILITY_OF_ACKS, Failure, Pause
from holdfast.scheduling import Misfire

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
Acks = Literal["none", "leader", "all"]
Codec = Literal["none", "zstd", "lz4", "gzip"]

MOST_MESSAGES: Final = 100_000  # of one call; a server may be set to take fewer
MOST_HEADERS: Final = 1_000  # of one message
MOST_RECEIPTS: Final = 10_000  # of one call


def durability_asked(acks: Acks | None, durability: Durability | None) -> Durability | None:
    """The durability that a call asks for, by either name. Raises ValueError, as decoders expect, if it has both."""
    if acks is None:
        return durability
    if durability is not None:
        raise ValueError(f"`acks` and `durability` say the same: give one of them, {acks!r} or {durability!r}")
    return DURABILITY_OF_ACKS[acks]


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
    """One message to store. Its body is bytes (`body`, base64 in JSON), a text or a JSON value.

    `tombstone` deletes a key in a topic that is compacted.
    """

    body: bytes | None = None
    text: str | None = None
    json: Any | UnsetType = UNSET
    tombstone: bool = False


class Batch(Wire, kw_only=True):
    """Messages to store, for each partition all or none.

    Messages that consist only of a body can be passed as `bodies` (bytes, base64 in JSON) instead, which is faster.
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
    """The id of a stored message, its offset, and its durability; for a duplicate, those of the first message."""

    id: str
    topic: str
    durability: Durability
    partition: int = 0
    offset: int | None = None
    delayed_id: int | None = None
    duplicate: bool = False


class StoredBatch(ServerValue, kw_only=True):
    """The result for each message of a batch, in the same order."""

    stored: list[Stored]


class State(ServerValue, kw_only=True):
    """The state stored with a message until it is acked."""

    value: Any = None
    version: int = 0


class Said(ServerValue, kw_only=True):
    """The content of a stored message."""

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
    """A message leased to a consumer. Its receipt settles it; its fence is higher than that of any earlier delivery."""

    receipt: str
    fence: int
    attempt: int
    holder: str
    lease_ms: int
    state: State | None = None


class DeliveryRun(ServerValue, kw_only=True):
    """Messages of one partition that were leased together and consist only of their bodies, in order of their offsets.

    The id of a message is its topic, partition and offset, joined by `-`. The `token` stands for the receipts of all
    of them: each receipt can be derived from it, and `runs` in a settling call takes it unchanged.
    """

    topic: str
    partition: int
    offsets: list[int]
    timestamps_ns: list[int]
    bodies: list[bytes]
    token: bytes
    fence: int
    holder: str
    lease_ms: int


class Deliveries(ServerValue, kw_only=True):
    """The messages received; empty if none arrived in time.

    A caller who accepts `application/msgpack;runs=1` may get some of them as `runs`, which are faster to read.
    """

    messages: list[Delivery]
    runs: list[DeliveryRun] = []


class Take(Wire, kw_only=True):
    """A request for messages. A `wait` of -1 waits for as long as the server allows, 0 not at all.

    `attempt_id` identifies the call, so that you can repeat it if no response arrives: while the leases of the first
    call last, the same id returns the same messages and receipts, and counts no further attempt.
    """

    count: Count = 1
    wait: Wait = 0
    owner: Owner | None = None
    lease: Lease | None = None
    group: Name | None = None
    state: bool = False
    attempt_id: AttemptId | None = None


class Subscribe(Wire, kw_only=True):
    """A stream of messages: at most `prefetch` of them are unsettled at any time."""

    prefetch: Annotated[int, Meta(ge=1, le=10_000)] = 1
    owner: Owner | None = None
    lease: Lease | None = None
    group: Name | None = None
    state: bool = False
    heartbeat: Annotated[float, Meta(ge=0.1, le=3600)] = 15


class RunReceipts(Wire, kw_only=True):
    """Receipts of messages that were received as one run: the run's token, and the offsets of these messages."""

    partition: PartitionNumber
    token: Annotated[bytes, Meta(min_length=29, max_length=29)]
    offsets: Annotated[list[Number], Meta(min_length=1, max_length=MOST_RECEIPTS)]


class Receipts(Wire, kw_only=True):
    """Messages in flight, by their receipts, or by `runs` in which they were received: at most 10,000 in all."""

    receipts: Annotated[list[Receipt], Meta(max_length=MOST_RECEIPTS)]
    runs: Annotated[list[RunReceipts], Meta(max_length=MOST_RECEIPTS)] = []
    group: Name | None = None
    durability: Durability | None = None  # of what is said of them; the group's own where none is given

    def __post_init__(self) -> None:
        if not self.runs:
            if not self.receipts:
                raise ValueError("it names no message: give its `receipts` or `runs`")
        elif sum([len(run.offsets) for run in self.runs], len(self.receipts)) > MOST_RECEIPTS:
            raise ValueError(f"it names more than {MOST_RECEIPTS:,} messages, which is the limit: make several calls")


class Ack(Receipts, kw_only=True):
    """Messages that are done."""


class Nack(Receipts, kw_only=True):
    """Messages that are not done: they failed (`failure`), were not settled (`drop`), or not started (`defer`).

    The attempt counts, except for `defer`. Without a `delay`, a deferred message is ready at once; the others wait for
    the backoff (`drop`: for `dropped_delay_ms`, if set).
    """

    intent: Literal["failure", "drop", "defer"] = "failure"
    delay: Seconds | None = None
    error: Annotated[str, Meta(max_length=1_000_000)] | None = None


class Reject(Receipts, kw_only=True):
    """Messages that become dead letters at once, because retrying cannot help."""

    reason: Annotated[str, Meta(max_length=1_000_000)] | None = None


class Extend(Receipts, kw_only=True):
    """Extend the lease, from now. A lease of 0 returns the messages to the queue now, like `defer`."""

    lease: Annotated[float, Meta(ge=0, le=30 * 24 * 3600)] | None = None


class Settled(ServerValue, kw_only=True):
    """How many messages were settled."""

    settled: int


class SaveState(Wire, kw_only=True):
    """State to save with a message in flight, if its version is still this one; without a value, it is removed."""

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
    """The group of the queue; without one, the group `default`, which every queue has."""

    group: Name | None = None


class PeekQuery(InGroup, kw_only=True):
    """How many of the next messages to show."""

    count: Limit = 1


class ListQuery(InGroup, kw_only=True):
    """Which messages to list: those in a phase that match a condition (see `holdfast ls --where`)."""

    phase: Phase = "ready"
    where: Where | None = None
    limit: Limit = 100
    bodies: bool = True
    after: After | None = None


class Listed(Said, kw_only=True):
    """A listed message, with its phase and its last error. A message without an offset is delayed."""

    offset: int | None = None  # type: ignore[assignment]
    phase: Phase = "ready"
    attempts: int = 0
    holder: str = ""
    reason: str = ""
    error: str = ""
    due_ms: int = 0
    lease_until_ms: int = 0


class Messages(ServerValue, kw_only=True):
    """Messages, shown without taking them."""

    messages: list[Said]


class ListedMessages(ServerValue, kw_only=True):
    """Listed messages with their phases. If there may be more, pass `next` as `after` to get the next page.

    A page can have few messages, or none, and still be followed by more: one call examines only a limited number
    (`scanned`). `damaged` counts those that are left out because they cannot be read.
    """

    messages: list[Listed]
    next: str = ""
    scanned: int = 0
    damaged: int = 0


class LookupQuery(InGroup, kw_only=True):
    """The id of a message, or of the dead letter that it became."""

    id: Annotated[str, Meta(min_length=1, max_length=300)]


class Whole(Listed, kw_only=True):
    """Everything known about a message. Times are milliseconds since 1970, or 0 if there is none."""

    leased_at_ms: int = 0
    first_delivery_ms: int = 0
    last_delivery_ms: int = 0
    failures: list[Failure] = msgspec.field(default_factory=list)
    state: Any = None
    history: list[TraceStep] = msgspec.field(default_factory=list)


class Cancelled(ServerValue, kw_only=True):
    """Whether the message was cancelled; it is too late once a consumer has it."""

    cancelled: bool


class MessageChanged(ServerValue, kw_only=True):
    """Whether the message was changed; false if there was nothing to do, because its phase is different by now."""

    changed: bool


class Seek(InGroup, kw_only=True):
    """The new position: the start, the end, an offset or a time."""

    to: Literal["start", "end"] | None = None
    offset: Number | None = None
    time: Instant | None = None
    partition: PartitionNumber | None = None


class Sought(ServerValue, kw_only=True):
    """The group's new position."""

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
    """The reason for the pause, shown wherever the group is listed."""

    reason: Annotated[str, Meta(max_length=MOST_REASON_CHARS)] = ""


class PauseTold(ServerValue, kw_only=True):
    """When and why the group was paused, or null; `changed` is false if the call changed nothing."""

    changed: bool
    paused: Pause | None


class Purged(ServerValue, kw_only=True):
    """How many messages were dropped."""

    purged: int


class Committed(ServerValue, kw_only=True):
    """For each partition, the end of the contiguous run of settled messages."""

    offsets: dict[str, int]


class WatchQuery(InGroup, kw_only=True):
    """What to watch: each message as it arrives (with its body, if asked for), and the queue's counts."""

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
    """A dead letter: the message, every error, the reason, and its original position."""

    original_id: str
    original_offset: int
    original_timestamp: Instant
    dead_at: Instant
    failures: list[Failure] = msgspec.field(default_factory=list)
    first_delivery: Instant | None = None
    last_delivery: Instant | None = None
    state: Any = None


class Letters(ServerValue, kw_only=True):
    """Dead letters, oldest first. If there may be more, pass `next` as `after` to get the next page.

    A page can have few dead letters, or none, and still be followed by more: one call examines only a limited number
    (`scanned`). `damaged` counts those that are left out because they cannot be read.
    """

    letters: list[Letter]
    next: str = ""
    scanned: int = 0
    damaged: int = 0


class DeadGroups(ServerValue, kw_only=True):
    """Dead letters by reason and kind of error, the most frequent first."""

    groups: list[DeadGroup]


class Purge(InGroup, kw_only=True):
    """Which dead letters to drop permanently: by id, by a condition, or all; `dry_run` only lists them."""

    ids: Annotated[list[LetterId], Meta(max_length=100_000)] | None = None
    where: Where | None = None
    limit: Annotated[int, Meta(ge=0, le=2**53)] | None = None
    dry_run: bool = False


class Redrive(Purge, kw_only=True):
    """Which dead letters to redrive, and how many per second; into the topic `to`, they become new messages."""

    to: Name | None = None

    rate: Annotated[float, Meta(gt=0, le=1_000_000)] | None = None


class RedriveTold(ServerValue, kw_only=True):
    """The result of a redrive or a purge; in a stream, its progress, with `ended` in the last line."""

    matched: int
    done: int
    ids: list[str] = msgspec.field(default_factory=list)
    ended: bool = True


class DelayedQuery(Wire, kw_only=True):
    """How many delayed messages to list, after which one, and whether to include their bodies."""

    limit: Limit = 100
    bodies: bool = True
    after: After | None = None


class SearchQuery(Wire, kw_only=True):
    """What to search for, in all queues that you may read: terms that must all match.

    A term is an id, `key=VALUE`, a header as `NAME=VALUE`, a field of a JSON body as `$.order.id=7`, `time=2026-11-17`
    (or `time>`, `time<`, `age<1h`), `queue=TEXT`, or any text. `where CONDITION` takes a condition.
    """

    q: Annotated[str, Meta(min_length=1, max_length=1_000)]
    limit: Annotated[int, Meta(ge=1, le=1_000)] = 50
    after: Annotated[str, Meta(max_length=1_000)] = ""


class FoundMessage(Listed, kw_only=True):
    """A message that was found, without its body. `group` is the group whose phase it has."""

    phase: Literal["ready", "leased", "delayed", "done", "dead"] = "ready"
    group: str = "default"


class QueueSearched(ServerValue, kw_only=True):
    """How many of a queue's messages this call examined; `whole` is true if it reached the end."""

    queue: str
    searched: int = 0
    messages: int = 0
    whole: bool = False
    problem: str = ""


class SearchAnswer(ServerValue, kw_only=True):
    """The messages that were found, and what was searched.

    One call examines a limited number of messages. Pass `next` as `after` to continue; it is empty once everything was
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


# Schedules.


class PutSchedule(Wire, kw_only=True):
    """A schedule: the topic and the message of its firings, and when it fires: one of `cron`, `every` and `at`.

    The body is bytes (`body`, base64 in JSON), a text or a JSON value. `every` and `jitter` are in seconds.
    """

    topic: Name
    body: bytes | None = None
    text: str | None = None
    json: Any | UnsetType = UNSET
    key: str | None = None
    headers: HeaderMap = {}
    priority: Priority = 0
    cron: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    timezone: Annotated[str, Meta(min_length=1, max_length=200)] = "UTC"
    every: Annotated[float, Meta(ge=1, le=100 * 365 * 24 * 3600)] | None = None
    at: Instant | None = None
    misfire: Misfire = "run_once"
    jitter: Annotated[float, Meta(ge=0, le=24 * 3600)] = 0


class ScheduleList(ServerValue, kw_only=True):
    """The schedules that you may see, by name."""

    schedules: list[Schedule]


class ScheduleDeleted(ServerValue, kw_only=True):
    """Whether there was such a schedule."""

    deleted: bool


class NextDuesQuery(Wire, kw_only=True):
    """How many times to list."""

    count: Annotated[int, Meta(ge=1, le=1_000)] = 5


class NextDues(ServerValue, kw_only=True):
    """The next times at which a schedule falls due, the soonest first."""

    times: list[datetime]
