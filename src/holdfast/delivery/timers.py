"""What is due when, for very many entries at little cost: a heap of ticks, and an array of numbers for each tick.

Entries are never searched for. To cancel one, its owner simply forgets it; when it comes due, the owner is asked
whether it still counts.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator
from heapq import heappop, heappush, heapreplace
from itertools import takewhile
from typing import Final, TypeVar

_TICK_MS: Final = 64

_Entry = TypeVar("_Entry")


class Timers:
    """Numbers by the millisecond in which they are due."""

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

    def due(self, now_ms: int) -> Iterator[tuple[int, int]]:
        """Yield each (due, number) that is due, tick by tick; a caller that needs only a few looks at no more."""
        for tick in sorted(_down(self._heap, lambda tick: tick * _TICK_MS <= now_ms)):
            for due_ms, number in _pairs(self._ticks[tick]):
                if due_ms <= now_ms:
                    yield due_ms, number

    def forget(self, now_ms: int, counts: Callable[[int, int], bool] | None = None) -> None:
        """Drop the entries that are due. If some still count, drop only those before the first of them.

        So due entries can be handled in portions, and no portion looks at those of the others again.
        """
        while self._heap and self._heap[0] * _TICK_MS <= now_ms:
            entries, later, seen = self._ticks[self._heap[0]], array("q"), 0
            for due_ms, number in _pairs(entries):
                if due_ms > now_ms:
                    later.extend((due_ms, number))
                elif counts is not None and counts(due_ms, number):
                    break
                seen += 2
            left = later + entries[seen:]
            if left:
                self._ticks[self._heap[0]] = left
                return  # what is left still counts, or belongs to the current tick
            del self._ticks[heappop(self._heap)]

    def next_ms(self) -> int | None:
        """Return when the next entry is due, whether or not it still counts."""
        if not self._heap:
            return None
        return min(self._ticks[self._heap[0]][::2])

    def entries(self) -> Iterator[tuple[int, int]]:
        """Yield each (due, number), in no order."""
        for entries in self._ticks.values():
            yield from zip(entries[::2], entries[1::2], strict=True)


class Deadlines:
    """When runs of leases end. Most leases have the same length, so most deadlines are added in order of time."""

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
        """Return each run (start, stop) whose deadline has passed."""
        in_order = takewhile(lambda entry: entry[0] <= now_ms, self._in_order)
        return [entry[1:] for entry in (*in_order, *_down(self._others, lambda entry: entry[0] <= now_ms))]

    def forget(self, now_ms: int, counts: Callable[[int], bool] | None = None) -> None:
        """Drop the runs whose deadline has passed. If some still count, drop only those before the first of them."""
        while self._in_order and self._in_order[0][0] <= now_ms:
            entry = self._in_order.popleft()
            left = _from_first(entry, counts)
            if left is not None:
                self._in_order.appendleft(left)
                break
        while self._others and self._others[0][0] <= now_ms:
            left = _from_first(self._others[0], counts)
            if left is not None:
                heapreplace(self._others, left)
                break
            heappop(self._others)

    def next_ms(self) -> int | None:
        first = [entries[0][0] for entries in (self._in_order, self._others) if entries]
        return min(first, default=None)

    def entries(self) -> Iterator[tuple[int, int, int]]:
        """Yield each (until, start, stop), in no order."""
        yield from self._in_order
        yield from self._others

    def __len__(self) -> int:
        return len(self._in_order) + len(self._others)

    def renew(self, entries: list[tuple[int, int, int]]) -> None:
        """Keep only these (until, start, stop): the leases of the others were settled long ago."""
        self._in_order = deque(sorted(entries))
        self._others = []


def _from_first(entry: tuple[int, int, int], counts: Callable[[int], bool] | None) -> tuple[int, int, int] | None:
    """Return the run from its first member that counts; None if none does."""
    until_ms, start, stop = entry
    first = None if counts is None else next(filter(counts, range(start, stop)), None)
    return None if first is None else (until_ms, first, stop)


def _down(heap: list[_Entry], is_due: Callable[[_Entry], bool]) -> Iterator[_Entry]:
    """Yield the entries of the heap that are due, in no order, without looking at the rest."""
    places = [0]
    while places:
        at = places.pop()
        if at < len(heap) and is_due(heap[at]):
            yield heap[at]
            places += (2 * at + 1, 2 * at + 2)


def _pairs(entries: array[int]) -> Iterator[tuple[int, int]]:
    numbers = iter(entries)
    return zip(numbers, numbers, strict=True)
