"""queuelib's FifoDiskQueue, which Scrapy uses: no ack, and nothing kept without close()."""

from __future__ import annotations

import threading
from pathlib import Path

from bench.peers.base import NO_ACK, NOTHING
from bench.queues.base import Polled, Taken


class QueuelibQueue(Polled):
    """Chunk files and a position that is saved only by close(); a lock of ours, since it has none."""

    name = "queuelib FifoDiskQueue (no ack)"
    survives = NOTHING
    ack_survives = NO_ACK
    note = "the positions of put and get are saved by close() only; polls"
    needs = ("queuelib",)
    depth = 1_000_000

    def open(self, folder: Path) -> None:
        from queuelib import FifoDiskQueue

        self.lock = threading.Lock()
        self.queue = FifoDiskQueue(str(folder / "queue"))

    def put(self, body: bytes) -> None:
        with self.lock:
            self.queue.push(body)

    def try_get(self) -> Taken | None:
        with self.lock:
            body = self.queue.pop()
        return None if body is None else Taken(body, None)

    def take_each(self, count: int) -> None:
        pop = self.queue.pop
        for _ in range(count):
            if pop() is None:
                raise LookupError("the queue is empty though messages were put")

    def close(self) -> None:
        self.queue.close()
