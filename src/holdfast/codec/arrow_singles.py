"""Frames of one message each, as publishing one by one leaves them: taken apart all at once. Needs pyarrow and numpy.

at       size  of the body
0        8     0, and the length of the value
8        8     0, and the length of the key            with a key
16       n     the key, padded                         with a key
…        8     each of priority, expiry, due, flags    where the frame uses it
…        n     the value
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.codec.columns import DUE, EXPIRY, FLAGS, KEYS, PRIORITIES
from holdfast.codec.compression import Codec
from holdfast.codec.frame import Frame, Kind
from holdfast.errors import CorruptData

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
