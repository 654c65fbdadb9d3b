"""Chooses the next messages: by priority, oldest first within one priority, and without starving any.

Strict choice takes the most urgent lane that has a message. Whatever was published before `aged_below` counts as most
urgent, so that a steady stream of urgent messages cannot starve the others. Fair choice shares the turns between the
lanes by weights instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import msgspec
from pyroaring import BitMap64

from holdfast.delivery.group import LEVELS, Group


class Chosen(msgspec.Struct, frozen=True, gc=False):
    """Offsets in order of delivery, and where the cursor is once they are taken."""

    offsets: Sequence[int]
    cursor: int


class PriorityTurns:
    """Weighted fair choice: a lane pays the inverse of its weight for each turn, and who paid least is next."""

    def __init__(self, weights: Sequence[int]) -> None:
        self._prices = [1.0 / weight for weight in weights]
        self._paid = [0.0] * LEVELS
        self._now = 0.0

    def copy(self) -> PriorityTurns:
        """Return a copy, for looking at what would be next without using up a turn."""
        turns = PriorityTurns(())
        turns._prices, turns._paid, turns._now = self._prices, list(self._paid), self._now
        return turns

    def next(self, levels: Sequence[int]) -> int:
        """Return whose turn it is among the lanes that have messages. An empty lane saves up no turns."""
        start, level = min((max(self._paid[level], self._now), -level) for level in levels)
        level = -level
        self._now = start
        self._paid[level] = start + self._prices[level]
        return level


def choose(group: Group, count: int, end: int, *, aged_below: int = 0, turns: PriorityTurns | None = None) -> Chosen:
    """Return the next messages below `end`, up to `count`. Changes nothing."""
    cursor = group.cursor
    if not group.lanes.filled and not group.ahead:
        stop = min(cursor + count, end)
        return Chosen(range(cursor, stop), max(stop, cursor))
    picker = _Picker(group, end, aged_below, turns)
    offsets: list[int] = []
    while len(offsets) < count:
        taken = picker.take(count - len(offsets))
        if not taken:
            break
        offsets += taken
    return Chosen(offsets, picker.cursor)


def choose_one(group: Group, end: int, aged_below: int) -> tuple[int, int]:
    """The fused form of a strict `choose` of one message: its offset, or -1 if there is none, and the cursor."""
    cursor, lanes = group.cursor, group.lanes
    if group.ahead and cursor in group.ahead and not (lanes.filled and _first_below(lanes.ready[0], end) >= 0):
        cursor = _first_absent(group.ahead, cursor, end)
    if not lanes.filled:
        return (cursor, cursor + 1) if cursor < end else (-1, cursor)
    chosen = oldest = -1
    for level in range(LEVELS - 1, -1, -1):
        lane = lanes.ready[level]
        if level and not lane:
            continue
        head = int(lane.min()) if lane else -1
        if head >= end:
            head = -1
        if head < 0 and level == 0 and cursor < end:
            if chosen < 0 or cursor < min(oldest, aged_below):
                return cursor, cursor + 1
            break
        if head >= 0:
            if chosen < 0:
                chosen = oldest = head
                if group.floor >= aged_below:
                    break  # nothing that is ready has waited so long
            elif head < oldest:
                oldest = head
    return oldest if oldest < aged_below else chosen, cursor


def _first_below(lane: BitMap64, end: int) -> int:
    """Return the first offset of a lane, or -1 if there is none below the end."""
    first = int(lane.min()) if lane else -1
    return first if first < end else -1


class _Picker:
    """Takes from the lanes without changing them, so that choosing leaves the group as it is."""

    def __init__(self, group: Group, end: int, aged_below: int, turns: PriorityTurns | None) -> None:
        self._ahead = group.ahead
        self._ready = group.lanes.ready
        self._taken = [-1] * LEVELS  # the last offset taken from each lane
        self._end = end
        self._aged_below = aged_below
        self._turns = turns
        self.cursor = group.cursor

    def take(self, count: int) -> list[int]:
        heads = {level: head for level in range(LEVELS) if (head := self._head(level)) is not None}
        if not heads:
            return []
        if self._turns is not None:
            return self._take_from(self._turns.next(list(heads)), 1, self._end)
        oldest = min(heads, key=heads.__getitem__)
        if heads[oldest] < self._aged_below:
            others = [head for level, head in heads.items() if level != oldest]
            return self._take_from(oldest, count, min([self._aged_below, self._end, *others]))
        return self._take_from(max(heads), count, self._end)

    def _head(self, level: int) -> int | None:
        """Return the first message left in a lane; lane 0 continues at the cursor."""
        offset = _first_from(self._ready[level], self._taken[level] + 1)
        if offset is not None and offset < self._end:
            return offset
        if level == 0:
            self._pass_ahead()
            return self.cursor if self.cursor < self._end else None
        return None

    def _take_from(self, level: int, count: int, stop: int) -> list[int]:
        lane = self._ready[level]
        start = self._taken[level] + 1
        if _first_from(lane, start) is not None:
            rest = lane.iter_equal_or_larger(start)
            offsets = [offset for offset in islice(rest, count) if offset < stop]
            if offsets:
                self._taken[level] = offsets[-1]
                return offsets
        return self._take_at_cursor(count, stop)

    def _take_at_cursor(self, count: int, stop: int) -> list[int]:
        self._pass_ahead()
        blocked = _first_from(self._ahead, self.cursor)
        stop = min(self.cursor + count, stop, self._end if blocked is None else blocked)
        offsets = list(range(self.cursor, stop))
        self.cursor = stop
        return offsets

    def _pass_ahead(self) -> None:
        if self.cursor in self._ahead:
            self.cursor = _first_absent(self._ahead, self.cursor, self._end)


def _first_absent(bitmap: BitMap64, start: int, end: int) -> int:
    """Return the first offset from `start` on that is not in the bitmap, or `end`. Steps double and then halve."""
    step = 1
    while start < end and bitmap.range_cardinality(start, start + step) == step:
        start += step
        step *= 2
    while step > 1 and start < end:
        step //= 2
        if bitmap.range_cardinality(start, start + step) == step:
            start += step
    return min(start, end)


def _first_from(bitmap: BitMap64, start: int) -> int | None:
    if not bitmap:
        return None
    if start == 0:
        return int(bitmap.min())
    try:
        return int(bitmap.next_set_bit(start))
    except ValueError:  # there is none
        return None
