"""The logs that a queue is made of, and what its journals add up to, seen without owning anything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

import msgspec

from holdfast.broker.delayed.manifest import load_manifest
from holdfast.broker.delayed.run import open_run
from holdfast.broker.journal import newest_snapshot
from holdfast.broker.layout import GROUPS, INTERNAL_PREFIX, TOPICS
from holdfast.broker.snapshots import BEFORE, SNAPSHOT
from holdfast.delivery.check import check as check_group
from holdfast.delivery.events import decode_event
from holdfast.delivery.group import Group, IllegalMove
from holdfast.delivery.image import group_of
from holdfast.env import World
from holdfast.errors import CorruptData, DamagedRange, HoldfastError, UnknownFormat
from holdfast.storage import LogReader
from holdfast.storage.files import join
from holdfast.storage.opening import is_log

# An owner takes a snapshot and drops old events while we read: look again, but not for ever.
_TRIES: Final = 3
_MOST_WRONG: Final = 20

# What lies in a journal's folder besides its log.
JOURNAL_FILES: Final = frozenset({SNAPSHOT, BEFORE})


class Part(msgspec.Struct, frozen=True):
    """One log of a queue; its name is the way to it from the queue's folder."""

    kind: Literal["messages", "delayed", "journal", "traces", "commits"]
    name: str
    folder: str


class GroupState(msgspec.Struct, frozen=True, kw_only=True):
    """What a journal adds up to, and what is wrong with that; `missing` are not settled and no longer in the log."""

    floor: int = 0
    cursor: int = 0
    missing: int = 0
    leased: int = 0
    waiting: int = 0
    dying: int = 0
    wrong: tuple[str, ...] = ()


def parts_of(world: World, folder: str) -> list[Part]:
    """Every log in a data folder, the messages before what is derived from them."""
    found = []
    for topic in folders_in(world, join(folder, TOPICS)):
        kind: Literal["messages", "traces"] = "traces" if topic.startswith(INTERNAL_PREFIX) else "messages"
        numbers = [name for name in folders_in(world, join(folder, f"{TOPICS}/{topic}")) if name.isdigit()]
        for number in sorted(numbers, key=int):
            place = f"{TOPICS}/{topic}/{number}"
            found.append(Part(kind, f"{place}/log", join(folder, f"{place}/log")))
            found.append(Part("delayed", f"{place}/delayed/intake", join(folder, f"{place}/delayed/intake")))
            for group in folders_in(world, join(folder, f"{place}/groups")):
                name = f"{place}/groups/{group}"
                found.append(Part("journal", name, join(folder, name)))
    for group in folders_in(world, join(folder, GROUPS)):
        found.append(Part("commits", f"{GROUPS}/{group}", join(folder, f"{GROUPS}/{group}")))
    return [part for part in found if holds_log(world, part.folder)]


def holds_log(world: World, folder: str) -> bool:
    """Whether there is a log. One whose state file is gone is still a log, and one to be checked."""
    return is_log(world, folder) or any(name.endswith(".log") for name in folders_in(world, folder))


def folders_in(world: World, folder: str) -> list[str]:
    """What a folder holds, without what was left half made or half deleted; nothing where there is none."""
    try:
        return sorted(name for name in world.disk.names(folder) if not name.startswith("."))
    except OSError:
        return []


def state_of(world: World, part: Part, log_start: int = 0) -> GroupState:
    """Replay a journal, as opening would, and look at the state that comes of it.

    The log's start is to be older than this call: an owner raises the floor before it lets go of messages.
    """
    for _ in range(_TRIES - 1):
        try:
            return _replayed(world, part, log_start)
        except (OSError, HoldfastError):
            continue  # an owner has changed it meanwhile, or it is damaged: then it fails once more
    try:
        return _replayed(world, part, log_start)
    except (OSError, HoldfastError) as error:
        return GroupState(wrong=(str(error),))


class Replayed(NamedTuple):
    """A group as its journal leaves it; `known` tells whether the journal says where it began."""

    group: Group
    known: bool
    wrong: list[str]


def replayed_group(world: World, folder: str, start: int = 0) -> Replayed:
    """The group whose journal is in the folder; without a snapshot it began at `start`."""
    if not holds_log(world, folder):
        return Replayed(Group(start), known=False, wrong=[])
    snapshot, name = newest_snapshot(world, folder)
    if name != SNAPSHOT and world.disk.exists(join(folder, SNAPSHOT)):
        raise CorruptData(f"{SNAPSHOT} is damaged; opening goes on from the one before, and loses nothing but time")
    reader = LogReader(folder, world=world)
    at = 0 if snapshot is None else snapshot.position
    if at < reader.start:
        raise CorruptData(f"the journal begins at event {reader.start}, and no snapshot reaches there")
    group = Group(start) if snapshot is None else group_of(snapshot.image)
    wrong: list[str] = []
    while at < reader.end:
        try:
            for record in reader.records(at):
                group.apply(decode_event(record.value))
                at = record.offset + 1
        except DamagedRange as damage:
            at = damage.next_offset
            lost = f"events {damage.first_offset} to {damage.next_offset - 1} are lost"
            wrong.append(f"{lost}: some messages may be delivered again")
            break  # what follows need not fit any more; opening passes over what does not
        except (IllegalMove, msgspec.DecodeError) as error:
            wrong.append(f"event {at} does not fit: {error}")
            break
    return Replayed(group, known=snapshot is not None, wrong=wrong)


def _replayed(world: World, part: Part, log_start: int) -> GroupState:
    group, begun, wrong = replayed_group(world, part.folder)
    if not wrong:
        wrong = check_group(group)
    # Without a snapshot nobody knows where the group began: perhaps there, with a new journal.
    known = begun and not wrong and group.floor < log_start
    return GroupState(
        floor=group.floor,
        cursor=group.cursor,
        missing=log_start - group.floor - group.done.range_cardinality(group.floor, log_start) if known else 0,
        leased=len(group.leases),
        waiting=len(group.waiting),
        dying=len(group.burials),
        wrong=tuple(wrong[:_MOST_WRONG]),
    )


def damaged_runs(world: World, part: Part) -> Iterator[str]:
    """What is wrong with the files that delayed messages wait in, beside their intake."""
    folder = part.folder.rpartition("/")[0]
    try:
        manifest = load_manifest(world.disk, folder)
    except UnknownFormat as error:
        yield str(error)
        return
    except CorruptData as error:
        yield f"{error}; opening makes it anew, cancellations may be lost"
        return
    for entry in manifest.runs if manifest is not None else ():
        try:
            run = open_run(world.disk, folder, entry.name, entry.run_id or None)
            for block in range(len(run.first_dues_ms)):
                run.records(block)
        except FileNotFoundError:
            yield f"{entry.name} is missing: {entry.messages} delayed messages are lost"
        except (CorruptData, OSError) as error:
            yield f"{entry.name}: {error}"
