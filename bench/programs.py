"""Servers that some contestants need: found where Debian puts them, never installed from here."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

# Where Debian keeps servers; not every user has these in PATH.
_ALSO = ("/usr/sbin", "/usr/local/sbin")
_POSTGRESQL = Path("/usr/lib/postgresql")


@dataclass(frozen=True)
class Program:
    """A program, and the Debian package that has it."""

    name: str
    package: str
    first: str = ""
    """A folder to look in before all others."""

    def path(self) -> str | None:
        """Where it is; None if it is not installed."""
        # The newest PostgreSQL first: its programs are not in PATH at all.
        newest = sorted(_POSTGRESQL.glob("*/bin"), key=lambda folder: folder.parent.name.rjust(4), reverse=True)
        folders = [self.first, *map(str, newest), os.environ.get("PATH", os.defpath), *_ALSO]
        return shutil.which(self.name, path=os.pathsep.join(filter(None, folders)))


def missing_programs(programs: Iterable[Program]) -> list[str]:
    """What is not installed, with what to type."""
    packages: dict[str, list[str]] = {}
    for program in programs:
        if program.path() is None:
            packages.setdefault(program.package, []).append(program.name)
    return [f"{' and '.join(names)} (apt-get install {package})" for package, names in packages.items()]
