"""Schedules: when they fall due, and which firings follow from the time that has passed.

Pure: time is an argument, and nothing is read or written but the rules of time zones.

A *due* is a moment at which a schedule is to fire, in milliseconds since 1970. It is computed from the schedule alone,
never from when something ran, so that everybody who asks gets the same dues. A firing publishes one message with the
dedup id `name@due`: a due that was fired is never fired again, whoever fires it. `next_ms` is the first due that is not
settled yet:

      settled: fired or missed        next_ms                      dues to come
    ──┬──────────┬──────────┬───────────┬───────────┬──────────┬──────────┬──►
                                                         ▲
                                                        now: the dues up to here are `ripe`

If several dues are ripe at once, their owner was down, or its clock was set forward. The misfire policy says which of
them fire; the others are counted as missed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime, tzinfo
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

from holdfast.checksum import crc32c
from holdfast.errors import InvalidRequest

Misfire: TypeAlias = Literal["run_once", "skip", "all"]

ON_TIME_MS: Final = 60_000  # a due that is not later than this is not missed, even by `skip`
MOST_CAUGHT_UP: Final = 100  # firings at once, by `all`
MOST_COUNTED: Final = 1_000  # missed dues that are counted one by one
_KEPT_FIRINGS: Final = 10

_FIRST_MARGIN_MS: Final = 7_200_000
_WIDER: Final = 8
_FIELDS: Final = 5
_NAMED: Final = {
    "@yearly": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_LAST_MS: Final = 253_402_300_799_000  # the last second of the year 9999, and so of datetimes


class Timing(msgspec.Struct, frozen=True, omit_defaults=True):
    """When a schedule falls due: by a cron expression in a time zone, at an interval from `anchor_ms`, or once."""

    cron: str = ""
    timezone: str = "UTC"
    every_ms: int = 0
    anchor_ms: int = 0
    at_ms: int = 0

    def starting(self, now_ms: int) -> Timing:
        """Return the same interval, beginning now."""
        return msgspec.structs.replace(self, anchor_ms=now_ms)


class Template(msgspec.Struct, frozen=True, omit_defaults=True):
    """The message that each firing publishes, encoded as it will be stored."""

    topic: str
    body: bytes
    key: bytes | None = None
    headers: tuple[tuple[str, bytes], ...] = ()
    priority: int = 0
    flags: int = 0

    @property
    def size(self) -> int:
        """Bytes of the body, the key and the headers."""
        return len(self.body) + len(self.key or b"") + sum(len(name) + len(value) for name, value in self.headers)


class SettledDue(msgspec.Struct, frozen=True, omit_defaults=True, array_like=True):
    """Something that became of a due: fired at `at_ms`, or missed. With `missed`, `due_ms` is the last due of so many.

    A firing by hand (`by_hand`) has no due: it has the moment of the request instead.
    """

    due_ms: int
    at_ms: int
    message_id: str = ""
    missed: int = 0
    by_hand: bool = False


class ScheduleState(msgspec.Struct, frozen=True, omit_defaults=True):
    """A schedule as it is stored: what it is, and how far it has come."""

    timing: Timing
    template: Template
    misfire: Misfire = "run_once"
    jitter_ms: int = 0
    paused: bool = False
    created_ms: int = 0
    changed_ms: int = 0
    next_ms: int | None = None
    seen_ms: int = 0  # the wall clock when `next_ms` was set: an earlier time means that the clock was set back
    fired: int = 0
    missed: int = 0
    firings: tuple[SettledDue, ...] = ()  # the last ones, oldest first
    error: str = ""  # why the next due could not be fired yet

    def is_same(self, other: ScheduleState) -> bool:
        """Whether both fire the same messages at the same times; an interval may have begun at another moment."""
        mine, others = (self.template, self.misfire, self.jitter_ms), (other.template, other.misfire, other.jitter_ms)
        return self.has_timing_of(other) and mine == others

    def has_timing_of(self, other: ScheduleState) -> bool:
        """Whether both fall due at the same times; an interval may have begun at another moment."""
        return self.timing == msgspec.structs.replace(other.timing, anchor_ms=self.timing.anchor_ms)

    def goes_on_with(self, other: ScheduleState) -> bool:
        """Whether the next due stays as it is if this schedule becomes the other one.

        In another topic it does not: what was fired would not be found there.
        """
        return self.next_ms is not None and self.has_timing_of(other) and self.template.topic == other.template.topic


class FiringPlan(NamedTuple):
    """What follows from the time that has passed: the dues to fire, in order, and those that are missed."""

    fire: tuple[int, ...]
    missed: int
    last_missed_ms: int
    next_ms: int | None


def check_timing(timing: Timing, now_ms: int) -> None:
    """Raise InvalidRequest for a schedule that cannot be understood, or never falls due."""
    if timing.every_ms:
        return
    if timing.at_ms:
        if timing.at_ms <= now_ms:
            raise InvalidRequest(
                f"at={_moment(timing.at_ms, UTC).isoformat()} has passed: give a time in the future, or publish the "
                "message now"
            )
        if timing.at_ms > _LAST_MS:
            raise InvalidRequest(f"at={timing.at_ms} ms is after the year 9999: give a time before it ends")
        return
    if next(dues(timing, now_ms), None) is None:
        raise InvalidRequest(f"cron={timing.cron!r} never falls due: there is no such day. Check day and month")


def dues(timing: Timing, after_ms: int) -> Iterator[int]:
    """Yield the dues after a moment, in order of time, until the year 9999 ends."""
    if timing.at_ms:
        if after_ms < timing.at_ms <= _LAST_MS:
            yield timing.at_ms
    elif timing.every_ms:
        due_ms = after_ms + timing.every_ms - (after_ms - timing.anchor_ms) % timing.every_ms
        while due_ms <= _LAST_MS:
            yield due_ms
            due_ms += timing.every_ms
    else:
        yield from _cron_dues(timing, after_ms)


def _cron_dues(timing: Timing, after_ms: int) -> Iterator[int]:
    moments = _simulated(timing, after_ms)
    while (moment := _next_of(moments)) is not None:
        due_ms = int(moment.timestamp()) * 1000
        if due_ms > after_ms:  # in the hour that clocks repeat, the first one found may have passed
            yield due_ms
            after_ms = due_ms


def _simulated(timing: Timing, from_ms: int, *, reverse: bool = False) -> Iterator[datetime]:
    from cronsim import CronSim, CronSimError  # few programs have schedules

    expression = _NAMED.get(timing.cron.strip().lower(), timing.cron)
    try:
        if len(expression.split()) != _FIELDS:
            raise CronSimError("wrong number of fields")
        return CronSim(expression, _moment(from_ms, zone_of(timing.timezone)), reverse=reverse)
    except CronSimError as error:
        reason = str(error)
        raise InvalidRequest(
            f"cron={timing.cron!r} cannot be used: {reason[:1].lower() + reason[1:]}. Give five fields (minute, hour, "
            "day, month, weekday) such as '0 3 * * *', or a name such as '@daily'"
        ) from None


def _next_of(moments: Iterator[datetime]) -> datetime | None:
    try:
        return next(moments, None)
    except (OverflowError, ValueError):  # after the last datetime
        return None


def zone_of(name: str) -> tzinfo:
    """Return the time zone with this name. Raises InvalidRequest if there is none."""
    if name == "UTC":
        return UTC
    from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, TypeError, OSError):
        raise InvalidRequest(
            f"timezone={name!r} is not known here: give an IANA name such as 'Europe/Berlin'. If this machine has no "
            "time zones at all, install the package tzdata"
        ) from None


def _moment(ms: int, zone: tzinfo) -> datetime:
    return datetime.fromtimestamp(ms // 1000, zone)


def next_due(timing: Timing, after_ms: int) -> int | None:
    """Return the first due after a moment; None if there is none."""
    return next(dues(timing, after_ms), None)


def jitter_of(name: str, due_ms: int, jitter_ms: int) -> int:
    """Return how much later than its due a firing happens: always the same for the same due of the same schedule."""
    return crc32c(firing_id(name, due_ms).encode()) % (jitter_ms + 1) if jitter_ms else 0


def firing_id(name: str, due_ms: int) -> str:
    """Return the dedup id of a firing, such as `nightly@2026-11-19T02:00:00Z`."""
    precision = "milliseconds" if due_ms % 1000 else "seconds"
    due = datetime.fromtimestamp(due_ms / 1000, UTC).isoformat(timespec=precision).removesuffix("+00:00")
    return f"{name}@{due}Z"


def wake_ms(name: str, state: ScheduleState) -> int | None:
    """Return when the schedule fires next, jitter included; None if it does not."""
    if state.paused or state.next_ms is None:
        return None
    return state.next_ms + jitter_of(name, state.next_ms, state.jitter_ms)


def plan(name: str, state: ScheduleState, now_ms: int) -> FiringPlan | None:
    """Return what is to be done at this moment; None if nothing is due."""
    ripe_ms = wake_ms(name, state)
    if ripe_ms is None or ripe_ms > now_ms or state.next_ms is None:
        return None
    ripe, count, next_ms = _ripe(name, state, state.next_ms, now_ms)
    fire = ripe[-MOST_CAUGHT_UP:]
    if state.misfire == "run_once":
        fire = ripe[-1:]
    elif state.misfire == "skip":
        fire = [due for due in ripe[-1:] if now_ms - due - jitter_of(name, due, state.jitter_ms) <= ON_TIME_MS]
    left = ripe[: len(ripe) - len(fire)]
    return FiringPlan(tuple(fire), count - len(fire), left[-1] if left else 0, next_ms)


def _ripe(name: str, state: ScheduleState, first_ms: int, now_ms: int) -> tuple[list[int], int, int | None]:
    """Return the newest dues that are ripe, how many are (as far as counted), and the first one that is not."""
    kept: deque[int] = deque(maxlen=MOST_CAUGHT_UP + 1)  # one more than may fire: the last one that is missed
    count = 0
    for due_ms in dues(state.timing, first_ms - 1):
        if due_ms + jitter_of(name, due_ms, state.jitter_ms) > now_ms:
            return list(kept), count, due_ms
        if count == MOST_COUNTED:
            newest = _newest(state.timing, kept[-1], now_ms - state.jitter_ms)
            if newest:
                kept.extend(newest)
            return list(kept), count, next_due(state.timing, kept[-1])
        kept.append(due_ms)
        count += 1
    return list(kept), count, None


def _newest(timing: Timing, after_ms: int, until_ms: int) -> list[int]:
    """Return the last dues up to `until_ms`, without going through all of them."""
    around_ms, margin_ms = _about_so_many_before(timing, after_ms, until_ms), _FIRST_MARGIN_MS
    while True:
        start_ms = max(after_ms, around_ms - margin_ms)
        found: deque[int] = deque(maxlen=MOST_CAUGHT_UP + 1)
        for due_ms in dues(timing, start_ms):
            if due_ms > until_ms:
                break
            found.append(due_ms)
        if len(found) > MOST_CAUGHT_UP or start_ms == after_ms:
            return list(found)
        margin_ms *= _WIDER


def _about_so_many_before(timing: Timing, after_ms: int, until_ms: int) -> int:
    """Return about when the last hundred dues began. Backwards, changes of daylight saving make it inexact."""
    if timing.every_ms:
        return until_ms - MOST_CAUGHT_UP * timing.every_ms
    moments = _simulated(timing, until_ms, reverse=True)
    found_ms = until_ms
    for _ in range(MOST_CAUGHT_UP + 1):
        moment = _next_of(moments)
        if moment is None:
            return after_ms
        found_ms = int(moment.timestamp()) * 1000
        if found_ms <= after_ms:
            break
    return found_ms


def after(state: ScheduleState, firings: list[SettledDue], next_ms: int | None, now_ms: int) -> ScheduleState:
    """Return the schedule after these firings, with its next due."""
    return msgspec.structs.replace(
        state,
        next_ms=next_ms,
        seen_ms=now_ms,
        fired=state.fired + sum(not firing.missed for firing in firings),
        missed=state.missed + sum(firing.missed for firing in firings),
        firings=(*state.firings, *firings)[-_KEPT_FIRINGS:],
        error="",
    )
