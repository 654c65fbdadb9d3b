"""The arguments of `put`: bodies of each type, drafts of messages to publish; and what `put` returns."""

from __future__ import annotations

import math
from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from types import NoneType
from typing import Any, BinaryIO, Final, SupportsIndex, TypeAlias, overload

import msgspec
from msgspec import structs

from holdfast.broker.folder.layout import message_id
from holdfast.broker.messages import (
    BYTES_HEADERS,
    CORRELATION_ID,
    DEDUP_ID,
    PREFIX,
    TEXT_HEADERS,
    TEXT_KEY,
    TOMBSTONE,
    Draft,
    DraftFields,
    Place,
)
from holdfast.delivery.where import moment_of, seconds_of
from holdfast.errors import BadBody, InvalidRequest
from holdfast.large import Value
from holdfast.later import pattern
from holdfast.model import BodyKind, CodecName, Durability
from holdfast.settings import TopicSettings

_TYPES: Final[dict[BodyKind, Any]] = {"bytes": bytes, "text": str, "json": Any}


def kind_of(body_type: Any) -> BodyKind | None:
    """Return the kind of bodies that is stored with a queue, which does not depend on the types of a program."""
    if body_type is None or body_type is bytes:
        return None if body_type is None else "bytes"
    return "text" if body_type is str else "json"


def type_of(kind: BodyKind | None) -> Any:
    """Return the type in which bodies of this kind are returned; JSON becomes a dict, a list, a number and so on."""
    return None if kind is None else _TYPES[kind]


class Bodies:
    """Encodes and decodes bodies of one type."""

    def __init__(self, body_type: Any) -> None:
        self.plain = body_type is None or body_type is bytes
        self.decode: Callable[[bytes], Any]
        self.encode: Callable[[Any], bytes]
        if self.plain:
            self.encode, self.decode = _from_bytes, bytes
        elif body_type is str:
            self.encode, self.decode = _from_text, _to_text
        else:
            self.encode, self.decode = _typed(body_type)


def _from_bytes(body: object) -> bytes:
    if isinstance(body, bytes):
        return body
    if isinstance(body, (bytearray, memoryview)):
        return bytes(body)
    hint = "; write body.encode(), or open the queue with body_type=str" if isinstance(body, str) else ""
    hint = hint or "; open the queue with body_type=... to put values of other types"
    raise BadBody(f"a body must be bytes, not {type(body).__name__}{hint}. Nothing was stored")


def _from_text(body: object) -> bytes:
    if not isinstance(body, str):
        raise BadBody(
            f"a body of this queue must be str, not {type(body).__name__}. Nothing was stored; convert it first"
        )
    try:
        return body.encode()
    except UnicodeEncodeError as error:
        raise BadBody(
            f"the body cannot be stored as text: {error}. Nothing was stored; use body_type=bytes for it"
        ) from None


def _to_text(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise BadBody(f"the body is not text: {error}. Read its bytes from `raw`, or reject the message") from None


def _typed(body_type: Any) -> tuple[Callable[[Any], bytes], Callable[[bytes], Any]]:
    encoder = msgspec.json.Encoder()
    try:
        decoder = msgspec.json.Decoder(body_type)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(
            f"body_type={body_type!r} cannot be used: {error}. Use bytes, str, dict or a type that msgspec supports"
        ) from None
    name = getattr(body_type, "__name__", str(body_type))

    def encode(body: Any) -> bytes:
        try:
            content = encoder.encode(body)
            decoder.decode(content)  # what is put must come out again
        except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
            raise BadBody(
                f"the body does not fit {name}: {error}. Nothing was stored; change the body, or the queue's body_type"
            ) from None
        return content

    def decode(body: bytes) -> Any:
        try:
            return decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise BadBody(
                f"the body does not fit {name}: {error}. Read its bytes from `raw`, or reject the message"
            ) from None

    return encode, decode


Stream: TypeAlias = BinaryIO | Iterable[bytes]
AsyncStream: TypeAlias = AsyncIterable[bytes] | Stream

PIECE_BYTES: Final = 256 * 1024


def stream_options(options: dict[str, Any]) -> NewMessage:
    """Return a message without a body from the options of `put_stream`: those of `put` except `codec`."""
    known = set(NewMessage.__struct_fields__) - {"body"}
    for name in options:
        if name not in known:
            hint = ": a stream is stored as it is; compress it first" if name == "codec" else ""
            raise InvalidRequest(f"{name} cannot be used here{hint}; choose from {', '.join(sorted(known))}")
    return NewMessage(body=b"", **options)


def check_size_hint(size_hint: object) -> None:
    """Refuse anything that is not a number of bytes, or None."""
    if size_hint is not None and (type(size_hint) is not int or size_hint < 0):
        raise InvalidRequest(f"size_hint={size_hint!r} cannot be used: give a number of bytes, or None")


def pieces_of(stream: object) -> Iterator[object]:
    """Iterate over the pieces of a file or an iterable, which a thread can read."""
    read = getattr(stream, "read", None)
    if callable(read):
        return iter(partial(read, PIECE_BYTES), b"")
    if isinstance(stream, (bytes, bytearray, memoryview, str)) or not isinstance(stream, Iterable):
        raise no_stream(stream)
    return iter(stream)


def no_stream(given: object) -> InvalidRequest:
    """Return the error for an object that is not a stream."""
    return InvalidRequest(
        f"a stream must be a binary file or an iterable of bytes, not {type(given).__name__}. Use put or publish for "
        "a body that is in memory"
    )


Seconds: TypeAlias = float | timedelta
Text: TypeAlias = str | bytes
HeadersLike: TypeAlias = Mapping[str, Text] | Iterable[tuple[str, Text]]

_MOST_ID_BYTES: Final = 1_024
_READ_OFTEN: Final = (NoneType, dict, list, tuple)


class _MessageBody(msgspec.Struct, frozen=True):
    body: Any  # the only positional argument


class NewMessage(_MessageBody, frozen=True, kw_only=True):
    """One message for `put_many`, `publish_many` or `send_many`: `NewMessage(body, key=...)`.

    Its options are those of `put` except `durability` and `codec`, which belong to the call.
    """

    key: Text | None = None
    headers: HeadersLike | None = None
    priority: int = 0
    delay: Seconds | None = None
    at: datetime | None = None
    ttl: Seconds | None = None
    dedup_id: Text | None = None
    correlation_id: str | None = None


# The options of a NewMessage in the order of its fields, as `put`, `publish` and `send` pass them on.
MessageOptions: TypeAlias = tuple[
    Text | None, HeadersLike | None, int, Seconds | None, datetime | None, Seconds | None, Text | None, str | None
]
NO_OPTIONS: Final = structs.astuple(NewMessage(None))[1:]


def message_of(body: Any, options: MessageOptions) -> NewMessage:
    """Return the message that the arguments of `put`, `publish` or `send` describe."""
    key, headers, priority, delay, at, ttl, dedup_id, correlation_id = options
    return NewMessage(
        body=body,
        key=key,
        headers=headers,
        priority=priority,
        delay=delay,
        at=at,
        ttl=ttl,
        dedup_id=dedup_id,
        correlation_id=correlation_id,
    )


def is_read_once(headers: object) -> bool:
    """Return whether these headers can be read only once: then no path may try before another."""
    return type(headers) not in _READ_OFTEN and isinstance(headers, Iterator)


def has_only_a_body(message: NewMessage) -> bool:
    """Return whether a message has no options at all: a faster path handles those."""
    plain = message.body is not None and message == NewMessage(body=message.body)
    return plain and type(message.priority) is int


class PublishRequest(msgspec.Struct, frozen=True, gc=False):
    """Bodies or NewMessages for a topic. Without a partition, each goes to that of its key or to the next in turn."""

    messages: Iterable[Any]
    partition: int | None = None
    durability: Durability | None = None
    codec: CodecName | None = None


class StreamRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A message whose body comes as a stream: its options and its destination."""

    stream: AsyncStream
    message: NewMessage
    size_hint: int | None
    partition: int | None = None
    durability: Durability | None


class Stored(msgspec.Struct, frozen=True, gc=False):
    """What `put` returns: the id of the message, where it is stored, and how durable it is.

    `offset` is None while the message is delayed; it then has a `delayed_id`. `duplicate` means that a message with
    this dedup_id was stored before: the other fields are those of the first one.
    """

    topic: str
    offset: int | None
    delayed_id: int | None
    duplicate: bool
    durability: Durability
    partition: int = 0

    @property
    def id(self) -> str:
        """The id of the message. For a duplicate, the id of the first one, or empty if that is no longer known."""
        if self.offset is None and self.delayed_id is None:
            return ""
        return message_id(self.topic, self.partition, self.offset, self.delayed_id)


class StoredRun(Sequence[Stored]):  # noqa: PLW1641  as a list, it has no hash
    """What `put_many` returns for messages with consecutive offsets: each `Stored` is made when it is looked at.

    It equals a list of the same items.
    """

    __slots__ = ("_durability", "_offsets", "_partition", "_topic")

    def __init__(self, topic: str, offsets: range, durability: Durability, partition: int) -> None:
        self._topic = topic
        self._offsets = offsets
        self._durability = durability
        self._partition = partition

    def __len__(self) -> int:
        return len(self._offsets)

    @overload
    def __getitem__(self, at: SupportsIndex) -> Stored: ...
    @overload
    def __getitem__(self, at: slice) -> list[Stored]: ...
    def __getitem__(self, at: SupportsIndex | slice) -> Stored | list[Stored]:
        if isinstance(at, slice):
            return list(map(self._stored, self._offsets[at]))
        return self._stored(self._offsets[at])

    def __iter__(self) -> Iterator[Stored]:
        return map(self._stored, self._offsets)

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, (list, StoredRun)) else NotImplemented

    def __add__(self, other: Iterable[Stored]) -> list[Stored]:
        return [*self, *other]

    def __radd__(self, other: Iterable[Stored]) -> list[Stored]:
        return [*other, *self]

    def __repr__(self) -> str:
        return repr(list(self))

    def _stored(self, offset: int) -> Stored:
        return Stored(self._topic, offset, None, False, self._durability, self._partition)


class Drafter:
    """Checks messages against a queue's settings and body type."""

    def __init__(self, bodies: Bodies, settings: TopicSettings) -> None:
        self._encode, self._as_is = bodies.encode, bodies.plain
        self._ttl_ms = settings.ttl_ms or 0
        self._compacted = settings.cleanup != "delete"
        self.plain = bodies.plain and not self._ttl_ms and not settings.trace_sample

    def draft(self, message: NewMessage, now_ns: int, stored: Value | None = None) -> Draft:
        """Return the message as it will be stored. Raises InvalidRequest if something is wrong with it.

        `stored` is the body if it is encoded already, no matter what the queue's type is.
        """
        body, *options = structs.astuple(message)
        return Draft(*self.fields(body, tuple(options), now_ns, stored))

    def fields(self, body: Any, options: MessageOptions, now_ns: int, stored: Value | None = None) -> DraftFields:
        """Return the fields of `draft`: for one message that is written at once, an object for them costs too much."""
        key, given, priority, delay, at, ttl, given_id, correlation_id = options
        flags = 0
        stored_key = None
        if type(key) is str and key.isascii():
            stored_key, flags = key.encode(), TEXT_KEY
        elif key is not None:
            flags = TEXT_KEY if isinstance(key, str) else 0
            stored_key = _text(key, "key")
        value: Value
        if stored is not None:
            value = stored
        elif body is None and self._compacted and key is not None:
            value, flags = b"", flags | TOMBSTONE
        else:
            value = body if self._as_is and type(body) is bytes else self._encode(body)
        headers: tuple[tuple[str, bytes], ...] = ()
        if given is not None:
            headers, text_headers = _headers(given)
            flags |= TEXT_HEADERS * text_headers
        if type(priority) is not int or not 0 <= priority <= 9:
            raise InvalidRequest(
                f"priority={priority!r} cannot be used: give a whole number from 0 to 9; 9 is the most urgent"
            )
        due_ms = 0 if delay is None and at is None else due_at_ms(delay, at, now_ns)
        ttl_ms = self._ttl_ms if ttl is None else duration_ms(ttl, "ttl", minimum_ms=1)
        dedup_id = None
        if given_id is not None:
            dedup_id = _id(given_id, "dedup_id")
            headers += ((DEDUP_ID, dedup_id),)
        if correlation_id is not None:
            if not isinstance(correlation_id, str):
                raise InvalidRequest(f"correlation_id must be str, not {type(correlation_id).__name__}")
            headers += ((CORRELATION_ID, _id(correlation_id, "correlation_id")),)
        # The time to live begins when the message becomes ready, not while it is delayed.
        expires_ms = (due_ms or now_ns // 1_000_000) + ttl_ms if ttl_ms else 0
        return value, stored_key, headers, priority, expires_ms, due_ms, dedup_id, flags


def _text(value: object, name: str) -> bytes:
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"{name}={value!r} cannot be stored as text: {error}. Pass it as bytes") from None
    if isinstance(value, bytes):
        return value
    raise InvalidRequest(f"{name} must be str or bytes, not {'None' if value is None else type(value).__name__}")


def _id(given: object, name: str) -> bytes:
    value = given.encode() if type(given) is str and given.isascii() else _text(given, name)
    if not value:
        raise InvalidRequest(f"{name} is empty; leave it out, or give it a value")
    if len(value) > _MOST_ID_BYTES:
        raise InvalidRequest(f"{name} has {len(value)} bytes, and the limit is {_MOST_ID_BYTES}: use a shorter one")
    return value


# Names of headers that were checked: a program's messages have the same few.
_checked_names: Final[set[str]] = set()
_MOST_CHECKED: Final = 256
_MOST_NAME_CHARS: Final = 64


def _checked_name(name: object) -> str:
    """Return what can be the name of a header, and remember it; refuse all else."""
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"a header's name must be text, not {name!r}")
    if not name.isascii():
        _text(name, f"the name of the header {name!r}")
    if name.startswith(PREFIX):
        raise InvalidRequest(
            f"the header {name!r} cannot be set: names that begin with {PREFIX} are reserved; choose another"
        )
    if type(name) is str and len(name) <= _MOST_NAME_CHARS and len(_checked_names) < _MOST_CHECKED:
        _checked_names.add(name)
    return name


def _headers(headers: object) -> tuple[tuple[tuple[str, bytes], ...], bool]:
    """Return the headers as they are stored, and whether any value was given as text."""
    stored: list[tuple[str, bytes]] = []
    as_bytes: list[int] = []
    for given, value in headers.items() if type(headers) is dict else _pairs(headers):
        name = given if type(given) is str and given in _checked_names else _checked_name(given)
        if type(value) is str and value.isascii():
            stored.append((name, value.encode()))
            continue
        if isinstance(value, bytes):
            as_bytes.append(len(stored))
        stored.append((name, _text(value, f"the header {name!r}")))
    if not as_bytes:
        return tuple(stored), bool(stored)
    text = len(as_bytes) < len(stored)
    if text:
        stored.append((BYTES_HEADERS, b",".join([b"%d" % i for i in as_bytes])))
    return tuple(stored), text


def _pairs(headers: object) -> list[tuple[object, object]]:
    try:
        if isinstance(headers, (str, bytes, bytearray)):
            raise TypeError
        pairs = list(headers.items() if isinstance(headers, Mapping) else headers)  # type: ignore[call-overload]
        if any(isinstance(pair, (str, bytes)) for pair in pairs):
            raise TypeError
        return [(name, value) for name, value in pairs]
    except (TypeError, ValueError):
        raise InvalidRequest(f"headers must be a mapping or pairs of name and value, not {headers!r}") from None


def stored_at(place: Place, topic: str, partition: int, durability: Durability) -> Stored:
    """Return the result for a message sent to this partition; the first of a duplicate may be in another one."""
    number = partition if place.partition is None else place.partition
    return Stored(topic, place.offset, place.delayed_id, place.duplicate, durability, number)


# Durations and instants as callers give them, converted to the integers used everywhere below.
#
# Durations are rounded up to whole milliseconds, so that nothing ever happens early.


MAX_DURATION_MS: Final = 100 * 365 * 24 * 3600 * 1000  # 100 years
MAX_LEASE_MS: Final = 30 * 24 * 3600 * 1000

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_LAST_US: Final = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // _MICROSECOND
_NUMBER: Final = pattern(r"[0-9]+(?:\.[0-9]+)?")
_BASIC_DATE: Final = pattern(r"[0-9]{8}")
_FAR_S: Final = 1e12  # beyond every limit, and safe to multiply
_MAX_SHOWN: Final = 80


def duration_ms(value: float | timedelta, name: str, *, minimum_ms: int = 0, maximum_ms: int = MAX_DURATION_MS) -> int:
    """Convert seconds or a timedelta to milliseconds, rounded up. `name` is the argument's name, for the error."""
    found_ms = _as_ms(value)
    if found_ms is None or not minimum_ms <= found_ms <= maximum_ms:
        raise InvalidRequest(
            f"{name}={_shown(value)} cannot be used: give seconds as a number, or a timedelta, "
            f"from {_seconds(minimum_ms)} to {_seconds(maximum_ms)}"
        )
    return found_ms


def lease_of(value: float | timedelta, *, minimum_ms: int = 1) -> int:
    """Convert a lease to milliseconds."""
    return duration_ms(value, "lease", minimum_ms=minimum_ms, maximum_ms=MAX_LEASE_MS)


def instant_ns(value: datetime, name: str) -> int:
    """Convert an aware datetime to nanoseconds since 1970, exactly; negative before 1970."""
    if not isinstance(value, datetime):
        raise InvalidRequest(
            f"{name}={_shown(value)} cannot be used: give an aware datetime, such as datetime.now(timezone.utc)"
        )
    if value.utcoffset() is None:
        raise InvalidRequest(
            f"{name}={_shown(value)} has no time zone, so it is ambiguous: give an aware "
            "datetime, such as datetime.now(timezone.utc), or name the zone with replace(tzinfo=...)"
        )
    return (value - _EPOCH) // _MICROSECOND * 1000


def instant_ms(value: datetime, name: str) -> int:
    """Convert an aware datetime to milliseconds since 1970, rounded up."""
    return -(-instant_ns(value, name) // 1_000_000)


def to_datetime(time_ns: int) -> datetime:
    """Convert nanoseconds since 1970 to a datetime in UTC, truncated to microseconds.

    Times after the last datetime become the last datetime, so every 64-bit time can be converted.
    """
    return _EPOCH + timedelta(microseconds=min(time_ns // 1000, _LAST_US))


def moment_at(ms: int | None) -> datetime | None:
    """Convert milliseconds since 1970 to a datetime in UTC; None for 0 and None, which mean that there is no time."""
    return to_datetime(ms * 1_000_000) if ms else None


def due_at_ms(delay: float | timedelta | None, at: datetime | None, now_ns: int) -> int:
    """Return when a message is due, in milliseconds since 1970; 0 if it is not delayed or the time has passed.

    Rounded up: a message must not come early, not even by less than a millisecond.
    """
    if delay is not None and at is not None:
        raise InvalidRequest(f"delay={_shown(delay)} and at={_shown(at)} are both given: choose one of them")
    if delay is not None:
        delay_ms = duration_ms(delay, "delay")
        return -(-now_ns // 1_000_000) + delay_ms if delay_ms else 0
    if at is None:
        return 0
    due_ms = instant_ms(at, "at")
    return due_ms if due_ms * 1_000_000 > now_ns else 0


def parse_duration(text: str, name: str = "duration") -> float:
    """Parse a duration from the command line into seconds: `2.5` (seconds), `500ms`, `1h30m`, `7d`."""
    seconds = float(text) if _NUMBER.fullmatch(text) else seconds_of(text)
    if seconds is None or seconds * 1000 > MAX_DURATION_MS:
        raise InvalidRequest(
            f"{name} {_shown(text)} cannot be used: write seconds (2.5) or units, the largest first "
            "(500ms, 30s, 1h30m, 7d, 2w), up to 100 years"
        )
    return seconds


def parse_instant(text: str, now_ms: int, name: str = "time") -> datetime:
    """Parse a moment from the command line into a datetime in UTC.

    `2026-11-16T10:00:00Z` or another ISO 8601 time (UTC if it names no zone), `2026-11-16` (midnight), `-10m` and
    `+1h30m` (from now), `now`, `1763287200` (seconds since 1970).
    """
    try:
        found = _moment(text, now_ms)
        if found is not None:
            return found.astimezone(UTC)
    except OverflowError:
        pass
    raise InvalidRequest(
        f"{name} {_shown(text)} cannot be used: write a time between the years 1 and 9999 as 2026-11-16T10:00:00Z "
        "(UTC where no zone is named), -10m or +1h30m (from now), now, or seconds since 1970"
    )


def _moment(text: str, now_ms: int) -> datetime | None:
    now = _EPOCH + timedelta(milliseconds=now_ms)
    if text == "now":
        return now
    if text[:1] in {"+", "-"}:
        seconds = seconds_of(text[1:])
        if seconds is None:
            return None
        return now + timedelta(seconds=seconds if text[0] == "+" else -seconds)
    # Eight digits are a date: as seconds they would lie in the first three years after 1970.
    if _NUMBER.fullmatch(text) and not _BASIC_DATE.fullmatch(text):
        return _EPOCH + timedelta(seconds=float(text))
    return moment_of(text)


def _as_ms(value: object) -> int | None:
    """Whole milliseconds, rounded away from zero; None for what is no duration."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value * 1000
    if isinstance(value, timedelta):
        ns = value // _MICROSECOND * 1000
    elif isinstance(value, float) and math.isfinite(value):
        # By way of whole nanoseconds: 0.07 is not exactly 70 ms as a float, and is not meant to be 71.
        ns = round(min(max(value, -_FAR_S), _FAR_S) * 1e9)
        if ns == 0 and value != 0:
            ns = 1 if value > 0 else -1
    else:
        return None
    return ns // 1_000_000 if ns < 0 else -(-ns // 1_000_000)


def _seconds(ms: int) -> str:
    if ms == MAX_DURATION_MS:
        return "100 years"
    return f"{ms // 1000} s" if ms % 1000 == 0 else f"{ms / 1000:g} s"


def _shown(value: object) -> str:
    """Its repr, short; a repr may fail, as that of an integer with thousands of digits does."""
    try:
        text = repr(value)
    except Exception:
        text = f"a {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 1] + "…"
