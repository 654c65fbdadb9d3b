"""What the figures were measured on; a figure without it is worth little."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

from bench.programs import Program

_PACKAGES = (
    "holdfast", "persist-queue", "queuelib", "litequeue", "lmdb", "huey", "diskcache", "pyarrow", "uvloop", "crc32c",
    "redis", "nats-py", "psycopg", "pika", "greenstalk", "pyspark",
)  # fmt: skip
_SERVERS = (
    Program("redis-server", "redis-server"),
    Program("nats-server", "nats-server"),
    Program("postgres", "postgresql"),
)


def facts(folder: Path, date: str) -> dict[str, object]:
    """For results.json and the picture's title."""
    return {
        "date": date,
        "holdfast": _commit(),
        "cores": os.cpu_count(),
        "cpu": _cpu_model(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "file_system": file_system(folder),
        "load_before": load(),
        "packages": _versions(),
        "servers": _server_versions(),
    }


def load() -> float:
    """Processes that wanted a core in the last minute: much above 1 means that others were at work."""
    return round(os.getloadavg()[0], 2)


def title(machine: dict[str, object]) -> str:
    """One line."""
    return "{cpu}, {cores} cores, Python {python}, {file_system}, {date}".format_map(machine)


def warning(machine: dict[str, object]) -> str:
    """What a reader must know before any figure; empty on a quiet machine with a real disk."""
    if machine["file_system"] in ("tmpfs", "ramfs"):
        return "The data folder was in memory: syncs cost nothing there, the durable figures are void."
    if float(str(machine["load_before"])) > 1:
        return (
            f"Others were at work (load {machine['load_before']} before the start): trust ratios, not absolute figures."
        )
    return ""


def file_system(folder: Path) -> str:
    """The type of the file system that the folder lies on: tmpfs would make every sync a lie."""
    best, kind = "", "unknown"
    for line in _lines("/proc/self/mounts"):
        _, mounted_on, its_kind, *_ = line.split()
        if folder.resolve().is_relative_to(mounted_on) and len(mounted_on) >= len(best):
            best, kind = mounted_on, its_kind
    return kind


def _commit() -> str:
    """Which state of our own code was measured; "-dirty" if it was not committed."""
    command = ["git", "-c", "safe.directory=*", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def _cpu_model() -> str:
    names = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
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


def _server_versions() -> dict[str, str]:
    paths = {server.name: server.path() for server in _SERVERS}
    return {name: _first_line([path, "--version"]) for name, path in paths.items() if path}


def _first_line(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stdout.strip() or "unknown").splitlines()[0]
