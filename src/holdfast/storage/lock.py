"""One owner for a folder, and an error that names the one who has it."""

from __future__ import annotations

import json
from datetime import UTC, datetime

from holdfast.env import FolderLock, FolderLocked, World
from holdfast.errors import Busy
from holdfast.storage.files import LOCK, join

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
