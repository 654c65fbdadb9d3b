"""What a repair would do and what it did, for people and for scripts."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from holdfast.cli.reports import report_document, show_findings
from holdfast.cli.text import safe, size
from holdfast.storage.finding import count_of
from holdfast.storage.plan import RepairPlan
from holdfast.storage.repair import RepairResult


def document(plan: RepairPlan, result: RepairResult | None) -> dict[str, Any]:
    return {
        "plan": msgspec.to_builtins(plan),
        "changed": result is not None and result.changed,
        "backup": None if result is None else result.backup,
        "backup_files": [] if result is None else list(result.backup_files),
        "after": None if result is None else report_document(result.after),
    }


def show_plan(console: Console, plan: RepairPlan) -> None:
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


def show_result(console: Console, result: RepairResult) -> None:
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
