"""The floor of a group: below it the group is done with everything, so log and journal may be let go up to there."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from holdfast.broker.journal import Journal, Snapshot
from holdfast.delivery.events import Event, Skipped
from holdfast.delivery.group import Group
from holdfast.delivery.image import image_of
from holdfast.storage.checks.finding import count_of
from holdfast.storage.log import Log

logger = logging.getLogger(__name__)

# A backlog that nobody reads makes no events; without a snapshot now and then, opening would have to look for
# the priorities of all of it.
_SCAN_MOST: Final = 500_000


class Floor:
    """What a group on a partition still needs of both logs. Whoever uses it holds the lock of the delivery."""

    def __init__(self, log: Log, journal: Journal, group: Group, name: str) -> None:
        self._log = log
        self._journal = journal
        self._group = group
        self._name = name
        self._mark = (0, 0)  # an end of the journal, and the floor as it was there
        self._scanned_at = log.written_end
        self._skipped_to = 0

    def pin(self) -> None:
        """Let the log go up to the floor, as far as the events that raised it are on disk.

        Were it to go further, a power cut could take those events back, and the group miss messages it needs again.
        """
        marked_at, floor = self._mark
        if self._journal.log.synced_end >= marked_at:
            self._log.pin(self._journal.log.folder, floor)
            self._mark = (self._journal.log.written_end, self._group.floor)

    def hold(self) -> None:
        """The floor has gone down: what came back must not be trimmed away before the floor is looked at again."""
        self._mark = (self._journal.log.written_end, self._group.floor)
        self._log.pin(self._journal.log.folder, self._group.floor)

    def snapshot(self) -> Snapshot:
        """The group as it is now, and up to where in the journal that holds."""
        return Snapshot(self._journal.log.written_end, image_of(self._group))

    def snapshot_if_due(self, after_events: int) -> Snapshot | None:
        """The same, where replay would take too long without it."""
        group = self._group
        state = len(group.leases) + len(group.waiting) + len(group.histories)
        # A large state is written less often: replay must stay short, but not at any price.
        many = self._journal.events_since_snapshot >= max(after_events, state)
        written = self._log.written_end
        if not many and written - self._scanned_at < _SCAN_MOST:
            return None
        group.lanes.scanned = self._scanned_at = written  # priorities are noted as they are written
        return self.snapshot()

    def skipped(self, *, forced: bool) -> Sequence[Event]:
        """What the group has to pass over, for it was trimmed away, as the settings allow or by somebody else."""
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
