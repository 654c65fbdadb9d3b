# Generated from aio/locks.py by tools/sync.py: do not edit it, edit that one and run "make sync".
"""Locks and state documents, for threads."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self, TypeAlias

from holdfast.api.drafts import Seconds, lease_of
from holdfast.api.locks import (
    LEASE_S,
    Document,
    KeptLock,
    Lock,
    LockInfo,
    LockRequest,
    check_version,
    document_content,
    lease_id_of,
    lock_request,
)
from holdfast.api.sync.ports import LocksPort
from holdfast.broker.folder.layout import check_name
from holdfast.errors import Closed, InvalidRequest, LeaseLost, Unavailable

list_ = list  # inside the classes the name means their method


class HeldLock:
    """A lock whose lease is renewed while a `with` block runs. Check `lost` to see if the lease has ended."""

    def __init__(self, port: LocksPort, wanted: LockRequest) -> None:
        self._port = port
        self._wanted = wanted
        self._kept: KeptLock | None = None
        self._released = False

    @property
    def lock(self) -> Lock:
        """The lock as it was acquired. Renewals since then are not reflected in its `expires_at`."""
        return self._taken().lock

    @property
    def name(self) -> str:
        """The name of the lock."""
        return self._wanted.name

    @property
    def owner(self) -> str:
        """The name of the owner, shown to people."""
        return self._wanted.owner

    @property
    def fence(self) -> int:
        """The fencing number, higher than that of every earlier holder."""
        return self.lock.fence

    @property
    def lease_id(self) -> str:
        """The proof of the lease as text, for other processes."""
        return self.lock.lease_id

    @property
    def lost(self) -> bool:
        """Whether the lease has ended, as far as this process knows. If so, stop: another may hold the lock."""
        return self._taken().lost and not self._released

    def _taken(self) -> KeptLock:
        if self._kept is None:
            raise InvalidRequest(f"lock {self.name} is not taken yet: use `with` for that")
        return self._kept

    def __enter__(self) -> Self:
        if self._kept is None:
            self._kept = self._port.keep(self._port.acquire(self._wanted))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        kept = self._taken()
        kept.end()
        try:
            self._port.release(kept.lock.lease_id)
            self._released = True
        except (LeaseLost, Closed, Unavailable) as late:
            if error is None:
                raise
            error.add_note(f"the lock was not held any more: {late}")  # the block's own error matters more

    def __del__(self) -> None:
        kept = getattr(self, "_kept", None)  # __init__ may have failed
        if kept is not None:
            kept.end()


LockLike: TypeAlias = Lock | HeldLock | str


class Locks:
    """The locks of a data folder. Safe to use from any thread."""

    def __init__(self, port: LocksPort) -> None:
        self._port = port

    def acquire(
        self,
        name: str,
        *,
        owner: str | None = None,
        lease: Seconds = LEASE_S,
        wait: Seconds | None = None,
        if_not_exists: bool = False,
    ) -> Lock:
        """Acquire the lock for the time of `lease`. Waits in line for it, up to `wait` seconds or without a limit.

        `owner` is a text shown to people; host and process id by default. Renew the lease with `keepalive`, or use
        `hold`, which does that for you. Raises LockHeld if the lock is not free in time. With `if_not_exists` it does
        not wait, and raises Conflict if the lock is held or a document with that name exists.
        """
        owner = self._port.holder if owner is None else owner
        return self._port.acquire(lock_request(name, owner, lease, wait, if_not_exists=if_not_exists))

    def keepalive(self, lock: LockLike, lease: Seconds | None = None) -> Lock:
        """Renew the lease, to `lease` from now; by default for as long as before. Raises LeaseLost if it has ended."""
        return self._port.keepalive(lease_id_of(lock), None if lease is None else lease_of(lease))

    def release(self, lock: LockLike) -> None:
        """Release the lock; the next in line gets it at once. Raises LeaseLost if the lease has ended."""
        self._port.release(lease_id_of(lock))

    def force_release(self, name: str) -> bool:
        """Take the lock away from its holder, whose next keepalive fails. Returns False if nobody holds it."""
        return self._port.force_release(check_name(name, "lock"))

    def describe(self, name: str) -> LockInfo:
        """Return who holds the lock and until when, how many wait, and the version of the document of that name."""
        return self._port.describe(check_name(name, "lock"))

    def list(self) -> list_[LockInfo]:
        """Return all locks that are held."""
        return self._port.held_locks()

    def hold(
        self, name: str, *, owner: str | None = None, lease: Seconds = LEASE_S, wait: Seconds | None = None
    ) -> HeldLock:
        """Hold the lock during a `with` block: it is acquired, renewed meanwhile, and released at the end.

            with broker.locks.hold("nightly-report") as held:
                write_report(fence=held.fence)

        The arguments are those of `acquire`. Raises LockHeld if the lock is not free in time, and LeaseLost at the end
        of a block that lost it.
        """
        owner = self._port.holder if owner is None else owner
        return HeldLock(self._port, lock_request(name, owner, lease, wait))


class Documents:
    """The state documents of a data folder. Safe to use from any thread."""

    def __init__(self, port: LocksPort) -> None:
        self._port = port

    def get(self, name: str) -> Document | None:
        """Return the document with its version, or None if it does not exist."""
        return self._port.document(check_name(name, "document"))

    def update(self, name: str, value: Any, *, version: int | None = None, lock: LockLike | None = None) -> Document:
        """Create or replace the document. Returns when it is on disk.

        With `version`, raises Conflict unless that is its current version (0 means that it must not exist). With
        `lock`, raises LeaseLost unless that lock is held. The value must be representable as JSON; raises
        MessageTooLarge above 1 MiB.
        """
        lease_id = None if lock is None else lease_id_of(lock)
        content = document_content(check_name(name, "document"), value)
        return self._port.update_document(name, content, check_version(version), lease_id)

    def remove(self, name: str, *, version: int | None = None, lock: LockLike | None = None) -> bool:
        """Remove the document, under the same conditions as `update`. Returns False if it did not exist."""
        lease_id = None if lock is None else lease_id_of(lock)
        return self._port.remove_document(check_name(name, "document"), check_version(version), lease_id)

    def list(self) -> list_[str]:
        """Return the names of all documents."""
        return self._port.document_names()
