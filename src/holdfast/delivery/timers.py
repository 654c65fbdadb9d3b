"""What falls due when, for very many entries at little cost: ticks, arrays of numbers, a heap of ticks.

Entries are never searched for. Who takes one back simply forgets it, and is asked at the end whether it
still counts.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import takewhile
from typing import Final

_TICK_MS: Final = 64


class Timers:
    """Numbers by the millisecond in which they fall due."""

    def __init__(self) -> None:
        self._ticks: dict[int, array[int]] = {}  # tick -> due, number, due, number, ...
        self._heap: list[int] = []

    def add(self, due_ms: int, number: int) -> None:
        tick = due_ms // _TICK_MS
        entries = self._ticks.get(tick)
        if entries is None:
            entries = self._ticks[tick] = array("q")
            heappush(self._heap, tick)
        entries.append(due_ms)
        entries.append(number)

    def due(self, now_ms: int) -> list[tuple[int, int]]:
        """All (due, number) that are due by now, in that order."""
        return self._until(now_ms, forget=False)

    def forget(self, now_ms: int) -> None:
        """Those that are due by now have had their turn."""
        self._until(now_ms, forget=True)

    def _until(self, now_ms: int, *, forget: bool) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        emptied: list[int] = []
        while self._heap and self._heap[0] * _TICK_MS <= now_ms:
            tick = heappop(self._heap)
            emptied.append(tick)
            entries = self._ticks[tick]
            pairs = sorted(zip(entries[::2], entries[1::2], strict=True))
            later = [entry for entry in pairs if entry[0] > now_ms]
            found += pairs[: len(pairs) - len(later)]
            if forget:
                self._ticks[tick] = array("q", [part for entry in later for part in entry])
        for tick in emptied:
            if self._ticks[tick]:
                heappush(self._heap, tick)
            else:
                del self._ticks[tick]
        return found

    def next_ms(self) -> int | None:
        """When the next entry falls due, whether or not it still counts."""
        if not self._heap:
            return None
        return min(self._ticks[self._heap[0]][::2])

    def entries(self) -> Iterator[tuple[int, int]]:
        """Each (due, number), in no order."""
        for entries in self._ticks.values():
            yield from zip(entries[::2], entries[1::2], strict=True)


class Deadlines:
    """When runs of leases end. Most leases are equally long, so most deadlines come in order of time."""

    def __init__(self) -> None:
        self._in_order: deque[tuple[int, int, int]] = deque()
        self._others: list[tuple[int, int, int]] = []

    def add(self, until_ms: int, start: int, stop: int) -> None:
        in_order = self._in_order
        if not in_order or in_order[-1][0] <= until_ms:
            in_order.append((until_ms, start, stop))
        else:
            heappush(self._others, (until_ms, start, stop))

    def due(self, now_ms: int) -> list[tuple[int, int]]:
        """Each run (start, stop) whose deadline has come."""
        in_order = takewhile(lambda entry: entry[0] <= now_ms, self._in_order)
        return [entry[1:] for entry in (*in_order, *self._others_due(now_ms))]

    def _others_due(self, now_ms: int) -> Iterator[tuple[int, int, int]]:
        """Down the heap, as far as deadlines have come."""
        places = [0]
        while places:
            at = places.pop()
            if at < len(self._others) and self._others[at][0] <= now_ms:
                yield self._others[at]
                places += (2 * at + 1, 2 * at + 2)

    def forget(self, now_ms: int) -> None:
        """Those whose deadline has come have had their turn."""
        while self._in_order and self._in_order[0][0] <= now_ms:
            self._in_order.popleft()
        while self._others and self._others[0][0] <= now_ms:
            heappop(self._others)

    def next_ms(self) -> int | None:
        first = [entries[0][0] for entries in (self._in_order, self._others) if entries]
        return min(first, default=None)

    def entries(self) -> Iterator[tuple[int, int, int]]:
        """Each (until, start, stop), in no order."""
        yield from self._in_order
        yield from self._others

    def __len__(self) -> int:
        return len(self._in_order) + len(self._others)

    def renew(self, entries: list[tuple[int, int, int]]) -> None:
        """Keep only these (until, start, stop): the others have been settled long ago."""
        self._in_order = deque(sorted(entries))
        self._others = []
