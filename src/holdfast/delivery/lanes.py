"""Ready messages in lanes by priority: 9 is the most urgent, 0 the usual one.

Only what cannot be told from the cursor stands here, as roaring bitmaps of offsets: about two bytes for a
message with a priority, nothing for a message without one.
"""

from __future__ import annotations

from typing import Final

from pyroaring import BitMap64

LEVELS: Final = 10
_FAR: Final = 2**63


class Lanes:
    """`levels`: who has which priority, until it is done. The lanes: who of them is ready; lane 0: who came back."""

    def __init__(self, scanned: int) -> None:
        self.levels = [BitMap64() for _ in range(LEVELS)]
        self.ready = [BitMap64() for _ in range(LEVELS)]
        self.scanned = scanned  # priorities are known of all messages below
        self.used = False  # nothing was ever put here: there is nothing to take away
        self.filled = False  # whether any lane has a message

    def level(self, offset: int) -> int:
        """The message's priority."""
        if self.used:
            for level in range(LEVELS - 1, 0, -1):
                if offset in self.levels[level]:
                    return level
        return 0

    def know(self, offset: int, level: int) -> None:
        """The message has this priority, above 0."""
        self.used = True
        self.levels[level].add(offset)

    def add(self, offset: int) -> None:
        """The message is ready."""
        self.used = True
        level = self.level(offset)
        if level:
            self.ready[0].discard(offset)  # it came back before its priority was known, at replay
        self.ready[level].add(offset)
        self.filled = True

    def add_usual(self, offsets: BitMap64) -> None:
        """These messages, of which no priority is known, are ready."""
        self.used = True
        self.ready[0] |= offsets
        self.look()

    def remove(self, start: int, stop: int) -> None:
        """These are ready no more."""
        if self.filled:
            for lane in self.ready:
                if lane:
                    lane.remove_range(start, stop)
            self.look()

    def forget(self, start: int, stop: int) -> None:
        """These are done."""
        for bitmap in (*self.levels, *self.ready):
            if bitmap:
                bitmap.remove_range(start, stop)
        self.look()

    def forget_below(self, to: int, held: BitMap64) -> None:
        """All below `to` are done but those that somebody holds."""
        for level in self.levels:
            kept = level & held
            level.remove_range(0, to)
            level.update(kept)
        for lane in self.ready:
            lane.remove_range(0, to)
        self.look()

    def clear_from(self, to: int) -> None:
        """Nothing is known any more of the messages from `to` on."""
        for bitmap in (*self.levels, *self.ready):
            bitmap.remove_range(to, _FAR)
        self.scanned = min(self.scanned, to)
        self.look()

    def look(self) -> None:
        """Bring `used` and `filled` in step with what is there."""
        self.filled = any(self.ready)
        self.used = self.filled or any(self.levels)
