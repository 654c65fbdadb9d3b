"""What stands behind a face: an engine in this process, the owner's socket, or a server. Arguments come checked."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from inspect import isawaitable
from typing import Any, Protocol

from holdfast.api.aio.producer import AsyncProducer
from holdfast.api.arguments import MessageOutcome, Question, ReceiveRequest
from holdfast.api.bodies import Bodies
from holdfast.api.consumers import ConsumedPartition, Listener, MemberRequest, SeekTarget, StreamMessage
from holdfast.api.contents import Contents, Taken
from holdfast.api.drafts import NewMessage, PublishRequest, Stored, StreamRequest
from holdfast.api.listing import DeadGroup, DeadLetter, DeadLettersRequest, Found, Listed, Redriven, Where
from holdfast.api.locks import Document, KeptLock, Lock, LockInfo, LockRequest
from holdfast.api.topics import GroupInfo, QueueRequest, TopicInfo
from holdfast.broker.group import Compacted, QueueStats
from holdfast.broker.metrics import Observer
from holdfast.broker.streams.offsets import PartitionLag, Reset, ResetEffect, To
from holdfast.broker.tracing.log import TraceStats, TraceStep
from holdfast.membership.assignment import TopicPartition
from holdfast.model import BodyKind, CodecName, Durability, Retained
from holdfast.settings import BrokerSettings, ConsumerSettings, TopicSettings
from holdfast.storage.compaction import KeysCompacted
from holdfast.storage.view import OnDamage


class AsyncBrokerPort(Protocol):
    """The topics of a data folder, wherever it is. It opens the ports of groups, consumers and locks."""

    body_type: Any  # what bodies are where nothing else is said

    @property
    def place(self) -> str:
        """The data folder, or the address of the server."""

    @property
    def settings(self) -> BrokerSettings:
        """Those in force, as far as they are known here."""

    @property
    def closed(self) -> bool:
        """Whether it can be used no more."""

    @property
    def shared(self) -> bool:
        """Whether other processes can use the topics while this one has them open."""

    def after_fork(self) -> AsyncBrokerPort:
        """The port that a child uses instead."""

    async def queue(self, request: QueueRequest) -> AsyncGroupPort:
        """The default group of a topic, both made where there is none."""

    async def group(
        self, topic: str, name: str, start: str, bodies: Bodies, changes: Mapping[str, Any]
    ) -> AsyncGroupPort:
        """A group in queue mode, made where there is none."""

    async def existing_group(self, topic: str, name: str, bodies: Bodies) -> AsyncGroupPort:
        """A group in queue mode, with everything done that is due by now; UnknownGroup where there is none."""

    async def member(self, request: MemberRequest) -> AsyncConsumerPort:
        """A member of a group in stream mode, which has not joined yet."""

    def producer(self, name: str | None, body_type: Any, changes: Mapping[str, Any], *, resume: bool) -> AsyncProducer:
        """A producer; it is closed with the port."""

    def locks(self) -> AsyncLocksPort:
        """The locks and documents."""

    async def create_topic(
        self, name: str, partitions: int | None, changes: Mapping[str, Any], *, exist_ok: bool
    ) -> TopicInfo:
        """Make a topic."""

    async def alter_topic(self, name: str, changes: Mapping[str, Any]) -> TopicInfo:
        """Change settings of a topic."""

    async def add_partitions(self, name: str, count: int) -> TopicInfo:
        """Give the topic more partitions."""

    async def describe_topic(self, name: str) -> TopicInfo:
        """What a topic is and holds."""

    async def topics(self) -> list[str]:
        """The names of all topics."""

    async def delete_topic(self, name: str) -> None:
        """Take a topic away."""

    async def compact_topic(self, name: str) -> KeysCompacted:
        """Of each key keep the last message."""

    async def apply_retention(self, name: str) -> Retained:
        """Drop what the topic's retention settings let go."""

    async def compact_groups(self, name: str) -> Compacted:
        """Drop what every group of the topic has handled, whatever retention says."""

    async def unfit(self, topic: str, messages: Sequence[NewMessage]) -> int | None:
        """The index of the first message that cannot be stored; None where that cannot be told."""

    async def publish_plain(
        self, topic: str, body: bytes, partition: int | None, durability: Durability | None
    ) -> Stored | None:
        """Store a message that is nothing but its bytes; None where it has to go the long way."""

    async def publish(self, topic: str, request: PublishRequest) -> list[Stored]:
        """Store bodies or NewMessages: all that go to one partition, or none of them."""

    async def upload(self, topic: str, request: StreamRequest) -> Stored:
        """Store all that the stream gives as one message."""

    async def read(
        self, topic: str, partition: int, offset: int | None, limit: int, on_damage: OnDamage
    ) -> list[Contents[Any]]:
        """Messages of a partition from an offset on."""

    async def groups(self, topic: str | None) -> list[GroupInfo]:
        """The groups of a topic, or of all, in both modes."""

    async def delete_group(self, name: str, topic: str | None) -> None:
        """Forget a group: on one topic in queue mode, or one in stream mode as a whole."""

    async def reset_offsets(
        self, group: str, topic: str, to: To, partition: int | None, *, dry_run: bool
    ) -> list[Reset]:
        """Let a group go on from elsewhere, or say what that would be."""

    async def effects(self, group: str, resets: Sequence[Reset]) -> list[ResetEffect]:
        """What resets would do to the messages of a group, counted as exactly as can be told from here."""

    async def trace(self, message_id: str) -> list[TraceStep]:
        """The life of a message."""

    async def search_traces(self, question: Question, limit: int, *, last: bool) -> list[TraceStep]:
        """The steps that fit: the first ones, or the last."""

    async def trace_stats(self, question: Question) -> TraceStats:
        """The steps that fit, in numbers."""

    async def sync(self) -> None:
        """Return when everything said so far is on disk."""

    async def close(self) -> None:
        """Let producers send what they have, and let go."""


# What stands behind a consumer: a member of a group in this process, or one that a server keeps.


class AsyncConsumerPort(Protocol):
    """One member of a group in stream mode. Arguments come checked, and calls one at a time.

    `returned` are partitions of which messages were polled and not handed out: those come again.
    """

    request: MemberRequest
    settings: ConsumerSettings

    @property
    def partitions(self) -> Mapping[TopicPartition, ConsumedPartition]:
        """The partitions that are the member's now."""

    @property
    def member_id(self) -> str | None:
        """The member's name in the group, if it has joined."""

    @property
    def left(self) -> bool:
        """Whether it has left the group for good."""

    @property
    def closed(self) -> bool:
        """Whether it can be used no more: it has left, or what stands behind it is closed."""

    def check_open(self) -> None:
        """Raise Closed where it can be used no more."""

    async def join(self) -> None:
        """Join the group, and take over what it gives."""

    async def poll(
        self, count: int, timeout_ms: int | None, returned: Collection[TopicPartition]
    ) -> list[StreamMessage[Any]]:
        """Up to `count` messages; waits for at least one, [] after the time. All handed out before is handled now."""

    def hand_out(self, found: Sequence[StreamMessage[Any]]) -> None:
        """What was polled reaches the user."""

    def needs_attention(self) -> bool:
        """Between two messages of an iteration: note that the consumer lives, and whether to call `attend`."""

    async def attend(self) -> bool:
        """Commit where that is due; answers whether what was read ahead must not be handed out any more."""

    async def commit(self, offsets: Mapping[TopicPartition, int], durability: Durability | None) -> None:
        """Commit all of these, or none."""

    async def committed(self, topic: str, partition: int) -> int | None:
        """The offset that the group has committed there."""

    async def seek(self, where: SeekTarget, returned: Collection[TopicPartition]) -> None:
        """Read on elsewhere."""

    async def lag(self) -> list[PartitionLag]:
        """How far behind the member is in each of its partitions."""

    async def leave(self) -> None:
        """Commit what is handled (with auto_commit), and leave; a static member stays one until its session ends."""


async def tell(listener: Listener | None, places: list[TopicPartition]) -> None:
    """Tell the user what was assigned or revoked."""
    if listener is not None:
        answer = listener(places)  # sync: listener(places)
        if isawaitable(answer):  # async only: a thread is told by a plain function
            await answer


# What stands behind a group: an engine in this process, the owner's socket, or a server.
#
# A face checks what it is given and translates it; a port acts. Durations come as milliseconds, errors as text, and a
# message that was taken stays what the port made of it, a `Taken`, until it is settled.


class AsyncGroupPort(Protocol):
    """One group of one topic, wherever it is."""

    topic: str
    group: str
    bodies: Bodies

    @property
    def place(self) -> str:
        """The data folder, or the address of the server."""

    @property
    def where(self) -> str:
        """The same, as a part of a sentence."""

    @property
    def settings(self) -> TopicSettings:
        """The group's settings."""

    @property
    def kept_bodies(self) -> BodyKind | None:
        """What the bodies of the topic are, if whoever opened it said so."""

    @property
    def closed(self) -> bool:
        """Whether it can be used no more."""

    def check_open(self) -> None:
        """Closed, where it can be used no more."""

    def after_fork(self) -> Any:
        """The port that a face uses in a child after a fork."""

    # Receiving

    def take_next(self) -> Taken | None:
        """The next message, if it is at hand and nothing has to be waited for."""

    async def take(self, wanted: ReceiveRequest) -> Sequence[Taken]:
        """What is ready, up to so many; waits for the first one."""

    async def resume(self, receipt: str) -> Taken:
        """The message that a receipt stands for; LeaseLost if it is no longer held."""

    async def holds(self, receipt: str) -> bool:
        """Whether the receipt proves a delivery of this group that still holds its message."""

    # Messages in flight

    def ack_now(self, taken: Any) -> bool:
        """Ack one message, if nothing has to be waited for; False where it has."""

    async def ack(self, taken: Sequence[Any], durability: Durability | None) -> None:
        """Ack messages in one go. LeaseLost names those that were lost; the others are acked."""

    async def nack(self, taken: Sequence[Any], delay_ms: int | None, error: str) -> None:
        """Give messages back after a failure."""

    async def defer(self, taken: Any, delay_ms: int) -> None:
        """Give a message back untouched."""

    async def release(self, taken: Any) -> None:
        """Give back, untouched if that can be, a message whose handler was interrupted."""

    async def reject(self, taken: Any, reason: str) -> None:
        """To the dead letters."""

    async def extend(self, taken: Any, lease_ms: int | None) -> None:
        """Let the lease begin anew; without a length, the group's own."""

    async def settle(self, receipts: Sequence[str], outcome: MessageOutcome, durability: Durability | None) -> None:
        """Say what became of messages, by their receipts. LeaseLost names those that were lost; the others are settled.

        For callers that have nothing but the receipt: the message is not read again for that.
        """

    def receipt(self, taken: Any) -> str:
        """The proof of a delivery as text."""

    def lost(self, taken: Any) -> bool:
        """Whether the lease has ended meanwhile."""

    def ends_ns(self, taken: Any) -> int:
        """When the lease ends by the clock on the wall, in nanoseconds since 1970; 0 where it has ended."""

    async def phase(self, taken: Any) -> tuple[str, int]:
        """Where a message stands now, and when its lease or its delay ends, in ms since 1970; 0 for other phases."""

    def drop(self, taken: Any) -> None:
        """A message was dropped unhandled; called by its finalizer."""

    def state_version(self, taken: Any) -> int:
        """The version of the message's state; 0 where it has none."""

    async def load_state(self, taken: Any) -> tuple[Any, int]:
        """The state of a message and its version."""

    async def save_state(self, taken: Any, version: int, content: bytes | None, durability: Durability | None) -> int:
        """Replace the state, if the version is still this one; answers with the new version."""

    # Looking around, and moving

    async def peek(self, count: int) -> list[Contents[Any]]:
        """The messages that would come next."""

    async def cancel(self, message_id: str) -> bool:
        """Take back a message that nobody works on; False where it is too late."""

    async def history(self, message_id: str) -> list[TraceStep]:
        """Every step of a message that is still kept."""

    async def look_up(self, message_id: str) -> Found | None:
        """Everything known about a message, living, done or dead; None where there is none (any more)."""

    async def oldest_ready_ns(self) -> int | None:
        """When the oldest message that is ready was published; None where none is."""

    async def committed(self) -> dict[int, int]:
        """For each partition the end of the contiguous run of messages that are settled."""

    async def seek(self, to: str | None, offset: int | None, time: datetime | None, partition: int | None) -> int:
        """Go on from there."""

    def messages(self, phase: str, where: Where, limit: int | None) -> AsyncIterator[Listed[Any]]:
        """The messages in a phase that the condition chooses."""

    async def letter(self, letter_id: str) -> DeadLetter[Any]:
        """One dead letter."""

    async def letter_id_of(self, message_id: str) -> str | None:
        """The id of the dead letter that a message became; None where there is none (any more)."""

    async def letter_groups(self, where: Where) -> list[DeadGroup]:
        """Dead letters by reason and kind of error."""

    async def redrive(self, request: DeadLettersRequest) -> Redriven:
        """Put dead letters back."""

    async def purge_letters(self, request: DeadLettersRequest) -> Redriven:
        """Drop dead letters for good."""

    async def qsize(self) -> int:
        """How many messages are ready."""

    async def stats(self) -> QueueStats:
        """How many messages stand where."""

    async def purge(self) -> int:
        """Drop every message that nobody has in flight; answers how many."""

    async def compact(self) -> Compacted:
        """Let go of what is done."""

    async def apply_retention(self) -> Retained:
        """Drop what the topic's retention settings let go."""

    def observe(self, observer: Observer | None) -> None:
        """From now on tell this one of every count and every time; None: nobody."""

    # Publishing

    async def put_plain(self, body: bytes, durability: Durability | None) -> Stored | None:
        """Store a message that is nothing but its bytes; None where it has to go the long way."""

    async def put(
        self, messages: Iterable[Any], durability: Durability | None, codec: CodecName | None
    ) -> list[Stored]:
        """Store bodies or NewMessages: all that go to one partition, or none of them."""

    async def upload(self, request: StreamRequest) -> Stored:
        """Store all that the stream gives as one message."""

    async def sync(self) -> None:
        """Return when everything said so far, acks included, is on disk."""

    async def close(self) -> None:
        """Let go of this view; and of what was opened for it alone."""


# What stands behind locks and documents: an engine in this process, or a server. Arguments come checked.


class AsyncLocksPort(Protocol):
    """The locks and documents of a data folder."""

    @property
    def holder(self) -> str:
        """Who holds a lock where no owner is given: this process."""

    async def acquire(self, wanted: LockRequest) -> Lock:
        """Take the lock, after a wait in line where that is asked for."""

    async def keepalive(self, lease_id: str, lease_ms: int | None) -> Lock:
        """Renew the lease, for `lease_ms` or for as long as before."""

    async def release(self, lease_id: str) -> None:
        """End the lease."""

    async def force_release(self, name: str) -> bool:
        """End the lease of whoever has the lock; False where nobody has it."""

    async def describe(self, name: str) -> LockInfo:
        """The state of one lock."""

    async def held_locks(self) -> list[LockInfo]:
        """The state of every lock that is held."""

    def keep(self, lock: Lock) -> KeptLock:
        """Renew the lease from now on, until `end` is called."""

    async def document(self, name: str) -> Document | None:
        """The document by this name."""

    async def update_document(self, name: str, content: bytes, version: int | None, lease_id: str | None) -> Document:
        """Write JSON, if the document has the version and the lease is good, where these are given."""

    async def remove_document(self, name: str, version: int | None, lease_id: str | None) -> bool:
        """Remove the document on the same conditions; False where there was none."""

    async def document_names(self) -> list[str]:
        """The names of all documents."""
