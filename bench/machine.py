"""What the figures were measured on; a figure without it is worth little."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

_PACKAGES = ("holdfast", "persist-queue", "queuelib", "litequeue", "lmdb", "pyarrow", "uvloop", "crc32c")


def facts(folder: Path, date: str) -> dict[str, object]:
    """For results.json and the picture's title."""
    return {
        "date": date,
        "cores": os.cpu_count(),
        "cpu": _cpu_model(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "file_system": file_system(folder),
        "load_before": load(),
        "packages": _versions(),
    }


def load() -> float:
    """Processes that wanted a core in the last minute: much above 1 means that others were at work."""
    return round(os.getloadavg()[0], 2)


def title(machine: dict[str, object]) -> str:
    """One line."""
    return (
        f"{machine['cores']} cores, Python {machine['python']}, {machine['file_system']}, {machine['date']}"
    )


def file_system(folder: Path) -> str:
    """The type of the file system that the folder lies on: tmpfs would make every sync a lie."""
    best, kind = "", "unknown"
    for line in _lines("/proc/self/mounts"):
        _, mounted_on, its_kind, *_ = line.split()
        if folder.resolve().is_relative_to(mounted_on) and len(mounted_on) >= len(best):
            best, kind = mounted_on, its_kind
    return kind


def _cpu_model() -> str:
    names = [
        line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")
    ]
    return names[0] if names else platform.processor()


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:  # not Linux
        return []


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
