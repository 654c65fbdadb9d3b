"""Locks and documents seen without owning anything: beside whoever owns the folder."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from holdfast.broker.folder.layout import LOCKS
from holdfast.broker.inspect.journals import TRIES, holds_log, replay_beside
from holdfast.broker.locks import LocksJournal, newest_locks
from holdfast.delivery.decide import Moment
from holdfast.env import World
from holdfast.errors import HoldfastError
from holdfast.locking.events import decode_event
from holdfast.locking.table import Held, Table, check, table_of
from holdfast.storage.files import join


class ReplayedLocks(NamedTuple):
    """What the journal leaves, and what is wrong with that."""

    table: Table
    wrong: list[str]


def replayed_locks(world: World, root: str, end: int | None = None) -> ReplayedLocks:
    """The locks and documents of a data folder; none where nobody has used any. `end`: as for `replayed_group`."""
    folder = join(root, LOCKS)
    for _ in range(TRIES - 1):
        try:
            return _replayed(world, folder, end)
        except (OSError, HoldfastError):
            continue  # an owner has changed it meanwhile, or it is damaged: then it fails once more
    return _replayed(world, folder, end)


def _replayed(world: World, folder: str, end: int | None) -> ReplayedLocks:
    if not holds_log(world, folder):
        return ReplayedLocks(Table(), [])
    snapshot, name = newest_locks(world, folder)
    table = Table() if snapshot is None else table_of(snapshot.image)
    at = 0 if snapshot is None else snapshot.position
    means = LocksJournal.damage_means
    wrong = replay_beside(world, folder, at, name, lambda value: table.apply(decode_event(value)), means, end)
    return ReplayedLocks(table, wrong or check(table))


def held_now(world: World, table: Table, now: Moment) -> dict[str, Held]:
    """The locks that somebody holds, as an owner that begins now would find them."""
    if table.boot_id != world.ids.boot_id():  # then all of a lease is granted once more
        return {
            name: msgspec.structs.replace(held, until_ms=now.mono_ms + held.lease_ms)
            for name, held in sorted(table.held.items())
        }
    return {name: held for name, held in sorted(table.held.items()) if held.until_ms > now.mono_ms}
