"""Locks of a server that are renewed beside the calls of their holder."""

from __future__ import annotations

from typing import Final

from holdfast.api.locks import Lock
from holdfast.client.http import path_of
from holdfast.client.network import run
from holdfast.errors import HoldfastError, Unavailable
from holdfast.protocol.locks import KeepLock
from holdfast.remote.client import Client, ask_of

_NS: Final = 1_000_000
_SOON_NS: Final = 250 * _NS


class Renewing:
    """A lock as the client's thread sees it: it renews the lease, and keeps no lock alive that nobody has."""

    def __init__(self, client: Client, lock: Lock) -> None:
        self._caller = client.beside
        self._lock = lock
        self._lease_ns = round(lock.lease * 1e9)
        self._every_ns = max(self._lease_ns // 3, _NS)
        self.closed = False
        self.lost = False
        self.until_ns = client.world.clock.monotonic_ns() + self._lease_ns
        self._first = True

    def beat(self, now_ns: int) -> int:
        """Renew it, if it is time; answers when it is time again."""
        if self._first:
            self._first = False
            return now_ns + self._every_ns
        body = KeepLock(lease_id=self._lock.lease_id, lease=self._lock.lease)
        try:
            run(self._caller.call(ask_of("POST", path_of("locks", self._lock.name, "keepalive"), Lock, body)))
        except Unavailable:
            return now_ns + min(self._every_ns, _SOON_NS)
        except HoldfastError:
            self.lost = self.closed = True
            return now_ns + self._every_ns
        self.until_ns = now_ns + self._lease_ns
        return now_ns + self._every_ns


class RemoteKeptLock:
    """A lock of a server that this client renews."""

    def __init__(self, client: Client, lock: Lock) -> None:
        self.lock = lock
        self._clock = client.world.clock
        self._renewing = Renewing(client, lock)
        client.upkeep.beat(self._renewing)

    @property
    def lost(self) -> bool:
        """Whether the server said so, or the lease ended before it could be renewed."""
        return self._renewing.lost or self._clock.monotonic_ns() >= self._renewing.until_ns

    def end(self) -> None:
        """Renew it no more."""
        self._renewing.closed = True
