"""Messages on their way into a partition: what Holdfast notes with one, and where they got to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from typing import Final, NamedTuple, TypeVar

import msgspec

from holdfast.broker.delayed import Delayed
from holdfast.broker.folder.layout import message_id
from holdfast.codec.columns import FLAGS, HEADERS, encode_head
from holdfast.codec.frame import Frame
from holdfast.delivery.group import Failure
from holdfast.errors import UnknownTopic
from holdfast.large import Value
from holdfast.model import Appended, Batch, CodecName, Durability, HeaderPairs, Record
from holdfast.storage import LogReader
from holdfast.storage.log import Log

PREFIX: Final = "holdfast."
CORRELATION_ID: Final = "holdfast.correlation-id"
DEDUP_ID: Final = "holdfast.dedup-id"
DELAYED_ID: Final = "holdfast.delayed-id"
BYTES_HEADERS: Final = "holdfast.bytes-headers"
REDRIVEN_FROM: Final = "holdfast.redriven-from"
ORIGINAL: Final = "holdfast.original"  # of a redriven message: the first one that it was
ONLY_FOR: Final = "holdfast.only-for"  # a message that came back for one group: the others have had it
DEAD: Final = "holdfast.dead"
WRITTEN: Final = "holdfast.written"  # which row of which bulk write it was: one that is resumed skips it

# Flags of a message.
TOMBSTONE: Final = 1 << 0  # the key has no value any more: see key compaction
MOVED: Final = 1 << 1
TEXT_KEY: Final = 1 << 2  # the key was given as text
TEXT_HEADERS: Final = 1 << 3  # so were the values of the headers, but those whose places BYTES_HEADERS names


_Value = TypeVar("_Value")


class Original(msgspec.Struct, frozen=True, gc=False):
    """Where and when a message was published first, before it died and came back for the first time."""

    id: str
    offset: int
    timestamp_ns: int


class DeadNote(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of a message before it died, as JSON in a header of its dead letter."""

    id: str
    topic: str
    partition: int
    group: str
    offset: int
    timestamp_ns: int
    reason: str
    error: str
    attempts: int
    first_ms: int
    last_ms: int
    dead_at_ms: int
    holder: str = ""
    priority: int = 0
    failures: tuple[Failure, ...] = ()
    state: bytes | None = None
    original: Original | None = None  # where it was first, if it had been redriven before
    expires_at_ms: int = 0
    due_at_ms: int = 0

    @property
    def first(self) -> Original:
        """The very first message of those that it was."""
        return self.original or Original(self.id, self.offset, self.timestamp_ns)


encode_original = msgspec.json.Encoder().encode
_decode_original = msgspec.json.Decoder(Original).decode
encode_note = msgspec.json.Encoder().encode
decode_note = msgspec.json.Decoder(DeadNote).decode


def mark(record: Record, name: str) -> bytes | None:
    """The value of one of our own headers."""
    for header, value in record.headers:
        if header == name:
            return value
    return None


def original_of(record: Record) -> Original | None:
    """The first of the messages that a redriven one was; None for one that was published once."""
    text = mark(record, ORIGINAL) if record.flags & MOVED else None
    if text is None:
        return None
    try:
        return _decode_original(text)
    except msgspec.DecodeError:
        return None


def id_of(topic: str, partition: int, record: Record) -> str:
    """The message's id: it keeps the one that it had while it was delayed."""
    delayed_id = mark(record, DELAYED_ID) if record.headers else None
    return message_id(topic, partition, record.offset, None if delayed_id is None else int(delayed_id))


def is_for(record: Record, group: bytes) -> bool:
    """Whether the group is to see the message."""
    if not record.flags & MOVED:
        return True
    only = mark(record, ONLY_FOR)
    return only is None or only == group


def not_for(frame: Frame, group: bytes) -> list[int]:
    """The offsets in a frame of messages that the group is not to see."""
    if not (frame.header.columns & FLAGS and frame.header.columns & HEADERS):
        return []
    headers = frame.columns().span(HEADERS)
    if headers is None or ONLY_FOR.encode() not in bytes(headers):
        return []  # quickly: whatever was delayed is MOVED as well, and for everyone
    return [record.offset for record in frame.records() if not is_for(record, group)]


def users_headers(headers: HeaderPairs) -> tuple[tuple[str, bytes], ...]:
    """The headers without our own."""
    return tuple(pair for pair in headers if not pair[0].startswith(PREFIX))


def column(values: Sequence[_Value], nothing: _Value) -> Sequence[_Value] | None:
    """The column of a batch; None where no message has more than nothing there."""
    return None if all(value == nothing for value in values) else values


def moved_batch(
    records: Sequence[Record],
    headers: Sequence[HeaderPairs],
    *,
    priorities: Sequence[int] = (),
    expires_at_ms: Sequence[int] = (),
    due_at_ms: Sequence[int] | None = None,
) -> Batch:
    """Messages of one log as they are appended to another, with headers that say where they come from."""
    return Batch(
        values=[record.value for record in records],
        keys=column([record.key for record in records], None),
        headers=headers,
        priorities=column(priorities, 0),
        expires_at_ms=column(expires_at_ms, 0),
        due_at_ms=due_at_ms,
        flags=[record.flags | MOVED for record in records],
    )


def moved_records(log: Log | LogReader, offset: int) -> Iterator[Record]:
    """The messages from `offset` on that came from another log."""
    if offset >= log.end:  # nothing there, or a tail that was lost
        return
    for frame in log.read(max(offset, log.start), on_damage="skip"):
        if frame.header.columns & FLAGS:
            for record in frame.records():
                if record.flags & MOVED and record.offset >= offset:
                    yield record


# Messages on their way into a partition, and where they got to.


# A reference has 64 bits: 16 of partition, 47 of offset or delayed id, and one that says which of these.
_PARTITION_SHIFT: Final = 48
_IN_PARTITION: Final = (1 << _PARTITION_SHIFT) - 1


class Draft(msgspec.Struct, frozen=True, gc=False):
    """A message to be published, checked and with our own headers."""

    value: Value
    key: bytes | None = None
    headers: HeaderPairs = ()
    priority: int = 0
    expires_at_ms: int = 0
    due_at_ms: int = 0
    dedup_id: bytes | None = None
    flags: int = 0


class Manner(NamedTuple):
    """How messages are to be written. `any_size`: their sizes were looked at before."""

    durability: Durability | None
    codec: CodecName | None
    any_size: bool


class Place(msgspec.Struct, frozen=True, gc=False):
    """Where a message is: in the log, or still among the delayed ones; for a duplicate: where the first one is."""

    offset: int | None
    delayed_id: int | None = None
    duplicate: bool = False
    partition: int | None = None  # None: the one that was asked


class Publication(msgspec.Struct, gc=False):
    """Messages that are written. They count when `Partition.wait` has returned."""

    places: list[Place]
    durability: Durability
    in_log: Appended | None = None
    in_delayed: Appended | None = None
    due_now: bool = False
    firsts: list[tuple[Log, Appended]] = []  # which duplicates repeat: as durable as asked before this is answered


def with_dedup_ids(log: Log, offset: int) -> Iterator[tuple[Record, bytes]]:
    """The messages from `offset` on that were put with a dedup id; what came from another log has it there."""
    for frame in log.read(min(max(offset, log.start), log.end), on_damage="skip"):
        if frame.header.columns & HEADERS:
            for record in frame.records():
                dedup_id = mark(record, DEDUP_ID)
                if record.offset >= offset and dedup_id is not None and not record.flags & MOVED:
                    yield record, dedup_id


def batch_of(drafts: Sequence[Draft]) -> Batch:
    """The drafts as columns; a column that no draft uses is left out."""
    return Batch(
        values=[draft.value for draft in drafts],
        keys=column([draft.key for draft in drafts], None),
        headers=column([draft.headers for draft in drafts], ()),
        priorities=column([draft.priority for draft in drafts], 0),
        expires_at_ms=column([draft.expires_at_ms for draft in drafts], 0),
        flags=column([draft.flags for draft in drafts], 0),
    )


def head_bytes(draft: Draft) -> int:
    """How many bytes will stand before the value in the frame of a message that is alone in it."""
    batch = batch_of([draft])
    if draft.due_at_ms:
        batch = msgspec.structs.replace(batch, due_at_ms=[draft.due_at_ms])
    return sum(map(len, encode_head(batch)[1]))


def released_batch(due: Sequence[Delayed]) -> Batch:
    """Delayed messages as they enter the log when they are due."""
    records = [message.record for message in due]
    return moved_batch(
        records,
        [(*message.record.headers, (DELAYED_ID, b"%d" % message.id)) for message in due],
        priorities=[record.priority for record in records],
        expires_at_ms=[record.expires_at_ms for record in records],
        due_at_ms=[message.due_at_ms for message in due],
    )


def reference_of(place: Place, partition: int) -> int:
    """One number for a place in a topic: the partition, and the offset there or the delayed id."""
    if place.offset is not None:
        return partition << _PARTITION_SHIFT | place.offset << 1
    assert place.delayed_id is not None
    return partition << _PARTITION_SHIFT | place.delayed_id << 1 | 1


def first_place(reference: int) -> Place:
    """The place that such a number stands for, as a duplicate is told of it."""
    number = (reference & _IN_PARTITION) >> 1
    offset, delayed_id = (None, number) if reference & 1 else (number, None)
    return Place(offset, delayed_id, duplicate=True, partition=reference >> _PARTITION_SHIFT)


# Which partition a message goes to: by its key's hash, in turn, or as the caller says.


_SEED: Final = 0


@cache
def murmur3() -> Callable[[bytes, int], int]:
    """Murmur3 with 32 bits, as an unsigned number; loaded with the first key."""
    import mmh3

    return mmh3.mmh3_32_uintdigest


def partition_for(key: bytes, partitions: int) -> int:
    """The partition of a key: the same for ever, as long as the topic has so many."""
    return murmur3()(key, _SEED) % partitions


def partitions_for(keys: Sequence[bytes], partitions: int) -> list[int]:
    """The same for many keys."""
    murmur = murmur3()
    return [murmur(key, _SEED) % partitions for key in keys]


def check_partition(partition: object, topic: str, partitions: int) -> int:
    """A partition that was chosen by hand, if the topic has it."""
    if type(partition) is int and 0 <= partition < partitions:
        return partition
    last = f"its partitions are 0 to {partitions - 1}" if partitions > 1 else "its only partition is 0"
    raise UnknownTopic(f"topic {topic} has no partition {partition!r}: {last}")


class RoundRobin:
    """Turns for messages without a key: `stick` of them to one partition, as many to the next, and so on.

    Who gets which turn depends on the count alone, never on time: the same messages in the same order go to
    the same partitions again. Those `without` which there are others have no turns.
    """

    def __init__(self, stick: int = 1, *, start: int = 0) -> None:
        self._stick = stick
        self._partition = start
        self._left = stick

    def take(self, partitions: int, without: Collection[int] = ()) -> int:
        """The partition of the next message."""
        # With names of its own: threads that take turns at once may get the same one, never one that is not there.
        partition, left = self._partition, self._left
        if not left:
            partition, left = partition + 1, self._stick
        if partition >= partitions:
            partition = 0
        while partition in without:
            partition, left = (partition + 1) % partitions, self._stick
        self._partition, self._left = partition, left - 1
        return partition

    def give_back(self, count: int, partitions: int, without: Collection[int] = ()) -> None:
        """Take back the last turns."""
        while count > 0:
            used = min(max(self._stick - self._left, 0), count)
            self._left += used
            count -= used
            if count:
                self._partition, self._left = (self._partition - 1) % partitions, 0
                while self._partition in without:
                    self._partition = (self._partition - 1) % partitions

    def spread(self, count: int, partitions: int, without: Collection[int] = ()) -> Iterator[tuple[int, int, int]]:
        """The next `count` messages as runs: (partition, first, behind the last)."""
        first = 0
        while first < count:
            partition = self.take(partitions, without)
            end = min(count, first + 1 + self._left)
            self._left = max(self._left - (end - first - 1), 0)
            yield partition, first, end
            first = end
