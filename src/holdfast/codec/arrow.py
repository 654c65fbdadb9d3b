"""Frames to Arrow and numpy columns and back, whole columns at a time, without an object per message.

Needs pyarrow and numpy (extra `arrow`). Large frames pass on their buffers. For small ones, where a buffer each would
cost more than its content, the items are gathered first; those of single-message frames are decoded together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.checksum import crc32c
from holdfast.codec.columns import DUE, EXPIRY, FLAGS, HEADERS, KEY_VALIDITY, KEYS, PRIORITIES, REMOVED, TIMES, padding
from holdfast.codec.encode import PLAIN, Body, Packing, pack_again
from holdfast.codec.frame import Codec, Frame, Kind
from holdfast.errors import CorruptData, InvalidRequest, MessageTooLarge


def encode_arrow(
    values: Any, now_ns: int, *, cap_bytes: int, max_message_bytes: int, packing: Packing = PLAIN
) -> list[Body]:
    """Encode an array (or chunked array) of binary or text values as bodies; raises InvalidRequest for nulls."""
    chunks = values.chunks if isinstance(values, pa.ChunkedArray) else [values]
    bodies = [body for chunk in chunks for body in _encode_chunk(chunk, now_ns, cap_bytes, max_message_bytes)]
    return bodies if packing.codec is Codec.NONE else [pack_again(body, packing) for body in bodies]


def values_to_arrow(frame: Frame) -> pa.BinaryArray:
    """Return the frame's payloads as an Arrow array over the frame's own bytes; a copy if some were removed."""
    columns = frame.columns()
    ends, kept = columns.value_ends(), columns.kept()
    array = binary_array(frame, ends, columns.value_bytes(), len(ends) // 4 - 1)
    return array if kept is None else array.filter(pa.array(kept, type=pa.bool_()))


def binary_array(
    frame: Frame, ends: memoryview, data: memoryview, count: int, validity: memoryview | None = None
) -> pa.BinaryArray:
    """Return an array over bytes of the frame; raises CorruptData if they are not a valid one."""
    try:
        if ends[:4] != bytes(4):
            raise ValueError("the first item does not begin at 0")
        buffers = [None if validity is None else pa.py_buffer(validity), pa.py_buffer(ends), pa.py_buffer(data)]
        array = pa.Array.from_buffers(pa.binary(), count, buffers)
        array.validate(full=True)  # wrong ends would make Arrow read outside the buffer
    except (pa.ArrowException, ValueError) as error:
        raise CorruptData(f"the frame at offset {frame.base_offset} is not a valid Arrow array: {error}") from None
    return array


def _encode_chunk(chunk: Any, now_ns: int, cap_bytes: int, max_message_bytes: int) -> Iterator[Body]:
    if not isinstance(chunk, pa.Array):
        raise InvalidRequest(f"append_arrow takes an Arrow array of binary values, not {type(chunk).__name__}")
    if chunk.type in (pa.string(), pa.large_string(), pa.large_binary()) or pa.types.is_fixed_size_binary(chunk.type):
        try:
            chunk = chunk.cast(pa.binary())
        except pa.ArrowInvalid as error:
            raise MessageTooLarge(f"the array cannot be stored: {error}. Append it in smaller pieces") from None
    if chunk.type != pa.binary():
        raise InvalidRequest(f"append_arrow takes binary or text values, not {chunk.type}: cast the array first")
    if chunk.null_count:
        raise InvalidRequest(
            f"{chunk.null_count} of the values are null. Nothing was kept; replace them with values first"
        )
    if not len(chunk):
        return
    try:
        chunk.validate(full=True)
    except pa.ArrowInvalid as error:
        raise InvalidRequest(f"the array is not valid: {error}. Nothing of it was kept; correct it first") from None
    longest = pc.max(pc.binary_length(chunk)).as_py()
    if longest > max_message_bytes:
        raise MessageTooLarge(
            f"a message has {longest} bytes, the limit is {max_message_bytes}; nothing was kept. "
            "Split it, or raise max_message_bytes"
        )
    yield from encode_rows(Rows(values=Bytes.of(chunk)), 0, len(chunk), now_ns, cap_bytes=cap_bytes)


HEADER_PAIRS: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
INSTANT: Final = pa.timestamp("us", tz="UTC")

# From this many messages on, a frame's buffers are used as they are.
_LARGE: Final = 32

# This many single-message frames in a row are worth decoding with `Singles`.
_RUN: Final = 16


def from_numpy(numbers: np.ndarray[Any, Any], missing: np.ndarray[Any, np.dtype[np.bool_]] | None = None) -> pa.Array:
    """Return the numbers, truth values or times as an Arrow array, null where `missing`; they are not copied.

    `pa.array` does the same, but imports pandas first, which a fresh process of Spark's has to wait for.
    """
    kind = pa.from_numpy_dtype(numbers.dtype)
    valid = None if missing is None else pa.py_buffer(np.packbits(~missing, bitorder="little"))
    data = np.packbits(numbers, bitorder="little") if numbers.dtype == np.bool_ else np.ascontiguousarray(numbers)
    return pa.Array.from_buffers(kind, len(numbers), [valid, pa.py_buffer(data.view(np.uint8))])


def repeated(text: str, count: int) -> pa.Array:
    """Return the text so many times."""
    content = text.encode()
    ends = pa.py_buffer((np.arange(count + 1) * len(content)).astype(np.int32))
    return pa.Array.from_buffers(pa.string(), count, [None, ends, pa.py_buffer(content * count)])


class FrameColumns:
    """The messages of several frames as columns; removed messages still have their rows, see `kept`."""

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
        """Return names and values of the headers, including our own; a message without any has an empty list."""
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
        """Return the ids as signed numbers; null if there was no producer."""
        ids = np.fromiter((frame.header.producer_id for frame in self._frames), np.uint64, len(self._frames))
        rows = np.repeat(ids, self._counts)
        return from_numpy(rows.view(np.int64), rows == 0)

    def producer_epochs(self) -> pa.Array:
        return from_numpy(self._each(lambda header: header.producer_epoch), self._without_producer())

    def sequences(self) -> pa.Array:
        numbers = (self._each(lambda header: header.first_sequence) + self._places()) % 2**32
        return from_numpy(numbers, self._without_producer())

    def kept(self) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
        """Return for each row whether its message still exists; None if all do."""
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
        """Return a field of the frames' headers, for every row."""
        numbers = np.fromiter((field(frame.header) for frame in self._frames), np.int64, len(self._frames))
        return np.repeat(numbers, self._counts)

    def _places(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return for each row its index in its frame."""
        starts = np.cumsum(self._counts) - self._counts
        return np.arange(self.rows, dtype=np.int64) - np.repeat(starts, self._counts)

    def _without_producer(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        return ~self._each(lambda header: 1 if header.producer_id else 0).astype(np.bool_)

    def _numbers(self, column: int, kind: Any, otherwise: Callable[[Frame], int]) -> np.ndarray[Any, Any]:
        """Return a column of fixed width; frames that do not use it have the same number for all messages."""
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
        """Return the frames in order, with runs of single-message frames grouped."""
        if self._known_runs is None:
            self._known_runs = []
            for single, frames in groupby(self._frames, is_single):
                run = list(frames)
                self._known_runs.append(Singles(run) if single and len(run) >= _RUN else run)
        return self._known_runs

    def _instants(self, column: int) -> pa.Array:
        """Return times in ms since 1970 as timestamps; 0 means null."""
        if not self._uses & column:
            return pa.nulls(self.rows, INSTANT)
        numbers = self._numbers(column, np.int64, lambda frame: 0)
        return from_numpy(numbers * 1000, numbers == 0).cast(INSTANT)

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
    """Return the items at the front of the part, and what follows them."""
    ends_bytes = 4 * (count + 1)
    start = ends_bytes + len(padding(ends_bytes))
    length = int.from_bytes(part[ends_bytes - 4 : ends_bytes], "little", signed=True)
    array = binary_array(frame, part[:ends_bytes], part[start : start + length], count)
    return array, part[start + length + len(padding(length)) :]


# Frames of a single message each, as publishing one by one leaves them, are decoded all at once.
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
    """Whether the frame is of that form; for long messages it would not be faster."""
    header = frame.header
    return (
        header.count == 1
        and header.kind == Kind.DATA
        and header.codec == Codec.NONE
        and header.raw_bytes == header.body_bytes <= _MOST_BYTES
        and not header.columns & _OTHERS
    )


class Singles:
    """Several such frames in a row."""

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
        """Return a column of fixed width; 0 for frames that do not use it."""
        found = np.zeros(len(self.frames), kind)
        used = (self._columns & column) != 0
        found[used] = self._read(self._place(column)[used], kind)
        return found

    def _place(self, column: int) -> Places:
        """Return where a column is; those with lower bits come before it."""
        place: Places = self._fixed_at.copy()
        for each in _FIXED:
            if each < column:
                place += 8 * ((self._columns & each) != 0)
        return place

    def _length(self, at: Places, used: npt.NDArray[np.bool_]) -> Places:
        """Return the second of the two ends of an item; the first must be 0."""
        self._check(~used | (at + 8 <= self._ends))
        found = np.zeros((len(self.frames), 2), np.int64)
        found[used] = self._read(at[used], np.int32, 2)
        self._check((found[:, 0] == 0) & (found[:, 1] >= 0))
        return found[:, 1]

    def _read(self, at: Places, kind: Any, count: int = 1) -> npt.NDArray[Any]:
        """Return the numbers at positions that need not be aligned."""
        width = np.dtype(kind).itemsize * count
        cut = np.ascontiguousarray(self._data[at[:, None] + np.arange(width)])
        return cut.view(kind) if count > 1 else cut.view(kind).reshape(len(at))

    def _items(self, starts: Places, sizes: Places) -> pa.Array:
        """Return slices of the bodies: of an array with the slices and what is between them, every second is taken."""
        ends = np.stack([starts, starts + sizes], axis=1).ravel().astype(np.int32)
        buffers = [None, pa.py_buffer(ends), pa.py_buffer(self._data)]
        both = pa.Array.from_buffers(pa.binary(), len(ends) - 1, buffers)
        return both.take(pa.array(np.arange(0, len(ends), 2)))

    def _check(self, good: npt.NDArray[np.bool_]) -> None:
        if not good.all():
            frame = self.frames[int(np.flatnonzero(~good)[0])]
            raise CorruptData(f"the columns of the frame at offset {frame.base_offset} do not fit in it")


# Murmur3 with 32 bits and seed 0, of many keys at once: keys of the same length are hashed side by side.
Words = npt.NDArray[np.uint32]

_C1, _C2 = np.uint32(0xCC9E2D51), np.uint32(0x1B873593)
_M1, _M2 = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)
_FIVE, _ADDED = np.uint32(5), np.uint32(0xE6546B64)

# Beyond either, hashing length by length does not pay.
_MOST_LENGTHS: Final = 64
_LONGEST: Final = 256


def murmur3_of(ends: npt.NDArray[np.int32], data: npt.NDArray[np.uint8]) -> Words | None:
    """Return the hash of each item in the data, from one end to the next; None if their lengths vary too much."""
    sizes = np.diff(ends)
    lengths: Any = np.unique(sizes)
    if len(lengths) > _MOST_LENGTHS or (len(lengths) and lengths[-1] > _LONGEST):
        return None
    found = np.empty(len(sizes), np.uint32)
    for length in lengths.tolist():
        which = np.flatnonzero(sizes == length)
        found[which] = _of_one_length(data[ends[which][:, None] + np.arange(length)])
    return found


def _of_one_length(items: npt.NDArray[np.uint8]) -> Words:
    """Hash items of equal length, one per row."""
    count, length = items.shape
    padded = np.zeros((count, (length + 3) // 4 * 4), np.uint8)
    padded[:, :length] = items
    words = padded.view(np.uint32)
    hashes = np.zeros(count, np.uint32)
    for at in range(length // 4):
        hashes = _rotated(hashes ^ _mixed(words[:, at]), 13) * _FIVE + _ADDED
    if length % 4:
        hashes ^= _mixed(words[:, -1])
    hashes ^= np.uint32(length)
    hashes = (hashes ^ (hashes >> np.uint32(16))) * _M1
    hashes = (hashes ^ (hashes >> np.uint32(13))) * _M2
    return hashes ^ (hashes >> np.uint32(16))


def _mixed(words: Words) -> Words:
    return _rotated(words * _C1, 15) * _C2


def _rotated(words: Words, bits: int) -> Words:
    return (words << np.uint32(bits)) | (words >> np.uint32(32 - bits))


Parts: TypeAlias = list[bytes | memoryview]


class Bytes(msgspec.Struct, frozen=True):
    """Byte strings in Arrow's layout: where each begins and the last one ends, and all their bytes."""

    ends: npt.NDArray[np.int32]
    data: memoryview

    @staticmethod
    def of(array: Any) -> Bytes:
        """Return those of an Arrow array of binary values without nulls."""
        if not len(array):
            return Bytes(np.zeros(1, np.int32), memoryview(b""))
        _, ends, data = array.buffers()
        # The buffer may be longer than the array, and need not hold whole numbers.
        cut = np.frombuffer(ends, np.int32, len(array) + 1, 4 * array.offset)
        return Bytes(cut, memoryview(data or b"").cast("B"))

    def sizes(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.int64]:
        """Return the length of each."""
        return np.diff(self.ends[start : None if stop is None else stop + 1]).astype(np.int64)

    def parts(self, start: int, stop: int) -> Parts:
        """Return those from `start` to before `stop` as a column padded to a multiple of 8."""
        ends, data = _ends(self.ends, start, stop), self.data[self.ends[start] : self.ends[stop]]
        return [*ends, data, padding(len(data))]


class HeaderColumns(msgspec.Struct, frozen=True):
    """The headers of all rows: where each row's pairs begin, and the pairs' names and values."""

    ends: npt.NDArray[np.int32]
    names: Bytes
    values: Bytes

    def sizes(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.int64]:
        """Return the bytes of each row's headers."""
        ends = self.ends[start : None if stop is None else stop + 1]
        names, values = self.names.ends.astype(np.int64), self.values.ends.astype(np.int64)
        return np.diff(names[ends]) + np.diff(values[ends])

    def parts(self, start: int, stop: int) -> Parts:
        first, last = int(self.ends[start]), int(self.ends[stop])
        return [*_ends(self.ends, start, stop), *self.names.parts(first, last), *self.values.parts(first, last)]


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    """Messages as columns of equal length; None if no message uses the column."""

    values: Bytes
    keys: Bytes | None = None
    keyed: npt.NDArray[np.bool_] | None = None  # which rows have a key; None: all
    headers: HeaderColumns | None = None
    priorities: npt.NDArray[np.uint8] | None = None
    expires_at_ms: npt.NDArray[np.int64] | None = None
    due_at_ms: npt.NDArray[np.int64] | None = None
    flags: npt.NDArray[np.uint8] | None = None

    @property
    def count(self) -> int:
        return len(self.values.ends) - 1

    def sizes(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.int64]:
        """Return the size of each message: value, key and headers together."""
        sizes = self.values.sizes(start, stop)
        if self.keys is not None:
            sizes = sizes + self.keys.sizes(start, stop)
        if self.headers is not None:
            sizes = sizes + self.headers.sizes(start, stop)
        return sizes


def binary(array: Any) -> Any:
    """Return the array with values of type `binary`, whatever kind of text or bytes it has."""
    return array if array.type == pa.binary() else array.cast(pa.binary())


def without_nulls(array: Any) -> Any:
    """Return the array with empty values instead of nulls; under a null there may be any bytes."""
    return pc.fill_null(array, b"") if array.null_count else array


def encode_rows(
    rows: Rows, start: int, stop: int, now_ns: int, *, cap_bytes: int, packing: Packing = PLAIN
) -> Iterator[Body]:
    """Encode the rows from `start` to before `stop` as bodies of at most `cap_bytes`, or of a single larger message."""
    ends = np.cumsum(rows.sizes(start, stop) + _fixed_bytes(rows))
    at, used = 0, 0
    while at < stop - start:
        until = max(int(np.searchsorted(ends, used + cap_bytes, side="right")), at + 1)
        body = _body(rows, start + at, start + until, now_ns)
        yield body if packing.codec is Codec.NONE else pack_again(body, packing)
        at, used = until, int(ends[until - 1])


def _fixed_bytes(rows: Rows) -> int:
    """Return what each message adds to a frame besides its own bytes."""
    wide = sum(column is not None for column in (rows.expires_at_ms, rows.due_at_ms))
    narrow = sum(column is not None for column in (rows.keys, rows.headers, rows.priorities, rows.flags))
    return 4 + 8 * wide + 5 * narrow


def _body(rows: Rows, start: int, stop: int, now_ns: int) -> Body:
    """Encode one body; columns in which these rows have nothing are left out."""
    columns, parts = 0, _ends(rows.values.ends, start, stop)
    keyed = None if rows.keyed is None else rows.keyed[start:stop]
    if rows.keys is not None and (keyed is None or keyed.any()):
        if keyed is not None and not keyed.all():
            columns |= KEY_VALIDITY
            parts += _padded(np.packbits(keyed, bitorder="little"))
        columns |= KEYS
        parts += rows.keys.parts(start, stop)
    if rows.headers is not None and rows.headers.ends[stop] > rows.headers.ends[start]:
        columns |= HEADERS
        parts += rows.headers.parts(start, stop)
    for bit, column in (
        (PRIORITIES, rows.priorities),
        (EXPIRY, rows.expires_at_ms),
        (DUE, rows.due_at_ms),
        (FLAGS, rows.flags),
    ):
        if column is not None and column[start:stop].any():
            columns |= bit
            parts += _padded(column[start:stop])
    parts.append(rows.values.data[rows.values.ends[start] : rows.values.ends[stop]])
    body_bytes = sum(map(len, parts))
    parts.append(padding(body_bytes))
    crc = 0
    for part in parts:
        crc = crc32c(part, crc)
    return Body(parts, body_bytes, body_bytes, stop - start, columns, Codec.NONE, now_ns, crc)


def _ends(ends: npt.NDArray[np.int32], start: int, stop: int) -> Parts:
    return _padded(ends[start : stop + 1] - ends[start])


def _padded(column: npt.NDArray[Any]) -> Parts:
    content = np.ascontiguousarray(column).data.cast("B")
    return [content, padding(len(content))]
