"""Celery's results in Holdfast: `result_backend = "holdfast:///var/lib/app/jobs"`, at the same places as the broker.

Expired results are removed by Celery's daily `celery.backend_cleanup` (`celery beat` sends it), or when `cleanup` is
called.

`celery beat -S holdfast` runs any number of beats that send each periodic task once. What all of them have to know, the
last due of each entry, is a document. A beat computes from it which due has come, sends the task with the dedup id
`celery.beat.NAME@DUE`, and then writes that due down. Beats that come to the same due send the same id, and only the
first message is stored; one that is killed in between leaves the due to the others, or to its successor.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterable
from contextlib import suppress
from copy import copy
from datetime import UTC, datetime
from typing import Any, Final

from celery import beat
from celery.backends.base import KeyValueStoreBackend
from celery.exceptions import ImproperlyConfigured

import holdfast
from holdfast.errors import Conflict, HoldfastError, Unavailable
from holdfast.integrations.places import places, shown_url, topic_name
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
        assert after is not None
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


_BEAT: Final = "celery.beat."
_LOOK_AGAIN_S: Final = 5
_MOST_DUES: Final = 10_000  # that are stepped over, one by one, after an outage


class Scheduler(beat.Scheduler):
    """The scheduler of `celery beat`, for any number of beats at the same place: each run is sent once."""

    max_interval = _LOOK_AGAIN_S

    def __init__(self, app: Any, *args: Any, **kwargs: Any) -> None:
        self._known: dict[str, holdfast.Document] = {}
        super().__init__(app, *args, **kwargs)

    @property
    def info(self) -> str:
        """What `celery beat` prints at its start."""
        return f"    . db -> {self.app.connection_for_write().as_uri()}"

    def populate_heap(self, *args: Any, **kwargs: Any) -> None:
        for entry in self.schedule.values():
            with suppress(HoldfastError):  # it is read again before the entry is due
                self._bring_up_to_date(entry)
        super().populate_heap(*args, **kwargs)

    def is_due(self, entry: Any) -> tuple[bool, float]:
        """Whether nobody has sent the entry's last due yet, and when to look again."""
        try:
            self._bring_up_to_date(entry)
        except HoldfastError as error:
            beat.error("beat: %s cannot be looked up: %s", entry.name, error)
            return False, _LOOK_AGAIN_S
        due, again_s = entry.is_due()
        return due, again_s

    def apply_async(self, entry: Any, producer: Any = None, advance: bool = True, **kwargs: Any) -> Any:  # noqa: FBT001, FBT002
        """Send the task, unless another beat has sent it, and write down that it was sent."""
        name, known = _beat_document(entry), self._known[entry.name]
        due = _last_due(entry, _time_of(known))
        sent = copy(entry)
        sent.options = {**entry.options, "dedup_id": f"{name}@{due.isoformat()}"}
        result = super().apply_async(sent, producer=producer, advance=advance, **kwargs)
        with suppress(Conflict):  # another beat was faster
            self._documents().update(name, {"due": due.isoformat()}, version=known.version)
        return result

    def _bring_up_to_date(self, entry: Any) -> None:
        """Tell an entry which of its dues was sent last, by any beat. A new one begins now."""
        documents, name = self._documents(), _beat_document(entry)
        found = documents.get(name)
        if found is None:
            now = datetime.now(UTC).replace(microsecond=0)
            with suppress(Conflict):
                documents.update(name, {"due": now.isoformat()}, version=0)
            found = documents.get(name)
            assert found is not None
        self._known[entry.name] = found
        entry.last_run_at = _time_of(found).astimezone(self.app.timezone)

    def _documents(self) -> Any:
        transport = self._ensure_connected().transport
        if getattr(transport, "driver_name", "") != "holdfast":
            raise ImproperlyConfigured(
                "this scheduler needs Holdfast as its broker: set broker_url to holdfast:///path/to/a/folder, or start "
                "celery beat without -S"
            )
        return transport.shared.broker.documents


def _beat_document(entry: Any) -> str:
    return _BEAT + topic_name(entry.name)


def _time_of(found: holdfast.Document) -> datetime:
    return datetime.fromisoformat(found.value["due"])


def _last_due(entry: Any, sent: datetime) -> datetime:
    """The last due that has come, if `sent` was the one before: the same for all beats."""
    now, due = datetime.now(UTC), sent
    for _ in range(_MOST_DUES):
        following = _next_due(entry.schedule, due)
        if following <= due or following > now:
            break
        due = following
    return due if due > sent else now.replace(microsecond=0)


def _next_due(schedule: Any, after: datetime) -> datetime:
    left = schedule.remaining_estimate(after.astimezone(schedule.tz))
    tenths = round((datetime.now(UTC) + left).timestamp() * 10)
    return datetime.fromtimestamp(tenths / 10, UTC)
