"""Holdfast's log: the only file of the benchmarks that knows our own interface."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from bench.harness import OURS
from bench.peers.base import KILL, POWER_CUT, Peer

# A read every so many messages touches every segment: one holds 64 MiB.
_EVERY = 100_000


class Holdfast(Peer):
    """Durability "os": returns when the bytes are in the page cache."""

    name = OURS
    survives = KILL
    note = 'durability="os": checksummed frames in the page cache when append returns'
    needs = ("holdfast.storage", "holdfast.settings")
    durability: ClassVar[Literal["os", "fsync"]] = "os"

    def open(self, folder: Path) -> None:
        from holdfast.settings import LogSettings
        from holdfast.storage import open_log

        self.log: Any = open_log(str(folder), LogSettings(durability=self.durability))

    def put(self, body: bytes) -> None:
        self.log.append_one(body)

    def put_each(self, bodies: Sequence[bytes]) -> None:
        append_one = self.log.append_one
        for body in bodies:
            append_one(body)

    def put_many(self, bodies: list[bytes]) -> None:
        self.log.append(bodies)

    def put_arrow(self, bodies: Any) -> None:
        """A pyarrow BinaryArray."""
        self.log.append_arrow(bodies)

    async def put_async(self, body: bytes) -> None:
        """From a task; with "fsync" one sync serves all that wait."""
        await self.log.append_one_async(body)

    def read_all(self) -> int:
        return sum(len(frame.values()) for frame in self.log.read(0))

    def end(self) -> int:
        """How many there were, learnt from a first put: a log that is not ready for it is not open."""
        return int(self.log.append([b"the first after opening"]).offset)

    def end_with_indexes(self) -> int:
        """The same, and a message found in each segment: a missing index is rebuilt when first needed."""
        end = self.end()
        for offset in range(0, end, _EVERY):
            next(iter(self.log.read(offset)))
        return end

    def close(self) -> None:
        self.log.close()


class HoldfastSynced(Holdfast):
    """Durability "fsync": returns after fdatasync."""

    survives = POWER_CUT
    note = 'durability="fsync": fdatasync before append returns; one sync serves all waiting callers'
    durability = "fsync"


def delete_indexes(folder: Path) -> None:
    """As if they had never been there: they are caches, and are rebuilt from the segments."""
    for path in folder.rglob("*.idx"):
        path.unlink()
