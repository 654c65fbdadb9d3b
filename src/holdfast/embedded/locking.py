"""What the locks and documents for threads and for tasks share: arguments in, engine called, answers out."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final, TypeAlias

import msgspec

from holdfast.api.arguments import switch
from holdfast.api.drafts import Seconds
from holdfast.api.times import duration_ms, to_datetime
from holdfast.broker.engine import BrokerEngine
from holdfast.broker.folder.layout import check_name
from holdfast.broker.locks import MOST_DOCUMENT_BYTES, Decided, Locks, Standing, Ticket
from holdfast.delivery.decide import Moment
from holdfast.env import Clock
from holdfast.errors import Closed, InvalidRequest, LeaseLost, MessageTooLarge
from holdfast.locking.decide import Acquire, Proof, Remove, Renew, Write
from holdfast.locking.table import Content, Held

LEASE_S: Final = 30.0
_MOST_LEASE_MS: Final = 30 * 24 * 3600 * 1000
_MOST_OWNER: Final = 200


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


class Holding:
    """A lock that renews itself while a `with` block runs."""

    def __init__(self, locks: LockFace, wanted: Wanted) -> None:
        self._locks = locks
        self._wanted = wanted
        self._lock: Lock | None = None
        self._released = False

    @property
    def lock(self) -> Lock:
        """The lock as it was taken; its `expires_at` has moved on since."""
        if self._lock is None:
            raise InvalidRequest(f"lock {self._wanted.command.name} is not taken yet: use `with` for that")
        return self._lock

    @property
    def name(self) -> str:
        return self._wanted.command.name

    @property
    def owner(self) -> str:
        return self._wanted.command.owner

    @property
    def fence(self) -> int:
        """Higher than that of everybody who held the lock before."""
        return self.lock.fence

    @property
    def lease_id(self) -> str:
        """The proof of the lease as text."""
        return self.lock.lease_id

    @property
    def lost(self) -> bool:
        """Whether the lease has ended meanwhile: then stop, somebody else may hold the lock."""
        if self._released:
            return False
        engine = self._locks._engine
        return engine.closed or not engine.locks().holds(_own_proof(self.lock))

    def _begin(self, lock: Lock) -> None:
        self._lock = lock
        self._locks._engine.locks().keep_alive(_own_proof(lock), self._wanted.command.lease_ms)

    def _give_back(self, error: BaseException | None) -> None:
        """At the end of the block. That the lock was lost is an error, but one of the block's own says more."""
        try:
            self._locks._release(self)
            self._released = True
        except (LeaseLost, Closed) as late:
            if error is None:
                raise
            error.add_note(f"the lock was not held any more: {late}")

    def __del__(self) -> None:
        engine = self._locks._engine
        if self._lock is not None and engine.has_locks and not engine.closed:
            engine.locks().let_expire(_own_proof(self._lock))


LockLike: TypeAlias = Lock | Holding | str


class Wanted(msgspec.Struct, frozen=True):
    """A lock that somebody wants, and for how long they wait for it."""

    command: Acquire
    wait_s: float | None

    @property
    def waits(self) -> bool:
        return self.wait_s != 0 and not self.command.if_not_exists


class Patience:
    """How long somebody still waits."""

    def __init__(self, clock: Clock, wait_s: float | None) -> None:
        self._clock = clock
        self._until_ns = None if wait_s is None else clock.monotonic_ns() + int(wait_s * 1e9)

    def left_s(self, locks: Locks, ticket: Ticket) -> float | None:
        """Until something may have changed; raises what is to be said when the time is over."""
        lease_s = locks.look(ticket)
        if self._until_ns is None or ticket.over:
            return lease_s
        left_s = (self._until_ns - self._clock.monotonic_ns()) / 1e9
        if left_s <= 0:
            raise locks.refusal(ticket.wanted.name)
        return left_s if lease_s is None else min(left_s, lease_s)


class LockFace:
    """The locks of a data folder, as both faces see them."""

    def __init__(self, engine: BrokerEngine) -> None:
        self._engine = engine

    def _wanted(
        self, name: str, owner: str | None, lease: Seconds, wait: Seconds | None, *, if_not_exists: bool
    ) -> Wanted:
        command = Acquire(
            check_name(name, "lock"),
            self._engine.holder if owner is None else _owner(owner),
            _lease_ms(lease),
            switch(if_not_exists, "if_not_exists"),
        )
        return Wanted(command, None if wait is None else duration_ms(wait, "wait") / 1000)

    def _patience(self, wanted: Wanted) -> Patience:
        return Patience(self._engine.world.clock, wanted.wait_s)

    def _taken(self, ticket: Ticket) -> Lock:
        held = ticket.granted
        assert held is not None
        return self._lock_of(ticket.wanted.name, held, Moment(held.at_ms, held.until_ms - held.lease_ms))

    def _lock_of(self, name: str, held: Held, now: Moment) -> Lock:
        """A lock as its holder sees it."""
        return Lock(
            name=name,
            owner=held.owner,
            fence=held.fence,
            lease_id=self._engine.locks().lease_id(name, held),
            lease=held.lease_ms / 1000,
            acquired_at=to_datetime(held.at_ms * 1_000_000),
            expires_at=_expires_at(held, now),
        )

    def _renew(self, lock: LockLike, lease: Seconds | None) -> tuple[Proof, Decided]:
        proof = proof_of(self._engine.locks(), lock)
        command = Renew(proof, None if lease is None else _lease_ms(lease))
        return proof, self._engine.locks().renew(command)

    def _renewed(self, proof: Proof, decided: Decided) -> Lock:
        assert decided.held is not None
        return self._lock_of(proof.name, decided.held, self._engine.locks().moment())

    def _release(self, lock: LockLike) -> None:
        locks = self._engine.locks()
        locks.release(proof_of(locks, lock))

    def _force_release(self, name: str) -> bool:
        return self._engine.locks().force_release(check_name(name, "lock"))

    def _describe(self, name: str) -> LockInfo:
        locks = self._engine.locks()
        return info_of(locks.describe(check_name(name, "lock")), locks.moment())

    def _list(self) -> list[LockInfo]:
        locks = self._engine.locks()
        return [info_of(standing, locks.moment()) for standing in locks.standings()]


class DocumentFace:
    """The state documents of a data folder, as both faces see them."""

    def __init__(self, engine: BrokerEngine) -> None:
        self._engine = engine

    def _get(self, name: str) -> Decided:
        return self._engine.locks().document(check_name(name, "document"))

    def _update(self, name: str, value: Any, version: int | None, lock: LockLike | None) -> Decided:
        proof = None if lock is None else proof_of(self._engine.locks(), lock)
        command = Write(check_name(name, "document"), _content(name, value), _version(version), proof)
        return self._engine.locks().change(command)

    def _remove(self, name: str, version: int | None, lock: LockLike | None) -> Decided:
        proof = None if lock is None else proof_of(self._engine.locks(), lock)
        return self._engine.locks().change(Remove(check_name(name, "document"), _version(version), proof))

    def _list(self) -> list[str]:
        return list(self._engine.locks().documents())


def document_of(name: str, decided: Decided) -> Document | None:
    """What was found, or written; what was refused is raised."""
    if decided.refused is not None:
        raise decided.refused
    content = decided.content
    return None if content is None else document_from(name, content)


def written(name: str, decided: Decided) -> Document:
    """The document after a write."""
    document = document_of(name, decided)
    assert document is not None
    return document


def document_from(name: str, content: Content) -> Document:
    """A document as it is told."""
    value = msgspec.json.decode(content.content)
    return Document(name=name, value=value, version=content.version, updated_at=to_datetime(content.at_ms * 1_000_000))


def proof_of(locks: Locks, lock: object) -> Proof:
    """What a lock in hand, or the id of its lease, proves."""
    return locks.proof(lock.lease_id if isinstance(lock, (Lock, Holding)) else lock)


def _own_proof(lock: Lock) -> Proof:
    """The same for a lock that this very engine has just given: there is nothing to look at, as in a finalizer."""
    return Proof(lock.name, lock.fence)


def info_of(standing: Standing, now: Moment) -> LockInfo:
    """How a lock stands, as it is told."""
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


def _expires_at(held: Held, now: Moment) -> datetime:
    """The end of the lease by the wall clock, as that goes now."""
    return to_datetime((now.wall_ms + held.until_ms - now.mono_ms) * 1_000_000)


def _owner(owner: object) -> str:
    if not isinstance(owner, str) or not 1 <= len(owner) <= _MOST_OWNER or not owner.isprintable():
        raise InvalidRequest(
            f"owner={owner!r:.80} cannot be used: give a printable text of 1 to {_MOST_OWNER} characters"
        )
    return owner


def _lease_ms(lease: Seconds) -> int:
    return duration_ms(lease, "lease", minimum_ms=1, maximum_ms=_MOST_LEASE_MS)


def _version(version: object) -> int | None:
    if version is not None and (type(version) is not int or not 0 <= version < 2**63):
        raise InvalidRequest(f"version={version!r:.80} cannot be used: give the number that `get` answered, or 0")
    return version


def _content(name: str, value: Any) -> bytes:
    try:
        content = msgspec.json.encode(value)
        msgspec.msgpack.encode(msgspec.json.decode(content))  # it is sent in both
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise InvalidRequest(
            f"document {name} cannot be written: {error}. It must be a value that JSON knows"
        ) from None
    if len(content) > MOST_DOCUMENT_BYTES:
        raise MessageTooLarge(
            f"document {name} has {len(content)} bytes as JSON; {MOST_DOCUMENT_BYTES} are allowed. Keep what is large "
            "in messages or files, and in the document where it is"
        )
    return content
