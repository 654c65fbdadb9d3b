"""Finds out what state a log is in and what opening it would do, without changing anything.

Two things look alike and must never be confused. A *torn tail* is what a crash leaves of writes that were not yet
synced; it may be cut off. *Damage* is synced data that is no longer what was written; it is reported, and everything
after it is kept. What tells them apart:

- Without a reboot, the page cache has lost nothing, and the owner writes front to back. So anything found after a bad
  frame was written later, and the bad frame was once intact: damage. The exception is a file system that was mounted
  again, as it must be after its disk failed: it has lost its cache as in a reboot.
- After a reboot, what is bad now but was known to be synced (the state file says so, and so does every later frame) is
  damage. Anything else that is bad is torn, and what follows it was never acknowledged.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from functools import partial
from typing import Final, TypeAlias

import msgspec

from holdfast.codec.columns import DUE, EXPIRY, FLAGS, HEADERS, PRIORITIES, REMOVED
from holdfast.codec.frame import FrameHeader
from holdfast.codec.singles import frames_alike
from holdfast.env import World
from holdfast.storage.files import join, segment_bases, segment_name
from holdfast.storage.frames import Damage, FrameRules, SegmentIndex, first_log_id, used_end, walk
from holdfast.storage.segment import Segment
from holdfast.storage.state import NO_EPOCHS, Epochs, Identity, LogState, load_epochs


class Cut(msgspec.Struct, frozen=True):
    """Where the log ends: `position` in segment `base`. Bytes up to `used_end` and later segments are removed."""

    base: int
    position: int
    used_end: int
    offset: int
    reason: str
    later_bases: tuple[int, ...] = ()


class SegmentDamage(msgspec.Struct, frozen=True):
    """Damage, and the segment it is in. Here `next_offset` is always known."""

    base: int
    position: int
    end: int
    first_offset: int
    next_offset: int
    reason: str


# Columns that others look for in the tail after opening; the remaining ones may be in nearly every frame.
_NOTED: Final = HEADERS | PRIORITIES | EXPIRY | DUE | FLAGS | REMOVED


class ScannedTail:
    """The offsets [first, end) that opening has scanned, and which columns their frames have.

    Groups look for priorities, for example; with this they need not read the same bytes again.
    """

    def __init__(self, first: int) -> None:
        self.first = self.end = first
        self._offsets = array("q")
        self._columns = array("H")

    def add(self, offset: int, columns: int) -> None:
        self._offsets.append(offset)
        self._columns.append(columns)

    def frames_with(self, columns: int, offset: int) -> list[int]:
        """Return the first offsets of frames with one of these columns, from the frame that may hold `offset` on."""
        known = [at for at, had in zip(self._offsets, self._columns, strict=True) if had & columns and at < self.end]
        return known[max(bisect_right(known, offset) - 1, 0) :]


class Findings(msgspec.Struct):
    """Everything that opening needs to know."""

    log_id: int | None
    identity: Identity | None
    epochs: Epochs
    epochs_are_whole: bool
    bases: list[int]
    synced_end: int
    known_synced: int
    published_end: int
    clean: bool
    same_boot: bool
    cache_kept: bool  # everything written is there, synced or not: neither a reboot nor a new mount since
    end: int
    last_epoch: int
    active_base: int = 0
    active_position: int = 0
    indexes: dict[int, SegmentIndex] = {}
    damage: list[SegmentDamage] = []
    cut: Cut | None = None
    lost_tail: tuple[int, int] | None = None  # synced offsets [first, next) of which nothing is left
    scanned: ScannedTail | None = None


# A place where the log could end: (segment base, position, offset). A plain tuple, since one is made for every frame.
_End: TypeAlias = tuple[int, int, int]


class _Hole(msgspec.Struct, frozen=True, gc=False):
    """A stretch that should be frames but is not, and where the log could end before it."""

    base: int
    position: int
    end: int
    first_offset: int
    reason: str
    frame_before: _End
    batch_before: _End


class _Scan:
    """One pass over segments: finds holes, builds indexes, and notes where the last frame and last whole batch end."""

    def __init__(self, findings: Findings, bases: list[int], index_bytes: int) -> None:
        self._findings = findings
        self._index_bytes = index_bytes
        self._wanted = FrameRules(findings.log_id or 0, bases[0], epochs=findings.epochs)
        self.frame_end = self.batch_end = (bases[0], 0, bases[0])
        self.holes: list[_Hole] = []
        self.good_after: list[int | None] = []  # for each hole, the first good offset after it
        self.indexes: dict[int, SegmentIndex] = {}
        self.tail = ScannedTail(bases[0])
        self._body_bytes = -1  # of the last frame
        self._open_holes = False  # whether there are holes with nothing good after them so far

    def run(self, world: World, folder: str, base: int) -> None:
        expected = self._wanted.offset
        if base > expected:
            if not self._open_holes:
                at_base, at, _ = self.frame_end
                reason = f"offsets {expected} to {base - 1} are missing before segment {base}"
                self._add_hole(at_base, at, at, expected, reason)
            self._wanted.offset = base
        index = self.indexes[base] = SegmentIndex(base, self._index_bytes)
        and_alike = partial(self._add_alike, base, index)
        for found in walk(_data(world, folder, base), self._wanted, and_alike=and_alike):
            if type(found) is FrameHeader:
                self._add_frame(base, found, index)
            elif isinstance(found, Damage) and found.end > found.position:
                self._add_hole(base, found.position, found.end, found.first_offset, found.reason)
            elif isinstance(found, Damage):
                at_base, at, _ = self.frame_end
                self._add_hole(at_base, at, at, found.first_offset, found.reason)

    def _add_frame(self, base: int, header: FrameHeader, index: SegmentIndex) -> None:
        position, offset = header.end, header.base_offset + header.count
        if header.position:
            index.add(header.position, position, header.base_offset, offset, header.max_time_ns)
        else:
            index.add_header(header)
        if header.columns & _NOTED:
            self.tail.add(header.base_offset, header.columns)
        self.frame_end = (base, position, offset)
        if header.batch_remaining == 0:
            self.batch_end = self.frame_end
        if self._open_holes:
            self._close_holes(header.base_offset)
        findings = self._findings
        if header.synced_offset > findings.known_synced:
            synced = findings.epochs.cap(header.epoch, header.synced_offset)
            findings.known_synced = max(findings.known_synced, synced)
        if header.epoch > findings.last_epoch:
            findings.last_epoch = header.epoch

    def _add_alike(self, base: int, index: SegmentIndex, data: memoryview, header: FrameHeader) -> FrameHeader:
        """Add the frames that are like this one, which was just added, and follow it; returns the last of them.

        Nearly all that `_add_frame` does is the same for all of them, and done once: of a million messages that were
        put one by one, this is most of what opening costs.
        """
        if header.body_bytes != self._body_bytes or header.columns & _NOTED or header.batch_remaining:
            self._body_bytes = header.body_bytes
            return header  # a look at what follows costs as much as a frame, and pays only if many are alike
        last, offset, synced = header.position, header.base_offset, 0
        size = header.end - last
        for position, time_ns, own_synced in frames_alike(data, header):
            offset += 1
            if position >= index.next_entry_at:
                index.add_entry(position, offset)
            if time_ns > index.max_time_ns:
                index.max_time_ns = time_ns
            if own_synced > synced:
                synced = own_synced
            last = position
        if last == header.position:
            return header
        index.end, index.next_offset = last + size, offset + 1
        self.frame_end = self.batch_end = (base, last + size, offset + 1)
        findings = self._findings
        findings.known_synced = max(findings.known_synced, findings.epochs.cap(header.epoch, synced))
        return msgspec.structs.replace(header, position=last, base_offset=offset)

    def _close_holes(self, offset: int) -> None:
        self._open_holes = False
        self.good_after = [offset if after is None else after for after in self.good_after]

    def _add_hole(self, base: int, position: int, end: int, first_offset: int, reason: str) -> None:
        self.holes.append(_Hole(base, position, end, first_offset, reason, self.frame_end, self.batch_end))
        self.good_after.append(None)
        self._open_holes = True


def examine(
    world: World, folder: str, state: LogState | None, *, index_bytes: int, everything: bool = False
) -> Findings:
    """Scan the tail (or everything) and return what opening the log would find and do."""
    findings = _known_facts(world, folder, state)
    if findings.log_id is None:
        findings.log_id = _log_id_of_frames(world, folder, findings.bases)
    if not findings.bases:
        return findings
    if findings.clean and not everything and _trust_index(world, folder, findings, index_bytes):
        return findings
    findings.clean = False
    to_scan = _to_scan(findings, everything=everything)
    scan = _Scan(findings, to_scan, index_bytes)
    for base in to_scan:
        scan.run(world, folder, base)
    frame_end, batch_end, reason = _judge(findings, scan)
    # A batch counts only if its last frame is there; but nothing that was synced is ever given up.
    half = findings.known_synced <= batch_end[2] < frame_end[2]
    end = batch_end if half else frame_end
    _settle_end(world, folder, findings, end, reason or ("a batch was not written to its end" if half else ""))
    findings.indexes = _kept_indexes(world, folder, findings, scan.indexes)
    findings.scanned = scan.tail
    findings.scanned.end = findings.end
    return findings


def _known_facts(world: World, folder: str, state: LogState | None) -> Findings:
    identity = None if state is None else state.identity
    table = load_epochs(world.disk, folder)
    log_id = identity.log_id if identity is not None else table[0] if table is not None else None
    epochs = table[1] if table is not None and table[0] == log_id else None
    boot_id = world.ids.boot_id()
    same_boot = identity is not None and boot_id != 0 and identity.boot_id == boot_id
    synced_end = 0
    if state is not None and identity is not None:
        synced_end = (epochs or NO_EPOCHS).cap(identity.epoch, state.synced_end)
    return Findings(
        log_id=log_id,
        identity=identity,
        epochs=epochs or NO_EPOCHS,
        epochs_are_whole=epochs is not None,
        bases=segment_bases(world.disk.names(folder)),
        synced_end=synced_end,
        known_synced=synced_end,
        published_end=0 if state is None else state.readable_end,
        clean=identity is not None
        and epochs is not None
        and identity.clean_end == synced_end
        and identity.epoch == epochs.last,
        same_boot=same_boot,
        cache_kept=same_boot and state is not None and same_mount(world, folder, state),
        end=synced_end,
        last_epoch=max(epochs.last if epochs else 0, identity.epoch if identity else 0),
    )


def same_mount(world: World, folder: str, state: LogState) -> bool:
    """Whether the log is on the mount that its last owner found it on, as far as that is known."""
    before, now = state.mount_id, world.disk.mount_id(folder)
    return not before or not now or before == now


def _log_id_of_frames(world: World, folder: str, bases: list[int]) -> int | None:
    found = (first_log_id(_data(world, folder, base)) for base in bases)
    return next((log_id for log_id in found if log_id is not None), None)


def _data(world: World, folder: str, base: int) -> memoryview:
    file = world.disk.open(join(folder, segment_name(base)))
    return file.view(0, file.size())


def _trust_index(world: World, folder: str, findings: Findings, index_bytes: int) -> bool:
    """After a clean end, use the saved index of the last segment instead of scanning it."""
    base = findings.bases[-1]
    segment = Segment(world.disk, folder, base, log_id=findings.log_id or 0, index_bytes=index_bytes)
    index = segment.load_index()
    if index is None or index.next_offset != findings.synced_end:
        return False
    data = segment.data()
    if not index.fits(data) or len(data) < index.end or used_end(data, index.end) != index.end:
        return False
    findings.indexes[base] = index
    findings.active_base, findings.active_position = base, index.end
    return True


def _to_scan(findings: Findings, *, everything: bool) -> list[int]:
    """Return the segments whose tail may be unsynced; the others are checked when they are read."""
    bases = findings.bases
    if everything or findings.identity is None:
        return bases
    # After a reboot, synced segments need no scan. Without one, only the last segment that can hold a message does;
    # not simply the last file, since a file of any name may have been added after it.
    restarted = not findings.cache_kept and findings.identity.clean_end is None
    trusted = findings.end if restarted else max(findings.end, findings.published_end)
    if findings.identity.epoch != findings.epochs.last:
        trusted = min(trusted, findings.epochs.last_first_offset)  # an owner died while truncating at that offset
    first = max((i for i, base in enumerate(bases) if base <= trusted), default=0)
    return bases[first:]


def _judge(findings: Findings, scan: _Scan) -> tuple[_End, _End, str]:
    """Return where the log ends, by frames and by whole batches; holes that stay inside it are recorded as damage."""
    for hole, follower in zip(scan.holes, scan.good_after, strict=True):
        # With the cache kept, whatever follows was written later, so the bytes in the hole were once a frame. Otherwise
        # only the syncs that are on record say so.
        promised = findings.cache_kept or hole.first_offset < findings.known_synced
        if follower is None or not promised:
            return hole.frame_before, hole.batch_before, hole.reason
        findings.damage.append(
            SegmentDamage(hole.base, hole.position, hole.end, hole.first_offset, follower, hole.reason)
        )
    return scan.frame_end, scan.batch_end, ""


def _settle_end(world: World, folder: str, findings: Findings, end: _End, reason: str) -> None:
    """Record which segment is the active one, and what must be removed."""
    base, position, offset = end
    if offset in findings.bases and offset > base:
        base, position = offset, 0  # the segment that was started last and has no frame yet
    findings.active_base, findings.active_position, findings.end = base, position, offset
    later = tuple(b for b in findings.bases if b > base)
    used = used_end(_data(world, folder, base), position)
    if used > position or later:
        findings.cut = Cut(base, position, used, offset, reason or "segments without a frame follow", later)
    if offset < findings.known_synced:
        findings.lost_tail = (offset, findings.known_synced)


def _kept_indexes(
    world: World, folder: str, findings: Findings, indexes: dict[int, SegmentIndex]
) -> dict[int, SegmentIndex]:
    """Return the indexes of the segments that stay; the active one may end earlier than was scanned."""
    base, position = findings.active_base, findings.active_position
    kept = {b: index for b, index in indexes.items() if b <= base}
    if base not in kept or kept[base].end != position:
        segment = Segment(world.disk, folder, base, log_id=findings.log_id or 0, index_bytes=0)
        index = SegmentIndex(base, next(iter(indexes.values())).spacing_bytes)
        for found in walk(segment.data()[:position], FrameRules(findings.log_id or 0, base, epochs=findings.epochs)):
            if isinstance(found, FrameHeader):
                index.add_header(found)
        kept[base] = index
    return kept
