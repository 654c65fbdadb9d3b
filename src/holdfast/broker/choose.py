"""What a group hands out next: chosen by priority or key, read from the log, without what is expired or lost."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.broker.folder.layout import DEFAULT_GROUP
from holdfast.broker.messages import MOVED, is_for, not_for
from holdfast.codec.columns import FLAGS, PRIORITIES
from holdfast.delivery.choose import Chosen, PriorityTurns, choose
from holdfast.delivery.decide import Moment
from holdfast.delivery.events import Event, Phase
from holdfast.delivery.group import Group
from holdfast.delivery.keys import KeyGate, KeyLimits, KeyPolicy
from holdfast.errors import DamagedRange, OffsetOutOfRange, Removed
from holdfast.model import Record, extra_bytes
from holdfast.settings import TopicSettings
from holdfast.storage.keeper import soonest
from holdfast.storage.log import Log

if TYPE_CHECKING:
    from holdfast.broker.delivery import Delivery


_STRETCH: Final = 256  # messages that are read from the log before the next choice; then twice as many, and so on


class KeyedGroup:
    """What the partitions of a group share: the limits of key groups, whose keys may lie in any of them.

    Its lock is taken after that of a partition's delivery, and held from a choice until its leases are noted, or
    two partitions could both give the last message that a limit allows.
    """

    def __init__(self, policy: KeyPolicy, *, now_mono_ms: int, new: bool) -> None:
        self.policy = policy
        self.lock = threading.RLock()
        self.limits = KeyLimits(policy, now_mono_ms=now_mono_ms, new=new)
        self.gates: list[KeyGate] = []

    @staticmethod
    def of(settings: TopicSettings, *, now_mono_ms: int, new: bool) -> KeyedGroup | None:
        """What the settings ask for; None where keys decide nothing."""
        policy = KeyPolicy.of(settings)
        return None if policy is None else KeyedGroup(policy, now_mono_ms=now_mono_ms, new=new)


class Keyed:
    """The gate of one partition. Whoever uses it holds the lock of the partition's delivery."""

    def __init__(self, shared: KeyedGroup, log: Log, group: Group) -> None:
        self.lock = shared.lock
        self._log = log
        self._group = group
        self._record = log.follower().record
        with self.lock:
            self._gate = KeyGate(shared.limits)
            # An event here can let something go elsewhere only where there are limits.
            shared.gates.append(self._gate)
            self._gates = shared.gates if shared.policy.limited else [self._gate]
            self.begin()

    def begin(self) -> None:
        """Begin anew at the group's floor."""
        with self.lock:
            self._gate.begin(self._group, self._key_of)

    def choose(self, count: int, now_mono_ms: int) -> list[int]:
        """The next messages, up to `count`, in order of delivery."""
        with self.lock:
            gate, stretch = self._gate, max(count, _STRETCH)
            if gate.policy.key_group_fair:  # whoever shares must know all of them; else the oldest on offer is next
                self._read_on(None)
            elif gate.ready < count:
                self._read_on(stretch)
            chosen = gate.choose(count, now_mono_ms)
            while len(chosen) < count and self._read_on(stretch):
                chosen = gate.choose(count, now_mono_ms)
                stretch *= 2
            return chosen

    def note(self, events: Sequence[Event]) -> None:
        """These have happened."""
        with self.lock:
            for event in events:
                self._gate.note(event)
            if self._gate.scanned < 0:
                self.begin()

    def any_next(self, now_mono_ms: int) -> bool:
        """Whether any partition has something to give, as far as that can be seen from here."""
        with self.lock:
            stretch = _STRETCH
            while not any(gate.any_next(now_mono_ms) for gate in self._gates):
                if not self._read_on(stretch):
                    return False
                stretch *= 2
            return True

    def next_ms(self, now_mono_ms: int) -> int | None:
        """In how many ms a rate lets the next message of this partition through."""
        with self.lock:
            return self._gate.next_ms(now_mono_ms)

    def next_anywhere_ms(self, now_mono_ms: int) -> int | None:
        """The same for all partitions: what is taken from one may make the others wait."""
        with self.lock:
            return soonest(*[gate.next_ms(now_mono_ms) for gate in self._gates])

    def _read_on(self, most: int | None) -> bool:
        """Whether there was anything to read."""
        return self._gate.fill(self._group, self._log.end, self._key_of, most)

    def _key_of(self, offset: int) -> bytes | None:
        try:
            return self._record(offset).key
        except (DamagedRange, OffsetOutOfRange):
            return None  # nobody is held back by what cannot be read; whoever would get it finds out


# What a group may hand out next, read from the log: chosen, loaded, and sifted from what is expired or lost.


logger = logging.getLogger(__name__)

# How many expired messages are passed over at a time: others wait for the group's lock meanwhile.
_PASS_MOST: Final = 10_000
_PASS_FRAMES: Final = 1_000  # in as many frames at most: looking at one takes as long as passing over ten messages
_AGE_EVERY_MS: Final = 100


class LoadedMessages(msgspec.Struct, frozen=True, gc=False):
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
        self._turns = PriorityTurns(settings.priority_weights) if settings.priority_choice == "fair" else None

    def choose(self, count: int, now: Moment, *, look: bool = False) -> Chosen:
        """The next messages; a mere look costs no lane its turn."""
        if self.keyed is not None:
            return Chosen(self.keyed.choose(count, now.mono_ms), self._group.cursor)
        turns = self._turns.copy() if look and self._turns is not None else self._turns
        return choose(self._group, count, self._log.end, aged_below=self._aged(now.wall_ms), turns=turns)

    def load(self, offsets: Sequence[int], now_ms: int) -> LoadedMessages:
        """The messages at these offsets."""
        if isinstance(offsets, range):
            with suppress(DamagedRange, OffsetOutOfRange):
                in_order = self._follower.records(offsets.start, offsets.stop)
                whole = len(in_order) == len(offsets)  # otherwise some were removed
                if whole and (self._follower.plain or not _any_special(in_order)):
                    return LoadedMessages(in_order)
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
        return LoadedMessages(records, expired, lost, passed)

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
            for _ in range(_PASS_FRAMES):
                if offset >= end:
                    break
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


# Messages that nobody gets any more, passed over many at a time.
#
# Where the next message is expired, lost or for another group, those behind it often are as well. One commit for each,
# and a new choice after each, would make a run of them cost its square; so the look widens as long as it finds nothing
# to hand out. It ends after about a thousand: then the caller lets go of the lock, so that others have their turn.


_STEPS: Final = (4, 16, 64, 256, 1_000)
# Long enough for a thread that waits for a lock to wake up and take it.
_PAUSE_S: Final = 0.0002


def look_ahead(delivery: Delivery, now: Moment) -> bool:
    """Pass over what comes next and cannot be handed out; whoever calls holds the lock.

    Answers whether the end of it is in sight; otherwise it is time to give others a turn.
    """
    for step in _STEPS:
        offsets = delivery.supply.coming(step, now)
        if not offsets or delivery.load(offsets, now):
            return True
    return False


def give_way() -> None:
    """Let other threads run, and take the locks that this one has let go of."""
    threading.Event().wait(_PAUSE_S)


# A look at the messages that would be handed out next, of one group in one partition.


_AT_A_TIME: Final = 64


def peek(delivery: Delivery, count: int, most_bytes: int | None) -> list[Record]:
    """Nothing changes but that expired ones are passed over. `most_bytes`: behind so many no more are loaded."""
    while True:
        with delivery.lock:
            records = _peek(delivery, count, most_bytes)
        if records is not None:
            return records
        give_way()


def _peek(delivery: Delivery, count: int, most_bytes: int | None) -> list[Record] | None:
    """The same under the lock; None where something was passed over, so that others are the next by now."""
    now = delivery.moment()
    records: list[Record] = []
    size = 0
    whole = True
    for offsets in _parts(delivery.supply.choose(count, now, look=True).offsets):
        if not whole:  # what was passed over may have taken some of these with it
            offsets = [offset for offset in offsets if delivery.group.phase(offset) is Phase.READY]
        loaded = delivery.load(offsets, now)
        if len(loaded) < len(offsets):
            whole = False
            if not loaded and not look_ahead(delivery, now):
                break
        records += loaded
        size += sum([len(record.value) + extra_bytes(record) for record in loaded])
        if most_bytes is not None and size > most_bytes:
            break
    return records if whole else None


def _parts(offsets: Sequence[int]) -> Iterator[Sequence[int]]:
    for start in range(0, len(offsets), _AT_A_TIME):
        yield offsets[start : start + _AT_A_TIME]
