# Generated from aio/ports.py by tools/sync.py: do not edit it, edit that one and run "make sync".
"""The ports behind the faces: an engine here, the owner's socket, or a server. Their arguments are checked already."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol

from holdfast.api.arguments import MessageOutcome, Question, ReceiveRequest
from holdfast.api.contents import Contents, Taken
from holdfast.api.drafts import Bodies, MessageOptions, NewMessage, PublishRequest, Stored, StreamRequest
from holdfast.api.listing import DeadGroup, DeadLetter, DeadLettersRequest, Found, Listed, Redriven, Where
from holdfast.api.locks import Document, KeptLock, Lock, LockInfo, LockRequest
from holdfast.api.topics import (
    ConsumedPartition,
    GroupInfo,
    Listener,
    MemberRequest,
    QueueRequest,
    SeekTarget,
    StreamMessage,
    TopicInfo,
)
from holdfast.membership import TopicPartition
from holdfast.model import BodyKind, CodecName, Durability, Retained
from holdfast.settings import BrokerSettings, ConsumerSettings, TopicSettings

if TYPE_CHECKING:
    from holdfast.api.listing import SearchPage
    from holdfast.api.schedules import Firing, Schedule, ScheduleRequest
    from holdfast.api.schemas import SchemaRequest
    from holdfast.api.sync.producer import Producer
    from holdfast.api.transactions import TransactionInfo, TransactionRequest
    from holdfast.broker.metrics import Compacted, Observer, QueueStats
    from holdfast.broker.samples import Samples
    from holdfast.broker.streams import PartitionLag, Reset, ResetEffect, To
    from holdfast.broker.tracing import TraceStep
    from holdfast.broker.tracing.log import TraceStats
    from holdfast.broker.workers import Order, WorkerInfo, WorkerReport
    from holdfast.schemas.registry import Level, SchemaVersion, VersionNumber
    from holdfast.storage.compaction import KeysCompacted
    from holdfast.storage.view import OnDamage


class BrokerPort(Protocol):
    """The topics of a data folder or a server. Opens the ports of groups, consumers and locks."""

    body_type: Any  # what bodies are where nothing else is said

    @property
    def place(self) -> str:
        """The data folder, or the address of the server."""

    @property
    def settings(self) -> BrokerSettings:
        """The settings in force, as far as they are known here."""

    @property
    def closed(self) -> bool:
        """Whether it is closed."""

    @property
    def shared(self) -> bool:
        """Whether other processes can use the topics while this one has them open."""

    def after_fork(self) -> BrokerPort:
        """Return the port for a child after a fork."""

    def queue(self, request: QueueRequest) -> GroupPort:
        """Open the default group of a topic. Both are created if needed."""

    def group(self, topic: str, name: str, start: str, bodies: Bodies, changes: Mapping[str, Any]) -> GroupPort:
        """Open a group in queue mode, which is created if needed."""

    def existing_group(self, topic: str, name: str, bodies: Bodies) -> GroupPort:
        """Open an existing group in queue mode, brought up to date. Raises UnknownGroup if it does not exist."""

    def member(self, request: MemberRequest) -> ConsumerPort:
        """Return a member of a group in stream mode that has not joined yet."""

    def producer(self, name: str | None, body_type: Any, changes: Mapping[str, Any], *, resume: bool) -> Producer:
        """Return a producer, which is closed with the port."""

    def locks(self) -> LocksPort:
        """The locks and documents."""

    def schedules(self) -> SchedulesPort:
        """The schedules."""

    def schemas(self) -> SchemasPort:
        """The registry of schemas."""

    def transactions(self) -> TransactionsPort:
        """The transactions."""

    def create_topic(
        self, name: str, partitions: int | None, changes: Mapping[str, Any], *, exist_ok: bool, shard: int | None = None
    ) -> TopicInfo:
        """Create a topic; in a cluster, in a shard."""

    def move_topic(self, name: str, shard: int, progress: Callable[[int, int], None] | None) -> TopicInfo:
        """Move a topic to another shard of a cluster."""

    def alter_topic(self, name: str, changes: Mapping[str, Any]) -> TopicInfo:
        """Change settings of a topic."""

    def add_partitions(self, name: str, count: int) -> TopicInfo:
        """Add partitions to a topic."""

    def describe_topic(self, name: str) -> TopicInfo:
        """Return the partitions, groups and settings of a topic."""

    def topics(self) -> list[str]:
        """Return the names of all topics."""

    def delete_topic(self, name: str) -> None:
        """Delete a topic."""

    def compact_topic(self, name: str) -> KeysCompacted:
        """Compact the topic by key: only the last message of each key is kept."""

    def apply_retention(self, name: str) -> Retained:
        """Delete what the topic's retention settings no longer keep."""

    def compact_groups(self, name: str) -> Compacted:
        """Delete what every group of the topic has handled, even if retention would keep it."""

    def unfit(self, topic: str, messages: Sequence[NewMessage]) -> int | None:
        """Return the index of the first message that cannot be stored; None if that is unknown."""

    def publish_now(
        self,
        topic: str,
        body: Any,
        partition: int | None,
        durability: Durability | None,
        options: MessageOptions | None,
        /,
    ) -> Stored | None:
        """Store plain bytes, or a body with options, if that needs no waiting; otherwise return None."""

    def publish_plain(
        self, topic: str, body: bytes, partition: int | None, durability: Durability | None
    ) -> Stored | None:
        """Store a message without options on the fast path; returns None if that is not possible."""

    def publish(self, topic: str, request: PublishRequest) -> Sequence[Stored]:
        """Store bodies or NewMessages. Of those that go to one partition, all are stored or none."""

    def upload(self, topic: str, request: StreamRequest) -> Stored:
        """Store one message whose body is read from the stream."""

    def read(
        self, topic: str, partition: int, offset: int | None, limit: int, on_damage: OnDamage
    ) -> list[Contents[Any]]:
        """Return messages of a partition from an offset on."""

    def groups(self, topic: str | None) -> list[GroupInfo]:
        """Return the groups of one topic, or of all topics, in queue mode and in stream mode."""

    def workers(self) -> list[WorkerInfo]:
        """Return the workers that report themselves, or did within the last hour."""

    def order_worker(self, name: str, order: Order) -> list[str]:
        """Tell the workers of this name, or the one with this id, what to do; return their ids."""

    def delete_group(self, name: str, topic: str | None) -> None:
        """Delete a group: in queue mode on one topic, or in stream mode as a whole."""

    def reset_offsets(self, group: str, topic: str, to: To, partition: int | None, *, dry_run: bool) -> list[Reset]:
        """Move the position of a group; with `dry_run`, only return what would change."""

    def effects(self, group: str, resets: Sequence[Reset]) -> list[ResetEffect]:
        """Return what resets would do to the messages of a group, as exactly as is known here."""

    def trace(self, message_id: str) -> list[TraceStep]:
        """Return the traced steps of a message."""

    def search(self, text: str, limit: int, after: str) -> SearchPage:
        """Search the messages of all queues for what somebody typed, from the start or further."""

    def search_traces(self, question: Question, limit: int, *, last: bool) -> list[TraceStep]:
        """Return the matching steps: the first ones, or the last."""

    def trace_stats(self, question: Question) -> TraceStats:
        """Summarize the matching steps."""

    def samples(self, topic: str | None, group: str | None, span_ms: int) -> Samples:
        """Return the samples of a group, of a topic, or of all topics together, up to now."""

    def sync(self) -> None:
        """Wait until everything done so far is on disk."""

    def close(self) -> None:
        """Flush producers and close."""


# The port behind a consumer: a member of a group in this process or on a server.


class ConsumerPort(Protocol):
    """One member of a group in stream mode. Arguments are checked already, and calls do not overlap.

    `returned` are partitions of which messages were polled and not handed out: those come again.
    """

    request: MemberRequest
    settings: ConsumerSettings

    @property
    def partitions(self) -> Mapping[TopicPartition, ConsumedPartition]:
        """The partitions assigned to the member now."""

    @property
    def member_id(self) -> str | None:
        """The member's id in the group, or None before it has joined."""

    @property
    def left(self) -> bool:
        """Whether it has left the group for good."""

    @property
    def closed(self) -> bool:
        """Whether it is closed: it has left, or its folder or connection is closed."""

    def check_open(self) -> None:
        """Raise Closed if it is closed."""

    def join(self) -> None:
        """Join the group and take over the assigned partitions."""

    def poll(
        self, count: int, timeout_ms: int | None, returned: Collection[TopicPartition]
    ) -> list[StreamMessage[Any]]:
        """Return up to `count` messages, or [] after the timeout. All messages returned before are now handled."""

    def hand_out(self, found: Sequence[StreamMessage[Any]]) -> None:
        """Note that these messages are returned to the user."""

    def needs_attention(self) -> bool:
        """Between two messages of an iteration, note that the consumer is alive; return whether to call `attend`."""

    def attend(self) -> bool:
        """Commit if that is due. Returns whether messages that were read ahead must be discarded."""

    def commit(self, offsets: Mapping[TopicPartition, int], durability: Durability | None) -> None:
        """Commit all of these offsets, or none."""

    def committed(self, topic: str, partition: int) -> int | None:
        """Return the offset that the group has committed for a partition."""

    def seek(self, where: SeekTarget, returned: Collection[TopicPartition]) -> None:
        """Continue reading elsewhere."""

    def lag(self) -> list[PartitionLag]:
        """Return how far the member is behind in each of its partitions."""

    def leave(self) -> None:
        """Commit what is handled (with auto_commit) and leave; a static member stays one until its session ends."""


def tell(listener: Listener | None, places: list[TopicPartition]) -> None:
    """Call the user's listener with the partitions that were assigned or revoked."""
    if listener is not None:
        listener(places)


# The port behind a group: an engine in this process, the owner's socket, or a server.
#
# A face checks what it is given and translates it; a port acts. Durations come as milliseconds, errors as text, and a
# message that was taken stays what the port made of it, a `Taken`, until it is settled.


class GroupPort(Protocol):
    """One group of one topic."""

    topic: str
    group: str
    bodies: Bodies

    @property
    def place(self) -> str:
        """The data folder, or the address of the server."""

    @property
    def where(self) -> str:
        """The place as part of a sentence, for error messages."""

    @property
    def settings(self) -> TopicSettings:
        """The group's settings."""

    @property
    def kept_bodies(self) -> BodyKind | None:
        """The kind of bodies stored with the topic, if it was opened with one."""

    @property
    def closed(self) -> bool:
        """Whether it is closed."""

    def check_open(self) -> None:
        """Raise Closed if it is closed."""

    def after_fork(self) -> Any:
        """Return the port for a child after a fork."""

    # Receiving

    def take_next(self) -> Taken | None:
        """Return the next message if that needs no waiting, otherwise None."""

    def take(self, wanted: ReceiveRequest) -> Sequence[Taken]:
        """Lease ready messages, up to `wanted.count`; waits for the first one."""

    def resume(self, receipt: str) -> Taken:
        """Return the message of a receipt. Raises LeaseLost if its lease has ended."""

    def holds(self, receipt: str) -> bool:
        """Return whether the receipt is of a delivery of this group whose lease has not ended."""

    # Messages in flight

    def ack_now(self, taken: Any) -> bool:
        """Ack one message if that needs no waiting; otherwise return False."""

    def ack(self, taken: Sequence[Any], durability: Durability | None) -> None:
        """Ack messages in one call. LeaseLost names those whose lease has ended; the others are acked."""

    def nack(self, taken: Sequence[Any], delay_ms: int | None, error: str) -> None:
        """Return messages to the queue after a failure."""

    def defer(self, taken: Any, delay_ms: int) -> None:
        """Return a message to the queue without counting an attempt."""

    def release(self, taken: Any) -> None:
        """Return a message whose handler was interrupted to the queue, without counting an attempt if possible."""

    def reject(self, taken: Any, reason: str) -> None:
        """Make a message a dead letter."""

    def extend(self, taken: Any, lease_ms: int | None) -> None:
        """Restart the lease, with this length or the group's own."""

    def settle(self, receipts: Sequence[str], outcome: MessageOutcome, durability: Durability | None) -> None:
        """Say what became of messages, by their receipts. LeaseLost names those that were lost; the others are settled.

        For callers that have nothing but the receipt: the message is not read again for that.
        """

    def receipt(self, taken: Any) -> str:
        """Return the receipt of a delivery."""

    def lost(self, taken: Any) -> bool:
        """Return whether the lease has ended."""

    def ends_ns(self, taken: Any) -> int:
        """Return when the lease ends, in nanoseconds since 1970; 0 if it has ended."""

    def phase(self, taken: Any) -> tuple[str, int]:
        """Return the phase of a message, and when its lease or delay ends, in ms since 1970 (0 in other phases)."""

    def drop(self, taken: Any) -> None:
        """Return a message to the queue that was dropped without being settled; called by its finalizer."""

    def state_version(self, taken: Any) -> int:
        """Return the version of the message's state; 0 if it has none."""

    def load_state(self, taken: Any) -> tuple[Any, int]:
        """Return the state of a message and its version."""

    def save_state(self, taken: Any, version: int, content: bytes | None, durability: Durability | None) -> int:
        """Replace the state if it still has this version. Returns the new version."""

    # Inspecting and seeking

    def peek(self, count: int) -> list[Contents[Any]]:
        """Return the next messages without leasing them."""

    def cancel(self, message_id: str) -> bool:
        """Cancel a ready or delayed message. Returns False if it is too late."""

    def take_back(self, message_id: str) -> bool:
        """End the lease of a message. Returns False if nobody holds it."""

    def run_now(self, message_id: str) -> bool:
        """End the delay of a message, or its wait for a retry. Returns False if it has none."""

    def history(self, message_id: str) -> list[TraceStep]:
        """Return every step of a message that is still stored."""

    def look_up(self, message_id: str) -> Found | None:
        """Return everything known about a message, whatever its phase; None if it does not exist (any more)."""

    def oldest_ready_ns(self) -> int | None:
        """Return when the oldest ready message was published; None if none is ready."""

    def committed(self) -> dict[int, int]:
        """Return, for each partition, the offset below which every message is settled."""

    def seek(self, to: str | None, offset: int | None, time: datetime | None, partition: int | None) -> int:
        """Move the group's position."""

    def messages(self, phase: str, where: Where, limit: int | None) -> Iterator[Listed[Any]]:
        """Iterate over the messages in one phase that match the condition."""

    def letter(self, letter_id: str) -> DeadLetter[Any]:
        """Return one dead letter."""

    def letter_id_of(self, message_id: str) -> str | None:
        """Return the id of the dead letter that a message became, or None if there is none (any more)."""

    def letter_groups(self, where: Where) -> list[DeadGroup]:
        """Group dead letters by reason and kind of error."""

    def redrive(self, request: DeadLettersRequest) -> Redriven:
        """Redrive dead letters."""

    def purge_letters(self, request: DeadLettersRequest) -> Redriven:
        """Delete dead letters."""

    def qsize(self) -> int:
        """Return the number of ready messages."""

    def stats(self) -> QueueStats:
        """Return the number of messages in each phase, and more."""

    def samples(self, span_ms: int) -> Samples:
        """Return the samples of this group up to now."""

    def pause_group(self, reason: str) -> bool:
        """Pause the group. Returns False if it was paused already; then nothing changes, not even the reason."""

    def resume_group(self) -> bool:
        """Resume the group. Returns False if it was not paused."""

    def report_worker(self, report: WorkerReport) -> Order | None:
        """List a worker of this group, and return what it was told to do and has not done yet."""

    def purge(self) -> int:
        """Drop every message that is not in flight, and return how many."""

    def compact(self) -> Compacted:
        """Delete messages that are done."""

    def apply_retention(self) -> Retained:
        """Delete what the topic's retention settings no longer keep."""

    def observe(self, observer: Observer | None) -> None:
        """Report every count and duration to this observer from now on; None removes it."""

    # Publishing

    def put_now(
        self, body: Any, durability: Durability | None, options: MessageOptions | None = None, /
    ) -> Stored | None:
        """Store plain bytes, or a body with options, if that needs no waiting; otherwise return None."""

    def put_plain(self, body: bytes, durability: Durability | None) -> Stored | None:
        """Store a message without options on the fast path; returns None if that is not possible."""

    def put(self, messages: Iterable[Any], durability: Durability | None, codec: CodecName | None) -> Sequence[Stored]:
        """Store bodies or NewMessages. Of those that go to one partition, all are stored or none."""

    def upload(self, request: StreamRequest) -> Stored:
        """Store one message whose body is read from the stream."""

    def sync(self) -> None:
        """Wait until everything done so far, including acks, is on disk."""

    def close(self) -> None:
        """Close this view, and what was opened only for it."""


# The port behind locks and documents: an engine in this process or a server. Arguments are checked already.


class LocksPort(Protocol):
    """The locks and documents of a data folder."""

    @property
    def holder(self) -> str:
        """The default owner of a lock: this process."""

    def acquire(self, wanted: LockRequest) -> Lock:
        """Acquire the lock, after waiting in line if requested."""

    def keepalive(self, lease_id: str, lease_ms: int | None) -> Lock:
        """Renew the lease, for `lease_ms` or its previous length."""

    def release(self, lease_id: str) -> None:
        """End the lease."""

    def force_release(self, name: str) -> bool:
        """End the lease of the current holder. Returns False if nobody holds the lock."""

    def describe(self, name: str) -> LockInfo:
        """Return the state of one lock."""

    def held_locks(self) -> list[LockInfo]:
        """Return the state of every lock that is held."""

    def keep(self, lock: Lock) -> KeptLock:
        """Renew the lease from now on, until `end` is called."""

    def document(self, name: str) -> Document | None:
        """Return the document with this name, or None."""

    def update_document(self, name: str, content: bytes, version: int | None, lease_id: str | None) -> Document:
        """Write JSON, provided that the document has this version and the lease is valid, if given."""

    def remove_document(self, name: str, version: int | None, lease_id: str | None) -> bool:
        """Remove the document under the same conditions. Returns False if it did not exist."""

    def document_names(self) -> list[str]:
        """Return the names of all documents."""


class SchedulesPort(Protocol):
    """The schedules of a data folder."""

    def put(self, request: ScheduleRequest) -> Schedule:
        """Create or change a schedule."""

    def get(self, name: str) -> Schedule | None:
        """Return the schedule with this name, or None."""

    def all(self) -> list[Schedule]:
        """Return all schedules by name."""

    def delete(self, name: str) -> bool:
        """Delete the schedule. Returns False if it did not exist."""

    def pause(self, name: str, *, paused: bool) -> Schedule:
        """Pause the schedule, or resume it."""

    def run_now(self, name: str) -> Firing:
        """Publish its message now."""

    def next_dues(self, name: str, count: int) -> list[datetime]:
        """Return when it falls due next."""


class SchemasPort(Protocol):
    """The registry of schemas of a data folder."""

    def register(self, request: SchemaRequest) -> SchemaVersion:
        """Register a schema."""

    def problems(self, request: SchemaRequest, version: VersionNumber | None) -> list[str]:
        """Return why a schema is not compatible."""

    def find(self, request: SchemaRequest) -> SchemaVersion:
        """Return the version that is this schema."""

    def version(self, subject: str, version: VersionNumber, *, deleted: bool) -> SchemaVersion:
        """Return a version."""

    def by_id(self, number: int) -> SchemaVersion:
        """Return a version with this id."""

    def subjects(self, *, deleted: bool) -> list[str]:
        """Return the subjects."""

    def versions(self, subject: str, *, deleted: bool) -> list[int]:
        """Return the numbers of a subject's versions."""

    def delete(self, subject: str, version: VersionNumber | None, *, permanent: bool) -> list[int]:
        """Delete versions."""

    def level(self, subject: str | None) -> Level:
        """Return the level that applies."""

    def set_level(self, level: Level | None, subject: str | None) -> None:
        """Set a level, or remove it."""


class TransactionsPort(Protocol):
    """The transactions of a data folder."""

    @property
    def place(self) -> str:
        """The data folder, or the address of the server."""

    def mono_ns(self) -> int:
        """Return the time by a clock that nobody sets."""

    def begin(self, name: str | None) -> tuple[str, int]:
        """Begin a transaction; return its name and its epoch."""

    def commit(self, request: TransactionRequest) -> list[Stored]:
        """Do all of it, or nothing; return where the messages are."""

    def all(self) -> list[TransactionInfo]:
        """Return all transactions by name."""

    def forget(self, name: str) -> bool:
        """Forget a name. Returns False if it is unknown."""
