"""The key of a data folder: receipts and lease ids are signed with it.

    at   size  field
    0    8     magic         HFPROOF1
    8    32    key           random bytes
    40   4     checksum      CRC32C of bytes 0..39, little endian

It is made when the first receipt is needed, and only the folder's owner can read it. Nothing that is stored depends
on it. Where it is lost, another one is made: receipts and lease ids that are out are refused from then on, and what
they were for comes back when its lease ends.
"""

from __future__ import annotations

import logging
import struct
import threading
from typing import Final

from holdfast.checksum import crc32c
from holdfast.env import World
from holdfast.storage.files import durable_replace, join, read_file
from holdfast.storage.opening import translated

logger = logging.getLogger(__name__)

KEY_FILE: Final = "receipts.key"
KEY_BYTES: Final = 32
_MAGIC: Final = b"HFPROOF1"
_LAYOUT: Final = struct.Struct(f"<8s{KEY_BYTES}sI")

assert _LAYOUT.size == 44  # keeps the table above and the code in step


class FolderKey:
    """The key of one data folder, read or made when it is first needed. Safe to use from any thread."""

    def __init__(self, world: World, root: str) -> None:
        self._world = world
        self._root = root
        self._lock = threading.Lock()
        self._key: bytes | None = None

    def get(self) -> bytes:
        """The key. Only the owner of the folder asks for it."""
        if self._key is None:
            with self._lock, translated(join(self._root, KEY_FILE)):
                if self._key is None:
                    self._key = self._read() or self._make()
        return self._key

    def _read(self) -> bytes | None:
        path = join(self._root, KEY_FILE)
        content = read_file(self._world.disk, path)
        if content is None:
            return None
        key = _key_of(content)
        if key is not None:
            return key
        logger.error(
            "the key of receipts is damaged; another one is made, and receipts that are out are refused",
            extra={"path": path},
        )
        return None

    def _make(self) -> bytes:
        key = self._world.ids.random_bytes(KEY_BYTES)
        content = _LAYOUT.pack(_MAGIC, key, crc32c(_MAGIC + key))
        durable_replace(self._world.disk, self._root, KEY_FILE, content)
        return key


def key_is_whole(world: World, root: str) -> bool:
    """Whether the key of a folder is what was written; one that was never made is, too."""
    content = read_file(world.disk, join(root, KEY_FILE))
    return content is None or _key_of(content) is not None


def _key_of(content: bytes) -> bytes | None:
    if len(content) != _LAYOUT.size:
        return None
    magic, key, checksum = _LAYOUT.unpack(content)
    found: bytes = key
    return found if magic == _MAGIC and checksum == crc32c(content[: _LAYOUT.size - 4]) else None
