"""Opening a folder: who may own it, and errors that say what stands in the way.

A call can run out of descriptors, memory or maps before any byte is at stake. That is not a disk failure: the call is
refused, what it had begun is undone, and the next one may succeed. Only a failed write or sync of data stops a log for
good, because nobody can know what it left on disk. To keep the two apart, everything that a sync will need is opened
before there is anything to sync.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Final, TypeVar

from holdfast.env import FolderLock, FolderLocked, World
from holdfast.env.disk import RAN_OUT
from holdfast.errors import Busy, CorruptData, DiskFull, HoldfastError, InvalidRequest, NotALog, Unavailable
from holdfast.storage.files import FULL_DISK, LOCK, STATE, join, segment_bases

TRUST: Final = "HOLDFAST_BROKER_TRUST_FOLDER"


def require_own(world: World, folder: str, *, trusted: bool) -> None:
    """Raise InvalidRequest if other users could change what is in the folder, unless it is `trusted`."""
    why = None if trusted else world.disk.exposure(folder)
    if why is not None:
        raise InvalidRequest(
            f"{folder} is not safe from other users of this machine: {why}. Nothing was opened. Use a folder of your "
            "own that nobody else may write to (chown, chmod go-w), or run as the user who has it. If whoever may "
            "write there may also read, change and lose every message, say so: trust_folder=True, "
            f"`holdfast --trust-folder ...` or {TRUST}=true"
        )


def require_log(world: World, folder: str) -> None:
    """Raise NotALog unless the folder contains a log."""
    try:
        names = world.disk.names(folder)
    except FileNotFoundError:
        raise NotALog(f"there is no folder {folder}") from None
    except NotADirectoryError:
        raise NotALog(f"{folder} is a file, not the folder of a log") from None
    if STATE not in names and not segment_bases(names):
        raise NotALog(f"{folder} holds no log")


def is_log(world: World, folder: str) -> bool:
    """Whether a log was opened here before; if so, the folder itself is durable."""
    return world.disk.exists(join(folder, STATE))


def open_error(folder: str, error: OSError) -> HoldfastError:
    """Translate a disk error into one of ours that says what to do."""
    why = error.strerror or str(error)
    if error.errno in FULL_DISK:
        return DiskFull(f"cannot open {folder}: {why}. Free some space; it can still be read with LogReader")
    if ran_out(error):
        return shortage(f"cannot open {folder}", error, "Nothing was lost")
    if error.errno == errno.ELOOP:
        return InvalidRequest(
            f"cannot open {folder}: {error.filename or 'a file in it'} is a symbolic link, and those are not followed "
            "where something is written. Nothing was changed; see who made it, and remove it"
        )
    if isinstance(error, PermissionError):
        return InvalidRequest(f"cannot open {folder}: {why}. Its owner must be able to write there")
    if isinstance(error, (NotADirectoryError, FileExistsError)):
        return NotALog(f"cannot open {folder}: {why}; a log lives in a folder")
    return Unavailable(f"cannot open {folder}: {why}. Nothing was lost; look at the disk and try again")


def is_of_its_files(error: HoldfastError) -> bool:
    """Whether a log cannot be opened because of what its files are, and not because something ran out or is in use."""
    cause = error.__cause__
    if isinstance(cause, OSError):
        return cause.errno not in FULL_DISK and not ran_out(cause)
    return isinstance(error, (CorruptData, NotALog))


@contextmanager
def translated(folder: str) -> Iterator[None]:
    """Translate disk errors raised inside the block with `open_error`."""
    try:
        yield
    except OSError as error:
        raise open_error(folder, error) from error


READ_IT = "Close it there, or read it from here without owning it: holdfast.storage.LogReader"


def take_lock(world: World, folder: str, advice: str = READ_IT) -> FolderLock:
    """Take ownership of the folder, or raise Busy, naming the owner. The OS releases the lock if the process dies."""
    since = datetime.fromtimestamp(world.clock.now_ns() / 1e9, UTC).isoformat(timespec="seconds")
    note = json.dumps({**world.ids.process_note(), "since": since}).encode()[:500]
    try:
        return world.disk.lock(join(folder, LOCK), note)
    except FolderLocked as locked:
        raise Busy(
            f"{folder} is owned by {_holder(locked.note)}; one process owns a folder at a time. {advice}"
        ) from None


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


def with_space(world: World, urgent_bytes: int, attempt: Callable[[], _Answer]) -> _Answer:
    """Call `attempt`; if the disk is full, have some space freed and try once more."""
    try:
        return attempt()
    except OSError as error:
        if error.errno not in FULL_DISK or not world.make_space(urgent_bytes, urgent_bytes=urgent_bytes):
            raise
    return attempt()


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
