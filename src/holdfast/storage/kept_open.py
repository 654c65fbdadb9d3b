"""Which sealed segments are open for reading: a bounded number for all logs of this process together.

Each costs two file descriptors, a map and its index. Beyond the bound the one that was not used for longest is let go;
whoever reads it at that moment goes on, and the next one opens it again.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from typing import Final

from holdfast.env import close_in_children
from holdfast.storage.segment import Segment

DESCRIPTORS_EACH: Final = 2
USUAL_MOST: Final = 128


class KeptOpen:
    """The segments that are open, the one that was used last at the end. Safe to use from any thread."""

    def __init__(self, most: int = USUAL_MOST) -> None:
        self.most = most
        # Weakly: a reader that nobody holds any more must not keep its files.
        self._segments: OrderedDict[int, weakref.ref[Segment]] = OrderedDict()
        self._gone: deque[int] = deque()
        self._lock = threading.Lock()
        close_in_children(self)

    def disown(self) -> None:
        """In a child after a fork: the lock may be held by a thread that this process does not have."""
        self._lock = threading.Lock()
        self._segments = OrderedDict()

    def touch(self, segment: Segment) -> Segment:
        """Remember that it is in use."""
        if segment.is_active:
            return segment
        name, left = id(segment), []
        with self._lock:
            while self._gone:
                self._forget(self._gone.popleft())
            if name not in self._segments:
                # What is called at the end of a segment may be called at any moment: it takes no lock.
                gone = self._gone
                self._segments[name] = weakref.ref(segment, lambda _: gone.append(name))
            self._segments.move_to_end(name)
            while len(self._segments) > self.most:
                left.append(self._segments.popitem(last=False)[1]())
        for each in left:
            if each is not None:
                each.let_go()
        return segment

    def _forget(self, name: int) -> None:
        known = self._segments.get(name)
        if known is not None and known() is None:  # otherwise another one has its name by now
            del self._segments[name]


KEPT_OPEN: Final = KeptOpen()
