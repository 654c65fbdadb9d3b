"""What a group may hand out next, read from the log: chosen, loaded, and sifted from what is expired or lost."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import msgspec

from holdfast.broker.keyed import Keyed
from holdfast.broker.layout import DEFAULT_GROUP
from holdfast.broker.marks import MOVED, is_for, not_for
from holdfast.codec.columns import FLAGS, PRIORITIES
from holdfast.delivery.choose import Chosen, Turns, choose
from holdfast.delivery.decide import Moment
from holdfast.delivery.events import Phase
from holdfast.delivery.group import Group
from holdfast.errors import DamagedRange, OffsetOutOfRange, Removed
from holdfast.model import Record
from holdfast.settings import TopicSettings
from holdfast.storage.log import Log

logger = logging.getLogger(__name__)

# How many expired messages are passed over at a time: others wait for the group's lock meanwhile.
_PASS_MOST: Final = 1_000
_AGE_EVERY_MS: Final = 100


class Loaded(msgspec.Struct, frozen=True, gc=False):
    """Messages that can be handed out, and the offsets of those that cannot any more."""

    records: list[Record]
    expired: Sequence[int] = ()
    lost: Sequence[int] = ()
    passed: Sequence[int] = ()  # for another group only, or removed since


class Supply:
    """Reads for one group. It changes nothing; whoever uses it holds the group's lock."""

    def __init__(self, log: Log, group: Group, settings: TopicSettings, name: str = DEFAULT_GROUP) -> None:
        self._log = log
        self._group = group
        self._name = name.encode()
        self._follower = log.follower()
        self.record = self._follower.record
        self._aged_at_ms = 0
        self._aged_below = 0
        self.keyed: Keyed | None = None  # where keys decide who is next
        self.change(settings)

    def change(self, settings: TopicSettings) -> None:
        """Choose by other settings from now on."""
        self._promote_after_ms = settings.promote_after_ms
        self._turns = Turns(settings.priority_weights) if settings.priority_choice == "fair" else None

    def choose(self, count: int, now: Moment, *, look: bool = False) -> Chosen:
        """The next messages; a mere look costs no lane its turn."""
        if self.keyed is not None:
            return Chosen(self.keyed.choose(count, now.mono_ms), self._group.cursor)
        turns = self._turns.copy() if look and self._turns is not None else self._turns
        return choose(self._group, count, self._log.end, aged_below=self._aged(now.wall_ms), turns=turns)

    def load(self, offsets: Sequence[int], now_ms: int) -> Loaded:
        """The messages at these offsets."""
        if isinstance(offsets, range):
            with suppress(DamagedRange, OffsetOutOfRange):
                in_order = self._follower.records(offsets.start, offsets.stop)
                whole = len(in_order) == len(offsets)  # otherwise some were removed
                if whole and (self._follower.plain or not _any_special(in_order)):
                    return Loaded(in_order)
        records: list[Record] = []
        expired: list[int] = []
        lost: list[int] = []
        passed: list[int] = []
        for offset in offsets:
            try:
                record = self._follower.record(offset)
            except Removed:
                passed.append(offset)
                continue
            except (DamagedRange, OffsetOutOfRange) as error:
                logger.error("message %d of %s cannot be read: %s", offset, self._log.folder, error)
                lost.append(offset)
                continue
            if 0 < record.expires_at_ms <= now_ms:
                expired.append(offset)
            elif is_for(record, self._name):
                records.append(record)
            else:
                passed.append(offset)
        return Loaded(records, expired, lost, passed)

    def coming(self, count: int, now: Moment) -> Sequence[int]:
        """Up to `count` ready messages that come next, or, where keys decide, stand behind the next one in the log."""
        if self.keyed is None:
            return self.choose(count, now, look=True).offsets
        # A key keeps back all but its first message, so a choice would show one of a long run at a time.
        phase, first = self._group.phase, self.keyed.choose(1, now.mono_ms)
        return [
            offset
            for start in first
            for offset in range(start, min(start + count, self._log.end))
            if phase(offset) is Phase.READY
        ]

    def removed_from(self, offset: int) -> range:
        """How far everything was removed from there on."""
        if not self._is_untouched(offset):
            return range(0)
        try:
            self._follower.record(offset)
        except Removed as gone:
            return range(offset, min(gone.next_offset, self._log.end))
        except (DamagedRange, OffsetOutOfRange):
            pass
        return range(0)

    def expired_from(self, offset: int, now_ms: int) -> range:
        """How far everything is expired from there on: whole frames at a time."""
        start, end = offset, min(self._log.end, offset + _PASS_MOST)
        if not self._is_untouched(offset):
            return range(0)
        with suppress(DamagedRange, OffsetOutOfRange):
            while offset < end:
                frame = self._follower.frame(offset)
                times = frame.columns().expires_at_ms()
                if times is None or not (min(times) > 0 and max(times) <= now_ms):
                    break
                offset = frame.next_offset
        return range(start, min(offset, self._log.end))

    def _is_untouched(self, offset: int) -> bool:
        """Whether nothing has happened yet to any message from there on."""
        ahead = self._group.ahead
        return self._group.cursor <= offset < self._log.end and not (ahead and ahead.max() >= offset)

    def unread_priorities(self) -> list[tuple[int, int]]:
        """(offset, priority) of messages that are written, but cannot be read yet: a scan would not find them."""
        end, levels = self._log.end, self._group.lanes.levels
        return [(offset, level) for level, known in enumerate(levels) for offset in known if offset >= end]

    def scan(self, unread: Sequence[tuple[int, int]] = ()) -> list[int]:
        """Look through the log for priorities that the group does not know yet; answers what is for others only."""
        for_others: list[int] = []
        lanes, end = self._group.lanes, self._log.end
        start = max(lanes.scanned, self._group.floor, self._log.start)
        for frame in self._log.frames_with(PRIORITIES | FLAGS, min(start, self._log.end)):
            levels = frame.columns().priorities() if frame.header.columns & PRIORITIES else None
            if levels is not None:
                self._group.arrive(frame.base_offset, bytes(levels))
            for_others += not_for(frame, self._name)
        for offset, level in unread:
            self._group.arrive(offset, [level])
        lanes.scanned = max(lanes.scanned, end)  # no further: what is written and held back was not seen
        return for_others

    def _aged(self, now_ms: int) -> int:
        """Below this offset everything has waited long enough to be promoted."""
        after_ms = self._promote_after_ms
        if after_ms is None or not self._group.lanes.used:
            return 0
        if not 0 <= now_ms - self._aged_at_ms < min(_AGE_EVERY_MS, after_ms):
            self._aged_at_ms = now_ms
            self._aged_below = self._log.find_time((now_ms - after_ms) * 1_000_000)
        return self._aged_below


def _any_special(records: Sequence[Record]) -> bool:
    """Whether one of them may be expired, or for another group only."""
    return bool([record.offset for record in records if record.flags & MOVED or record.expires_at_ms])
