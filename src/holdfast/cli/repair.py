"""`holdfast repair`: mend what `check` found, after saying what it will cost."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from holdfast.cli.check import progress_bar, report_document, show_findings
from holdfast.cli.options import AsJson, Folder
from holdfast.cli.output import DAMAGED, NOT_DONE, OK, command, print_json, stderr, stdout
from holdfast.cli.text import safe, size
from holdfast.errors import InvalidRequest
from holdfast.storage.finding import count_of
from holdfast.storage.plan import RepairPlan
from holdfast.storage.repair import RepairResult, plan_repair, repair


@command
def repair_command(
    folder: Folder,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    backup: Annotated[
        str | None,
        typer.Option(
            "--backup", metavar="DIR", help="Where the originals go; a new folder inside the log's by default."
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> int:
    """Mend a damaged log: mark what is lost, keep everything else, throw nothing away.

    Every file that changes is copied first. Nobody may own the log meanwhile.
    Exit code: 0 done or nothing to do, 1 damage is left, 2 not done.
    """
    with progress_bar("looking", shown=not as_json) as progress:
        plan = plan_repair(folder, progress=progress)
    if dry_run or not plan.steps:
        _answer(plan, None, as_json=as_json)
        return OK if dry_run or not plan.left else DAMAGED
    if not as_json:
        _show_plan(stdout(), plan)
    if not yes and (as_json or not _somebody_answers()):
        raise InvalidRequest(
            "a repair asks before it changes anything, and nobody is there to answer: "
            "look at the plan with --dry-run, then run it again with --yes. Nothing was changed"
        )
    if not yes and not _confirmed():
        stderr().print("Nothing was changed.")
        return NOT_DONE
    with progress_bar("repairing", shown=not as_json) as progress:
        result = repair(folder, backup=backup, progress=progress)
    _answer(result.plan, result, as_json=as_json)
    return OK if result.after.ok else DAMAGED


def _somebody_answers() -> bool:
    return sys.stdin.isatty()


def _confirmed() -> bool:
    try:
        return typer.confirm("Carry this out?", err=True)
    except typer.Abort:
        return False


def _answer(plan: RepairPlan, result: RepairResult | None, *, as_json: bool) -> None:
    if as_json:
        print_json(_document(plan, result))
    elif result is None:
        _show_plan(stdout(), plan)
    else:
        _show_result(stdout(), result)


def _document(plan: RepairPlan, result: RepairResult | None) -> dict[str, Any]:
    return {
        "plan": msgspec.to_builtins(plan),
        "changed": result is not None and result.changed,
        "backup": None if result is None else result.backup,
        "backup_files": [] if result is None else list(result.backup_files),
        "after": None if result is None else report_document(result.after),
    }


def _show_plan(console: Console, plan: RepairPlan) -> None:
    if not plan.steps and not plan.left:
        console.print(f"{safe(plan.folder)}: nothing to repair", soft_wrap=True)
        return
    if plan.steps:
        console.print(f"{safe(plan.folder)}: a repair would", soft_wrap=True)
        steps = Table.grid(padding=(0, 2))
        steps.add_column(justify="right")
        steps.add_column(overflow="fold")
        steps.add_row("1.", f"copy every file that changes into a backup ({size(plan.backup_bytes)})")
        for number, step in enumerate(plan.steps, start=2):
            steps.add_row(f"{number}.", f"{safe(step.file)}: {safe(step.what)}\ncost: {safe(step.cost)}")
        console.print(steps)
        console.print(f"in all: {count_of(plan.lost_messages, 'message')} given up; nothing is deleted")
    if plan.left:
        console.print("\nA repair cannot mend:")
        show_findings(console, plan.left)


def _show_result(console: Console, result: RepairResult) -> None:
    console.print()
    if result.changed:
        console.print(f"repaired; the originals are in {safe(result.backup or '')}", soft_wrap=True)
    after = result.after
    if after.ok:
        console.print(
            f"the log is whole again: {count_of(after.counts.messages, 'message')}, "
            f"{count_of(after.lost_messages, 'message')} marked as lost"
        )
    else:
        console.print("damage is left; run `holdfast check` to see it")
