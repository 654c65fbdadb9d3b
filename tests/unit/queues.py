"""A queue on the simulated world, for tests of its faces and of what stands behind them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import holdfast
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk

FOLDER = "/data/jobs"

# Plain numbers, so that a test can say what it expects.
PLAIN = {"backoff_ms": 100, "backoff_jitter_percent": 0, "backoff_max_ms": 1_000, "min_free_bytes": 0}


class Place:
    """A queue in a folder of a simulated disk, with a clock that stands still until it is moved."""

    def __init__(self, **changes: Any) -> None:
        self.disk = SimulatedDisk()
        self.clock = ManualClock()
        self.ids = SeededIds(1)
        self.q = self.open(**{**PLAIN, **changes})

    @property
    def world(self) -> World:
        return World(clock=self.clock, disk=self.disk, ids=self.ids)

    def open(self, **options: Any) -> holdfast.Queue[Any]:
        return holdfast.open(FOLDER, world=self.world, **options)

    def reopen(self, **options: Any) -> holdfast.Queue[Any]:
        """Close in order, and open again."""
        self.q.close()
        self.q = self.open(**options)
        return self.q

    def kill(self, **options: Any) -> holdfast.Queue[Any]:
        """The process is gone (kill -9); another one opens the queue."""
        self.disk = self.disk.kill()
        self.q = self.open(**options)
        return self.q

    def tick(self) -> None:
        self.q._port.engine.tick()

    def after(self, *, seconds: float = 0, ms: int = 0) -> None:
        """Time passes, and what falls due is done."""
        self.clock.advance(seconds=seconds, ms=ms)
        self.tick()

    def files(self, folder: str = FOLDER) -> dict[str, bytes]:
        """Every file below the folder, the notes in locks aside."""
        found: dict[str, bytes] = {}
        if not self.disk.exists(folder):
            return found
        for name in self.disk.names(folder):
            path = f"{folder}/{name}"
            if name == "lock":
                continue
            try:
                found[path] = self.disk.contents(path)
            except IsADirectoryError:
                found |= self.files(path)
        return found

    def numbers(self) -> dict[str, Any]:
        """The stats, without what was counted."""
        stats = self.q.stats()
        return {name: getattr(stats, name) for name in stats.__struct_fields__ if name != "metrics"}

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """What happens inside leaves no trace: in the stats, in the files, in what would come next."""
        before = self.numbers(), self.files(), [(m.id, m.raw) for m in self.q.peek(100)]
        yield
        assert (self.numbers(), self.files(), [(m.id, m.raw) for m in self.q.peek(100)]) == before


def bodies(q: holdfast.Queue[Any], most: int = 100) -> list[Any]:
    """Take what is ready, ack it, and answer with the bodies in the order in which they came."""
    taken = q.get_many(most, timeout=0)
    for m in taken:
        m.ack()
    return [m.body for m in taken]
