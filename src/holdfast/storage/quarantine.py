"""Bytes that are no longer part of the log are kept here, for a person to look at: nothing is thrown away.

Each finding is a pair of files in `quarantine/`: the bytes, and a note in JSON that says where they lay,
which offsets they held and why they were taken out.
"""

from __future__ import annotations

import msgspec

from holdfast.env.disk import Disk
from holdfast.storage.files import QUARANTINE, durable_replace, join, segment_name


class QuarantineNote(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about quarantined bytes."""

    segment: str
    position: int
    bytes: int
    first_offset: int
    next_offset: int | None
    reason: str
    at_ns: int


def keep_bytes(disk: Disk, folder: str, content: memoryview, note: QuarantineNote) -> None:
    """Store a copy durably before anybody overwrites the original; the same finding is kept once."""
    quarantine = join(folder, QUARANTINE)
    stem = f"{note.segment.removesuffix('.log')}-{note.position:010d}-{note.bytes}"
    disk.make_folder(quarantine)
    present = set(disk.names(quarantine))
    tries = (stem if n == 0 else f"{stem}-{n}" for n in range(len(present) + 1))
    for name in tries:
        if name + ".bin" not in present:
            durable_replace(disk, quarantine, name + ".bin", content)
            durable_replace(disk, quarantine, name + ".json", msgspec.json.encode(note))
            return
        if _same(disk, join(quarantine, name + ".bin"), content):
            return


def move_segment(disk: Disk, folder: str, base_offset: int, note: QuarantineNote) -> None:
    """Take a whole segment out of the log; its file moves, it is not copied."""
    quarantine = join(folder, QUARANTINE)
    disk.make_folder(quarantine)
    present = set(disk.names(quarantine))
    name = segment_name(base_offset)
    stem = next(s for n in range(len(present) + 1) if (s := name if n == 0 else f"{name}-{n}") not in present)
    durable_replace(disk, quarantine, stem + ".json", msgspec.json.encode(note))
    disk.rename(join(folder, name), join(quarantine, stem))
    disk.sync_folder(quarantine)
    disk.sync_folder(folder)


def _same(disk: Disk, path: str, content: memoryview) -> bool:
    file = disk.open(path)
    try:
        return file.size() == len(content) and file.view(0, len(content)) == content
    finally:
        file.close()
