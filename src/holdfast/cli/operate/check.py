"""`holdfast check` and `holdfast repair`: find damage in a log or in a whole queue, and repair it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from holdfast.broker.check import FolderPlan, FolderStep, PartReport, check_folder, plan_folder_repair, repair_folder
from holdfast.broker.folder.layout import topics
from holdfast.cli import output
from holdfast.cli.look.log import owner_of
from holdfast.cli.opening import AsJson, DryRun, Folder, Yes, is_queue, trusts_folders
from holdfast.cli.parsing import option
from holdfast.env import real_world
from holdfast.errors import InvalidRequest
from holdfast.model import count_of
from holdfast.storage.checks.check import check
from holdfast.storage.checks.finding import NO_MESSAGE, NOTHING, CheckReport, Finding, offsets
from holdfast.storage.checks.repair import RepairPlan, RepairResult, plan_repair, repair
from holdfast.storage.files import take_lock, translated

# The result of checking one log, for people and for scripts.


STYLES: Final = {"damage": "bold red", "torn": "bold yellow", "note": "cyan"}
_MOST_SHOWN: Final = 50


def report_document(report: CheckReport, *, owned: bool = False) -> dict[str, object]:
    """Return a report as a JSON document."""
    document: dict[str, object] = msgspec.to_builtins(report)
    document["log_id"] = None if report.log_id is None else f"{report.log_id:08x}"
    document["owned"] = owned
    return document


def show_report(console: output.Console, report: CheckReport, *, owned: bool = False) -> None:
    """Print a report as text."""
    log_id = "unknown" if report.log_id is None else f"{report.log_id:08x}"
    counts = report.counts
    held = f" ({offsets(report.start, report.end)})" if report.end > report.start else ""
    console.print(f"{output.safe(report.folder)}: log {log_id}, epoch {report.epoch}")
    console.print(
        f"checked {count_of(counts.segments, 'segment')}, {count_of(counts.frames, 'frame')}, "
        f"{count_of(counts.messages, 'message')}{held}, {output.size(counts.bytes)}"
    )
    if owned:
        console.print("A process owns this log; only what it has published was checked.")
    for severity in ("damage", "torn", "note"):
        show_findings(console, [finding for finding in report.findings if finding.severity == severity])
    _show_quarantine(console, report)
    console.print()
    console.print(_verdict(report))  # keeps a command to copy on one line


def show_findings(console: output.Console, findings: Sequence[Finding]) -> None:
    """Print one block for each finding; only the first ones if there are very many."""
    for finding in findings[:_MOST_SHOWN]:
        block = output.facts_table()
        severity = f"{finding.severity:6}"
        block.add_row(output.Text(severity, STYLES[finding.severity]), "\n".join(_lines(finding)))
        console.print()
        console.print(block)
    if len(findings) > _MOST_SHOWN:
        console.print(f"\n        and {len(findings) - _MOST_SHOWN:,} more; --json lists them all")


def steps_table() -> output.Table:
    """Return a table of numbered steps."""
    return output.Table(output.Column("", right=True), output.Column("", wide=True), titles=False)


def _lines(finding: Finding) -> Iterator[str]:
    yield output.safe(finding.file) if finding.position is None else f"{finding.file}, position {finding.position}"
    yield output.safe(finding.what)
    # A note that costs nothing and requires nothing need not say so.
    if finding.severity != "note" or finding.cost != NO_MESSAGE:
        yield f"cost: {output.safe(finding.cost)}"
    if finding.severity != "note" or not finding.next_step.startswith(NOTHING):
        yield f"next: {output.safe(finding.next_step)}"


def _show_quarantine(console: output.Console, report: CheckReport) -> None:
    if not report.quarantine:
        return
    console.print(f"\nin quarantine: {count_of(len(report.quarantine), 'file')}")
    for kept in report.quarantine[:_MOST_SHOWN]:
        when = "" if kept.at_ns is None else f", {output.short_time(kept.at_ns)}"
        console.print(f"  {output.safe(kept.file)} ({output.size(kept.bytes)}{when}): {output.safe(kept.reason or '')}")
    if len(report.quarantine) > _MOST_SHOWN:
        console.print(f"  and {len(report.quarantine) - _MOST_SHOWN:,} more")


def _verdict(report: CheckReport) -> output.Text:
    if not report.ok:
        damages = sum(finding.severity == "damage" for finding in report.findings) + report.hidden_findings
        lost = report.lost_messages - sum(f.messages for f in report.findings if f.code == "gap")
        return output.Text.assemble(
            ("damaged", STYLES["damage"]),
            f": {count_of(damages, 'finding')}, {count_of(lost, 'message')} lost\n"
            f"to see what can be done: holdfast repair {shlex.quote(report.folder)} --dry-run",
        )
    if any(finding.severity == "torn" for finding in report.findings):
        return output.Text.assemble(("ok", "bold green"), ", but the end is torn: opening the log cuts it")
    gone = f"; {count_of(report.lost_messages, 'message')} lost earlier" if report.lost_messages else ""
    return output.Text.assemble(("ok", "bold green"), f": {count_of(report.counts.messages, 'message')} intact{gone}")


# The plan and the result of a repair, for people and for scripts.


def document(plan: RepairPlan, result: RepairResult | None) -> dict[str, Any]:
    return {
        "plan": msgspec.to_builtins(plan),
        "changed": result is not None and result.changed,
        "backup": None if result is None else result.backup,
        "backup_files": [] if result is None else list(result.backup_files),
        "after": None if result is None else report_document(result.after),
    }


def show_plan(console: output.Console, plan: RepairPlan) -> None:
    if not plan.steps and not plan.left:
        console.print(f"{output.safe(plan.folder)}: nothing to repair")
        return
    if plan.steps:
        console.print(f"{output.safe(plan.folder)}: a repair would")
        steps = steps_table()
        steps.add_row("1.", f"copy every file that changes into a backup ({output.size(plan.backup_bytes)})")
        for number, step in enumerate(plan.steps, start=2):
            steps.add_row(
                f"{number}.", f"{output.safe(step.file)}: {output.safe(step.what)}\ncost: {output.safe(step.cost)}"
            )
        console.print(steps)
        console.print(f"in all: {count_of(plan.lost_messages, 'message')} given up; nothing is deleted")
    if plan.left:
        console.print("\nA repair cannot fix:")
        show_findings(console, plan.left)


def show_result(console: output.Console, result: RepairResult) -> None:
    console.print()
    if result.changed:
        console.print(f"repaired; the originals are in {output.safe(result.backup or '')}")
    after = result.after
    if after.ok:
        console.print(
            f"the log is whole again: {count_of(after.counts.messages, 'message')}, "
            f"{count_of(after.lost_messages, 'message')} marked as lost"
        )
    else:
        console.print("damage is left; run `holdfast check` to see it")


# `holdfast check` and `repair` of a whole queue: each of its logs, and the state that its journals add up to.


_MOST_ROWS: Final = 60
# Only a copy brings back missing messages.
_COPIED: Final = frozenset({"messages"})


def check_queue(folder: str, *, as_json: bool) -> int:
    """Check all of a queue; takes no lock and changes nothing."""
    owner = owner_of(folder)
    owned = owner is not None and owner.alive is True
    with output.progress("checking", "bytes", shown=not as_json) as advance:
        report = check_folder(folder, owned=owned, progress=advance)
    if as_json:
        facts = {name: getattr(report, name) for name in ("folder", "ok", "owned", "missing", "wrong", "notes")}
        output.print_json({**facts, "logs": list(map(_document, report.parts))})
    else:
        _show(output.stdout(), folder, report.parts, [*report.missing, *report.wrong], report.notes, owned=owned)
    return output.OK if report.ok else output.DAMAGED


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
    console: output.Console,
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
    console.print(f"{output.safe(folder)}: {what}")
    table = output.Table(
        output.Column("", wide=True),
        output.Column("", right=True),
        output.Column("", right=True),
        output.Column(""),
        titles=False,
    )
    shown = found if len(found) <= _MOST_ROWS else [report for report in found if not report.ok]
    for report in shown:
        counts = report.log.counts
        thing = {"journal": "event", "commits": "event", "locks": "event", "traces": "step"}.get(
            report.part.kind, "message"
        )
        verdict = output.Text("ok", "green") if report.ok else output.Text("damaged", STYLES["damage"])
        table.add_row(
            output.safe(report.part.name), count_of(counts.messages, thing), output.size(counts.bytes), verdict
        )
    console.print(table)
    if len(shown) < len(found):
        console.print(f"{count_of(len(found) - len(shown), 'log')} ok; --json lists them all")
    if owned:
        console.print("A process owns this queue; only what it has published was checked.")
    for report in found:
        if report.log.findings or report.wrong:
            console.print(f"\n{output.safe(report.part.name)}")
            show_findings(console, report.log.findings)
            for what in report.wrong:
                _show_damage(console, what)
    if missing or notes:
        console.print()
    for what in missing:
        _show_damage(console, what)
    for what in notes:
        console.print(output.Text.assemble(("note", STYLES["note"]), f"    {output.safe(what)}"))
    console.print()
    if not missing and all(report.ok for report in found):
        messages = sum(report.log.counts.messages for report in found if report.part.kind == "messages")
        console.print(output.Text.assemble(("ok", "bold green"), f": {count_of(messages, 'message')} intact"))
        return
    mends = any(not report.log.ok or (report.wrong and report.part.kind not in _COPIED) for report in found)
    mends = mends or bool(missing)  # a repair makes the queue usable without it
    text = f"\nto see what can be done: holdfast repair {shlex.quote(folder)} --dry-run" if mends else ""
    console.print(output.Text.assemble(("damaged", STYLES["damage"]), text))


def _show_damage(console: output.Console, what: str) -> None:
    console.print(output.Text.assemble(("damage", STYLES["damage"]), f"  {output.safe(what)}"))


def repair_queue(folder: str, *, part: str | None, dry_run: bool, backup: str | None, yes: bool, as_json: bool) -> int:
    """Repair all of a queue, or one part. No other process can own it until that is done."""
    with output.progress("looking", "bytes", shown=not as_json) as advance:
        plan = plan_folder_repair(folder, part=part, progress=advance)
    if not as_json:
        _show_folder_plan(output.stdout(), plan)
    done = None
    if not plan.empty and not dry_run:
        if not output.confirmed("Proceed?", "a repair", yes=yes, as_json=as_json):
            return output.NOT_DONE
        with output.progress("repairing", "bytes", shown=not as_json) as advance:
            done = repair_folder(folder, part=part, backup=backup, trust_folder=trusts_folders(), progress=advance)
    results = {} if done is None else done.logs
    if as_json:
        logs = [{"name": name, **document(log, results.get(name))} for name, log in plan.logs.items()]
        steps = () if done is None else done.steps
        changed = bool(steps) or any(result.changed for result in results.values())
        output.print_json({"folder": folder, "changed": changed, "logs": logs, "steps": plan.steps, "done": steps})
    for result in () if as_json else results.values():
        show_result(output.stdout(), result)
    if done is not None and not as_json and done.steps:
        whole = (
            f"no damage is left in {folder}" if done.after.ok else f"some damage is left: see `holdfast check {folder}`"
        )
        output.say(f"repaired; {output.safe(whole)}")
    left = any(log.left for name, log in plan.logs.items() if name not in results)
    return output.DAMAGED if not dry_run and (left or not all(r.after.ok for r in results.values())) else output.OK


def _show_folder_plan(console: output.Console, plan: FolderPlan) -> None:
    for log in plan.logs.values():
        show_plan(console, log)
    _show_steps(console, plan.folder, plan.steps)
    if not plan.logs and not plan.steps:
        console.print(f"{output.safe(plan.folder)}: nothing to repair")


def _show_steps(console: output.Console, folder: str, steps: Sequence[FolderStep]) -> None:
    """Print what a repair would do beyond single logs."""
    if not steps:
        return
    console.print(f"{output.safe(folder)}: beyond the logs, a repair would")
    table = steps_table()
    for number, step in enumerate(steps, start=1):
        table.add_row(
            f"{number}.", f"{output.safe(step.part)}: {output.safe(step.what)}\ncost: {output.safe(step.cost)}"
        )
    console.print(table)


def check_command(folder: Folder, as_json: AsJson = False) -> int:
    """Check every byte of a queue or a log. Takes no lock and changes nothing.

    Exit code: 0 if nothing is damaged, 1 if there is damage, 2 if it cannot be read.

    Examples:
        holdfast check jobs
    """
    if is_queue(folder):
        return check_queue(folder, as_json=as_json)
    owner = owner_of(folder)
    alive = owner is not None and owner.alive is True
    with output.progress("checking", "bytes", shown=not as_json) as advance:
        report = check(folder, owned=True if alive else None, progress=advance)
    if as_json:
        output.print_json(report_document(report, owned=alive))
    else:
        show_report(output.stdout(), report, owned=alive)
    return output.OK if report.ok else output.DAMAGED


# `holdfast repair`: repair what `check` found, after showing what that costs.


def repair_command(
    folder: Folder,
    dry_run: DryRun = False,
    backup: Annotated[
        str | None,
        option("--backup DIR", "Where to copy the originals; a new folder inside the log by default."),
    ] = None,
    part: Annotated[
        str | None,
        option("--part PART", "Only this part of a queue, as named by `check`."),
    ] = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> int:
    """Repair a damaged queue or log. Marks what is lost, keeps everything else, and deletes nothing.

    Every file that changes is copied first. No process may own the log while it runs. Exit code: 0 if it is repaired or
    there was nothing to do, 1 if damage is left, 2 if nothing was done.

    Examples:
        holdfast repair jobs --dry-run
        holdfast repair jobs --backup /backups/jobs --yes
    """
    if is_queue(folder):
        return repair_queue(folder, dry_run=dry_run, backup=backup, yes=yes, as_json=as_json, part=part)
    if part is not None:
        raise InvalidRequest(f"{folder} is a single log: --part names a part of a queue; leave it out")
    with output.progress("looking", "bytes", shown=not as_json) as advance:
        plan = plan_repair(folder, progress=advance)
    if dry_run or not plan.steps:
        _answer(plan, None, as_json=as_json)
        return output.OK if dry_run or not plan.left else output.DAMAGED
    if not as_json:
        show_plan(output.stdout(), plan)
    if not output.confirmed("Proceed?", "a repair", yes=yes, as_json=as_json):
        return output.NOT_DONE
    with _owned_above(folder), output.progress("repairing", "bytes", shown=not as_json) as advance:
        result = repair(folder, backup=backup, progress=advance, trust_folder=trusts_folders())
    _answer(result.plan, result, as_json=as_json)
    return output.OK if result.after.ok else output.DAMAGED


@contextmanager
def _owned_above(folder: str) -> Iterator[None]:
    """Own the data folder that the log is in, if any: while a log has its files closed, its own lock is free."""
    above = next((str(each) for each in Path(folder).resolve().parents if is_queue(str(each))), None)
    if above is None:
        yield
        return
    with translated(above):
        lock = take_lock(real_world(), above)
    try:
        yield
    finally:
        lock.release()


def _answer(plan: RepairPlan, result: RepairResult | None, *, as_json: bool) -> None:
    if as_json:
        output.print_json(document(plan, result))
    elif result is None:
        show_plan(output.stdout(), plan)
    else:
        show_result(output.stdout(), result)
