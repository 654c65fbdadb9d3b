"""Room in memory for bodies and answers: a caller who sends or asks for many large ones waits, and nobody else.

A body that is read as a whole is in memory from its first byte until its call is over, and its sender decides how
long that takes. So each caller has room for a few of the largest; further ones stand in line until there is room for
all of them, and are not listened to meanwhile. Small bodies need no room.

An answer is in memory until its client has read it, and again it is the client who decides how long that takes. Here
nobody can stand in line, for what waits is in memory already: an answer for which there is no room is taken back.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from holdfast.errors import TooManyWaiters

BODIES_EACH: Final = 4  # of the largest size, of one caller at a time
ANSWERS_EACH: Final = 8  # of the largest size, of one caller at a time
MOST_WAITING: Final = 256  # bodies of one caller for which there is no room yet


class Room:
    """How many bytes each caller has in memory, and who waits for some."""

    def __init__(self, each_bytes: int) -> None:
        self.each_bytes = each_bytes
        self._used: dict[str, int] = {}
        self._lines: dict[str, deque[tuple[asyncio.Future[None], int]]] = {}

    def used(self, caller: str) -> int:
        """How many bytes of a caller there is room for by now."""
        return self._used.get(caller, 0)

    def waiting(self, caller: str) -> int:
        """How many bodies of a caller there is no room for yet."""
        return len(self._lines.get(caller, ()))

    async def take(self, caller: str, size: int) -> int:
        """Wait for room, in line; answers with what to give back."""
        size = min(size, self.each_bytes)
        if caller not in self._lines and self.used(caller) + size <= self.each_bytes:
            self._used[caller] = self.used(caller) + size
            return size
        if self.waiting(caller) >= MOST_WAITING:
            raise TooManyWaiters(
                f"large requests of {caller} fill {self.each_bytes} bytes of memory, and {MOST_WAITING} more wait, "
                "which is the limit for one caller; nothing was done. Try again in a second, with fewer at a time"
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(caller, deque()).append((turn, size))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(caller, size)  # it was its turn at this moment
            else:
                self._leave(caller, turn)
            raise
        return size

    def try_take(self, caller: str, size: int, *, always: bool = False) -> int | None:
        """The same without a wait: None where there is no room, unless it must be there `always`."""
        size = min(size, self.each_bytes)
        if not always and self.used(caller) + size > self.each_bytes:
            return None
        self._used[caller] = self.used(caller) + size
        return size

    def give_back(self, caller: str, size: int) -> None:
        """The body is in nobody's memory any more: the next ones in line may have come to their turn."""
        self._used[caller] -= size
        self._admit(caller)
        if not self._used[caller]:
            del self._used[caller]

    def _leave(self, caller: str, turn: asyncio.Future[None]) -> None:
        """Somebody in line is gone; those behind may fit where it did not."""
        line = self._lines[caller]
        left = deque(each for each in line if each[0] is not turn)
        if left:
            self._lines[caller] = left
            self._admit(caller)
        else:
            del self._lines[caller]

    def _admit(self, caller: str) -> None:
        line = self._lines.get(caller)
        while line:
            turn, size = line[0]
            if turn.done():
                line.popleft()  # its client is gone
                continue
            if self.used(caller) + size > self.each_bytes:
                return
            line.popleft()
            self._used[caller] = self.used(caller) + size
            turn.set_result(None)
        self._lines.pop(caller, None)
