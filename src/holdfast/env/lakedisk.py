"""The disk as tables need it: whole folders change places at once, and a file may stand under two names."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from typing import Final

from holdfast.env.disk import RealDisk

_HERE: Final = -100  # AT_FDCWD
_EXCHANGE: Final = 2  # RENAME_EXCHANGE
_UNSUPPORTED: Final = frozenset({errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP})


class LakeDisk(RealDisk):
    """The disk of this machine, with the few calls more that tables of plain files need."""

    def make_folder(self, path: str) -> None:
        """Open to those whom the process lets in, as what Spark writes is: tables are for others to read."""
        missing = []
        current = os.path.abspath(path)
        while not os.path.isdir(current):
            missing.append(current)
            current = os.path.dirname(current)
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):  # somebody else has just made it
                os.mkdir(folder)
            self.sync_folder(os.path.dirname(folder))

    def exchange(self, one: str, other: str) -> bool:
        """Let two names change places in one step, as every reader sees it; False where this disk cannot do that."""
        library = ctypes.CDLL(None, use_errno=True)
        if not hasattr(library, "renameat2"):
            return False
        if library.renameat2(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0:
            return True
        code = ctypes.get_errno()
        if code in _UNSUPPORTED:
            return False
        raise OSError(code, os.strerror(code), one)

    def link(self, old: str, new: str) -> None:
        """A second name for the same file."""
        os.link(old, new)

    def size(self, path: str) -> int:
        return os.stat(path).st_size

    def sync_file(self, path: str) -> None:
        """Return when a file that somebody else wrote is on stable storage."""
        file = self.open(path)
        try:
            file.sync()
        finally:
            file.close()

    def files_below(self, folder: str) -> list[str]:
        """Every file below the folder, by its path from there, sorted; nothing where there is no such folder."""
        found = []
        for place, _, names in os.walk(folder):
            below = os.path.relpath(place, folder)
            found += [name if below == "." else f"{below}/{name}" for name in names]
        return sorted(found)
