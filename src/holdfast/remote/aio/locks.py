"""Locks and documents of a server."""

from __future__ import annotations

from typing import Final

import msgspec

from holdfast.api.locks import Document, Lock, LockInfo, LockRequest
from holdfast.broker.folder.layout import parse_lease
from holdfast.client.http import Ask, path_of
from holdfast.errors import Conflict, LeaseLost, LockHeld, NotFound
from holdfast.protocol import locks as wire
from holdfast.protocol.media import JSON
from holdfast.remote.client import AsyncCalls, Client
from holdfast.remote.locks import RemoteKeptLock

_MOST_WAIT_S: Final = 20.0


class AsyncRemoteLocksPort:
    """The locks and documents of a server."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._calls = AsyncCalls(client)

    @property
    def holder(self) -> str:
        return self._client.holder

    async def acquire(self, wanted: LockRequest) -> Lock:
        """One call waits for some seconds; then it stands in line again, until its own time is over."""
        clock = self._client.world.clock
        until_ns = None if wanted.wait_ms is None else clock.monotonic_ns() + wanted.wait_ms * 1_000_000
        path = path_of("locks", wanted.name, "acquire")
        while True:
            left_s = _MOST_WAIT_S if until_ns is None else max((until_ns - clock.monotonic_ns()) / 1e9, 0)
            wait_s = min(left_s, _MOST_WAIT_S) if wanted.waits else 0
            body = wire.AcquireLock(
                owner=wanted.owner, lease=wanted.lease_ms / 1000, wait=wait_s, if_not_exists=wanted.if_not_exists
            )
            try:
                lock: Lock = await self._calls.ask("POST", path, Lock, body, wait_s=wait_s)
            except LockHeld:
                if not wanted.waits or (until_ns is not None and clock.monotonic_ns() >= until_ns):
                    raise
                continue
            return lock

    async def keepalive(self, lease_id: str, lease_ms: int | None) -> Lock:
        body = wire.KeepLock(lease_id=lease_id, lease=None if lease_ms is None else lease_ms / 1000)
        kept: Lock = await self._calls.ask("POST", _path(lease_id, "keepalive"), Lock, body)
        return kept

    async def release(self, lease_id: str) -> None:
        try:
            await self._calls.ask("POST", _path(lease_id, "release"), None, wire.ReleaseLock(lease_id=lease_id))
        except LeaseLost as error:
            if not getattr(error, "repeated", False):  # otherwise the attempt before has done it
                raise

    async def force_release(self, name: str) -> bool:
        done: wire.LockReleased = await self._calls.ask("DELETE", path_of("locks", name), wire.LockReleased)
        return done.released

    async def describe(self, name: str) -> LockInfo:
        info: LockInfo = await self._calls.ask("GET", path_of("locks", name), LockInfo)
        return info

    async def held_locks(self) -> list[LockInfo]:
        found: wire.HeldLocks = await self._calls.ask("GET", path_of("locks"), wire.HeldLocks)
        return found.locks

    def keep(self, lock: Lock) -> RemoteKeptLock:
        return RemoteKeptLock(self._client, lock)

    async def document(self, name: str) -> Document | None:
        try:
            found: Document = await self._calls.ask("GET", path_of("state", name), Document)
        except NotFound:
            return None
        return found

    async def update_document(self, name: str, content: bytes, version: int | None, lease_id: str | None) -> Document:
        path = path_of("state", name, version=version, lease_id=lease_id)
        # As JSON, which it is already: msgpack knows more, and would store what a folder refuses.
        ask = Ask(method="PUT", path=path, body=b'{"value":%b}' % content, media=JSON, answers=Document)
        try:
            document: Document = await self._calls.call(ask)
        except Conflict as error:
            if not getattr(error, "repeated", False) or version is None:
                raise
            found = await self.document(name)  # the attempt before, whose answer was lost, may have done it
            if found is None or found.version != version + 1 or found.value != msgspec.json.decode(content):
                raise error from None
            document = found
        return document

    async def remove_document(self, name: str, version: int | None, lease_id: str | None) -> bool:
        path = path_of("state", name, version=version, lease_id=lease_id)
        done: wire.DocumentRemoved = await self._calls.ask("DELETE", path, wire.DocumentRemoved)
        return done.removed

    async def document_names(self) -> list[str]:
        found: wire.DocumentNames = await self._calls.ask("GET", path_of("state"), wire.DocumentNames)
        return found.names


def _path(lease_id: str, verb: str) -> str:
    return path_of("locks", parse_lease(lease_id).name, verb)
