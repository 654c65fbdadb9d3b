"""The snapshot of a journal and the one before it: should the newer be damaged, nothing is lost but time.

at   size  field
0    4     magic    "HFS" and the version, 1
4    4     check    CRC32C of the rest
8    n     payload  MessagePack of a position in the journal, and the state after all events below it
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from struct import Struct
from typing import Final, TypeVar

from holdfast.checksum import crc32c
from holdfast.env import World
from holdfast.errors import CorruptData, DiskFull, HoldfastError, Unavailable
from holdfast.storage.files import FULL_DISK, durable_replace, join, read_file
from holdfast.storage.shortage import advice, with_space

logger = logging.getLogger(__name__)

SNAPSHOT: Final = "snapshot"
BEFORE: Final = "snapshot.before"

_HEADER: Final = Struct("<4sI")
_MAGIC: Final = b"HFS\x01"
assert _HEADER.size == 8  # keeps the table above and the code in step

_State = TypeVar("_State")


def damaged_snapshot(folder: str, instead: str) -> CorruptData:
    """The error of one who only looks, and finds the newest snapshot damaged; `instead` is the file that is whole."""
    what = f"{join(folder, SNAPSHOT)} is damaged"
    if instead:
        return CorruptData(f"{what}; opening goes on from the one before, and loses nothing but time")
    return CorruptData(
        f"{what}, and there is no whole one before it: unless the events beside it reach back to the first, this part "
        "cannot be opened. Restore the file from a backup"
    )


class SnapshotFiles:
    """Both files of one folder."""

    def __init__(self, world: World, folder: str) -> None:
        self._world = world
        self._folder = folder
        self._current_is_whole = True  # a damaged one must not take the place of the one before

    def newest(self, decode: Callable[[bytes], _State]) -> tuple[_State | None, str]:
        """The newest snapshot that is whole, and its file's name."""
        for name in (SNAPSHOT, BEFORE):
            content = read_file(self._world.disk, join(self._folder, name))
            if content is None:
                continue
            try:
                magic, crc = _HEADER.unpack_from(content)
                payload = content[_HEADER.size :]
                if magic == _MAGIC and crc == crc32c(payload):
                    return decode(payload), name
            except Exception as error:  # whatever its bytes are, the one before may be whole
                logger.debug("snapshot unreadable", extra={"error": repr(error)})
            self._current_is_whole = False
            logger.error("snapshot damaged: going on from the one before", extra={"folder": self._folder, "file": name})
        return None, ""

    def keep(self, payload: bytes) -> None:
        """Put a new one in place; the last one becomes the one before, if it is whole."""
        path = join(self._folder, SNAPSHOT)
        try:
            if self._current_is_whole and self._world.disk.exists(path):
                self._world.disk.rename(path, join(self._folder, BEFORE))
            content = _HEADER.pack(_MAGIC, crc32c(payload)) + payload
            with_space(
                self._world,
                len(content),
                lambda: durable_replace(self._world.disk, self._folder, SNAPSHOT, content),
            )
        except OSError as error:
            raise _not_written(self._folder, error) from error
        self._current_is_whole = True


def _not_written(folder: str, error: OSError) -> HoldfastError:
    """Without a new snapshot the journal only grows; nothing is lost."""
    kind = DiskFull if error.errno in FULL_DISK else Unavailable
    return kind(f"no snapshot could be written in {folder}: {advice(error)}. The journal has everything")
