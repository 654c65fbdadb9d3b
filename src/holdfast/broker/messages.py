"""Messages on their way into a partition: Holdfast's own headers and flags, drafts, places and partition choice."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, TypeVar

import msgspec

from holdfast.broker.folder.layout import message_id
from holdfast.codec.columns import FLAGS, HEADERS, PRIORITIES, encode_head
from holdfast.codec.encode import Body, same_body
from holdfast.codec.frame import Frame, FrameHeader
from holdfast.errors import UnknownTopic
from holdfast.large import Value
from holdfast.model import Appended, Batch, CodecName, Durability, Failure, HeaderPairs, Producer, Record

if TYPE_CHECKING:
    from holdfast.broker.delayed import Delayed
    from holdfast.broker.partition import Partition
    from holdfast.storage import LogReader
    from holdfast.storage.log import Log

PREFIX: Final = "holdfast."
CORRELATION_ID: Final = "holdfast.correlation-id"
DEDUP_ID: Final = "holdfast.dedup-id"
DELAYED_ID: Final = "holdfast.delayed-id"
BYTES_HEADERS: Final = "holdfast.bytes-headers"
REDRIVEN_FROM: Final = "holdfast.redriven-from"
ORIGINAL: Final = "holdfast.original"  # of a redriven message: where it was published first
ONLY_FOR: Final = "holdfast.only-for"  # of a redriven message: the group it is for; the others have had it
DEAD: Final = "holdfast.dead"
WRITTEN: Final = "holdfast.written"  # the row of the bulk write it came from; a resumed write skips it

# Flags of a message.
TOMBSTONE: Final = 1 << 0  # deletes its key: see key compaction
MOVED: Final = 1 << 1  # came from another log: was delayed, died or was redriven
TEXT_KEY: Final = 1 << 2  # the key was given as text
TEXT_HEADERS: Final = 1 << 3  # header values were given as text, except those that BYTES_HEADERS lists


_Value = TypeVar("_Value")


class Original(msgspec.Struct, frozen=True, gc=False):
    """Where and when a redriven message was first published."""

    id: str
    offset: int
    timestamp_ns: int


class DeadNote(msgspec.Struct, frozen=True, omit_defaults=True):
    """What happened to a message before it died; stored as JSON in a header of its dead letter."""

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
    original: Original | None = None  # set if it had been redriven before
    expires_at_ms: int = 0
    due_at_ms: int = 0

    @property
    def first(self) -> Original:
        """Where the message was first published, before any redrive."""
        return self.original or Original(self.id, self.offset, self.timestamp_ns)


encode_original = msgspec.json.Encoder().encode
encode_note = msgspec.json.Encoder().encode


def decode_note(text: bytes) -> DeadNote:
    """Decode what `encode_note` made of a note."""
    return msgspec.json.decode(text, type=DeadNote)


def mark(record: Record, name: str) -> bytes | None:
    """The value of one of Holdfast's own headers, or None."""
    for header, value in record.headers:
        if header == name:
            return value
    return None


def decoded_mark(record: Record, name: str, decode: Callable[[bytes], _Value]) -> _Value | None:
    """The decoded value of one of Holdfast's own headers; None if it is not there, or cannot be decoded."""
    text = mark(record, name)
    try:
        return None if text is None else decode(text)
    except msgspec.DecodeError:
        return None


def original_of(record: Record) -> Original | None:
    """Where a redriven message was first published; None for other messages."""
    if not record.flags & MOVED:
        return None
    return decoded_mark(record, ORIGINAL, partial(msgspec.json.decode, type=Original))


def id_of(topic: str, partition: int, record: Record) -> str:
    """The message's id, which is still its delayed id if it was published with a delay."""
    delayed_id = mark(record, DELAYED_ID) if record.headers else None
    return message_id(topic, partition, record.offset, None if delayed_id is None else int(delayed_id))


def is_for(record: Record, group: bytes) -> bool:
    """Whether the message is for this group."""
    if not record.flags & MOVED:
        return True
    only = mark(record, ONLY_FOR)
    return only is None or only == group


def not_for(frame: Frame, group: bytes) -> list[int]:
    """Offsets in a frame of messages that are not for this group."""
    if not (frame.header.columns & FLAGS and frame.header.columns & HEADERS):
        return []
    headers = frame.columns().span(HEADERS)
    if headers is None or ONLY_FOR.encode() not in bytes(headers):
        return []  # avoids decoding frames of delayed messages, which are MOVED too but for every group
    return [record.offset for record in frame.records() if not is_for(record, group)]


def users_headers(headers: HeaderPairs) -> tuple[tuple[str, bytes], ...]:
    """The headers without Holdfast's own."""
    return tuple(pair for pair in headers if not pair[0].startswith(PREFIX))


def column(values: Sequence[_Value], nothing: _Value) -> Sequence[_Value] | None:
    """A column of a batch; None if all values equal `nothing`."""
    return None if values.count(nothing) == len(values) else values


def moved_batch(
    records: Sequence[Record],
    headers: Sequence[HeaderPairs],
    *,
    priorities: Sequence[int] = (),
    expires_at_ms: Sequence[int] = (),
    due_at_ms: Sequence[int] | None = None,
) -> Batch:
    """Messages of one log as a batch for another, with the given headers and the flag MOVED."""
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
    if offset >= log.end:  # nothing there, or a lost tail
        return
    for frame in log.read(max(offset, log.start), on_damage="skip"):
        if frame.header.columns & FLAGS:
            for record in frame.records():
                if record.flags & MOVED and record.offset >= offset:
                    yield record


# Drafts, and the places where they end up.


# A reference has 64 bits: 16 for the partition, 47 for the offset or delayed id, 1 that says which of the two.
_PARTITION_SHIFT: Final = 48
_IN_PARTITION: Final = (1 << _PARTITION_SHIFT) - 1


class Draft(msgspec.Struct, frozen=True, gc=False):
    """A message to be published: validated, with Holdfast's own headers."""

    value: Value
    key: bytes | None = None
    headers: HeaderPairs = ()
    priority: int = 0
    expires_at_ms: int = 0
    due_at_ms: int = 0
    dedup_id: bytes | None = None
    flags: int = 0


# The same as a tuple, in the same order.
DraftFields: TypeAlias = tuple[Value, bytes | None, HeaderPairs, int, int, int, bytes | None, int]


class Manner(NamedTuple):
    """How to write messages. With `any_size`, their sizes were checked before."""

    durability: Durability | None
    codec: CodecName | None
    any_size: bool


class Place(msgspec.Struct, frozen=True, gc=False):
    """Where a message is: in the log or among the delayed ones. For a duplicate, where the first copy is."""

    offset: int | None
    delayed_id: int | None = None
    duplicate: bool = False
    partition: int | None = None  # None: the partition it was published to


class Publication(msgspec.Struct, gc=False):
    """Messages that are written; `Partition.wait` returns when they are durable."""

    places: list[Place]
    durability: Durability
    in_log: Appended | None = None
    in_delayed: Appended | None = None
    due_now: bool = False
    firsts: list[tuple[Log, Appended]] = []  # first copies of duplicates, which must become durable as well


def with_dedup_ids(log: Log, offset: int) -> Iterator[tuple[Record, bytes]]:
    """Messages from `offset` on that were published with a dedup id here; for moved ones the other log counts."""
    for frame in log.read(min(max(offset, log.start), log.end), on_damage="skip"):
        if frame.header.columns & HEADERS:
            for record in frame.records():
                dedup_id = mark(record, DEDUP_ID)
                if record.offset >= offset and dedup_id is not None and not record.flags & MOVED:
                    yield record, dedup_id


def batch_of(drafts: Sequence[Draft]) -> Batch:
    """The drafts as columns; columns that no draft uses are left out."""
    if len(drafts) == 1:  # as below, at a fifth of the cost
        value, key, headers, priority, expires_at_ms, _, _, flags = msgspec.structs.astuple(drafts[0])
        return Batch(
            values=[value],
            keys=None if key is None else [key],
            headers=[headers] if headers else None,
            priorities=[priority] if priority else None,
            expires_at_ms=[expires_at_ms] if expires_at_ms else None,
            flags=[flags] if flags else None,
        )
    return Batch(
        values=[draft.value for draft in drafts],
        keys=column([draft.key for draft in drafts], None),
        headers=column([draft.headers for draft in drafts], ()),
        priorities=column([draft.priority for draft in drafts], 0),
        expires_at_ms=column([draft.expires_at_ms for draft in drafts], 0),
        flags=column([draft.flags for draft in drafts], 0),
    )


def head_bytes(draft: Draft) -> int:
    """Number of bytes before the value in a frame that holds only this message."""
    batch = batch_of([draft])
    if draft.due_at_ms:
        batch = msgspec.structs.replace(batch, due_at_ms=[draft.due_at_ms])
    return sum(map(len, encode_head(batch)[1]))


def released_batch(due: Sequence[Delayed]) -> Batch:
    """Due messages as a batch for the log."""
    records = [message.record for message in due]
    return moved_batch(
        records,
        [(*message.record.headers, (DELAYED_ID, b"%d" % message.id)) for message in due],
        priorities=[record.priority for record in records],
        expires_at_ms=[record.expires_at_ms for record in records],
        due_at_ms=[message.due_at_ms for message in due],
    )


def reference_of(place: Place, partition: int) -> int:
    """A place in a topic as one number."""
    if place.offset is not None:
        return partition << _PARTITION_SHIFT | place.offset << 1
    assert place.delayed_id is not None
    return partition << _PARTITION_SHIFT | place.delayed_id << 1 | 1


def first_place(reference: int) -> Place:
    """The place of the first copy that a reference points to, as the answer for a duplicate."""
    number = (reference & _IN_PARTITION) >> 1
    offset, delayed_id = (None, number) if reference & 1 else (number, None)
    return Place(offset, delayed_id, duplicate=True, partition=reference >> _PARTITION_SHIFT)


# The partition of a message: by the hash of its key, in turn, or chosen by the caller.


_SEED: Final = 0


@cache
def murmur3() -> Callable[[bytes, int], int]:
    """The 32-bit Murmur3 hash, unsigned; imported on first use."""
    import mmh3

    return mmh3.mmh3_32_uintdigest


def partition_for(key: bytes, partitions: int) -> int:
    """The partition of a key. It never changes unless the number of partitions does."""
    return murmur3()(key, _SEED) % partitions


def partitions_for(keys: Sequence[bytes], partitions: int) -> list[int]:
    """The partition of each key."""
    murmur = murmur3()
    return [murmur(key, _SEED) % partitions for key in keys]


def check_partition(partition: object, topic: str, partitions: int) -> int:
    """Check the number of a partition chosen by the caller. Raises UnknownTopic."""
    if type(partition) is int and 0 <= partition < partitions:
        return partition
    last = f"its partitions are 0 to {partitions - 1}" if partitions > 1 else "its only partition is 0"
    raise UnknownTopic(f"topic {topic} has no partition {partition!r}: {last}")


class RoundRobin:
    """Spreads messages without keys: `stick` of them to one partition, then as many to the next, and so on.

    The choice depends only on the count, never on time, so the same messages in the same order go to the same
    partitions again. Partitions in `without` get none.
    """

    def __init__(self, stick: int = 1, *, start: int = 0) -> None:
        self._stick = stick
        self._partition = start
        self._left = stick

    def take(self, partitions: int, without: Collection[int] = ()) -> int:
        """The partition of the next message."""
        # On local copies: concurrent threads may get the same partition, but never one that does not exist.
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
        """Undo the last `count` turns."""
        while count > 0:
            used = min(max(self._stick - self._left, 0), count)
            self._left += used
            count -= used
            if count:
                self._partition, self._left = (self._partition - 1) % partitions, 0
                while self._partition in without:
                    self._partition = (self._partition - 1) % partitions

    def spread(self, count: int, partitions: int, without: Collection[int] = ()) -> Iterator[tuple[int, int, int]]:
        """Spread the next `count` messages; yields runs (partition, first, end)."""
        first = 0
        while first < count:
            partition = self.take(partitions, without)
            end = min(count, first + 1 + self._left)
            self._left = max(self._left - (end - first - 1), 0)
            yield partition, first, end
            first = end


# Bulk writes: whole frames whose messages were checked and encoded elsewhere.


class BulkFrame(msgspec.Struct, frozen=True):
    """A frame from elsewhere: its header, its padded bytes, and its priorities if it has any."""

    header: FrameHeader
    stored: memoryview
    priorities: bytes | None = None

    @staticmethod
    def of(frame: Frame, stored: memoryview) -> BulkFrame:
        found = frame.columns().priorities() if frame.header.columns & PRIORITIES else None
        return BulkFrame(frame.header, stored, None if found is None else bytes(found))

    def body(self, now_ns: int) -> Body:
        """The body to append; retention counts the messages' age from `now_ns`."""
        return msgspec.structs.replace(same_body(self.header, self.stored), max_time_ns=now_ns)


def append_frames(partition: Partition, frames: Sequence[BulkFrame], producer: Producer, now_ns: int) -> Appended:
    """Append the frames as one batch, all or none; the messages are not visible before the log is synced."""
    bodies = [frame.body(now_ns) for frame in frames]
    if all(frame.priorities is None for frame in frames):
        return partition.log.write_bodies(bodies, producer)
    priorities = b"".join(frame.priorities or bytes(frame.header.count) for frame in frames)
    return partition.telling_groups(lambda: partition.log.write_bodies(bodies, producer), priorities)
