"""diskcache's Deque: a double-ended queue in an SQLite cache, with no ack."""

from __future__ import annotations

from pathlib import Path

from bench.peers.base import KILL, NO_ACK
from bench.queues.base import Polled, Taken


class DiskcacheDeque(Polled):
    """append() and popleft(); a transaction where there are many."""

    name = "diskcache Deque (no ack)"
    survives = KILL
    ack_survives = NO_ACK
    note = "WAL, synchronous=NORMAL; a taken message is deleted at once; polls"
    needs = ("diskcache",)

    def open(self, folder: Path) -> None:
        from diskcache import Deque

        self.deque = Deque(directory=str(folder / "queue"))

    def put(self, body: bytes) -> None:
        self.deque.append(body)

    def put_many(self, bodies: list[bytes]) -> None:
        with self.deque.transact():
            self.deque.extend(bodies)

    def try_get(self) -> Taken | None:
        try:
            return Taken(self.deque.popleft(), None)
        except IndexError:
            return None

    def take_many(self, count: int) -> None:
        with self.deque.transact():
            for _ in range(count):
                self.deque.popleft()

    def close(self) -> None:
        self.deque.cache.close()
