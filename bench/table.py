"""The table of one operation, as plain text cells: for the terminal, for Markdown, for the picture."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bench import wording
from bench.harness import OURS, Operation, Outcome
from bench.scale import Scale
from bench.stats import Summary, summaries
from bench.targets import Verdict, verdicts

_FIGURES = {
    "messages": ["messages/s", "a message", "min – max"],
    "opening": ["messages held", "time to open", "min – max"],
    "latency": ["p50", "p99", "p50, min – max"],
    "beside": ["messages/s", "a message", "CPU of a message"],
    "memory": ["messages read", "peak of a worker", "time to read"],
    "spark": ["a message", "min – max", "CPU: JVM + workers"],
    "idle": ["waiting", "memory for them", "CPU of a second"],
}


@dataclass(frozen=True)
class Row:
    """One contestant; `summary` is None where there is nothing but a reason."""

    outcome: Outcome
    summary: Summary | None
    verdicts: tuple[Verdict, ...] = ()

    @property
    def cells(self) -> list[str]:
        """In the order of `headings`."""
        case = self.outcome.case
        if self.summary is None:
            return [
                case.contestant,
                case.survives,
                "–",
                "–",
                "–",
                "–",
                f"{self.outcome.status}: {self.outcome.problem}",
            ]
        return [
            case.contestant,
            case.survives,
            *_figures(case.operation, self.summary),
            wording.ratio(self.summary.ratio, is_baseline=case.contestant == OURS),
            "; ".join(str(verdict) for verdict in self.verdicts),
        ]


def headings(operation: Operation) -> list[str]:
    """An opening has a time of its own, a latency two quantiles; all else a rate and a time for each message."""
    return ["contestant", f"{operation.promise} survives", *_FIGURES[operation.measures], f"vs {OURS}", "target"]


def rows(outcomes: Iterable[Outcome], scale: Scale) -> list[Row]:
    """The fastest first, those without a figure last."""
    group = list(outcomes)
    found = summaries(group)
    made = [
        Row(
            outcome,
            found.get(outcome.case.contestant),
            tuple(verdicts(outcome.case.operation.name, outcome.case.contestant, found, scale)),
        )
        for outcome in group
    ]
    return sorted(made, key=_speed)


def _speed(row: Row) -> tuple[bool, float]:
    if row.summary is None:
        return True, 0.0
    by = {"opening": row.summary.seconds, "memory": float(row.summary.anon_bytes or 0)}
    return False, by.get(row.outcome.case.operation.measures, row.summary.median_ns)


def _figures(operation: Operation, summary: Summary) -> list[str]:
    if operation.measures == "opening":
        held = summary.messages
        return [
            wording.count(held),
            wording.duration(1e9 * summary.seconds),
            wording.duration_range(summary.min_ns * held, summary.max_ns * held),
        ]
    if operation.measures == "memory":
        peak, taken = wording.size(summary.anon_bytes or 0), wording.duration(1e9 * summary.seconds)
        return [wording.count(summary.messages), peak, taken]
    if operation.measures == "idle":
        cpu_ns = summary.cpu_ns * summary.messages / summary.seconds
        return [wording.count(summary.messages), wording.size(summary.anon_bytes or 0), wording.duration(cpu_ns)]
    spread = wording.duration_range(summary.min_ns, summary.max_ns)
    if operation.measures == "spark":
        workers_ns = summary.worker_cpu_ns or 0
        cpu = f"{wording.duration(summary.cpu_ns - workers_ns)} + {wording.duration(workers_ns)}"
        return [wording.duration(summary.median_ns), spread, cpu]
    if operation.measures == "latency":
        return [wording.duration(summary.median_ns), wording.duration(summary.p99_ns or 0), spread]
    last = wording.duration(summary.cpu_ns) if operation.measures == "beside" else spread
    return [wording.count(summary.messages_per_second), wording.duration(summary.median_ns), last]
