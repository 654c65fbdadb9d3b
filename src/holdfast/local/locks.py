"""Locks and documents of an engine as users see them, and the deadline of a caller that waits. Nothing here blocks."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from holdfast.api.drafts import to_datetime
from holdfast.api.locks import Document, Lock, LockInfo, LockRequest
from holdfast.broker.engine import BrokerEngine
from holdfast.broker.locks import Decided, FolderLocks, LockStatus, Ticket
from holdfast.delivery.decide import Moment
from holdfast.env import Clock
from holdfast.locking import Acquire, Content, LockHolder, Proof


class Patience:
    """How long a caller still waits for a lock."""

    def __init__(self, clock: Clock, wait_ms: int | None) -> None:
        self._clock = clock
        self._until_ns = None if wait_ms is None else clock.monotonic_ns() + wait_ms * 1_000_000

    def left_s(self, locks: FolderLocks, ticket: Ticket) -> float | None:
        """Return the seconds until something may have changed. Raises LockHeld after the deadline."""
        lease_s = locks.look(ticket)
        if self._until_ns is None or ticket.over:
            return lease_s
        left_s = (self._until_ns - self._clock.monotonic_ns()) / 1e9
        if left_s <= 0:
            raise locks.refusal(ticket.wanted.name)
        return left_s if lease_s is None else min(left_s, lease_s)


class LocalKeptLock:
    """A lock of this process that its engine renews."""

    def __init__(self, engine: BrokerEngine, lock: Lock) -> None:
        self.lock = lock
        self._engine = engine
        self._locks = engine.locks()
        self._proof = Proof(lock.name, lock.fence)  # our own engine gave it: there is nothing to check
        self._locks.keep_alive(self._proof, round(lock.lease * 1000))

    @property
    def lost(self) -> bool:
        """Whether the lease has ended."""
        return self._engine.closed or not self._locks.holds(self._proof)

    def end(self) -> None:
        """Stop renewing it."""
        self._locks.let_expire(self._proof)


def command_of(wanted: LockRequest) -> Acquire:
    """Return the request for the engine."""
    return Acquire(wanted.name, wanted.owner, wanted.lease_ms, wanted.if_not_exists)


def granted_lock(locks: FolderLocks, ticket: Ticket) -> Lock:
    """Return the lock that a ticket was granted."""
    held = ticket.granted
    assert held is not None
    return lock_of(locks, ticket.wanted.name, held, Moment(held.at_ms, held.until_ms - held.lease_ms))


def lock_of(locks: FolderLocks, name: str, held: LockHolder, now: Moment) -> Lock:
    """Return a lock as its holder sees it."""
    return Lock(
        name=name,
        owner=held.owner,
        fence=held.fence,
        lease_id=locks.lease_id(name, held),
        lease=held.lease_ms / 1000,
        acquired_at=to_datetime(held.at_ms * 1_000_000),
        expires_at=_expires_at(held, now),
    )


def info_of(standing: LockStatus, now: Moment) -> LockInfo:
    """Return the state of a lock as anyone may see it."""
    held = standing.held
    common: dict[str, Any] = {
        "name": standing.name,
        "waiting": standing.waiting,
        "document_version": standing.version,
    }
    if held is None:
        return LockInfo(held=False, **common)
    return LockInfo(
        held=True,
        owner=held.owner,
        fence=held.fence,
        acquired_at=to_datetime(held.at_ms * 1_000_000),
        expires_at=_expires_at(held, now),
        **common,
    )


def _expires_at(held: LockHolder, now: Moment) -> datetime:
    """Return the end of the lease by the current wall clock."""
    return to_datetime((now.wall_ms + held.until_ms - now.mono_ms) * 1_000_000)


def decided_document(name: str, decided: Decided) -> Document | None:
    """Return the document that was found or written, or raise the error."""
    if decided.refused is not None:
        raise decided.refused
    content = decided.content
    return None if content is None else document_from(name, content)


def document_from(name: str, content: Content) -> Document:
    """Return a stored document with its value decoded."""
    value = msgspec.json.decode(content.content)
    return Document(name=name, value=value, version=content.version, updated_at=to_datetime(content.at_ms * 1_000_000))
