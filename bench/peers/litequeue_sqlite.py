"""litequeue: a queue of text in one SQLite table with two indexes."""

from __future__ import annotations

from pathlib import Path

from bench.peers.base import KILL, Peer


class Litequeue(Peer):
    """WAL with synchronous=NORMAL, set by the library."""

    name = "litequeue"
    survives = KILL
    note = "SQLite WAL, synchronous=NORMAL; its pop slows down with depth, so it is not in the scan"
    needs = ("litequeue",)
    threads = False
    scans = False

    def open(self, folder: Path) -> None:
        from litequeue import LiteQueue

        self.queue = LiteQueue(folder / "queue.db")

    def put(self, body: bytes) -> None:
        self.queue.put(body.decode())

    def put_many(self, bodies: list[bytes]) -> None:
        with self.queue.transaction():
            for body in bodies:
                self.queue.put(body.decode())

    def read_all(self) -> int:
        return int(self.queue.qsize())

    def close(self) -> None:
        self.queue.close()
