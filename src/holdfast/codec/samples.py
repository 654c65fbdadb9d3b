"""The file of samples as bytes: one block for each series, and in it three rings of slots, each with a checksum.

The file begins with a header, which fills the first 4096 bytes:

    at   size  field
    0    8     magic           "hfsample"
    8    2     version         1
    10   2                     zero
    12   4     series_bytes    length of a block
    16   4     crc             CRC32C of bytes 0..15

Then come the blocks. A block begins with a header of 512 bytes, all zeros where the block is free:

    at   size  field
    0    4     crc             CRC32C of bytes 4..511
    4    1     mode            what is sampled: see MODES
    5    1     topic_bytes     length of the topic's name
    6    1     group_bytes     length of the group's name
    7    1                     zero
    8    8     topic_id        tells a topic from an earlier one of the same name
    16   496   names           topic, then group, then zeros

After it come the rings, the finest first. A ring has a slot for each step of time, all zeros where nothing was
sampled; the slot for a time is `(time / step) mod steps`, so nothing has to say where a ring begins:

    at   size  field
    0    4     at              start of the step, in seconds since 1970
    4    4     published       messages that came in during the step
    8    4     handled         messages acked, or passed by a stream group's commits
    12   4     failed          failed attempts: nacked, rejected, or with a lease that ended
    16   4     ready           the most that were ready at a time; of a stream group, its lag
    20   4     dead            the most dead letters at a time
    24   4     oldest_s        the highest age of the oldest message not handled, in seconds
    28   4     handle_p50_s    median of the time from lease to ack; not a number if nothing was acked
    32   4     handle_p99_s    99th percentile of it
    36   4     crc             CRC32C of the block header's crc and bytes 0..35

All numbers are little endian; those from `published` on are floats with about seven digits. The checksum of a slot
begins with that of its block's header, so a slot that is left from another series never counts as one of the new one.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import msgspec

from holdfast.checksum import crc32c

MAGIC: Final = b"hfsample"
VERSION: Final = 1
HEADER_BYTES: Final = 4096
SERIES_HEADER_BYTES: Final = 512
MODES: Final = ("total", "topic", "queue", "stream")

_FILE: Final = struct.Struct("<8sHHII")
_SERIES: Final = struct.Struct("<IBBBxQ")
_SLOT: Final = struct.Struct("<I8fI")
SLOT_BYTES: Final = _SLOT.size
assert (_FILE.size, _SERIES.size, SLOT_BYTES) == (20, 16, 40)  # keeps the tables above and the code in step

_CRC_BYTES: Final = 4
_EMPTY: Final = bytes(SLOT_BYTES)


class Ring(NamedTuple):
    """One resolution: so many steps of so many seconds; its slots begin at `start` in a block."""

    step_s: int
    steps: int
    start: int

    @property
    def span_s(self) -> int:
        """The time that the ring covers."""
        return self.step_s * self.steps

    def position(self, at_s: int) -> int:
        """Where the slot for this time is in a block."""
        return self.start + at_s // self.step_s % self.steps * SLOT_BYTES


_STEPS: Final = ((5, 180), (60, 360), (900, 672))  # 15 minutes, 6 hours, 7 days
RINGS: Final = tuple(
    Ring(step_s, steps, SERIES_HEADER_BYTES + SLOT_BYTES * sum(before for _, before in _STEPS[:i]))
    for i, (step_s, steps) in enumerate(_STEPS)
)
LONGEST_S: Final = RINGS[-1].span_s
SERIES_BYTES: Final = 49_152
assert RINGS[-1].start + RINGS[-1].steps * SLOT_BYTES <= SERIES_BYTES


class SeriesKey(msgspec.Struct, frozen=True):
    """What is sampled: a group on a topic, a topic without groups in queue mode, or all together."""

    mode: str
    topic: str = ""
    group: str = ""
    topic_id: int = 0


class Slot(NamedTuple):
    """What is known of one step of time."""

    at_s: int
    published: float = 0.0
    handled: float = 0.0
    failed: float = 0.0
    ready: float = 0.0
    dead: float = 0.0
    oldest_s: float = 0.0
    handle_p50_s: float = float("nan")
    handle_p99_s: float = float("nan")


def file_header() -> bytes:
    """The header of a file."""
    start = _FILE.pack(MAGIC, VERSION, 0, SERIES_BYTES, 0)[:-_CRC_BYTES]
    return (start + crc32c(start).to_bytes(_CRC_BYTES, "little")).ljust(HEADER_BYTES, b"\0")


def file_problem(header: bytes) -> str | None:
    """Why a file with this header cannot be used; None if it can."""
    if len(header) < _FILE.size or header[: len(MAGIC)] != MAGIC:
        return "it does not begin as a file of samples"
    _, version, _, series_bytes, crc = _FILE.unpack_from(header)
    if crc != crc32c(header[: _FILE.size - _CRC_BYTES]):
        return "its header does not match its checksum"
    if version != VERSION or series_bytes != SERIES_BYTES:
        return f"it is of version {version}, and this release knows version {VERSION}"
    return None


def series_header(key: SeriesKey) -> bytes:
    """The header of a block."""
    topic, group = key.topic.encode(), key.group.encode()
    start = _SERIES.pack(0, MODES.index(key.mode), len(topic), len(group), key.topic_id & (2**64 - 1))[_CRC_BYTES:]
    rest = (start + topic + group).ljust(SERIES_HEADER_BYTES - _CRC_BYTES, b"\0")
    return crc32c(rest).to_bytes(_CRC_BYTES, "little") + rest


def parse_series(header: bytes | bytearray) -> SeriesKey | None:
    """The series that a block belongs to; None if it is free or its header is damaged."""
    if len(header) < SERIES_HEADER_BYTES:
        return None
    crc, mode, topic_bytes, group_bytes, topic_id = _SERIES.unpack_from(header)
    rest = header[_CRC_BYTES:SERIES_HEADER_BYTES]
    end = _SERIES.size + topic_bytes + group_bytes
    if crc != crc32c(rest) or mode >= len(MODES) or end > SERIES_HEADER_BYTES:
        return None
    names = header[_SERIES.size : end]
    try:
        return SeriesKey(MODES[mode], names[:topic_bytes].decode(), names[topic_bytes:].decode(), topic_id)
    except UnicodeDecodeError:
        return None


def write_slot(block: bytearray, position: int, slot: Slot) -> None:
    """Write a slot into a block."""
    _SLOT.pack_into(block, position, *slot, 0)
    end = position + SLOT_BYTES - _CRC_BYTES
    crc = crc32c(block[position:end], crc32c(block[:_CRC_BYTES]))
    block[end : end + _CRC_BYTES] = crc.to_bytes(_CRC_BYTES, "little")


def read_slot(block: bytearray, position: int) -> Slot | None:
    """The slot at a position of a block; None if it is empty or damaged."""
    *values, crc = _SLOT.unpack_from(block, position)
    if not values[0]:
        return None
    end = position + SLOT_BYTES - _CRC_BYTES
    return Slot(*values) if crc == crc32c(block[position:end], crc32c(block[:_CRC_BYTES])) else None


def damaged_slots(block: bytearray) -> int:
    """The number of slots that are neither empty nor as they were written."""
    return sum(
        read_slot(block, position) is None and block[position : position + SLOT_BYTES] != _EMPTY
        for ring in RINGS
        for position in range(ring.start, ring.start + ring.steps * SLOT_BYTES, SLOT_BYTES)
    )
