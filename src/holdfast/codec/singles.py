"""Reading frames of a single message each, one after the other, as putting messages one by one leaves them.

Everything here is a fused form of what `frame` and `columns` do, for passes over many small frames of either layout.
What these functions return was checked as thoroughly; wherever there is any doubt, they return nothing, and the plain
way says what is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from struct import Struct
from typing import Final, TypeAlias

from holdfast.checksum import crc32c
from holdfast.codec.columns import single_fields
from holdfast.codec.frame import (
    ENDS_BYTES,
    HEADER_BYTES,
    INTACT,
    MAGIC,
    MAY_HOLD_SHORT,
    SHORT_MAGIC,
    SHORT_VALUE_AT,
    SHORT_VERSION,
    VERSION_AT,
    Codec,
    FrameHeader,
    Kind,
    short_bytes,
)
from holdfast.large import LARGE_BYTES
from holdfast.model import Record

_U32: Final = Struct("<I")

# The header of a long frame with a single message's ends behind it: equal fields are read as one, and those that nobody
# needs here are skipped.
_SINGLE: Final = Struct("<8sIII8sIQq8xI20xIIii")
# Count, kind, codec and flags of a single message, and of one that is the first in its segment.
_ONE_DATA: Final = tuple([Struct("<IBBH").pack(1, Kind.DATA, Codec.NONE, flags) for flags in (0, MAY_HOLD_SHORT)])
assert _SINGLE.size == HEADER_BYTES + 8
_read_head: Final = _SINGLE.unpack_from


Prefixes: TypeAlias = tuple[bytes, bytes]


def log_prefixes(log_id: int) -> Prefixes:
    """Return the first bytes of every frame of a log: of the long ones, and of the short ones."""
    return MAGIC + _U32.pack(log_id), SHORT_MAGIC + _U32.pack(log_id)


def read_single(buffer: memoryview, position: int, prefixes: Prefixes) -> tuple[Record, int] | None:
    """Return the message of a frame with a single message, checked, and the next position; None for others.

    `prefixes` are the log's `log_prefixes`. A fused form of `read_plain` and `Frame.records`, for consumers that go
    from message to message.
    """
    body_at = position + HEADER_BYTES
    last = len(buffer)
    if body_at + ENDS_BYTES > last and (body_at > last or buffer[position + VERSION_AT] != SHORT_VERSION):
        return None
    if buffer[position + VERSION_AT] == SHORT_VERSION:
        found_prefix, own_position, length, epoch, offset, time_ns = _read_short_head(buffer, position)
        value_end = position + SHORT_VALUE_AT + length
        # Not by `short_bytes`: this is called for every message.
        end = value_end + 11 & ~7 if value_end + 4 > body_at else body_at
        frame = bytes(buffer[position:end])
        if found_prefix != prefixes[1] or own_position != position or end > last or crc32c(frame) != INTACT:
            return None
        return Record(offset, time_ns, frame[SHORT_VALUE_AT : value_end - position], epoch=epoch), end
    (
        found_prefix, own_position, body_bytes, raw_bytes, fixed, columns, offset, time_ns, epoch, body_crc, header_crc,
        first, length,
    ) = _read_head(buffer, position)  # fmt: skip
    end = body_at + (body_bytes + 7 & ~7)
    if (
        fixed not in _ONE_DATA
        or found_prefix != prefixes[0]
        or own_position != position
        or raw_bytes != body_bytes
        or body_bytes > LARGE_BYTES
        or end > last
    ):
        return None
    if body_bytes <= _SMALL:
        frame = bytes(buffer[position:end])
        is_intact = crc32c(frame) == body_crc ^ _apart(end - body_at)
        body = frame[HEADER_BYTES : HEADER_BYTES + body_bytes]
    else:
        is_intact = crc32c(buffer[position : body_at - 4]) == header_crc and crc32c(buffer[body_at:end]) == body_crc
        body = bytes(buffer[body_at : body_at + body_bytes])
    if not is_intact:
        return None
    if not columns:
        if first or length != body_bytes - 8:
            return None
        return Record(offset, time_ns, body[8:], epoch=epoch), end
    fields = single_fields(body, columns)
    return None if fields is None else (Record(offset, time_ns, *fields, epoch), end)


_SHORT: Final = "<8sIHHQq"
_read_short_head: Final = Struct(_SHORT).unpack_from
assert Struct(_SHORT).size == SHORT_VALUE_AT


@lru_cache(maxsize=256)
def _short_run_of(length: int) -> Struct:
    """Return the layout of a short frame with a value of this length."""
    rest = short_bytes(length) - SHORT_VALUE_AT - length
    return Struct(f"{_SHORT}{length}s{rest}x")


def _short_run(buffer: memoryview, position: int, prefix: bytes, offset: int, most: int, length: int) -> list[Record]:
    """Return up to `most` messages from `offset` on that have short frames and values of this length."""
    records: list[Record] = []
    layout = _short_run_of(length)
    size = layout.size
    count = min(most, (len(buffer) - position) // size)
    for own_prefix, own_position, own_length, epoch, own_offset, time_ns, value in layout.iter_unpack(
        buffer[position : position + count * size]
    ):
        if (
            own_offset != offset
            or own_position != position
            or own_length != length
            or own_prefix != prefix
            or crc32c(buffer[position : position + size]) != INTACT
        ):
            break
        records.append(Record(offset, time_ns, value, epoch=epoch))
        offset, position = offset + 1, position + size
    return records


# A plain single message as a whole, for runs of messages of one length: everything that is then equal in all of them is
# read as one field.
_RUN: Final = "<8sI20sQq8xI20xI4x8s{length}s{padding}x"
_RUN_OF_BODIES: Final = "<8sI20sQq8xI20xI4x{length}s{padding}x"  # with columns, the body is read by itself
_SAME_AT, _SAME_END = 12, 32  # body_bytes to columns
_ENDS_END: Final = HEADER_BYTES + 8
_NO_COLUMN: Final = bytes(4)


@lru_cache(maxsize=256)
def _run_of(length: int) -> tuple[Struct, int]:
    """Return the layout of a plain single message of this length, and its `_crc_apart`."""
    layout = Struct(_RUN.format(length=length, padding=-length % 8))
    return layout, _crc_apart(layout.size - HEADER_BYTES)


@lru_cache(maxsize=256)
def _run_of_bodies(length: int) -> tuple[Struct, int]:
    """Return the layout of a single message whose body has this length, and its `_crc_apart`."""
    layout = Struct(_RUN_OF_BODIES.format(length=length, padding=-length % 8))
    return layout, _crc_apart(layout.size - HEADER_BYTES)


def _crc_apart(padded_bytes: int) -> int:
    """Return by what the CRC of a whole frame differs from that of its body, so that one CRC checks both.

    A header followed by its CRC has the same CRC whatever it holds. The CRC of the whole frame combines that with the
    body's, so the difference only depends on the body's length.
    """
    body = bytes(padded_bytes)
    return crc32c(bytes(4) + body) ^ crc32c(body)


_SMALL: Final = 1024  # bodies up to this size are checked together with their header
_apart: Final = lru_cache(maxsize=_SMALL // 8 + 1)(_crc_apart)


def read_singles(
    buffer: memoryview, position: int, prefixes: Prefixes, offset: int, most: int
) -> tuple[list[Record], int]:
    """Return up to `most` messages from `offset` on that have frames of their own, and the position behind them.

    They are checked as `read_single` does it, which reads the first of each run of messages of the same length.
    """
    records: list[Record] = []
    prefix = prefixes[0]
    while len(records) < most:
        found = read_single(buffer, position, prefixes)
        if found is None or found[0].offset != offset:
            break
        (record, end), start = found, position
        records.append(record)
        offset, position = offset + 1, end
        if len(records) == most:
            break
        if buffer[start + VERSION_AT] == SHORT_VERSION:
            length = len(record.value)
            short = _short_run(buffer, position, prefixes[1], offset, most - len(records), length)
            records += short
            offset, position = offset + len(short), position + len(short) * (end - start)
            continue
        if buffer[start + _SAME_END - 4 : start + _SAME_END] != _NO_COLUMN:
            found_run = _with_columns(buffer, start, end - start, prefix, offset, most - len(records))
            records += found_run
            offset, position = offset + len(found_run), position + len(found_run) * (end - start)
            continue
        layout, residue = _run_of(len(record.value))
        size = layout.size
        count = min(most - len(records), (len(buffer) - position) // size)
        first = bytes(buffer[start : start + _ENDS_END])
        same, ends = first[_SAME_AT:_SAME_END], first[HEADER_BYTES:]
        for (
            own_prefix,
            own_position,
            own_same,
            own_offset,
            time_ns,
            epoch,
            body_crc,
            own_ends,
            value,
        ) in layout.iter_unpack(buffer[position : position + count * size]):
            end = position + size
            if (
                own_offset != offset
                or own_position != position
                or own_same != same
                or own_ends != ends
                or own_prefix != prefix
                or crc32c(buffer[position:end]) != body_crc ^ residue
            ):
                break
            records.append(Record(offset, time_ns, value, epoch=epoch))
            offset, position = offset + 1, end
    return records, position


def _with_columns(buffer: memoryview, start: int, size: int, prefix: bytes, offset: int, most: int) -> list[Record]:
    """Return up to `most` messages from `offset` on that follow a frame at `start` and are like it in size and columns.

    They are checked as `read_single` does it, which has read that frame.
    """
    records: list[Record] = []
    same, position = bytes(buffer[start + _SAME_AT : start + _SAME_END]), start + size
    if bytes(buffer[position + _SAME_AT : position + _SAME_END]) != same:
        return records  # as it mostly is if lengths differ
    body_bytes, columns = _U32.unpack_from(same)[0], _U32.unpack_from(same, len(same) - 4)[0]
    layout, residue = _run_of_bodies(body_bytes)
    count = min(most, (len(buffer) - position) // size)
    for own_prefix, own_position, own_same, own_offset, time_ns, epoch, body_crc, body in layout.iter_unpack(
        buffer[position : position + count * size]
    ):
        if own_offset != offset or own_position != position or own_same != same or own_prefix != prefix:
            break
        end = position + size
        is_intact = crc32c(buffer[position:end]) == body_crc ^ residue
        fields = single_fields(body, columns) if is_intact else None
        if fields is None:
            break
        records.append(Record(offset, time_ns, *fields, epoch))
        offset, position = offset + 1, end
    return records


# Frames of one length as a whole, whatever they hold: as above, but with the body left out.
_ALIKE: Final = "<8sI20sQqQ24sI4x{padded}x"
_KEPT_AT, _KEPT_END = 56, 80  # epoch to batch_remaining


@lru_cache(maxsize=256)
def _alike_of(padded_bytes: int) -> tuple[Struct, int]:
    return Struct(_ALIKE.format(padded=padded_bytes)), _crc_apart(padded_bytes)


def frames_alike(buffer: memoryview, header: FrameHeader) -> Iterator[tuple[int, int, int]]:
    """Yield position, time and synced offset of each intact frame right behind one of a single message, and like it.

    Offsets go on by one; all else that `header` says, but for place, time and contents, is the same for all of them.
    """
    start, position, offset = header.position, header.end, header.base_offset + 1
    size = position - start
    if header.is_short:
        yield from _short_alike(buffer, header, size)
        return
    layout, apart = _alike_of(size - HEADER_BYTES)
    first = bytes(buffer[start : start + HEADER_BYTES])
    prefix, same, kept = first[:8], first[_SAME_AT:_SAME_END], first[_KEPT_AT:_KEPT_END]
    count = (len(buffer) - position) // size
    for own_prefix, own_position, own_same, own_offset, time_ns, synced, own_kept, body_crc in layout.iter_unpack(
        buffer[position : position + count * size]
    ):
        expected = (prefix, position, same, offset, kept)
        if (own_prefix, own_position, own_same, own_offset, own_kept) != expected:
            return
        if crc32c(buffer[position : position + size]) != body_crc ^ apart:
            return
        yield position, time_ns, synced
        position += size
        offset += 1


def _short_alike(buffer: memoryview, header: FrameHeader, size: int) -> Iterator[tuple[int, int, int]]:
    position, offset = header.end, header.base_offset + 1
    length, epoch = header.body_bytes - ENDS_BYTES, header.epoch
    (prefix,) = Struct("<8s").unpack_from(buffer, header.position)
    count = (len(buffer) - position) // size
    for own_prefix, own_position, own_length, own_epoch, own_offset, time_ns in Struct(
        f"{_SHORT}{size - SHORT_VALUE_AT}x"
    ).iter_unpack(buffer[position : position + count * size]):
        expected = (prefix, position, length, epoch, offset)
        if (own_prefix, own_position, own_length, own_epoch, own_offset) != expected:
            return
        if crc32c(buffer[position : position + size]) != INTACT:
            return
        yield position, time_ns, 0
        position += size
        offset += 1


_SKIPPED: Final = Struct("<8sII16xQ").unpack_from
_SHORT_SKIPPED: Final = Struct("<8sIH2xQ").unpack_from


def skip_to(buffer: memoryview, position: int, prefixes: Prefixes, offset: int) -> int | None:
    """Return the position of the frame that begins with this offset, going on from the frame at `position`.

    Headers on the way are not checked, so the caller must check the frame that it is led to. None if there is none.
    """
    last = len(buffer) - HEADER_BYTES
    while position <= last:
        if buffer[position + VERSION_AT] == SHORT_VERSION:
            found_prefix, own_position, length, base_offset = _SHORT_SKIPPED(buffer, position)
            size = short_bytes(length)
        else:
            found_prefix, own_position, body_bytes, base_offset = _SKIPPED(buffer, position)
            size = HEADER_BYTES + (body_bytes + 7 & ~7)
        if found_prefix not in prefixes or own_position != position:
            return None
        if base_offset >= offset:
            return position if base_offset == offset else None
        position += size
    return None
