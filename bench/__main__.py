"""`python -m bench`: measure, show, write the results."""

from __future__ import annotations

import datetime as dt
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench import machine, report
from bench.console import progress_bar, show
from bench.harness import Outcome, run, sample_count
from bench.operations import all_cases
from bench.scale import Scale, quick
from bench.survival import check_survival

_QUICK = "Small counts, one round: does it run? Its figures mean little."


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each contestant; the median counts.")] = 5,
    small: Annotated[bool, typer.Option("--quick", help=_QUICK)] = False,  # noqa: FBT002 - a flag
    only: Annotated[
        str, typer.Option(help='Only what matches this pattern in "operation: contestant"; ours always.')
    ] = "",
    body_bytes: Annotated[int, typer.Option("--bytes", min=1, help="Length of a message.")] = 100,
    folder: Annotated[Path, typer.Option("--dir", help="Where to make the data folder: on a real disk.")] = Path(),
    out: Annotated[Path, typer.Option(help="Where to write the results.")] = Path("bench/results"),
    name: Annotated[str, typer.Option(help="What the result files are called.")] = "results",
    date: Annotated[str, typer.Option(help="The date to write on the results; today if not given.")] = "",
) -> None:
    """Measure Holdfast and its peers side by side."""
    scale = quick(body_bytes) if small else Scale(body_bytes)
    console = _console()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-data-", dir=folder) as data:
        found = _measure(console, Path(data), scale, 1 if small else rounds, only, date)
    show(console, found)
    for path in report.write(found, out, name):
        console.print(f"wrote {path}")


def _measure(console: Console, data: Path, scale: Scale, rounds: int, only: str, date: str) -> report.Report:
    here = machine.facts(data, date or dt.date.today().isoformat())
    cases = all_cases(scale, only)
    if not cases:
        raise typer.BadParameter(f"nothing matches {only!r}")
    # What a put survives has been asked of queues in this process; Spark has none, and servers are asked elsewhere.
    asked = any(case.host is None and not case.operation.name.startswith("server:") for case in cases)
    survivors = check_survival(scale, data) if asked else []
    with progress_bar(console, sample_count(cases, rounds)) as on_sample:
        outcomes: list[Outcome] = run(cases, data, rounds=rounds, on_sample=on_sample)
    here["load_after"] = machine.load()
    return report.Report(here, scale, rounds, outcomes, survivors)


def _console() -> Console:
    console = Console()
    # Into a file or a pipe there is no width to fit, only rich's guess of 80.
    return console if console.is_terminal else Console(width=150)


if __name__ == "__main__":
    typer.run(main)
