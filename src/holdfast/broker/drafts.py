"""Messages on their way into a partition, and where they got to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from holdfast.broker.delayed import Delayed
from holdfast.broker.marks import DEDUP_ID, DELAYED_ID, MOVED, column, mark, moved_batch
from holdfast.codec.columns import HEADERS, encode_head
from holdfast.large import Value
from holdfast.model import Appended, Batch, CodecName, Durability, HeaderPairs, Record
from holdfast.storage.log import Log

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
