"""A frame written anew with fewer messages: the others keep their offsets, their times and all that they carry."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final, TypeVar

from holdfast.checksum import crc32c
from holdfast.codec.columns import Columns
from holdfast.codec.compression import Codec
from holdfast.codec.encode import Body, Packing, encode_body, slice_batch
from holdfast.codec.frame import Frame, FrameHeader, Kind
from holdfast.model import Batch

# So many removed messages in a row cost more as rows of a frame than a hole and another frame behind it.
LONG_RUN: Final = 32

_Value = TypeVar("_Value")


def hole_body(count: int, max_time_ns: int) -> Body:
    """A body for `count` offsets without a message."""
    return Body((), 0, 0, count, 0, Codec.NONE, max_time_ns, crc32c(b""), Kind.HOLE)


def same_body(header: FrameHeader, stored: memoryview) -> Body:
    """The body of a frame as it is stored, padding included, for another place."""
    return Body(
        (stored,),
        header.body_bytes,
        header.raw_bytes,
        header.count,
        header.columns,
        header.codec,
        header.max_time_ns,
        header.body_crc,
        header.kind,
    )


def without(frame: Frame, gone: Sequence[bool], packing: Packing) -> Iterator[tuple[int, Body]]:
    """The frame's messages but for those marked as gone: bodies, each with the row of the frame that it begins at.

    All of them together cover the frame's offsets. Short runs of gone messages stay as marked rows, long ones
    become holes.
    """
    header = frame.header
    if all(gone):
        yield 0, hole_body(header.count, header.max_time_ns)
        return
    batch = _blanked(frame.columns(), gone)
    for start, stop, is_hole in _stretches(gone):
        part = slice_batch(batch, start, stop)
        if is_hole:
            yield start, hole_body(stop - start, header.max_time_ns if part.times_ns is None else max(part.times_ns))
        else:
            marks = gone[start:stop]
            yield start, encode_body(part, header.max_time_ns, packing, Kind(header.kind), marks if any(marks) else ())


def _stretches(gone: Sequence[bool]) -> Iterator[tuple[int, int, bool]]:
    """Rows [start, stop), and whether they become a hole."""
    start = at = 0
    for is_gone, run in groupby(gone):
        length = sum(1 for _ in run)
        if is_gone and length >= LONG_RUN:
            if at > start:
                yield start, at, False
            yield at, at + length, True
            start = at + length
        at += length
    if at > start:
        yield start, at, False


def _blanked(columns: Columns, gone: Sequence[bool]) -> Batch:
    """The rows as a batch in which those that are gone have a time and nothing else."""
    values = columns.values()
    return Batch(
        values=[b"" if is_gone else value for value, is_gone in zip(values, gone, strict=True)],
        times_ns=columns.times_ns(),
        keys=_column(columns.keys(), gone, None),
        headers=_column(columns.headers(), gone, ()),
        priorities=_column(columns.priorities(), gone, 0),
        expires_at_ms=_column(columns.expires_at_ms(), gone, 0),
        due_at_ms=_column(columns.due_at_ms(), gone, 0),
        flags=_column(columns.flags(), gone, 0),
    )


def _column(column: Sequence[_Value] | None, gone: Sequence[bool], nothing: _Value) -> list[_Value] | None:
    if column is None:
        return None
    return [nothing if is_gone else value for value, is_gone in zip(column, gone, strict=True)]
