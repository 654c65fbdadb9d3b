"""`holdfast repair`: mend what `check` found, after saying what it will cost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.ask import confirmed
from holdfast.cli.opened import is_queue, trusts_folders
from holdfast.cli.options import AsJson, DryRun, Folder, Yes
from holdfast.cli.output import DAMAGED, NOT_DONE, OK, command, print_json, stdout
from holdfast.cli.plans import document, show_plan, show_result
from holdfast.cli.reports import progress_bar
from holdfast.cli.wholequeue import repair_queue
from holdfast.env import real_world
from holdfast.errors import InvalidRequest
from holdfast.storage.lock import take_lock
from holdfast.storage.opening import translated
from holdfast.storage.plan import RepairPlan
from holdfast.storage.repair import RepairResult, plan_repair, repair


@command
def repair_command(
    folder: Folder,
    dry_run: DryRun = False,
    backup: Annotated[
        str | None,
        typer.Option(
            "--backup", metavar="DIR", help="Where the originals go; a new folder inside the log's by default."
        ),
    ] = None,
    part: Annotated[
        str | None,
        typer.Option("--part", metavar="PART", help="Only this part of a queue, by the name that `check` gives it."),
    ] = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> int:
    """Mend a damaged log, or all logs of a queue: mark what is lost, keep everything else, throw nothing away.

    Every file that changes is copied first. Nobody may own the log meanwhile.
    Exit code: 0 done or nothing to do, 1 damage is left, 2 not done.
    """
    if is_queue(folder):
        return repair_queue(folder, dry_run=dry_run, backup=backup, yes=yes, as_json=as_json, part=part)
    if part is not None:
        raise InvalidRequest(f"{folder} is a single log: --part names a part of a queue")
    with progress_bar("looking", shown=not as_json) as progress:
        plan = plan_repair(folder, progress=progress)
    if dry_run or not plan.steps:
        _answer(plan, None, as_json=as_json)
        return OK if dry_run or not plan.left else DAMAGED
    if not as_json:
        show_plan(stdout(), plan)
    if not confirmed("Carry this out?", "a repair", yes=yes, as_json=as_json):
        return NOT_DONE
    with _owned_above(folder), progress_bar("repairing", shown=not as_json) as progress:
        result = repair(folder, backup=backup, progress=progress, trust_folder=trusts_folders())
    _answer(result.plan, result, as_json=as_json)
    return OK if result.after.ok else DAMAGED


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
        print_json(document(plan, result))
    elif result is None:
        show_plan(stdout(), plan)
    else:
        show_result(stdout(), result)
