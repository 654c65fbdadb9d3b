"""When schedules fall due, and what follows from the time that has passed: pure."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import islice, pairwise
from zoneinfo import ZoneInfo

import msgspec
import pytest

from holdfast import InvalidRequest, scheduling
from holdfast.scheduling import (
    MOST_CAUGHT_UP,
    MOST_COUNTED,
    ScheduleState,
    Template,
    Timing,
    check_timing,
    dues,
    firing_id,
    jitter_of,
    next_due,
    plan,
    wake_ms,
)

BERLIN, NEW_YORK = "Europe/Berlin", "America/New_York"


def ms(text: str, zone: str = "UTC") -> int:
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=ZoneInfo(zone))
    return round(moment.timestamp() * 1000)


def text(due_ms: int, zone: str) -> str:
    return datetime.fromtimestamp(due_ms / 1000, ZoneInfo(zone)).strftime("%m-%d %H:%M%z")


def found(cron: str, zone: str, after: str, count: int) -> list[str]:
    return [text(due, zone) for due in islice(dues(Timing(cron=cron, timezone=zone), ms(after, zone)), count)]


def state_of(timing: Timing, next_ms: int | None, **options) -> ScheduleState:
    return ScheduleState(timing, Template("jobs", b"go"), next_ms=next_ms, **options)


# Daylight saving


@pytest.mark.parametrize(
    ("zone", "after", "expected"),
    [
        (BERLIN, "2026-03-27T12:00", ["03-28 02:30+0100", "03-29 03:00+0200", "03-30 02:30+0200"]),
        (NEW_YORK, "2026-03-06T12:00", ["03-07 02:30-0500", "03-08 03:00-0400", "03-09 02:30-0400"]),
    ],
)
def test_a_time_that_the_spring_skips_fires_right_after_the_gap(zone, after, expected):
    assert found("30 2 * * *", zone, after, 3) == expected


@pytest.mark.parametrize(
    ("zone", "cron", "after", "expected"),
    [
        (BERLIN, "30 2 * * *", "2026-10-24T12:00", ["10-25 02:30+0200", "10-26 02:30+0100", "10-27 02:30+0100"]),
        (NEW_YORK, "30 1 * * *", "2026-10-31T12:00", ["11-01 01:30-0400", "11-02 01:30-0500", "11-03 01:30-0500"]),
    ],
)
def test_a_time_that_the_autumn_repeats_fires_once(zone, cron, after, expected):
    assert found(cron, zone, after, 3) == expected


@pytest.mark.parametrize(
    ("zone", "after"),
    [
        (BERLIN, "2026-03-29T00:00"),
        (BERLIN, "2026-10-25T00:00"),
        (NEW_YORK, "2026-03-08T00:00"),
        (NEW_YORK, "2026-11-01T00:00"),
    ],
)
def test_every_half_hour_is_every_half_hour_while_the_clocks_change(zone, after):
    moments = list(islice(dues(Timing(cron="*/30 * * * *", timezone=zone), ms(after, zone)), 12))
    assert {later - earlier for earlier, later in pairwise(moments)} == {30 * 60_000}


def test_in_the_repeated_hour_the_first_half_is_not_found_again():
    timing = Timing(cron="30 2 * * *", timezone=BERLIN)
    first = ms("2026-10-25T02:30+02:00")
    for minutes in (0, 15, 30, 45, 60, 75):
        assert next_due(timing, first + minutes * 60_000) == ms("2026-10-26T02:30+01:00")


@pytest.mark.parametrize("zone", [BERLIN, NEW_YORK, "UTC", "Asia/Kolkata", "Australia/Lord_Howe"])
@pytest.mark.parametrize("cron", ["30 2 * * *", "0 * * * *", "*/20 1-3 * * *", "15 1,2,3 * * 0", "0 0 1 * *"])
def test_dues_only_ever_rise_and_do_not_depend_on_where_the_search_begins(zone, cron):
    timing, begin = Timing(cron=cron, timezone=zone), ms("2026-01-01T00:00+00:00")
    whole = list(islice(dues(timing, begin), 2000))
    assert whole == sorted(set(whole))
    for i in range(0, 1990, 37):
        assert next_due(timing, whole[i]) == whole[i + 1]
        assert next_due(timing, whole[i + 1] - 1) == whole[i + 1]


def test_an_interval_does_not_know_of_summer_time():
    timing = Timing(every_ms=3_600_000, anchor_ms=ms("2026-03-29T00:30", BERLIN))
    later = list(islice(dues(timing, timing.anchor_ms), 3))
    assert [text(due, BERLIN) for due in later] == ["03-29 01:30+0100", "03-29 03:30+0200", "03-29 04:30+0200"]


# The calendar


def test_the_leap_day():
    assert found("0 12 29 2 *", BERLIN, "2026-01-01T00:00", 2) == ["02-29 12:00+0100", "02-29 12:00+0100"]
    years = [
        datetime.fromtimestamp(due / 1000, UTC).year
        for due in islice(dues(Timing(cron="0 12 29 2 *"), ms("2026-01-01T00:00")), 3)
    ]
    assert years == [2028, 2032, 2036]


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin"])
def test_dues_end_with_the_last_datetime(zone):
    ahead = list(dues(Timing(cron="0 0 * 2 mon#5", timezone=zone), ms("2026-01-01T00:00")))
    assert 100 < len(ahead) < 1_000
    assert ahead[-1] < ms("9999-12-31T23:00")
    assert list(dues(Timing(every_ms=3_600_000), ms("9999-12-31T22:30"))) == [ms("9999-12-31T23:00")]


def test_the_end_of_the_month():
    last = found("0 0 L * *", "UTC", "2028-01-01T00:00", 4)
    assert [day[:5] for day in last] == ["01-31", "02-29", "03-31", "04-30"]
    longest = found("0 0 31 * *", "UTC", "2026-01-01T00:00", 4)
    assert [day[:5] for day in longest] == ["01-31", "03-31", "05-31", "07-31"]


def test_names_of_days_months_and_common_expressions():
    assert found("0 9 * JAN mon-fri", "UTC", "2026-01-02T10:00", 2) == ["01-05 09:00+0000", "01-06 09:00+0000"]
    assert found("@daily", BERLIN, "2026-01-02T10:00", 1) == ["01-03 00:00+0100"]
    assert found("@hourly", "UTC", "2026-01-02T10:00", 1) == ["01-02 11:00+0000"]


@pytest.mark.parametrize(
    ("timing", "why"),
    [
        (Timing(cron="61 * * * *"), "bad minute"),
        (Timing(cron="* * * *"), "five fields"),
        (Timing(cron="* * * * * *"), "five fields"),
        (Timing(cron="every day"), "five fields"),
        (Timing(cron="0 0 31 2 *"), "bad day-of-month"),
        (Timing(cron="0 0 * * *", timezone="Mars/Olympus"), "IANA"),
        (Timing(cron="0 0 * * *", timezone="Europe"), "IANA"),
        (Timing(cron="0 0 * * *", timezone="../../etc/passwd"), "IANA"),
        (Timing(at_ms=1), "has passed"),
    ],
)
def test_what_cannot_be_understood_is_refused_in_one_sentence(timing, why):
    with pytest.raises(InvalidRequest, match=why) as refused:
        check_timing(timing, ms("2026-01-01T00:00"))
    assert "Traceback" not in str(refused.value)
    assert len(str(refused.value)) < 250


# Ids and jitter


def test_the_id_of_a_firing_is_its_due_in_utc():
    assert firing_id("nightly", ms("2026-11-19T03:00", BERLIN)) == "nightly@2026-11-19T02:00:00Z"
    assert firing_id("beat", ms("2026-11-19T03:00:00.250+00:00")) == "beat@2026-11-19T03:00:00.250Z"


def test_jitter_is_the_same_for_everybody_and_spreads_schedules():
    at, hour = ms("2026-01-01T00:00"), 3_600_000
    jitters = [jitter_of(f"job-{i}", at, hour) for i in range(300)]
    assert jitters == [jitter_of(f"job-{i}", at, hour) for i in range(300)]
    assert min(jitters) >= 0
    assert max(jitters) <= hour
    assert min(jitters) < hour // 10
    assert max(jitters) > hour - hour // 10
    assert jitter_of("job", at, 0) == 0
    state = state_of(Timing(every_ms=hour, anchor_ms=at), at, jitter_ms=hour)
    assert wake_ms("job-1", state) == at + jitters[1]
    assert plan("job-1", state, at + jitters[1] - 1) is None
    assert plan("job-1", state, at + jitters[1]).fire == (at,)


# Misfires


MINUTE = 60_000
AT = ms("2026-01-01T00:00")
EVERY = Timing(every_ms=MINUTE, anchor_ms=AT)


def test_what_is_due_on_time_fires_by_every_policy():
    for misfire in ("run_once", "skip", "all"):
        planned = plan("job", state_of(EVERY, AT, misfire=misfire), AT + 10)
        assert planned == ((AT,), 0, 0, AT + MINUTE)


def test_after_an_outage_run_once_fires_the_last_due():
    planned = plan("job", state_of(EVERY, AT), AT + 10 * MINUTE + 5_000)
    assert planned.fire == (AT + 10 * MINUTE,)
    assert (planned.missed, planned.last_missed_ms, planned.next_ms) == (10, AT + 9 * MINUTE, AT + 11 * MINUTE)


def test_after_an_outage_skip_fires_only_what_is_still_on_time():
    daily = Timing(cron="0 3 * * *")
    first = next_due(daily, AT)
    late = plan("job", state_of(daily, first, misfire="skip"), first + 2 * 86_400_000 + 3_600_000)
    assert (late.fire, late.missed, late.last_missed_ms) == ((), 3, first + 2 * 86_400_000)
    assert late.next_ms == first + 3 * 86_400_000
    in_time = plan("job", state_of(daily, first, misfire="skip"), first + 2 * 86_400_000 + 30_000)
    assert (in_time.fire, in_time.missed) == ((first + 2 * 86_400_000,), 2)


def test_after_an_outage_all_fires_each_up_to_a_hundred():
    few = plan("job", state_of(EVERY, AT, misfire="all"), AT + 3 * MINUTE)
    assert few.fire == (AT, AT + MINUTE, AT + 2 * MINUTE, AT + 3 * MINUTE)
    assert few.missed == 0
    many = plan("job", state_of(EVERY, AT, misfire="all"), AT + 500 * MINUTE)
    assert many.fire == tuple(AT + i * MINUTE for i in range(401, 501))
    assert (many.missed, many.last_missed_ms) == (401, AT + 400 * MINUTE)


@pytest.mark.parametrize("timing", [EVERY, Timing(cron="* * * * *", timezone=BERLIN)])
@pytest.mark.parametrize("misfire", ["run_once", "skip", "all"])
def test_a_year_of_missed_minutes_is_settled_at_once(timing, misfire):
    now = AT + 365 * 86_400_000
    planned = plan("job", state_of(timing, AT, misfire=misfire), now)
    assert planned.fire[-1] == now
    assert len(planned.fire) == (MOST_CAUGHT_UP if misfire == "all" else 1)
    assert planned.missed == MOST_COUNTED - len(planned.fire)
    assert planned.next_ms == now + MINUTE


def test_an_outage_is_settled_at_once_though_the_last_dues_are_many_and_long_ago(monkeypatch):
    looked = []
    next_of = scheduling._next_of
    monkeypatch.setattr(scheduling, "_next_of", lambda moments: (looked.append(1), next_of(moments))[1])
    january = Timing(cron="* * * 1 *", timezone=BERLIN)
    planned = plan("job", state_of(january, ms("2024-01-01T00:00", BERLIN), misfire="all"), ms("2026-11-01T00:00"))
    last = ms("2026-01-31T23:59", BERLIN)
    assert planned.fire == tuple(last - i * MINUTE for i in reversed(range(100)))
    assert planned.next_ms == ms("2027-01-01T00:00", BERLIN)
    assert len(looked) < 2_000


def test_a_one_time_schedule_fires_late_rather_than_never_but_not_with_skip():
    once = Timing(at_ms=AT)
    assert plan("job", state_of(once, AT), AT - 1) is None
    assert plan("job", state_of(once, AT), AT + 86_400_000) == ((AT,), 0, 0, None)
    assert plan("job", state_of(once, AT, misfire="skip"), AT + 86_400_000) == ((), 1, AT, None)


def test_a_paused_or_finished_schedule_plans_nothing():
    assert plan("job", state_of(EVERY, AT, paused=True), AT + 10 * MINUTE) is None
    assert plan("job", state_of(Timing(at_ms=AT), None), AT + 10 * MINUTE) is None


def test_a_stored_schedule_reads_back():
    state = state_of(Timing(cron="0 3 * * *", timezone=BERLIN), AT, misfire="all", jitter_ms=5, paused=True)
    assert msgspec.json.decode(msgspec.json.encode(state), type=ScheduleState) == state


def test_the_same_interval_counts_as_the_same_schedule_whenever_it_began():
    other = state_of(EVERY.starting(AT + 123), AT)
    assert state_of(EVERY, AT).is_same(other)
    assert not state_of(EVERY, AT).is_same(msgspec.structs.replace(other, jitter_ms=1))
