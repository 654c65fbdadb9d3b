"""A queue whose clock, disk and chance are yours: every run of a test is the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

import msgspec

from holdfast.api.aio.queue import AsyncQueue
from holdfast.api.ports import port_of
from holdfast.api.sync.message import Message
from holdfast.api.sync.queue import Queue
from holdfast.client.sync.opening import open_queue
from holdfast.env import SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import Empty
from holdfast.local.aio.opening import queue_here_async
from holdfast.testing.clock import VirtualClock

_FOLDER: Final = "/queue"
_MOST: Final = 100_000


class Drained(msgspec.Struct, frozen=True, kw_only=True):
    """What a drain came to: how many deliveries went well, how many failed, and the errors."""

    handled: int
    failed: int
    errors: list[BaseException]


class QueueKit:
    """The real engine on a simulated disk, under a virtual clock.

    `settings` are those of `holdfast.open`, such as max_attempts=3 or body_type=dict. Other openings of the same
    folder are simulated by `reopen`, `kill` and `power_cut`; `queue` is always the one that is open now.
    """

    def __init__(self, *, seed: int = 0, **settings: Any) -> None:
        self.clock = VirtualClock()
        self.disk = SimulatedDisk()
        self._ids = SeededIds(seed)
        self._random = random.Random(seed)
        self._settings = settings
        self.queue: Queue[Any] = self._open()

    def drain(self, handler: Callable[[Message[Any]], object], *, advance: bool = False) -> Drained:
        """Give every message that is ready to the handler: ack when it returns, nack with the error when it raises.

        With `advance` time moves on to whatever is delayed or to be retried, until nothing is left.
        """
        handled = 0
        errors: list[BaseException] = []
        while handled + len(errors) < _MOST:
            try:
                message = self.queue.get(timeout=0)
            except Empty:
                if not (advance and self._advance_to_next()):
                    return Drained(handled=handled, failed=len(errors), errors=errors)
                continue
            try:
                with message:
                    handler(message)
                handled += 1
            except Exception as error:
                errors.append(error)
        raise RuntimeError(f"drain gave up after {_MOST} deliveries: does the handler put messages for ever?")

    def power_cut(self) -> Queue[Any]:
        """The machine loses power and starts anew: all that was not synced may be gone. The queue is open again."""
        self._leave()
        self.disk = self.disk.cut(self._random)
        self._ids.reboot()
        self.queue = self._open()
        return self.queue

    def kill(self) -> Queue[Any]:
        """The process dies as by kill -9 and another one opens the queue."""
        self._leave()
        self.disk = self.disk.kill()
        self.queue = self._open()
        return self.queue

    def reopen(self) -> Queue[Any]:
        """Close in order and open again."""
        self.clock.detach(port_of(self.queue).engine)
        self.queue.close()
        self.queue = self._open()
        return self.queue

    def aio(self) -> AsyncQueue[Any]:
        """The same queue as tasks see it."""
        port = port_of(self.queue)
        return queue_here_async(port.engine, port.queue_group, self._settings.get("body_type"), alone=True)

    def close(self) -> None:
        if not self.queue.closed:
            self.clock.detach(port_of(self.queue).engine)
            self.queue.close()

    def __enter__(self) -> QueueKit:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _open(self) -> Queue[Any]:
        world = World(clock=self.clock, disk=self.disk, ids=self._ids)
        queue = open_queue(_FOLDER, world=world, **self._settings)
        self.clock.attach(port_of(queue).engine)
        return queue

    def _leave(self) -> None:
        """The owner is gone; whatever it still has in hand reaches nobody."""
        self.clock.detach(port_of(self.queue).engine)
        port_of(self.queue).engine.closed = True

    def _advance_to_next(self) -> bool:
        stats = self.queue.stats()
        if not stats.delayed and not stats.leased and not stats.ready:
            return False
        due_ms = self.clock.settle()
        if self.queue.peek():
            return True
        if due_ms is None:
            return False
        self.clock.advance(ms=max(due_ms, 1))
        return True
