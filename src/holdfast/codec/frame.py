"""The frame, the only unit on disk: one or more messages with one header and two checksums, or a short one.

    at   size  field
    0    4     magic            "HFR" and the format's version, 1
    4    4     log_id           a random number of this log
    8    4     position         where this frame starts in its segment
    12   4     body_bytes       length of the body as stored
    16   4     raw_bytes        length of the body before compression
    20   4     count            messages in the frame
    24   1     kind             1 data, 2 control, 3 journal, 4 gap, 5 hole
    25   1     codec            0 none, 1 zstd, 2 lz4, 3 gzip
    26   2     flags            in a segment's first frame: how often the segment was rewritten, 0 to 255, and 256 if
                                short frames may follow; else 0
    28   4     columns          which columns the body has
    32   8     base_offset      offset of the first message
    40   8     max_time_ns      the latest time among the messages; the time of each, if there is no column of times
    48   8     synced_offset    all messages below it were known to be on disk when this was written
    56   4     epoch            epoch of the log's owner
    60   4     producer_epoch   these three for idempotent producers; 0 without one
    64   8     producer_id
    72   4     first_sequence
    76   4     batch_remaining  frames of the same batch that follow this one
    80   4     body_crc         CRC32C of all bytes after the header, padding included
    84   4     header_crc       CRC32C of bytes 0..83
    88         body, then zeros up to a multiple of 8

The header has its own checksum, so that a damaged length is never taken for a write that was cut short: the first is
corruption, only the second may be repaired. `log_id` and `position` make a frame valid in one place only: a copy inside
a message, or a stale block, is never taken for a frame.

A single message with a value and nothing else has a frame with less around it:

    at   size  field
    0    4     magic            "HFR" and 2
    4    4     log_id
    8    4     position
    12   2     value_bytes      length of the value
    14   2     epoch
    16   8     base_offset      offset of the message
    24   8     time_ns
    32         the value, then zeros: so many that the frame has 88 bytes or more, and a multiple of 8
    end  4     check            CRC32C of all bytes before it, the last 4 bytes of the frame

One checksum is enough: it is wrong if the length is, and nothing of a frame with a wrong checksum is used. Above the
bytes, a short frame is the long one that it stands for: `FrameHeader` and `stored_body` return what that one would
have.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from struct import Struct
from typing import Final

import msgspec

from holdfast.checksum import crc32c
from holdfast.codec.columns import KNOWN_COLUMNS, REMOVED, Columns, padding, plain_values
from holdfast.errors import ChecksumMismatch, CorruptData, MessageTooLarge, UnknownFormat
from holdfast.large import LARGE_BYTES, LargeValue, Value
from holdfast.model import Record

# The length of the uncompressed body (`raw_bytes`) is part of the checked header. Before anything is unpacked, it is
# compared with the caller's limit and with the most that the codec could produce from that many bytes. So a hostile
# body
# cannot make us allocate more than its size justifies.


class Codec(IntEnum):
    """How a frame's body is compressed; the number is stored."""

    NONE = 0
    ZSTD = 1
    LZ4 = 2
    GZIP = 3


DEFAULT_LEVEL: Final = {Codec.ZSTD: 3, Codec.LZ4: 0, Codec.GZIP: 6}

# The most that one packed byte can become: zstd stores 128 KiB in a block of 4 bytes (3 for the block's header, 1 for
# the
# repeated byte), lz4 255 bytes in a length byte, deflate 1032 to 1.
_MOST_RATIO: Final = {Codec.ZSTD: 128 * 1024 // 3, Codec.LZ4: 255, Codec.GZIP: 1032}
_RATIO_SLACK_BYTES = 64 * 1024

# More than any setting lets a writer pack. Readers use this and not the current settings: a frame stored under a higher
# limit must stay readable, or it would block everything after it.
MOST_RAW_BYTES: Final = 1 << 30


def compress(codec: Codec, data: bytes, *, level: int | None) -> bytes:
    """Return the compressed form of `data`."""
    return _COMPRESS[codec](data, DEFAULT_LEVEL[codec] if level is None else level)


def decompress(codec: Codec, data: bytes, *, raw_bytes: int, max_raw_bytes: int) -> bytes:
    """Return the uncompressed form, which must have exactly `raw_bytes`; anything else is damage or an attack."""
    if raw_bytes > max_raw_bytes:
        raise MessageTooLarge(
            f"a frame decompresses to {raw_bytes} bytes, over the limit of {max_raw_bytes}, so it was not "
            "decompressed: "
            "no version of Holdfast writes a frame that large"
        )
    if raw_bytes > len(data) * _MOST_RATIO[codec] + _RATIO_SLACK_BYTES:
        raise CorruptData(f"{len(data)} bytes of {codec.name.lower()} cannot decompress to {raw_bytes} bytes")
    try:
        plain = _DECOMPRESS[codec](data, raw_bytes)
    except (ValueError, RuntimeError, zlib.error, MemoryError) as error:
        raise CorruptData(f"a {codec.name.lower()} body cannot be decompressed: {error}") from None
    if len(plain) != raw_bytes:
        raise CorruptData(f"a {codec.name.lower()} body decompresses to {len(plain)} bytes, not to {raw_bytes}")
    return plain


def _zstd_compress(data: bytes, level: int) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(level=level, write_content_size=True).compress(data)


def _zstd_decompress(data: bytes, raw_bytes: int) -> bytes:
    import zstandard

    try:
        # The library trusts this field when it allocates, so it is checked first.
        if zstandard.frame_content_size(data) != raw_bytes:
            raise ValueError("the content size inside differs from the frame's header")
        return zstandard.ZstdDecompressor(max_window_size=2**27).decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None


def _lz4_compress(data: bytes, level: int) -> bytes:
    import lz4.block

    if level > 0:
        packed = lz4.block.compress(data, mode="high_compression", compression=level, store_size=False)
    else:
        packed = lz4.block.compress(data, mode="fast", acceleration=max(1, -level), store_size=False)
    return bytes(packed)


def _lz4_decompress(data: bytes, raw_bytes: int) -> bytes:
    import lz4.block

    try:
        return bytes(lz4.block.decompress(data, uncompressed_size=raw_bytes))
    except lz4.block.LZ4BlockError as error:
        raise ValueError(str(error)) from None


def _gzip_compress(data: bytes, level: int) -> bytes:
    packer = zlib.compressobj(level, zlib.DEFLATED, 31)
    return packer.compress(data) + packer.flush()


def _gzip_decompress(data: bytes, raw_bytes: int) -> bytes:
    unpacker = zlib.decompressobj(31)
    plain = unpacker.decompress(data, raw_bytes + 1)
    if not unpacker.eof or unpacker.unused_data:
        raise ValueError("the stream does not end where the body ends")
    return plain


# Codec.NONE is not here: its bodies are used as they are.
_COMPRESS: Final[dict[Codec, Callable[[bytes, int], bytes]]] = {
    Codec.ZSTD: _zstd_compress,
    Codec.LZ4: _lz4_compress,
    Codec.GZIP: _gzip_compress,
}
_DECOMPRESS: Final[dict[Codec, Callable[[bytes, int], bytes]]] = {
    Codec.ZSTD: _zstd_decompress,
    Codec.LZ4: _lz4_decompress,
    Codec.GZIP: _gzip_decompress,
}


MAGIC_PREFIX: Final = b"HFR"
SHORT_VERSION: Final = 2
VERSION: Final = SHORT_VERSION  # of the segments that are written today: frames of both layouts
MAGIC: Final = MAGIC_PREFIX + bytes([1])
SHORT_MAGIC: Final = MAGIC_PREFIX + bytes([SHORT_VERSION])
VERSION_AT: Final = len(MAGIC_PREFIX)
POSITION_AT: Final = 8

CHECKED_HEADER: Final = Struct("<4sIIIIIBBHIQqQIIQIII")
_HEADER: Final = Struct("<4sIIIIIBBHIQqQIIQIIII")
_U32: Final = Struct("<I")
HEADER_BYTES: Final = _HEADER.size
ENDS_BYTES: Final = 8  # of a single value
assert HEADER_BYTES == 88  # keeps the table above and the code in step
assert CHECKED_HEADER.size == HEADER_BYTES - 4

SHORT_HEADER: Final = Struct("<4sIIHHQq")
SHORT_VALUE_AT: Final = SHORT_HEADER.size
SHORT_AROUND: Final = SHORT_VALUE_AT + _U32.size  # the bytes of a short frame besides value and padding
_SMALLEST_VALUE: Final = HEADER_BYTES - SHORT_AROUND  # less is padded to that
SHORT_MOST: Final = 0xFFFF  # the longest value and the highest epoch of a short frame
assert SHORT_VALUE_AT == 32  # as the second table says

# The checksum of any bytes that end with their own checksum.
INTACT: Final = crc32c(_U32.pack(crc32c(b"")))

ALIGNMENT: Final = 8


class Kind(IntEnum):
    """What a frame holds; the number is stored."""

    DATA = 1
    CONTROL = 2
    JOURNAL = 3
    GAP = 4  # in place of damaged messages: their offsets are known, their bytes are in quarantine
    HOLE = 5  # in place of messages removed on purpose: it holds none, and readers skip it


TIMES_REWRITTEN: Final = 0xFF
# In the first frame of each segment. A release that does not know short frames refuses the segment there, instead of
# taking them for torn writes.
MAY_HOLD_SHORT: Final = 0x100
KNOWN_FLAGS: Final = TIMES_REWRITTEN | MAY_HOLD_SHORT
_DATA, _NONE = int(Kind.DATA), int(Codec.NONE)  # an attribute of an enum takes long to find
KNOWN_KINDS: Final = frozenset(int(kind) for kind in Kind)
KNOWN_CODECS: Final = frozenset(int(codec) for codec in Codec)


class FrameHeader(msgspec.Struct, frozen=True, gc=False):
    """The header's fields in stored order; an instance has always been checked.

    That of a short frame has the fields of the long one that it stands for; both checksums are 0.
    """

    magic: bytes
    log_id: int
    position: int
    body_bytes: int
    raw_bytes: int
    count: int
    kind: int
    codec: int
    flags: int
    columns: int
    base_offset: int
    max_time_ns: int
    synced_offset: int
    epoch: int
    producer_epoch: int
    producer_id: int
    first_sequence: int
    batch_remaining: int
    body_crc: int
    header_crc: int

    @property
    def next_offset(self) -> int:
        return self.base_offset + self.count

    @property
    def is_short(self) -> bool:
        return self.magic == SHORT_MAGIC

    @property
    def end(self) -> int:
        """Position of the next frame."""
        around = HEADER_BYTES if self.magic != SHORT_MAGIC else SHORT_AROUND - ENDS_BYTES
        length = (around + self.body_bytes + 7) & ~7
        return self.position + (length if length > HEADER_BYTES else HEADER_BYTES)


def frame_bytes(body_bytes: int) -> int:
    """Return the length of a whole frame: header, body, padding."""
    return (HEADER_BYTES + body_bytes + 7) & ~7


def short_bytes(value_bytes: int) -> int:
    """Return the length of a short frame: never less than a header, so that a gap fits in its place."""
    return (SHORT_AROUND + value_bytes + 7) & ~7 if value_bytes > _SMALLEST_VALUE else HEADER_BYTES


def short_frame(log_id: int, position: int, epoch: int, offset: int, time_ns: int, value: bytes | memoryview) -> bytes:
    """Return a whole short frame."""
    length = len(value)
    checked = SHORT_HEADER.pack(SHORT_MAGIC, log_id, position, length, epoch, offset, time_ns) + value
    checked += bytes(short_bytes(length) - len(checked) - _U32.size)
    return checked + _U32.pack(crc32c(checked))


def seal_header(checked: bytes) -> bytes:
    """Return a header's first 84 bytes followed by their checksum."""
    return checked + _U32.pack(crc32c(checked))


def read_header(buffer: memoryview, at: int, position: int, log_id: int | None = None) -> FrameHeader:
    """Return the header at `at` in the buffer, which is byte `position` of its segment; raises CorruptData.

    It is intact and in its place, but may still belong to another log or a newer release. Of a short frame, the value
    is intact, too; with `log_id`, it is of this log: otherwise a value full of headers would have many bytes summed up.
    """
    checked = buffer[at : at + HEADER_BYTES - 4]
    if len(buffer) - at < HEADER_BYTES:
        raise ChecksumMismatch(f"the file ends inside the header at position {position}")
    if buffer[at + VERSION_AT] == SHORT_VERSION:
        return _read_short(buffer, at, position, log_id)
    header = FrameHeader(*_HEADER.unpack_from(buffer, at))
    if crc32c(checked) != header.header_crc:
        raise ChecksumMismatch(f"the header at position {position} does not match its checksum")
    if header.position != position:
        raise ChecksumMismatch(f"the frame at position {position} was written for position {header.position}")
    return header


def _read_short(buffer: memoryview, at: int, position: int, log_id: int | None) -> FrameHeader:
    magic, own_id, own_position, length, epoch, offset, time_ns = SHORT_HEADER.unpack_from(buffer, at)
    if own_position != position:
        raise ChecksumMismatch(f"the frame at position {position} was written for position {own_position}")
    if log_id is not None and own_id != log_id:
        raise CorruptData(f"the frame at position {position} belongs to another log")
    end = at + (SHORT_AROUND + length + 7 & ~7 if length > _SMALLEST_VALUE else HEADER_BYTES)
    if end > len(buffer):
        raise ChecksumMismatch(f"the file ends inside the frame at position {position}")
    if magic != SHORT_MAGIC or crc32c(buffer[at:end]) != INTACT:
        raise ChecksumMismatch(f"the frame at position {position} does not match its checksum")
    body_bytes = length + ENDS_BYTES
    return FrameHeader(
        magic, own_id, position, body_bytes, body_bytes, 1, _DATA, _NONE, 0, 0, offset, time_ns, 0, epoch,
        0, 0, 0, 0, 0, 0,
    )  # fmt: skip


def read_plain(buffer: memoryview, position: int, log_id: int) -> FrameHeader | None:
    """Return the header of an intact frame of a known kind, with its body checked; None if there is any doubt.

    A fused form of `read_header`, `check_known` and `check_body`, for passes over many small frames.
    """
    if position + HEADER_BYTES > len(buffer):
        return None
    if buffer[position + VERSION_AT] == SHORT_VERSION:
        try:
            return _read_short(buffer, position, position, log_id)
        except CorruptData:
            return None
    header = FrameHeader(*_HEADER.unpack_from(buffer, position))
    end = position + ((HEADER_BYTES + header.body_bytes + 7) & ~7)
    if (
        header.magic == MAGIC
        and header.position == position
        and header.log_id == log_id
        and end <= len(buffer)
        and crc32c(buffer[position : position + HEADER_BYTES - 4]) == header.header_crc
        and crc32c(buffer[position + HEADER_BYTES : end]) == header.body_crc
        and header.kind in KNOWN_KINDS
        and header.codec in KNOWN_CODECS
        and not (header.flags & ~KNOWN_FLAGS or header.columns & ~KNOWN_COLUMNS)
    ):
        return header
    return None


def check_known(header: FrameHeader) -> None:
    """Raise UnknownFormat for a frame that only a newer release can read: it is neither torn nor damaged."""
    if (
        header.magic not in (MAGIC, SHORT_MAGIC)
        or header.flags & ~KNOWN_FLAGS
        or header.columns & ~KNOWN_COLUMNS
        or header.kind not in KNOWN_KINDS
        or header.codec not in KNOWN_CODECS
    ):
        raise UnknownFormat(
            f"the frame at position {header.position} has format {header.magic!r}, kind {header.kind}, "
            f"codec {header.codec}, flags {header.flags:#x}, columns {header.columns:#x}: "
            "written by a newer release; upgrade to read it"
        )


def check_body(buffer: memoryview, at: int, header: FrameHeader) -> None:
    """Raise ChecksumMismatch unless the body of the frame at `at` is complete and as it was written."""
    if header.magic == SHORT_MAGIC:
        return  # it was checked with its header
    end = at + frame_bytes(header.body_bytes)
    if end > len(buffer):
        raise ChecksumMismatch(f"the file ends inside the frame at position {header.position}")
    if crc32c(buffer[at + HEADER_BYTES : end]) != header.body_crc:
        raise ChecksumMismatch(f"the body of the frame at position {header.position} does not match its checksum")


def stored_body(buffer: memoryview, at: int, header: FrameHeader) -> memoryview:
    """Return the body of the frame at `at`, with its padding, as a long frame stores it."""
    body_bytes = header.body_bytes
    if header.magic == SHORT_MAGIC:
        return memoryview(bytes(frame_at(buffer, at, header).stored) + padding(body_bytes))
    return buffer[at + HEADER_BYTES : at + HEADER_BYTES + (body_bytes + 7 & ~7)]


_ENDS_OF_ONE: Final = Struct("<ii").pack
_NO_COLUMNS: Final = Columns(memoryview(bytes(4)), 0, 0)


class Frame:
    """A frame that was read and checked; its messages are decoded on demand.

    It covers `count` offsets. After key compaction it may hold fewer messages: `is_sparse`. Use `frame_at`: of a short
    frame, it keeps the value, and makes the body only if that is asked for.
    """

    __slots__ = ("_columns", "_max_raw_bytes", "_stored", "header")

    def __init__(self, header: FrameHeader, stored: memoryview, *, max_raw_bytes: int) -> None:
        self.header = header
        self._stored = stored
        self._max_raw_bytes = max_raw_bytes
        self._columns: Columns | None = None

    @property
    def base_offset(self) -> int:
        return self.header.base_offset

    @property
    def next_offset(self) -> int:
        return self.header.base_offset + self.header.count

    @property
    def count(self) -> int:
        return self.header.count

    @property
    def stored(self) -> memoryview | bytes:
        """The body as a long frame has it in the file, compressed or not."""
        if self.header.magic == SHORT_MAGIC:
            return _ENDS_OF_ONE(0, len(self._stored)) + self._stored
        return self._stored

    @property
    def is_sparse(self) -> bool:
        """Whether messages may have been removed from it."""
        return bool(self.header.columns & REMOVED) or self.header.kind == Kind.HOLE

    @property
    def is_large(self) -> bool:
        """Whether it is a single message that should not be copied into memory."""
        header = self.header
        plain = header.count == 1 and header.codec == Codec.NONE and header.kind < Kind.GAP
        return plain and header.body_bytes > LARGE_BYTES

    def offsets(self) -> Sequence[int]:
        """Return the offsets of the messages that still exist, in the same order as `values` and `records`."""
        everything = range(self.base_offset, self.next_offset)
        if not self.is_sparse:
            return everything
        return list(itertools.compress(everything, self.columns().kept() or ()))

    def columns(self) -> Columns:
        """Return the body's columns, uncompressed; removed messages still have their rows."""
        if self._columns is None:
            header = self.header
            if header.kind == Kind.GAP:
                raise CorruptData(f"messages {header.base_offset} to {header.next_offset - 1} were lost to damage")
            if header.kind == Kind.HOLE:
                return _NO_COLUMNS
            if header.codec == Codec.NONE:
                if header.raw_bytes != header.body_bytes:
                    raise CorruptData(f"the frame at position {header.position} claims two lengths for one body")
                body = memoryview(self.stored)
            else:
                body = memoryview(
                    decompress(
                        Codec(header.codec),
                        bytes(self._stored),
                        raw_bytes=header.raw_bytes,
                        max_raw_bytes=self._max_raw_bytes,
                    )
                )
            self._columns = Columns(body, header.count, header.columns)
        return self._columns

    def values(self) -> list[bytes]:
        """Return the messages' payloads, in order."""
        kept = self.columns().kept() if self.header.columns & REMOVED else None
        values = self.values_in_place()
        return values if kept is None else list(itertools.compress(values, kept))

    def values_in_place(self) -> list[bytes]:
        """Return the payloads, with an empty one for each message that was removed."""
        header = self.header
        if header.magic == SHORT_MAGIC:
            return [bytes(self._stored)]
        plain = header.columns == 0 and header.codec == Codec.NONE and header.raw_bytes == header.body_bytes
        if plain and header.kind < Kind.GAP:
            return plain_values(self._stored, header.count)
        return self.columns().values()

    def stored_values(self) -> Sequence[Value]:
        """Like `values_in_place`, but a large value stays in the file."""
        if self.header.body_bytes <= LARGE_BYTES or not self.is_large:
            return self.values_in_place()
        start, end = self.columns().only_value()
        if end - start < LARGE_BYTES:  # it is the headers that are large
            return self.values_in_place()
        return [LargeValue(self._stored, start, end, self.header.body_crc, padding(len(self._stored)))]

    def records(self) -> list[Record]:
        """Return the messages in order; a large value stays in the file."""
        header = self.header
        if header.columns == 0:
            time_ns, epoch = header.max_time_ns, header.epoch
            first = header.base_offset
            return [
                Record(offset, time_ns, value, epoch=epoch) for offset, value in enumerate(self.stored_values(), first)
            ]
        if header.kind == Kind.HOLE:
            return []
        columns, count = self.columns(), header.count
        rows = map(
            Record,
            range(header.base_offset, header.base_offset + count),
            columns.times_ns() or [header.max_time_ns] * count,
            self.stored_values(),
            columns.keys() or [None] * count,
            columns.headers() or [()] * count,
            columns.priorities() or bytes(count),
            columns.expires_at_ms() or [0] * count,
            columns.due_at_ms() or [0] * count,
            columns.flags() or bytes(count),
            [header.epoch] * count,
        )
        kept = columns.kept()
        return list(rows if kept is None else itertools.compress(rows, kept))


def read_frame(buffer: memoryview, at: int, position: int, *, max_raw_bytes: int) -> Frame:
    """Return the frame at `at` in the buffer, checked; raises CorruptData."""
    header = read_header(buffer, at, position)
    check_known(header)
    check_body(buffer, at, header)
    return frame_at(buffer, at, header, max_raw_bytes=max_raw_bytes)


def frame_at(buffer: memoryview, at: int, header: FrameHeader, *, max_raw_bytes: int = MOST_RAW_BYTES) -> Frame:
    """Return the frame at `at`, whose header and body were checked."""
    start, length = at + HEADER_BYTES, header.body_bytes
    if header.magic == SHORT_MAGIC:
        start, length = at + SHORT_VALUE_AT, length - ENDS_BYTES
    return Frame(header, buffer[start : start + length], max_raw_bytes=max_raw_bytes)


def stored_frame(frame: Frame) -> list[bytes | memoryview]:
    """Return a whole frame as it is in its segment, in parts."""
    header, stored = frame.header, frame.stored
    if header.is_short:
        place = header.log_id, header.position, header.epoch, header.base_offset
        return [short_frame(*place, header.max_time_ns, stored[ENDS_BYTES:])]
    return [_HEADER.pack(*msgspec.structs.astuple(header)), stored, padding(header.body_bytes)]


def frames_in(content: memoryview, *, max_raw_bytes: int) -> Iterator[Frame]:
    """Yield frames that were copied out of segments, one after the other; raises CorruptData."""
    at = 0
    while at < len(content):
        if len(content) - at < HEADER_BYTES:
            raise ChecksumMismatch(f"the last {len(content) - at} bytes are not a frame")
        (position,) = _U32.unpack_from(content, at + POSITION_AT)
        frame = read_frame(content, at, position, max_raw_bytes=max_raw_bytes)
        yield frame
        at += frame.header.end - position
