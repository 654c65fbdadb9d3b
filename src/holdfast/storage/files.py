"""The files of a log: names, ways of writing, quarantine for bytes cut off, and what may prevent opening."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from datetime import UTC, datetime
from typing import Final, TypeVar

import msgspec

from holdfast.env import FolderLock, FolderLocked, World
from holdfast.env.disk import RAN_OUT, BytesLike, Disk, File, OpenFolder, write_fully
from holdfast.errors import Busy, CorruptData, DiskFull, HoldfastError, InvalidRequest, NotALog, Unavailable
from holdfast.later import json

LOCK: Final = "lock"
STATE: Final = "state"
EPOCHS: Final = "epochs"
QUARANTINE: Final = "quarantine"

_BASE_DIGITS: Final = 20

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
    return _bases(names, ".log")


def index_bases(names: Sequence[str]) -> list[int]:
    return _bases(names, ".idx")


def _bases(names: Sequence[str], ending: str) -> list[int]:
    stems = (name.removesuffix(ending) for name in names if name.endswith(ending))
    return sorted(int(stem) for stem in stems if len(stem) == _BASE_DIGITS and stem.isdecimal())


def join(folder: str, name: str) -> str:
    return f"{folder}/{name}"


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
        with taking_no_room(disk, temporary), closing(disk.open(temporary, write=True, create=True)) as file:
            file.truncate(0)
            write_fully(file, 0, [content])
            file.sync()
        disk.rename(temporary, join(folder, name))
        opened.sync()


@contextmanager
def taking_no_room(disk: Disk, temporary: str) -> Iterator[None]:
    """Remove a temporary file that cannot be completed because the disk is full: its part would take the last room."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL_DISK:
            with suppress(OSError):
                disk.remove(temporary)
        raise


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


# Opening a folder: who may own it, and errors that say what stands in the way.
#
# A call can run out of descriptors, memory or maps before any byte is at stake. That is not a disk failure: the call is
# refused, what it had begun is undone, and the next one may succeed. Only a failed write or sync of data ends a log for
# good, because nobody can know what it left on disk. To keep the two apart, everything that a sync will need is opened
# before there is anything to sync.


TRUST: Final = "HOLDFAST_BROKER_TRUST_FOLDER"


def require_own(world: World, folder: str, *, trusted: bool) -> None:
    """Raise InvalidRequest if other users could change what is in the folder, unless it is `trusted`."""
    why = None if trusted else world.disk.exposure(folder)
    if why is not None:
        raise InvalidRequest(
            f"{folder} is not safe from other users of this machine: {why}. Nothing was opened. Use a folder of your "
            "own that nobody else may write to (chown, chmod go-w), or run as its owner. If everyone who may "
            "write there may also read, change and destroy every message, say so: trust_folder=True, "
            f"`holdfast --trust-folder ...` or {TRUST}=true"
        )


def require_log(world: World, folder: str) -> None:
    """Raise NotALog unless the folder contains a log."""
    try:
        names = world.disk.names(folder)
    except FileNotFoundError:
        raise NotALog(f"there is no folder {folder}: check the path, or create the log first") from None
    except NotADirectoryError:
        raise NotALog(f"{folder} is a file, not the folder of a log: name the folder") from None
    if STATE not in names and not segment_bases(names):
        raise NotALog(f"{folder} holds no log: check the path, or create the log first")


def is_log(world: World, folder: str) -> bool:
    """Whether a log was opened here before; if so, the folder itself is durable."""
    return world.disk.exists(join(folder, STATE))


def open_error(folder: str, error: OSError) -> HoldfastError:
    """Translate a disk error into one of ours that says what to do."""
    why = error.strerror or str(error)
    if error.errno in FULL_DISK:
        return DiskFull(
            f"cannot open {folder}: {why}, and nothing in it can be given up for that. Free some space on this disk, 1 "
            "MiB is enough, and open it again; until then it can be read with LogReader"
        )
    if ran_out(error):
        return shortage(f"cannot open {folder}", error, "Nothing was lost")
    if error.errno == errno.ELOOP:
        return InvalidRequest(
            f"cannot open {folder}: {error.filename or 'a file in it'} is a symbolic link, and those are not followed "
            "where something is written. Nothing was changed; find out who created it, and remove it"
        )
    if isinstance(error, PermissionError):
        return InvalidRequest(f"cannot open {folder}: {why}. Its owner must be able to write there")
    if isinstance(error, (NotADirectoryError, FileExistsError)):
        return NotALog(f"cannot open {folder}: {why}. Choose a folder, or a path where one can be created")
    return Unavailable(f"cannot open {folder}: {why}. Nothing was lost; check the disk and try again")


def is_of_its_files(error: HoldfastError) -> bool:
    """Whether a log cannot be opened because of what its files are, and not because something ran out or is in use."""
    cause = error.__cause__
    if isinstance(cause, OSError):
        return cause.errno not in (*FULL_DISK, errno.EREMOTEIO) and not ran_out(cause)
    return isinstance(error, (CorruptData, NotALog))


@contextmanager
def translated(folder: str) -> Iterator[None]:
    """Translate disk errors raised inside the block with `open_error`."""
    try:
        yield
    except OSError as error:
        raise open_error(folder, error) from error


READ_IT = "Close it there, or read it from here without owning it: holdfast.storage.LogReader"


def lock_note(world: World) -> bytes:
    """Return what the lock file says about its owner, who has it from now on."""
    since = datetime.fromtimestamp(world.clock.now_ns() / 1e9, UTC).isoformat(timespec="seconds")
    return note_bytes({**world.ids.process_note(), "since": since})[:500]


def take_lock(world: World, folder: str, advice: str = READ_IT, note: bytes = b"") -> FolderLock:
    """Take ownership of the folder, or raise Busy, naming the owner. The OS releases the lock if the process dies."""
    try:
        return world.disk.lock(join(folder, LOCK), note or lock_note(world))
    except FolderLocked as locked:
        raise Busy(
            f"{folder} is owned by {_holder(locked.note)}; one process owns a folder at a time. {advice}"
        ) from None


def note_bytes(facts: Mapping[str, str | int]) -> bytes:
    """Return facts about an owner as JSON; an argument of its command need not be valid text."""
    written = {name: _as_text(value) if isinstance(value, str) else value for name, value in facts.items()}
    return msgspec.json.encode(written)


def _as_text(value: str) -> str:
    return value.encode("utf-8", "backslashreplace").decode()


def _holder(note: bytes) -> str:
    try:
        facts = json.loads(note)
        return f"process {facts['pid']} on {facts['host']} ({facts['command']}) since {facts['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process that left no readable note"


_Answer = TypeVar("_Answer")

_WHAT_TO_DO: Final = {
    errno.EMFILE: "this process has no file descriptor left. Close connections, groups or queues, or raise the limit "
    "(`ulimit -n`, LimitNOFILE= in a unit file)",
    errno.ENFILE: "this machine has no file descriptor left. Close files in other programs, or raise fs.file-max",
    errno.ENOMEM: "there is no memory left, or no room for another map. Free some, or raise the limit of memory or "
    "vm.max_map_count",
}


def with_space(world: World, urgent_bytes: int, attempt: Callable[[], _Answer], *, tries: int = 4) -> _Answer:
    """Call `attempt`; if the disk is full, have some space freed and try again, a few times."""
    try:
        return attempt()
    except OSError as error:
        if error.errno not in FULL_DISK or tries <= 1:
            raise
        full = error.with_traceback(None)  # its frames may hold files that are about to be removed
    if not world.make_space(urgent_bytes, urgent_bytes=urgent_bytes):
        raise full
    answer = with_space(world, urgent_bytes, attempt, tries=tries - 1)
    world.put_aside()  # what is left, before other programs take it
    return answer


def ran_out(error: OSError) -> bool:
    """Whether the error means a shortage (descriptors, memory, maps) that may be over at the next try."""
    return error.errno in RAN_OUT


def shortage(what: str, error: OSError, state: str) -> Unavailable:
    """Build the error for a call refused by a shortage: what failed, why, what state things are in, what to do."""
    return Unavailable(f"{what}: {advice(error)}. {state}; try again")


def advice(error: OSError) -> str:
    """Say what ran out and what to do about it; for other errors, the system's own text."""
    return _WHAT_TO_DO.get(error.errno or 0) or error.strerror or str(error)


def room(free: int, needed: int, min_free_bytes: int) -> str:
    """Say why there is too little room on the disk, naming the setting that is usually the cause."""
    kept = f", {min_free_bytes:,} must stay free (min_free_bytes)" if min_free_bytes else ""
    return f"{free:,} bytes are free, {needed:,} are needed{kept}"


def no_room(folder: str, why: str, *, is_journal: bool) -> DiskFull:
    """Build the error for an append that found no room."""
    if is_journal:
        what = "Nothing else in the folder can be given up for that. Free some space on this disk, 1 MiB is enough,"
    else:
        what = "Free some space (`holdfast log info` shows what the log takes; handling messages frees some)"
    return DiskFull(
        f"no room to append in {folder}: {why}. Nothing of this call was kept; reading still works. "
        f"{what} and try again"
    )


def sync_all(files: Sequence[File], folder: OpenFolder | None) -> None:
    """Sync some files, then a folder."""
    for file in files:
        file.sync()
    if folder is not None:
        folder.sync()
