"""Columns of Arrow and numpy to frames: whole columns are laid out at once, no message is touched.

Needs pyarrow and numpy (extra `spark`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.checksum import crc32c
from holdfast.codec.columns import DUE, EXPIRY, FLAGS, HEADERS, KEY_VALIDITY, KEYS, PRIORITIES, padding
from holdfast.codec.compression import Codec
from holdfast.codec.encode import PLAIN, Body, Packing, pack_again

# Murmur3 of many keys at once, 32 bits, seed 0: keys of one length go through it side by side. Needs numpy.


Words = npt.NDArray[np.uint32]

_C1, _C2 = np.uint32(0xCC9E2D51), np.uint32(0x1B873593)
_M1, _M2 = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)
_FIVE, _ADDED = np.uint32(5), np.uint32(0xE6546B64)

# Beyond either, going through them length by length does not pay.
_MOST_LENGTHS: Final = 64
_LONGEST: Final = 256


def murmur3_of(ends: npt.NDArray[np.int32], data: npt.NDArray[np.uint8]) -> Words | None:
    """The hash of each of the items that lie in the data, from one end to the next; None where they are too mixed."""
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
    """A row of bytes each."""
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
    """Byte strings as Arrow lays them out: where each begins and the last one ends, and all their bytes."""

    ends: npt.NDArray[np.int32]
    data: memoryview

    @staticmethod
    def of(array: Any) -> Bytes:
        """Those of an Arrow array of binary values without nulls."""
        if not len(array):
            return Bytes(np.zeros(1, np.int32), memoryview(b""))
        _, ends, data = array.buffers()
        first = array.offset
        cut = np.frombuffer(ends, np.int32)[first : first + len(array) + 1]
        return Bytes(cut, memoryview(data or b"").cast("B"))

    def sizes(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.int64]:
        """How long each of them is."""
        return np.diff(self.ends[start : None if stop is None else stop + 1]).astype(np.int64)

    def parts(self, start: int, stop: int) -> Parts:
        """Those from `start` to before `stop`, as a column that ends on a multiple of 8."""
        ends, data = _ends(self.ends, start, stop), self.data[self.ends[start] : self.ends[stop]]
        return [*ends, data, padding(len(data))]


class Headers(msgspec.Struct, frozen=True):
    """The headers of all rows: where each row's pairs begin, and the pairs' names and values."""

    ends: npt.NDArray[np.int32]
    names: Bytes
    values: Bytes

    def sizes(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.int64]:
        """The bytes of each row's headers."""
        ends = self.ends[start : None if stop is None else stop + 1]
        names, values = self.names.ends.astype(np.int64), self.values.ends.astype(np.int64)
        return np.diff(names[ends]) + np.diff(values[ends])

    def parts(self, start: int, stop: int) -> Parts:
        first, last = int(self.ends[start]), int(self.ends[stop])
        return [*_ends(self.ends, start, stop), *self.names.parts(first, last), *self.values.parts(first, last)]


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    """Messages as columns of one length; None where no message has anything there."""

    values: Bytes
    keys: Bytes | None = None
    keyed: npt.NDArray[np.bool_] | None = None  # which rows have a key; None: all
    headers: Headers | None = None
    priorities: npt.NDArray[np.uint8] | None = None
    expires_at_ms: npt.NDArray[np.int64] | None = None
    due_at_ms: npt.NDArray[np.int64] | None = None
    flags: npt.NDArray[np.uint8] | None = None

    @property
    def count(self) -> int:
        return len(self.values.ends) - 1

    def sizes(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.int64]:
        """Bytes of each message: value, key and headers together."""
        sizes = self.values.sizes(start, stop)
        if self.keys is not None:
            sizes = sizes + self.keys.sizes(start, stop)
        if self.headers is not None:
            sizes = sizes + self.headers.sizes(start, stop)
        return sizes


def binary(array: Any) -> Any:
    """The array with values of the type `binary`, whatever kind of text or bytes it has."""
    return array if array.type == pa.binary() else array.cast(pa.binary())


def without_nulls(array: Any) -> Any:
    """The array with nothing in the place of nulls; under a null there may be any bytes."""
    return pc.fill_null(array, b"") if array.null_count else array


def encode_rows(
    rows: Rows, start: int, stop: int, now_ns: int, *, cap_bytes: int, packing: Packing = PLAIN
) -> Iterator[Body]:
    """The rows from `start` to before `stop`: bodies of at most `cap_bytes` each, but for a single larger message."""
    ends = np.cumsum(rows.sizes(start, stop) + _fixed_bytes(rows))
    at, used = 0, 0
    while at < stop - start:
        until = max(int(np.searchsorted(ends, used + cap_bytes, side="right")), at + 1)
        body = _body(rows, start + at, start + until, now_ns)
        yield body if packing.codec is Codec.NONE else pack_again(body, packing)
        at, used = until, int(ends[until - 1])


def _fixed_bytes(rows: Rows) -> int:
    """What each message adds to a frame besides its own bytes."""
    wide = sum(column is not None for column in (rows.expires_at_ms, rows.due_at_ms))
    narrow = sum(column is not None for column in (rows.keys, rows.headers, rows.priorities, rows.flags))
    return 4 + 8 * wide + 5 * narrow


def _body(rows: Rows, start: int, stop: int, now_ns: int) -> Body:
    """One body; a column in which these rows have nothing is left out."""
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
