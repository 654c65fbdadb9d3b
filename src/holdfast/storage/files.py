"""The files of a log: their names, how they are written, and the quarantine for bytes that were cut off."""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing
from typing import Final

import msgspec

from holdfast.env.disk import BytesLike, Disk, File, OpenFolder

LOCK: Final = "lock"
STATE: Final = "state"
EPOCHS: Final = "epochs"
QUARANTINE: Final = "quarantine"

_SEGMENT: Final = re.compile(r"(\d{20})\.log")
_INDEX: Final = re.compile(r"(\d{20})\.idx")

_CHUNK: Final = 1 << 20
_ZEROS: Final = memoryview(bytes(256 * 1024))

FULL_DISK: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def segment_name(base_offset: int) -> str:
    return f"{base_offset:020d}.log"


def index_name(base_offset: int) -> str:
    return f"{base_offset:020d}.idx"


def rewritten_name(base_offset: int) -> str:
    """Temporary name of a compacted segment, different from that of other copies, which may exist at the same time."""
    return f"{base_offset:020d}.keys.tmp"


def segment_bases(names: Sequence[str]) -> list[int]:
    """Return the base offsets of the segments among the names, sorted; other names are ignored."""
    return sorted(int(match[1]) for name in names if (match := _SEGMENT.fullmatch(name)))


def index_bases(names: Sequence[str]) -> list[int]:
    return sorted(int(match[1]) for name in names if (match := _INDEX.fullmatch(name)))


def join(folder: str, name: str) -> str:
    return f"{folder}/{name}"


def write_fully(file: File, position: int, parts: Sequence[BytesLike]) -> None:
    """Write every byte or raise. A full disk first shows as a short write, and as an error only on the next one."""
    wanted = sum(map(len, parts))
    done = file.write(position, parts)
    if done == wanted:
        return
    for part in parts:
        if done >= len(part):
            done -= len(part)
        else:
            _write_rest(file, position + done, memoryview(part)[done:])
            done = 0
        position += len(part)


def _write_rest(file: File, position: int, rest: memoryview) -> None:
    while rest:
        taken = file.write(position, [rest])
        if taken == 0:
            raise OSError(errno.ENOSPC, "the disk took no more bytes")
        position, rest = position + taken, rest[taken:]


def write_zeros(file: File, position: int, end: int) -> None:
    """Overwrite [position, end) with zeros, or raise."""
    while position < end:
        zeros = _ZEROS[: end - position]
        write_fully(file, position, [zeros])
        position += len(zeros)


def write_again(file: File, position: int, end: int) -> None:
    """Write the bytes at [position, end) again in place, so that the kernel treats the pages as new."""
    while position < end:
        part = file.read(position, min(_CHUNK, end - position))
        if not part:
            return
        write_fully(file, position, [part])
        position += len(part)


def durable_replace(disk: Disk, folder: str, name: str, content: BytesLike) -> None:
    """Replace a file atomically: after a crash either the old or the new content is there, complete."""
    temporary = join(folder, name + ".tmp")
    with opened_folder(disk, folder) as opened:
        with closing(disk.open(temporary, write=True, create=True)) as file:
            file.truncate(0)
            write_fully(file, 0, [content])
            file.sync()
        disk.rename(temporary, join(folder, name))
        opened.sync()


def opened_folder(disk: Disk, folder: str) -> AbstractContextManager[OpenFolder]:
    """Open a folder before anything in it changes: if no descriptor is left, nothing has happened yet."""
    return closing(disk.open_folder(folder))


def read_file(disk: Disk, path: str) -> bytes | None:
    """Return the whole content, or None if there is no such file."""
    if not disk.exists(path):
        return None
    with closing(disk.open(path)) as file:
        return file.read(0, file.size())


def remove_tree(disk: Disk, path: str) -> None:
    """Remove a folder and everything in it. May be repeated: a second try finishes what a crash cut short."""
    if not disk.exists(path):
        return
    if not disk.is_folder(path):
        disk.remove(path)
        return
    for name in disk.names(path):
        remove_tree(disk, join(path, name))
    disk.remove_folder(path)


class QuarantineNote(msgspec.Struct, frozen=True, kw_only=True):
    """Describes bytes in quarantine: where they were, which offsets they held and why they were removed.

    Bytes that are removed from a log are kept for a person to look at. Each finding is a pair of files in
    `quarantine/`: the bytes, and this note as JSON.
    """

    segment: str
    position: int
    bytes: int
    first_offset: int
    next_offset: int | None
    reason: str
    at_ns: int


def keep_bytes(disk: Disk, folder: str, content: memoryview, note: QuarantineNote) -> None:
    """Store a durable copy before the original is overwritten; the same finding is stored only once."""
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
    """Move a whole segment out of the log into quarantine."""
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
    with closing(disk.open(path)) as file:
        return file.size() == len(content) and file.view(0, len(content)) == content
