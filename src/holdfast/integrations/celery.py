"""Celery's results in Holdfast: `result_backend = "holdfast:///var/lib/app/jobs"`, at the same places as the broker.

Expired results are removed by Celery's daily `celery.backend_cleanup` (`celery beat` sends it), or when `cleanup` is
called.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterable
from typing import Any

from celery.backends.base import KeyValueStoreBackend

from holdfast.errors import Unavailable
from holdfast.integrations.places import places, shown_url
from holdfast.integrations.results import Results


class HoldfastBackend(KeyValueStoreBackend):
    """Results of tasks, groups and chords as documents of a data folder."""

    implements_incr = True
    persistent = True
    supports_native_join = True

    def __init__(self, app: Any, url: str = "", **kwargs: Any) -> None:
        super().__init__(app, **kwargs)
        self.url = url
        self._results = Results(lambda: places.at(self.url).broker)

    def as_uri(self, include_password: bool = False) -> str:  # noqa: FBT001, FBT002  Celery's signature
        return shown_url(self.url, None) if include_password else shown_url(self.url)

    def exception_safe_to_retry(self, exc: BaseException) -> bool:
        return isinstance(exc, Unavailable)

    def get(self, key: str | bytes) -> str | bytes | None:
        """Return what is stored under the key, None if nothing is, or if it has expired."""
        found = self._results.get(_text(key))
        if found is None:
            return None
        value = found["value"]
        return b64decode(value) if found.get("base64") else value

    def mget(self, keys: Iterable[str | bytes]) -> list[str | bytes | None]:
        return [self.get(key) for key in keys]

    def set(self, key: str | bytes, value: str | bytes) -> None:
        """Store a value until `result_expires` has passed."""
        stored: dict[str, Any] = {"value": value}
        if isinstance(value, bytes):
            stored = {"value": b64encode(value).decode(), "base64": True}
        self._results.put(_text(key), stored, keep_s=self.expires)

    def delete(self, key: str | bytes) -> None:
        self._results.remove(_text(key))

    def incr(self, key: str | bytes) -> int:
        """Count up from 0; chords count their parts that are done."""
        after = self._results.change(_text(key), lambda value: {**value, "value": int(value.get("value", 0)) + 1})
        return int(after["value"])

    def expire(self, key: str | bytes, value: float) -> None:
        self._results.expire(_text(key), value)

    def cleanup(self) -> None:
        """Remove the results that have expired."""
        self._results.remove_expired(*map(_text, (self.task_keyprefix, self.group_keyprefix, self.chord_keyprefix)))

    def __reduce__(self, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        return super().__reduce__(args, {**(kwargs or {}), "url": self.url})


def _text(key: str | bytes) -> str:
    return key.decode() if isinstance(key, bytes) else key
