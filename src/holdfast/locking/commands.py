"""What may be asked of locks and documents."""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class Proof(msgspec.Struct, frozen=True, gc=False):
    """The proof of a lease: which lock, and which of all the times that it was taken."""

    name: str
    fence: int


class Acquire(msgspec.Struct, frozen=True, gc=False):
    """Take a lock for a time; with `if_not_exists` only where neither lock nor document of the name is there."""

    name: str
    owner: str
    lease_ms: int
    if_not_exists: bool = False


class Renew(msgspec.Struct, frozen=True, gc=False):
    """So much time from now on; None for as much as it was given before."""

    proof: Proof
    lease_ms: int | None = None


class Release(msgspec.Struct, frozen=True, gc=False):
    """The holder is through."""

    proof: Proof


class Write(msgspec.Struct, frozen=True, gc=False):
    """Replace a document: if its version is the expected one (0: there is none), and if the lease is still good."""

    name: str
    content: bytes
    expected: int | None = None
    proof: Proof | None = None


class Remove(msgspec.Struct, frozen=True, gc=False):
    """Take a document away, on the same conditions."""

    name: str
    expected: int | None = None
    proof: Proof | None = None


class Tick(msgspec.Struct, frozen=True, gc=False):
    """Time has passed: for one lock, or for all."""

    name: str | None = None


class Open(msgspec.Struct, frozen=True, gc=False):
    """An owner of the folder begins; so many events of the journal could not be read."""

    boot_id: int
    lost_events: int = 0


Command: TypeAlias = Acquire | Renew | Release | Write | Remove | Tick | Open
