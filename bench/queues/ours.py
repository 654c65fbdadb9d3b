"""Holdfast's queue: the only file of the benchmarks that knows its face."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from bench.harness import OURS
from bench.peers.base import KILL, POWER_CUT
from bench.queues.base import Queue, Taken


class HoldfastQueue(Queue):
    """Durability "os": returns when the bytes are in the page cache."""

    name = OURS
    survives = KILL
    ack_survives = KILL
    note = 'durability="os": puts and acks are in the page cache when the call returns'
    needs = ("holdfast.local",)
    depth = 10_000_000
    durability: ClassVar[Literal["os", "fsync"]] = "os"

    def open(self, folder: Path) -> None:
        import holdfast

        self.queue: Any = holdfast.open(folder / "queue", durability=self.durability)

    def put(self, body: bytes) -> None:
        self.queue.put(body)

    def put_each(self, bodies: Sequence[bytes]) -> None:
        put = self.queue.put
        for body in bodies:
            put(body)

    def put_many(self, bodies: list[bytes]) -> None:
        self.queue.put_many(bodies)

    def get(self, wait_s: float) -> Taken | None:
        from holdfast import Empty

        try:
            message = self.queue.get(timeout=wait_s)
        except Empty:
            return None
        return Taken(message.body, message)

    def get_some(self, most: int, wait_s: float) -> list[Taken]:
        return [Taken(message.body, message) for message in self.queue.get_many(most, timeout=wait_s)]

    def ack(self, receipt: Any) -> None:
        receipt.ack()

    def ack_some(self, receipts: list[Any]) -> None:
        self.queue.ack_many(receipts)

    def take_each(self, count: int) -> None:
        get_nowait = self.queue.get_nowait
        for _ in range(count):
            message = get_nowait()
            message.ack()

    def take_many(self, count: int) -> None:
        messages = self.queue.get_many(count, timeout=0)
        self.queue.ack_many(messages)

    def close(self) -> None:
        self.queue.close()


class HoldfastQueueSynced(HoldfastQueue):
    """Durability "fsync": a put returns after fdatasync; an ack is synced within a second."""

    name = f"{OURS}, fsync"
    survives = POWER_CUT
    note = 'durability="fsync": fdatasync before put returns; an ack is synced within a second'
    durability = "fsync"


class HoldfastAckSynced(HoldfastQueueSynced):
    """Each ack asks for a sync too: what a queue on SQLite with synchronous=FULL does."""

    name = f"{OURS}, fsync, acks synced"
    ack_survives = POWER_CUT
    note = 'durability="fsync", and ack(durability="fsync"): put and ack each return after fdatasync'

    def ack(self, receipt: Any) -> None:
        receipt.ack(durability="fsync")

    def take_each(self, count: int) -> None:
        for _ in range(count):
            self.queue.get_nowait().ack(durability="fsync")

    def take_many(self, count: int) -> None:
        self.queue.ack_many(self.queue.get_many(count, timeout=0), durability="fsync")
