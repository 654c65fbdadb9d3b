"""The frame, the only unit on disk: one or more messages with one header and two checksums.

    at   size  field
    0    4     magic            "HFR" and the format's version, 1
    4    4     log_id           a random number of this log
    8    4     position         where this frame starts in its segment
    12   4     body_bytes       length of the body as stored
    16   4     raw_bytes        length of the body before compression
    20   4     count            messages in the frame
    24   1     kind             1 data, 2 control, 3 journal, 4 gap, 5 hole
    25   1     codec            0 none, 1 zstd, 2 lz4, 3 gzip
    26   2     flags            in a segment's first frame: how often the segment was rewritten, 0 to 255; else 0
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
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from functools import lru_cache
from struct import Struct
from typing import Final

import msgspec

from holdfast.checksum import crc32c
from holdfast.codec.columns import KNOWN_COLUMNS, REMOVED, Columns, padding, plain_values, single_fields
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
VERSION: Final = 1
MAGIC: Final = MAGIC_PREFIX + bytes([VERSION])

CHECKED_HEADER: Final = Struct("<4sIIIIIBBHIQqQIIQIII")
_HEADER: Final = Struct("<4sIIIIIBBHIQqQIIQIIII")
_U32: Final = Struct("<I")
HEADER_BYTES: Final = _HEADER.size
assert HEADER_BYTES == 88  # keeps the table above and the code in step
assert CHECKED_HEADER.size == HEADER_BYTES - 4

ALIGNMENT: Final = 8


class Kind(IntEnum):
    """What a frame holds; the number is stored."""

    DATA = 1
    CONTROL = 2
    JOURNAL = 3
    GAP = 4  # in place of damaged messages: their offsets are known, their bytes are in quarantine
    HOLE = 5  # in place of messages removed on purpose: it holds none, and readers skip it


KNOWN_FLAGS: Final = 0xFF
KNOWN_KINDS: Final = frozenset(int(kind) for kind in Kind)
KNOWN_CODECS: Final = frozenset(int(codec) for codec in Codec)


class FrameHeader(msgspec.Struct, frozen=True, gc=False):
    """The header's fields in stored order; an instance has always been checked."""

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
    def end(self) -> int:
        """Position of the next frame."""
        return self.position + ((HEADER_BYTES + self.body_bytes + 7) & ~7)


def frame_bytes(body_bytes: int) -> int:
    """Return the length of a whole frame: header, body, padding."""
    return (HEADER_BYTES + body_bytes + 7) & ~7


def seal_header(checked: bytes) -> bytes:
    """Return a header's first 84 bytes followed by their checksum."""
    return checked + _U32.pack(crc32c(checked))


def read_header(buffer: memoryview, at: int, position: int) -> FrameHeader:
    """Return the header at `at` in the buffer, which is byte `position` of its segment; raises CorruptData.

    It is intact and in its place, but may still belong to another log or a newer release.
    """
    checked = buffer[at : at + HEADER_BYTES - 4]
    if len(buffer) - at < HEADER_BYTES:
        raise ChecksumMismatch(f"the file ends inside the header at position {position}")
    header = FrameHeader(*_HEADER.unpack_from(buffer, at))
    if crc32c(checked) != header.header_crc:
        raise ChecksumMismatch(f"the header at position {position} does not match its checksum")
    if header.position != position:
        raise ChecksumMismatch(f"the frame at position {position} was written for position {header.position}")
    return header


def read_plain(buffer: memoryview, position: int, log_id: int) -> FrameHeader | None:
    """Return the header of an intact frame of a known kind, with its body checked; None if there is any doubt.

    A fused form of `read_header`, `check_known` and `check_body`, for passes over many small frames.
    """
    if position + HEADER_BYTES > len(buffer):
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


# The same header with a single message's ends behind it: equal fields are read as one, and those that nobody needs here
# are skipped.
_SINGLE: Final = Struct("<8sIII8sIQq8xI20xIIii")
_ONE_DATA: Final = Struct("<IBBH").pack(1, Kind.DATA, Codec.NONE, 0)
assert _SINGLE.size == HEADER_BYTES + 8
_read_head: Final = _SINGLE.unpack_from


def log_prefix(log_id: int) -> bytes:
    """Return the first bytes of every frame of a log."""
    return MAGIC + _U32.pack(log_id)


def read_single(buffer: memoryview, position: int, prefix: bytes) -> tuple[Record, int] | None:
    """Return the message of a frame with a single message, checked, and the next position; None for others.

    `prefix` is the log's `log_prefix`. A fused form of `read_plain` and `Frame.records`, for consumers that go from
    message to message.
    """
    body_at = position + HEADER_BYTES
    if body_at + 8 > len(buffer):
        return None
    (
        found_prefix, own_position, body_bytes, raw_bytes, fixed, columns, offset, time_ns, epoch, body_crc, header_crc,
        first, length,
    ) = _read_head(buffer, position)  # fmt: skip
    end = body_at + (body_bytes + 7 & ~7)
    if (
        fixed != _ONE_DATA
        or found_prefix != prefix
        or own_position != position
        or raw_bytes != body_bytes
        or body_bytes > LARGE_BYTES
        or end > len(buffer)
    ):
        return None
    if body_bytes <= _SMALL:
        frame = bytes(buffer[position:end])
        if crc32c(frame) != body_crc ^ _apart(end - body_at):
            return None
        body = frame[HEADER_BYTES : HEADER_BYTES + body_bytes]
    else:
        if crc32c(buffer[position : body_at - 4]) != header_crc or crc32c(buffer[body_at:end]) != body_crc:
            return None
        body = bytes(buffer[body_at : body_at + body_bytes])
    if not columns:
        if first or length != body_bytes - 8:
            return None
        return Record(offset, time_ns, body[8:], epoch=epoch), end
    fields = single_fields(body, columns)
    return None if fields is None else (Record(offset, time_ns, *fields, epoch), end)


# A plain single message as a whole, for runs of messages of one length: everything that is then equal in all of them is
# read as one field.
_RUN: Final = "<8sI20sQq8xI20xI4x8s{length}s{padding}x"
_RUN_OF_BODIES: Final = "<8sI20sQq8xI20xI4x{length}s{padding}x"  # with columns, the body is read by itself
_SAME_AT, _SAME_END = 12, 32  # body_bytes to columns
_ENDS_END: Final = HEADER_BYTES + 8
_NO_COLUMN: Final = bytes(4)


@lru_cache(maxsize=256)
def _run_of(length: int) -> tuple[Struct, int]:
    """Return the layout of a plain single message of this length, and its `_crc_apart`."""
    layout = Struct(_RUN.format(length=length, padding=-length % 8))
    return layout, _crc_apart(layout.size - HEADER_BYTES)


@lru_cache(maxsize=256)
def _run_of_bodies(length: int) -> tuple[Struct, int]:
    """Return the layout of a single message whose body has this length, and its `_crc_apart`."""
    layout = Struct(_RUN_OF_BODIES.format(length=length, padding=-length % 8))
    return layout, _crc_apart(layout.size - HEADER_BYTES)


def _crc_apart(padded_bytes: int) -> int:
    """Return by what the CRC of a whole frame differs from that of its body, so that one CRC checks both.

    A header followed by its CRC has the same CRC whatever it holds. The CRC of the whole frame combines that with the
    body's, so the difference only depends on the body's length.
    """
    body = bytes(padded_bytes)
    return crc32c(bytes(4) + body) ^ crc32c(body)


_SMALL: Final = 1024  # bodies up to this size are checked together with their header
_apart: Final = lru_cache(maxsize=_SMALL // 8 + 1)(_crc_apart)


def read_singles(buffer: memoryview, position: int, prefix: bytes, offset: int, most: int) -> tuple[list[Record], int]:
    """Return up to `most` messages from `offset` on that have frames of their own, and the position behind them.

    They are checked as `read_single` does it, which reads the first of each run of messages of the same length.
    """
    records: list[Record] = []
    while len(records) < most:
        found = read_single(buffer, position, prefix)
        if found is None or found[0].offset != offset:
            break
        (record, end), start = found, position
        records.append(record)
        offset, position = offset + 1, end
        if len(records) == most:
            break
        if buffer[start + _SAME_END - 4 : start + _SAME_END] != _NO_COLUMN:
            found_run = _with_columns(buffer, start, end - start, prefix, offset, most - len(records))
            records += found_run
            offset, position = offset + len(found_run), position + len(found_run) * (end - start)
            continue
        layout, residue = _run_of(len(record.value))
        size = layout.size
        count = min(most - len(records), (len(buffer) - position) // size)
        first = bytes(buffer[start : start + _ENDS_END])
        same, ends = first[_SAME_AT:_SAME_END], first[HEADER_BYTES:]
        for (
            own_prefix,
            own_position,
            own_same,
            own_offset,
            time_ns,
            epoch,
            body_crc,
            own_ends,
            value,
        ) in layout.iter_unpack(buffer[position : position + count * size]):
            end = position + size
            if (
                own_offset != offset
                or own_position != position
                or own_same != same
                or own_ends != ends
                or own_prefix != prefix
                or crc32c(buffer[position:end]) != body_crc ^ residue
            ):
                break
            records.append(Record(offset, time_ns, value, epoch=epoch))
            offset, position = offset + 1, end
    return records, position


def _with_columns(buffer: memoryview, start: int, size: int, prefix: bytes, offset: int, most: int) -> list[Record]:
    """Return up to `most` messages from `offset` on that follow a frame at `start` and are like it in size and columns.

    They are checked as `read_single` does it, which has read that frame.
    """
    records: list[Record] = []
    same, position = bytes(buffer[start + _SAME_AT : start + _SAME_END]), start + size
    if bytes(buffer[position + _SAME_AT : position + _SAME_END]) != same:
        return records  # as it mostly is if lengths differ
    body_bytes, columns = _U32.unpack_from(same)[0], _U32.unpack_from(same, len(same) - 4)[0]
    layout, residue = _run_of_bodies(body_bytes)
    count = min(most, (len(buffer) - position) // size)
    for own_prefix, own_position, own_same, own_offset, time_ns, epoch, body_crc, body in layout.iter_unpack(
        buffer[position : position + count * size]
    ):
        if own_offset != offset or own_position != position or own_same != same or own_prefix != prefix:
            break
        end = position + size
        is_intact = crc32c(buffer[position:end]) == body_crc ^ residue
        fields = single_fields(body, columns) if is_intact else None
        if fields is None:
            break
        records.append(Record(offset, time_ns, *fields, epoch))
        offset, position = offset + 1, end
    return records


# Frames of one length as a whole, whatever they hold: as above, but with the body left out.
_ALIKE: Final = "<8sI20sQqQ24sI4x{padded}x"
_KEPT_AT, _KEPT_END = 56, 80  # epoch to batch_remaining


@lru_cache(maxsize=256)
def _alike_of(padded_bytes: int) -> tuple[Struct, int]:
    return Struct(_ALIKE.format(padded=padded_bytes)), _crc_apart(padded_bytes)


def frames_alike(buffer: memoryview, header: FrameHeader) -> Iterator[tuple[int, int, int]]:
    """Yield position, time and synced offset of each intact frame right behind one of a single message, and like it.

    Offsets go on by one; all else that `header` says, but for place, time and contents, is the same for all of them.
    """
    start, position, offset = header.position, header.end, header.base_offset + 1
    size = position - start
    layout, apart = _alike_of(size - HEADER_BYTES)
    first = bytes(buffer[start : start + HEADER_BYTES])
    prefix, same, kept = first[:8], first[_SAME_AT:_SAME_END], first[_KEPT_AT:_KEPT_END]
    count = (len(buffer) - position) // size
    for own_prefix, own_position, own_same, own_offset, time_ns, synced, own_kept, body_crc in layout.iter_unpack(
        buffer[position : position + count * size]
    ):
        expected = (prefix, position, same, offset, kept)
        if (own_prefix, own_position, own_same, own_offset, own_kept) != expected:
            return
        if crc32c(buffer[position : position + size]) != body_crc ^ apart:
            return
        yield position, time_ns, synced
        position += size
        offset += 1


_SKIPPED: Final = Struct("<8sII16xQ").unpack_from


def skip_to(buffer: memoryview, position: int, prefix: bytes, offset: int) -> int | None:
    """Return the position of the frame that begins with this offset, going on from the frame at `position`.

    Headers on the way are not checked, so the caller must check the frame that it is led to. None if there is none.
    """
    last = len(buffer) - HEADER_BYTES
    while position <= last:
        found_prefix, own_position, body_bytes, base_offset = _SKIPPED(buffer, position)
        if found_prefix != prefix or own_position != position:
            return None
        if base_offset >= offset:
            return position if base_offset == offset else None
        position += HEADER_BYTES + (body_bytes + 7 & ~7)
    return None


def check_known(header: FrameHeader) -> None:
    """Raise UnknownFormat for a frame that only a newer release can read: it is neither torn nor damaged."""
    if (
        header.magic != MAGIC
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
    end = at + frame_bytes(header.body_bytes)
    if end > len(buffer):
        raise ChecksumMismatch(f"the file ends inside the frame at position {header.position}")
    if crc32c(buffer[at + HEADER_BYTES : end]) != header.body_crc:
        raise ChecksumMismatch(f"the body of the frame at position {header.position} does not match its checksum")


_NO_COLUMNS: Final = Columns(memoryview(bytes(4)), 0, 0)


class Frame:
    """A frame that was read and checked; its messages are decoded on demand.

    It covers `count` offsets. After key compaction it may hold fewer messages: `is_sparse`.
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
    def stored(self) -> memoryview:
        """The body as stored in the file, compressed or not."""
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
                body = self._stored
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
    start = at + HEADER_BYTES
    return Frame(header, buffer[start : start + header.body_bytes], max_raw_bytes=max_raw_bytes)


def header_bytes(header: FrameHeader) -> bytes:
    """Return the header as it is stored."""
    return _HEADER.pack(*msgspec.structs.astuple(header))


def frames_in(content: memoryview, *, max_raw_bytes: int) -> Iterator[Frame]:
    """Yield frames that were copied out of segments, one after the other; raises CorruptData."""
    at = 0
    while at < len(content):
        if len(content) - at < HEADER_BYTES:
            raise ChecksumMismatch(f"the last {len(content) - at} bytes are not a frame")
        position = FrameHeader(*_HEADER.unpack_from(content, at)).position
        frame = read_frame(content, at, position, max_raw_bytes=max_raw_bytes)
        yield frame
        at += frame.header.end - position
