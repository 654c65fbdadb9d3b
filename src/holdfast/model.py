"""Plain values that are passed between the layers."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final, Literal, TypeAlias

import msgspec

from holdfast.large import Value

Durability: TypeAlias = Literal["fsync", "os", "interval"]
Acks: TypeAlias = Literal["none", "leader", "all"]
CodecName: TypeAlias = Literal["none", "zstd", "lz4", "gzip"]
BodyKind: TypeAlias = Literal["bytes", "text", "json"]
HeaderPairs: TypeAlias = Sequence[tuple[str, bytes]]

# What each name that Kafka and others have for it asks for. Nothing is answered before it is applied, so `none`, which
# asks for less than that, gets the same as `leader`; only a producer does not wait for the answer.
DURABILITY_OF_ACKS: Final[dict[Acks, Durability]] = {"none": "os", "leader": "os", "all": "fsync"}

MOST_DOCUMENT_BYTES: Final = 1024 * 1024  # of a state document, as JSON
_HEADER_BYTES: Final = 256


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """Messages to store, as columns of equal length; a column that is None is not stored at all.

    In `expires_at_ms` and `due_at_ms`, 0 means "none".
    """

    values: Sequence[Value]
    times_ns: Sequence[int] | None = None
    keys: Sequence[bytes | None] | None = None
    headers: Sequence[HeaderPairs] | None = None
    priorities: Sequence[int] | None = None
    expires_at_ms: Sequence[int] | None = None
    due_at_ms: Sequence[int] | None = None
    flags: Sequence[int] | None = None


class Producer(msgspec.Struct, frozen=True, gc=False):
    """The producer of a batch and the sequence number of its first message; id 0 means no producer."""

    id: int = 0
    epoch: int = 0
    first_sequence: int = 0

    def after(self, messages: int) -> Producer:
        """Return the position `messages` later in the sequence, whose 32-bit numbers wrap around to 0."""
        if not messages or not self.id:
            return self
        return Producer(self.id, self.epoch, (self.first_sequence + messages) % 2**32)


NO_PRODUCER = Producer()


class Record(msgspec.Struct, frozen=True, gc=False):
    """One message as stored in the log. A large value stays in its file until it is read."""

    offset: int
    timestamp_ns: int
    value: Value
    key: bytes | None = None
    headers: tuple[tuple[str, bytes], ...] = ()
    priority: int = 0
    expires_at_ms: int = 0
    due_at_ms: int = 0
    flags: int = 0
    epoch: int = 0


def extra_bytes(record: Record) -> int:
    """Size of a message in a response besides its value.

    Each header counts as hundreds of bytes, because building its Python objects costs that much.
    """
    size = 0 if record.key is None else len(record.key)
    for name, value in record.headers:
        size += _HEADER_BYTES + len(name) + len(value)
    return size


class Appended(msgspec.Struct, frozen=True, gc=False):
    """Result of an append: the offsets [offset, next_offset), and how durable they are now."""

    offset: int
    next_offset: int
    durability: Durability


class LogPosition(msgspec.Struct, frozen=True, gc=False):
    """An offset and the epoch in which it was read, so that a reader notices when the tail was lost."""

    epoch: int
    offset: int


class Pause(msgspec.Struct, frozen=True, kw_only=True):
    """Since when a group is paused, in ms since 1970, and why; the reason is empty if none was given."""

    since_ms: int
    reason: str = ""

    @property
    def since(self) -> datetime:
        """When it was paused."""
        return datetime.fromtimestamp(self.since_ms / 1000, UTC)


class Retained(msgspec.Struct, frozen=True, kw_only=True):
    """What applying a topic's retention settings removed: whole segments, and their total size in bytes."""

    messages: int
    dead_letters: int
    segments: int
    bytes: int


class Trimmed(msgspec.Struct, frozen=True, gc=False):
    """What a trim or a retention run removed, and the offset at which the log now starts."""

    segments: int
    bytes: int
    start: int


def count_of(number: int, thing: str) -> str:
    """Return a number of things as people write it: "1 message", "2,000 messages"."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


class Failure(msgspec.Struct, frozen=True, gc=False):
    """How one delivery ended without an ack."""

    at_ms: int
    holder: str
    why: str
    error: str
