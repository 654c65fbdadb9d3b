"""Locks and state documents for tasks: the same names, awaited. The event loop never waits for the disk."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

from holdfast.api.drafts import Seconds
from holdfast.broker.engine import BrokerEngine
from holdfast.broker.waiters import TaskWaiter
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


class AsyncHeldLock(Holding):
    """A lock that renews itself while an `async with` block runs; `lost` tells whether it still holds."""

    async def __aenter__(self) -> AsyncHeldLock:
        assert isinstance(self._locks, AsyncLocks)
        self._begin(await self._locks._acquire(self._wanted))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._give_back(error)


class AsyncLocks(LockFace):
    """The locks of a data folder, for the tasks of any event loop."""

    async def acquire(
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
        return await self._acquire(self._wanted(name, owner, lease, wait, if_not_exists=if_not_exists))

    async def keepalive(self, lock: LockLike, lease: Seconds | None = None) -> Lock:
        """So much time from now on; as much as before where nothing is said. LeaseLost where it is lost."""
        await _opened(self._engine)
        proof, decided = self._renew(lock, lease)
        assert decided.appended is not None
        await self._engine.locks().journal.log.wait_async(decided.appended)
        return self._renewed(proof, decided)

    async def release(self, lock: LockLike) -> None:
        """Give it back: the next in line has it at once."""
        await _opened(self._engine)
        self._release(lock)

    async def force_release(self, name: str) -> bool:
        """Take it from whoever holds it, who is told at the next keepalive; False where nobody does."""
        await _opened(self._engine)
        return self._force_release(name)

    async def describe(self, name: str) -> LockInfo:
        """Who holds it, since and until when, how many wait, and whether there is a document of that name."""
        await _opened(self._engine)
        return self._describe(name)

    async def list(self) -> list[LockInfo]:
        """All the locks that somebody holds."""
        await _opened(self._engine)
        return self._list()

    def hold(
        self, name: str, *, owner: str | None = None, lease: Seconds = LEASE_S, wait: Seconds | None = None
    ) -> AsyncHeldLock:
        """For an `async with` block, which has the lock until its end: it is renewed meanwhile, and then released."""
        return AsyncHeldLock(self, self._wanted(name, owner, lease, wait, if_not_exists=False))

    async def _acquire(self, wanted: Wanted) -> Lock:
        await _opened(self._engine)
        locks, patience = self._engine.locks(), self._patience(wanted)
        waiter = TaskWaiter(self._engine.world.clock)
        ticket = locks.ask(wanted.command, waiter if wanted.waits else None)
        try:
            while not ticket.over:
                left_s = patience.left_s(locks, ticket)
                if not ticket.over:
                    await waiter.wait(left_s)
            await locks.journal.log.wait_async(locks.settle(ticket))
        except BaseException:
            locks.leave(ticket)
            raise
        return self._taken(ticket)


class AsyncDocuments(DocumentFace):
    """The state documents of a data folder, for the tasks of any event loop."""

    async def get(self, name: str) -> Document | None:
        """The document, with its version; None where there is none."""
        await _opened(self._engine)
        decided = self._get(name)
        await self._wait(decided.appended)
        return document_of(name, decided)

    async def update(
        self, name: str, value: Any, *, version: int | None = None, lock: LockLike | None = None
    ) -> Document:
        """Make or replace it; answers when it is on disk.

        With `version` only if that is the one it has now (0: if there is none), Conflict otherwise. With `lock` only
        while that lock is held, LeaseLost otherwise.
        """
        await _opened(self._engine)
        decided = self._update(name, value, version, lock)
        await self._wait(decided.appended)
        return written(name, decided)

    async def remove(self, name: str, *, version: int | None = None, lock: LockLike | None = None) -> bool:
        """Take it away, on the same conditions; False where there was none."""
        await _opened(self._engine)
        decided = self._remove(name, version, lock)
        await self._wait(decided.appended)
        return document_of(name, decided) is not None

    async def list(self) -> list[str]:
        """The names of all documents."""
        await _opened(self._engine)
        return self._list()

    async def _wait(self, appended: Any) -> None:
        if appended is not None:
            await self._engine.locks().journal.log.wait_async(appended)


async def _opened(engine: BrokerEngine) -> None:
    """The first one opens the journal, which reads files: on a thread."""
    if not engine.has_locks:
        await asyncio.to_thread(engine.locks)
