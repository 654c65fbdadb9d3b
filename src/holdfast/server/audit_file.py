"""A file of lines that is put aside when it is long; the newest lines are read back first."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from holdfast.env import World
from holdfast.env.disk import File
from holdfast.storage.files import read_file, write_fully

_MOST_READ: Final = 4 * 1024 * 1024


class AuditFile:
    """Appends lines, and begins a new file when this one is long. Safe to use from any thread."""

    def __init__(self, world: World, path: str, *, most_bytes: int, files: int) -> None:
        self.path = path
        self._world = world
        self._most_bytes = most_bytes
        self._files = files
        self._lock = threading.Lock()
        self._file: File | None = None
        self._end = 0

    def prepare(self) -> None:
        """Have the file; OSError where that cannot be."""
        with self._lock:
            self._opened(0)

    def append(self, line: bytes, *, sync: bool) -> None:
        """Add a line, which ends with \\n; with `sync` it is on disk then."""
        with self._lock:
            try:
                file = self._opened(len(line))
                write_fully(file, self._end, [line])
                if sync:
                    file.sync()
            except OSError:
                # After a sync that failed nobody knows what is on the disk: the next line begins with a new look.
                self._let_go()
                raise
            self._end += len(line)

    def backwards(self) -> Iterator[bytes]:
        """The lines, the newest first; one of them may have been cut short by a crash."""
        for number in range(self._files + 1):
            with self._lock:
                content = read_file(self._world.disk, self._name(number))
            yield from reversed((content or b"")[-_MOST_READ:].splitlines())

    def close(self) -> None:
        with self._lock:
            self._let_go()

    def _opened(self, wanted: int) -> File:
        if self._file is not None and self._end and self._end + wanted > self._most_bytes:
            self._let_go()
            self._put_aside()
        if self._file is None:
            self._file = self._world.disk.open(self.path, write=True, create=True)
            self._world.disk.sync_folder(self.path.rpartition("/")[0] or ".")
            self._end = self._file.size()
            if self._end and self._file.read(self._end - 1, 1) != b"\n":  # a line that a crash cut short
                write_fully(self._file, self._end, [b"\n"])
                self._end += 1
        return self._file

    def _put_aside(self) -> None:
        disk = self._world.disk
        with suppress(FileNotFoundError):
            disk.remove(self._name(self._files))
        for number in range(self._files - 1, -1, -1):
            with suppress(FileNotFoundError):
                disk.rename(self._name(number), self._name(number + 1))

    def _name(self, number: int) -> str:
        return f"{self.path}.{number}" if number else self.path

    def _let_go(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()
