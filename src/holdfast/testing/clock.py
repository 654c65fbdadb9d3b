"""A clock that stands still until it is told to move, and then lets everything happen that falls due on the way."""

from __future__ import annotations

import asyncio
import threading
from datetime import UTC, datetime
from typing import Final, Protocol

from holdfast.env import ManualClock
from holdfast.storage.keeper import soonest

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
