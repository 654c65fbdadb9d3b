"""Frames as Arrow columns: many frames become one batch, and no message is touched. Needs pyarrow and numpy.

Large frames hand over their buffers; of small ones, where a buffer each would cost more than its content, the
items are gathered first, and those of a single message are taken apart together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.codec.arrow import binary_array
from holdfast.codec.columns import DUE, EXPIRY, FLAGS, HEADERS, KEY_VALIDITY, KEYS, PRIORITIES, REMOVED, TIMES, padding
from holdfast.codec.compression import Codec
from holdfast.codec.frame import Frame, Kind
from holdfast.errors import CorruptData

HEADER_PAIRS: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
INSTANT: Final = pa.timestamp("us", tz="UTC")

# From so many messages on, a frame's buffers are used as they are.
_LARGE: Final = 32

# So many single messages behind each other are worth the way of `Singles`.
_RUN: Final = 16


class FrameColumns:
    """The messages of some frames, behind each other, as columns; removed ones still have their rows: see `kept`."""

    def __init__(self, frames: Sequence[Frame]) -> None:
        self._frames = frames
        self._counts = np.fromiter((frame.count for frame in frames), np.int64, len(frames))
        self._uses = 0
        for frame in frames:
            self._uses |= frame.header.columns
        self.rows = int(self._counts.sum())
        self._known_runs: list[Singles | list[Frame]] | None = None

    def values(self) -> pa.Array:
        return self._variable(_frame_values, Frame.values_in_place, Singles.values)

    def keys(self) -> pa.Array:
        if not self._uses & KEYS:
            return pa.nulls(self.rows, pa.binary())
        return self._variable(_frame_keys, _key_list, Singles.keys)

    def headers(self) -> pa.Array:
        """Names and values of the headers, our own among them; a message without any has an empty list."""
        chunks = []
        for used, frames in groupby(self._frames, lambda frame: bool(frame.header.columns & HEADERS)):
            if used:
                chunks += [_frame_headers(frame) for frame in frames]
            else:
                chunks.append(pa.repeat(pa.scalar([], HEADER_PAIRS), sum(frame.count for frame in frames)))
        return pa.concat_arrays(chunks) if chunks else pa.array([], HEADER_PAIRS)

    def offsets(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        return self._each(lambda header: header.base_offset) + self._places()

    def times(self) -> pa.Array:
        numbers = self._numbers(TIMES, np.int64, lambda frame: frame.header.max_time_ns)
        return pa.Array.from_buffers(INSTANT, self.rows, [None, pa.py_buffer(numbers // 1000)])

    def expires_at(self) -> pa.Array:
        return self._instants(EXPIRY)

    def due_at(self) -> pa.Array:
        return self._instants(DUE)

    def priorities(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return self._numbers(PRIORITIES, np.uint8, lambda frame: 0)

    def flags(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return self._numbers(FLAGS, np.uint8, lambda frame: 0)

    def epochs(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        return self._each(lambda header: header.epoch)

    def producer_ids(self) -> pa.Array:
        """As signed numbers; null where there was no producer."""
        ids = np.fromiter((frame.header.producer_id for frame in self._frames), np.uint64, len(self._frames))
        rows = np.repeat(ids, self._counts)
        return pa.array(rows.view(np.int64), mask=rows == 0)

    def producer_epochs(self) -> pa.Array:
        return pa.array(self._each(lambda header: header.producer_epoch), mask=self._without_producer())

    def sequences(self) -> pa.Array:
        numbers = (self._each(lambda header: header.first_sequence) + self._places()) % 2**32
        return pa.array(numbers, mask=self._without_producer())

    def kept(self) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
        """Of each row whether its message is there; None where all are."""
        if not self._uses & REMOVED:
            return None
        parts = []
        for frame in self._frames:
            span = frame.columns().span(REMOVED)
            if span is None:
                parts.append(np.ones(frame.count, np.bool_))
            else:
                bits = np.unpackbits(np.frombuffer(span, np.uint8), count=frame.count, bitorder="little")
                parts.append(bits == 0)
        return np.concatenate(parts)

    def _each(self, field: Callable[[Any], int]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """A field of the frames' headers, for every row."""
        numbers = np.fromiter((field(frame.header) for frame in self._frames), np.int64, len(self._frames))
        return np.repeat(numbers, self._counts)

    def _places(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Of each row, which message of its frame it is."""
        starts = np.cumsum(self._counts) - self._counts
        return np.arange(self.rows, dtype=np.int64) - np.repeat(starts, self._counts)

    def _without_producer(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        return ~self._each(lambda header: 1 if header.producer_id else 0).astype(np.bool_)

    def _numbers(self, column: int, kind: Any, otherwise: Callable[[Frame], int]) -> np.ndarray[Any, Any]:
        """A column of fixed width; frames that do not use it have the same number for all their messages."""
        if not self._uses & column:
            numbers = np.fromiter(map(otherwise, self._frames), kind, len(self._frames))
            return np.repeat(numbers, self._counts)
        parts = []
        for run in self._runs():
            if isinstance(run, Singles) and column != TIMES:
                parts.append(run.numbers(column, kind))
                continue
            for frame in run.frames if isinstance(run, Singles) else run:
                span = frame.columns().span(column) if frame.header.columns & column else None
                filled = np.full(frame.count, otherwise(frame), kind) if span is None else np.frombuffer(span, kind)
                parts.append(filled)
        return np.concatenate(parts)

    def _runs(self) -> list[Singles | list[Frame]]:
        """The frames in order, those of single messages together."""
        if self._known_runs is None:
            self._known_runs = []
            for single, frames in groupby(self._frames, is_single):
                run = list(frames)
                self._known_runs.append(Singles(run) if single and len(run) >= _RUN else run)
        return self._known_runs

    def _instants(self, column: int) -> pa.Array:
        """Moments in ms since 1970, of which 0 stands for none."""
        if not self._uses & column:
            return pa.nulls(self.rows, INSTANT)
        numbers = self._numbers(column, np.int64, lambda frame: 0)
        return pa.array(numbers * 1000, pa.int64(), mask=numbers == 0).cast(INSTANT)

    def _variable(
        self,
        of_large: Callable[[Frame], pa.Array],
        of_small: Callable[[Frame], Sequence[bytes | None]],
        of_singles: Callable[[Singles], pa.Array],
    ) -> pa.Array:
        chunks = []
        for run in self._runs():
            if isinstance(run, Singles):
                chunks.append(of_singles(run))
                continue
            for large, frames in groupby(run, lambda frame: frame.count >= _LARGE):
                if large:
                    chunks += [of_large(frame) for frame in frames]
                else:
                    chunks.append(pa.array([item for frame in frames for item in of_small(frame)], pa.binary()))
        if not chunks:
            return pa.array([], pa.binary())
        return chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks)


def _frame_values(frame: Frame) -> pa.Array:
    columns = frame.columns()
    return binary_array(frame, columns.value_ends(), columns.value_bytes(), frame.count)


def _frame_keys(frame: Frame) -> pa.Array:
    columns = frame.columns()
    span = columns.span(KEYS)
    if span is None:
        return pa.nulls(frame.count, pa.binary())
    ends_bytes = 4 * (frame.count + 1)
    data = span[ends_bytes + len(padding(ends_bytes)) :]
    return binary_array(frame, span[:ends_bytes], data, frame.count, columns.span(KEY_VALIDITY))


def _key_list(frame: Frame) -> Sequence[bytes | None]:
    return frame.columns().keys() or [None] * frame.count


def _frame_headers(frame: Frame) -> pa.Array:
    span = frame.columns().span(HEADERS)
    assert span is not None
    ends_bytes = 4 * (frame.count + 1)
    ends, rest = span[:ends_bytes], span[ends_bytes + len(padding(ends_bytes)) :]
    pairs = int.from_bytes(ends[-4:], "little", signed=True)
    names, rest = _cut(frame, rest, pairs)
    values, _ = _cut(frame, rest, pairs)
    try:
        ends_array = pa.Array.from_buffers(pa.int32(), frame.count + 1, [None, pa.py_buffer(ends)])
        array = pa.ListArray.from_arrays(
            ends_array,
            pa.StructArray.from_arrays([names.cast(pa.string()), values], fields=list(HEADER_PAIRS.value_type)),
        )
        array.validate(full=True)
    except (pa.ArrowException, ValueError) as error:
        raise CorruptData(f"the headers of the frame at offset {frame.base_offset} are not valid: {error}") from None
    return array


def _cut(frame: Frame, part: memoryview, count: int) -> tuple[pa.Array, memoryview]:
    """The items at the front of the part, and what lies behind them."""
    ends_bytes = 4 * (count + 1)
    start = ends_bytes + len(padding(ends_bytes))
    length = int.from_bytes(part[ends_bytes - 4 : ends_bytes], "little", signed=True)
    array = binary_array(frame, part[:ends_bytes], part[start : start + length], count)
    return array, part[start + length + len(padding(length)) :]


# Frames of one message each, as publishing one by one leaves them: taken apart all at once. Needs pyarrow and numpy.
#
# at       size  of the body
# 0        8     0, and the length of the value
# 8        8     0, and the length of the key            with a key
# 16       n     the key, padded                         with a key
# …        8     each of priority, expiry, due, flags    where the frame uses it
# …        n     the value


_FIXED: Final = (PRIORITIES, EXPIRY, DUE, FLAGS)
_OTHERS: Final = ~(KEYS | PRIORITIES | EXPIRY | DUE | FLAGS)
_MOST_BYTES: Final = 4096

Places = npt.NDArray[np.int64]


def is_single(frame: Frame) -> bool:
    """Whether the frame is one of these; a long message gains nothing by it."""
    header = frame.header
    return (
        header.count == 1
        and header.kind == Kind.DATA
        and header.codec == Codec.NONE
        and header.raw_bytes == header.body_bytes <= _MOST_BYTES
        and not header.columns & _OTHERS
    )


class Singles:
    """Some of them, behind each other."""

    def __init__(self, frames: Sequence[Frame]) -> None:
        self.frames = frames
        bodies = [frame.stored for frame in frames]
        lengths = np.fromiter(map(len, bodies), np.int64, len(bodies))
        self._data = np.frombuffer(b"".join(bodies), np.uint8)
        self._ends = np.cumsum(lengths)
        self._columns = np.fromiter((frame.header.columns for frame in frames), np.int64, len(frames))
        self._keyed = (self._columns & KEYS) != 0
        starts = self._ends - lengths
        self._value_sizes = self._length(starts, np.ones(len(frames), np.bool_))
        self._key_sizes = self._length(starts + 8, self._keyed)
        self._keys_at = starts + 16
        self._fixed_at = starts + 8 + self._keyed * (8 + (self._key_sizes + 7) // 8 * 8)
        self._check(self._fixed_at <= self._ends)
        self._values_at = self._place(1 << 62)
        self._check(self._values_at + self._value_sizes <= self._ends)

    def values(self) -> pa.Array:
        return self._items(self._values_at, self._value_sizes)

    def keys(self) -> pa.Array:
        if not self._keyed.any():
            return pa.nulls(len(self.frames), pa.binary())
        keys = self._items(np.where(self._keyed, self._keys_at, self._ends), self._key_sizes)
        return keys if self._keyed.all() else pc.if_else(pa.array(self._keyed), keys, pa.scalar(None, pa.binary()))

    def numbers(self, column: int, kind: Any) -> npt.NDArray[Any]:
        """A column of fixed width; 0 where a frame does not use it."""
        found = np.zeros(len(self.frames), kind)
        used = (self._columns & column) != 0
        found[used] = self._read(self._place(column)[used], kind)
        return found

    def _place(self, column: int) -> Places:
        """Where a column lies, of which those with lower bits are in front."""
        place: Places = self._fixed_at.copy()
        for each in _FIXED:
            if each < column:
                place += 8 * ((self._columns & each) != 0)
        return place

    def _length(self, at: Places, used: npt.NDArray[np.bool_]) -> Places:
        """The second of the two ends of an item, of which the first must be 0."""
        self._check(~used | (at + 8 <= self._ends))
        found = np.zeros((len(self.frames), 2), np.int64)
        found[used] = self._read(at[used], np.int32, 2)
        self._check((found[:, 0] == 0) & (found[:, 1] >= 0))
        return found[:, 1]

    def _read(self, at: Places, kind: Any, count: int = 1) -> npt.NDArray[Any]:
        """Numbers at places that are not aligned."""
        width = np.dtype(kind).itemsize * count
        cut = np.ascontiguousarray(self._data[at[:, None] + np.arange(width)])
        return cut.view(kind) if count > 1 else cut.view(kind).reshape(len(at))

    def _items(self, starts: Places, sizes: Places) -> pa.Array:
        """Pieces of the bodies. The pieces and what lies between them are one array, of which every second is taken."""
        ends = np.stack([starts, starts + sizes], axis=1).ravel().astype(np.int32)
        buffers = [None, pa.py_buffer(ends), pa.py_buffer(self._data)]
        both = pa.Array.from_buffers(pa.binary(), len(ends) - 1, buffers)
        return both.take(pa.array(np.arange(0, len(ends), 2)))

    def _check(self, good: npt.NDArray[np.bool_]) -> None:
        if not good.all():
            frame = self.frames[int(np.flatnonzero(~good)[0])]
            raise CorruptData(f"the columns of the frame at offset {frame.base_offset} do not fit in it")
