"""The events in the life of locks and documents, as they stand in the journal.

         Acquired                      Ended
free ---------------> held ------------------------> free
                      |  ^   released, or its time
                      +--+   was over
                     Renewed

          Written                     Removed
none ---------------> document -----------------> none
                      |    ^
                      +----+
                      Written
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

# How a lease ended.
RELEASED: Final = "it was released"
EXPIRED: Final = "its time was over"


class Begun(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=1):
    """An owner of the folder began, with its clock; so many events before could not be read."""

    session: int
    boot_id: int
    mono_ms: int
    lost_events: int = 0


class Acquired(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=2):
    """A lock was taken, until `until_ms` of the boot's monotonic clock."""

    name: str
    owner: str
    fence: int
    lease_ms: int
    until_ms: int
    at_ms: int


class Renewed(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=3):
    """The holder got more time."""

    name: str
    lease_ms: int
    until_ms: int


class Ended(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=4):
    """The lock is free again."""

    name: str
    why: str
    at_ms: int


class Written(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=5):
    """A document was made or replaced; its content is JSON."""

    name: str
    version: int
    content: bytes
    at_ms: int


class Removed(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=6):
    """A document was taken away."""

    name: str


Event: TypeAlias = Begun | Acquired | Renewed | Ended | Written | Removed

encode_event = msgspec.msgpack.Encoder().encode
decode_event = msgspec.msgpack.Decoder(Event).decode
