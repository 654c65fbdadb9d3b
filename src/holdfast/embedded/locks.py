"""Locks and state documents for threads."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from holdfast.api.drafts import Seconds
from holdfast.broker.waiters import ThreadWaiter
from holdfast.embedded.locking import (
    LEASE_S,
    Document,
    DocumentFace,
    Holding,
    Lock,
    LockFace,
    LockInfo,
    LockLike,
    Wanted,
    document_of,
    written,
)


class HeldLock(Holding):
    """A lock that renews itself while a `with` block runs; `lost` tells whether it still holds."""

    def __enter__(self) -> HeldLock:
        assert isinstance(self._locks, Locks)
        self._begin(self._locks._acquire(self._wanted))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._give_back(error)


class Locks(LockFace):
    """The locks of a data folder. Safe to use from any thread."""

    def acquire(
        self,
        name: str,
        *,
        owner: str | None = None,
        lease: Seconds = LEASE_S,
        wait: Seconds | None = None,
        if_not_exists: bool = False,
    ) -> Lock:
        """Take the lock for the time of `lease`; wait for it in line, as long as it takes or for `wait` seconds.

        LockHeld where it is not free in time. With `if_not_exists` nobody waits: Conflict where it is held, or where
        there is a document of that name.
        """
        return self._acquire(self._wanted(name, owner, lease, wait, if_not_exists=if_not_exists))

    def keepalive(self, lock: LockLike, lease: Seconds | None = None) -> Lock:
        """So much time from now on; as much as before where nothing is said. LeaseLost where it is lost."""
        proof, decided = self._renew(lock, lease)
        assert decided.appended is not None
        self._engine.locks().journal.log.wait(decided.appended)
        return self._renewed(proof, decided)

    def release(self, lock: LockLike) -> None:
        """Give it back: the next in line has it at once."""
        self._release(lock)

    def force_release(self, name: str) -> bool:
        """Take it from whoever holds it, who is told at the next keepalive; False where nobody does."""
        return self._force_release(name)

    def describe(self, name: str) -> LockInfo:
        """Who holds it, since and until when, how many wait, and whether there is a document of that name."""
        return self._describe(name)

    def list(self) -> list[LockInfo]:
        """All the locks that somebody holds."""
        return self._list()

    def hold(
        self, name: str, *, owner: str | None = None, lease: Seconds = LEASE_S, wait: Seconds | None = None
    ) -> HeldLock:
        """For a `with` block, which has the lock until its end: it is renewed meanwhile, and then released."""
        return HeldLock(self, self._wanted(name, owner, lease, wait, if_not_exists=False))

    def _acquire(self, wanted: Wanted) -> Lock:
        locks, patience = self._engine.locks(), self._patience(wanted)
        waiter = ThreadWaiter(self._engine.world.clock)
        ticket = locks.ask(wanted.command, waiter if wanted.waits else None)
        try:
            while not ticket.over:
                left_s = patience.left_s(locks, ticket)
                if not ticket.over:
                    waiter.wait(left_s)
            locks.journal.log.wait(locks.settle(ticket))
        except BaseException:
            locks.leave(ticket)
            raise
        return self._taken(ticket)


class Documents(DocumentFace):
    """The state documents of a data folder. Safe to use from any thread."""

    def get(self, name: str) -> Document | None:
        """The document, with its version; None where there is none."""
        decided = self._get(name)
        self._wait(decided.appended)
        return document_of(name, decided)

    def update(self, name: str, value: Any, *, version: int | None = None, lock: LockLike | None = None) -> Document:
        """Make or replace it; answers when it is on disk.

        With `version` only if that is the one it has now (0: if there is none), Conflict otherwise. With `lock` only
        while that lock is held, LeaseLost otherwise.
        """
        decided = self._update(name, value, version, lock)
        self._wait(decided.appended)
        return written(name, decided)

    def remove(self, name: str, *, version: int | None = None, lock: LockLike | None = None) -> bool:
        """Take it away, on the same conditions; False where there was none."""
        decided = self._remove(name, version, lock)
        self._wait(decided.appended)
        return document_of(name, decided) is not None

    def list(self) -> list[str]:
        """The names of all documents."""
        return self._list()

    def _wait(self, appended: Any) -> None:
        if appended is not None:
            self._engine.locks().journal.log.wait(appended)
