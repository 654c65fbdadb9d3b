"""How tasks wait for a producer: for answers, and for space in its buffer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from holdfast.broker.waiters import TaskWaiter
from holdfast.producing.core import ProducerCore
from holdfast.producing.parcels import Callback, Parcel


class Helping(Protocol):
    """The part of the rounds that waiting callers use."""

    def check_outside(self) -> None:
        """Refuse to wait inside a callback."""

    def help(self, left_s: float | None) -> float | None:
        """Run a round if nobody else does; returns how long to wait."""


class AsyncWaits:
    """The waits of one producer."""

    def __init__(self, core: ProducerCore[Any], rounds: Helping) -> None:
        self._core = core
        self._accumulator = core.accumulator
        self._clock = core.clock
        self._rounds = rounds

    def deadline_ns(self, timeout_s: float | None) -> int | None:
        """Return the deadline that many seconds from now."""
        return None if timeout_s is None else self._clock.monotonic_ns() + round(timeout_s * 1e9)

    async def answered(self, parcel: Parcel, deadline_ns: int | None = None) -> bool:
        """Wait until the parcel is answered or the timeout passes; returns whether it is answered."""
        self._rounds.check_outside()
        waiter = TaskWaiter(self._clock)
        if not self._accumulator.await_answer(parcel, waiter):
            return True
        try:
            while not parcel.done:
                left_s = self._left_s(deadline_ns)
                if left_s is not None and left_s <= 0:
                    return False
                await waiter.wait(self._rounds.help(left_s))
        finally:
            if not parcel.done:
                self._accumulator.forget_answer(parcel, waiter)
        return True

    async def answered_all(self, parcels: Iterable[Parcel], timeout_s: float | None) -> Parcel | None:
        """Wait until all are answered or the timeout passes; returns the first that is not answered."""
        deadline_ns = self.deadline_ns(timeout_s)
        for parcel in parcels:
            if not parcel.done and not await self.answered(parcel, deadline_ns):
                return parcel
        return None

    async def room(self, deadline_ns: int | None) -> None:
        """Return when something was stored, or now and then; QueueFull when the time is over."""
        self._rounds.check_outside()
        waiter = TaskWaiter(self._clock)
        try:
            if not self._accumulator.await_room(waiter):
                return  # all was stored just now
            left_s = self._left_s(deadline_ns)
            if left_s is not None and left_s <= 0:
                raise self._core.full()
            await waiter.wait(self._rounds.help(left_s))
        finally:
            self._accumulator.forget_room(waiter)

    def call_when_done(self, parcel: Parcel, callback: Callback) -> None:
        """Call once the parcel is answered; at once where it is."""
        self._accumulator.call_when_done(parcel, callback)

    def _left_s(self, deadline_ns: int | None) -> float | None:
        return None if deadline_ns is None else (deadline_ns - self._clock.monotonic_ns()) / 1e9
