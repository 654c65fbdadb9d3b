"""The life of a message, from its trace where it has one, else from the journals: as a page shows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from holdfast.broker import traces
from holdfast.broker.traces import TraceStep
from holdfast.embedded.times import to_datetime

_GOOD: Final = frozenset({traces.ACKED})
_BAD: Final = frozenset({traces.NACKED, traces.BURIED, traces.LOST, traces.EXPIRED})
_MS: Final = 1_000_000


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One step. `tone` is good, bad or empty; `related` is the message that it became, or was."""

    at_ns: int
    name: str
    says: str = ""
    error: str = ""
    tone: str = ""
    related: str = ""
    message: str = ""


def life_of(steps: Sequence[TraceStep]) -> list[Step]:
    """All steps that are known, as they are shown."""
    shown = [_shown(step) for step in steps]
    if len({step.message for step in shown}) <= 1:
        return [msgspec.structs.replace(step, message="") for step in shown]
    return shown


def _shown(step: TraceStep) -> Step:
    facts = [
        f"group {step.group}" if step.group and step.group != "default" else "",
        f"to {step.holder}" if step.step == traces.LEASED else f"by {step.holder}" if step.holder else "",
        f"attempt {step.attempt}" if step.attempt else "",
        step.why if step.why not in ("", step.step) else "",
        f"due {_time(step.due_ms)}" if step.due_ms else "",
        f"lease until {_time(step.until_ms)}" if step.until_ms else "",
    ]
    return Step(
        at_ns=step.at_ns,
        name=step.step,
        says=", ".join(filter(None, facts)),
        error=step.error,
        tone="good" if step.step in _GOOD else "bad" if step.step in _BAD else "",
        related=step.related,
        message=step.id,
    )


def _time(ms: int) -> str:
    return f"{to_datetime(ms * _MS):%H:%M:%S}Z"
