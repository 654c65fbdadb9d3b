"""Time, as an argument: wall time for people and retention, monotonic time for durations."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where the time comes from."""

    def now_ns(self) -> int:
        """Wall time in nanoseconds since 1970; may step back or forward."""

    def monotonic_ns(self) -> int:
        """Nanoseconds since some fixed moment of this boot; never steps back."""


class SystemClock:
    """The machine's own clocks."""

    now_ns = staticmethod(time.time_ns)
    monotonic_ns = staticmethod(time.monotonic_ns)


class ManualClock:
    """A clock that moves only when told to: for simulations and tests."""

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

    def step_wall(self, *, ns: int) -> None:
        """Set the wall clock forward or back, as an administrator or NTP does."""
        self._now_ns += ns
