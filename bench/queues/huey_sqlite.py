"""huey's SqliteStorage: the table below its task queue, with no ack."""

from __future__ import annotations

from pathlib import Path

from bench.peers.base import NO_ACK, POWER_CUT
from bench.queues.base import Polled, Taken


class HueyStorage(Polled):
    """dequeue() selects and deletes in one exclusive transaction."""

    name = "huey SqliteStorage (no ack)"
    survives = POWER_CUT
    ack_survives = NO_ACK
    note = "WAL, SQLite's default synchronous=FULL; a taken message is deleted at once; no call for many; polls"
    needs = ("huey",)
    depth = 0

    def open(self, folder: Path) -> None:
        from huey.storage import SqliteStorage

        self.storage = SqliteStorage("queue", filename=str(folder / "queue.db"))

    def put(self, body: bytes) -> None:
        self.storage.enqueue(body)

    def try_get(self) -> Taken | None:
        body = self.storage.dequeue()
        return None if body is None else Taken(body, None)

    def close(self) -> None:
        self.storage.close()
