"""The delayed messages of a partition, seen without owning them: beside an owner who releases, spills and removes.

First it is found out which messages wait: those in the files that the manifest names and in the intake, without what
the manifest, the intake or the partition's log says is gone. That holds for one moment: where the manifest names other
files afterwards, all of it is looked at again. Then the messages are read. What a spill moves from the intake into
runs meanwhile is looked for there; what is released or cancelled meanwhile may be left out, and nothing comes twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from pyroaring import BitMap64

from holdfast.broker.delayed.intake import cancelled_ids
from holdfast.broker.delayed.manifest import Manifest, load_manifest
from holdfast.broker.delayed.run import Run, open_run
from holdfast.broker.delayed.store import Delayed
from holdfast.broker.messages import DELAYED_ID, mark, moved_records
from holdfast.codec.frame import Kind
from holdfast.env import World
from holdfast.errors import HoldfastError, OffsetOutOfRange, Unavailable
from holdfast.model import Record
from holdfast.storage import LogReader
from holdfast.storage.files import join
from holdfast.storage.opening import is_log

# An owner spills once in a while, not all the time: look again, but not for ever.
_TRIES: Final = 5


class _Look(NamedTuple):
    """Where messages wait, and which do."""

    runs: list[Run]
    intake: LogReader
    floor: int
    waiting: BitMap64


def waiting_beside(world: World, partition: str) -> Iterator[Delayed]:
    """What waits in the folder of a partition, in no order."""
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
            return  # what is still left is damaged
        except (FileNotFoundError, OffsetOutOfRange):  # spilled, or all of a file released, while we read
            look = _steady_look(world, partition, folder)
            left &= look.waiting
    raise _too_fast(folder)


def count_beside(world: World, partition: str) -> int:
    """How many wait there, without reading them."""
    folder = join(partition, "delayed")
    return len(_steady_look(world, partition, folder).waiting) if is_log(world, join(folder, "intake")) else 0


def _steady_look(world: World, partition: str, folder: str) -> _Look:
    for _ in range(_TRIES - 1):
        try:
            look = _look(world, partition, folder)
        except (OSError, HoldfastError):
            continue  # changed meanwhile, or damaged: then it fails once more
        if look is not None:
            return look
    look = _look(world, partition, folder)
    if look is None:
        raise _too_fast(folder)
    return look


def _too_fast(folder: str) -> Unavailable:
    return Unavailable(f"the delayed messages in {folder} change faster than they can be read; try again")


def _look(world: World, partition: str, folder: str) -> _Look | None:
    """None where the owner has changed the files meanwhile."""
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
    # An owner lets go of the log only behind the place that its manifest names.
    if log_start > manifest.accounted != now.accounted:
        return None
    return _Look(runs, intake, floor, present - gone)


def _add_released(world: World, partition: str, accounted: int, gone: BitMap64) -> int:
    """Add what is in the partition's log already, and of which the manifest does not know; answers where it starts."""
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
