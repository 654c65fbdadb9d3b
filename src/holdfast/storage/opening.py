"""What may stand in the way of opening a folder, in words."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Final

from holdfast.env import FolderLock, FolderLocked, World
from holdfast.errors import Busy, CorruptData, DiskFull, HoldfastError, InvalidRequest, NotALog, Unavailable
from holdfast.storage.files import FULL_DISK, LOCK, STATE, join, segment_bases
from holdfast.storage.shortage import ran_out, shortage

TRUST: Final = "HOLDFAST_BROKER_TRUST_FOLDER"


def require_own(world: World, folder: str, *, trusted: bool) -> None:
    """Raise InvalidRequest where other users could change what is in the folder, unless somebody trusts them."""
    why = None if trusted else world.disk.exposure(folder)
    if why is not None:
        raise InvalidRequest(
            f"{folder} is not safe from other users of this machine: {why}. Nothing was opened. Use a folder of your "
            "own that nobody else may write to (chown, chmod go-w), or run as the user who has it. If whoever may "
            "write there may also read, change and lose every message, say so: trust_folder=True, "
            f"`holdfast --trust-folder ...` or {TRUST}=true"
        )


def require_log(world: World, folder: str) -> None:
    """Raise NotALog unless the folder holds a log."""
    try:
        names = world.disk.names(folder)
    except FileNotFoundError:
        raise NotALog(f"there is no folder {folder}") from None
    except NotADirectoryError:
        raise NotALog(f"{folder} is a file, not the folder of a log") from None
    if STATE not in names and not segment_bases(names):
        raise NotALog(f"{folder} holds no log")


def is_log(world: World, folder: str) -> bool:
    """Whether a log was opened here before; its folder is durable then."""
    return world.disk.exists(join(folder, STATE))


def open_error(folder: str, error: OSError) -> HoldfastError:
    """The error of the disk as one that says what to do."""
    why = error.strerror or str(error)
    if error.errno in FULL_DISK:
        return DiskFull(f"cannot open {folder}: {why}. Free some space; it can still be read with LogReader")
    if ran_out(error):
        return shortage(f"cannot open {folder}", error, "Nothing was lost by trying")
    if error.errno == errno.ELOOP:
        return InvalidRequest(
            f"cannot open {folder}: {error.filename or 'a file in it'} is a symbolic link, and those are not followed "
            "where something is written. Nothing was changed; see who made it, and remove it"
        )
    if isinstance(error, PermissionError):
        return InvalidRequest(f"cannot open {folder}: {why}. Its owner must be able to write there")
    if isinstance(error, (NotADirectoryError, FileExistsError)):
        return NotALog(f"cannot open {folder}: {why}; a log lives in a folder")
    return Unavailable(f"cannot open {folder}: {why}. Nothing was lost by trying; look at the disk and try again")


def is_of_its_files(error: HoldfastError) -> bool:
    """Whether a log cannot be opened because of what its files are, and not because something ran out or is in use."""
    cause = error.__cause__
    if isinstance(cause, OSError):
        return cause.errno not in FULL_DISK and not ran_out(cause)
    return isinstance(error, (CorruptData, NotALog))


@contextmanager
def translated(folder: str) -> Iterator[None]:
    """An error of the disk becomes one that says what to do."""
    try:
        yield
    except OSError as error:
        raise open_error(folder, error) from error


# One owner for a folder, and an error that names the one who has it.


READ_IT = "Close it there, or read it from here without owning it: holdfast.storage.LogReader"


def take_lock(world: World, folder: str, advice: str = READ_IT) -> FolderLock:
    """Own the folder, or raise Busy at once. The lock ends with the process, however that ends."""
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
