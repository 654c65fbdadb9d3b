"""Mending a damaged log: what is lost is marked as lost, what is left stays where it is, and nothing is thrown away.

    1. take the lock, look at everything, decide
    2. copy every file that will change into a backup, durably
    3. keep damaged bytes in quarantine; put a copy of the segment in place, with a gap frame over the damage
    4. open and close the log in the ordinary way: it cuts a torn tail and writes state and epochs anew
    5. write missing and damaged indexes anew

A sealed segment is never changed in place, and every good frame keeps its position and its offsets. A crash at any
point leaves a log that opens, and a repair that can be run again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from itertools import count
from os import PathLike, fspath
from typing import Final

import msgspec

from holdfast.checksum import crc32c
from holdfast.codec.encode import FramePlace, gap_body, header_for
from holdfast.codec.frame import FrameHeader, frame_bytes, read_frame
from holdfast.env import World, real_world
from holdfast.env.disk import Disk
from holdfast.errors import CorruptData, DiskFull, InvalidRequest
from holdfast.settings import LogSettings
from holdfast.storage.checks.check import Inspection, Progress, inspect
from holdfast.storage.checks.finding import CheckReport
from holdfast.storage.checks.inventory import BACKUP_PREFIX
from holdfast.storage.checks.plan import RepairPlan, RepairStep, Work, plan_for, work_for
from holdfast.storage.checks.survey import Stretch
from holdfast.storage.epochs import NO_EPOCHS, Epochs, load_epochs
from holdfast.storage.files import durable_replace, index_name, join, segment_name, write_fully
from holdfast.storage.index import NO_TIME, SegmentIndex
from holdfast.storage.log import Log
from holdfast.storage.opening import open_error, require_log, require_own, take_lock
from holdfast.storage.quarantine import QuarantineNote, keep_bytes
from holdfast.storage.recovery import SegmentLimits, recover
from holdfast.storage.segment import Segment
from holdfast.storage.walk import Wanted, walk

# A copy of every file that a repair will change, made durable before the first byte is changed.
#
# A backup is a folder: the files under their own names, and `backup.json`, which is written last. A folder without it
# is what a crash left of a backup that was never finished; nothing was changed then.


NOTE: Final = "backup.json"
_CHUNK: Final = 1 << 20
_SPARE_BYTES: Final = 1 << 20  # notes, indexes, the new state file


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
    """Raise DiskFull unless backup, quarantine and the copy of the largest segment will fit."""
    needed = work.quarantine_bytes + work.largest_copy_bytes + _SPARE_BYTES
    needed += work.backup_bytes if backup is None else 0
    free = world.disk.free_bytes(folder)
    if free < needed:
        raise DiskFull(
            f"repairing {folder} takes {needed:,} bytes for backup and copies, {free:,} are free; nothing was changed. "
            "Free some space, or put the backup on another disk with --backup"
        )


def make_backup(world: World, folder: str, work: Work, plan: RepairPlan, backup: str | None) -> str:
    """Copy the files and answer the backup's folder."""
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
    """Copy a file durably (its name is durable only after the folder's next sync); answers length and checksum."""
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
    """What a repair did, where the originals are, and how the log looks now."""

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
    """What a repair would do. Only looks."""
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
    """Mend the log; raises Busy where somebody owns it. The originals go to `backup`, or to a folder in the log's.

    A folder that other users may write to is refused, unless you trust them.
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
    """Puts gap frames where damage is, one segment after the other."""

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

    def _rewrite(self, base: int, stretches: Sequence[Stretch]) -> None:
        path = join(self._folder, segment_name(base))
        temporary = path + ".tmp"
        for stretch in stretches:
            self._keep(path, stretch)
        copy_file(self._disk, path, temporary)
        file = self._disk.open(temporary, write=True)
        try:
            for stretch in stretches:
                write_fully(file, stretch.position, self._patch(stretch))
            file.sync()
            data = file.view(0, file.size())
        finally:
            file.close()
        for stretch in stretches:
            self._prove(data, stretch)
        # An index from before points into the damage; without one the frames are asked.
        self._remove_index(base)
        self._disk.rename(temporary, path)
        self._disk.sync_folder(self._folder)

    def _keep(self, path: str, stretch: Stretch) -> None:
        if stretch.end == stretch.position:
            return
        file = self._disk.open(path)
        try:
            content = file.view(stretch.position, stretch.end - stretch.position)
        finally:
            file.close()
        note = QuarantineNote(
            segment=segment_name(stretch.base),
            position=stretch.position,
            bytes=len(content),
            first_offset=stretch.first_offset,
            next_offset=stretch.next_offset,
            reason=stretch.reason,
            at_ns=self._world.clock.now_ns(),
        )
        keep_bytes(self._disk, self._folder, content, note)

    def _patch(self, stretch: Stretch) -> Sequence[bytes | memoryview]:
        if stretch.kind == "behind":
            return [bytes(stretch.end - stretch.position)]
        return self._gap(stretch, stretch.position, gap_bytes(stretch))

    def _gap(self, stretch: Stretch, position: int, length: int) -> Sequence[bytes | memoryview]:
        time_ns = 0 if stretch.time_ns == NO_TIME else stretch.time_ns
        body = gap_body(length, stretch.next_offset - stretch.first_offset, time_ns)
        # Not behind the frames before it, and not void where it stands; frames behind it are not older than that.
        epoch = max(stretch.epoch, self._epochs.at(stretch.first_offset))
        place = FramePlace(self._log_id, epoch, position, stretch.first_offset, 0)
        return [header_for(body, place, batch_remaining=0), *body.parts]

    def _prove(self, data: memoryview, stretch: Stretch) -> None:
        """Before the copy takes the segment's place: its gap is a frame, and ends where it should."""
        if stretch.kind == "behind":
            return
        header = read_frame(data, stretch.position, stretch.position, max_raw_bytes=0).header
        if header.end != stretch.position + gap_bytes(stretch) or header.next_offset != stretch.next_offset:
            raise CorruptData(
                f"the mended copy of {segment_name(stretch.base)} is not right; nothing was put in its place"
            )

    def _remove_index(self, base: int) -> None:
        path = join(self._folder, index_name(base))
        if self._disk.exists(path):
            self._disk.remove(path)
            self._disk.sync_folder(self._folder)


def gap_bytes(stretch: Stretch) -> int:
    """How long the gap is that covers a stretch: up to the next frame, or room for a header."""
    return max(_SMALLEST_GAP, stretch.end - stretch.position + 7 & ~7)


def _save_indexes(
    world: World, folder: str, settings: LogSettings, log_id: int, epochs: Epochs, bases: Iterable[int]
) -> None:
    for base in bases:
        if world.disk.exists(join(folder, segment_name(base))):
            segment = Segment(world.disk, folder, base, log_id=log_id, index_bytes=settings.index_bytes)
            index = SegmentIndex(base, settings.index_bytes)
            for found in walk(segment.data(), Wanted(log_id, base, epochs=epochs), bodies=False):
                if isinstance(found, FrameHeader):
                    index.add_header(found)
            durable_replace(world.disk, folder, index_name(base), index.encode(log_id))
