"""What a group in stream mode has committed, seen without owning anything."""

from __future__ import annotations

from typing import Final

import msgspec

from holdfast.broker.offsets import (
    Commits,
    Committed,
    Event,
    Forgotten,
    Remembered,
    Risen,
    decode_event,
    decode_image,
)
from holdfast.broker.snapshots import SNAPSHOT, SnapshotFiles, damaged_snapshot
from holdfast.env import World
from holdfast.errors import CorruptData, DamagedRange, HoldfastError
from holdfast.storage import LogReader
from holdfast.storage.files import join

# An owner takes a snapshot and drops old events while we read: look again, but not for ever.
_TRIES: Final = 3


class CommitState(msgspec.Struct, frozen=True, kw_only=True):
    """What the commits of a group add up to, and what is wrong with them."""

    epoch: int = 0
    static_members: tuple[str, ...] = ()
    committed: tuple[Committed, ...] = ()
    wrong: tuple[str, ...] = ()


def commits_of(world: World, folder: str, end: int | None = None) -> CommitState:
    """Replay the commits in a folder, as opening would; `end`: where it would end their log, if that is known."""
    for _ in range(_TRIES - 1):
        try:
            return _replayed(world, folder, end)
        except (OSError, HoldfastError):
            continue  # an owner has changed it meanwhile, or it is damaged: then it fails once more
    try:
        return _replayed(world, folder, end)
    except (OSError, HoldfastError) as error:
        return CommitState(wrong=(str(error),))


def _replayed(world: World, folder: str, end: int | None) -> CommitState:
    image, name = SnapshotFiles(world, folder).newest(decode_image)
    if name != SNAPSHOT and world.disk.exists(join(folder, SNAPSHOT)):
        raise damaged_snapshot(folder, name)
    reader = LogReader(folder, world=world, end=end)
    state, wrong, at = _State(), [], 0
    if image is not None:
        state.entries = {entry.place: entry for entry in image.entries}
        state.epoch, state.remembered, at = image.epoch, image.remembered, image.position
    if at < reader.start:
        raise CorruptData(f"the commits begin at event {reader.start}, and no snapshot reaches there")
    while at < reader.end:
        try:
            for record in reader.records(at):
                state.apply(decode_event(bytes(record.value)))
                at = record.offset + 1
        except DamagedRange as damage:
            lost = f"events {damage.first_offset} to {damage.next_offset - 1} are lost"
            wrong.append(f"{lost}: some messages may be delivered again")
            at = damage.next_offset
        except msgspec.DecodeError as error:
            wrong.append(f"event {at} cannot be read: {error}")
            break
    return CommitState(
        epoch=state.epoch,
        static_members=tuple(member.instance_id for member in state.remembered.statics),
        committed=tuple(sorted(state.entries.values(), key=lambda entry: entry.place)),
        wrong=tuple(wrong),
    )


class _State:
    """The commits as far as they are replayed."""

    def __init__(self) -> None:
        self.entries: dict[tuple[str, int], Committed] = {}
        self.epoch = 0
        self.remembered = Remembered()

    def apply(self, event: Event) -> None:
        if isinstance(event, Commits):
            self.entries.update((entry.place, entry) for entry in event.entries)
        elif isinstance(event, Forgotten):
            self.entries = {place: entry for place, entry in self.entries.items() if place[0] != event.topic}
        elif isinstance(event, Risen):
            self.epoch = max(self.epoch, event.epoch)
        else:
            self.remembered = event
