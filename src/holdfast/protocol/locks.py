"""Locks and state documents on the wire."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from holdfast.api.locks import LockInfo
from holdfast.protocol.messages import Lease, Number, Owner, ServerValue, Wait, Wire

LeaseId = Annotated[str, Meta(min_length=1, max_length=300)]


class AcquireLock(Wire, kw_only=True):
    """Who wants the lock, for how long, and how long they wait: 0 not at all, -1 for as long as the server allows."""

    owner: Owner | None = None
    lease: Lease = 30
    wait: Wait = 0
    if_not_exists: bool = False


class KeepLock(Wire, kw_only=True):
    """The lease that is to go on, and for how long from now; as long as before where nothing is said."""

    lease_id: LeaseId
    lease: Lease | None = None


class ReleaseLock(Wire, kw_only=True):
    """The lease that is to end."""

    lease_id: LeaseId


class LockReleased(ServerValue, kw_only=True):
    """Whether somebody had the lock."""

    released: bool


class HeldLocks(ServerValue, kw_only=True):
    """The locks that somebody holds, by name."""

    locks: list[LockInfo]


class WriteDocument(Wire, kw_only=True):
    """What a document is to be: any JSON value."""

    value: Any


class DocumentQuery(Wire, kw_only=True):
    """Only if the document has this version (0: if there is none), and only while this lease is good."""

    version: Number | None = None
    lease_id: LeaseId | None = None


class DocumentNames(ServerValue, kw_only=True):
    """The names of the documents that the caller may see."""

    names: list[str]


class DocumentRemoved(ServerValue, kw_only=True):
    """Whether there was a document."""

    removed: bool
