"""The dead letters of a partition, all that its log still holds, and what became of each; seen without owning anything.

    waiting    nobody has decided yet
    moving     on its way back into its topic: a redrive is under way, or was cut short
    redriven   back in its topic, as a new message
    purged     dropped for good
    done       one of the last two; the journal no longer says which

A letter that is settled stays in the log until its segment goes. What each of them is follows from the journal as it
was at one moment, when the look began; letters that came since are not seen.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Final, Literal, TypeAlias

import msgspec
from pyroaring import BitMap64

from holdfast.broker.dead_letters import note_of
from holdfast.broker.folder.layout import DEAD_SUFFIX, DEFAULT_GROUP, group_folder, partition_folder
from holdfast.broker.inspect.journals import holds_log, replayed_group
from holdfast.broker.inspect.logs import records_beside
from holdfast.broker.messages import DeadNote
from holdfast.delivery.events import Acked, Cancelled, Opened, Phase, decode_event
from holdfast.delivery.events import Replayed as Rewound
from holdfast.delivery.group import Group
from holdfast.delivery.runs import pairs
from holdfast.env import World
from holdfast.model import Record
from holdfast.storage import LogReader
from holdfast.storage.files import join
from holdfast.storage.opening import is_log

logger = logging.getLogger(__name__)

LetterState: TypeAlias = Literal["waiting", "moving", "redriven", "purged", "done"]

_MOST: Final = 2**64 - 1


class SeenLetter(msgspec.Struct, frozen=True, gc=False):
    """A dead letter as it lies in its log, the note of how it died, and what became of it."""

    record: Record
    note: DeadNote
    state: LetterState


def letters_of(world: World, root: str, topic: str, partition: int) -> Iterator[SeenLetter]:
    """The letters of one partition of a topic, of all groups, oldest first."""
    name = topic + DEAD_SUFFIX
    folder = join(partition_folder(root, name, partition), "log")
    if not is_log(world, folder):
        return
    reader = LogReader(folder, world=world)
    start, stop = reader.start, reader.end
    fates = _Fates(world, group_folder(root, name, partition, DEFAULT_GROUP), start)
    for record in records_beside(reader, start, stop):
        note = note_of(record)
        if note is not None:
            yield SeenLetter(record, note, fates.of(record.offset))


class _Fates:
    """What the journal of the letters says of each."""

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
    """The letters that were redriven, and those that were purged, as far back as the journal reaches."""
    acked, cancelled = BitMap64(), BitMap64()
    if not holds_log(world, folder):
        return acked, cancelled
    reader = LogReader(folder, world=world)
    for record in records_beside(reader, reader.start, reader.end):
        event = decode_event(bytes(record.value))
        if isinstance(event, Acked | Cancelled):
            chosen = acked if isinstance(event, Acked) else cancelled
            for start, stop in pairs(event.runs):
                chosen.add_range(start, stop)
        elif isinstance(event, Opened | Rewound):
            # Behind it stand other letters by now, or the same once more.
            again = event.end if isinstance(event, Opened) else event.to
            acked.remove_range(again, _MOST)
            cancelled.remove_range(again, _MOST)
    return acked, cancelled
