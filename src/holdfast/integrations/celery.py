"""Celery's results in Holdfast: `result_backend = "holdfast:///var/lib/app/jobs"`, at the same places as the broker.

A result is a document of its own, with the time at which it expires. Expired ones count as absent at once; they are
removed by Celery's daily `celery.backend_cleanup` (`celery beat` sends it), or when `cleanup` is called.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final

from celery.backends.base import KeyValueStoreBackend

from holdfast.env import real_world
from holdfast.errors import Conflict, Unavailable
from holdfast.integrations.kombu import Shared, places, shown_url, topic_name

_MS: Final = 1000


class HoldfastBackend(KeyValueStoreBackend):
    """Results of tasks, groups and chords as documents of a data folder."""

    implements_incr = True
    persistent = True
    supports_native_join = True

    def __init__(self, app: Any, url: str = "", **kwargs: Any) -> None:
        super().__init__(app, **kwargs)
        self.url = url
        self._clock = real_world().clock

    def as_uri(self, include_password: bool = False) -> str:  # noqa: FBT001, FBT002  Celery's signature
        return shown_url(self.url, None) if include_password else shown_url(self.url)

    @property
    def _shared(self) -> Shared:
        return places.at(self.url, {})

    def exception_safe_to_retry(self, exc: BaseException) -> bool:
        return isinstance(exc, Unavailable)

    def get(self, key: str | bytes) -> str | bytes | None:
        """Return what is stored under the key, None if nothing is, or if it has expired."""
        found = self._shared.broker.documents.get(_name(key))
        if found is None or self._expired(found.value):
            return None
        value = found.value["value"]
        return b64decode(value) if found.value.get("base64") else value

    def mget(self, keys: Iterable[str | bytes]) -> list[str | bytes | None]:
        return [self.get(key) for key in keys]

    def set(self, key: str | bytes, value: str | bytes) -> None:
        """Store a value until `result_expires` has passed."""
        stored: dict[str, Any] = {"value": value}
        if isinstance(value, bytes):
            stored = {"value": b64encode(value).decode(), "base64": True}
        self._shared.broker.documents.update(_name(key), stored | self._lifetime(self.expires))

    def delete(self, key: str | bytes) -> None:
        self._shared.broker.documents.remove(_name(key))

    def incr(self, key: str | bytes) -> int:
        """Count up from 0; chords count their parts that are done."""
        return int(self._change(key, lambda value: {**value, "value": int(value.get("value", 0)) + 1})["value"])

    def expire(self, key: str | bytes, value: float) -> None:
        self._change(key, lambda before: before | self._lifetime(value))

    def cleanup(self) -> None:
        """Remove the results that have expired."""
        documents = self._shared.broker.documents
        prefixes = tuple(map(_name, (self.task_keyprefix, self.group_keyprefix, self.chord_keyprefix)))
        for name in documents.list():
            found = documents.get(name) if name.startswith(prefixes) else None
            if found is not None and self._expired(found.value):
                with suppress(Conflict):  # it was stored anew meanwhile
                    documents.remove(name, version=found.version)

    def _change(self, key: str | bytes, changed: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
        documents = self._shared.broker.documents
        while True:
            found = documents.get(_name(key))
            after = changed({} if found is None or self._expired(found.value) else found.value)
            with suppress(Conflict):
                documents.update(_name(key), after, version=found.version if found else 0)
                return after

    def _lifetime(self, seconds: float | None) -> dict[str, int]:
        return {"expires_at_ms": self._now_ms() + int(seconds * _MS)} if seconds else {}

    def _expired(self, value: dict[str, Any]) -> bool:
        return bool(value.get("expires_at_ms", self._now_ms() + 1) <= self._now_ms())

    def _now_ms(self) -> int:
        return self._clock.now_ns() // 1_000_000

    def __reduce__(self, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        return super().__reduce__(args, {**(kwargs or {}), "url": self.url})


def _name(key: str | bytes) -> str:
    return topic_name(key.decode() if isinstance(key, bytes) else key)
