"""Pipelines for people: bars while they run, a table when they are done."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from holdfast.cli.output import stderr, stdout
from holdfast.cli.text import safe, short_time, show_table, size, table
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.spark.pipelines import spec
    from holdfast.spark.pipelines.checkpoint import PipelineStatus
    from holdfast.spark.pipelines.runner import Runner


@contextmanager
def bars(names: Sequence[str], *, shown: bool) -> Iterator[Callable[[spec.Progress], None]]:
    """A line for each pipeline, on stderr, where somebody is looking."""
    console = stderr()
    if not shown or not console.is_terminal:
        yield lambda progress: None
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.fields[pipeline]}"),
        BarColumn(bar_width=24),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        tasks = {name: progress.add_task("waiting", pipeline=safe(name), total=None) for name in names}

        def tell(news: spec.Progress) -> None:
            if news.pipeline not in tasks:
                return
            total = None if news.lag is None else news.rows_in + news.lag
            words = f"batch {news.batch}, {news.rows_in:,} rows in, {news.rows_out:,} out"
            progress.update(tasks[news.pipeline], completed=news.rows_in, total=total, description=words)

        yield tell


@contextmanager
def ending_in_order(runner: Runner) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM ends the run between two batches, the second one ends the process at once.

    An exception would free the locks on its way out, while other threads may still be writing.
    """
    former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def end(number: int, frame: Any) -> None:
        runner.stop()
        stderr().show_cursor(True)  # bars hide it, and may not get to show it again
        stderr().print("ending; the batch in hand is finished first", soft_wrap=True)
        for each in former:
            signal.signal(each, signal.SIG_DFL)

    for number in former:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def outcomes_document(outcomes: Sequence[spec.Outcome]) -> dict[str, Any]:
    """The one document of a run."""
    documents = []
    for outcome in outcomes:
        document = {} if outcome.summary is None else msgspec.to_builtins(outcome.summary)
        error = None
        if outcome.error is not None:
            code = outcome.error.code if isinstance(outcome.error, HoldfastError) else "os_error"
            error = {"code": code, "message": str(outcome.error)}
        documents.append({"pipeline": outcome.pipeline, **document, "error": error})
    return {"pipelines": documents}


def show_outcomes(outcomes: Sequence[spec.Outcome]) -> None:
    """What was done, as a table, then what is worth a sentence."""
    summaries = [outcome.summary for outcome in outcomes if outcome.summary is not None]
    if not summaries:
        return
    shown = table(
        "pipeline", "batches>", "rows in>", "out>", "dropped>", "aside>", "doubles>", "files>", "behind>", "seconds>"
    )
    for each in summaries:
        counts = (
            each.batches,
            each.rows_in,
            each.rows_out,
            each.dropped,
            each.quarantined,
            each.duplicates,
            each.files,
        )
        lag = "" if each.lag is None else f"{each.lag:,}"
        shown.add_row(safe(each.pipeline), *(f"{count:,}" for count in counts), lag, f"{each.seconds:.1f}")
    show_table(stdout(), shown)
    for each in summaries:
        for name, count in each.expectations.items():
            if count:
                stdout().print(f"{safe(each.pipeline)}: {count:,} not as expected: {safe(name)}", soft_wrap=True)
        for note in each.notes:
            stdout().print(f"{safe(each.pipeline)}: {safe(note)}", soft_wrap=True)


def plan_lines(plan: spec.Plan) -> Iterator[str]:
    """A plan for people."""
    rows = "" if plan.rows is None else f", about {plan.rows:,} rows"
    content = "" if plan.bytes is None else f", {size(plan.bytes)}"
    yield f"{safe(plan.pipeline)} ({plan.kind}){rows}{content}"
    for read in plan.reads:
        count = "" if read.rows is None else f" ({read.rows:,} rows)"
        yield f"  reads   {safe(read.what)} from {safe(read.start)} to {safe(read.end)}{count}"
    for place in plan.writes:
        yield f"  writes  {safe(place)}"
    for note in plan.notes:
        yield f"  note    {safe(note)}"


def standing_table(standings: Sequence[PipelineStatus], running: Mapping[str, int | None]) -> Table:
    """Where pipelines are."""
    shown = table(
        "pipeline", "kind", "last batch>", "at", "rows in>", "out>", "dropped>", "aside>", "behind>", "running"
    )
    for each in standings:
        at_ms = each.last_batch_at_ms
        shown.add_row(
            safe(each.pipeline),
            each.kind,
            "-" if each.last_batch is None else str(each.last_batch),
            "-" if at_ms is None else short_time(at_ms * 1_000_000),
            f"{each.rows_in:,}",
            f"{each.rows_out:,}",
            f"{each.dropped:,}",
            f"{each.quarantined:,}",
            "" if each.lag is None else f"{each.lag:,}",
            f"process {running[each.pipeline]}" if running.get(each.pipeline) else "",
        )
    return shown
