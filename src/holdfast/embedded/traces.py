"""What users ask of traces, with their times and limits checked; the same for threads and for tasks."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, Final

from holdfast.broker.broker import BrokerEngine
from holdfast.broker.trace_log import Search
from holdfast.broker.trace_stats import TraceStats
from holdfast.broker.traces import TraceStep
from holdfast.embedded.times import duration_ms, instant_ns
from holdfast.errors import InvalidRequest

_MOST_STEPS: Final = 1_000_000


def search_traces(
    engine: BrokerEngine,
    *,
    topic: str | None,
    group: str | None,
    event: str | None,
    holder: str | None,
    error: str | None,
    since: datetime | timedelta | None,
    until: datetime | timedelta | None,
    limit: int,
    last: bool,
) -> list[TraceStep]:
    """The oldest steps that fit, or the newest ones, oldest first."""
    wanted = _search(engine, since, until, topic=topic, group=group, event=event, holder=holder, error=error)
    if type(limit) is not int or not 1 <= limit <= _MOST_STEPS:
        raise InvalidRequest(f"limit={limit!r} cannot be used: give a whole number from 1 to {_MOST_STEPS}")
    if type(last) is not bool:
        raise InvalidRequest(f"last={last!r} cannot be used: give True or False")
    engine.check_open()
    return engine.traces.search(wanted, limit, last=last)


def trace_stats(
    engine: BrokerEngine,
    *,
    topic: str | None,
    since: datetime | timedelta | None,
    until: datetime | timedelta | None,
) -> TraceStats:
    """What the steps of a topic and a time add up to."""
    wanted = _search(engine, since, until, topic=topic)
    engine.check_open()
    return engine.traces.stats(wanted)


def _search(engine: BrokerEngine, since: object, until: object, **wanted: Any) -> Search:
    now_ns = engine.world.clock.now_ns()
    times: dict[str, Any] = {
        "since_ns": _moment_ns(since, "since", now_ns),
        "until_ns": _moment_ns(until, "until", now_ns),
    }
    return Search(**{name: value for name, value in times.items() if value is not None}, **wanted)


def _moment_ns(value: Any, name: str, now_ns: int) -> int | None:
    """A moment, or a length of time: so long ago."""
    if value is None:
        return None
    if isinstance(value, timedelta):
        return now_ns - duration_ms(value, name) * 1_000_000
    return instant_ns(value, name)
