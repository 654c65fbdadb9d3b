"""Traces that an engine keeps, asked as users ask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from holdfast.api.traces import Question, moment_ns
from holdfast.broker.engine import BrokerEngine
from holdfast.broker.tracing.log import Search, TraceStats, TraceStep


def search_in(engine: BrokerEngine, question: Question, limit: int, *, last: bool) -> list[TraceStep]:
    """The steps that fit."""
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
            wanted[f"{name}_ns"] = moment_ns(wanted.pop(name), name, engine.world.clock.now_ns())
    return Search(**wanted)
