"""What the journal of a group adds up to, seen without owning it: beside whoever does.

A journal is read behind the snapshot that was the newest when the look began, up to the end that the owner had
published then or since: the state is that of one moment in the group's life, never a mix of two. An owner that takes
snapshots meanwhile may drop the events that are wanted next; then all of it is read again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from holdfast.broker.journal import SNAPSHOT, Journal, damaged_snapshot, newest_snapshot
from holdfast.delivery.events import decode_event
from holdfast.delivery.group import Group, IllegalMove
from holdfast.delivery.image import group_of
from holdfast.env import World
from holdfast.errors import CorruptData, DamagedRange, HoldfastError
from holdfast.storage import LogReader
from holdfast.storage.files import join
from holdfast.storage.opening import is_log

# An owner takes a snapshot and drops old events while we read: look again, but not for ever.
TRIES: Final = 3


class Replayed(NamedTuple):
    """A group as its journal leaves it; `known` tells whether the journal says where it began."""

    group: Group
    known: bool
    wrong: list[str]


def replayed_group(world: World, folder: str, start: int = 0, end: int | None = None) -> Replayed:
    """The group whose journal is in the folder; without a snapshot it began at `start`.

    `end` is where opening would end the journal, if that is known: after a restart its owner's word may be old.
    """
    for _ in range(TRIES - 1):
        try:
            return _replayed(world, folder, start, end)
        except (OSError, HoldfastError):
            continue  # an owner has changed it meanwhile, or it is damaged: then it fails once more
    return _replayed(world, folder, start, end)


def _replayed(world: World, folder: str, start: int, end: int | None) -> Replayed:
    if not holds_log(world, folder):
        return Replayed(Group(start), known=False, wrong=[])
    snapshot, name = newest_snapshot(world, folder)
    group = Group(start) if snapshot is None else group_of(snapshot.image)
    at = 0 if snapshot is None else snapshot.position
    means = Journal.damage_means
    wrong = replay_beside(world, folder, at, name, lambda value: group.apply(decode_event(value)), means, end)
    return Replayed(group, known=snapshot is not None, wrong=wrong)


def replay_beside(
    world: World,
    folder: str,
    at: int,
    snapshot: str,
    apply: Callable[[bytes], None],
    damage_means: str,
    end: int | None = None,
) -> list[str]:
    """Let the events of a journal from `at` on happen, behind the snapshot of that file; answers what is wrong."""
    if snapshot != SNAPSHOT and world.disk.exists(join(folder, SNAPSHOT)):
        raise damaged_snapshot(folder, snapshot)
    reader = LogReader(folder, world=world, end=end)
    if at < reader.start:
        raise CorruptData(f"the journal begins at event {reader.start}, and no snapshot reaches there")
    wrong: list[str] = []
    while at < reader.end:
        try:
            for record in reader.records(at):
                apply(bytes(record.value))
                at = record.offset + 1
        except DamagedRange as damage:
            wrong.append(f"events {damage.first_offset} to {damage.next_offset - 1} are lost: {damage_means}")
            break  # what follows need not fit any more; opening passes over what does not
        except (IllegalMove, msgspec.DecodeError) as error:
            wrong.append(f"event {at} does not fit: {error}")
            break
    return wrong


def holds_log(world: World, folder: str) -> bool:
    """Whether there is a log. One whose state file is gone is still a log, and one to be checked."""
    return is_log(world, folder) or any(name.endswith(".log") for name in folders_in(world, folder))


def folders_in(world: World, folder: str) -> list[str]:
    """What a folder holds, without what was left half made or half deleted; nothing where there is none."""
    try:
        return sorted(name for name in world.disk.names(folder) if not name.startswith("."))
    except OSError:
        return []
