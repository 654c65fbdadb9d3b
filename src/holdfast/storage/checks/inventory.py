"""What else lies in a log's folder: leftovers, backups, foreign files, and what is kept in quarantine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from holdfast.env import World
from holdfast.storage.checks.finding import Finding, Quarantined, Words
from holdfast.storage.files import (
    EPOCHS,
    LOCK,
    QUARANTINE,
    STATE,
    index_bases,
    index_name,
    join,
    read_file,
    segment_bases,
    segment_name,
)
from holdfast.storage.quarantine import QuarantineNote

BACKUP_PREFIX: Final = "backup-"
TEMPORARY: Final = ".tmp"
_OURS: Final = frozenset({LOCK, STATE, EPOCHS, QUARANTINE})


def file_findings(world: World, folder: str, names: Sequence[str], words: Words) -> Iterator[Finding]:
    """A note for each name that is not a living part of the log."""
    passing = set(leftovers(names))
    known = _OURS.union(map(segment_name, segment_bases(names)), map(index_name, index_bases(names)))
    for name in names:
        if name in passing:
            yield words.leftover(name, file_size(world, join(folder, name)))
        elif name.startswith(BACKUP_PREFIX):
            yield words.backup(name)
        elif name not in known:
            yield words.foreign(name)


def leftovers(names: Sequence[str]) -> list[str]:
    """Files that opening removes: half-written ones, and indexes whose segment is gone."""
    segments = set(segment_bases(names))
    orphans = [index_name(base) for base in index_bases(names) if base not in segments]
    return [*orphans, *(name for name in names if name.endswith(TEMPORARY))]


def quarantined(world: World, folder: str) -> tuple[Quarantined, ...]:
    """What is kept in quarantine, with what its notes say."""
    quarantine = join(folder, QUARANTINE)
    if not world.disk.exists(quarantine):
        return ()
    names = world.disk.names(quarantine)
    return tuple(
        _quarantined(world, quarantine, name, names) for name in names if not name.endswith((".json", TEMPORARY))
    )


def file_size(world: World, path: str) -> int:
    """The length of a file; 0 where it is gone by now, or is a folder."""
    try:
        file = world.disk.open(path)
    except OSError:
        return 0
    try:
        return file.size()
    finally:
        file.close()


def _quarantined(world: World, quarantine: str, name: str, names: Sequence[str]) -> Quarantined:
    file, size = f"{QUARANTINE}/{name}", file_size(world, join(quarantine, name))
    note_name = name.removesuffix(".bin") + ".json"
    content = read_file(world.disk, join(quarantine, note_name)) if note_name in names else None
    try:
        note = msgspec.json.decode(content or b"", type=QuarantineNote)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Quarantined(file=file, bytes=size, reason="its note is missing or damaged")
    return Quarantined(
        file=file,
        bytes=size,
        segment=note.segment,
        position=note.position,
        first_offset=note.first_offset,
        next_offset=note.next_offset,
        reason=note.reason,
        at_ns=note.at_ns,
    )
