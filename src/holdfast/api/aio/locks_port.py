"""What stands behind locks and documents: an engine in this process, or a server. Arguments come checked."""

from __future__ import annotations

from typing import Protocol

from holdfast.api.lock_arguments import LockRequest
from holdfast.api.lock_values import Document, KeptLock, Lock, LockInfo


class AsyncLocksPort(Protocol):
    """The locks and documents of a data folder."""

    @property
    def holder(self) -> str:
        """Who holds a lock where no owner is given: this process."""

    async def acquire(self, wanted: LockRequest) -> Lock:
        """Take the lock, after a wait in line where that is asked for."""

    async def keepalive(self, lease_id: str, lease_ms: int | None) -> Lock:
        """Renew the lease, for `lease_ms` or for as long as before."""

    async def release(self, lease_id: str) -> None:
        """End the lease."""

    async def force_release(self, name: str) -> bool:
        """End the lease of whoever has the lock; False where nobody has it."""

    async def describe(self, name: str) -> LockInfo:
        """The state of one lock."""

    async def held_locks(self) -> list[LockInfo]:
        """The state of every lock that is held."""

    def keep(self, lock: Lock) -> KeptLock:
        """Renew the lease from now on, until `end` is called."""

    async def document(self, name: str) -> Document | None:
        """The document by this name."""

    async def update_document(self, name: str, content: bytes, version: int | None, lease_id: str | None) -> Document:
        """Write JSON, if the document has the version and the lease is good, where these are given."""

    async def remove_document(self, name: str, version: int | None, lease_id: str | None) -> bool:
        """Remove the document on the same conditions; False where there was none."""

    async def document_names(self) -> list[str]:
        """The names of all documents."""
