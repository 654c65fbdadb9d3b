"""What users ask of traces, with their times and limits checked: the same for threads and for tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any, Final, TypeAlias

import msgspec

from holdfast.api.times import duration_ms, instant_ns
from holdfast.broker.engine import BrokerEngine
from holdfast.broker.tracing.log import Search, TraceStats
from holdfast.broker.tracing.steps import TraceStep
from holdfast.errors import InvalidRequest

When: TypeAlias = datetime | timedelta

_MOST_STEPS: Final = 1_000_000


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A search as it was asked."""

    topic: str | None = None
    group: str | None = None
    event: str | None = None
    holder: str | None = None
    error: str | None = None
    since: When | None = None
    until: When | None = None


class TraceFace:
    """A broker's traces, for threads."""

    _engine: BrokerEngine

    def trace(self, message_id: str) -> list[TraceStep]:
        """The life of a message step by step, with that of the messages that it was redriven into or out of.

        It is empty where the message was not sampled; see the topic's setting trace_sample.
        """
        return self._engine.trace(message_id)

    def search_traces(
        self,
        *,
        topic: str | None = None,
        group: str | None = None,
        event: str | None = None,
        holder: str | None = None,
        error: str | None = None,
        since: When | None = None,
        until: When | None = None,
        limit: int = 100,
        last: bool = False,
    ) -> list[TraceStep]:
        """The steps that fit, oldest first: the first `limit` of them, or the last. A time may be "so long ago"."""
        question = Question(topic=topic, group=group, event=event, holder=holder, error=error, since=since, until=until)
        return search_in(self._engine, question, limit, last)

    def trace_stats(
        self, *, topic: str | None = None, since: When | None = None, until: When | None = None
    ) -> TraceStats:
        """How long messages waited and were worked on, how often they were tried, what failed."""
        return stats_in(self._engine, Question(topic=topic, since=since, until=until))


class AsyncTraceFace:
    """A broker's traces, for tasks."""

    _engine: BrokerEngine

    async def trace(self, message_id: str) -> list[TraceStep]:
        """The life of a message step by step, with that of the messages that it was redriven into or out of.

        It is empty where the message was not sampled; see the topic's setting trace_sample.
        """
        return await asyncio.to_thread(self._engine.trace, message_id)

    async def search_traces(
        self,
        *,
        topic: str | None = None,
        group: str | None = None,
        event: str | None = None,
        holder: str | None = None,
        error: str | None = None,
        since: When | None = None,
        until: When | None = None,
        limit: int = 100,
        last: bool = False,
    ) -> list[TraceStep]:
        """The steps that fit, oldest first: the first `limit` of them, or the last. A time may be "so long ago"."""
        question = Question(topic=topic, group=group, event=event, holder=holder, error=error, since=since, until=until)
        return await asyncio.to_thread(search_in, self._engine, question, limit, last)

    async def trace_stats(
        self, *, topic: str | None = None, since: When | None = None, until: When | None = None
    ) -> TraceStats:
        """How long messages waited and were worked on, how often they were tried, what failed."""
        return await asyncio.to_thread(stats_in, self._engine, Question(topic=topic, since=since, until=until))


def search_in(engine: BrokerEngine, question: Question, limit: object, last: object) -> list[TraceStep]:
    """The steps that fit."""
    if type(limit) is not int or not 1 <= limit <= _MOST_STEPS:
        raise InvalidRequest(f"limit={limit!r} cannot be used: give a whole number from 1 to {_MOST_STEPS}")
    if not isinstance(last, bool):
        raise InvalidRequest(f"last={last!r} cannot be used: give True or False")
    wanted = _wanted(engine, question)
    engine.check_open()
    return engine.traces.search(wanted, limit, last=last)


def steps_in(engine: BrokerEngine, question: Question, after: int, look: Callable[[int], None]) -> Iterator[TraceStep]:
    """The steps that fit, behind a place; each place is told to `look` before it is looked at."""
    wanted = _wanted(engine, question)
    engine.check_open()
    return engine.traces.steps(wanted, after, look)


def stats_in(engine: BrokerEngine, question: Question) -> TraceStats:
    """The steps that fit, in numbers."""
    wanted = _wanted(engine, question)
    engine.check_open()
    return engine.traces.stats(wanted)


def _wanted(engine: BrokerEngine, question: Question) -> Search:
    wanted: dict[str, Any] = {
        name: value for name, value in msgspec.structs.asdict(question).items() if value is not None
    }
    for name in ("since", "until"):
        if name in wanted:
            wanted[f"{name}_ns"] = _moment_ns(wanted.pop(name), name, engine.world.clock.now_ns())
    return Search(**wanted)


def _moment_ns(value: When, name: str, now_ns: int) -> int:
    """A moment; a length of time is so long ago."""
    if isinstance(value, timedelta):
        return now_ns - duration_ms(value, name) * 1_000_000
    return instant_ns(value, name)
