"""The arithmetic: medians, spread, and ratios to ours."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from bench.harness import OURS, Outcome


@dataclass(frozen=True)
class Summary:
    """A contestant's rounds in a few figures; times are nanoseconds for each message.

    Of a latency the median over the rounds is that of each round's p50, and `p99_ns` that of each round's p99.
    """

    messages: int
    seconds: float
    median_ns: float
    min_ns: float
    max_ns: float
    cpu_ns: float
    ratio: float | None = None
    """How many times our time it took: 2.0 is twice as slow as ours, 0.5 twice as fast."""
    p99_ns: float | None = None
    anon_bytes: int | None = None
    worker_cpu_ns: float | None = None

    @property
    def messages_per_second(self) -> float:
        return 1e9 / self.median_ns


def summaries(outcomes: Iterable[Outcome]) -> dict[str, Summary]:
    """By contestant, for the measured outcomes of one operation."""
    measured = {o.case.contestant: o for o in outcomes if o.status == "measured" and o.samples}
    ours = measured.get(OURS)
    return {name: _summary(outcome, ours) for name, outcome in measured.items()}


def _summary(outcome: Outcome, ours: Outcome | None) -> Summary:
    each_ns = _each_ns(outcome)
    return Summary(
        messages=round(median(s.messages for s in outcome.samples)),
        seconds=median(s.seconds for s in outcome.samples),
        median_ns=median(each_ns),
        min_ns=min(each_ns),
        max_ns=max(each_ns),
        cpu_ns=median(1e9 * s.cpu_seconds / s.messages for s in outcome.samples),
        ratio=_ratio(outcome, ours),
        p99_ns=_median_of(s.p99_ns for s in outcome.samples),
        anon_bytes=_most_of(s.anon_bytes for s in outcome.samples),
        worker_cpu_ns=_median_of(
            None if s.worker_cpu_seconds is None else 1e9 * s.worker_cpu_seconds / s.messages for s in outcome.samples
        ),
    )


def _each_ns(outcome: Outcome) -> list[float]:
    """By message; of a latency the median of each round."""
    return [1e9 * s.seconds / s.messages if s.p50_ns is None else s.p50_ns for s in outcome.samples]


def _median_of(figures: Iterable[float | None]) -> float | None:
    known = [figure for figure in figures if figure is not None]
    return median(known) if known else None


def _most_of(figures: Iterable[int | None]) -> int | None:
    return max((figure for figure in figures if figure is not None), default=None)


def _ratio(outcome: Outcome, ours: Outcome | None) -> float | None:
    if ours is None or outcome.case.operation.measures in ("memory", "idle"):  # not a time
        return None
    if outcome.case.operation.measures != "opening":
        return median(_each_ns(outcome)) / median(_each_ns(ours))
    # Openings are compared only where both hold as much; a small store that opens fast proves nothing.
    held, our_held = outcome.samples[0].messages, ours.samples[0].messages
    if abs(held - our_held) > 0.02 * our_held:
        return None
    return median(s.seconds for s in outcome.samples) / median(s.seconds for s in ours.samples)
