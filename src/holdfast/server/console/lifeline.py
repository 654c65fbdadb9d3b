"""The life of a message: from its trace where it has one, else from what is kept with the message itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from holdfast.broker import traces
from holdfast.broker.traces import TraceStep
from holdfast.embedded.listed import DeadLetter, Listed, Waiting
from holdfast.embedded.times import to_datetime
from holdfast.server.console.finding import ends_ms

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


def life_of(found: Listed[Any], traced: Sequence[TraceStep]) -> list[Step]:
    """All steps that are known, in the order of time."""
    steps = [_traced(step) for step in traced] if traced else sorted(_kept(found), key=lambda step: step.at_ns)
    if len({step.message for step in steps}) <= 1:
        return [msgspec.structs.replace(step, message="") for step in steps]
    return steps


def _traced(step: TraceStep) -> Step:
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


def _kept(found: Listed[Any]) -> Iterator[Step]:
    """What the message, its group and its grave remember."""
    if isinstance(found, DeadLetter):
        note = found._stored.note
        yield Step(at_ns=note.timestamp_ns, name="published", says=found.original_id)
        yield from map(_failure, found.failures)
        says = f"{found.reason}, after {_attempts(found.attempts)}"
        yield Step(at_ns=note.dead_at_ms * _MS, name="buried", says=says, tone="bad")
        return
    yield Step(at_ns=found.timestamp_ns, name="published")
    if isinstance(found, Waiting):
        yield Step(at_ns=found._due_ms * _MS, name="due", says="not in the log before that")
        return
    group = found._home.delivery.group
    history = group.histories.get(found.offset)
    yield from map(_failure, () if history is None else history.failures)
    lease = group.leases.get(found.offset)
    if lease is not None:
        until = f"to {lease.holder}, lease until {_time(ends_ms(found._home, lease))}"
        yield Step(at_ns=lease.at_ms * _MS, name="leased", says=until)
    if found.phase == "delayed" and found.due_at is not None:
        yield Step(at_ns=round(found.due_at.timestamp() * 1e9), name="comes again")


def _failure(failure: Any) -> Step:
    says = ", ".join(filter(None, [f"by {failure.holder}" if failure.holder else "", failure.why]))
    return Step(at_ns=failure.at_ms * _MS, name="failed", says=says, error=failure.error, tone="bad")


def _attempts(number: int) -> str:
    return f"{number} attempt" if number == 1 else f"{number} attempts"


def _time(ms: int) -> str:
    return f"{to_datetime(ms * _MS):%H:%M:%S}Z"
