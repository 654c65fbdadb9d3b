"""What many steps add up to: how long messages waited and were worked on, how often they were tried, what failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

import msgspec

from holdfast.broker.metrics import Histogram, Times
from holdfast.broker.traces import ACKED, BURIED, LEASED, NACKED, PUBLISHED, RELEASED, RETURNED, TraceStep

_MOST_ERRORS: Final = 20
_ENDS: Final = frozenset({ACKED, NACKED, RETURNED, BURIED})


class TraceStats(msgspec.Struct, frozen=True, kw_only=True):
    """Steps in numbers. Times are in seconds; `attempts` says how many messages were done after how many."""

    messages: int
    steps: dict[str, int]
    first_delivery: Times
    handling: Times
    attempts: dict[int, int]
    errors: list[tuple[str, int]]


def stats(steps: Iterable[TraceStep]) -> TraceStats:
    """The numbers of these steps, which are in the order of time; what began before the first of them is not timed.

    A message is first ready when it was published, or released from its delay. Handling is from a lease to its end,
    whichever way it ends.
    """
    messages: set[str] = set()
    counts: Counter[str] = Counter()
    attempts: Counter[int] = Counter()
    errors: Counter[str] = Counter()
    ready_at: dict[str, int] = {}
    leased_at: dict[tuple[str, str], int] = {}
    first_delivery, handling = Histogram(), Histogram()
    for step in steps:
        messages.add(step.id)
        counts[step.step] += 1
        if step.error:
            errors[step.error] += 1
        if step.step == PUBLISHED or (step.step == RELEASED and not step.group):
            ready_at[step.id] = step.at_ns
        elif step.step == LEASED:
            leased_at[step.id, step.group] = step.at_ns
            if step.attempt == 1 and step.id in ready_at:
                first_delivery.observe_ns(step.at_ns - ready_at[step.id])
        elif step.step in _ENDS:
            since = leased_at.pop((step.id, step.group), None)
            if since is not None:
                handling.observe_ns(step.at_ns - since)
            if step.step in (ACKED, BURIED):
                attempts[step.attempt] += 1
    return TraceStats(
        messages=len(messages),
        steps=dict(counts.most_common()),
        first_delivery=first_delivery.snapshot(),
        handling=handling.snapshot(),
        attempts=dict(sorted(attempts.items())),
        errors=errors.most_common(_MOST_ERRORS),
    )
