"""persist-queue: the file queue and the SQLite queue, as their README uses them."""

from __future__ import annotations

from pathlib import Path

from bench.peers.base import KILL, POWER_CUT, Peer


class PersistQueueFile(Peer):
    """Pickles into chunk files; rewrites and renames a small info file at each put."""

    name = "persist-queue Queue"
    survives = KILL
    note = "no sync; a renamed info file for each put; has no call for many; scan takes the messages"
    needs = ("persistqueue",)

    def open(self, folder: Path) -> None:
        from persistqueue import Queue

        # Temporary files beside the data: elsewhere they could not be renamed into place.
        self.queue = Queue(str(folder / "queue"), tempdir=str(folder))

    def put(self, body: bytes) -> None:
        self.queue.put(body)

    def read_all(self) -> int:
        count = 0
        while not self.queue.empty():
            self.queue.get_nowait()
            count += 1
        self.queue.task_done()
        return count


class PersistQueueSqlite(Peer):
    """A table in WAL mode with SQLite's default synchronous=FULL; each put commits."""

    name = "persist-queue SQLiteQueue"
    survives = POWER_CUT
    note = "SQLite's default synchronous=FULL; has no call for many"
    needs = ("persistqueue",)

    def open(self, folder: Path) -> None:
        from persistqueue import SQLiteQueue

        self.queue = SQLiteQueue(str(folder / "queue"), auto_commit=True, multithreading=True, timeout=60)

    def put(self, body: bytes) -> None:
        self.queue.put(body)

    def read_all(self) -> int:
        return len(self.queue.queue())

    def close(self) -> None:
        self.queue.close()
