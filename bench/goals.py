"""Samples that are measured in turn, and shown beside their goals: what `bench.hot` and `bench.wire` share."""

from __future__ import annotations

import argparse
import datetime as dt
import re
import statistics
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from bench import machine

Figures = dict[str, float]
Sample = Callable[[Path], Figures]


class Goal(NamedTuple):
    """A limit of a figure. Rates should be above it, all else below; without a limit, the figure is only shown."""

    figure: float | None
    unit: str = "µs"

    @property
    def is_rate(self) -> bool:
        return self.unit.endswith("/s")

    def reached(self, found: float) -> bool:
        if self.figure is None:
            return True
        return found >= self.figure if self.is_rate else found <= self.figure


def run(
    program: str,
    about: str,
    samples: Mapping[str, Sample],
    goals: Mapping[str, Goal],
    missing: Mapping[str, list[str]] | None = None,
) -> None:
    """Measure as the command line asks for, and print a table. A figure without a goal is a rate a second.

    `missing` says of others what is not installed, without which they are left out.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=about)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help=f"a pattern; the samples are: {', '.join(samples)}")
    parser.add_argument("--dir", type=Path, default=Path(), help="where to make the data folders")
    parser.add_argument("--write", type=Path, help="also write the table to this Markdown file")
    given = parser.parse_args()
    measured_on = machine.facts(given.dir, dt.date.today().isoformat())
    table = Table(*_HEADS)
    measured, failed = _measured(samples, given.only, given.rounds, given.dir)
    rows = [_row(name, goals.get(name, Goal(None, "/s")), found) for name, found in measured.items()]
    for row in rows:
        table.add_row(*row)
    console = Console(width=120)
    console.print(table)
    if given.write is not None:
        given.write.write_text(_page(program, about, measured_on, rows, given.rounds))
    for name, what in (missing or {}).items():
        if what:
            console.print(f"{name}: not measured, because it is not installed: {', '.join(what)}")
    for what in failed:
        console.print(what, style="red", markup=False)
    if failed:
        raise SystemExit(1)


_HEADS = ("operation", "best", "median", "", "goal", "")


def _page(program: str, about: str, measured_on: dict[str, object], rows: list[list[str]], rounds: int) -> str:
    """The table as a page, with the machine."""
    where = f"{machine.title(measured_on)}; {rounds} rounds, load {measured_on['load_before']} before them"
    lines = [f"# python -m {program}", "", f"{about} {where}. Method: [bench/README.md](../README.md).", ""]
    warning = machine.warning(measured_on)
    lines += [f"**{warning}**", ""] if warning else []
    lines += [f"| {' | '.join(_HEADS)} |", "| --- | ---: | ---: | --- | ---: | --- |"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def _measured(
    samples: Mapping[str, Sample], only: str, rounds: int, folder: Path
) -> tuple[dict[str, list[float]], list[str]]:
    """Every figure of every round, and what failed. Samples take turns, so that a busy moment hits not only one."""
    found: dict[str, list[float]] = {}
    failed: list[str] = []
    for number in range(1, rounds + 1):
        for name, sample in samples.items():
            if re.search(only, name):
                try:
                    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as place:
                        figures = sample(Path(place))
                except Exception as error:
                    failed.append(f"{name}: round {number} failed: {type(error).__name__}: {error}")
                    continue
                for figure, value in figures.items():
                    found.setdefault(figure, []).append(value)
    return found, failed


def _row(name: str, goal: Goal, found: list[float]) -> list[str]:
    best = max(found) if goal.is_rate else min(found)
    digits = 0 if best >= 100 else 2
    wanted = "" if goal.figure is None else f"{'≥' if goal.is_rate else '≤'} {goal.figure:,g}"
    verdict = "" if goal.figure is None else "reached" if goal.reached(best) else "not reached"
    return [name, f"{best:,.{digits}f}", f"{statistics.median(found):,.{digits}f}", goal.unit, wanted, verdict]
