"""Who owns a log, found out without touching its lock.

To try the lock, even for a moment, could turn away an owner that is just starting. The kernel lists the locks that
are held; the note in the lock file says who wrote it last.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Final

import msgspec

from holdfast.storage.files import LOCK

_LOCKS: Final = Path("/proc/locks")
_NOTE_BYTES: Final = 512


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the owner. `alive` is None where that cannot be told from here."""

    alive: bool | None
    pid: int | None = None
    host: str | None = None
    command: str | None = None
    since: str | None = None

    def __str__(self) -> str:
        if self.pid is None:
            return "a process that left no readable note"
        return f"process {self.pid} on {self.host} ({self.command}), since {self.since}"


def owner_of(folder: str, locks: Path = _LOCKS) -> Owner | None:
    """The owner of the folder, or the last one; None where it was never owned."""
    path = os.path.join(folder, LOCK)
    try:
        inode = os.stat(path).st_ino
        note = _note(Path(path).read_bytes()[:_NOTE_BYTES])
    except OSError:
        return None
    try:
        held = _is_locked(locks.read_text(encoding="ascii", errors="replace"), inode)
    except OSError:
        held = None
    return msgspec.structs.replace(note, alive=held)


def _note(content: bytes) -> Owner:
    try:
        facts = json.loads(content)
        return Owner(
            alive=None,
            pid=int(facts["pid"]),
            host=str(facts["host"]),
            command=str(facts["command"]),
            since=str(facts["since"]),
        )
    except (ValueError, KeyError, TypeError):
        return Owner(alive=None)


def _is_locked(locks: str, inode: int) -> bool | None:
    """A holder in another container is not listed: that nobody is seen does not mean that nobody is there."""
    for line in locks.splitlines():
        fields = line.split()
        if len(fields) >= 6 and fields[1] == "FLOCK" and fields[3] == "WRITE" and fields[5].endswith(f":{inode}"):
            return True
    return None
