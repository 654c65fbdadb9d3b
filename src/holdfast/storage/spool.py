"""Where a large message waits until all of it is there: a temporary file beside the log, void until it is appended.

Whatever happens on the way, the log knows nothing of it. The file goes when the spool is closed; one that a dead
process left behind goes at the next opening, like every temporary file.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Final

from crc32c import crc32c

from holdfast.env import File, World
from holdfast.errors import Closed, DiskFull, InvalidRequest, MessageTooLarge, Unavailable
from holdfast.large import LARGE_BYTES, LargeValue, Value
from holdfast.settings import LogSettings
from holdfast.storage.files import FULL_DISK, join, write_fully

_GATHER_BYTES: Final = 1 << 20
_LOOK_EVERY_BYTES: Final = 16 << 20


class Spool:
    """Takes one value in, piece by piece; for one caller at a time, who may change threads."""

    def __init__(self, world: World, folder: str, settings: LogSettings, size_hint: int | None = None) -> None:
        self._world = world
        self._folder = folder
        self._settings = settings
        self._path = join(folder, f"spool-{world.ids.random_u32():08x}{world.ids.random_u32():08x}.tmp")
        self._gathered: list[bytes] = []
        self._gathered_bytes = 0
        self._written = 0
        self._sum = 0
        self._look_at = 0
        self._lock = threading.Lock()  # a task that is cancelled closes while a thread still writes for it
        self._file: File | None = None  # only for what is large
        self._closed = False
        if size_hint is not None:
            self._check_size(size_hint)
            # As much again is needed in the log, before the file can go.
            self._check_free(2 * size_hint)

    def add(self, piece: object) -> bool:
        """Take the next piece; True when enough are gathered for `flush`."""
        if not isinstance(piece, (bytes, bytearray, memoryview)):
            raise InvalidRequest(f"a stream must give bytes, not {type(piece).__name__}. Nothing was stored")
        content = bytes(piece)
        self._check_size(self._written + self._gathered_bytes + len(content))
        self._gathered.append(content)
        self._gathered_bytes += len(content)
        return self._gathered_bytes >= _GATHER_BYTES

    def flush(self) -> None:
        """Write what is gathered; the only call that waits for the disk, besides `value`."""
        with self._lock:
            if self._closed or not self._gathered_bytes:
                return
            content, self._gathered, self._gathered_bytes = b"".join(self._gathered), [], 0
            if self._written >= self._look_at:
                self._check_free(self._written + len(content))
                self._look_at = self._written + _LOOK_EVERY_BYTES
            try:
                if self._file is None:
                    self._file = self._world.disk.open(self._path, write=True, create=True)
                write_fully(self._file, self._written, [content])
            except OSError as error:
                raise self._refusal(error) from error
            self._sum = crc32c(content, self._sum)
            self._written += len(content)

    def value(self) -> Value:
        """All that came: in memory where it is small, else in the file, with the checksum of what was given."""
        if not self._written and self._gathered_bytes <= LARGE_BYTES:
            return b"".join(self._gathered)
        self.flush()
        with self._lock:
            if self._closed or self._file is None:
                raise Closed("a large message was given up while it was stored")
            return LargeValue(self._file.view(0, self._written), 0, self._written, self._sum)

    def close(self) -> None:
        """Remove the file; a value that is still read stays readable."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._file is None:
                return
            self._file.close()
            with contextlib.suppress(OSError):  # then the next opening removes it
                self._world.disk.remove(self._path)

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check_size(self, size: int) -> None:
        limit = self._settings.max_message_bytes
        if size > limit:
            raise MessageTooLarge(
                f"the stream has {size:,} bytes or more, the limit is {limit:,}; nothing was stored. Send it in parts, "
                "or raise max_message_bytes"
            )

    def _check_free(self, more: int) -> None:
        free, keep = self._world.disk.free_bytes(self._folder), self._settings.min_free_bytes
        if free - more < keep:
            raise self._full(f"{free:,} bytes are free, {more:,} are needed, {keep:,} must stay free")

    def _refusal(self, error: OSError) -> Unavailable:
        if error.errno in FULL_DISK:
            return self._full(error.strerror or "no room")
        return Unavailable(
            f"a large message could not be written in {self._folder}: {error.strerror or error}. Nothing of it was "
            "kept; look at the disk, then try again"
        )

    def _full(self, why: str) -> DiskFull:
        return DiskFull(
            f"no room for a large message in {self._folder}: {why}. Nothing of it was kept; reading goes on. "
            "Free some space and try again"
        )
