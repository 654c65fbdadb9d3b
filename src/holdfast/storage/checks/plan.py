"""What a repair would do, in words with their cost, and as work for the one who does it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import msgspec

from holdfast.codec.frame import frame_bytes
from holdfast.env import World
from holdfast.storage.checks.check import Inspection
from holdfast.storage.checks.finding import NO_MESSAGE, Finding, count_of, lost, offsets, remains, torn_cost
from holdfast.storage.checks.inventory import file_size, leftovers
from holdfast.storage.checks.survey import Stretch
from holdfast.storage.files import EPOCHS, STATE, index_name, join, segment_name

# Findings that more of the same log cannot be written over: the disk must be replaced first.
_FAILING_DISK: Final = frozenset({"unreadable", "unjudged_end"})
_LEFT: Final = frozenset({"half_batch", "wrong_time", "wrong_sync", "overlap"})
_MOST_COUNT: Final = 2**32 - 1


class RepairStep(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a repair does. `action` is stable and meant for programs."""

    action: str
    file: str
    what: str
    cost: str
    messages: int = 0
    bytes: int = 0


class RepairPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of a repair, and the findings that it cannot mend. No steps: there is nothing to repair."""

    folder: str
    steps: tuple[RepairStep, ...]
    left: tuple[Finding, ...]
    lost_messages: int
    backup_bytes: int


@dataclass
class Work:
    """The same for the one who does it."""

    rewrites: dict[int, list[Stretch]] = field(default_factory=dict)  # segments to be copied, with what to cover
    fills: list[Stretch] = field(default_factory=list)  # missing segments: a new one with only a gap
    left: list[Stretch] = field(default_factory=list)
    begin_at: int | None = None  # no segment is left: the one that the log goes on with
    distrusted: list[int] = field(default_factory=list)  # segments whose saved index hides what is wrong
    index_bases: list[int] = field(default_factory=list)
    backup_names: list[str] = field(default_factory=list)
    backup_bytes: int = 0
    quarantine_bytes: int = 0
    largest_copy_bytes: int = 0


def plan_for(world: World, inspection: Inspection) -> RepairPlan:
    """The plan that follows from what was seen."""
    report = inspection.report
    work = work_for(world, inspection)
    left = tuple(finding for finding in report.findings if finding.code in _LEFT | _FAILING_DISK)
    if any(finding.code in _FAILING_DISK for finding in left):
        return RepairPlan(folder=report.folder, steps=(), left=left, lost_messages=0, backup_bytes=0)
    unmended = [
        finding
        for finding in report.findings
        for stretch in work.left
        if (finding.file, finding.position, finding.first_offset)
        == (segment_name(stretch.base), stretch.position, stretch.first_offset)
    ]
    steps = (*_stretch_steps(work), *_tail_steps(inspection), *_file_steps(inspection, work))
    return RepairPlan(
        folder=report.folder,
        steps=steps,
        left=(*left, *unmended),
        lost_messages=sum(step.messages for step in steps),
        backup_bytes=work.backup_bytes,
    )


def work_for(world: World, inspection: Inspection) -> Work:
    """Which files must be copied, made or written anew."""
    work = Work()
    findings = inspection.findings
    if findings is None:
        return work
    for stretch in inspection.stretches:
        _place(work, stretch, inspection)
    codes = {(finding.code, finding.file) for finding in inspection.report.findings}
    gone = (finding.next_offset for finding in inspection.report.findings if finding.code == "segments_missing")
    work.begin_at = next(gone, None)
    sealed = [base for base in findings.bases if base < findings.active_base]
    spoiled = {file for code, file in codes if code.startswith("index_")}
    work.index_bases = [
        *(base for base in sealed if base in work.rewrites or index_name(base) in spoiled),
        *(stretch.first_offset for stretch in work.fills),
    ]
    if inspection.report.findings:
        _list_backup(world, inspection, work)
    return work


def _place(work: Work, stretch: Stretch, inspection: Inspection) -> None:
    """Decide how a stretch is mended; opening the log mends its very end by itself."""
    has_bytes = stretch.end > stretch.position
    fits = not stretch.followed or stretch.end - stretch.position >= frame_bytes(0)
    if _is_the_end(stretch, inspection):
        work.distrusted.append(stretch.base)
    elif not fits or stretch.next_offset - stretch.first_offset > _MOST_COUNT:
        work.left.append(stretch)
    elif has_bytes or stretch.first_offset == stretch.base:
        work.rewrites.setdefault(stretch.base, []).append(stretch)
        work.quarantine_bytes += stretch.end - stretch.position
    else:
        work.fills.append(stretch)


def _is_the_end(stretch: Stretch, inspection: Inspection) -> bool:
    findings = inspection.findings
    in_active = findings is not None and stretch.base == findings.active_base
    return in_active and not stretch.followed and stretch.kind in ("damaged", "missing")


def _list_backup(world: World, inspection: Inspection, work: Work) -> None:
    findings = inspection.findings
    assert findings is not None
    names = world.disk.names(inspection.report.folder)
    bases = {*work.rewrites, *work.distrusted, *([] if findings.clean else [findings.active_base])}
    later = () if findings.cut is None else findings.cut.later_bases
    indexed = {*bases, *later, *work.index_bases, findings.active_base}
    wanted = {
        STATE,
        EPOCHS,
        *map(segment_name, bases),
        *map(index_name, indexed),
        *leftovers(names),
    }
    work.backup_names = [name for name in names if name in wanted]
    folder = inspection.report.folder
    work.backup_bytes = sum(file_size(world, join(folder, name)) for name in work.backup_names)
    work.largest_copy_bytes = max(
        (file_size(world, join(folder, segment_name(base))) for base in work.rewrites), default=0
    )


def _stretch_steps(work: Work) -> list[RepairStep]:
    steps = []
    for stretch in (stretch for stretches in work.rewrites.values() for stretch in stretches):
        size = stretch.end - stretch.position
        where = f"{count_of(size, 'byte')} at position {stretch.position}"
        covered = "zeros" if stretch.kind == "behind" else "a gap"
        what = f"keep {where} in quarantine and put {covered} in their place" if size else f"put a gap at {where}"
        steps.append(_step("cover", stretch, what))
    for stretch in work.fills:
        what = f"make {segment_name(stretch.first_offset)} with a gap for the missing messages"
        steps.append(_step("fill", stretch, what))
    return steps


def _step(action: str, stretch: Stretch, what: str) -> RepairStep:
    return RepairStep(
        action=action,
        file=segment_name(stretch.base if action == "cover" else stretch.first_offset),
        what=what,
        cost=lost(stretch.first_offset, stretch.next_offset),
        messages=stretch.next_offset - stretch.first_offset,
        bytes=stretch.end - stretch.position,
    )


def _tail_steps(inspection: Inspection) -> list[RepairStep]:
    """What opening does at the end of the log."""
    findings = inspection.findings
    assert findings is not None
    steps = []
    codes = {finding.code for finding in inspection.report.findings}
    if findings.cut is not None and codes & {"torn_tail", "lost_tail"}:
        size = findings.cut.used_end - findings.cut.position
        steps.append(
            RepairStep(
                action="cut",
                file=segment_name(findings.cut.base),
                what=f"cut off {remains(findings.cut)} behind the last whole frame, and keep it in quarantine",
                cost=torn_cost(findings) if findings.lost_tail is None else "see the next step",
                bytes=size,
            )
        )
    ends = [
        (stretch.first_offset, stretch.next_offset)
        for stretch in inspection.stretches
        if _is_the_end(stretch, inspection)
    ]
    if findings.lost_tail is not None:
        ends.append(findings.lost_tail)
    for first, next_offset in ends:
        steps.append(
            RepairStep(
                action="mark",
                file=segment_name(findings.active_base),
                what=f"mark {offsets(first, next_offset)} as lost; these offsets are never used again",
                cost=lost(first, next_offset),
                messages=next_offset - first,
            )
        )
    return steps


def _file_steps(inspection: Inspection, work: Work) -> list[RepairStep]:
    texts = {
        STATE: ("state", "write the state file anew from what the frames tell"),
        EPOCHS: ("epochs", "begin a new table of epochs"),
    }
    steps = []
    for finding in inspection.report.findings:
        if finding.code == "segments_missing":
            what = f"begin a new segment; the log goes on at offset {work.begin_at}"
            steps.append(RepairStep(action="begin", file=finding.file, what=what, cost=finding.cost))
        if finding.file in texts and finding.severity == "damage":
            action, what = texts[finding.file]
            steps.append(RepairStep(action=action, file=finding.file, what=what, cost=finding.cost))
        elif finding.code == "leftover_file":
            what = "remove what a crash left of a write (a copy stays in the backup)"
            steps.append(
                RepairStep(action="remove", file=finding.file, what=what, cost=NO_MESSAGE, bytes=finding.bytes)
            )
    spoiled = {finding.file for finding in inspection.report.findings if finding.code.startswith("index_")}
    names = sorted({*spoiled, *map(index_name, work.index_bases)})
    if names:
        what = "write the index anew" if len(names) == 1 else f"write {len(names)} indexes anew"
        steps.append(RepairStep(action="index", file=names[0], what=what, cost=NO_MESSAGE))
    return steps
