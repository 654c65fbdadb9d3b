"""Repairs a damaged log: what is lost is marked as lost, what is left stays where it is, and nothing is thrown away.

    1. take the lock, check everything, make a plan
    2. copy every file that will change into a backup, durably
    3. keep damaged bytes in quarantine; replace the segment by a copy with a gap frame over the damage
    4. open and close the log in the ordinary way: this cuts a torn tail and rewrites state and epochs
    5. rewrite missing and damaged indexes

A sealed segment is never changed in place, and every good frame keeps its position and its offsets. A crash at any
point leaves a log that opens, and a repair that can be run again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from os import PathLike, fspath
from typing import Final

import msgspec

from holdfast.checksum import crc32c
from holdfast.codec.encode import FramePlace, gap_body, header_for
from holdfast.codec.frame import FrameHeader, frame_bytes, read_frame
from holdfast.env import World, real_world
from holdfast.env.disk import Disk, write_fully
from holdfast.errors import CorruptData, DiskFull, InvalidRequest
from holdfast.model import count_of
from holdfast.settings import LogSettings
from holdfast.storage.checks.check import BACKUP_PREFIX, Inspection, Progress, file_size, inspect, leftovers
from holdfast.storage.checks.finding import (
    NO_MESSAGE,
    CheckReport,
    Finding,
    MissingStretch,
    lost,
    offsets,
    remains,
    torn_cost,
)
from holdfast.storage.files import (
    EPOCHS,
    STATE,
    durable_replace,
    index_name,
    join,
    open_error,
    require_log,
    require_own,
    segment_name,
    take_lock,
)
from holdfast.storage.frames import NO_TIME, FrameRules, SegmentIndex, walk
from holdfast.storage.log import Log
from holdfast.storage.recovery import SegmentLimits, keep_stretch, recover
from holdfast.storage.segment import Segment
from holdfast.storage.state import NO_EPOCHS, Epochs, load_epochs

# With one of these findings, nothing more should be written to the disk: it must be replaced first.
_FAILING_DISK: Final = frozenset({"unreadable", "unjudged_end"})
_LEFT: Final = frozenset({"half_batch", "wrong_time", "wrong_sync", "overlap"})
_MOST_COUNT: Final = 2**32 - 1


class RepairStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a repair. `action` is stable and meant for programs."""

    action: str
    file: str
    what: str
    cost: str
    messages: int = 0
    bytes: int = 0


class RepairPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of a repair, and the findings that it cannot fix. No steps: there is nothing to repair."""

    folder: str
    steps: tuple[RepairStep, ...]
    left: tuple[Finding, ...]
    lost_messages: int
    backup_bytes: int


@dataclass
class Work:
    """The plan in terms of files and stretches, for carrying it out."""

    rewrites: dict[int, list[MissingStretch]] = field(default_factory=dict)  # segments to copy, with what to cover
    fills: list[MissingStretch] = field(default_factory=list)  # missing segments, each replaced by one with only a gap
    left: list[MissingStretch] = field(default_factory=list)
    begin_at: int | None = None  # no segment is left: the offset at which the log continues
    distrusted: list[int] = field(default_factory=list)  # segments whose saved index hides what is wrong
    index_bases: list[int] = field(default_factory=list)
    backup_names: list[str] = field(default_factory=list)
    backup_bytes: int = 0
    quarantine_bytes: int = 0
    largest_copy_bytes: int = 0


def plan_for(world: World, inspection: Inspection) -> RepairPlan:
    """Make the plan for what the check found."""
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
    """Work out which files must be copied, created or rewritten."""
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
    bad_indexes = {file for code, file in codes if code.startswith("index_")}
    work.index_bases = [
        *(base for base in sealed if base in work.rewrites or index_name(base) in bad_indexes),
        *(stretch.first_offset for stretch in work.fills),
    ]
    if inspection.report.findings:
        _list_backup(world, inspection, work)
    return work


def _place(work: Work, stretch: MissingStretch, inspection: Inspection) -> None:
    """Decide how to repair a stretch; the very end of the log is repaired by opening it."""
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


def _is_the_end(stretch: MissingStretch, inspection: Inspection) -> bool:
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


def _step(action: str, stretch: MissingStretch, what: str) -> RepairStep:
    return RepairStep(
        action=action,
        file=segment_name(stretch.base if action == "cover" else stretch.first_offset),
        what=what,
        cost=lost(stretch.first_offset, stretch.next_offset),
        messages=stretch.next_offset - stretch.first_offset,
        bytes=stretch.end - stretch.position,
    )


def _tail_steps(inspection: Inspection) -> list[RepairStep]:
    """Return what opening does at the end of the log."""
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
                what=f"cut off {remains(findings.cut)} after the last intact frame, and keep it in quarantine",
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
        STATE: ("state", "rebuild the state file from the frames"),
        EPOCHS: ("epochs", "start a new table of epochs"),
    }
    steps = []
    for finding in inspection.report.findings:
        if finding.code == "segments_missing":
            what = f"start a new segment; the log continues at offset {work.begin_at}"
            steps.append(RepairStep(action="begin", file=finding.file, what=what, cost=finding.cost))
        if finding.file in texts and finding.severity == "damage":
            action, what = texts[finding.file]
            steps.append(RepairStep(action=action, file=finding.file, what=what, cost=finding.cost))
        elif finding.code == "leftover_file":
            what = "remove what a crash left of a write (a copy stays in the backup)"
            steps.append(
                RepairStep(action="remove", file=finding.file, what=what, cost=NO_MESSAGE, bytes=finding.bytes)
            )
    bad_indexes = {finding.file for finding in inspection.report.findings if finding.code.startswith("index_")}
    names = sorted({*bad_indexes, *map(index_name, work.index_bases)})
    if names:
        what = "rewrite the index" if len(names) == 1 else f"rewrite {len(names)} indexes"
        steps.append(RepairStep(action="index", file=names[0], what=what, cost=NO_MESSAGE))
    return steps


# A backup is a folder with the files under their own names, and `backup.json`, which is written last. A folder without
# it is an unfinished backup left by a crash; nothing had been changed then.
NOTE: Final = "backup.json"
_CHUNK: Final = 1 << 20
_SPARE_BYTES: Final = 1 << 20  # for notes, indexes, the new state file


class BackupFile(msgspec.Struct, frozen=True, gc=False):
    """One file of a backup."""

    name: str
    bytes: int
    crc32c: int


class BackupNote(msgspec.Struct, frozen=True, kw_only=True):
    """What a backup holds and why it was made."""

    folder: str
    made_at: str
    files: tuple[BackupFile, ...]
    before: tuple[RepairStep, ...]


def require_room(world: World, folder: str, work: Work, backup: str | None) -> None:
    """Raise DiskFull unless there is room for the backup, the quarantine and a copy of the largest segment."""
    needed = work.quarantine_bytes + work.largest_copy_bytes + _SPARE_BYTES
    needed += work.backup_bytes if backup is None else 0
    free = world.disk.free_bytes(folder)
    if free < needed:
        raise DiskFull(
            f"repairing {folder} takes {needed:,} bytes for backup and copies, {free:,} are free; nothing was changed. "
            "Free some space, or put the backup on another disk with --backup"
        )


def make_backup(world: World, folder: str, work: Work, plan: RepairPlan, backup: str | None) -> str:
    """Copy the files, durably, before the first byte is changed; returns the backup's folder."""
    now = datetime.fromtimestamp(world.clock.now_ns() // 1_000_000_000, UTC)
    target = backup or _new_name(world, folder, now)
    world.disk.make_folder(target)
    if world.disk.names(target):
        raise InvalidRequest(
            f"{target} holds files already; give --backup an empty or a new folder. Nothing was changed"
        )
    files = tuple(
        BackupFile(name, *copy_file(world.disk, join(folder, name), join(target, name))) for name in work.backup_names
    )
    world.disk.sync_folder(target)
    note = BackupNote(folder=folder, made_at=now.isoformat(), files=files, before=plan.steps)
    durable_replace(world.disk, target, NOTE, msgspec.json.format(msgspec.json.encode(note)))
    return target


def copy_file(disk: Disk, source: str, target: str) -> tuple[int, int]:
    """Copy a file durably, except for its name, which needs a sync of the folder; returns length and checksum."""
    reading = disk.open(source)
    writing = disk.open(target, write=True, create=True)
    position, checksum = 0, 0
    try:
        writing.truncate(0)
        while content := reading.read(position, _CHUNK):
            write_fully(writing, position, [content])
            checksum = crc32c(content, checksum)
            position += len(content)
        writing.sync()
    finally:
        writing.close()
        reading.close()
    return position, checksum


def _new_name(world: World, folder: str, now: datetime) -> str:
    stem = join(folder, f"{BACKUP_PREFIX}{now:%Y%m%dT%H%M%SZ}")
    names = (stem if n == 1 else f"{stem}-{n}" for n in count(1))
    return next(name for name in names if not world.disk.exists(name))


_SMALLEST_GAP: Final = frame_bytes(0)


class RepairResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a repair did, where the originals are, and the state of the log now."""

    plan: RepairPlan
    changed: bool
    backup: str | None
    backup_files: tuple[str, ...]
    after: CheckReport


def plan_repair(
    folder: str | PathLike[str],
    world: World | None = None,
    settings: LogSettings | None = None,
    *,
    progress: Progress | None = None,
) -> RepairPlan:
    """Return what a repair would do, without changing anything."""
    world, settings = world or real_world(), settings or LogSettings()
    return plan_for(world, inspect(fspath(folder), world, settings, progress=progress))


def repair(
    folder: str | PathLike[str],
    world: World | None = None,
    settings: LogSettings | None = None,
    *,
    backup: str | PathLike[str] | None = None,
    progress: Progress | None = None,
    trust_folder: bool = False,
) -> RepairResult:
    """Repair the log; raises Busy if somebody owns it. The originals go to `backup`, or to a folder in the log's own.

    Raises InvalidRequest for a folder that other users may write to, unless you trust them.
    """
    world, settings = world or real_world(), settings or LogSettings()
    folder, backup = fspath(folder), None if backup is None else fspath(backup)
    try:
        require_log(world, folder)
        require_own(world, folder, trusted=trust_folder)
        lock = take_lock(world, folder)
        try:
            inspection = inspect(folder, world, settings, owned=False, progress=progress)
            plan = plan_for(world, inspection)
            if not plan.steps:
                return RepairResult(plan=plan, changed=False, backup=None, backup_files=(), after=inspection.report)
            work = work_for(world, inspection)
            require_room(world, folder, work, backup)
            kept = make_backup(world, folder, work, plan, backup)
            _Mender(world, folder, settings, inspection, work).run()
            recovered = recover(world, folder, SegmentLimits(settings.index_bytes, settings.segment_bytes))
            _save_indexes(world, folder, settings, recovered.log_id, recovered.epochs, work.index_bases)
            Log(world, folder, settings, lock, recovered).close()
        finally:
            lock.release()
        after = inspect(folder, world, settings, progress=progress).report
    except OSError as error:
        raise open_error(folder, error) from error
    return RepairResult(plan=plan, changed=True, backup=kept, backup_files=tuple(work.backup_names), after=after)


class _Mender:
    """Puts gap frames over the damage, one segment after the other."""

    def __init__(self, world: World, folder: str, settings: LogSettings, inspection: Inspection, work: Work) -> None:
        self._world = world
        self._disk = world.disk
        self._folder = folder
        self._settings = settings
        self._work = work
        table = load_epochs(world.disk, folder)
        self._epochs = NO_EPOCHS if table is None else table[1]
        self._log_id = inspection.report.log_id or 0

    def run(self) -> None:
        for base, stretches in self._work.rewrites.items():
            self._rewrite(base, stretches)
        for stretch in self._work.fills:
            content = b"".join(self._gap(stretch, 0, _SMALLEST_GAP))
            durable_replace(self._disk, self._folder, segment_name(stretch.first_offset), content)
        if self._work.begin_at is not None:
            durable_replace(self._disk, self._folder, segment_name(self._work.begin_at), b"")
        for base in self._work.distrusted:
            self._remove_index(base)

    def _rewrite(self, base: int, stretches: Sequence[MissingStretch]) -> None:
        path = join(self._folder, segment_name(base))
        temporary = path + ".tmp"
        for s in stretches:
            if s.end > s.position:
                keep_stretch(
                    self._world, self._folder, base, s.position, s.end, s.first_offset, s.next_offset, s.reason
                )
        copy_file(self._disk, path, temporary)
        with closing(self._disk.open(temporary, write=True)) as file:
            for stretch in stretches:
                write_fully(file, stretch.position, self._patch(stretch))
            file.sync()
            data = file.view(0, file.size())
        for stretch in stretches:
            self._prove(data, stretch)
        # The old index points into the damage; without it, the frames are scanned.
        self._remove_index(base)
        self._disk.rename(temporary, path)
        self._disk.sync_folder(self._folder)

    def _patch(self, stretch: MissingStretch) -> Sequence[bytes | memoryview]:
        if stretch.kind == "behind":
            return [bytes(stretch.end - stretch.position)]
        return self._gap(stretch, stretch.position, gap_bytes(stretch))

    def _gap(self, stretch: MissingStretch, position: int, length: int) -> Sequence[bytes | memoryview]:
        time_ns = 0 if stretch.time_ns == NO_TIME else stretch.time_ns
        body = gap_body(length, stretch.next_offset - stretch.first_offset, time_ns)
        # Its epoch must not be below that of the frames before it, nor void at this offset; later frames are not older.
        epoch = max(stretch.epoch, self._epochs.at(stretch.first_offset))
        place = FramePlace(self._log_id, epoch, position, stretch.first_offset, 0)
        return [header_for(body, place, batch_remaining=0), *body.parts]

    def _prove(self, data: memoryview, stretch: MissingStretch) -> None:
        """Check the copy before it replaces the segment: the gap is a frame, and ends where it should."""
        if stretch.kind == "behind":
            return
        header = read_frame(data, stretch.position, stretch.position, max_raw_bytes=0).header
        if header.end != stretch.position + gap_bytes(stretch) or header.next_offset != stretch.next_offset:
            raise CorruptData(
                f"the repaired copy of {segment_name(stretch.base)} is not right, so nothing was replaced: check the "
                "disk, then repair again"
            )

    def _remove_index(self, base: int) -> None:
        path = join(self._folder, index_name(base))
        if self._disk.exists(path):
            self._disk.remove(path)
            self._disk.sync_folder(self._folder)


def gap_bytes(stretch: MissingStretch) -> int:
    """Return the length of the gap that covers a stretch: up to the next frame, but at least a header."""
    return max(_SMALLEST_GAP, stretch.end - stretch.position + 7 & ~7)


def _save_indexes(
    world: World, folder: str, settings: LogSettings, log_id: int, epochs: Epochs, bases: Iterable[int]
) -> None:
    for base in bases:
        if world.disk.exists(join(folder, segment_name(base))):
            segment = Segment(world.disk, folder, base, log_id=log_id, index_bytes=settings.index_bytes)
            index = SegmentIndex(base, settings.index_bytes)
            for found in walk(segment.data(), FrameRules(log_id, base, epochs=epochs), bodies=False):
                if isinstance(found, FrameHeader):
                    index.add_header(found)
            durable_replace(world.disk, folder, index_name(base), index.encode(log_id))
