"""The sparse index of one segment: about one entry for each 4 KiB, by offset and by time.

    at  size  field
    0   8     magic         "HFINDEX" and the version, 1
    8   4     log_id
    12  4     count         entries
    16  8     base_offset   of the segment
    24  8     next_offset   behind the segment's last message
    32  4     end           position behind its last frame
    36  4     rewritten     how often the segment had been rewritten, as its first frame says
    40  8     max_time_ns   latest time in it
    48  8*n   offsets       first offset of an entry's frame
    ..  8*n   times         latest time of all frames before it
    ..  4*n   positions     where the frame starts
    ..  4     check         CRC32C of all bytes before it

An index is a cache: absent or damaged, it is rebuilt from the log. Times are running maxima, so that
they never fall even when the clock did, and a search by time finds the first message at or after it.
`rewritten` tells an index of the file that is there from one of a file that stood there before.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from struct import Struct
from typing import Final

from holdfast.checksum import crc32c
from holdfast.codec.frame import HEADER_BYTES, KNOWN_FLAGS, FrameHeader, read_header
from holdfast.errors import CorruptData

_MAGIC: Final = b"HFINDEX\x01"
_HEAD: Final = Struct("<8sIIQQIIq")
_CHECK: Final = Struct("<I")
_ENTRY_BYTES: Final = 20
assert _HEAD.size == 48  # keeps the table above and the code in step

NO_TIME: Final = -(2**63)


class SegmentIndex:
    """Where to start looking. The owner adds while others search: offsets grow last."""

    __slots__ = (
        "base_offset",
        "end",
        "max_time_ns",
        "next_entry_at",
        "next_offset",
        "offsets",
        "positions",
        "rewritten",
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
        self.rewritten = 0
        self.offsets = array("Q")
        self.times = array("q")
        self.positions = array("I")

    def add(self, position: int, end: int, base_offset: int, next_offset: int, max_time_ns: int) -> None:
        """A frame was written, or found, behind all earlier ones."""
        if position >= self.next_entry_at:
            self.add_entry(position, base_offset)
        self.end = end
        self.next_offset = next_offset
        if max_time_ns > self.max_time_ns:
            self.max_time_ns = max_time_ns

    def add_entry(self, position: int, base_offset: int) -> None:
        """Make the frame at the position one that a search may start from."""
        self.next_entry_at = position + self.spacing_bytes
        self.positions.append(position)
        self.times.append(self.max_time_ns)
        self.offsets.append(base_offset)

    def add_header(self, header: FrameHeader) -> None:
        if header.position == 0:
            self.rewritten = header.flags & KNOWN_FLAGS
        self.add(header.position, header.end, header.base_offset, header.next_offset, header.max_time_ns)

    def fits(self, data: memoryview) -> bool:
        """Whether it can be of a segment with these bytes, and not of one that stood in its place before."""
        if not self.end:  # no frame yet; zeros may stand where the first will, for a torn one was there
            return not any(data[:HEADER_BYTES])
        return self.rewritten == times_rewritten(data)

    @property
    def first_time_ns(self) -> int:
        """About when the segment was begun."""
        return self.times[1] if len(self.times) > 1 else self.max_time_ns

    def position_before(self, offset: int) -> int:
        """Start of a frame at or before the one that holds `offset`."""
        i = bisect_right(self.offsets, offset) - 1
        return self.positions[i] if i >= 0 else 0

    def position_before_time(self, time_ns: int) -> int:
        """Start of a frame at or before the first that holds a message of this time or later."""
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
                    self.rewritten,
                    self.max_time_ns,
                ),
                self.offsets.tobytes(),
                self.times.tobytes(),
                self.positions.tobytes(),
            )
        )
        return content + _CHECK.pack(crc32c(content))


def parse_index(content: bytes, log_id: int, base_offset: int, spacing_bytes: int) -> SegmentIndex | None:
    """The index in these bytes, or None where they are not a whole index of this segment."""
    if len(content) < _HEAD.size + _CHECK.size:
        return None
    magic, found_id, count, found_base, next_offset, end, rewritten, max_time_ns = _HEAD.unpack_from(content)
    if magic != _MAGIC or found_id != log_id or found_base != base_offset:
        return None
    if len(content) != _HEAD.size + count * _ENTRY_BYTES + _CHECK.size:
        return None
    if _CHECK.unpack_from(content, len(content) - _CHECK.size)[0] != crc32c(content[: -_CHECK.size]):
        return None
    index = SegmentIndex(base_offset, spacing_bytes)
    index.next_offset, index.end, index.max_time_ns, index.rewritten = next_offset, end, max_time_ns, rewritten
    offsets_end = _HEAD.size + 8 * count
    times_end = offsets_end + 8 * count
    index.offsets.frombytes(content[_HEAD.size : offsets_end])
    index.times.frombytes(content[offsets_end:times_end])
    index.positions.frombytes(content[times_end : times_end + 4 * count])
    index.next_entry_at = index.positions[-1] + spacing_bytes if count else 0
    return index


def times_rewritten(data: memoryview) -> int | None:
    """How often a segment of these bytes was rewritten; None where its first frame cannot tell."""
    if len(data) < HEADER_BYTES:
        return 0
    try:
        return read_header(data, 0, 0).flags & KNOWN_FLAGS
    except CorruptData:
        return None
