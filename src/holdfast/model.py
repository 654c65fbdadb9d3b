"""Plain values that travel between the layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

import msgspec

from holdfast.large import Value

Durability: TypeAlias = Literal["fsync", "os", "interval"]
CodecName: TypeAlias = Literal["none", "zstd", "lz4", "gzip"]
BodyKind: TypeAlias = Literal["bytes", "text", "json"]
HeaderPairs: TypeAlias = Sequence[tuple[str, bytes]]

_HEADER_BYTES: Final = 256


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """Messages to store, as columns of equal length; a column that is None is not stored at all.

    In `expires_at_ms` and `due_at_ms` a 0 stands for "none".
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
    """Who wrote messages and where the first of them stands in that producer's sequence; id 0 is nobody."""

    id: int = 0
    epoch: int = 0
    first_sequence: int = 0

    def after(self, messages: int) -> Producer:
        """The same producer so many messages later; numbers have 32 bits and begin anew behind the last."""
        if not messages or not self.id:
            return self
        return Producer(self.id, self.epoch, (self.first_sequence + messages) % 2**32)


NO_PRODUCER = Producer()


class Record(msgspec.Struct, frozen=True, gc=False):
    """One message as the log holds it. A large value stays in the file until it is asked for."""

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
    """What a message takes in an answer besides its value. A header costs as much as hundreds of bytes to make."""
    size = 0 if record.key is None else len(record.key)
    for name, value in record.headers:
        size += _HEADER_BYTES + len(name) + len(value)
    return size


class Appended(msgspec.Struct, frozen=True, gc=False):
    """What an append answers: the offsets [offset, next_offset), and what they survive."""

    offset: int
    next_offset: int
    durability: Durability


class LogPosition(msgspec.Struct, frozen=True, gc=False):
    """An offset together with the epoch in which it was seen, so that a lost tail is noticed."""

    epoch: int
    offset: int


class Retained(msgspec.Struct, frozen=True, kw_only=True):
    """What went when the retention settings of a topic were applied: in whole segments, of so many bytes together."""

    messages: int
    dead_letters: int
    segments: int
    bytes: int


class Trimmed(msgspec.Struct, frozen=True, gc=False):
    """What a trim or a retention run removed."""

    segments: int
    bytes: int
    start: int
