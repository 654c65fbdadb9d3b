"""Locks and state documents behind a server: for threads, and for tasks."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from holdfast.api.drafts import Seconds
from holdfast.client.locking import DocumentCalls, LockCalls, RemoteHolding, RemoteLockLike
from holdfast.client.ways import run
from holdfast.embedded.locking import LEASE_S, Document, Lock, LockInfo

list_ = list  # inside the classes the name means their method


class RemoteHeldLock(RemoteHolding):
    """A lock that renews itself while a `with` block runs; `lost` tells whether it still holds."""

    def __enter__(self) -> RemoteHeldLock:
        run(self._take())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        run(self._give_back(error))


class RemoteLocks(LockCalls):
    """The locks of a server. Safe to use from any thread."""

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
        return run(self._acquire(name, owner, lease, wait, if_not_exists=if_not_exists))

    def keepalive(self, lock: RemoteLockLike, lease: Seconds | None = None) -> Lock:
        """So much time from now on; as much as before where nothing is said. LeaseLost where it is lost."""
        return run(self._keepalive(lock, lease))

    def release(self, lock: RemoteLockLike) -> None:
        """Give it back: the next in line has it at once."""
        run(self._release(lock))

    def force_release(self, name: str) -> bool:
        """Take it from whoever holds it, who is told at the next keepalive; False where nobody does."""
        return run(self._force_release(name))

    def describe(self, name: str) -> LockInfo:
        """Who holds it, since and until when, how many wait, and whether there is a document of that name."""
        return run(self._describe(name))

    def list(self) -> list_[LockInfo]:
        """All the locks that somebody holds."""
        return run(self._list())

    def hold(
        self, name: str, *, owner: str | None = None, lease: Seconds = LEASE_S, wait: Seconds | None = None
    ) -> RemoteHeldLock:
        """For a `with` block, which has the lock until its end: it is renewed meanwhile, and then released."""
        return RemoteHeldLock(self, name, owner, lease, wait)


class RemoteDocuments(DocumentCalls):
    """The state documents of a server. Safe to use from any thread."""

    def get(self, name: str) -> Document | None:
        """The document, with its version; None where there is none."""
        return run(self._get(name))

    def update(
        self, name: str, value: Any, *, version: int | None = None, lock: RemoteLockLike | None = None
    ) -> Document:
        """Make or replace it; answers when it is on disk.

        With `version` only if that is the one it has now (0: if there is none), Conflict otherwise. With `lock` only
        while that lock is held, LeaseLost otherwise.
        """
        return run(self._update(name, value, version, lock))

    def remove(self, name: str, *, version: int | None = None, lock: RemoteLockLike | None = None) -> bool:
        """Take it away, on the same conditions; False where there was none."""
        return run(self._remove(name, version, lock))

    def list(self) -> list_[str]:
        """The names of all documents."""
        return run(self._list())


class AsyncRemoteHeldLock(RemoteHolding):
    """A lock that renews itself while an `async with` block runs; `lost` tells whether it still holds."""

    async def __aenter__(self) -> AsyncRemoteHeldLock:
        await self._take()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._give_back(error)


class AsyncRemoteLocks(LockCalls):
    """The locks of a server, for the tasks of any event loop."""

    async def acquire(
        self,
        name: str,
        *,
        owner: str | None = None,
        lease: Seconds = LEASE_S,
        wait: Seconds | None = None,
        if_not_exists: bool = False,
    ) -> Lock:
        """Take the lock for the time of `lease`; `RemoteLocks.acquire` says more."""
        return await self._acquire(name, owner, lease, wait, if_not_exists=if_not_exists)

    async def keepalive(self, lock: RemoteLockLike, lease: Seconds | None = None) -> Lock:
        """So much time from now on; as much as before where nothing is said. LeaseLost where it is lost."""
        return await self._keepalive(lock, lease)

    async def release(self, lock: RemoteLockLike) -> None:
        """Give it back: the next in line has it at once."""
        await self._release(lock)

    async def force_release(self, name: str) -> bool:
        """Take it from whoever holds it, who is told at the next keepalive; False where nobody does."""
        return await self._force_release(name)

    async def describe(self, name: str) -> LockInfo:
        """Who holds it, since and until when, how many wait, and whether there is a document of that name."""
        return await self._describe(name)

    async def list(self) -> list_[LockInfo]:
        """All the locks that somebody holds."""
        return await self._list()

    def hold(
        self, name: str, *, owner: str | None = None, lease: Seconds = LEASE_S, wait: Seconds | None = None
    ) -> AsyncRemoteHeldLock:
        """For an `async with` block, which has the lock until its end: it is renewed meanwhile, and then released."""
        return AsyncRemoteHeldLock(self, name, owner, lease, wait)


class AsyncRemoteDocuments(DocumentCalls):
    """The state documents of a server, for the tasks of any event loop."""

    async def get(self, name: str) -> Document | None:
        """The document, with its version; None where there is none."""
        return await self._get(name)

    async def update(
        self, name: str, value: Any, *, version: int | None = None, lock: RemoteLockLike | None = None
    ) -> Document:
        """Make or replace it; `RemoteDocuments.update` says more."""
        return await self._update(name, value, version, lock)

    async def remove(self, name: str, *, version: int | None = None, lock: RemoteLockLike | None = None) -> bool:
        """Take it away, on the same conditions; False where there was none."""
        return await self._remove(name, version, lock)

    async def list(self) -> list_[str]:
        """The names of all documents."""
        return await self._list()
