"""The result files: NAME.json for programs, NAME.md for people, and the pictures."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness import Operation, Outcome, by_operation, missing_modules
from bench.machine import title, warning
from bench.scale import Scale
from bench.survival import Survivor
from bench.table import Row, headings, rows

_SURVIVAL = {
    "put": "After kill -9 all that were put should be there.",
    "ack": "After kill -9 those that were acked should not come back, and all others should.",
}


@dataclass(frozen=True)
class Report:
    """Everything that one run found."""

    machine: dict[str, object]
    scale: Scale
    rounds: int
    outcomes: list[Outcome]
    survivors: list[Survivor]

    def tables(self) -> list[tuple[Operation, list[Row]]]:
        """Each operation with its rows, the fastest first."""
        return [(operation, rows(group, self.scale)) for operation, group in by_operation(self.outcomes)]

    @property
    def how(self) -> str:
        """The method in one line."""
        rounds = "a single round" if self.rounds == 1 else f"medians of {self.rounds} interleaved rounds"
        return f"{self.scale.body_bytes}-byte messages; {rounds}"


def write(report: Report, folder: Path, name: str = "results") -> list[Path]:
    """Write all files; answers which. Without matplotlib there are no pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / f"{name}.json", folder / f"{name}.md"]
    written[0].write_text(json.dumps(as_json(report), indent=2, ensure_ascii=False) + "\n")
    written[1].write_text(as_markdown(report))
    if missing_modules(["matplotlib"]):
        return written
    from bench.picture import draw

    return [*written, *draw(report, folder, name)]


def as_json(report: Report) -> dict[str, Any]:
    """Plain values, with every round of everybody."""
    return {
        "machine": report.machine,
        "scale": dataclasses.asdict(report.scale),
        "rounds": report.rounds,
        "operations": [
            {
                "name": operation.name,
                "about": operation.about,
                "measures": operation.measures,
                "contestants": [_contestant(row) for row in found],
            }
            for operation, found in report.tables()
        ],
        "survival": [dataclasses.asdict(survivor) for survivor in report.survivors],
    }


def _contestant(row: Row) -> dict[str, Any]:
    case = row.outcome.case
    return {
        "name": case.contestant,
        "survives": case.survives,
        "note": case.note,
        "status": row.outcome.status,
        "problem": row.outcome.problem,
        "summary": dataclasses.asdict(row.summary) if row.summary else None,
        "messages_per_second": _rate(row),
        "targets": [dataclasses.asdict(verdict) for verdict in row.verdicts],
        "rounds": [dataclasses.asdict(sample) for sample in row.outcome.samples],
    }


def _rate(row: Row) -> float | None:
    """None for a latency: there the rate was given."""
    if row.summary is None or row.outcome.case.operation.measures == "latency":
        return None
    return row.summary.messages_per_second


def as_markdown(report: Report) -> str:
    """Tables that read well on a web page and in a terminal."""
    parts = [
        "# Benchmark results",
        f"{title(report.machine)}. {report.how}. Method: [bench/README.md](../README.md).",
    ]
    if warning(report.machine):
        parts.append(f"**{warning(report.machine)}**")
    for operation, found in report.tables():
        parts += [f"## {operation.name}", operation.about, _operation_table(operation, found)]
    for title_text, about, found_there in survival_tables(report.survivors):
        parts += [f"## {title_text}", about, _survival_table(found_there)]
    return "\n\n".join(parts) + "\n"


def _operation_table(operation: Operation, found: Sequence[Row]) -> str:
    lines = [[f"**{cell}**" if cell and row.outcome.case.is_ours else cell for cell in row.cells] for row in found]
    return _markdown_table(headings(operation), lines, right_from=2, right_to=6)


def survival_tables(survivors: Iterable[Survivor]) -> list[tuple[str, str, list[Survivor]]]:
    """Title, explanation and rows, for puts and for acks."""
    everybody = list(survivors)
    tables = [
        (f"What {article} {call} survives", about, [survivor for survivor in everybody if survivor.call == call])
        for article, (call, about) in zip(("a", "an"), _SURVIVAL.items(), strict=True)
    ]
    return [table for table in tables if table[2]]


def survival_headings(survivors: Sequence[Survivor]) -> list[str]:
    """Of one table."""
    return ["contestant", f"its {survivors[0].call} survives", "found after kill -9", "how"]


def _survival_table(survivors: Sequence[Survivor]) -> str:
    lines = [[s.name, s.survives, s.found, s.note] for s in survivors]
    return _markdown_table(survival_headings(survivors), lines, right_from=4, right_to=4)


def _markdown_table(names: list[str], lines: Iterable[list[str]], *, right_from: int, right_to: int) -> str:
    rule = ["---:" if right_from <= at < right_to else "---" for at in range(len(names))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [names, rule, *lines])
