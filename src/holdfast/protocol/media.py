"""How values travel: JSON for people, where bytes are base64; MessagePack for programs, where they are themselves."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeAlias, TypeVar

import msgspec

from holdfast import errors
from holdfast.errors import HoldfastError, InvalidRequest, LeaseLost, OffsetOutOfRange, OutOfSequence, Removed, TailLost
from holdfast.later import pattern

JSON: Final = "application/json"
MSGPACK: Final = "application/msgpack"
RUNS: Final = "application/msgpack;runs=1"  # accepted by callers who can read runs of messages
LINES: Final = "application/x-ndjson"
FRAMES: Final = "application/vnd.holdfast.frames"  # MessagePack values, each behind its length in four bytes
RAW: Final = "application/octet-stream"
EVENTS: Final = "text/event-stream"
MULTIPART: Final = "multipart/form-data"
OWNER: Final = (
    "x-holdfast-owner"  # in the answer to a call that a node has passed on: the address of the one that owns it
)
# Nobody said what it is: curl says the second of whatever it is given with -d. It is taken for JSON.
UNSAID: Final = ("", "application/x-www-form-urlencoded")

_LENGTH_BYTES: Final = 4
_LINE: Final = pattern(rb"[^\n]+")
_SLICE: Final = 64 * 1024  # so much is cut into lines at once: each is an object

_Value = TypeVar("_Value")

_to_json: Final = msgspec.json.Encoder().encode
_to_msgpack: Final = msgspec.msgpack.Encoder().encode
_decoders: dict[tuple[str, Any], Callable[[bytes], Any]] = {}


def encode(value: object, media: str) -> bytes:
    """A value as bytes of the media type: MessagePack where that is said, JSON otherwise."""
    return encoder(media)(value)


def encoder(media: str) -> Callable[[object], bytes]:
    """What encodes values as this media type."""
    return _to_msgpack if media in (MSGPACK, FRAMES) else _to_json


def decode(content: bytes, media: str, kind: type[_Value] | Any) -> _Value:
    """The value that the bytes stand for; msgspec's errors say where they do not fit."""
    found: _Value = (_decoders.get((media, kind)) or decoder(media, kind))(content)
    return found


def decoder(media: str, kind: Any) -> Callable[[bytes], Any]:
    """What decodes values of this type from this media type."""
    packed = media in (MSGPACK, FRAMES)
    known = MSGPACK if packed else JSON
    if (known, kind) not in _decoders:
        made = msgspec.msgpack.Decoder(kind) if packed else msgspec.json.Decoder(kind)
        _decoders[known, kind] = made.decode
    return _decoders[known, kind]


def framed(value: object, media: str) -> bytes:
    """One value of a stream: a line of JSON, or MessagePack behind its length."""
    if media == FRAMES:
        content = _to_msgpack(value)
        return len(content).to_bytes(_LENGTH_BYTES, "big") + content
    return _to_json(value) + b"\n"


class Unframer:
    """Cuts a stream of values apart, however it comes in. Whoever stops asking is not given, and nobody makes, more."""

    def __init__(self, media: str) -> None:
        self._packed = media == FRAMES
        self._rest = bytearray()

    def feed(self, content: bytes) -> Iterator[bytes]:
        """The values that are whole by now."""
        if self._packed:
            yield from self._frames(content)
            return
        for at in range(0, len(content), _SLICE):
            yield from self._lines(content if len(content) <= _SLICE else content[at : at + _SLICE])

    def _lines(self, content: bytes) -> Iterator[bytes]:
        known = len(self._rest)
        self._rest += content
        end = self._rest.rfind(b"\n", known)  # before that there is none: a long line is not looked at again
        if end >= 0:
            lines = bytes(self._rest[:end])
            del self._rest[: end + 1]
            yield from _LINE.findall(lines)

    def _frames(self, content: bytes) -> Iterator[bytes]:
        self._rest += content
        at = 0
        while len(self._rest) - at >= _LENGTH_BYTES:
            end = at + _LENGTH_BYTES + int.from_bytes(self._rest[at : at + _LENGTH_BYTES], "big")
            if len(self._rest) < end:
                break
            yield bytes(self._rest[at + _LENGTH_BYTES : end])
            at = end
        del self._rest[:at]


# How many values a text of JSON or MessagePack holds, counted before any of them is made.
#
# Decoding is one call that nothing can interrupt, and takes as long as there are values: 10 to 30 ns for a number, 150
# for a list or a map, 300 for what has a name of its own, however short they are. So these count three times. Counting
# costs less than making them, goes in slices, and stops at the limit.


MOST_VALUES: Final = 1_000_000  # of one message, or of any body but a batch: decoded in one call
MOST_BATCH_COMMAS: Final = 1_000_000  # of a batch in JSON, whose messages are decoded one by one
MOST_BATCH_VALUES: Final = 4_000_000  # of one in MessagePack, which says how many messages it has
SMALL_BYTES: Final = 64 * 1024  # in so few bytes there cannot be many


_Marks: TypeAlias = tuple[tuple[bytes, int], ...]
_COMMAS: Final[_Marks] = ((b",", 1),)
# Every value but the first of a list or a map follows a comma.
_VALUES: Final[_Marks] = (*_COMMAS, (b"[", 2), (b"{", 2), (b":", 2))
_ESCAPE: Final = pattern(rb"\\.", re.DOTALL)
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
                f"it has more than {most:,} values, which is the limit; send less at a time, or send nested data as "
                "bytes or text"
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


# Errors on the wire: the code says which, the facts come along, and a client raises the same error again.


# What some errors carry besides their message, by the names of their arguments.
_FACTS: Final[Mapping[type[HoldfastError], tuple[str, ...]]] = {
    OffsetOutOfRange: ("offset", "start", "end"),
    Removed: ("offset", "next_offset", "start", "end"),
    TailLost: ("epoch", "offset", "epoch_end"),
    OutOfSequence: ("expected", "given", "known"),
    LeaseLost: ("offsets", "holder", "since_ms", "why"),
    errors.LockHeld: ("holder", "since_ms", "until_ms"),
    errors.Conflict: ("version",),
    errors.DamagedRange: ("first_offset", "next_offset"),
}
KINDS: Final[Mapping[str, type[HoldfastError]]] = {
    kind.code: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, HoldfastError)
}


class Fault(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What went wrong: a stable code, a sentence, and whether the same call may succeed later."""

    code: str
    message: str
    retryable: bool
    retry_after: float | None = None
    correlation_id: str = ""
    notes: list[str] = []
    facts: dict[str, Any] = {}


class ErrorAnswer(msgspec.Struct, kw_only=True):
    """What every answer that is no success says."""

    error: Fault


def fault_of(error: HoldfastError, *, retry_after: float | None = None, correlation_id: str = "") -> Fault:
    """An error as it is sent."""
    names = next((_FACTS[kind] for kind in type(error).__mro__ if kind in _FACTS), ())
    return Fault(
        code=error.code,
        message=str(error),
        retryable=error.retryable,
        retry_after=retry_after,
        correlation_id=correlation_id,
        notes=list(getattr(error, "__notes__", ())),
        facts={name: getattr(error, name) for name in names}
        | ({"receipts": error.receipts} if isinstance(error, LeaseLost) and error.receipts else {}),
    )


def error_of(fault: Fault) -> HoldfastError:
    """The error that the fault stands for; one that this release does not know is of the nearest kind."""
    kind = KINDS.get(fault.code)
    if kind is None:
        kind = errors.Unavailable if fault.retryable else HoldfastError
    names = next((_FACTS[known] for known in kind.__mro__ if known in _FACTS), ())
    facts = {name: fault.facts[name] for name in names if name in fault.facts}
    try:
        error = kind(fault.message, **facts)
    except TypeError:  # some facts are missing
        error = HoldfastError(fault.message)
    if isinstance(error, LeaseLost):
        error.receipts = tuple(fault.facts.get("receipts", ()))
    for note in fault.notes:
        error.add_note(note)
    return error
