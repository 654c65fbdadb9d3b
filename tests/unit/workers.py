"""Workers on queues in a folder, with a clock that stands still until it is moved."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import holdfast
from holdfast.env import ManualClock, RealDisk, SeededIds, World

PATIENCE_S = 20  # only what hangs takes so long


class StandingClock(ManualClock):
    """Whoever waits for a time really waits until a test lets it pass."""

    def wait(self, event: threading.Event, timeout_s: float | None) -> bool:
        until_ns = None if timeout_s is None else self.monotonic_ns() + round(timeout_s * 1e9)
        while not event.wait(0.002):
            if until_ns is not None and self.monotonic_ns() >= until_ns:
                return event.is_set()
        return True

    async def wait_async(self, event: asyncio.Event, timeout_s: float | None) -> bool:
        raise NotImplementedError


class Place:
    """A queue in a folder, as it is used in earnest, and workers with a clock of their own."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        usual: dict[str, Any] = {"backoff_ms": 0, "backoff_jitter_percent": 0, "durability": "os", "min_free_bytes": 0}
        self.folder = folder / "queue"
        self.q = holdfast.open(self.folder, **usual | changes)
        self.clock = StandingClock()
        self.errors: list[tuple[BaseException, Any]] = []
        self.notified = threading.Event()

    def worker(self, handler: Callable[[Any], Any], **options: Any) -> holdfast.Worker:
        usual: dict[str, Any] = {"queue": self.q, "poll": 0.02, "on_error": self.on_error, "world": self.world}
        return holdfast.Worker(handler, **usual | options)

    @property
    def world(self) -> World:
        return World(clock=self.clock, disk=RealDisk(), ids=SeededIds(1))

    def on_error(self, error: BaseException, message: Any) -> None:
        self.errors.append((error, message))
        self.notified.set()

    def attempts_of(self, phase: Any) -> list[tuple[bytes, int]]:
        return [(listed.raw, listed.attempts) for listed in self.q.messages(phase)]


def eventually(holds: Callable[[], object]) -> None:
    """Wait for what another thread brings about, and tells nobody of."""
    give_up = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < give_up, "it did not come about"
        time.sleep(0.002)


def ended(worker: holdfast.Worker) -> int | None:
    """Stop it; how it ended."""
    worker.stop()
    return worker.wait(PATIENCE_S)
