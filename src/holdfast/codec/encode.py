"""From messages to frames. Bodies are encoded first, in any thread; the header follows when the place is known."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, lru_cache, partial
from itertools import accumulate, chain, groupby, pairwise
from operator import add
from struct import Struct
from typing import Final, TypeVar

import msgspec

from holdfast.checksum import crc32c
from holdfast.codec.columns import (
    DUE,
    EXPIRY,
    FLAGS,
    HEADERS,
    KEYS,
    KNOWN_COLUMNS,
    PRIORITIES,
    Columns,
    encode_columns,
    encode_head,
    padding,
)
from holdfast.codec.frame import (
    CHECKED_HEADER,
    ENDS_BYTES,
    HEADER_BYTES,
    MAGIC,
    MAY_HOLD_SHORT,
    SHORT_AROUND,
    SHORT_HEADER,
    SHORT_MOST,
    Codec,
    Frame,
    FrameHeader,
    Kind,
    compress,
    frame_bytes,
    seal_header,
    short_bytes,
)
from holdfast.errors import InvalidRequest
from holdfast.large import LARGE_BYTES, LargeValue
from holdfast.model import NO_PRODUCER, Batch, HeaderPairs, Producer

_CODECS: Final = {"none": Codec.NONE, "zstd": Codec.ZSTD, "lz4": Codec.LZ4, "gzip": Codec.GZIP}

# Packs all ends of a batch in one call; creating the Struct each time would cost more than it saves.
_ENDS: Final = [Struct(f"<{count + 1}i").pack for count in range(257)]


class Packing(msgspec.Struct, frozen=True, gc=False):
    """How bodies are compressed: with which codec, and when it is worthwhile."""

    codec: Codec = Codec.NONE
    level: int | None = None
    min_bytes: int = 1024
    min_saving_percent: int = 5
    max_bytes: int = 100_000_000  # a larger body is not compressed: readers would refuse to unpack it

    @staticmethod
    def named(name: str, *, level: int | None, min_bytes: int, min_saving_percent: int, max_bytes: int) -> Packing:
        if name not in _CODECS:
            raise InvalidRequest(f"codec={name!r} is not known; use one of {', '.join(_CODECS)}")
        return Packing(_CODECS[name], level, min_bytes, min_saving_percent, max_bytes)


PLAIN: Final = Packing()


class Body(msgspec.Struct, frozen=True, gc=False):
    """Everything in a frame that does not depend on its place. `parts` include the padding."""

    parts: Sequence[bytes | memoryview]
    body_bytes: int
    raw_bytes: int
    count: int
    columns: int
    codec: int
    max_time_ns: int
    crc: int
    kind: int = Kind.DATA
    home: object = None  # the file of a large value that is being appended

    @property
    def frame_bytes(self) -> int:
        return (HEADER_BYTES + self.body_bytes + 7) & ~7


class FramePlace(msgspec.Struct, frozen=True, gc=False):
    """What the log knows about the place where a frame goes."""

    log_id: int
    epoch: int
    position: int
    base_offset: int
    synced_offset: int


def encode_batch(batch: Batch, now_ns: int, *, packing: Packing, cap_bytes: int, kind: Kind = Kind.DATA) -> list[Body]:
    """Encode the batch as bodies of at most `cap_bytes` each (or of a single larger message)."""
    return [encode_body(part, now_ns, packing, kind) for part in _split(batch, cap_bytes)]


def encode_values(values: Sequence[bytes], now_ns: int, *, packing: Packing = PLAIN, kind: Kind = Kind.DATA) -> Body:
    """Encode messages that consist only of values as one body: a fast path for the most common batch."""
    head, joined = plain_parts(values)
    return _pack(head + joined, len(values), 0, now_ns, packing, kind)


def plain_parts(values: Sequence[bytes]) -> tuple[bytes, bytes]:
    """Return the ends of some values, padded, and the values joined: the body of messages that have nothing else."""
    sizes, joined = [*map(len, values)], b"".join(values)
    count = len(sizes)
    if sizes.count(sizes[0]) == count < len(_ENDS):
        head = _even_ends(sizes[0], count)
    else:
        packed = _ends(accumulate(sizes), count)
        head = packed + padding(len(packed))
    if len(joined) != sum(sizes):
        raise TypeError("a value's length is not its number of bytes")
    return head, joined


@lru_cache(64)
def _even_ends(size: int, count: int) -> bytes:
    packed = _ENDS[count](*range(0, size * count + 1, size)) if size else bytes(4 * count + 4)
    return packed + padding(len(packed))


def _ends(ends: Iterable[int], count: int) -> bytes:
    """Pack the ends of so many items; the first is at 0."""
    return _ENDS[count](0, *ends) if count < len(_ENDS) else array("i", [0, *ends]).tobytes()


_PAIR: Final = Struct("<ii").pack
_SMALL: Final = 1024
_PAIRS: Final = [_PAIR(0, length) for length in range(_SMALL)]
_TWO_ENDS: Final = Struct("<iii4x").pack
_WIDE: Final = Struct("<q").pack
_BYTE_PADDED: Final = [bytes([number]) + bytes(7) for number in range(256)]
PADDING: Final = tuple(bytes(-length % 8) for length in range(8))


def single_head(
    value_bytes: int,
    key: bytes | None,
    headers: HeaderPairs,
    level: int,
    expires_at_ms: int,
    due_at_ms: int,
    flags: int,
) -> tuple[bytes, int]:
    """Encode all that precedes the value in the body of a single message; returns it with its columns.

    A fused form of `encode_head` for a batch of one; a property test checks one against the other. Nothing for a
    message that has only a value: `Writer.append_one` knows its ends.
    """
    head = _PAIRS[value_bytes] if value_bytes < _SMALL else _PAIR(0, value_bytes)
    columns = 0
    if key is not None:
        columns = KEYS
        length = len(key)
        head += (_PAIRS[length] if length < _SMALL else _PAIR(0, length)) + key + PADDING[length & 7]
    if headers:
        columns |= HEADERS
        head += _encoded_headers(headers)
    if level:
        columns |= PRIORITIES
        head += _BYTE_PADDED[level]
    if expires_at_ms:
        columns |= EXPIRY
        head += _WIDE(expires_at_ms)
    if due_at_ms:
        columns |= DUE
        head += _WIDE(due_at_ms)
    if flags:
        columns |= FLAGS
        head += _BYTE_PADDED[flags]
    return head if columns else b"", columns


def _encoded_headers(headers: HeaderPairs) -> bytes:
    if len(headers) == 2:
        (first_name, first), (second_name, second) = headers
        length = len(first) + len(second)
        names = (first_name, second_name)
        known, ends = _KNOWN_NAMES.get(names) or _names(names), _TWO_ENDS(0, len(first), length)
        return b"".join((known, ends, first, second, PADDING[length & 7]))
    if len(headers) == 1:
        ((name, value),) = headers
        length = len(value)
        known, ends = (
            _KNOWN_NAMES.get((name,)) or _names((name,)),
            _PAIRS[length] if length < _SMALL else _PAIR(0, length),
        )
        return b"".join((known, ends, value, PADDING[length & 7]))
    names, values = zip(*headers)  # noqa: B905  pairs: they cannot differ in length
    return (_KNOWN_NAMES.get(names) or _names(names)) + _items(values)


def _items(items: Sequence[bytes]) -> bytes:
    """Encode some items: their ends and their bytes, both padded."""
    count = len(items)
    packed = _ends(accumulate(map(len, items)), count)
    joined = b"".join(items)
    return packed + PADDING[len(packed) & 7] + joined + PADDING[len(joined) & 7]


_KNOWN_NAMES: Final[dict[tuple[str, ...], bytes]] = {}
_MOST_KNOWN: Final = 256
_MOST_KNOWN_BYTES: Final = 512


def _names(names: tuple[str, ...]) -> bytes:
    """Encode the number and the names of headers. A program's messages have the same few, so these are remembered."""
    encoded = _PAIR(0, len(names)) + _items([name.encode() for name in names])
    if len(encoded) <= _MOST_KNOWN_BYTES and len(_KNOWN_NAMES) < _MOST_KNOWN:
        _KNOWN_NAMES[names] = encoded
    return encoded


def message_sizes(batch: Batch) -> list[int]:
    """Return the size of each message: value, key and headers together."""
    sizes = list(map(len, batch.values))
    if batch.keys is not None:
        sizes = [size + len(key or b"") for size, key in zip(sizes, batch.keys, strict=True)]
    if batch.headers is not None:
        sizes = [*map(add, sizes, _header_sizes(batch.headers))]
    return sizes


def header_for(
    body: Body, place: FramePlace, *, batch_remaining: int, producer: Producer = NO_PRODUCER, flags: int = 0
) -> bytes:
    """Return the header, with checksum, of a body at its place."""
    if not place.position:
        flags |= MAY_HOLD_SHORT
    return seal_header(
        CHECKED_HEADER.pack(
            MAGIC,
            place.log_id,
            place.position,
            body.body_bytes,
            body.raw_bytes,
            body.count,
            body.kind,
            body.codec,
            flags,
            body.columns,
            place.base_offset,
            body.max_time_ns,
            place.synced_offset,
            place.epoch,
            producer.epoch,
            producer.id,
            producer.first_sequence,
            batch_remaining,
            body.crc,
        )
    )


def pack_again(body: Body, packing: Packing) -> Body:
    """Compress a plain body that was assembled from parts, if that pays."""
    plain = b"".join(body.parts)[: body.body_bytes]
    return _pack(plain, body.count, body.columns, body.max_time_ns, packing, Kind(body.kind))


def gap_body(length: int, count: int, max_time_ns: int) -> Body:
    """Return a body that fills `length` bytes of a segment, header included, in place of `count` lost messages."""
    filler = bytes(length - frame_bytes(0))
    return Body([filler], len(filler), len(filler), count, 0, Codec.NONE, max_time_ns, crc32c(filler), Kind.GAP)


def encode_body(batch: Batch, now_ns: int, packing: Packing, kind: Kind, removed: Sequence[bool] = ()) -> Body:
    """Encode the batch as one body; `removed` marks the rows without a message."""
    max_time_ns = now_ns if batch.times_ns is None else max(batch.times_ns)
    value = batch.values[0] if len(batch.values) == 1 else None
    if isinstance(value, LargeValue):
        columns, parts = encode_head(batch, removed)
        return _large_body(b"".join(parts), value, columns, max_time_ns, kind)
    columns, parts = encode_columns(batch, removed)
    return _pack(b"".join(parts), len(batch.values), columns, max_time_ns, packing, kind)


def _large_body(head: bytes, value: LargeValue, columns: int, max_time_ns: int, kind: Kind) -> Body:
    """Encode one message whose value is not copied into memory, and so not compressed; its own checksum is verified."""
    checksum = crc32c(head)
    for piece in value.pieces():
        checksum = crc32c(piece, checksum)
    body_bytes = len(head) + len(value)
    tail = padding(body_bytes)
    parts: list[bytes | memoryview] = [head, value.view, tail]
    return Body(
        parts, body_bytes, body_bytes, 1, columns, Codec.NONE, max_time_ns, crc32c(tail, checksum), kind, value.home
    )


def _pack(body: bytes, count: int, columns: int, max_time_ns: int, packing: Packing, kind: Kind) -> Body:
    """Compress the body if that pays, pad it, and compute its checksum."""
    raw_bytes = len(body)
    codec = Codec.NONE
    if packing.codec is not Codec.NONE and packing.min_bytes <= raw_bytes <= packing.max_bytes:
        packed = compress(packing.codec, body, level=packing.level)
        # Unpacking costs every reader, so a small saving is not worth it.
        if len(packed) * 100 <= raw_bytes * (100 - packing.min_saving_percent):
            codec, body = packing.codec, packed
    body_bytes = len(body)
    if body_bytes % 8:
        body += padding(body_bytes)
    return Body([body], body_bytes, raw_bytes, count, columns, codec, max_time_ns, crc32c(body), kind)


def _split(batch: Batch, cap_bytes: int) -> Iterator[Batch]:
    fixed = _fixed_bytes(batch)
    sizes = [size + fixed for size in message_sizes(batch)]
    total = sum(sizes)
    if total > LARGE_BYTES // 2:  # a value that stays in its file gets a frame of its own, whatever would fit
        is_large = [isinstance(value, LargeValue) for value in batch.values]
        sizes = [max(size, cap_bytes + 1) if large else size for size, large in zip(sizes, is_large, strict=True)]
        total = sum(sizes)
    if total <= cap_bytes or len(sizes) == 1:
        yield batch
        return
    start, used = 0, 0
    ends = list(accumulate(sizes))
    for i, end in enumerate(ends):
        if end - used > cap_bytes and i > start:
            yield slice_batch(batch, start, i)
            start, used = i, ends[i - 1]
    yield slice_batch(batch, start, len(sizes))


def _fixed_bytes(batch: Batch) -> int:
    """Return what each message adds to a frame besides its own bytes: at least the end of its value."""
    wide = sum(column is not None for column in (batch.times_ns, batch.expires_at_ms, batch.due_at_ms))
    narrow = sum(column is not None for column in (batch.keys, batch.headers, batch.priorities, batch.flags))
    return 4 + 8 * wide + 5 * narrow


def slice_batch(batch: Batch, start: int, end: int) -> Batch:
    """Return some of the messages of a batch."""
    columns = {name: column[start:end] for name, column in msgspec.structs.asdict(batch).items() if column is not None}
    return Batch(**columns)


def _header_sizes(rows: Sequence[HeaderPairs]) -> Sequence[int]:
    """Return the size of each message's headers, in few steps of Python for each of them."""
    pairs = list(chain.from_iterable(rows))
    sizes = [len(name.encode()) + len(value) for name, value in pairs]
    if len(pairs) == len(rows) and {*map(len, rows)} == {1}:
        return sizes
    ends = list(accumulate(sizes, initial=0))
    return [ends[end] - ends[start] for start, end in pairwise(accumulate(map(len, rows), initial=0))]


# This many removed messages in a row cost more as rows of a frame than as a hole followed by another frame.
LONG_RUN: Final = 32

_Value = TypeVar("_Value")


def hole_body(count: int, max_time_ns: int) -> Body:
    """Return a body for `count` offsets without a message."""
    return Body((), 0, 0, count, 0, Codec.NONE, max_time_ns, crc32c(b""), Kind.HOLE)


def plain_value(body: Body) -> bytes | None:
    """Return the value of a body that fits in a short frame: that of a single message; otherwise None."""
    is_plain = body.count == 1 and not body.columns and body.codec == Codec.NONE and body.kind == Kind.DATA
    if not is_plain or body.body_bytes > ENDS_BYTES + SHORT_MOST:
        return None
    return b"".join(body.parts)[ENDS_BYTES : body.body_bytes]


def same_body(header: FrameHeader, stored: memoryview) -> Body:
    """Return a frame's body, padding included, for another place."""
    return Body(
        (stored,),
        header.body_bytes,
        header.raw_bytes,
        header.count,
        header.columns,
        header.codec,
        header.max_time_ns,
        crc32c(stored) if header.is_short else header.body_crc,
        header.kind,
    )


def without(frame: Frame, gone: Sequence[bool], packing: Packing) -> Iterator[tuple[int, Body]]:
    """Rewrite a frame without the messages marked as gone: yields bodies, each with the row at which it begins.

    Together they cover the frame's offsets; the remaining messages keep theirs. Short runs of gone messages stay as
    marked rows, long ones become holes.
    """
    header = frame.header
    if all(gone):
        yield 0, hole_body(header.count, header.max_time_ns)
        return
    batch = _blanked(frame.columns(), gone)
    for start, stop, is_hole in _stretches(gone):
        part = slice_batch(batch, start, stop)
        if is_hole:
            yield start, hole_body(stop - start, header.max_time_ns if part.times_ns is None else max(part.times_ns))
        else:
            marks = gone[start:stop]
            yield start, encode_body(part, header.max_time_ns, packing, Kind(header.kind), marks if any(marks) else ())


def _stretches(gone: Sequence[bool]) -> Iterator[tuple[int, int, bool]]:
    """Yield rows [start, stop), and whether they become a hole."""
    start = at = 0
    for is_gone, run in groupby(gone):
        length = sum(1 for _ in run)
        if is_gone and length >= LONG_RUN:
            if at > start:
                yield start, at, False
            yield at, at + length, True
            start = at + length
        at += length
    if at > start:
        yield start, at, False


def _blanked(columns: Columns, gone: Sequence[bool]) -> Batch:
    """Return the rows as a batch in which those that are gone have a time and nothing else."""
    values = columns.values()
    return Batch(
        values=[b"" if is_gone else value for value, is_gone in zip(values, gone, strict=True)],
        times_ns=columns.times_ns(),
        keys=_column(columns.keys(), gone, None),
        headers=_column(columns.headers(), gone, ()),
        priorities=_column(columns.priorities(), gone, 0),
        expires_at_ms=_column(columns.expires_at_ms(), gone, 0),
        due_at_ms=_column(columns.due_at_ms(), gone, 0),
        flags=_column(columns.flags(), gone, 0),
    )


def _column(column: Sequence[_Value] | None, gone: Sequence[bool], nothing: _Value) -> list[_Value] | None:
    if column is None:
        return None
    return [nothing if is_gone else value for value, is_gone in zip(column, gone, strict=True)]


# What is around a message that is put alone: layouts and tables for `Writer.append_one`, which fuses all the rest. A
# property test checks them against what is above.

# The header of a long frame with a single message; its constant fields are packed together.
_HEADER: Final = Struct("<8sI20sQqQ24sI")
_EPOCH_BYTES: Final = 4
_PRODUCER: Final = Struct("<IQI4x")  # and no frames of the same batch follow
_NO_PRODUCER_FIELD: Final = bytes(_PRODUCER.size)
assert (_HEADER.size, _EPOCH_BYTES + _PRODUCER.size) == (HEADER_BYTES - 4, 24)

LONG_HEADER: Final = _HEADER.pack
SIZES: Final = Struct("<II12s").pack  # lengths, and a `constant_field`
constant_field: Final = Struct("<IBBHI").pack  # count, kind, codec, flags, columns
ONE_VALUE: Final = Struct("<ii").pack
CRC: Final = Struct("<I").pack

_SHORT: Final = "<8sIHHQq"  # the header of a short frame; magic and log id are packed together
SMALL: Final = 1024  # larger values get long frames: there is little to save
# For each length of a value, what packs all of a short frame but its check, once it was needed.
SHORT_PACKS: Final[list[Callable[..., bytes] | None]] = [None] * SMALL
assert Struct(_SHORT).size == SHORT_HEADER.size


def short_pack(length: int) -> Callable[..., bytes]:
    """Return what is in `SHORT_PACKS` from now on."""
    padding = short_bytes(length) - SHORT_AROUND - length
    SHORT_PACKS[length] = pack = Struct(f"{_SHORT}{length}s{padding}x").pack
    return pack


def producer_field(producer: Producer) -> bytes:
    """Return a producer as the header of a frame has it."""
    return _PRODUCER.pack(producer.epoch, producer.id, producer.first_sequence)


def origin_field(epoch: int, producer: bytes = _NO_PRODUCER_FIELD) -> bytes:
    """Return an epoch and a `producer_field` as the header of a frame has them."""
    return epoch.to_bytes(_EPOCH_BYTES, "little") + producer


@cache
def one_with(kind: Kind) -> list[bytes]:
    """Return the constant fields of a single message of this kind, for all columns that it can have."""
    pack = partial(constant_field, 1, kind, Codec.NONE, 0)
    return list(map(pack, range(KNOWN_COLUMNS + 1)))
