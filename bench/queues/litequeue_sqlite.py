"""litequeue: pop() leases a row for ever, done() marks it; both keep it in the table."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from bench.peers.base import KILL
from bench.queues.base import Polled, Taken


class LitequeueQueue(Polled):
    """WAL with synchronous=NORMAL, set by the library; a lock of ours, since one connection has one transaction."""

    name = "litequeue"
    survives = KILL
    ack_survives = KILL
    note = "synchronous=NORMAL; pop sorts all that wait, rows of done messages stay until pruned; polls"
    needs = ("litequeue",)

    def open(self, folder: Path) -> None:
        from litequeue import LiteQueue

        self.lock = threading.Lock()
        self.queue = LiteQueue(folder / "queue.db")

    def put(self, body: bytes) -> None:
        with self.lock:
            self.queue.put(body.decode())

    def put_many(self, bodies: list[bytes]) -> None:
        with self.lock, self.queue.transaction():
            for body in bodies:
                self.queue.put(body.decode())

    def try_get(self) -> Taken | None:
        with self.lock:
            message = self.queue.pop()
        return None if message is None else Taken(message.data.encode(), message.message_id)

    def ack(self, receipt: Any) -> None:
        with self.lock:
            self.queue.done(receipt)

    def close(self) -> None:
        self.queue.close()
