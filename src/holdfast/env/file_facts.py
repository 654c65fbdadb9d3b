"""What tells one state of a file from the next, and who may read or change it."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass


@dataclass(frozen=True)
class FileFacts:
    """A file that was changed, or another one under its name, differs in one of these."""

    inode: int
    size: int
    changed_ns: int
    renamed_ns: int
    mode: int

    @property
    def others_may_read(self) -> bool:
        """Whether every user of the machine may; the file's group may have been given it on purpose."""
        return bool(self.mode & stat.S_IROTH)

    @property
    def others_may_write(self) -> bool:
        """Whether anybody but its owner may."""
        return bool(self.mode & (stat.S_IWGRP | stat.S_IWOTH))


def file_facts(path: str) -> FileFacts | None:
    """Those of the file that the name leads to now; None where there is none that could be looked at."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return FileFacts(found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns, stat.S_IMODE(found.st_mode))
