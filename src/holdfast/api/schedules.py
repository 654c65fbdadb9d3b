"""Schedules as users and the protocol see them, and their arguments, checked."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final, get_args

import msgspec

from holdfast.api.drafts import NewMessage, Seconds, duration_ms, instant_ms
from holdfast.broker.folder.layout import check_name, check_topic_name
from holdfast.errors import InvalidRequest
from holdfast.scheduling import Misfire, Timing, zone_of

MOST_NEXT: Final = 1_000
LONGEST_JITTER_S: Final = 24 * 3600
_SHORTEST_MS: Final = 1_000
_MOST_CRON_CHARS: Final = 200


class Firing(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of a due: a message was published `at` this time; or, with `missed`, this due and others were missed.

    A firing `by_hand` was asked for by `run_now`, at the time in `due`.
    """

    due: datetime
    at: datetime
    message_id: str = ""
    missed: int = 0
    by_hand: bool = False


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule: when it fires, the message that each firing publishes, and how far it has come.

    One of `cron`, `every` (in seconds) and `at` is set. `next_due` is None while it is paused, and after the only
    firing of a schedule with `at`. `firings` are the last ten, the newest first. `error` says why the next due could
    not be fired yet; it is tried again.
    """

    name: str
    topic: str
    body: bytes
    key: str | None = None
    headers: dict[str, str] = {}
    priority: int = 0
    cron: str | None = None
    timezone: str = "UTC"
    every: float | None = None
    at: datetime | None = None
    misfire: Misfire = "run_once"
    jitter: float = 0
    paused: bool = False
    next_due: datetime | None = None
    fired: int = 0
    missed: int = 0
    firings: list[Firing] = []
    error: str = ""
    created_at: datetime
    changed_at: datetime


class ScheduleOptions(msgspec.Struct, frozen=True):
    """When a schedule fires, as the caller gave it."""

    cron: str | None
    timezone: str
    every: Seconds | None
    at: datetime | None
    misfire: Misfire
    jitter: Seconds


class ScheduleRequest(msgspec.Struct, frozen=True):
    """A schedule to create or to change."""

    name: str
    topic: str
    message: NewMessage
    timing: Timing
    misfire: Misfire = "run_once"
    jitter_ms: int = 0


def schedule_request(name: str, topic: str, message: NewMessage, options: ScheduleOptions) -> ScheduleRequest:
    """Check the arguments of `put`. Raises InvalidRequest if one of them cannot be used."""
    cron, timezone, every, at, misfire, jitter = msgspec.structs.astuple(options)
    given = [field for field, value in (("cron", cron), ("every", every), ("at", at)) if value is not None]
    if len(given) != 1:
        which = "none of them is" if not given else f"{' and '.join(given)} are"
        raise InvalidRequest(f"a schedule needs one of cron, every and at, and {which} given: choose one")
    if misfire not in get_args(Misfire):
        raise InvalidRequest(f"misfire={misfire!r} cannot be used: give one of {', '.join(get_args(Misfire))}")
    if timezone != "UTC" and cron is None:
        raise InvalidRequest(f"timezone={timezone!r} cannot be used here: only a cron expression has a time zone")
    _check_text(message)
    return ScheduleRequest(
        check_name(name, "schedule"),
        check_topic_name(topic),
        message,
        _timing(cron, timezone, every, at),
        misfire,
        duration_ms(jitter, "jitter", maximum_ms=LONGEST_JITTER_S * 1000),
    )


def _timing(cron: str | None, timezone: str, every: Seconds | None, at: datetime | None) -> Timing:
    if every is not None:
        return Timing(every_ms=duration_ms(every, "every", minimum_ms=_SHORTEST_MS))
    if at is not None:
        at_ms = instant_ms(at, "at")
        if at_ms <= 0:
            raise InvalidRequest(f"at={at.isoformat()} has passed: give a time in the future")
        return Timing(at_ms=at_ms)
    if not isinstance(cron, str) or not 0 < len(cron) <= _MOST_CRON_CHARS:
        raise InvalidRequest(f"cron={cron!r:.80} cannot be used: give a text such as '0 3 * * *'")
    zone_of(timezone)
    return Timing(cron=cron, timezone=timezone)


def _check_text(message: NewMessage) -> None:
    headers: Any = message.headers or {}
    if message.key is not None and not isinstance(message.key, str):
        raise InvalidRequest(f"key={message.key!r:.80} cannot be used: the key of a schedule is text")
    if not isinstance(headers, dict) or not all(isinstance(value, str) for value in headers.values()):
        raise InvalidRequest("headers cannot be used: those of a schedule are a dict of texts")


def check_next(count: object) -> int:
    """Return the number of times that somebody wants to see, checked."""
    if type(count) is not int or not 1 <= count <= MOST_NEXT:
        raise InvalidRequest(f"count={count!r} cannot be used: give a whole number from 1 to {MOST_NEXT}")
    return count
