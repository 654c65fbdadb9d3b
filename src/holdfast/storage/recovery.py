"""Opening a log for its owner: repair what `examine` found, in an order that survives a crash at any point.

    1. copy the bytes that will be removed into quarantine
    2. write the new epoch to the epoch table: from now on, bytes after the end are void
    3. zero those bytes, move segments after the end to quarantine
    4. write everything again that was not known to be synced, and sync it
    5. write to the state file who owns the log now

Nothing is overwritten before there is a durable copy (1 before 3). The epoch table says where the log ends before the
bytes behind that are touched (2 before 3), so that a crash in between cannot bring half of them back to life: frames of
the old epoch past that offset are ignored. The state file comes last, so that until all is done the next opening starts
from the beginning. Every step may be repeated.

Step 4 exists because a failed sync can leave pages that look written (they read back fine and count as clean) but never
reached the disk. Writing the same bytes again makes the kernel treat them as dirty.
"""

from __future__ import annotations

from contextlib import closing
from itertools import pairwise

import msgspec

from holdfast.codec.encode import FramePlace, gap_body, header_for
from holdfast.codec.frame import frame_bytes
from holdfast.env import World
from holdfast.env.process import get_logger
from holdfast.storage.batches import LaidOut
from holdfast.storage.examine import Cut, Findings, ScannedTail, SegmentDamage, examine
from holdfast.storage.files import (
    FULL_DISK,
    QuarantineNote,
    index_bases,
    index_name,
    join,
    keep_bytes,
    move_segment,
    segment_bases,
    segment_name,
    write_again,
    write_zeros,
)
from holdfast.storage.frames import SegmentIndex, used_end
from holdfast.storage.segment import ActiveSegment, Segment, blocks
from holdfast.storage.state import Epochs, Identity, LogState

logger = get_logger(__name__)


class OpenReport(msgspec.Struct, frozen=True):
    """What opening found and did; empty if the log had been closed cleanly."""

    clean: bool = True
    epoch: int = 1
    cut: Cut | None = None
    damage: tuple[SegmentDamage, ...] = ()
    lost_tail: tuple[int, int] | None = None


class Recovered(msgspec.Struct):
    """A log ready for its owner."""

    log_id: int
    epochs: Epochs
    epoch: int
    state: LogState
    sealed: list[Segment]
    active: ActiveSegment | None
    end: int
    report: OpenReport = msgspec.field(default_factory=OpenReport)
    scanned: ScannedTail | None = None


class SegmentLimits(msgspec.Struct, frozen=True):
    """The settings that segments need."""

    index_bytes: int
    segment_bytes: int


def recover(world: World, folder: str, limits: SegmentLimits) -> Recovered:
    """Repair the log and take it over. The caller holds the folder's lock.

    If the disk is full, the space that was reserved for messages to come is used for that.
    """
    try:
        return _recover(world, folder, limits)
    except OSError as error:
        if error.errno not in FULL_DISK or not _release_tail(world, folder):
            raise
    recovered = _recover(world, folder, limits)
    world.put_aside()
    return recovered


def _release_tail(world: World, folder: str) -> bool:
    """Give back the blocks after the last byte of the log that is not zero; returns whether there may have been any."""
    bases = segment_bases(world.disk.names(folder))
    if not bases:
        return False
    with closing(world.disk.open(join(folder, segment_name(bases[-1])), write=True)) as file:
        size = file.size()
        end = blocks(used_end(file.view(0, size), 0))
        file.release(end)
    return end < size


def _recover(world: World, folder: str, limits: SegmentLimits) -> Recovered:
    state = LogState.open(world.disk, folder, write=True)
    try:
        findings = examine(world, folder, state, index_bytes=limits.index_bytes)
        return _take_over(world, folder, limits, state, findings)
    except BaseException:
        if state is not None:
            state.close()
        raise


def _take_over(
    world: World, folder: str, limits: SegmentLimits, state: LogState | None, findings: Findings
) -> Recovered:
    log_id = findings.log_id or world.ids.random_u32()
    # After a clean end nothing was lost, so the owner continues in the same epoch and positions stay valid.
    epoch, epochs = findings.last_epoch, findings.epochs
    if not findings.clean:
        _log_findings(folder, findings)
        _quarantine(world, folder, findings)
        epoch = findings.last_epoch + 1
        # A lost table starts empty: an invented entry for an older epoch would make the frames before it void.
        epochs = findings.epochs.begin(epoch, findings.end)
        epochs.save(world.disk, folder, log_id)
        _remove_cut(world, folder, findings)
    _remove_strays(world, folder)
    active = _open_active(world, folder, limits, log_id, findings)
    end = findings.end
    if findings.lost_tail is not None:
        end = _fill_lost_tail(world, folder, active, log_id, epoch, findings)
    if not findings.clean:
        _sync_again(world, folder, findings, active)
    identity = Identity(log_id, epoch, world.ids.boot_id())
    if state is None:
        state = LogState.create(world.disk, folder, identity, end)
    else:
        state.words[1] = end
        state.set_removing(0)
        state.set_synced(end)
        state.set_mount(world.disk.mount_id(folder))
        state.set_identity(identity)
    new = findings.identity is None and not findings.bases and not findings.epochs_are_whole
    report = OpenReport(findings.clean or new, epoch, findings.cut, tuple(findings.damage), findings.lost_tail)
    sealed = _sealed(world, folder, limits, log_id, findings)
    return Recovered(log_id, epochs, epoch, state, sealed, active, end, report, findings.scanned)


def _quarantine(world: World, folder: str, findings: Findings) -> None:
    cut = findings.cut
    if cut is not None and cut.used_end > cut.position:
        keep_stretch(world, folder, cut.base, cut.position, cut.used_end, cut.offset, None, cut.reason)
    for d in findings.damage:
        if d.end > d.position:
            keep_stretch(world, folder, d.base, d.position, d.end, d.first_offset, d.next_offset, d.reason)


def keep_stretch(
    world: World,
    folder: str,
    base: int,
    position: int,
    end: int,
    first: int,
    next_offset: int | None,
    reason: str,
) -> None:
    """Copy the bytes [position, end) of a segment into quarantine, before they are overwritten."""
    with closing(world.disk.open(join(folder, segment_name(base)))) as file:
        content = file.view(position, end - position)  # valid for as long as we hold it
    note = QuarantineNote(
        segment=segment_name(base),
        position=position,
        bytes=len(content),
        first_offset=first,
        next_offset=next_offset,
        reason=reason,
        at_ns=world.clock.now_ns(),
    )
    keep_bytes(world.disk, folder, content, note)


def _remove_cut(world: World, folder: str, findings: Findings) -> None:
    """Remove what lies after the end, last segment first, so that a crash never leaves a hole in the middle."""
    cut = findings.cut
    if cut is None:
        return
    for base in reversed(cut.later_bases):
        with closing(world.disk.open(join(folder, segment_name(base)))) as file:
            size = file.size()
        note = QuarantineNote(
            segment=segment_name(base),
            position=0,
            bytes=size,
            first_offset=base,
            next_offset=None,
            reason=cut.reason,
            at_ns=world.clock.now_ns(),
        )
        move_segment(world.disk, folder, base, note)
    # A segment that was once sealed has an index, which lists frames that are now gone.
    index_path = join(folder, index_name(cut.base))
    if world.disk.exists(index_path):
        world.disk.remove(index_path)
    if cut.used_end > cut.position:
        zero(world, folder, cut.base, cut.position, cut.used_end)


def zero(world: World, folder: str, base: int, position: int, end: int) -> None:
    """Overwrite with zeros and sync. Never shortens the file: readers may have it mapped."""
    with closing(world.disk.open(join(folder, segment_name(base)), write=True)) as file:
        write_zeros(file, position, end)
        file.sync()


def _remove_strays(world: World, folder: str) -> None:
    """Remove half-written temporary files, and indexes without a segment."""
    names = world.disk.names(folder)
    orphans = [index_name(base) for base in index_bases(names) if segment_name(base) not in names]
    for name in [*orphans, *(name for name in names if name.endswith(".tmp"))]:
        world.disk.remove(join(folder, name))


def _open_active(
    world: World, folder: str, limits: SegmentLimits, log_id: int, findings: Findings
) -> ActiveSegment | None:
    if not findings.bases:
        return None
    return open_segment(world, folder, limits, log_id, findings.indexes[findings.active_base])


def _fill_lost_tail(
    world: World, folder: str, active: ActiveSegment | None, log_id: int, epoch: int, findings: Findings
) -> int:
    """Reserve the offsets of synced messages of which nothing is left; returns the new end.

    A gap frame takes their place, so that readers get an error there instead of different messages.
    """
    assert findings.lost_tail is not None
    first, next_offset = findings.lost_tail
    if active is None or next_offset - first >= 2**32:
        return next_offset
    length = frame_bytes(0)
    body = gap_body(length, next_offset - first, active.index.max_time_ns)
    place = FramePlace(log_id, epoch, active.position, first, first)
    active.make_room(length)
    active.store([header_for(body, place, batch_remaining=0), *body.parts], length)
    active.index.add(place.position, active.position, first, next_offset, body.max_time_ns)
    active.next_offset = next_offset
    return next_offset


def _sync_again(world: World, folder: str, findings: Findings, active: ActiveSegment | None) -> None:
    """Make what this opening keeps durable; pages are written again where an earlier sync may have failed."""
    if active is None:
        return
    bases = [base for base in findings.bases if base <= active.base_offset]
    unsynced = [base for base, next_base in pairwise(bases) if next_base > findings.synced_end]
    for base in unsynced:
        with closing(world.disk.open(join(folder, segment_name(base)), write=True)) as file:
            if findings.same_boot:
                write_again(file, 0, file.size())
            file.sync()
    if findings.same_boot:
        write_again(active.file, active.index.position_before(findings.synced_end), active.position)
    active.file.sync()
    world.disk.sync_folder(folder)


def _sealed(world: World, folder: str, limits: SegmentLimits, log_id: int, findings: Findings) -> list[Segment]:
    segments = []
    for base in findings.bases:
        if base < findings.active_base:
            segment = Segment(world.disk, folder, base, log_id=log_id, index_bytes=limits.index_bytes)
            if base in findings.indexes:
                segment.use_index(findings.indexes[base])
            segments.append(segment)
    return segments


def open_segment(
    world: World,
    folder: str,
    limits: SegmentLimits,
    log_id: int,
    index: SegmentIndex,
    laid_out: LaidOut | None = None,
) -> ActiveSegment:
    """Open the segment of this index for appending. The name of a new one is durable after the folder's next sync.

    Its file is the one in `laid_out`, if given, or else its own, which is created if the index is empty.
    """
    path = join(folder, segment_name(index.base_offset))
    mapped = world.disk.can_map(folder)  # before the file exists: this may fail, and must not leave one behind
    opened = laid_out.take(path) if laid_out else world.disk.open(path, write=True, create=not index.offsets)
    return ActiveSegment(
        world.disk,
        folder,
        index.base_offset,
        log_id=log_id,
        index_bytes=limits.index_bytes,
        file=opened,
        index=index,
        limit_bytes=limits.segment_bytes,
        mapped=mapped,
        created_ns=index.first_time_ns if index.offsets else world.clock.now_ns(),
    )


def _log_findings(folder: str, findings: Findings) -> None:
    """Log one line for each thing that an operator should know."""
    if findings.cut is not None and findings.cut.used_end > findings.cut.position:
        logger.info(
            "torn tail cut",
            extra={"folder": folder, "offset": findings.cut.offset, "why": findings.cut.reason},
        )
    for d in findings.damage:
        logger.warning(
            "damaged messages found; bytes kept in quarantine",
            extra={
                "folder": folder,
                "first_offset": d.first_offset,
                "next_offset": d.next_offset,
                "why": d.reason,
            },
        )
    if findings.lost_tail is not None:
        first, next_offset = findings.lost_tail
        logger.error(
            "synced messages are missing from the end",
            extra={"folder": folder, "first_offset": first, "next_offset": next_offset},
        )
