"""Frames in a segment's bytes: walking from one to the next, skipping damage, and the sparse index."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from contextlib import suppress
from struct import Struct
from typing import Final

import msgspec

from holdfast.checksum import crc32c
from holdfast.codec.frame import (
    ALIGNMENT,
    HEADER_BYTES,
    KNOWN_FLAGS,
    MAGIC_PREFIX,
    MAY_HOLD_SHORT,
    FrameHeader,
    check_body,
    check_known,
    read_header,
    read_plain,
)
from holdfast.errors import CorruptData, UnknownFormat
from holdfast.storage.state import NO_EPOCHS, Epochs

_CHUNK: Final = 1 << 20


class Damage(msgspec.Struct, frozen=True, gc=False):
    """Bytes [position, end) that are not a frame; `next_offset` is known if a good frame follows."""

    position: int
    end: int
    first_offset: int
    next_offset: int | None
    reason: str


class FrameRules:
    """What the next frame must be like to belong to the log, however intact its bytes are.

    Offset and epoch never decrease, and it must not be void: left over from an epoch that was cut off before it.
    """

    __slots__ = ("_void_epoch", "_void_from", "epoch", "epochs", "log_id", "offset")

    def __init__(self, log_id: int, offset: int, epoch: int = 0, epochs: Epochs = NO_EPOCHS) -> None:
        self.log_id = log_id
        self.offset = offset
        self.epoch = epoch
        self.epochs = epochs
        self._void_epoch = -1
        self._void_from: int | None = None

    @property
    def goes_on(self) -> bool:
        """Whether frames of the epoch that was last checked belong to the log whatever their offsets."""
        return self._void_from is None

    def check(self, header: FrameHeader) -> None:
        if header.log_id != self.log_id:
            other = f"{header.log_id:08x}, not {self.log_id:08x}"
            raise CorruptData(f"the frame at position {header.position} belongs to another log ({other})")
        if header.epoch != self._void_epoch:
            self._void_epoch, self._void_from = header.epoch, self.epochs.end_of(header.epoch)
        void = self._void_from is not None and header.base_offset >= self._void_from
        if void or header.base_offset < self.offset or header.epoch < self.epoch:
            raise CorruptData(
                f"the frame at position {header.position} (offset {header.base_offset}, epoch {header.epoch}) "
                "is left over from a tail that was cut off"
            )


def walk(
    data: memoryview,
    wanted: FrameRules,
    *,
    position: int = 0,
    bodies: bool = True,
    and_alike: Callable[[memoryview, FrameHeader], FrameHeader] | None = None,
) -> Iterator[FrameHeader | Damage]:
    """Yield each good frame, and one Damage for each stretch of bytes that is not one.

    `data` is the segment up to where it may be read. Zeros up to the end are not damage. `and_alike` is called behind
    each frame, deals with those of the same kind that follow (see `frames_alike`), and returns the last of them.
    """
    end = len(data)
    while position < end:
        expected_offset = wanted.offset
        try:
            found = read_plain(data, position, wanted.log_id) if bodies else None
            if found is None:
                header = _good_frame(data, position, wanted, bodies=bodies)
            else:
                header = found
                wanted.check(header)
        except UnknownFormat:
            raise  # intact, but written by a newer release: neither torn nor damaged
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
        if and_alike is not None and header.count == 1 and wanted.goes_on:
            header = and_alike(data, header)
        position = header.end
        wanted.offset, wanted.epoch = header.base_offset + header.count, header.epoch


def find_frame(data: memoryview, position: int, wanted: FrameRules) -> FrameHeader | None:
    """Return the first intact frame at or after `position`."""
    for at in _candidates(data, position):
        try:
            return _good_frame(data, at, wanted, bodies=True)
        except UnknownFormat:
            raise
        except CorruptData:
            pass
    return None


def _candidates(data: memoryview, position: int) -> Iterator[int]:
    """Yield the aligned positions from `position` on at which a frame could begin."""
    while position < len(data):
        chunk = bytes(data[position : position + _CHUNK + len(MAGIC_PREFIX)])
        at = chunk.find(MAGIC_PREFIX)
        while 0 <= at < _CHUNK:
            if (position + at) % ALIGNMENT == 0:
                yield position + at
            at = chunk.find(MAGIC_PREFIX, at + 1)
        position += _CHUNK


def used_end(data: memoryview, position: int) -> int:
    """Return the position after the last byte that is not zero; `position` if all are zero."""
    end = len(data)
    while end > position:
        start = max(position, end - _CHUNK)
        used = len(bytes(data[start:end]).rstrip(b"\0"))
        if used:
            return start + used
        end = start
    return position


def _good_frame(data: memoryview, position: int, wanted: FrameRules, *, bodies: bool) -> FrameHeader:
    header = read_header(data, position, position, wanted.log_id)
    wanted.check(header)
    check_known(header)
    if bodies:
        check_body(data, position, header)
    elif header.end > len(data):
        raise CorruptData(f"the file ends inside the frame at position {position}")
    return header


def first_log_id(data: memoryview) -> int | None:
    """Return the log id of the first frame with an intact header, for a log whose state file is missing."""
    for at in _candidates(data, 0):
        with suppress(CorruptData):
            return read_header(data, at, at).log_id
    return None


# The sparse index of a segment: about one entry per 4 KiB, by offset and by time.
#
#     at  size  field
#     0   8     magic         "HFINDEX" and the version, 1
#     8   4     log_id
#     12  4     count         entries
#     16  8     base_offset   of the segment
#     24  8     next_offset   after the segment's last message
#     32  4     end           position after its last frame
#     36  4     flags         those of the segment's first frame
#     40  8     max_time_ns   latest time in it
#     48  8*n   offsets       first offset of an entry's frame
#     ..  8*n   times         latest time of all frames before it
#     ..  4*n   positions     where the frame starts
#     ..  4     check         CRC32C of all bytes before it
#
# An index is a cache: if missing or damaged, it is rebuilt from the log. Times are running maxima, so they never
# decrease even if the clock did, and a search by time finds the first message at or after it. By its flags, the
# index of the current file is told from that of a file it has replaced. A release that does not know short frames takes
# an index with their flag for one of another file, so it walks the segment, and refuses the first frame.
_MAGIC: Final = b"HFINDEX\x01"
_HEAD: Final = Struct("<8sIIQQIIq")
_CHECK: Final = Struct("<I")
_ENTRY_BYTES: Final = 20
assert _HEAD.size == 48  # keeps the table above and the code in step

NO_TIME: Final = -(2**63)


class SegmentIndex:
    """Where to start looking. The owner adds entries while others search in `offsets`, which therefore grows last."""

    __slots__ = (
        "base_offset",
        "end",
        "flags",
        "max_time_ns",
        "next_entry_at",
        "next_offset",
        "offsets",
        "positions",
        "spacing_bytes",
        "times",
    )

    def __init__(self, base_offset: int, spacing_bytes: int) -> None:
        self.spacing_bytes = spacing_bytes
        self.next_entry_at = 0
        self.base_offset = base_offset
        self.next_offset = base_offset
        self.end = 0
        self.max_time_ns = NO_TIME
        self.flags = MAY_HOLD_SHORT  # as in a new segment, unless another first frame is found
        self.offsets = array("Q")
        self.times = array("q")
        self.positions = array("I")

    def add(self, position: int, end: int, base_offset: int, next_offset: int, max_time_ns: int) -> None:
        """Add a frame that was written, or found, after all earlier ones."""
        if position >= self.next_entry_at:
            self.add_entry(position, base_offset)
        self.end = end
        self.next_offset = next_offset
        if max_time_ns > self.max_time_ns:
            self.max_time_ns = max_time_ns

    def add_entry(self, position: int, base_offset: int) -> None:
        """Make the frame at this position one that a search can start from."""
        self.next_entry_at = position + self.spacing_bytes
        self.positions.append(position)
        self.times.append(self.max_time_ns)
        self.offsets.append(base_offset)

    def add_header(self, header: FrameHeader) -> None:
        if header.position == 0:
            self.flags = header.flags & KNOWN_FLAGS
        self.add(header.position, header.end, header.base_offset, header.next_offset, header.max_time_ns)

    def fits(self, data: memoryview) -> bool:
        """Whether it matches these bytes, and not those of a file that was replaced since."""
        if not self.end:  # no frame yet; where a torn one was removed there are zeros
            return not any(data[:HEADER_BYTES])
        return self.flags == _first_flags(data)

    @property
    def first_time_ns(self) -> int:
        """Roughly when the segment was started."""
        return self.times[1] if len(self.times) > 1 else self.max_time_ns

    def position_before(self, offset: int) -> int:
        """Return the start of a frame at or before the one that holds `offset`."""
        i = bisect_right(self.offsets, offset) - 1
        return self.positions[i] if i >= 0 else 0

    def position_before_time(self, time_ns: int) -> int:
        """Return the start of a frame at or before the first one with a message of this time or later."""
        i = bisect_left(self.times, time_ns, hi=len(self.offsets)) - 1
        return self.positions[i] if i >= 0 else 0

    def encode(self, log_id: int) -> bytes:
        content = b"".join(
            (
                _HEAD.pack(
                    _MAGIC,
                    log_id,
                    len(self.offsets),
                    self.base_offset,
                    self.next_offset,
                    self.end,
                    self.flags,
                    self.max_time_ns,
                ),
                self.offsets.tobytes(),
                self.times.tobytes(),
                self.positions.tobytes(),
            )
        )
        return content + _CHECK.pack(crc32c(content))


def parse_index(content: bytes, log_id: int, base_offset: int, spacing_bytes: int) -> SegmentIndex | None:
    """Parse an index; None unless the bytes are an intact index of this segment."""
    if len(content) < _HEAD.size + _CHECK.size:
        return None
    magic, found_id, count, found_base, next_offset, end, flags, max_time_ns = _HEAD.unpack_from(content)
    if magic != _MAGIC or found_id != log_id or found_base != base_offset:
        return None
    if len(content) != _HEAD.size + count * _ENTRY_BYTES + _CHECK.size:
        return None
    if _CHECK.unpack_from(content, len(content) - _CHECK.size)[0] != crc32c(content[: -_CHECK.size]):
        return None
    index = SegmentIndex(base_offset, spacing_bytes)
    index.next_offset, index.end, index.max_time_ns, index.flags = next_offset, end, max_time_ns, flags
    offsets_end = _HEAD.size + 8 * count
    times_end = offsets_end + 8 * count
    index.offsets.frombytes(content[_HEAD.size : offsets_end])
    index.times.frombytes(content[offsets_end:times_end])
    index.positions.frombytes(content[times_end : times_end + 4 * count])
    index.next_entry_at = index.positions[-1] + spacing_bytes if count else 0
    return index


def _first_flags(data: memoryview) -> int | None:
    """Return the flags of the first frame; None if it cannot be read."""
    if len(data) < HEADER_BYTES:
        return 0
    try:
        return read_header(data, 0, 0).flags & KNOWN_FLAGS
    except CorruptData:
        return None
