"""How many handlers may run at once, shared by the queues of a worker."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable


class Slots:
    """Each lane has one slot of its own, so that a busy queue cannot keep the others waiting; the rest is shared."""

    def __init__(self, total: int, lanes: Iterable[Hashable]) -> None:
        self.total = total
        self._used = dict.fromkeys(lanes, 0)
        self._changed = threading.Condition()
        self._closed = False

    def take(self, lane: Hashable, most: int) -> int:
        """Hold up to so many slots; waits for the first one. None where nothing is taken any more."""
        with self._changed:
            while not self._closed:
                count = min(most, self._free(lane))
                if count:
                    self._used[lane] += count
                    return count
                self._changed.wait()
            return 0

    def give(self, lane: Hashable, count: int = 1) -> None:
        """They are free again."""
        with self._changed:
            self._used[lane] -= count
            self._changed.notify_all()

    def close(self) -> None:
        """Nobody takes one from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _free(self, lane: Hashable) -> int:
        shared = self.total - sum(max(used, 1) for used in self._used.values())
        return shared if self._used[lane] else shared + 1
