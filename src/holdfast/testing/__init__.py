"""A test kit for programs that use a queue: the real engine on a simulated disk, with a clock that you control.

```python
def test_a_payment_is_retried(holdfast_kit):
    kit = holdfast_kit(max_attempts=3)
    kit.queue.put(b"pay 7")
    assert kit.drain(failing_handler).failed == 1
    kit.clock.advance(minutes=15)
    assert kit.drain(handler).handled == 1
```

`holdfast_kit` is a pytest fixture that comes with the package. Without pytest, create a `QueueKit(...)` yourself.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final, Protocol

import msgspec

from holdfast.api import port_of
from holdfast.api.aio.group import AsyncQueue
from holdfast.api.sync.group import Queue
from holdfast.api.sync.message import Message
from holdfast.client.sync.opening import open_queue
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import Empty
from holdfast.local.aio.broker import queue_here_async
from holdfast.storage.keeper import soonest

__all__ = ["Drained", "QueueKit", "VirtualClock"]

_FOLDER: Final = "/queue"
_MAX_DELIVERIES: Final = 100_000


class Drained(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a drain: how many deliveries succeeded, how many failed, and the errors."""

    handled: int
    failed: int
    errors: list[BaseException]


class QueueKit:
    """A queue on the real engine, with a simulated disk and a virtual clock.

    `settings` are those of `holdfast.open`, such as max_attempts=3 or body_type=dict. `reopen`, `kill` and `power_cut`
    simulate restarts; `queue` is always the one that is open now.
    """

    def __init__(self, *, seed: int = 0, **settings: Any) -> None:
        self.clock = VirtualClock()
        self.disk = SimulatedDisk()
        self._ids = SeededIds(seed)
        self._random = random.Random(seed)
        self._settings = settings
        self.queue: Queue[Any] = self._open()

    def drain(self, handler: Callable[[Message[Any]], object], *, advance: bool = False) -> Drained:
        """Run the handler for every ready message: ack if it returns, nack with the error if it raises.

            kit = QueueKit(max_attempts=2)
            kit.queue.put(b"a job")
            assert kit.drain(handle, advance=True).handled == 1

        Args:
            handler: Called with each message.
            advance: Let time move on to the next delayed or retried message, until nothing is left.

        Returns:
            How many messages were handled, how many deliveries failed, and with which errors.

        Raises:
            RuntimeError: The handler keeps putting new messages, so that this would never end.
        """
        handled = 0
        errors: list[BaseException] = []
        while handled + len(errors) < _MAX_DELIVERIES:
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
        raise RuntimeError(
            f"drain gave up after {_MAX_DELIVERIES} deliveries: does the handler keep putting new messages?"
        )

    def power_cut(self) -> Queue[Any]:
        """Simulate a power failure and reopen the queue: anything that was not synced may be lost.

        Returns:
            The queue that is open now; `queue` is the same one.
        """
        self._leave()
        self.disk = self.disk.cut(self._random)
        self._ids.reboot()
        self.queue = self._open()
        return self.queue

    def kill(self) -> Queue[Any]:
        """Simulate kill -9 of the process, then reopen the queue from another one.

        Returns:
            The queue that is open now; `queue` is the same one.
        """
        self._leave()
        self.disk = self.disk.kill()
        self.queue = self._open()
        return self.queue

    def reopen(self) -> Queue[Any]:
        """Close the queue cleanly and open it again.

        Returns:
            The queue that is open now; `queue` is the same one.
        """
        self.clock.detach(port_of(self.queue).engine)
        self.queue.close()
        self.queue = self._open()
        return self.queue

    def aio(self) -> AsyncQueue[Any]:
        """Open the async API of the same queue.

        Returns:
            The queue, for tasks. It is closed together with the kit's.
        """
        port = port_of(self.queue)
        return queue_here_async(port.engine, port.queue_group, self._settings.get("body_type"), alone=True)

    def close(self) -> None:
        """Close the queue that is open now."""
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
        """Abandon the engine without closing it, as a crash does: nothing it has pending reaches the disk."""
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


# How long to wait, in real time, for another thread to put a message; if none comes by then, none will.
_REAL_WAIT_S: Final = 10.0


class Attached(Protocol):
    """The engine of a queue, as seen by the clock."""

    def tick(self) -> object:
        """Do what is due now."""

    def due_ms(self) -> int | None:
        """Milliseconds until the next change to a message, or None."""


class VirtualClock(ManualClock):
    """Moves when you advance it or when a call waits. Delays, leases and retries take effect in order on the way."""

    def __init__(self, now_ns: int = 1_700_000_000_000_000_000) -> None:
        super().__init__(now_ns)
        self._attached: list[Attached] = []
        self._moving = threading.RLock()

    def now(self) -> datetime:
        """The current time on this clock.

        Returns:
            The time, in UTC.
        """
        return datetime.fromtimestamp(self.now_ns() / 1e9, UTC)

    def attach(self, attached: Attached) -> None:
        """Run `attached.tick` from now on when it is due."""
        self._attached.append(attached)

    def detach(self, attached: Attached) -> None:
        self._attached.remove(attached)

    def advance(
        self, *, seconds: float = 0, ms: int = 0, ns: int = 0, minutes: float = 0, hours: float = 0, days: float = 0
    ) -> None:
        """Let time pass. Everything that becomes due on the way happens at its own time.

            kit.clock.advance(minutes=5)

        Args:
            seconds: Seconds.
            ms: Milliseconds, added to that, as are all others.
            ns: Nanoseconds.
            minutes: Minutes.
            hours: Hours.
            days: Days.

        Raises:
            ValueError: The time is negative: use `step_wall` to set the clock back.
        """
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
        self, *, seconds: float = 0, ms: int = 0, ns: int = 0, minutes: float = 0, hours: float = 0, days: float = 0
    ) -> None:
        """Set the wall clock forward or back, as an administrator or NTP would; no time passes.

        Args:
            seconds: Seconds; negative to set the clock back.
            ms: Milliseconds, added to that, as are all others.
            ns: Nanoseconds.
            minutes: Minutes.
            hours: Hours.
            days: Days.
        """
        super().step_wall(seconds=_in_seconds(seconds, minutes, hours, days), ms=ms, ns=ns)

    def settle(self) -> int | None:
        """Do what is due now; returns the milliseconds until more is due, or None."""
        for attached in list(self._attached):
            attached.tick()
        return soonest(*(attached.due_ms() for attached in list(self._attached)))

    def wait(self, event: threading.Event, timeout_s: float | None) -> bool:
        """Wait without waiting: time passes at once, up to the timeout or until the event is set."""
        if timeout_s is None:
            if not event.wait(_REAL_WAIT_S):
                raise RuntimeError(
                    "this would wait forever: the queue is empty and its clock does not move. "
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
        """Async version of `wait`; other tasks run first."""
        # A few turns of the loop: a task that is woken may wake another one.
        for _ in range(5):
            await asyncio.sleep(0)
        if event.is_set():
            return True
        if timeout_s is None:
            try:
                async with asyncio.timeout(_REAL_WAIT_S):
                    await event.wait()
            except TimeoutError:
                raise RuntimeError(
                    "this would wait forever: the queue is empty and its clock does not move. "
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
