"""Values too large to hold in memory: they stay in their file and are read piece by piece.

The checksum is computed along the way. If it does not match, reading raises instead of returning the last piece, so
nobody gets to the end of a damaged value without noticing.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import BinaryIO, Final, TypeAlias, cast

from holdfast.checksum import crc32c
from holdfast.errors import ChecksumMismatch

LARGE_BYTES: Final = 1 << 20  # values that take more than this on disk are not copied into memory unasked
CHUNK_BYTES: Final = 256 * 1024
_STEP: Final = 1 << 20


class LargeValue:
    """The bytes [start, end) of a region in a file whose checksum is known.

    `tail` holds the bytes that the checksum covers after the end of the region. `home` is the file of a value that is
    about to be appended to a log, where it is the only content.
    """

    __slots__ = ("_checked", "_crc", "_end", "_start", "_tail", "home")

    def __init__(
        self, checked: memoryview, start: int, end: int, crc: int, tail: bytes = b"", home: object = None
    ) -> None:
        self.home = home
        self._checked = checked
        self._start = start
        self._end = end
        self._crc = crc
        self._tail = tail

    def __len__(self) -> int:
        return self._end - self._start

    def __bytes__(self) -> bytes:
        """Return the whole value, read into memory and checked."""
        return b"".join(self.chunks(_STEP))

    def __repr__(self) -> str:
        return f"<LargeValue of {len(self):,} bytes: {self.first(20)!r}…>"

    @property
    def view(self) -> memoryview:
        """The bytes in place, not checked."""
        return self._checked[self._start : self._end]

    def first(self, count: int) -> bytes:
        """Return the first `count` bytes, not checked."""
        return bytes(self.view[:count])

    def pieces(self) -> Iterator[memoryview]:
        """Yield the bytes in place, piece by piece; raises ChecksumMismatch before the last one if they are damaged."""
        summing = _Summing(self)
        for at in range(self._start, self._end, _STEP):
            piece = self._checked[at : min(at + _STEP, self._end)]
            summing.add(piece)
            yield piece

    def chunks(self, size: int = CHUNK_BYTES) -> Iterator[bytes]:
        """Yield copies of `size` bytes (the last may be shorter), checked like `pieces`."""
        summing = _Summing(self)
        for at in range(self._start, self._end, size):
            chunk = bytes(self._checked[at : min(at + size, self._end)])
            summing.add(chunk)
            yield chunk

    def open(self) -> BinaryIO:
        """Return a file object that reads the value from start to end."""
        return cast("BinaryIO", io.BufferedReader(_LargeReading(self), CHUNK_BYTES))


Value: TypeAlias = bytes | LargeValue


class _Summing:
    """Computes the checksum of all bytes it covers, and compares it when the value's last byte was added."""

    def __init__(self, value: LargeValue) -> None:
        self._value = value
        self._left = len(value)
        self._sum = crc32c(value._checked[: value._start])  # noqa: SLF001  a half of the value

    def add(self, piece: bytes | memoryview) -> None:
        value = self._value
        self._sum = crc32c(piece, self._sum)
        self._left -= len(piece)
        if not self._left:
            whole = crc32c(value._tail, crc32c(value._checked[value._end :], self._sum))  # noqa: SLF001
            if whole != value._crc:  # noqa: SLF001
                raise ChecksumMismatch(
                    f"a value of {len(value):,} bytes does not match its checksum: it is damaged on disk, and the part "
                    "read so far cannot be trusted; run `holdfast check` on the folder"
                )


class _LargeReading(io.RawIOBase):
    """A large value as an unbuffered file."""

    def __init__(self, value: LargeValue) -> None:
        self._view = value.view
        self._at = 0
        self._summing = _Summing(value)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        piece = self._view[self._at : self._at + len(buffer)]
        if len(piece):
            buffer[: len(piece)] = piece
            self._summing.add(buffer[: len(piece)])
            self._at += len(piece)
        return len(piece)
