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
from os import PathLike, fspath
from typing import Final

import msgspec

from holdfast.codec.encode import Place, gap_body, header_for
from holdfast.codec.frame import FrameHeader, frame_bytes, read_frame
from holdfast.env import World, real_world
from holdfast.errors import CorruptData
from holdfast.settings import LogSettings
from holdfast.storage.backup import copy_file, make_backup, require_room
from holdfast.storage.check import Inspection, Progress, inspect
from holdfast.storage.epochs import NO_EPOCHS, Epochs, load_epochs
from holdfast.storage.files import durable_replace, index_name, join, segment_name, write_fully
from holdfast.storage.finding import CheckReport
from holdfast.storage.index import NO_TIME, SegmentIndex
from holdfast.storage.lock import take_lock
from holdfast.storage.log import Log
from holdfast.storage.opening import open_error, require_log, require_own
from holdfast.storage.plan import RepairPlan, Work, plan_for, work_for
from holdfast.storage.quarantine import QuarantineNote, keep_bytes
from holdfast.storage.recovery import SegmentLimits, recover
from holdfast.storage.segment import Segment
from holdfast.storage.survey import Stretch
from holdfast.storage.walk import Wanted, walk

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
        place = Place(self._log_id, epoch, position, stretch.first_offset, 0)
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
