"""Locks and state documents."""

from __future__ import annotations

from collections.abc import Generator  # async only
from types import TracebackType
from typing import Any, Self, TypeAlias

from holdfast.api.aio.ports import AsyncLocksPort
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
from holdfast.broker.folder.layout import check_name
from holdfast.errors import Closed, InvalidRequest, LeaseLost, Unavailable

list_ = list  # inside the classes the name means their method


class AsyncHeldLock:
    """A lock that renews itself while an `async with` block runs; `lost` tells whether it still holds."""

    def __init__(self, port: AsyncLocksPort, wanted: LockRequest) -> None:
        self._port = port
        self._wanted = wanted
        self._kept: KeptLock | None = None
        self._released = False

    @property
    def lock(self) -> Lock:
        """The lock as it was taken; its `expires_at` has moved on since."""
        return self._taken().lock

    @property
    def name(self) -> str:
        return self._wanted.name

    @property
    def owner(self) -> str:
        return self._wanted.owner

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
        """Whether the lease has ended meanwhile, as far as this process knows: then stop, another may hold the lock."""
        return self._taken().lost and not self._released

    def _taken(self) -> KeptLock:
        if self._kept is None:
            raise InvalidRequest(f"lock {self.name} is not taken yet: use `async with` for that")
        return self._kept

    def __await__(self) -> Generator[Any, None, Self]:  # async only
        return self.__aenter__().__await__()

    async def __aenter__(self) -> Self:
        if self._kept is None:
            self._kept = self._port.keep(await self._port.acquire(self._wanted))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        kept = self._taken()
        kept.end()
        try:
            await self._port.release(kept.lock.lease_id)
            self._released = True
        except (LeaseLost, Closed, Unavailable) as late:
            if error is None:
                raise
            error.add_note(f"the lock was not held any more: {late}")  # the block's own error says more

    def __del__(self) -> None:
        kept = getattr(self, "_kept", None)  # it may not have got that far
        if kept is not None:
            kept.end()


LockLike: TypeAlias = Lock | AsyncHeldLock | str


class AsyncLocks:
    """The locks of a data folder. Safe to use from any task."""

    def __init__(self, port: AsyncLocksPort) -> None:
        self._port = port

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
        owner = self._port.holder if owner is None else owner
        return await self._port.acquire(lock_request(name, owner, lease, wait, if_not_exists=if_not_exists))

    async def keepalive(self, lock: LockLike, lease: Seconds | None = None) -> Lock:
        """Renew the lease, for `lease` from now or for as long as before. LeaseLost where it has ended."""
        return await self._port.keepalive(lease_id_of(lock), None if lease is None else lease_of(lease))

    async def release(self, lock: LockLike) -> None:
        """Release the lock: the next in line has it at once."""
        await self._port.release(lease_id_of(lock))

    async def force_release(self, name: str) -> bool:
        """Take the lock from its holder, who learns of it at the next keepalive; False where nobody holds it."""
        return await self._port.force_release(check_name(name, "lock"))

    async def describe(self, name: str) -> LockInfo:
        """Who holds the lock, since and until when, how many wait, and whether there is a document of that name."""
        return await self._port.describe(check_name(name, "lock"))

    async def list(self) -> list_[LockInfo]:
        """Every lock that is held."""
        return await self._port.held_locks()

    def hold(
        self, name: str, *, owner: str | None = None, lease: Seconds = LEASE_S, wait: Seconds | None = None
    ) -> AsyncHeldLock:
        """For an `async with` block, which has the lock until its end: it is renewed meanwhile, and then released."""
        owner = self._port.holder if owner is None else owner
        return AsyncHeldLock(self._port, lock_request(name, owner, lease, wait))


class AsyncDocuments:
    """The state documents of a data folder. Safe to use from any task."""

    def __init__(self, port: AsyncLocksPort) -> None:
        self._port = port

    async def get(self, name: str) -> Document | None:
        """The document, with its version; None where there is none."""
        return await self._port.document(check_name(name, "document"))

    async def update(
        self, name: str, value: Any, *, version: int | None = None, lock: LockLike | None = None
    ) -> Document:
        """Create or replace it; returns when it is on disk.

        With `version` only if that is the one it has now (0: if there is none), Conflict otherwise. With `lock` only
        while that lock is held, LeaseLost otherwise.
        """
        lease_id = None if lock is None else lease_id_of(lock)
        content = document_content(check_name(name, "document"), value)
        return await self._port.update_document(name, content, check_version(version), lease_id)

    async def remove(self, name: str, *, version: int | None = None, lock: LockLike | None = None) -> bool:
        """Remove it, on the same conditions; False where there was none."""
        lease_id = None if lock is None else lease_id_of(lock)
        return await self._port.remove_document(check_name(name, "document"), check_version(version), lease_id)

    async def list(self) -> list_[str]:
        """The names of all documents."""
        return await self._port.document_names()
