"""Which ids are due when: the near ones in order, the rest in buckets that are wider the farther away they are.

An entry is 16 bytes of an array, due time and id, until its bucket comes near: then the bucket is taken apart
into narrower ones, and at last into a list that is sorted to the millisecond.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from typing import Final

_TENTH_MS: Final = 100
SECOND_MS: Final = 1000
_MINUTE_MS: Final = 60 * SECOND_MS
HOUR_MS: Final = 60 * _MINUTE_MS
DAY_MS: Final = 24 * HOUR_MS
MONTH_MS: Final = 30 * DAY_MS

# (from this distance on, the width of a bucket): the widest that fits is taken.
_WIDTHS: Final = (
    (60 * DAY_MS, MONTH_MS),
    (3 * DAY_MS, DAY_MS),
    (2 * HOUR_MS, HOUR_MS),
    (2 * _MINUTE_MS, _MINUTE_MS),
    (2 * SECOND_MS, SECOND_MS),
    (0, _TENTH_MS),  # what is sorted at once: few enough, however many come in a second
)

_SHED: Final = 1024


class _Bucket:
    """Entries of a stretch of time, unsorted, and the first of them."""

    __slots__ = ("entries", "first")

    def __init__(self) -> None:
        self.entries = array("q")  # due, id, due, id, ...
        self.first: tuple[int, int] | None = None

    def add(self, due_at_ms: int, message_id: int) -> None:
        self.entries.append(due_at_ms)
        self.entries.append(message_id)
        if self.first is None or due_at_ms < self.first[0]:
            self.first = (due_at_ms, message_id)

    def pairs(self) -> Iterator[tuple[int, int]]:
        return zip(self.entries[::2], self.entries[1::2], strict=True)


class Timers:
    """Due times and their ids. Everything due before `edge` is in the sorted front."""

    def __init__(self) -> None:
        self._edge_ms = 0
        self._front: list[tuple[int, int]] = []
        self._head = 0  # entries of the front before it are done with
        self._buckets: dict[tuple[int, int], _Bucket] = {}
        self._starts: list[tuple[int, int]] = []  # a heap of the buckets' keys: start, width

    def add(self, dues_ms: Sequence[int], first_id: int) -> None:
        """Take in messages with consecutive ids."""
        for message_id, due_at_ms in enumerate(dues_ms, first_id):
            self.add_one(due_at_ms, message_id)

    def add_one(self, due_at_ms: int, message_id: int) -> None:
        if due_at_ms < self._edge_ms:
            insort(self._front, (due_at_ms, message_id), lo=self._head)
            return
        distance_ms = due_at_ms - self._edge_ms
        width_ms = next(width for least, width in _WIDTHS if distance_ms >= least)
        # Never before the edge, or a bucket that was just taken apart would be taken apart again.
        key = (max(due_at_ms - due_at_ms % width_ms, self._edge_ms), width_ms)
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = _Bucket()
            heappush(self._starts, key)
        bucket.add(due_at_ms, message_id)

    def advance(self, now_ms: int) -> None:
        """Bring everything due by now, and soon after, into the front. A clock set back changes nothing."""
        edge_ms = now_ms - now_ms % _TENTH_MS + _TENTH_MS
        if edge_ms <= self._edge_ms:
            return
        self._edge_ms = edge_ms
        near: list[tuple[int, int]] = []
        while self._starts and self._starts[0][0] < edge_ms:
            for due_at_ms, message_id in self._buckets.pop(heappop(self._starts)).pairs():
                if due_at_ms < edge_ms:
                    near.append((due_at_ms, message_id))
                else:
                    self.add_one(due_at_ms, message_id)
        if near:
            self._front = sorted(self._front[self._head :] + near)
            self._head = 0

    def near(self, until_ms: int) -> Iterator[tuple[int, int]]:
        """What is due by then, in order; `advance` was called for that time."""
        front = self._front
        for i in range(self._head, len(front)):
            if front[i][0] > until_ms:
                return
            yield front[i]

    def shed(self, done: Callable[[int], bool]) -> None:
        """Let go of the first entries, as far as they are done with."""
        front, head = self._front, self._head
        while head < len(front) and done(front[head][1]):
            head += 1
        if head > _SHED and head * 2 > len(front):
            del front[:head]
            head = 0
        self._head = head

    def first(self, done: Callable[[int], bool]) -> tuple[int, int] | None:
        """The first entry that is not done with."""
        self.shed(done)
        best = self._front[self._head] if self._head < len(self._front) else None
        for key, bucket in self._buckets.items():
            if best is not None and key[0] > best[0]:
                continue
            if bucket.first is not None and done(bucket.first[1]):
                bucket.first = min((pair for pair in bucket.pairs() if not done(pair[1])), default=None)
            if bucket.first is not None and (best is None or bucket.first < best):
                best = bucket.first
        return best

    def ordered(self, after: tuple[int, int] | None = None) -> list[tuple[int, int]]:
        """All entries behind a place, in order: a copy."""
        entries = self._front[self._head :]
        for bucket in self._buckets.values():
            entries += bucket.pairs()
        entries.sort()
        return entries if after is None else entries[bisect_right(entries, after) :]

    def drop_below(self, message_id: int) -> None:
        """Forget all smaller ids: they wait elsewhere now."""
        self._front = [entry for entry in self._front[self._head :] if entry[1] >= message_id]
        self._head = 0
        buckets, self._buckets = self._buckets, {}
        for key, bucket in buckets.items():
            kept = [pair for pair in bucket.pairs() if pair[1] >= message_id]
            if kept:
                self._buckets[key] = left = _Bucket()
                for due_at_ms, kept_id in kept:
                    left.add(due_at_ms, kept_id)
        self._starts = sorted(self._buckets)  # which is a heap, too
