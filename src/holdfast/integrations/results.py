"""Results that expire, as state documents: what the result backends of all frameworks are made of.

Each document has the time at which it expires. An expired one counts as absent at once; it is removed by
`remove_expired`, which reads all documents, so it is called rarely: by `sweep`, once an hour.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import holdfast
from holdfast.env import real_world
from holdfast.errors import Conflict, HoldfastError, LockHeld
from holdfast.integrations.places import topic_name

_MS: Final = 1000
EXPIRES: Final = "expires_at_ms"
_SWEEP_MS: Final = 3_600_000
_LOCK: Final = "holdfast.expired"


class Expiry:
    """The names and the lifetimes of results, whoever reads and writes them."""

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._clock = real_world().clock

    def name(self, key: str) -> str:
        """The document of a result."""
        return topic_name(self._prefix + key)

    def stored(self, value: dict[str, Any], keep_s: float | None) -> dict[str, Any]:
        """The value with the time at which it expires, None: never."""
        return value | ({EXPIRES: self.now_ms() + int(keep_s * _MS)} if keep_s else {})

    def expired(self, value: dict[str, Any]) -> bool:
        return bool(value.get(EXPIRES, self.now_ms() + 1) <= self.now_ms())

    def now_ms(self) -> int:
        return self._clock.now_ns() // 1_000_000


class Results:
    """JSON objects by key, each until it expires."""

    def __init__(self, broker: Callable[[], holdfast.Broker], prefix: str = "") -> None:
        self._broker = broker
        self._expiry = Expiry(prefix)
        self._sweep_at_ms = 0

    def get(self, key: str) -> dict[str, Any] | None:
        """What is stored under the key, None if nothing is, or if it has expired."""
        found = self.find(key)
        return None if found is None else found.value

    def find(self, key: str) -> holdfast.Document | None:
        """As `get`, with the version."""
        found = self._broker().documents.get(self._expiry.name(key))
        return None if found is None or self._expiry.expired(found.value) else found

    def put(
        self, key: str, value: dict[str, Any], *, keep_s: float | None, version: int | None = None
    ) -> holdfast.Document:
        """Store a value for `keep_s` seconds, None: until it is removed."""
        return self._broker().documents.update(
            self._expiry.name(key), self._expiry.stored(value, keep_s), version=version
        )

    def remove(self, key: str) -> None:
        self._broker().documents.remove(self._expiry.name(key))

    def change(self, key: str, changed: Callable[[dict[str, Any]], dict[str, Any] | None]) -> dict[str, Any] | None:
        """Store what `changed` makes of the value, whoever else changes it at the same time; None: leave it."""
        documents = self._broker().documents
        while True:
            found = documents.get(self._expiry.name(key))
            after = changed({} if found is None or self._expiry.expired(found.value) else found.value)
            if after is None:
                return None
            with suppress(Conflict):
                documents.update(self._expiry.name(key), after, version=found.version if found else 0)
                return after

    def expire(self, key: str, keep_s: float) -> None:
        """Keep the value for so long from now on."""
        self.change(key, lambda before: self._expiry.stored(before, keep_s) if before else None)

    def now_ms(self) -> int:
        """The time that decides what has expired."""
        return self._expiry.now_ms()

    def remove_expired(self, *prefixes: str) -> int:
        """Remove the results that have expired, unless another process is doing so; returns how many."""
        broker, removed = self._broker(), 0
        starts = tuple(map(self._expiry.name, prefixes or ("",)))
        with suppress(LockHeld), broker.locks.hold(_LOCK, wait=0):
            for name in broker.documents.list():
                found = broker.documents.get(name) if name.startswith(starts) else None
                if found is not None and self._expiry.expired(found.value):
                    with suppress(Conflict):  # it was stored anew meanwhile
                        removed += broker.documents.remove(name, version=found.version)
        return removed

    def sweep(self) -> None:
        """Remove the expired results in the background, if that was not done within the last hour."""
        now_ms = self._expiry.now_ms()
        if now_ms >= self._sweep_at_ms:
            self._sweep_at_ms = now_ms + _SWEEP_MS
            threading.Thread(target=self._sweep, name="holdfast-expired-results", daemon=True).start()

    def _sweep(self) -> None:
        with suppress(HoldfastError):  # next hour, then
            self.remove_expired()
