"""From frame to frame through a segment's bytes, and past damage to the next good one.

A walk never trusts a length that its checksum does not vouch for, and never takes the end of good
frames for the end of the log: it looks at what lies behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from holdfast.codec.frame import (
    ALIGNMENT,
    HEADER_BYTES,
    MAGIC_PREFIX,
    FrameHeader,
    check_body,
    check_known,
    read_header,
    read_plain,
)
from holdfast.errors import CorruptData, UnknownFormat
from holdfast.storage.epochs import NO_EPOCHS, Epochs

_CHUNK: Final = 1 << 20


class Damage(msgspec.Struct, frozen=True, gc=False):
    """Bytes [position, end) that are no frame; `next_offset` is known where a good frame follows."""

    position: int
    end: int
    first_offset: int
    next_offset: int | None
    reason: str


class Wanted:
    """What the next frame of a log must be like to be part of it, however whole its bytes are.

    Its offset and epoch never run backwards, and it must not be void: left over from an epoch that
    was cut off before it.
    """

    __slots__ = ("_void_epoch", "_void_from", "epoch", "epochs", "log_id", "offset")

    def __init__(self, log_id: int, offset: int, epoch: int = 0, epochs: Epochs = NO_EPOCHS) -> None:
        self.log_id = log_id
        self.offset = offset
        self.epoch = epoch
        self.epochs = epochs
        self._void_epoch = -1
        self._void_from: int | None = None

    def check(self, header: FrameHeader) -> None:
        if header.log_id != self.log_id:
            other = f"{header.log_id:08x}, not {self.log_id:08x}"
            raise CorruptData(f"the frame at position {header.position} is of another log ({other})")
        if header.epoch != self._void_epoch:
            self._void_epoch, self._void_from = header.epoch, self.epochs.end_of(header.epoch)
        void = self._void_from is not None and header.base_offset >= self._void_from
        if void or header.base_offset < self.offset or header.epoch < self.epoch:
            raise CorruptData(
                f"the frame at position {header.position} (offset {header.base_offset}, epoch {header.epoch}) "
                "is left over from a tail that was cut off"
            )


def walk(data: memoryview, wanted: Wanted, *, position: int = 0, bodies: bool = True) -> Iterator[FrameHeader | Damage]:
    """Each good frame, and one Damage for each stretch of bytes that is not one.

    `data` is the whole segment as far as it may be looked at. Zeros up to its end are no damage.
    """
    end = len(data)
    while position < end:
        expected_offset = wanted.offset
        try:
            header = _good_frame(data, position, wanted, bodies=bodies)
        except UnknownFormat:
            raise  # whole, but written by a newer release: neither torn nor damaged
        except CorruptData as error:
            found = find_frame(data, position + ALIGNMENT, wanted)
            if found is None:
                used = used_end(data, position)
                if used > position:
                    yield Damage(position, used, expected_offset, None, str(error))
                return
            yield Damage(position, found.position, expected_offset, found.base_offset, str(error))
            header = found
        else:
            if header.base_offset > expected_offset:
                reason = f"offsets {expected_offset} to {header.base_offset - 1} are missing before position {position}"
                yield Damage(position, position, expected_offset, header.base_offset, reason)
        yield header
        position = header.end
        wanted.offset, wanted.epoch = header.next_offset, header.epoch


def find_frame(data: memoryview, position: int, wanted: Wanted) -> FrameHeader | None:
    """The first whole frame at or behind `position`."""
    end = len(data)
    while position < end:
        chunk = bytes(data[position : position + _CHUNK + len(MAGIC_PREFIX)])
        at = chunk.find(MAGIC_PREFIX)
        while at >= 0:
            if (position + at) % ALIGNMENT == 0:
                try:
                    return _good_frame(data, position + at, wanted, bodies=True)
                except UnknownFormat:
                    raise
                except CorruptData:
                    pass
            at = chunk.find(MAGIC_PREFIX, at + 1)
        position += _CHUNK
    return None


def used_end(data: memoryview, position: int) -> int:
    """Position behind the last byte that is not zero, or `position` where there is none."""
    end = len(data)
    while end > position:
        start = max(position, end - _CHUNK)
        used = len(bytes(data[start:end]).rstrip(b"\0"))
        if used:
            return start + used
        end = start
    return position


def _good_frame(data: memoryview, position: int, wanted: Wanted, *, bodies: bool) -> FrameHeader:
    plain = read_plain(data, position, wanted.log_id) if bodies else None
    if plain is not None:
        wanted.check(plain)
        return plain
    header = read_header(data, position, position)
    wanted.check(header)
    check_known(header)
    if bodies:
        check_body(data, position, header)
    elif header.end > len(data):
        raise CorruptData(f"the file ends inside the frame at position {position}")
    return header


def first_log_id(data: memoryview) -> int | None:
    """The log id of the first frame whose header is whole, for a log whose state file is gone."""
    position = 0
    while position + HEADER_BYTES <= len(data):
        chunk = bytes(data[position : position + _CHUNK + HEADER_BYTES])
        at = chunk.find(MAGIC_PREFIX)
        while at >= 0:
            if (position + at) % ALIGNMENT == 0:
                try:
                    return read_header(data, position + at, position + at).log_id
                except CorruptData:
                    pass
            at = chunk.find(MAGIC_PREFIX, at + 1)
        position += _CHUNK
    return None
