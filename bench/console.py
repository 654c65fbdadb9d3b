"""The same on the terminal, with colours and a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from bench.harness import Case, Operation
from bench.machine import title, warning
from bench.report import Report, survival_headings, survival_tables
from bench.survival import Survivor
from bench.table import Row, headings

# Below this width the spread is left out; results.md has it.
_NARROW = 100
_OURS_STYLE = "bold cyan"


@contextmanager
def progress_bar(console: Console, total: int) -> Iterator[Callable[[Case, int], None]]:
    """A bar that is told of each sample."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    # Without its refresh thread: the harness forks, and a fork with threads about can hang.
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        task = progress.add_task("", total=total)
        shown = -1  # the bar counts finished samples, and hears of each when it starts

        def on_sample(case: Case, round_number: int) -> None:
            nonlocal shown
            shown += 1
            text = f"{case.operation.name}: {case.contestant}, round {round_number + 1}"
            progress.update(task, completed=shown, description=f"{text:<62.62}", refresh=True)

        yield on_sample


def show(console: Console, report: Report) -> None:
    """All tables; below each the targets, and who was not measured and why."""
    console.print(f"[bold]{escape(title(report.machine))}[/bold]. {report.how}.\n")
    if warning(report.machine):
        console.print(f"[bold red]{escape(warning(report.machine))}[/]\n")
    for operation, found in report.tables():
        console.print(_operation_table(operation, found, narrow=console.width < _NARROW))
        for line in _remarks(found):
            console.print(f"  {line}")
        console.print()
    for name, about, survivors in survival_tables(report.survivors):
        console.print(_survival_table(name, about, survivors))


def _operation_table(operation: Operation, found: list[Row], *, narrow: bool) -> Table:
    table = _table(operation.name, operation.about)
    columns = [0, 1, 2, 3, 5] if narrow else [0, 1, 2, 3, 4, 5]
    names = headings(operation)
    for at in columns:
        table.add_column(names[at], justify="right" if at >= 2 else "left", no_wrap=True)
    for row in found:
        if row.summary:
            cells = [escape(row.cells[at]) for at in columns]
            table.add_row(*cells, style=_OURS_STYLE if row.outcome.case.is_ours else "")
    return table


def _remarks(found: list[Row]) -> Iterator[str]:
    for row in found:
        name = escape(row.outcome.case.contestant)
        for verdict in row.verdicts:
            style = {True: "green", False: "bold red", None: "dim"}[verdict.reached]
            yield f"[{_OURS_STYLE}]{name}[/], target [{style}]{escape(str(verdict))}[/]"
        if row.summary is None:
            yield f"[yellow]{row.outcome.status}[/] {name}: {escape(row.outcome.problem)}"


def _table(name: str, about: str) -> Table:
    title_text = f"[bold]{escape(name)}[/]  {escape(about)}"
    return Table(title=title_text, title_justify="left", title_style="", box=box.SIMPLE_HEAD, pad_edge=False)


def _survival_table(name: str, about: str, survivors: list[Survivor]) -> Table:
    table = _table(name, about)
    for heading in survival_headings(survivors):
        table.add_column(heading)
    for survivor in survivors:
        cells = (survivor.name, survivor.survives, survivor.found, survivor.note)
        table.add_row(*map(escape, cells), style="bold red" if survivor.broke_its_promise else "")
    return table
