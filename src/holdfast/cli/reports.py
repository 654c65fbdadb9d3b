"""What a check found in one log, for people and for scripts; and a bar while it looks."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import msgspec
from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from holdfast.cli.output import stderr
from holdfast.cli.text import safe, short_time, size
from holdfast.storage.check import Progress as OnProgress
from holdfast.storage.finding import NO_MESSAGE, NOTHING, CheckReport, Finding, count_of, offsets

STYLES: Final = {"damage": "bold red", "torn": "bold yellow", "note": "cyan"}
_MOST_SHOWN: Final = 50
# Below this a check takes less time than a bar takes to be understood.
_LONG_BYTES: Final = 256 * 1024 * 1024


@contextmanager
def progress_bar(what: str, *, shown: bool) -> Iterator[OnProgress | None]:
    """A bar on stderr where somebody is looking and the work is long."""
    console = stderr()
    if not shown or not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task(what, total=None)

    def advance(done: int, total: int) -> None:
        if total >= _LONG_BYTES:
            bar.start()
            bar.update(task, completed=done, total=total)

    try:
        yield advance
    finally:
        bar.stop()


def report_document(report: CheckReport, *, owned: bool = False) -> dict[str, object]:
    """A report as a JSON document."""
    document: dict[str, object] = msgspec.to_builtins(report)
    document["log_id"] = None if report.log_id is None else f"{report.log_id:08x}"
    document["owned"] = owned
    return document


def show_report(console: Console, report: CheckReport, *, owned: bool = False) -> None:
    """A report for people."""
    log_id = "unknown" if report.log_id is None else f"{report.log_id:08x}"
    counts = report.counts
    held = f" ({offsets(report.start, report.end)})" if report.end > report.start else ""
    console.print(f"{safe(report.folder)}: log {log_id}, epoch {report.epoch}", soft_wrap=True)
    console.print(
        f"checked {count_of(counts.segments, 'segment')}, {count_of(counts.frames, 'frame')}, "
        f"{count_of(counts.messages, 'message')}{held}, {size(counts.bytes)}"
    )
    if owned:
        console.print("A process owns this log; only what it has published was checked.")
    for severity in ("damage", "torn", "note"):
        show_findings(console, [finding for finding in report.findings if finding.severity == severity])
    _show_quarantine(console, report)
    console.print()
    console.print(_verdict(report), soft_wrap=True)  # a command to copy stays on one line


def show_findings(console: Console, findings: Sequence[Finding]) -> None:
    """One block for each; only the first ones where there are very many."""
    for finding in findings[:_MOST_SHOWN]:
        block = Table.grid(padding=(0, 2))
        block.add_column(width=6)
        block.add_column(overflow="fold")
        block.add_row(Text(finding.severity, style=STYLES[finding.severity]), Text("\n".join(_lines(finding))))
        console.print()
        console.print(block)
    if len(findings) > _MOST_SHOWN:
        console.print(Padding(f"and {len(findings) - _MOST_SHOWN:,} more; --json lists them all", (1, 0, 0, 8)))


def _lines(finding: Finding) -> Iterator[str]:
    yield safe(finding.file) if finding.position is None else f"{finding.file}, position {finding.position}"
    yield safe(finding.what)
    # A note that costs nothing and asks for nothing need not say so.
    if finding.severity != "note" or finding.cost != NO_MESSAGE:
        yield f"cost: {safe(finding.cost)}"
    if finding.severity != "note" or not finding.next_step.startswith(NOTHING):
        yield f"next: {safe(finding.next_step)}"


def _show_quarantine(console: Console, report: CheckReport) -> None:
    if not report.quarantine:
        return
    console.print(f"\nin quarantine: {count_of(len(report.quarantine), 'file')}")
    for kept in report.quarantine[:_MOST_SHOWN]:
        when = "" if kept.at_ns is None else f", {short_time(kept.at_ns)}"
        console.print(Padding(f"{safe(kept.file)} ({size(kept.bytes)}{when}): {safe(kept.reason or '')}", (0, 0, 0, 2)))
    if len(report.quarantine) > _MOST_SHOWN:
        console.print(f"  and {len(report.quarantine) - _MOST_SHOWN:,} more")


def _verdict(report: CheckReport) -> Text:
    if not report.ok:
        damages = sum(finding.severity == "damage" for finding in report.findings) + report.hidden_findings
        lost = report.lost_messages - sum(f.messages for f in report.findings if f.code == "gap")
        return Text.assemble(
            ("damaged", STYLES["damage"]),
            f": {count_of(damages, 'finding')}, {count_of(lost, 'message')} lost\n"
            f"to see what can be done: holdfast repair {shlex.quote(report.folder)} --dry-run",
        )
    if any(finding.severity == "torn" for finding in report.findings):
        return Text.assemble(("ok", "bold green"), ", but the end is torn: opening the log cuts it")
    gone = f"; {count_of(report.lost_messages, 'message')} lost earlier" if report.lost_messages else ""
    return Text.assemble(("ok", "bold green"), f": {count_of(report.counts.messages, 'message')} whole{gone}")
