"""Durations and instants as people give them, to the integers that everything below works with.

Nothing is ever early: a part of a millisecond counts as a whole one.
"""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime, timedelta
from typing import Final

from holdfast.delivery.where import moment_of, seconds_of
from holdfast.errors import InvalidRequest

MAX_DURATION_MS: Final = 100 * 365 * 24 * 3600 * 1000  # 100 years
MAX_LEASE_MS: Final = 30 * 24 * 3600 * 1000

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_LAST_US: Final = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // _MICROSECOND
_NUMBER: Final = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_BASIC_DATE: Final = re.compile(r"[0-9]{8}")
_FAR_S: Final = 1e12  # beyond every limit, and safe to multiply
_MAX_SHOWN: Final = 80


def duration_ms(value: float | timedelta, name: str, *, minimum_ms: int = 0, maximum_ms: int = MAX_DURATION_MS) -> int:
    """Milliseconds of a duration in seconds or of a timedelta, rounded up; `name` is the argument's, for the error."""
    found_ms = _as_ms(value)
    if found_ms is None or not minimum_ms <= found_ms <= maximum_ms:
        raise InvalidRequest(
            f"{name}={_shown(value)} cannot be used: give seconds as a number, or a timedelta, "
            f"from {_seconds(minimum_ms)} to {_seconds(maximum_ms)}"
        )
    return found_ms


def lease_of(value: float | timedelta, *, minimum_ms: int = 1) -> int:
    """Milliseconds of a lease."""
    return duration_ms(value, "lease", minimum_ms=minimum_ms, maximum_ms=MAX_LEASE_MS)


def instant_ns(value: datetime, name: str) -> int:
    """Nanoseconds since 1970 of an aware datetime, exactly; below 0 before that."""
    if not isinstance(value, datetime):
        raise InvalidRequest(
            f"{name}={_shown(value)} cannot be used: give an aware datetime, such as datetime.now(timezone.utc)"
        )
    if value.utcoffset() is None:
        raise InvalidRequest(
            f"{name}={_shown(value)} has no time zone, so nobody knows which moment it means: give an aware "
            "datetime, such as datetime.now(timezone.utc), or name the zone with replace(tzinfo=...)"
        )
    return (value - _EPOCH) // _MICROSECOND * 1000


def instant_ms(value: datetime, name: str) -> int:
    """Milliseconds since 1970 of an aware datetime, rounded up."""
    return -(-instant_ns(value, name) // 1_000_000)


def to_datetime(time_ns: int) -> datetime:
    """The moment in UTC, to the microsecond (what is left of one is cut off). Any 64-bit time has one.

    What is due beyond the last moment that a datetime can tell is due at that one.
    """
    return _EPOCH + timedelta(microseconds=min(time_ns // 1000, _LAST_US))


def due_at_ms(delay: float | timedelta | None, at: datetime | None, now_ms: int) -> int:
    """When a message is due, in milliseconds since 1970; 0 where it need not wait, also for a time that has passed."""
    if delay is not None and at is not None:
        raise InvalidRequest(f"delay={_shown(delay)} and at={_shown(at)} are both given: choose one of them")
    if delay is not None:
        delay_ms = duration_ms(delay, "delay")
        return now_ms + delay_ms if delay_ms else 0
    if at is None:
        return 0
    due_ms = instant_ms(at, "at")
    return due_ms if due_ms > now_ms else 0


def parse_duration(text: str, name: str = "duration") -> float:
    """Seconds of a duration on the command line: `2.5` (seconds), `500ms`, `1h30m`, `7d`."""
    seconds = float(text) if _NUMBER.fullmatch(text) else seconds_of(text)
    if seconds is None or seconds * 1000 > MAX_DURATION_MS:
        raise InvalidRequest(
            f"{name} {_shown(text)} cannot be used: write seconds (2.5) or units, the largest first "
            "(500ms, 30s, 1h30m, 7d, 2w), up to 100 years"
        )
    return seconds


def parse_instant(text: str, now_ms: int, name: str = "time") -> datetime:
    """A moment on the command line, in UTC.

    `2026-11-16T10:00:00Z` or another ISO 8601 time (UTC where it names no zone), `2026-11-16` (its first
    moment), `-10m` and `+1h30m` (from now), `now`, `1763287200` (seconds since 1970).
    """
    try:
        found = _moment(text, now_ms)
        if found is not None:
            return found.astimezone(UTC)
    except OverflowError:
        pass
    raise InvalidRequest(
        f"{name} {_shown(text)} cannot be used: write a moment between the years 1 and 9999 as 2026-11-16T10:00:00Z "
        "(UTC where no zone is named), -10m or +1h30m (from now), now, or seconds since 1970"
    )


def _moment(text: str, now_ms: int) -> datetime | None:
    now = _EPOCH + timedelta(milliseconds=now_ms)
    if text == "now":
        return now
    if text[:1] in {"+", "-"}:
        seconds = seconds_of(text[1:])
        if seconds is None:
            return None
        return now + timedelta(seconds=seconds if text[0] == "+" else -seconds)
    # Eight digits are a date: as seconds they would lie in the first three years after 1970.
    if _NUMBER.fullmatch(text) and not _BASIC_DATE.fullmatch(text):
        return _EPOCH + timedelta(seconds=float(text))
    return moment_of(text)


def _as_ms(value: object) -> int | None:
    """Whole milliseconds, rounded away from zero; None for what is no duration."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value * 1000
    if isinstance(value, timedelta):
        ns = value // _MICROSECOND * 1000
    elif isinstance(value, float) and math.isfinite(value):
        # By way of whole nanoseconds: 0.07 is not exactly 70 ms as a float, and is not meant to be 71.
        ns = round(min(max(value, -_FAR_S), _FAR_S) * 1e9)
        if ns == 0 and value != 0:
            ns = 1 if value > 0 else -1
    else:
        return None
    return ns // 1_000_000 if ns < 0 else -(-ns // 1_000_000)


def _seconds(ms: int) -> str:
    if ms == MAX_DURATION_MS:
        return "100 years"
    return f"{ms // 1000} s" if ms % 1000 == 0 else f"{ms / 1000:g} s"


def _shown(value: object) -> str:
    """Its repr, short; a repr may fail, as that of an integer with thousands of digits does."""
    try:
        text = repr(value)
    except Exception:
        text = f"a {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 1] + "…"
