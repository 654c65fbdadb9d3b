"""A queue whose clock, disk and chance are yours: every run of a test is the same."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final, Protocol

import msgspec

from holdfast.api.aio.queue import AsyncQueue
from holdfast.api.ports import port_of
from holdfast.api.sync.message import Message
from holdfast.api.sync.queue import Queue
from holdfast.client.sync.opening import open_queue
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import Empty
from holdfast.local.aio.opening import queue_here_async
from holdfast.storage.keeper import soonest

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


# A clock that stands still until it is told to move, and then lets everything happen that falls due on the way.


# For a message that another thread puts while we wait; afterwards nobody will.
_REALLY_S: Final = 10.0


class Attached(Protocol):
    """A queue's engine, as the clock sees it."""

    def tick(self) -> object:
        """Do what is due now."""

    def due_ms(self) -> int | None:
        """In how many ms something happens to a message."""


class VirtualClock(ManualClock):
    """Moves when told to, or when somebody waits for a time. Delays, leases and retries fire in their order."""

    def __init__(self, now_ns: int = 1_700_000_000_000_000_000) -> None:
        super().__init__(now_ns)
        self._attached: list[Attached] = []
        self._moving = threading.RLock()

    def now(self) -> datetime:
        """The time on this clock."""
        return datetime.fromtimestamp(self.now_ns() / 1e9, UTC)

    def attach(self, attached: Attached) -> None:
        """From now on let things happen there when they are due."""
        self._attached.append(attached)

    def detach(self, attached: Attached) -> None:
        self._attached.remove(attached)

    def advance(
        self,
        *,
        seconds: float = 0,
        ms: int = 0,
        ns: int = 0,
        minutes: float = 0,
        hours: float = 0,
        days: float = 0,
    ) -> None:
        """Let time pass; whatever falls due on the way happens, each at its time."""
        left_ns = round(_in_seconds(seconds, minutes, hours, days) * 1e9) + ms * 1_000_000 + ns
        if left_ns < 0:
            raise ValueError("time does not run backwards; use step_wall for a clock that is set back")
        with self._moving:
            while True:
                due_ms = self.settle()
                step_ns = left_ns if due_ms is None else min(left_ns, max(due_ms, 1) * 1_000_000)
                super().advance(ns=step_ns)
                left_ns -= step_ns
                if not left_ns:
                    self.settle()
                    return

    def step_wall(
        self,
        *,
        seconds: float = 0,
        ms: int = 0,
        ns: int = 0,
        minutes: float = 0,
        hours: float = 0,
        days: float = 0,
    ) -> None:
        """Set the wall clock forward or back, as an administrator or NTP does; no time passes by it."""
        super().step_wall(seconds=_in_seconds(seconds, minutes, hours, days), ms=ms, ns=ns)

    def settle(self) -> int | None:
        """Do what is due now; answers in how many ms more will be."""
        for attached in list(self._attached):
            attached.tick()
        return soonest(*(attached.due_ms() for attached in list(self._attached)))

    def wait(self, event: threading.Event, timeout_s: float | None) -> bool:
        """Time passes at once, up to what was waited for."""
        if timeout_s is None:
            if not event.wait(_REALLY_S):
                raise RuntimeError(
                    "this would wait for ever: the queue is empty and its clock stands still. "
                    "Put a message first, or give get() a timeout"
                )
            return True
        left_ms = max(round(timeout_s * 1000), 1)
        while not event.is_set() and left_ms > 0:
            with self._moving:
                due_ms = self.settle()
            if event.is_set():
                break
            step_ms = left_ms if due_ms is None else min(left_ms, max(due_ms, 1))
            self.advance(ms=step_ms)
            left_ms -= step_ms
        return event.is_set()

    async def wait_async(self, event: asyncio.Event, timeout_s: float | None) -> bool:
        """The same for a task; the others get their turn first."""
        for _ in range(5):
            await asyncio.sleep(0)
        if event.is_set():
            return True
        if timeout_s is None:
            try:
                async with asyncio.timeout(_REALLY_S):
                    await event.wait()
            except TimeoutError:
                raise RuntimeError(
                    "this would wait for ever: the queue is empty and its clock stands still. "
                    "Put a message first, or give get() a timeout"
                ) from None
            return True
        with self._moving:
            due_ms = self.settle()
        step_ms = max(round(timeout_s * 1000), 1)
        self.advance(ms=step_ms if due_ms is None else min(step_ms, max(due_ms, 1)))
        await asyncio.sleep(0)
        return event.is_set()


def _in_seconds(seconds: float, minutes: float, hours: float, days: float) -> float:
    return seconds + minutes * 60 + hours * 3600 + days * 86_400
