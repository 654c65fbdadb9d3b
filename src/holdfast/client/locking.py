"""What locks and documents for threads and for tasks share: every call written once."""

from __future__ import annotations

from typing import Any, Final, TypeAlias

from holdfast.api.drafts import Seconds
from holdfast.api.times import duration_ms
from holdfast.broker.folder.layout import parse_lease
from holdfast.client.calling import Caller, packed
from holdfast.client.client import Client
from holdfast.client.http import Ask, path_of
from holdfast.client.ways import run
from holdfast.embedded.locking import Document, Lock, LockInfo
from holdfast.errors import Closed, Conflict, HoldfastError, InvalidRequest, LeaseLost, LockHeld, NotFound, Unavailable
from holdfast.protocol import locks as wire

_MOST_WAIT_S: Final = 20.0
_NS: Final = 1_000_000


class LockCalls:
    """The locks of one server."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def _ask(self, method: str, path: str, answers: Any, body: Any = None, wait_s: float = 0.0) -> Any:
        content = b"" if body is None else packed(body)
        return await self._client.caller.call(
            Ask(method=method, path=path, body=content, answers=answers, wait_s=wait_s)
        )

    async def _acquire(
        self, name: str, owner: str | None, lease: Seconds, wait: Seconds | None, *, if_not_exists: bool
    ) -> Lock:
        """One call waits for some seconds; then it stands in line again, until its own time is over."""
        lease_s = duration_ms(lease, "lease", minimum_ms=1) / 1000
        clock = self._client.world.clock
        until_ns = None if wait is None else clock.monotonic_ns() + duration_ms(wait, "wait") * _NS
        while True:
            left_s = _MOST_WAIT_S if until_ns is None else max((until_ns - clock.monotonic_ns()) / 1e9, 0)
            wait_s = 0 if if_not_exists else min(left_s, _MOST_WAIT_S)
            body = wire.AcquireLock(
                owner=self._client.holder if owner is None else owner,
                lease=lease_s,
                wait=wait_s,
                if_not_exists=if_not_exists,
            )
            try:
                lock: Lock = await self._ask("POST", _path(name, "acquire"), Lock, body, wait_s)
            except LockHeld:
                if if_not_exists or (until_ns is not None and clock.monotonic_ns() >= until_ns):
                    raise
                continue
            return lock

    async def _keepalive(self, lock: RemoteLockLike, lease: Seconds | None) -> Lock:
        lease_s = None if lease is None else duration_ms(lease, "lease", minimum_ms=1) / 1000
        lease_id = lease_of(lock)
        body = wire.KeepLock(lease_id=lease_id, lease=lease_s)
        kept: Lock = await self._ask("POST", _path(parse_lease(lease_id).name, "keepalive"), Lock, body)
        return kept

    async def _release(self, lock: RemoteLockLike) -> None:
        lease_id = lease_of(lock)
        path = _path(parse_lease(lease_id).name, "release")
        try:
            await self._ask("POST", path, None, wire.ReleaseLock(lease_id=lease_id))
        except LeaseLost as error:
            if not getattr(error, "repeated", False):  # otherwise the attempt before has done it
                raise

    async def _force_release(self, name: str) -> bool:
        done: wire.LockReleased = await self._ask("DELETE", path_of("locks", _name(name)), wire.LockReleased)
        return done.released

    async def _describe(self, name: str) -> LockInfo:
        info: LockInfo = await self._ask("GET", path_of("locks", _name(name)), LockInfo)
        return info

    async def _list(self) -> list[LockInfo]:
        found: wire.HeldLocks = await self._ask("GET", path_of("locks"), wire.HeldLocks)
        return found.locks


class Keeping:
    """A lock that is kept alive by the thread beside, for as long as somebody has it."""

    def __init__(self, caller: Caller, lock: Lock) -> None:
        self._caller = caller
        self._lock = lock
        self._every_ns = max(round(lock.lease * 1e9) // 3, _NS)
        self.closed = False
        self.lost = False
        self.until_ns = caller.world.clock.monotonic_ns() + round(lock.lease * 1e9)
        self._first = True

    def beat(self, now_ns: int) -> int:
        """Renew it, if it is time; answers when it is time again."""
        if self._first:
            self._first = False
            return now_ns + self._every_ns
        body = wire.KeepLock(lease_id=self._lock.lease_id, lease=self._lock.lease)
        ask = Ask(method="POST", path=_path(self._lock.name, "keepalive"), body=packed(body), answers=Lock)
        try:
            run(self._caller.call(ask))
        except Unavailable:
            return now_ns + min(self._every_ns, 250 * _NS)
        except HoldfastError:
            self.lost = self.closed = True
            return now_ns + self._every_ns
        self.until_ns = now_ns + round(self._lock.lease * 1e9)
        return now_ns + self._every_ns


class RemoteHolding:
    """A lock that renews itself while a block runs."""

    def __init__(self, locks: LockCalls, name: str, owner: str | None, lease: Seconds, wait: Seconds | None) -> None:
        self._locks = locks
        self._name = _name(name)
        self._owner = locks._client.holder if owner is None else owner
        self._wanted = lease, wait
        self._lock: Lock | None = None
        self._keeping: Keeping | None = None
        self._released = False

    @property
    def lock(self) -> Lock:
        """The lock as it was taken; its `expires_at` has moved on since."""
        if self._lock is None:
            raise InvalidRequest(f"lock {self._name} is not taken yet: use `with` for that")
        return self._lock

    @property
    def name(self) -> str:
        return self._name

    @property
    def owner(self) -> str:
        return self._owner

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
        """Whether the lease has ended meanwhile, as far as this end knows: then stop, another may hold the lock."""
        if self._released or self._keeping is None:
            return False
        return self._keeping.lost or self._locks._client.world.clock.monotonic_ns() >= self._keeping.until_ns

    async def _take(self) -> None:
        lease, wait = self._wanted
        client = self._locks._client
        self._lock = await self._locks._acquire(self._name, self._owner, lease, wait, if_not_exists=False)
        self._keeping = Keeping(client.beside, self._lock)
        client.upkeep.beat(self._keeping)

    async def _give_back(self, error: BaseException | None) -> None:
        """At the end of the block. That the lock was lost is an error, but one of the block's own says more."""
        if self._keeping is not None:
            self._keeping.closed = True
        try:
            await self._locks._release(self)
            self._released = True
        except (LeaseLost, Closed, Unavailable) as late:
            if error is None:
                raise
            error.add_note(f"the lock was not held any more: {late}")

    def __del__(self) -> None:
        if getattr(self, "_keeping", None) is not None:
            self._keeping.closed = True  # type: ignore[union-attr]


RemoteLockLike: TypeAlias = Lock | RemoteHolding | str


class DocumentCalls:
    """The state documents of one server."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def _ask(self, method: str, path: str, answers: Any, body: Any = None) -> Any:
        content = b"" if body is None else packed(body)
        return await self._client.caller.call(Ask(method=method, path=path, body=content, answers=answers))

    async def _get(self, name: str) -> Document | None:
        try:
            found: Document = await self._ask("GET", path_of("state", _name(name)), Document)
        except NotFound:
            return None
        return found

    async def _update(self, name: str, value: Any, version: int | None, lock: RemoteLockLike | None) -> Document:
        path = path_of("state", _name(name), version=version, lease_id=None if lock is None else lease_of(lock))
        try:
            body = wire.WriteDocument(value=value)
            content = packed(body)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidRequest(
                f"document {name} cannot be stored: {error}. It must be a value that JSON knows"
            ) from None
        try:
            ask = Ask(method="PUT", path=path, body=content, answers=Document)
            document: Document = await self._client.caller.call(ask)
        except Conflict as error:
            if not getattr(error, "repeated", False) or version is None:
                raise
            found = await self._get(name)  # the attempt before, whose answer was lost, may have done it
            if found is None or found.version != version + 1 or found.value != value:
                raise error from None
            document = found
        return document

    async def _remove(self, name: str, version: int | None, lock: RemoteLockLike | None) -> bool:
        path = path_of("state", _name(name), version=version, lease_id=None if lock is None else lease_of(lock))
        done: wire.DocumentRemoved = await self._ask("DELETE", path, wire.DocumentRemoved)
        return done.removed

    async def _list(self) -> list[str]:
        found: wire.DocumentNames = await self._ask("GET", path_of("state"), wire.DocumentNames)
        return found.names


def lease_of(lock: object) -> str:
    """The proof of a lock that somebody holds."""
    if isinstance(lock, (Lock, RemoteHolding)):
        return lock.lease_id
    if isinstance(lock, str):
        return lock
    raise InvalidRequest(f"{lock!r} is no lock: give what acquire answered, or its lease_id")


def _name(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"{name!r} is no name: give a text")
    return name


def _path(name: object, verb: str) -> str:
    return path_of("locks", _name(name), verb)
