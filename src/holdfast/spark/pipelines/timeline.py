"""Time cut into equal steps, for plots: which step fits a span, and rows by series with no step left out."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from pyspark.sql import Column

OTHERS: Final = "all others"

_STEPS_S: Final = (10, 60, 300, 900, 3_600, 10_800, 43_200, 86_400, 604_800, 2_592_000)
_MOST_STEPS: Final = 96

Value = TypeVar("Value")


def step_for(first: datetime, last: datetime) -> int:
    """Seconds of a step, so that the span has not more of them than a plot can show."""
    span_s = (last - first).total_seconds()
    return next((step for step in _STEPS_S if span_s / step < _MOST_STEPS), _STEPS_S[-1])


def in_steps(moment: Column, step_s: int) -> Column:
    """The beginning of the step that each moment of a column lies in."""
    from pyspark.sql import functions as f

    return f.timestamp_seconds(f.floor(f.unix_micros(moment) / (step_s * 1_000_000)) * step_s)


def steps_between(first: datetime, last: datetime, step_s: int) -> list[datetime]:
    """Every step from the one of `first` to the one of `last`."""
    start = int(first.timestamp() // step_s)
    end = int(last.timestamp() // step_s)
    return [datetime.fromtimestamp(start * step_s, UTC) + timedelta(seconds=n * step_s) for n in range(end - start + 1)]


def spread(
    rows: Iterable[tuple[datetime, str, Value]], times: list[datetime], names: Iterable[str], missing: Value
) -> dict[str, list[Value]]:
    """The values of each name at each time; `missing` where there is none."""
    places = {time: place for place, time in enumerate(times)}
    found = {name: [missing] * len(times) for name in names}
    for time, name, value in rows:
        if name in found and time in places:
            found[name][places[time]] = value
    return found


def utc(moment: datetime) -> datetime:
    """Spark hands moments over in the zone of this machine, without naming it."""
    return moment.astimezone(UTC)
