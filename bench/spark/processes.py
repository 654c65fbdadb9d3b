"""What Spark's processes use: the JVM below this process, and the Python workers below that."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_LOOK_AGAIN_S = 0.005
_LOOKS = 10


def descendants(root: int) -> list[int]:
    """The processes below one, the nearest first."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            children.setdefault(_parent(int(entry)), []).append(int(entry))
    found = [root]
    for process in found:
        found += children.get(process, [])
    return found[1:]


def cpu_seconds(root: int) -> float:
    """What a process and all below it have burned, those that have ended among them."""
    return _cpu_seconds([root, *descendants(root)])


def worker_cpu_seconds(root: int) -> float:
    """What the Python workers below a process have burned."""
    return _cpu_seconds(_daemons(root))


def _cpu_seconds(processes: Iterable[int]) -> float:
    ticks = 0
    for process in processes:
        fields = _text(Path(f"/proc/{process}/stat")).rpartition(")")[2].split()
        ticks += sum(int(field) for field in fields[11:15])  # its own, and of children that it has waited for
    return ticks / _TICKS


def python_workers(root: int) -> list[int]:
    """The workers that run tasks: they are forked from a daemon, and have its command line."""
    daemons = _daemons(root)
    return [process for process in daemons if _parent(process) in daemons]


def _daemons(root: int) -> set[int]:
    return {process for process in descendants(root) if "pyspark.daemon" in _text(Path(f"/proc/{process}/cmdline"))}


def end_idle_workers(root: int) -> None:
    """So that the next job begins with fresh ones, without the memory that others have left them."""
    for process in python_workers(root):
        os.kill(process, signal.SIGKILL)


@dataclass
class Peak:
    """The most that one worker had for itself: no mapped file, no page cache."""

    anon_bytes: int = 0


@contextmanager
def watched_memory(root: int) -> Iterator[Peak]:
    """Looks every few milliseconds, from a thread, until the block ends."""
    peak, ended = Peak(), threading.Event()

    def look() -> None:
        while not ended.is_set():
            workers = python_workers(root)  # looks at every process there is: not each time
            for _ in range(_LOOKS):
                peak.anon_bytes = max([peak.anon_bytes, *map(anon_bytes, workers)])
                ended.wait(_LOOK_AGAIN_S)

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield peak
    finally:
        ended.set()
        watcher.join()


def anon_bytes(process: int) -> int:
    """0 of a process that has ended."""
    lines = _text(Path(f"/proc/{process}/status")).splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def _parent(process: int) -> int:
    fields = _text(Path(f"/proc/{process}/stat")).rpartition(")")[2].split()
    return int(fields[1]) if fields else 0


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # it has ended
        return ""
