"""Durations and instants: exact where they can be, never early, and refused with the argument's name."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.api.drafts import (
    MAX_DURATION_MS,
    due_at_ms,
    duration_ms,
    instant_ms,
    instant_ns,
    parse_duration,
    parse_instant,
    to_datetime,
)
from holdfast.errors import InvalidRequest

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
NOW = datetime(2026, 11, 16, 10, tzinfo=UTC)
NOW_MS = 1_794_823_200_000
NOW_NS = NOW_MS * 1_000_000
CENTURY_S = MAX_DURATION_MS // 1000


@pytest.mark.parametrize(
    ("value", "ms"),
    [
        (0, 0),
        (0.0, 0),
        (-0.0, 0),
        (timedelta(0), 0),
        (30, 30_000),
        (2.5, 2_500),
        (0.07, 70),  # as a float a little more than 70 ms: not 71
        (0.1 + 0.2, 300),
        (1.001, 1_001),
        (0.0001, 1),
        (1e-12, 1),
        (5e-324, 1),
        (0.0010001, 2),
        (timedelta(microseconds=1), 1),
        (timedelta(milliseconds=5), 5),
        (timedelta(milliseconds=5, microseconds=1), 6),
        (timedelta(days=1), 86_400_000),
        (CENTURY_S, MAX_DURATION_MS),
        (float(CENTURY_S), MAX_DURATION_MS),
    ],
)
def test_a_duration_becomes_whole_milliseconds_rounded_up(value: float | timedelta, ms: int):
    found = duration_ms(value, "delay")
    assert (found, type(found)) == (ms, int)


@given(st.floats(0, CENTURY_S) | st.integers(0, CENTURY_S))
def test_a_duration_is_never_early_and_at_most_a_millisecond_late(seconds: float):
    found_s = Fraction(duration_ms(seconds, "delay"), 1000)
    # Half a nanosecond is what a float of this size does not know anyway, or less than any clock shows.
    slack_s = Fraction(1, 2 * 10**9) + Fraction(math.ulp(float(seconds)))
    assert Fraction(seconds) - slack_s <= found_s < Fraction(seconds) + Fraction(1, 1000) + slack_s


@given(st.timedeltas(timedelta(0), timedelta(days=36_500)))
def test_a_timedelta_is_exact(value: timedelta):
    found = timedelta(milliseconds=duration_ms(value, "delay"))
    assert value <= found < value + timedelta(milliseconds=1)


NO_DURATIONS: list[Any] = [
    True,
    False,
    "5",
    b"5",
    None,
    [5],
    5j,
    Decimal(5),
    datetime(2026, 1, 1, tzinfo=UTC),
    math.nan,
    math.inf,
    -math.inf,
    -1,
    -0.0001,
    -5e-324,
    -1e300,
    timedelta(microseconds=-1),
    timedelta.min,
    timedelta.max,
    CENTURY_S + 1,
    CENTURY_S + 0.0011,
    1e300,
    10**5000,  # has no repr
]


@pytest.mark.parametrize("value", NO_DURATIONS, ids=lambda value: type(value).__name__)
def test_what_is_no_duration_is_refused_with_its_name_and_what_is_allowed(value: Any):
    with pytest.raises(InvalidRequest) as caught:
        duration_ms(value, "lease")
    text = str(caught.value)
    assert text.startswith("lease=")
    assert "seconds as a number, or a timedelta, from 0 s to 100 years" in text
    assert len(text) < 250


def test_the_refused_value_is_shown():
    with pytest.raises(InvalidRequest, match=r"^ttl=-2\.5 cannot be used"):
        duration_ms(-2.5, "ttl")


def test_limits_are_kept_and_named():
    limits = {"minimum_ms": 100, "maximum_ms": 43_200_000}
    assert duration_ms(0.1, "lease", **limits) == 100
    assert duration_ms(43_200, "lease", **limits) == 43_200_000
    for value in (0.099, 0, 43_200.001):
        with pytest.raises(InvalidRequest, match=r"from 0\.1 s to 43200 s"):
            duration_ms(value, "lease", **limits)


@pytest.mark.parametrize(
    ("value", "ms"),
    [
        (EPOCH, 0),
        (NOW, NOW_MS),
        (NOW.astimezone(timezone(timedelta(hours=5, minutes=30))), NOW_MS),
        (NOW + timedelta(microseconds=1), NOW_MS + 1),
        (NOW + timedelta(microseconds=1000), NOW_MS + 1),
        (EPOCH - timedelta(milliseconds=1), -1),
    ],
)
def test_an_instant_becomes_whole_milliseconds_rounded_up(value: datetime, ms: int):
    assert instant_ms(value, "at") == ms


class NoZone(tzinfo):
    """A zone that does not know its offset: Python calls such a datetime naive."""

    def utcoffset(self, _moment: datetime | None) -> None:
        return None


@pytest.mark.parametrize("value", [datetime(2026, 1, 1), datetime(2026, 1, 1, tzinfo=NoZone())])
def test_a_naive_datetime_is_refused_with_a_hint(value: datetime):
    with pytest.raises(InvalidRequest, match=r"^at=.*has no time zone.*datetime\.now\(timezone\.utc\)"):
        instant_ms(value, "at")


@pytest.mark.parametrize("value", [None, 5, 1.5, "2026-11-16T10:00:00Z", date(2026, 1, 1), timedelta(1)])
def test_what_is_no_datetime_is_refused(value: Any):
    with pytest.raises(InvalidRequest, match=r"^time=.*give an aware datetime"):
        instant_ms(value, "time")


ZONES = st.timedeltas(timedelta(hours=-23, minutes=-59), timedelta(hours=23, minutes=59)).map(timezone)


@given(st.datetimes(timezones=ZONES))
@example(datetime.min.replace(tzinfo=timezone(timedelta(hours=14))))
@example(datetime.max.replace(tzinfo=timezone(timedelta(hours=-12))))
def test_every_aware_datetime_is_an_instant(value: datetime):
    found_ns = instant_ns(value, "time")
    assert found_ns % 1000 == 0
    assert instant_ms(value, "time") == math.ceil(Fraction(found_ns, 10**6))


@given(st.datetimes(timezones=st.just(UTC)))
def test_a_moment_in_utc_goes_to_nanoseconds_and_back_unchanged(value: datetime):
    assert to_datetime(instant_ns(value, "time")) == value


@given(st.integers(-(2**63), 2**64 - 1))
def test_any_64_bit_time_has_a_datetime_exact_to_the_microsecond(time_ns: int):
    value = to_datetime(time_ns)
    assert value.utcoffset() == timedelta(0)
    assert 0 <= time_ns - instant_ns(value, "time") < 1000


def test_a_message_is_due_at_once_without_delay_or_when_its_time_has_passed():
    assert due_at_ms(None, None, NOW_NS) == 0
    assert due_at_ms(0, None, NOW_NS) == 0
    assert due_at_ms(None, NOW - timedelta(days=1), NOW_NS) == 0
    assert due_at_ms(None, NOW, NOW_NS) == 0
    assert due_at_ms(None, EPOCH - timedelta(days=1), NOW_NS) == 0


def test_a_delay_counts_from_now_and_an_instant_from_itself():
    assert due_at_ms(2.5, None, NOW_NS) == NOW_MS + 2_500
    assert due_at_ms(timedelta(microseconds=1), None, NOW_NS) == NOW_MS + 1
    assert due_at_ms(None, NOW + timedelta(microseconds=1), NOW_NS) == NOW_MS + 1
    assert due_at_ms(None, NOW + timedelta(days=400), NOW_NS) == NOW_MS + 400 * 86_400_000


def test_a_message_is_due_not_even_part_of_a_millisecond_early():
    assert due_at_ms(2.5, None, NOW_NS + 1) == NOW_MS + 2_501
    assert due_at_ms(2.5, None, NOW_NS + 999_999) == NOW_MS + 2_501
    assert due_at_ms(None, NOW + timedelta(microseconds=2), NOW_NS + 1_999) == NOW_MS + 1


def test_delay_and_at_together_are_refused():
    with pytest.raises(InvalidRequest, match=r"delay=0 and at=.* both given: choose one"):
        due_at_ms(0, NOW, NOW_NS)


@pytest.mark.parametrize(("delay", "at", "name"), [(-1, None, "delay"), (None, datetime(2026, 1, 1), "at")])
def test_a_bad_delay_or_at_is_named(delay: Any, at: Any, name: str):
    with pytest.raises(InvalidRequest, match=f"^{name}="):
        due_at_ms(delay, at, NOW_NS)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0),
        ("2.5", 2.5),
        ("30", 30),
        ("500ms", 0.5),
        ("30s", 30),
        ("5m", 300),
        ("1h30m", 5_400),
        ("1.5h", 5_400),
        ("7d", 604_800),
        ("1w2d3h4m5s6ms", 788_645.006),
        ("36500d", CENTURY_S),
    ],
)
def test_a_duration_on_the_command_line(text: str, seconds: float):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    ["", " ", "m", "-5m", "-1", "+1", "5 m", "30m1h", "5x", "1e3", "nan", "inf", "٣", "36501d", "9" * 400, "1_000"],
)
def test_what_is_no_duration_on_the_command_line_is_refused(text: str):
    with pytest.raises(InvalidRequest, match=r"^--lease .* cannot be used: write seconds \(2\.5\) or units"):
        parse_duration(text, "--lease")


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2026-11-16T10:00:00Z", NOW),
        ("2026-11-16T12:00:00+02:00", NOW),
        ("2026-11-16 10:00", NOW),
        ("2026-11-16T10:00:00.000001Z", NOW + timedelta(microseconds=1)),
        ("2026-11-16", NOW - timedelta(hours=10)),
        ("20261116", NOW - timedelta(hours=10)),
        ("now", NOW),
        ("-10m", NOW - timedelta(minutes=10)),
        ("+1h30m", NOW + timedelta(minutes=90)),
        ("-500ms", NOW - timedelta(milliseconds=500)),
        ("1794823200", NOW),
        ("1794823200.25", NOW + timedelta(milliseconds=250)),
        ("0", EPOCH),
    ],
)
def test_a_moment_on_the_command_line(text: str, moment: datetime):
    found = parse_instant(text, NOW_MS)
    assert found == moment
    assert found.tzinfo is UTC


@pytest.mark.parametrize(
    "text",
    [
        "",
        "yesterday",
        "-",
        "-10",
        "--10m",
        "10m",
        "-9999999w",
        "2026-13-01",
        "20261399",
        "1794823200000",  # milliseconds, which are no seconds
        "9" * 400,
        "0001-01-01T00:00:00+10:00",
        "2026-11-16T10:00:00Z\udcff",
    ],
)
def test_what_is_no_moment_on_the_command_line_is_refused(text: str):
    with pytest.raises(InvalidRequest, match=r"^--from .* cannot be used: write a time"):
        parse_instant(text, NOW_MS, "--from")


SHORT_TEXTS = st.text(alphabet="0123456789.:-+TZWwdhms now") | st.text()


@given(SHORT_TEXTS)
def test_any_text_is_read_or_refused_and_nothing_else(text: str):
    for parse in (parse_duration, lambda given: parse_instant(given, NOW_MS)):
        try:
            parse(text)
        except InvalidRequest as error:
            assert "cannot be used" in str(error)
