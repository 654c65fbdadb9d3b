"""How many values a text of JSON or MessagePack holds, counted before any of them is made.

Decoding is one call that nothing can interrupt, and takes as long as there are values: 10 to 30 ns for a number, 150
for a list or a map, 300 for what has a name of its own, however short they are. So these count three times. Counting
costs less than making them, goes in slices, and stops at the limit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, TypeAlias

from holdfast.errors import InvalidRequest
from holdfast.protocol.media import FRAMES, MSGPACK

MOST_VALUES: Final = 1_000_000  # of one message, or of any body but a batch: decoded in one call
MOST_BATCH_COMMAS: Final = 1_000_000  # of a batch in JSON, whose messages are decoded one by one
MOST_BATCH_VALUES: Final = 4_000_000  # of one in MessagePack, which says how many messages it has
SMALL_BYTES: Final = 64 * 1024  # in so few bytes there cannot be many

_SLICE: Final = 64 * 1024
_Marks: TypeAlias = tuple[tuple[bytes, int], ...]
_COMMAS: Final[_Marks] = ((b",", 1),)
# Every value but the first of a list or a map follows a comma.
_VALUES: Final[_Marks] = (*_COMMAS, (b"[", 2), (b"{", 2), (b":", 2))
_ESCAPE: Final = re.compile(rb"\\.", re.DOTALL)
# By its first byte: how many bytes of a value follow; below 0, in how many bytes that stands (10 more: an extension).
_NAMED: Final = {
    0xC4: -1, 0xC5: -2, 0xC6: -4, 0xC7: -11, 0xC8: -12, 0xC9: -14, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4,
    0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8, 0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17, 0xD9: -1, 0xDA: -2,
    0xDB: -4, 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4,
}  # fmt: skip
_LENGTHS: Final = [_NAMED.get(first, first & 0x1F if 0xA0 <= first < 0xC0 else 0) for first in range(256)]
# And for how many it counts: a name cannot be told from any other text here.
_COUNTS: Final = [
    3 if 0x80 <= first < 0xA0 or first >> 2 == 0xDC >> 2 else 2 if 0xA0 <= first < 0xC0 or 0xD9 <= first < 0xDC else 1
    for first in range(256)
]


def check_values(content: bytes, media: str) -> None:
    """Refuse what holds more values than may be made at once."""
    if len(content) > SMALL_BYTES:
        packed = media in (MSGPACK, FRAMES)
        _check(_packed(content) if packed else _written(content, _VALUES, MOST_VALUES), MOST_VALUES)


def check_batch(content: bytes, media: str) -> None:
    """Refuse a batch that may hold more messages than can be told apart at once."""
    if len(content) <= SMALL_BYTES:
        return
    if media == MSGPACK:
        _check(_packed(content), MOST_BATCH_VALUES)
    else:
        _check(_written(content, _COMMAS, MOST_BATCH_COMMAS), MOST_BATCH_COMMAS)


def _check(counts: Iterator[int], most: int) -> None:
    total = 0
    for count in counts:
        total += count
        if total > most:
            raise InvalidRequest(
                f"there are more than {most:,} values in it, which is the limit; send less at a time, or send what "
                "need not be looked into as bytes or text"
            )


def _written(content: bytes, marks: _Marks, most: int) -> Iterator[int]:
    """Counts for JSON, slice by slice, of what stands outside of texts."""
    slices = range(0, len(content), _SLICE)
    if sum(factor * content.count(mark, at, at + _SLICE) for at in slices for mark, factor in marks) <= most:
        return  # few, also if those in texts counted
    in_text = escaped = False
    for at in slices:
        piece = content[at : at + _SLICE]
        if escaped:
            piece = piece[1:]
        plain = _ESCAPE.sub(b"", piece) if b"\\" in piece else piece
        escaped = plain.endswith(b"\\")
        parts = plain.split(b'"')
        outside = b" ".join(parts[in_text::2])
        in_text ^= len(parts) % 2 == 0
        yield sum(factor * outside.count(mark) for mark, factor in marks)


def _packed(content: bytes) -> Iterator[int]:
    """Counts for MessagePack, slice by slice: values lie one behind the other, whatever holds them."""
    at, end, count = 0, len(content), 0
    while at < end:
        first = content[at]
        length = _LENGTHS[first]
        count += _COUNTS[first]
        at += 1
        if length > 0:
            at += length
        elif length < 0:
            extra, width = divmod(-length, 10)  # an extension has its kind behind its length
            at += width + int.from_bytes(content[at : at + width], "big") + extra
        if count > _SLICE:
            yield count
            count = 0
    yield count
