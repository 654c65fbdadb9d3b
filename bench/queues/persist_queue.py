"""persist-queue: the queue with an ack and the file queue, as their README uses them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.peers.base import KILL, NO_ACK, POWER_CUT
from bench.queues.base import Queue, Taken


class PersistAckQueue(Queue):
    """A table in WAL mode with SQLite's default synchronous=FULL; put, get and ack each commit."""

    name = "persist-queue SQLiteAckQueue"
    survives = POWER_CUT
    ack_survives = POWER_CUT
    note = "put, get and ack each sync; no call for many; acked rows stay and slow the next get until cleared"
    needs = ("persistqueue",)
    depth = 0

    def open(self, folder: Path) -> None:
        from persistqueue import SQLiteAckQueue

        self.queue = SQLiteAckQueue(str(folder / "queue"), multithreading=True, timeout=60)

    def put(self, body: bytes) -> None:
        self.queue.put(body)

    def get(self, wait_s: float) -> Taken | None:
        from persistqueue import Empty

        try:
            body = self.queue.get(block=wait_s > 0, timeout=wait_s or None)
        except Empty:
            return None
        return Taken(body, body)

    def ack(self, receipt: Any) -> None:
        self.queue.ack(receipt)

    def close(self) -> None:
        self.queue.close()


class PersistFileQueue(Queue):
    """Chunk files and an info file; `task_done` saves how far everybody has read, not which message is done."""

    name = "persist-queue Queue (no ack)"
    survives = KILL
    ack_survives = NO_ACK
    note = "task_done() saves the place of all that were taken, and so does the next put; no call for many"
    needs = ("persistqueue",)
    depth = 0

    def open(self, folder: Path) -> None:
        from persistqueue import Queue as FileQueue

        # Temporary files beside the data: elsewhere they could not be renamed into place.
        self.queue = FileQueue(str(folder / "queue"), tempdir=str(folder))

    def put(self, body: bytes) -> None:
        self.queue.put(body)

    def get(self, wait_s: float) -> Taken | None:
        from persistqueue import Empty

        try:
            return Taken(self.queue.get(block=wait_s > 0, timeout=wait_s or None), None)
        except Empty:
            return None

    def ack(self, receipt: Any) -> None:
        self.queue.task_done()
