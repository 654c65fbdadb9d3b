"""A copy of every file that a repair will change, made durable before the first byte is changed.

A backup is a folder: the files under their own names, and `backup.json`, which is written last. A folder without it
is what a crash left of a backup that was never finished; nothing was changed then.
"""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import count
from typing import Final

import msgspec

from holdfast.checksum import crc32c
from holdfast.env import World
from holdfast.env.disk import Disk
from holdfast.errors import DiskFull, InvalidRequest
from holdfast.storage.files import durable_replace, join, write_fully
from holdfast.storage.inventory import BACKUP_PREFIX
from holdfast.storage.plan import RepairPlan, RepairStep, Work

NOTE: Final = "backup.json"
_CHUNK: Final = 1 << 20
_SPARE_BYTES: Final = 1 << 20  # notes, indexes, the new state file


class BackupFile(msgspec.Struct, frozen=True, gc=False):
    """One file of a backup."""

    name: str
    bytes: int
    crc32c: int


class BackupNote(msgspec.Struct, frozen=True, kw_only=True):
    """What a backup holds and why it was made."""

    folder: str
    made_at: str
    files: tuple[BackupFile, ...]
    before: tuple[RepairStep, ...]


def require_room(world: World, folder: str, work: Work, backup: str | None) -> None:
    """Raise DiskFull unless backup, quarantine and the copy of the largest segment will fit."""
    needed = work.quarantine_bytes + work.largest_copy_bytes + _SPARE_BYTES
    needed += work.backup_bytes if backup is None else 0
    free = world.disk.free_bytes(folder)
    if free < needed:
        raise DiskFull(
            f"repairing {folder} takes {needed:,} bytes for backup and copies, {free:,} are free; nothing was changed. "
            "Free some space, or put the backup on another disk with --backup"
        )


def make_backup(world: World, folder: str, work: Work, plan: RepairPlan, backup: str | None) -> str:
    """Copy the files and answer the backup's folder."""
    now = datetime.fromtimestamp(world.clock.now_ns() // 1_000_000_000, UTC)
    target = backup or _new_name(world, folder, now)
    world.disk.make_folder(target)
    if world.disk.names(target):
        raise InvalidRequest(
            f"{target} holds files already; give --backup an empty or a new folder. Nothing was changed"
        )
    files = tuple(
        BackupFile(name, *copy_file(world.disk, join(folder, name), join(target, name))) for name in work.backup_names
    )
    world.disk.sync_folder(target)
    note = BackupNote(folder=folder, made_at=now.isoformat(), files=files, before=plan.steps)
    durable_replace(world.disk, target, NOTE, msgspec.json.format(msgspec.json.encode(note)))
    return target


def copy_file(disk: Disk, source: str, target: str) -> tuple[int, int]:
    """Copy a file durably (its name is durable only after the folder's next sync); answers length and checksum."""
    reading = disk.open(source)
    writing = disk.open(target, write=True, create=True)
    position, checksum = 0, 0
    try:
        writing.truncate(0)
        while content := reading.read(position, _CHUNK):
            write_fully(writing, position, [content])
            checksum = crc32c(content, checksum)
            position += len(content)
        writing.sync()
    finally:
        writing.close()
        reading.close()
    return position, checksum


def _new_name(world: World, folder: str, now: datetime) -> str:
    stem = join(folder, f"{BACKUP_PREFIX}{now:%Y%m%dT%H%M%SZ}")
    names = (stem if n == 1 else f"{stem}-{n}" for n in count(1))
    return next(name for name in names if not world.disk.exists(name))
