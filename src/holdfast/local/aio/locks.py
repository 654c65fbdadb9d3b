"""Locks and documents of an engine in this process."""

from __future__ import annotations

import asyncio

from holdfast.api.aio.opening import aside  # async only
from holdfast.api.locks import Document, Lock, LockInfo, LockRequest
from holdfast.broker.engine import BrokerEngine
from holdfast.broker.locks import Decided, FolderLocks
from holdfast.broker.waiters import TaskWaiter
from holdfast.local.locks import (
    LocalKeptLock,
    Patience,
    command_of,
    decided_document,
    granted_lock,
    info_of,
    lock_of,
)
from holdfast.locking import Remove, Renew, WriteDocument


class AsyncLocalLocksPort:
    """The locks and documents of a data folder that this process owns."""

    def __init__(self, engine: BrokerEngine) -> None:
        self.engine = engine

    @property
    def holder(self) -> str:
        return self.engine.holder

    async def acquire(self, wanted: LockRequest) -> Lock:
        locks, clock = await self._locks(), self.engine.world.clock
        waiter, patience = TaskWaiter(clock), Patience(clock, wanted.wait_ms)
        ticket = locks.ask(command_of(wanted), waiter if wanted.waits else None)
        try:
            while not ticket.over:
                left_s = patience.left_s(locks, ticket)
                if not ticket.over:
                    await waiter.wait(left_s)
            await locks.journal.log.wait_async(locks.settle(ticket))
        except BaseException:
            locks.leave(ticket)
            raise
        return granted_lock(locks, ticket)

    async def keepalive(self, lease_id: str, lease_ms: int | None) -> Lock:
        locks = await self._locks()
        proof = locks.proof(lease_id)
        decided = locks.renew(Renew(proof, lease_ms))
        await self._written(locks, decided)
        assert decided.held is not None
        return lock_of(locks, proof.name, decided.held, locks.moment())

    async def release(self, lease_id: str) -> None:
        locks = await self._locks()
        locks.release(locks.proof(lease_id))

    async def force_release(self, name: str) -> bool:
        return (await self._locks()).force_release(name)

    async def describe(self, name: str) -> LockInfo:
        locks = await self._locks()
        return info_of(locks.describe(name), locks.moment())

    async def held_locks(self) -> list[LockInfo]:
        locks = await self._locks()
        return [info_of(standing, locks.moment()) for standing in locks.standings()]

    def keep(self, lock: Lock) -> LocalKeptLock:
        return LocalKeptLock(self.engine, lock)

    async def document(self, name: str) -> Document | None:
        locks = await self._locks()
        decided = locks.document(name)
        await self._written(locks, decided)
        return decided_document(name, decided)

    async def update_document(self, name: str, content: bytes, version: int | None, lease_id: str | None) -> Document:
        locks = await self._locks()
        command = WriteDocument(name, content, version, None if lease_id is None else locks.proof(lease_id))
        # A large one takes a while to write, and again to read.
        decided = await aside(locks.change, command)
        await self._written(locks, decided)
        document = await aside(decided_document, name, decided)
        assert document is not None
        return document

    async def remove_document(self, name: str, version: int | None, lease_id: str | None) -> bool:
        locks = await self._locks()
        decided = locks.change(Remove(name, version, None if lease_id is None else locks.proof(lease_id)))
        await self._written(locks, decided)
        if decided.refused is not None:
            raise decided.refused
        return decided.content is not None

    async def document_names(self) -> list[str]:
        return list((await self._locks()).documents())

    async def _locks(self) -> FolderLocks:
        """The first call opens the journal, which reads files."""
        if not self.engine.has_locks:  # async only
            await asyncio.to_thread(self.engine.locks)
        return self.engine.locks()

    async def _written(self, locks: FolderLocks, decided: Decided) -> None:
        """Nobody may be told of a decision before it is on disk, refused or not."""
        if decided.appended is not None:
            await locks.journal.log.wait_async(decided.appended)
