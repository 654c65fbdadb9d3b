"""The logs that a queue is made of, and what its journals add up to, seen without owning anything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

import msgspec

from holdfast.broker.catalog import Catalog
from holdfast.broker.delayed.manifest import load_manifest
from holdfast.broker.delayed.run import open_run
from holdfast.broker.groups import GroupNotes
from holdfast.broker.layout import DEAD_SUFFIX, GROUPS, INTERNAL_PREFIX, LOCKS, TOPICS
from holdfast.broker.locks_beside import replayed_locks
from holdfast.broker.past_events import is_past
from holdfast.broker.replay import folders_in, holds_log, replayed_group
from holdfast.broker.snapshots import BEFORE, SNAPSHOT
from holdfast.delivery.check import check as check_group
from holdfast.env import World
from holdfast.errors import CorruptData, HoldfastError, UnknownFormat
from holdfast.storage.files import join

_MOST_WRONG: Final = 20


def is_of_journal(name: str) -> bool:
    """Whether that is the name of what lies in a journal's folder besides its log."""
    return name in (SNAPSHOT, BEFORE) or is_past(name)


class Part(msgspec.Struct, frozen=True):
    """One log of a queue; its name is the way to it from the queue's folder."""

    kind: Literal["messages", "delayed", "journal", "traces", "commits", "locks"]
    name: str
    folder: str


class LocksState(msgspec.Struct, frozen=True, kw_only=True):
    """What the journal of the locks adds up to, and what is wrong with that."""

    held: int = 0
    documents: int = 0
    wrong: tuple[str, ...] = ()


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
    """Every log in a data folder, the messages before what is derived from them; nothing that is being deleted."""
    found = []
    gone = {name + DEAD_SUFFIX for name in Catalog(world, folder).deleted()}
    for topic in folders_in(world, join(folder, TOPICS)):
        if topic in gone:
            continue
        kind: Literal["messages", "traces"] = "traces" if topic.startswith(INTERNAL_PREFIX) else "messages"
        going = GroupNotes(world, join(folder, f"{TOPICS}/{topic}")).deleted()
        numbers = [name for name in folders_in(world, join(folder, f"{TOPICS}/{topic}")) if name.isdigit()]
        for number in sorted(numbers, key=int):
            place = f"{TOPICS}/{topic}/{number}"
            found.append(Part(kind, f"{place}/log", join(folder, f"{place}/log")))
            found.append(Part("delayed", f"{place}/delayed/intake", join(folder, f"{place}/delayed/intake")))
            for group in folders_in(world, join(folder, f"{place}/groups")):
                name = f"{place}/groups/{group}"
                if group not in going:
                    found.append(Part("journal", name, join(folder, name)))
    for group in folders_in(world, join(folder, GROUPS)):
        found.append(Part("commits", f"{GROUPS}/{group}", join(folder, f"{GROUPS}/{group}")))
    found.append(Part("locks", LOCKS, join(folder, LOCKS)))
    return [part for part in found if holds_log(world, part.folder)]


def state_of(world: World, part: Part, log_start: int = 0, end: int | None = None) -> GroupState:
    """Replay a journal, as opening would, and look at the state that comes of it.

    The log's start is to be older than this call: an owner raises the floor before it lets go of messages.
    """
    try:
        return _replayed(world, part, log_start, end)
    except (OSError, HoldfastError) as error:
        return GroupState(wrong=(str(error),))


def _replayed(world: World, part: Part, log_start: int, end: int | None) -> GroupState:
    group, begun, wrong = replayed_group(world, part.folder, end=end)
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


def locks_state(world: World, folder: str, end: int | None = None) -> LocksState:
    """The same for the locks and documents of a data folder."""
    try:
        table, wrong = replayed_locks(world, folder, end)
    except (OSError, HoldfastError) as error:
        return LocksState(wrong=(str(error),))
    return LocksState(held=len(table.held), documents=len(table.documents), wrong=tuple(wrong[:_MOST_WRONG]))


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
