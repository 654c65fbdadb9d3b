"""The floor of a group: it is done with every message below, so the log may be trimmed up to there."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from holdfast.broker.journal import Journal, Snapshot
from holdfast.delivery.events import Event, Skipped
from holdfast.delivery.group import Group
from holdfast.delivery.image import image_of
from holdfast.model import count_of
from holdfast.storage.log import Log

logger = logging.getLogger(__name__)

# A backlog that nobody reads causes no events. Without a snapshot after this many messages, opening would have to scan
# the whole backlog for priorities.
_SCAN_MOST: Final = 500_000


class Floor:
    """What a group still needs of its partition's log and of its journal. Callers hold the delivery's lock."""

    def __init__(self, log: Log, journal: Journal, group: Group, name: str) -> None:
        self._log = log
        self._journal = journal
        self._group = group
        self._name = name
        self._mark = (0, 0)  # an end of the journal, and the floor at that point
        self._scanned_at = log.written_end
        self._skipped_to = 0
        journal.on_folded = self._pin_folded

    def pin(self) -> None:
        """Let the log be trimmed up to the floor, as far as the events that raised it are on disk.

        Beyond that point, a power cut could undo those events, and the group would need messages already removed.
        """
        marked_at, floor = self._mark
        if self._journal.log.synced_end >= marked_at:
            self._log.pin(self._journal.log.folder, floor)
            self._mark = (self._journal.log.written_end, self._group.floor)

    def _pin_folded(self) -> None:
        """Let the log be trimmed up to the current floor: all events are in a snapshot on disk."""
        for _ in range(2):  # the first call applies the previous mark, the second the current one
            self.pin()

    def hold(self) -> None:
        """Pin the log at the floor at once, after a seek has lowered it."""
        self._mark = (self._journal.log.written_end, self._group.floor)
        self._log.pin(self._journal.log.folder, self._group.floor)

    def snapshot(self) -> Snapshot:
        """A snapshot of the group as it is now."""
        return Snapshot(self._journal.log.written_end, image_of(self._group))

    def snapshot_if_due(self, after_events: int) -> Snapshot | None:
        """A snapshot if replay would take too long without one, else None."""
        group = self._group
        state = len(group.leases) + len(group.waiting) + len(group.histories)
        # A large state is written less often, or writing it would cost more than the replay it saves.
        many = self._journal.events_since_snapshot >= max(after_events, state)
        written = self._log.written_end
        if not many and written - self._scanned_at < _SCAN_MOST:
            return None
        group.lanes.scanned = self._scanned_at = written  # the group learns priorities as messages are written
        return self.snapshot()

    def skipped(self, *, forced: bool) -> Sequence[Event]:
        """The event that skips messages removed before the group was done with them; empty if there are none.

        `forced` says whether the retention settings allow that; otherwise it is logged as an error.
        """
        start, stop = self._group.floor, self._log.start
        if stop <= start or stop <= self._skipped_to:
            return ()
        self._skipped_to = stop
        count = stop - start - self._group.done.range_cardinality(start, stop)
        logger.log(
            logging.WARNING if forced else logging.ERROR,
            "%s %s that the group %s was not done with: offsets %d to %d of %s",
            "retention dropped" if forced else "somebody removed",
            count_of(count, "message"),
            self._name,
            start,
            stop - 1,
            self._log.folder,
            extra={
                "folder": self._log.folder,
                "group": self._name,
                "messages": count,
                "first_offset": start,
                "next_offset": stop,
            },
        )
        return [Skipped(stop)]
