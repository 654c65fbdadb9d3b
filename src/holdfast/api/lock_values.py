"""Locks and state documents as users and the wire see them."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Protocol

import msgspec


class Lock(msgspec.Struct, frozen=True, kw_only=True):
    """A lock that you hold until `expires_at`, unless it is kept alive. `lease` is in seconds.

    `fence` is higher than that of everybody who held it before: whatever the lock protects can refuse lower ones.
    """

    name: str
    owner: str
    fence: int
    lease_id: str
    lease: float
    acquired_at: datetime
    expires_at: datetime


class LockInfo(msgspec.Struct, frozen=True, kw_only=True):
    """How a lock stands. The times, owner and fence are those of its holder, if there is one."""

    name: str
    held: bool
    owner: str | None = None
    fence: int | None = None
    acquired_at: datetime | None = None
    expires_at: datetime | None = None
    waiting: int = 0
    document_version: int = 0


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """A state document: any value that JSON knows, and the number of the write that made it."""

    name: str
    value: Any
    version: int
    updated_at: datetime


class KeptLock(Protocol):
    """A lock whose lease is renewed, as the port keeps it."""

    lock: Lock

    @property
    def lost(self) -> bool:
        """Whether the lease has ended, as far as can be known without asking."""

    def end(self) -> None:
        """Renew it no more. A finalizer calls this, on any thread: it neither waits nor raises."""
