"""The body of a frame: messages as columns, in Arrow's own memory layout.

    part                        bytes                     present if
    value ends                  4 * (count + 1)           always
    times                       8 * count                 column bit 0: int64, ns since 1970
    key validity                (count + 7) // 8          bit 1: bit i is set when message i has a key
    keys                        4 * (count + 1) + bytes   bit 2
    headers                     see below                 bit 3
    priorities                  count                     bit 4: uint8
    expiry                      8 * count                 bit 5: int64, ms since 1970, 0 = none
    due times                   8 * count                 bit 6: int64, ms since 1970, 0 = none
    flags                       count                     bit 7: uint8, bit 0 = tombstone
    removed                     (count + 7) // 8          bit 8: bit i is set when message i was removed
    values                      the rest                  always

"Ends" are count + 1 int32: the first is 0, they never decrease, and item i is the bytes from ends[i] to ends[i + 1]. A
header column is a list of pairs: ends into the pairs, then the pairs' names (ends, bytes) and values (ends, bytes).
Every part except the values is padded with zeros to 8 bytes. All numbers are little endian. A removed message keeps its
place and its time, and nothing else.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from struct import Struct
from struct import error as struct_error
from typing import Final, TypeAlias, cast

from holdfast.errors import CorruptData
from holdfast.large import Value
from holdfast.model import Batch, HeaderPairs

TIMES: Final = 1 << 0
KEY_VALIDITY: Final = 1 << 1
KEYS: Final = 1 << 2
HEADERS: Final = 1 << 3
PRIORITIES: Final = 1 << 4
EXPIRY: Final = 1 << 5
DUE: Final = 1 << 6
FLAGS: Final = 1 << 7
REMOVED: Final = 1 << 8
KNOWN_COLUMNS: Final = (1 << 9) - 1

TOMBSTONE: Final = 1 << 0

# Arrays are written as they are in memory; a big-endian machine would have to swap them.
assert sys.byteorder == "little", "Holdfast's files are little endian, and so must be the machine"
assert array("i").itemsize == 4

_ONE_PAIR: Final = Struct("<ii").unpack_from
_END: Final = Struct("<i").unpack_from
_PADDING: Final = tuple(bytes(n) for n in range(8))


def padding(length: int) -> bytes:
    """Return the zeros that bring `length` to a multiple of 8."""
    return _PADDING[-length % 8]


def encode_columns(batch: Batch, removed: Sequence[bool] = ()) -> tuple[int, list[bytes]]:
    """Return which columns the batch uses, and the parts of the body; `removed` marks rows without a message."""
    columns, parts = encode_head(batch, removed)
    parts += cast("Sequence[bytes]", batch.values)  # a large value has a frame of its own, and is not joined
    return columns, parts


def encode_head(batch: Batch, removed: Sequence[bool] = ()) -> tuple[int, list[bytes]]:
    """Like `encode_columns`, without the values, which come last."""
    columns = 0
    parts = _padded(_ends(batch.values))
    if batch.times_ns is not None:
        columns |= TIMES
        parts += _padded(_int64(batch.times_ns))
    if batch.keys is not None:
        if None in batch.keys:
            columns |= KEY_VALIDITY
            parts += _padded(_bits([key is not None for key in batch.keys]))
        columns |= KEYS
        parts += _variable([key or b"" for key in batch.keys])
    if batch.headers is not None:
        columns |= HEADERS
        parts += _header_column(batch.headers)
    if batch.priorities is not None:
        columns |= PRIORITIES
        parts += _padded(bytes([*batch.priorities]))
    if batch.expires_at_ms is not None:
        columns |= EXPIRY
        parts += _padded(_int64(batch.expires_at_ms))
    if batch.due_at_ms is not None:
        columns |= DUE
        parts += _padded(_int64(batch.due_at_ms))
    if batch.flags is not None:
        columns |= FLAGS
        parts += _padded(bytes([*batch.flags]))
    if removed:
        columns |= REMOVED
        parts += _padded(_bits(removed))
    return columns, parts


def plain_values(body: memoryview, count: int) -> list[bytes]:
    """Return the values of a body without any other column: a fast path for the most common frame."""
    head = 4 * (count + 1)
    if head > len(body):
        raise CorruptData(f"{count} messages do not fit in the {len(body)} bytes of their frame")
    if count == 1:
        start, end = _ONE_PAIR(body)
        if start != 0 or not 0 <= end <= len(body) - 8:
            raise CorruptData("the ends of a column's items are not in order")
        return [bytes(body[8 : 8 + end])]
    return _items(body[:head], body[head + -head % 8 :])


_EVEN_MOST: Final = 1024  # what splits more items than these would take too much memory
_SINGLE: Final = KEYS | HEADERS | PRIORITIES | EXPIRY | DUE | FLAGS
_NUMBER: Final = Struct("<q").unpack_from
# Unpacks the ends of a few items in one call.
_FEW_ENDS: Final = [Struct(f"<{count + 1}i").unpack_from for count in range(33)]

SingleFields: TypeAlias = tuple[bytes, bytes | None, tuple[tuple[str, bytes], ...], int, int, int, int]


def single_fields(body: bytes, columns: int) -> SingleFields | None:
    """Return value, key, headers, priority, expiry, due time and flags of a body with one message.

    A fused form of `Columns`, whose path the caller takes if it returns None: for unusual columns, and at any doubt.
    """
    if columns & ~_SINGLE:
        return None
    key, priority, expires_at_ms, due_at_ms, flags = None, 0, 0, 0, 0
    headers: tuple[tuple[str, bytes], ...] = ()
    try:
        zero, value_bytes = _ONE_PAIR(body, 0)
        at = 8
        if columns & KEYS:
            first, length = _ONE_PAIR(body, at)
            if first or length < 0:
                return None
            key = body[at + 8 : at + 8 + length]
            at += 8 + (length + 7 & ~7)
        if columns & HEADERS:
            first, count = _ONE_PAIR(body, at)
            if first or not 0 < count < len(_FEW_ENDS):
                return None
            start = at + 8
            at = start + (4 * count + 11 & ~7) + (_FEW_ENDS[count](body, start)[-1] + 7 & ~7)
            names = _KNOWN_NAMES.get(body[start:at]) or _names(body, start, at, count)
            at, values = _few_items(body, at, count)
            headers = tuple(zip(names, values, strict=True))
        if columns & PRIORITIES:
            priority = body[at]
            at += 8
        if columns & EXPIRY:
            (expires_at_ms,) = _NUMBER(body, at)
            at += 8
        if columns & DUE:
            (due_at_ms,) = _NUMBER(body, at)
            at += 8
        if columns & FLAGS:
            flags = body[at]
            at += 8
    except (struct_error, IndexError, ValueError):  # a part does not fit, is not in order or not UTF-8
        return None
    end = at + value_bytes
    if zero or value_bytes < 0 or end > len(body):
        return None
    return body[at:end], key, headers, priority, expires_at_ms, due_at_ms, flags


# The names of headers as they are stored, and decoded. A program's messages have the same few.
_KNOWN_NAMES: Final[dict[bytes, list[str]]] = {}
_MOST_KNOWN: Final = 256
_MOST_KNOWN_BYTES: Final = 512


def _names(body: bytes, start: int, end: int, count: int) -> list[str]:
    """Return the names of headers, and remember them; raises ValueError if they are not in order or not UTF-8."""
    at, items = _few_items(body, start, count)
    if at != end:
        raise ValueError
    names = [str(name, "utf-8") for name in items]
    if end - start <= _MOST_KNOWN_BYTES and end <= len(body) and len(_KNOWN_NAMES) < _MOST_KNOWN:
        _KNOWN_NAMES[body[start:end]] = names
    return names


def _few_items(body: bytes, at: int, count: int) -> tuple[int, list[bytes]]:
    """Return where the next part begins, and the items; raises ValueError if their ends are not in order."""
    if count == 1:
        first, length = _ONE_PAIR(body, at)
        if first or length < 0 or at + 8 + length > len(body):
            raise ValueError
        return at + 8 + (length + 7 & ~7), [body[at + 8 : at + 8 + length]]
    if count == 2:
        first, middle, last = _FEW_ENDS[2](body, at)
        start = at + 16
        if first or not 0 <= middle <= last or start + last > len(body):
            raise ValueError
        return start + (last + 7 & ~7), [body[start : start + middle], body[start + middle : start + last]]
    ends = _FEW_ENDS[count](body, at)
    start = at + (4 * count + 11 & ~7)
    if ends[0] or list(ends) != sorted(ends) or start + ends[-1] > len(body):
        raise ValueError
    items = [body[start + first : start + last] for first, last in pairwise(ends)]
    return start + (ends[-1] + 7 & ~7), items


class Columns:
    """A body split into its columns; messages are decoded on demand."""

    __slots__ = ("_body", "_count", "_spans", "columns")

    def __init__(self, body: memoryview, count: int, columns: int) -> None:
        self._body = body
        self._count = count
        self.columns = columns
        self._spans = _spans(body, count, columns)

    def span(self, column: int) -> memoryview | None:
        """Return the bytes of one column without padding; None if it is not used."""
        return self._spans.get(column)

    def value_ends(self) -> memoryview:
        return self._spans[-1]

    def value_bytes(self) -> memoryview:
        return self._spans[0]

    def values(self) -> list[bytes]:
        return _items(self._spans[-1], self._spans[0])

    def only_value(self) -> tuple[int, int]:
        """Return where in the body the value of a single-message frame begins and ends."""
        start, end = _ONE_PAIR(self._spans[-1])
        if start != 0 or not 0 <= end <= len(self._spans[0]):
            raise CorruptData("the ends of a column's items are not in order")
        first = len(self._body) - len(self._spans[0])
        return first, first + end

    def times_ns(self) -> Sequence[int] | None:
        return self._integers(TIMES)

    def expires_at_ms(self) -> Sequence[int] | None:
        return self._integers(EXPIRY)

    def due_at_ms(self) -> Sequence[int] | None:
        return self._integers(DUE)

    def priorities(self) -> Sequence[int] | None:
        span = self._spans.get(PRIORITIES)
        return None if span is None else bytes(span)

    def flags(self) -> Sequence[int] | None:
        span = self._spans.get(FLAGS)
        return None if span is None else bytes(span)

    def kept(self) -> list[bool] | None:
        """Return for each message whether it still exists; None if all do."""
        span = self._spans.get(REMOVED)
        return None if span is None else [not span[i >> 3] >> (i & 7) & 1 for i in range(self._count)]

    def keys(self) -> list[bytes | None] | None:
        span = self._spans.get(KEYS)
        if span is None:
            return None
        ends_bytes = 4 * (self._count + 1)
        keys: list[bytes | None] = [*_items(span[:ends_bytes], span[ends_bytes + len(padding(ends_bytes)) :])]
        validity = self._spans.get(KEY_VALIDITY)
        if validity is not None:
            for i in range(self._count):
                if not validity[i >> 3] >> (i & 7) & 1:
                    keys[i] = None
        return keys

    def headers(self) -> list[tuple[tuple[str, bytes], ...]] | None:
        span = self._spans.get(HEADERS)
        if span is None:
            return None
        cutter = _Cutter(span)
        list_ends = cutter.ends(self._count)
        names = _items(*cutter.variable(list_ends[-1]))
        values = _items(*cutter.variable(list_ends[-1]))
        try:
            pairs = [(str(name, "utf-8"), value) for name, value in zip(names, values, strict=True)]
        except UnicodeDecodeError:
            raise CorruptData("a header name is not UTF-8") from None
        return [tuple(pairs[start:end]) for start, end in pairwise(list_ends)]

    def _integers(self, column: int) -> Sequence[int] | None:
        span = self._spans.get(column)
        return None if span is None else array("q", bytes(span))


class _Cutter:
    """Cuts a buffer into its parts, front to back; raises CorruptData for parts that do not fit."""

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer
        self.at = 0

    def take(self, length: int) -> memoryview:
        end = self.at + length
        if end > len(self._buffer):
            raise CorruptData(f"a column of {length} bytes does not fit in the {len(self._buffer)} of its frame")
        part = self._buffer[self.at : end]
        self.at = end + -length % 8
        return part

    def ends(self, count: int) -> list[int]:
        return _checked_ends(self.take(4 * (count + 1)))

    def variable(self, count: int) -> tuple[memoryview, memoryview]:
        """Return the ends and the bytes of `count` items; the order of the ends is checked when the items are split."""
        ends = self.take(4 * (count + 1))
        return ends, self.take(_last_end(ends))


def _spans(body: memoryview, count: int, columns: int) -> dict[int, memoryview]:
    """Return column bit -> its bytes; -1 are the value ends, 0 the values."""
    cutter = _Cutter(body)
    spans = {-1: cutter.take(4 * (count + 1))}
    if columns & TIMES:
        spans[TIMES] = cutter.take(8 * count)
    if columns & KEY_VALIDITY:
        spans[KEY_VALIDITY] = cutter.take((count + 7) // 8)
    if columns & KEYS:
        start = cutter.at
        cutter.variable(count)
        spans[KEYS] = body[start : cutter.at]
    if columns & HEADERS:
        start = cutter.at
        pairs = _last_end(cutter.take(4 * (count + 1)))
        cutter.variable(pairs)
        cutter.variable(pairs)
        spans[HEADERS] = body[start : cutter.at]
    if columns & PRIORITIES:
        spans[PRIORITIES] = cutter.take(count)
    if columns & EXPIRY:
        spans[EXPIRY] = cutter.take(8 * count)
    if columns & DUE:
        spans[DUE] = cutter.take(8 * count)
    if columns & FLAGS:
        spans[FLAGS] = cutter.take(count)
    if columns & REMOVED:
        spans[REMOVED] = cutter.take((count + 7) // 8)
    spans[0] = body[cutter.at :]
    return spans


def _items(ends: memoryview, data: memoryview) -> list[bytes]:
    count = len(ends) // 4 - 1
    if 0 < count <= _EVEN_MOST:
        size, last = _END(ends, 4)[0], _END(ends, 4 * count)[0]
        if size > 0 and last == size * count <= len(data):
            even, split = _even(size, count)
            if ends == even:
                return list(split(data))
    cuts = _checked_ends(ends)
    if cuts[-1] > len(data):
        raise CorruptData(f"a column's items end at {cuts[-1]}, beyond its {len(data)} bytes")
    plain = bytes(data[: cuts[-1]])
    return [plain[start:end] for start, end in pairwise(cuts)]


@lru_cache(32)
def _even(size: int, count: int) -> tuple[bytes, Callable[[memoryview], tuple[bytes, ...]]]:
    """The ends of items that all have the same length, and what splits such items in C."""
    return array("i", range(0, size * count + 1, size)).tobytes(), Struct(f"{size}s" * count).unpack_from


def _last_end(ends: memoryview) -> int:
    last: int = _END(ends, len(ends) - 4)[0]
    if last < 0:
        raise CorruptData("the ends of a column's items are not in order")
    return last


def _checked_ends(ends: memoryview) -> list[int]:
    cuts = array("i", bytes(ends)).tolist()
    # One comparison in C is cheaper than a loop over neighbours.
    if cuts[0] != 0 or (len(cuts) > 2 and cuts != sorted(cuts)) or cuts[-1] < 0:
        raise CorruptData("the ends of a column's items are not in order")
    return cuts


def _ends(items: Iterable[Value]) -> bytes:
    return array("i", accumulate(map(len, items), initial=0)).tobytes()


def _int64(numbers: Iterable[int]) -> bytes:
    return array("q", [*numbers]).tobytes()


def _padded(part: bytes) -> list[bytes]:
    return [part, _PADDING[-len(part) % 8]]


def _variable(items: Sequence[bytes]) -> list[bytes]:
    return _padded(_ends(items)) + _padded(b"".join(items))


def _header_column(rows: Sequence[HeaderPairs]) -> list[bytes]:
    pairs = list(chain.from_iterable(rows))
    return [
        *_padded(array("i", accumulate(map(len, rows), initial=0)).tobytes()),
        *_variable([name.encode() for name, _ in pairs]),
        *_variable([value for _, value in pairs]),
    ]


def _bits(items: Sequence[bool]) -> bytes:
    bits = bytearray((len(items) + 7) // 8)
    for i, item in enumerate(items):
        if item:
            bits[i >> 3] |= 1 << (i & 7)
    return bytes(bits)
