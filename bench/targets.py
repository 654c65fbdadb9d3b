"""The figures to reach (docs: DESIGN, section 8), beside the figures that were measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from bench.harness import OURS
from bench.scale import Scale
from bench.stats import Summary

Summaries: TypeAlias = Mapping[str, Summary]


@dataclass(frozen=True)
class Target:
    """A figure for one of our rows; `reached` answers None where this run cannot tell."""

    operation: str
    contestant: str
    text: str
    reached: Callable[[Summaries], bool | None]


@dataclass(frozen=True)
class Verdict:
    """A target, and whether this run reached it."""

    text: str
    reached: bool | None

    def __str__(self) -> str:
        word = {True: "reached", False: "NOT reached", None: "not judged in this run"}[self.reached]
        return f"{self.text}: {word}"


def _at_most_ns(limit: float, contestant: str = OURS) -> Callable[[Summaries], bool | None]:
    return lambda found: found[contestant].median_ns <= limit


def _at_most_seconds(limit: float, contestant: str = OURS) -> Callable[[Summaries], bool | None]:
    return lambda found: found[contestant].seconds <= limit


def _times_faster(times: float, *peers: str) -> Callable[[Summaries], bool | None]:
    """Than the fastest of the peers that were measured."""

    def reached(found: Summaries) -> bool | None:
        ratios = [found[peer].ratio or 0.0 for peer in peers if peer in found]
        return min(ratios) >= times if ratios else None

    return reached


_NO_INDEX = f"{OURS}, indexes deleted"

TARGETS = (
    Target("put", OURS, "≤ 1.0 µs", _at_most_ns(1000)),
    Target("put", OURS, "≥ 20× SQLite-based queues", _times_faster(20, "SQLite WAL, NORMAL", "litequeue")),
    Target("put many (100)", OURS, "≤ 150 ns", _at_most_ns(150)),
    Target("put from Arrow", OURS, "≤ 60 ns", _at_most_ns(60)),
    Target("durable put, 64 tasks", OURS, "≥ 100k/s", _at_most_ns(1e9 / 100_000)),
    Target("open after kill", OURS, "1 GiB in ≤ 1 s", _at_most_seconds(1)),
    Target("open after kill", _NO_INDEX, "1 GiB in ≤ 3 s", _at_most_seconds(3, _NO_INDEX)),
)


def verdicts(operation: str, contestant: str, found: Summaries, scale: Scale) -> list[Verdict]:
    """What is to be said about one row. The targets are for full runs with 100-byte messages only."""
    like_for_like = scale == Scale()
    return [
        Verdict(target.text, target.reached(found) if like_for_like else None)
        for target in TARGETS
        if (target.operation, target.contestant) == (operation, contestant) and contestant in found
    ]
