"""queuelib's FifoDiskQueue, which Scrapy uses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.peers.base import NOTHING, Peer


class QueuelibFifo(Peer):
    """Chunk files and a position that is saved only by close()."""

    name = "queuelib FifoDiskQueue"
    survives = NOTHING
    note = "written to the file, but not found at the next opening without close(); scan takes the messages"
    needs = ("queuelib",)
    threads = False

    def open(self, folder: Path) -> None:
        from queuelib import FifoDiskQueue

        self.queue = FifoDiskQueue(str(folder / "queue"))

    def put(self, body: bytes) -> None:
        self.queue.push(body)

    def put_each(self, bodies: Sequence[bytes]) -> None:
        push = self.queue.push
        for body in bodies:
            push(body)

    def read_all(self) -> int:
        count = 0
        while self.queue.pop() is not None:
            count += 1
        return count

    def close(self) -> None:
        self.queue.close()
