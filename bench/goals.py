"""Samples that are measured in turn, and shown beside their goals: what `bench.hot` and `bench.wire` share."""

from __future__ import annotations

import argparse
import os
import platform
import re
import statistics
import tempfile
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

Figures = dict[str, float]
_COLUMNS = ["operation", "best", "median", "unit", "goal", ""]
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
    parser.add_argument("--save", type=Path, help="write the table to this file, too, as Markdown")
    given = parser.parse_args()
    before = os.getloadavg()[0]
    measured = _measured(samples, given.only, given.rounds, given.dir)
    rows = [_row(name, goals.get(name, Goal(None, "/s")), found) for name, found in measured.items()]
    absent = [
        f"{name}: not measured, because it is not installed: {', '.join(what)}"
        for name, what in (missing or {}).items()
        if what
    ]
    table = Table(*_COLUMNS)
    for row in rows:
        table.add_row(*row)
    console = Console(width=120)
    console.print(table)
    for line in absent:
        console.print(line)
    if given.save is not None:
        load = f"{before:.1f} at the start, {os.getloadavg()[0]:.1f} at the end"
        given.save.write_text(_page(program, given.rounds, load, rows, absent))


def _page(program: str, rounds: int, load: str, rows: list[list[str]], absent: list[str]) -> str:
    """The table as a page. It says how busy the machine was, because nothing else explains figures that are odd."""
    machine = f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}"
    lines = [
        f"# `python -m {program}`",
        "",
        f"Measured {date.today().isoformat()} on {machine}, {rounds} rounds. Load average {load}.",
        "Above the number of cores, others used the machine, too: wall times and rates are those of a share of it.",
        "",
        *("| " + " | ".join(each) + " |" for each in (_COLUMNS, ["---"] * len(_COLUMNS), *rows)),
        *(line for each in absent for line in ("", each)),
    ]
    return "\n".join(lines) + "\n"


def _measured(samples: Mapping[str, Sample], only: str, rounds: int, folder: Path) -> dict[str, list[float]]:
    """Every figure of every round. Samples take turns, so that a busy moment does not hit one of them alone."""
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, sample in samples.items():
            if re.search(only, name):
                with tempfile.TemporaryDirectory(dir=folder) as place:
                    for figure, value in sample(Path(place)).items():
                        found.setdefault(figure, []).append(value)
    return found


def _row(name: str, goal: Goal, found: list[float]) -> list[str]:
    best = max(found) if goal.is_rate else min(found)
    digits = 0 if best >= 100 else 2
    wanted = "" if goal.figure is None else f"{'≥' if goal.is_rate else '≤'} {goal.figure:,g}"
    verdict = "" if goal.reached(best) else "not reached"
    return [name, f"{best:,.{digits}f}", f"{statistics.median(found):,.{digits}f}", goal.unit, wanted, verdict]
