"""Time, as an argument: wall time for people and retention, monotonic time for durations."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Final, Protocol

# However sure we are that everybody is woken: nobody sleeps longer than this without a look.
_SAFETY_S: Final = 5.0


class Clock(Protocol):
    """Where the time comes from."""

    def now_ns(self) -> int:
        """Wall time in nanoseconds since 1970; may step back or forward."""

    def monotonic_ns(self) -> int:
        """Nanoseconds since some fixed moment of this boot; never steps back."""

    def wait(self, event: threading.Event, timeout_s: float | None) -> bool:
        """Block the thread until the event is set or the time is over, or return early; answers whether it is set."""

    async def wait_async(self, event: asyncio.Event, timeout_s: float | None) -> bool:
        """The same for a task."""


class SystemClock:
    """The machine's own clocks."""

    now_ns = staticmethod(time.time_ns)
    monotonic_ns = staticmethod(time.monotonic_ns)

    def wait(self, event: threading.Event, timeout_s: float | None) -> bool:
        return event.wait(_short(timeout_s))

    async def wait_async(self, event: asyncio.Event, timeout_s: float | None) -> bool:
        try:
            # Not `wait_for`, which may lose a cancel that comes as the event is set.
            async with asyncio.timeout(_short(timeout_s)):
                await event.wait()
        except TimeoutError:
            return False
        return True


class ManualClock:
    """A clock that moves only when told to: for simulations and tests. Whoever waits for a time makes it move."""

    def __init__(self, now_ns: int = 1_700_000_000_000_000_000) -> None:
        self._now_ns = now_ns
        self._monotonic_ns = 0

    def now_ns(self) -> int:
        return self._now_ns

    def monotonic_ns(self) -> int:
        return self._monotonic_ns

    def advance(self, *, seconds: float = 0, ms: int = 0, ns: int = 0) -> None:
        """Let both clocks run on."""
        step_ns = round(seconds * 1_000_000_000) + ms * 1_000_000 + ns
        if step_ns < 0:
            raise ValueError("time does not run backwards; use step_wall for a clock that is set back")
        self._now_ns += step_ns
        self._monotonic_ns += step_ns

    def wait(self, event: threading.Event, timeout_s: float | None) -> bool:
        """Nothing happens by itself here: what is not there now comes with time, or from another thread."""
        if timeout_s is None:
            return event.wait(0.05)
        if not event.is_set():
            self.advance(seconds=timeout_s)
        return event.is_set()

    async def wait_async(self, event: asyncio.Event, timeout_s: float | None) -> bool:
        await asyncio.sleep(0 if timeout_s is not None else 0.001)
        if timeout_s is not None and not event.is_set():
            self.advance(seconds=timeout_s)
        return event.is_set()

    def step_wall(self, *, seconds: float = 0, ms: int = 0, ns: int = 0) -> None:
        """Set the wall clock forward or back, as an administrator or NTP does."""
        self._now_ns += round(seconds * 1_000_000_000) + ms * 1_000_000 + ns


def _short(timeout_s: float | None) -> float:
    return _SAFETY_S if timeout_s is None else min(timeout_s, _SAFETY_S)
