"""The messages of a partition, its delayed messages and its dead letters, read without owning the folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec
from pyroaring import BitMap64

from holdfast.broker.dead_letters import note_of
from holdfast.broker.delayed.intake import cancelled_ids
from holdfast.broker.delayed.runs import DelayedRun, Manifest, load_manifest, open_run
from holdfast.broker.delayed.store import Delayed
from holdfast.broker.folder.layout import DEAD_SUFFIX, DEFAULT_GROUP, group_folder, partition_folder
from holdfast.broker.inspect.status import holds_log, replayed_group
from holdfast.broker.messages import DELAYED_ID, DeadNote, mark, moved_records
from holdfast.codec.frame import Frame, Kind
from holdfast.delivery.events import Acked, Cancelled, Noted, Opened, Phase, decode_event, pairs
from holdfast.delivery.events import Replayed as Rewound
from holdfast.delivery.group import Group
from holdfast.env import World
from holdfast.env.process import get_logger
from holdfast.errors import CorruptData, DamagedRange, HoldfastError, OffsetOutOfRange, Unavailable, UnknownFormat
from holdfast.model import Record
from holdfast.storage import LogReader
from holdfast.storage.files import is_log, join


class UnreadableRange(msgspec.Struct, frozen=True, gc=False):
    """A range of messages, [first_offset, next_offset), that cannot be read, and why."""

    first_offset: int
    next_offset: int
    reason: str


def frames_beside(reader: LogReader, start: int, stop: int) -> Iterator[Frame]:
    """Yield the frames with messages of [start, stop), skipping what is damaged or was trimmed in the meantime."""
    at = max(start, reader.start)
    stop = min(stop, reader.end)
    while at < stop:
        try:
            for frame in reader.read(at, on_damage="skip"):
                if frame.base_offset >= stop:
                    return
                yield frame
                at = frame.next_offset
            return
        except OffsetOutOfRange as trimmed:
            if trimmed.start <= at:
                return  # the log ends earlier: a tail was cut off
            at = trimmed.start


def records_beside(reader: LogReader, start: int, stop: int) -> Iterator[Record]:
    """Yield the messages of [start, stop), skipping what is damaged or was trimmed in the meantime."""
    for frame in frames_beside(reader, start, stop):
        for record in frame.records():
            if start <= record.offset < stop:
                yield record


def damage_in(world: World, folder: str) -> Iterator[UnreadableRange]:
    """Yield what a reader of the log cannot read, in order. Reads every byte below the readable end."""
    reader = LogReader(folder, world=world)
    at, stop = reader.start, reader.end
    while at < stop:
        try:
            for frame in reader.read(at):
                if frame.base_offset >= stop:
                    return
                yield from _undecodable(frame)
                at = frame.next_offset
            return
        except DamagedRange as damage:
            yield UnreadableRange(damage.first_offset, damage.next_offset, str(damage))
            at = damage.next_offset
        except OffsetOutOfRange as trimmed:
            if trimmed.start <= at:
                return
            at = trimmed.start


def _undecodable(frame: Frame) -> Iterator[UnreadableRange]:
    try:
        frame.records()
    except UnknownFormat:
        raise
    except CorruptData as error:
        yield UnreadableRange(frame.base_offset, frame.next_offset, str(error))


# The dead letters of a partition that its log still holds, and the state of each.
#
#     waiting    not decided yet
#     moving     being redriven, or a redrive was cut short
#     redriven   back in its topic, as a new message
#     purged     dropped for good
#     done       redriven or purged; the journal no longer says which
#
# A settled letter stays in the log until its segment is removed. The states are those of one moment, when the journal
# was replayed; letters that arrived since are not seen.


logger = get_logger(__name__)

LetterState: TypeAlias = Literal["waiting", "moving", "redriven", "purged", "done"]

_MOST: Final = 2**64 - 1


class SeenLetter(msgspec.Struct, frozen=True, gc=False):
    """A dead letter as stored, the note of how it died, and its state."""

    record: Record
    note: DeadNote
    state: LetterState


def letters_of(world: World, root: str, topic: str, partition: int, offset: int = 0) -> Iterator[SeenLetter]:
    """Yield the dead letters of one partition of a topic from an offset on, of all groups, oldest first."""
    name = topic + DEAD_SUFFIX
    folder = join(partition_folder(root, name, partition), "log")
    if not is_log(world, folder):
        return
    reader = LogReader(folder, world=world)
    start, stop = reader.start, reader.end
    states = _LetterStates(world, group_folder(root, name, partition, DEFAULT_GROUP), start)
    for record in records_beside(reader, max(start, offset), stop):
        note = note_of(record)
        if note is not None:
            yield SeenLetter(record, note, states.of(record.offset))


class _LetterStates:
    """The state of each dead letter, according to the journal."""

    def __init__(self, world: World, folder: str, start: int) -> None:
        self._group, _, wrong = replayed_group(world, folder, start)
        if wrong:
            logger.warning("the journal of dead letters is damaged", extra={"folder": folder, "wrong": wrong})
        self._acked, self._cancelled = _settled(world, folder)

    def of(self, offset: int) -> LetterState:
        phase = self._group.phase(offset)
        if phase is Phase.DONE:
            if offset in self._cancelled:
                return "purged"
            return "redriven" if offset in self._acked else "done"
        return "moving" if _is_moving(self._group, offset) else "waiting"


def _is_moving(group: Group, offset: int) -> bool:
    lease = group.leases.get(offset)
    return lease is not None and lease.moving_to >= 0


def _settled(world: World, folder: str) -> tuple[BitMap64, BitMap64]:
    """Return the letters that were redriven and those that were purged, as far back as the journal reaches."""
    acked, cancelled = BitMap64(), BitMap64()
    if not holds_log(world, folder):
        return acked, cancelled
    reader = LogReader(folder, world=world)
    for record in records_beside(reader, reader.start, reader.end):
        event = decode_event(bytes(record.value))
        if isinstance(event, Noted):
            for _, noted in event.events():
                if isinstance(noted, Acked):
                    acked.add(noted.runs[0])
        elif isinstance(event, Acked | Cancelled):
            chosen = acked if isinstance(event, Acked) else cancelled
            for start, stop in pairs(event.runs):
                chosen.add_range(start, stop)
        elif isinstance(event, Opened | Rewound):
            # From there on the offsets belong to other letters now, or the same letters come again.
            again = event.end if isinstance(event, Opened) else event.to
            acked.remove_range(again, _MOST)
            cancelled.remove_range(again, _MOST)
    return acked, cancelled


# The delayed messages of a partition, read while an owner may release, spill and remove them.
#
# First determine which messages wait: those in the files that the manifest names and in the intake, except those that
# the manifest, the intake or the partition's log says are gone. If the manifest names other files afterwards, start
# over, so that the result is that of one moment. Then read the messages. Those that a spill moves from the intake to
# runs meanwhile are looked up there; those released or cancelled meanwhile may be left out; none is yielded twice.


# An owner spills only now and then: retry, but not forever.
_TRIES: Final = 5


class _Look(NamedTuple):
    """Which messages wait, and where."""

    runs: list[DelayedRun]
    intake: LogReader
    floor: int
    waiting: BitMap64


def waiting_beside(world: World, partition: str) -> Iterator[Delayed]:
    """Yield the delayed messages in the folder of a partition, in no particular order."""
    folder = join(partition, "delayed")
    if not is_log(world, join(folder, "intake")):
        return
    look = _steady_look(world, partition, folder)
    left = look.waiting
    for _ in range(_TRIES):
        try:
            for record in _records(look, left):
                left.discard(record.offset)
                yield Delayed(record.offset, record.due_at_ms, record)
            return  # the rest is damaged
        except (FileNotFoundError, OffsetOutOfRange):  # spilled, or a whole file released, while we read
            look = _steady_look(world, partition, folder)
            left &= look.waiting
    raise _too_fast(folder)


def count_beside(world: World, partition: str) -> int:
    """Return the number of delayed messages, without reading them."""
    folder = join(partition, "delayed")
    return len(_steady_look(world, partition, folder).waiting) if is_log(world, join(folder, "intake")) else 0


def _steady_look(world: World, partition: str, folder: str) -> _Look:
    for _ in range(_TRIES - 1):
        try:
            look = _look(world, partition, folder)
        except (OSError, HoldfastError):
            continue  # changed in the meantime, or damaged, and then it fails again
        if look is not None:
            return look
    look = _look(world, partition, folder)
    if look is None:
        raise _too_fast(folder)
    return look


def _too_fast(folder: str) -> Unavailable:
    return Unavailable(f"the delayed messages in {folder} change faster than they can be read; try again")


def _look(world: World, partition: str, folder: str) -> _Look | None:
    """Take one look; None if the owner changed the files in the meantime."""
    manifest = load_manifest(world.disk, folder) or Manifest()
    intake = LogReader(join(folder, "intake"), world=world)
    floor = max(manifest.spilled_below, intake.start)
    present, gone = BitMap64(), manifest.gone_ids()
    for frame in intake.read(floor, on_damage="skip"):
        if frame.header.kind == Kind.CONTROL:
            gone.update(cancelled_ids(frame))
        elif frame.header.kind == Kind.DATA:
            present.add_range(max(floor, frame.base_offset), frame.next_offset)
    runs = [open_run(world.disk, folder, entry.name, entry.run_id or None) for entry in manifest.runs]
    for run in runs:
        present |= run.ids
    log_start = _add_released(world, partition, manifest.accounted, gone)
    now = load_manifest(world.disk, folder) or Manifest()
    if (now.spilled_below, now.runs) != (manifest.spilled_below, manifest.runs):
        return None
    # An owner trims the log only up to the position that its manifest names.
    if log_start > manifest.accounted != now.accounted:
        return None
    return _Look(runs, intake, floor, present - gone)


def _add_released(world: World, partition: str, accounted: int, gone: BitMap64) -> int:
    """Add releases that are in the partition's log but not in the manifest; return the start of the log."""
    folder = join(partition, "log")
    if not is_log(world, folder):
        return 0
    reader = LogReader(folder, world=world)
    for record in moved_records(reader, accounted):
        delayed_id = mark(record, DELAYED_ID)
        if delayed_id is not None:
            gone.add(int(delayed_id))
    return reader.start


def _records(look: _Look, wanted: BitMap64) -> Iterator[Record]:
    for run in look.runs:
        if run.ids.intersect(wanted):
            for block in run.blocks():
                yield from (record for record in block if record.offset in wanted)
    last = wanted.max() if wanted else -1
    for frame in look.intake.read(look.floor, on_damage="skip"):
        if frame.base_offset > last:
            return
        if frame.header.kind == Kind.DATA:
            yield from (record for record in frame.records() if record.offset in wanted)
