"""Who waits and who is being sent messages: caps on the one, a window for the other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from holdfast.broker.delivery import Delivery
from holdfast.delivery.events import Receipt
from holdfast.errors import TooManyWaiters
from holdfast.server.access.principals import LOCAL, Principal
from holdfast.server.served import MOST_AT_ONCE, ServedGroup
from holdfast.server.turns import other_turns

ADMIN_RESERVE: Final = 64  # calls of admins that may wait beyond what others may


class WaitLimit:
    """So many calls may wait for something at a time, and so many of them may be one caller's.

    Where a caller's share is not set it is half of all, so that no caller can keep all others from waiting; those of
    whom nobody asked who they are have no share, for they are all one caller.
    """

    def __init__(self, most: int, most_each: int | None = None) -> None:
        self.most = most
        self.waiting = 0
        self._most_each = most_each
        self._by_caller: dict[tuple[str, bool], int] = {}

    def share(self, principal: Principal) -> int:
        """How many calls of this caller may wait."""
        if self._most_each is not None:
            return self._most_each
        return self.most if principal.name == LOCAL and principal.entry is None else max(self.most // 2, 1)

    def of(self, principal: Principal) -> int:
        """How many calls of this caller wait."""
        return self._by_caller.get(caller_of(principal), 0)

    def check(self, principal: Principal) -> None:
        """Refuse one more, where there is no room for it."""
        own = self.of(principal)
        if own >= self.share(principal):
            raise TooManyWaiters(
                f"{own} calls of {principal.name} wait already, which is the limit for one caller "
                "(max_waiters_per_principal); nothing was taken. Try again in a second, or wait with fewer calls at a "
                "time"
            )
        if self.waiting >= self.most + (ADMIN_RESERVE if principal.may("admin") else 0):
            raise TooManyWaiters(
                f"{self.waiting} calls wait already, which is the limit (max_waiters); nothing was taken. Try again "
                "in a second, or wait with fewer calls at a time"
            )

    @contextmanager
    def one_more(self, principal: Principal) -> Iterator[None]:
        """Stand in line, if there is room for one more."""
        self.check(principal)
        caller = caller_of(principal)
        self.waiting += 1
        self._by_caller[caller] = self._by_caller.get(caller, 0) + 1
        try:
            yield
        finally:
            self.waiting -= 1
            self._by_caller[caller] -= 1
            if not self._by_caller[caller]:
                del self._by_caller[caller]


def caller_of(principal: Principal) -> tuple[str, bool]:
    """A token may be called as one who needs none is."""
    return principal.name, principal.entry is None


class Window:
    """The messages that one stream has sent and that nobody has settled yet: never more than its prefetch."""

    def __init__(self, group: ServedGroup, size: int) -> None:
        self._group = group
        self._size = size
        self._out: dict[tuple[int, Receipt], Delivery] = {}
        self._changed = asyncio.Event()

    @property
    def free(self) -> int:
        return self._size - len(self._out)

    def __len__(self) -> int:
        return len(self._out)

    def add(self, delivery: Delivery, receipt: Receipt) -> None:
        self._out[delivery.number, receipt] = delivery

    def settled(self, number: int, receipt: Receipt) -> bool:
        """Whether that was one of these."""
        found = self._out.pop((number, receipt), None) is not None
        if found:
            self._changed.set()
        return found

    def look(self) -> None:
        """Forget those that ended in another way: their lease was over, or the group is gone."""
        for (number, receipt), delivery in list(self._out.items()):
            if not self._group.holds(delivery, receipt):
                del self._out[number, receipt]

    async def wait_for_room(self, timeout_s: float) -> bool:
        """Whether there is room by then."""
        self.look()
        if self.free <= 0:
            self._changed.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait()
            except TimeoutError:
                self.look()
        return self.free > 0


class Windows:
    """All windows of a server, by topic and group."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], list[Window]] = {}

    @contextmanager
    def one_more(self, group: ServedGroup, size: int) -> Iterator[Window]:
        window = Window(group, size)
        place = group.topic, group.group
        self._open.setdefault(place, []).append(window)
        try:
            yield window
        finally:
            self._open[place].remove(window)
            if not self._open[place]:
                del self._open[place]

    def __len__(self) -> int:
        return sum(map(len, self._open.values()))

    def of(self, group: ServedGroup) -> int:
        """How many there are for one group."""
        return len(self._open.get((group.topic, group.group), ()))

    async def settled(self, group: ServedGroup, receipts: Sequence[str]) -> None:
        """These messages are in nobody's hands any more. Where they are many, other tasks have their turn."""
        place = group.topic, group.group
        if place not in self._open:
            return
        claims = await group.all_claims(receipts)
        for delivery, claimed in claims.good.items():
            for i, receipt in enumerate(claimed, 1):
                any(window.settled(delivery.number, receipt) for window in self._open.get(place, ()))
                if not i % MOST_AT_ONCE:
                    await other_turns()
