"""Which sealed segments are open for reading: so many, and so many bytes, for all logs of this process together.

Each costs two file descriptors, a map and its index. What is mapped and was read counts as memory of the process, in
`ps` and against `ulimit -v`, though the kernel may take it back at any time. Beyond a bound the one that was not used
for longest is let go; whoever reads it at that moment goes on, and the next one opens it again.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Final

from holdfast.env import close_in_children

if TYPE_CHECKING:
    from holdfast.storage.segment import Segment

DESCRIPTORS_EACH: Final = 2
USUAL_MOST: Final = 128
MOST_BYTES: Final = 256 << 20


class KeptOpen:
    """The segments that are open, the one that was used last at the end. Safe to use from any thread."""

    def __init__(self, most: int = USUAL_MOST, most_bytes: int = MOST_BYTES) -> None:
        self.most = most
        self.most_bytes = most_bytes
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
        name = id(segment)
        left: list[Segment] = []
        with self._lock:
            while self._gone:
                self._forget(self._gone.popleft())
            known = self._segments.pop(name, None)
            if known is None:
                # What is called at the end of a segment may be called at any moment: it takes no lock.
                gone = self._gone
                known = weakref.ref(segment, lambda _: gone.append(name))
            if not segment.held_bytes:
                left = self._make_room()
            self._segments[name] = known
        for each in left:
            each.let_go()
        return segment

    def let_go_but(self, segment: Segment) -> None:
        """Let go of all others: this one needs the memory."""
        with self._lock:
            known = self._segments.pop(id(segment), None)
            left, self._segments = self._segments, OrderedDict()
            if known is not None:
                self._segments[id(segment)] = known
        for other in left.values():
            if (each := other()) is not None:
                each.let_go()

    def _make_room(self) -> list[Segment]:
        """Take out those that must go before another is opened, the oldest first. The caller holds the lock.

        How much that one will take is not known before: as much as the largest of those that are open.
        """
        sizes = {key: 0 if (each := known()) is None else each.held_bytes for key, known in self._segments.items()}
        total = sum(sizes.values()) + max(sizes.values(), default=0)
        left = []
        while self._segments and (len(self._segments) >= self.most or total > self.most_bytes):
            key, known = self._segments.popitem(last=False)
            total -= sizes[key]
            each = known()
            if each is not None:
                left.append(each)
        return left

    def _forget(self, name: int) -> None:
        known = self._segments.get(name)
        if known is not None and known() is None:  # otherwise another one has its name by now
            del self._segments[name]


KEPT_OPEN: Final = KeptOpen()
