"""A value that is too large to be held in memory: it stays in its file, and is read piece by piece.

Its checksum is followed on the way. What reads it is told of a mismatch instead of being given the last piece, so
that nobody ever comes to the end of a spoiled value without knowing.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import BinaryIO, Final, TypeAlias, cast

from holdfast.checksum import crc32c
from holdfast.errors import ChecksumMismatch

LARGE_BYTES: Final = 1 << 20  # what is stored in more than this is not copied into memory by itself
CHUNK_BYTES: Final = 256 * 1024
_STEP: Final = 1 << 20


class LargeValue:
    """The bytes [start, end) of a part of a file of which the checksum is known.

    `behind` stands for what the checksum covers besides, at its end. `home` is the file of a value that is on its way
    into a log, and alone there.
    """

    __slots__ = ("_behind", "_checked", "_crc", "_end", "_start", "home")

    def __init__(
        self, checked: memoryview, start: int, end: int, crc: int, behind: bytes = b"", home: object = None
    ) -> None:
        self.home = home
        self._checked = checked
        self._start = start
        self._end = end
        self._crc = crc
        self._behind = behind

    def __len__(self) -> int:
        return self._end - self._start

    def __bytes__(self) -> bytes:
        """All of it, in memory."""
        return b"".join(self.chunks(_STEP))

    def __repr__(self) -> str:
        return f"<LargeValue of {len(self):,} bytes: {self.first(20)!r}…>"

    @property
    def view(self) -> memoryview:
        """Its bytes where they lie, not checked."""
        return self._checked[self._start : self._end]

    def first(self, count: int) -> bytes:
        """What it begins with, not checked."""
        return bytes(self.view[:count])

    def pieces(self) -> Iterator[memoryview]:
        """Its bytes where they lie, piece by piece; ChecksumMismatch before the last one where they are spoiled."""
        summing = _Summing(self)
        for at in range(self._start, self._end, _STEP):
            piece = self._checked[at : min(at + _STEP, self._end)]
            summing.add(piece)
            yield piece

    def chunks(self, size: int = CHUNK_BYTES) -> Iterator[bytes]:
        """The same as copies of `size` bytes each, but the last."""
        summing = _Summing(self)
        for at in range(self._start, self._end, size):
            chunk = bytes(self._checked[at : min(at + size, self._end)])
            summing.add(chunk)
            yield chunk

    def open(self) -> BinaryIO:
        """A file to read it from, front to back."""
        return cast("BinaryIO", io.BufferedReader(_LargeReading(self), CHUNK_BYTES))


Value: TypeAlias = bytes | LargeValue


class _Summing:
    """Follows the checksum from the first byte that it covers, and holds it against what it must be at the end."""

    def __init__(self, value: LargeValue) -> None:
        self._value = value
        self._left = len(value)
        self._sum = crc32c(value._checked[: value._start])  # noqa: SLF001  a half of the value

    def add(self, piece: bytes | memoryview) -> None:
        value = self._value
        self._sum = crc32c(piece, self._sum)
        self._left -= len(piece)
        if not self._left:
            whole = crc32c(value._behind, crc32c(value._checked[value._end :], self._sum))  # noqa: SLF001
            if whole != value._crc:  # noqa: SLF001
                raise ChecksumMismatch(
                    f"a value of {len(value):,} bytes does not match its checksum: it is damaged on disk, and the part "
                    "read so far cannot be trusted; run `holdfast check` on the folder"
                )


class _LargeReading(io.RawIOBase):
    """A large value as a file without a buffer."""

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
