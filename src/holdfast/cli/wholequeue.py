"""`holdfast check` and `repair` of a whole queue: each of its logs, and what the journals add up to."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from holdfast.broker.check import FolderPlan, FolderStep, PartReport, check_folder, plan_folder_repair, repair_folder
from holdfast.broker.layout import topics
from holdfast.cli.ask import confirmed
from holdfast.cli.opened import trusts_folders
from holdfast.cli.output import DAMAGED, NOT_DONE, OK, print_json, stdout
from holdfast.cli.owner import owner_of
from holdfast.cli.plans import document, show_plan, show_result
from holdfast.cli.reports import STYLES, progress_bar, report_document, show_findings
from holdfast.cli.text import safe, size
from holdfast.env import real_world
from holdfast.storage.finding import count_of

_MOST_ROWS: Final = 60
# Messages that are missing only a copy brings back.
_COPIED: Final = frozenset({"messages"})


def check_queue(folder: str, *, as_json: bool) -> int:
    """Look at all of it; takes no lock and changes nothing."""
    owner = owner_of(folder)
    owned = owner is not None and owner.alive is True
    with progress_bar("checking", shown=not as_json) as progress:
        report = check_folder(folder, owned=owned, progress=progress)
    if as_json:
        facts = {name: getattr(report, name) for name in ("folder", "ok", "owned", "missing", "wrong", "notes")}
        print_json({**facts, "logs": list(map(_document, report.parts))})
    else:
        _show(stdout(), folder, report.parts, [*report.missing, *report.wrong], report.notes, owned=owned)
    return OK if report.ok else DAMAGED


def _document(found: PartReport) -> dict[str, Any]:
    return {
        **report_document(found.log),
        "ok": found.ok,
        "kind": found.part.kind,
        "name": found.part.name,
        "state": None if found.state is None else msgspec.to_builtins(found.state),
        "wrong": list(found.wrong),
    }


def _show(
    console: Console,
    folder: str,
    found: Sequence[PartReport],
    missing: Sequence[str],
    notes: Sequence[str],
    *,
    owned: bool,
) -> None:
    count = len(topics(real_world(), folder))
    logs = count_of(len(found), "log")
    what = f"a queue of {logs}" if count == 1 else f"{count_of(count, 'topic')}, {logs} in all"
    console.print(f"{safe(folder)}: {what}", soft_wrap=True)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0), collapse_padding=True)
    table.add_column(overflow="fold")
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    shown = found if len(found) <= _MOST_ROWS else [report for report in found if not report.ok]
    for report in shown:
        counts = report.log.counts
        thing = {"journal": "event", "commits": "event", "locks": "event", "traces": "step"}.get(
            report.part.kind, "message"
        )
        verdict = Text("ok", "green") if report.ok else Text("damaged", STYLES["damage"])
        table.add_row(safe(report.part.name), count_of(counts.messages, thing), size(counts.bytes), verdict)
    console.print(table)
    if len(shown) < len(found):
        console.print(f"{count_of(len(found) - len(shown), 'log')} ok; --json lists them all")
    if owned:
        console.print("A process owns this queue; only what it has published was checked.")
    for report in found:
        if report.log.findings or report.wrong:
            console.print(f"\n{safe(report.part.name)}", soft_wrap=True)
            show_findings(console, report.log.findings)
            for what in report.wrong:
                _show_damage(console, what)
    if missing or notes:
        console.print()
    for what in missing:
        _show_damage(console, what)
    for what in notes:
        console.print(Text.assemble(("note", STYLES["note"]), f"    {safe(what)}"), soft_wrap=True)
    console.print()
    if not missing and all(report.ok for report in found):
        messages = sum(report.log.counts.messages for report in found if report.part.kind == "messages")
        console.print(Text.assemble(("ok", "bold green"), f": {count_of(messages, 'message')} whole"))
        return
    mends = any(not report.log.ok or (report.wrong and report.part.kind not in _COPIED) for report in found)
    mends = mends or bool(missing)  # a repair goes on without it
    text = f"\nto see what can be done: holdfast repair {shlex.quote(folder)} --dry-run" if mends else ""
    console.print(Text.assemble(("damaged", STYLES["damage"]), text), soft_wrap=True)


def _show_damage(console: Console, what: str) -> None:
    console.print(Text.assemble(("damage", STYLES["damage"]), f"  {safe(what)}"), soft_wrap=True)


def repair_queue(folder: str, *, part: str | None, dry_run: bool, backup: str | None, yes: bool, as_json: bool) -> int:
    """Mend all of it, or one part, while nobody can own the queue."""
    with progress_bar("looking", shown=not as_json) as progress:
        plan = plan_folder_repair(folder, part=part, progress=progress)
    if not as_json:
        _show_folder_plan(stdout(), plan)
    done = None
    if not plan.empty and not dry_run:
        if not confirmed("Carry this out?", "a repair", yes=yes, as_json=as_json):
            return NOT_DONE
        with progress_bar("repairing", shown=not as_json) as progress:
            done = repair_folder(folder, part=part, backup=backup, trust_folder=trusts_folders(), progress=progress)
    results = {} if done is None else done.logs
    if as_json:
        logs = [{"name": name, **document(log, results.get(name))} for name, log in plan.logs.items()]
        steps = () if done is None else done.steps
        changed = bool(steps) or any(result.changed for result in results.values())
        print_json({"folder": folder, "changed": changed, "logs": logs, "steps": plan.steps, "done": steps})
    for result in () if as_json else results.values():
        show_result(stdout(), result)
    if done is not None and not as_json and done.steps:
        whole = (
            f"nothing in {folder} is damaged any more"
            if done.after.ok
            else f"some damage is left: see `holdfast check {folder}`"
        )
        stdout().print(f"repaired; {safe(whole)}", soft_wrap=True)
    left = any(log.left for name, log in plan.logs.items() if name not in results)
    return DAMAGED if not dry_run and (left or not all(r.after.ok for r in results.values())) else OK


def _show_folder_plan(console: Console, plan: FolderPlan) -> None:
    for log in plan.logs.values():
        show_plan(console, log)
    _show_steps(console, plan.folder, plan.steps)
    if not plan.logs and not plan.steps:
        console.print(f"{safe(plan.folder)}: nothing to repair", soft_wrap=True)


def _show_steps(console: Console, folder: str, steps: Sequence[FolderStep]) -> None:
    """What a repair would do beyond the single logs."""
    if not steps:
        return
    console.print(f"{safe(folder)}: beyond the logs, a repair would", soft_wrap=True)
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right")
    table.add_column(overflow="fold")
    for number, step in enumerate(steps, start=1):
        table.add_row(f"{number}.", f"{safe(step.part)}: {safe(step.what)}\ncost: {safe(step.cost)}")
    console.print(table)
