"""64 tasks append at once, each waits until its message is on disk, and one sync serves many of them.

    python examples/async_writers.py

The disk's counter of syncs comes from a disk that counts; everything else is the log as it is.
"""

from __future__ import annotations

import asyncio
import tempfile
import time

import msgspec

from holdfast.env import File, RealDisk, real_world
from holdfast.storage import Log

TASKS = 64
EACH = 50


class CountingDisk(RealDisk):
    """The machine's disk; counts the syncs of the files that it opens."""

    syncs = 0

    def open(self, path: str, *, write: bool = False, create: bool = False) -> File:
        file = super().open(path, write=write, create=create)
        plain_sync = file.sync

        def sync() -> None:
            self.syncs += 1
            plain_sync()

        file.sync = sync  # type: ignore[method-assign]
        return file


async def write(log: Log, task: int) -> None:
    """One producer: the next message goes out when the one before is safe."""
    for number in range(EACH):
        await log.append_one_async(f"task {task}, message {number}".encode())


async def write_all(log: Log) -> None:
    await asyncio.gather(*(write(log, task) for task in range(TASKS)))


with tempfile.TemporaryDirectory() as temporary:
    disk = CountingDisk()
    with Log.open(f"{temporary}/shared", world=msgspec.structs.replace(real_world(), disk=disk)) as shared:
        before, start = disk.syncs, time.perf_counter()
        asyncio.run(write_all(shared))
        seconds, syncs = time.perf_counter() - start, disk.syncs - before
        assert shared.synced_end == shared.end == TASKS * EACH
        print(f"{shared.end:,} messages from {TASKS} tasks, each on disk before its task went on")
        print(f"{syncs:,} syncs, {shared.end / syncs:.0f} messages a sync, {shared.end / seconds:,.0f} messages/s")
