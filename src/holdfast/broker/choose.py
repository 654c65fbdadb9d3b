"""The next messages of a group: chosen by priority or key and read from the log, skipping expired and lost ones."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.broker.folder.layout import DEFAULT_GROUP
from holdfast.broker.leases import Delivered
from holdfast.broker.messages import MOVED, is_for, not_for
from holdfast.codec.columns import FLAGS, PRIORITIES
from holdfast.delivery.choose import Chosen, PriorityTurns, choose, choose_one
from holdfast.delivery.decide import EXPIRED, Moment
from holdfast.delivery.events import Bury, Cancelled, Event, Expired, Lost, Phase, Receive, runs_of, size
from holdfast.delivery.group import Group
from holdfast.delivery.key_policy import KeyPolicy
from holdfast.delivery.keys import KeyGate, KeyLimits
from holdfast.env.process import get_logger
from holdfast.errors import DamagedRange, OffsetOutOfRange, Removed
from holdfast.model import Record, extra_bytes
from holdfast.settings import TopicSettings
from holdfast.storage.keeper import soonest
from holdfast.storage.log import Log

if TYPE_CHECKING:
    from holdfast.broker.delivery import Delivery


# Messages read from the log before choosing again; doubled each time. Those of one stretch can be kept until they are
# handed out, which mostly is at once.
_STRETCH: Final = 64


class KeyedGroup:
    """The limits of key groups, shared by all partitions of a group.

    Its lock is taken after that of a partition's delivery, and held from the choice until the leases are noted.
    Otherwise two partitions could both hand out the last message that a limit allows.
    """

    def __init__(self, policy: KeyPolicy, *, now_mono_ms: int, new: bool) -> None:
        self.policy = policy
        self.lock = threading.RLock()
        self.limits = KeyLimits(policy, now_mono_ms=now_mono_ms, new=new)
        self.gates: list[KeyGate] = []

    @staticmethod
    def of(settings: TopicSettings, *, now_mono_ms: int, new: bool) -> KeyedGroup | None:
        """The limits for these settings; None if they do not use keys."""
        policy = KeyPolicy.of(settings)
        return None if policy is None else KeyedGroup(policy, now_mono_ms=now_mono_ms, new=new)


class Keyed:
    """Choice by key in one partition. Callers hold the lock of the partition's delivery."""

    def __init__(self, shared: KeyedGroup, log: Log, group: Group) -> None:
        self.lock = shared.lock
        self.limited = shared.policy.limited
        self._log = log
        self._group = group
        self.follower = log.follower()
        with self.lock:
            self._gate = KeyGate(shared.limits)
            self.choose_next, self.lease_one = self._gate.choose_one, self._gate.lease_one
            # Only with limits can an event here unblock a message in another partition.
            shared.gates.append(self._gate)
            self._gates = shared.gates if shared.policy.limited else [self._gate]
            self.begin()

    def begin(self) -> None:
        """Start again at the group's floor."""
        with self.lock:
            self._gate.begin(self._group, self._key_of)

    def choose(self, count: int, now_mono_ms: int) -> list[int]:
        """Up to `count` next messages, in order of delivery."""
        with self.lock:
            gate, stretch = self._gate, max(count, _STRETCH)
            if gate.policy.key_group_fair:  # a fair choice must know all messages; otherwise the oldest is next
                self._read_on(None)
            elif gate.ready < count:
                self._read_on(stretch)
            chosen = gate.choose(count, now_mono_ms)
            while len(chosen) < count and self._read_on(stretch):
                chosen = gate.choose(count, now_mono_ms)
                stretch *= 2
            return chosen

    def choose_one(self, now_mono_ms: int) -> int:
        """The fused form of `choose` for one message; -1 if there is none. The caller holds the lock."""
        if not self._gate.policy.key_group_fair:
            offset = self.choose_next(now_mono_ms)
            if offset >= 0:
                return offset
        (offset,) = self.choose(1, now_mono_ms) or (-1,)
        return offset

    def ack_one(self, offset: int) -> None:
        """The fused form of `note(Acked)` for one message."""
        with self.lock:
            self._gate.ack_one(offset)

    def note(self, events: Sequence[Event]) -> None:
        """Update the gate after these events."""
        with self.lock:
            for event in events:
                self._gate.note(event)
            if self._gate.scanned < 0:
                self.begin()

    def any_next(self, now_mono_ms: int) -> bool:
        """Whether any partition has a message to hand out; reads on only in this one."""
        with self.lock:
            stretch = _STRETCH
            while not any(gate.any_next(now_mono_ms) for gate in self._gates):
                if not self._read_on(stretch):
                    return False
                stretch *= 2
            return True

    def next_ms(self, now_mono_ms: int) -> int | None:
        """Ms until a rate limit lets the next message of this partition through; None if no limit holds one."""
        with self.lock:
            return self._gate.next_ms(now_mono_ms)

    def next_anywhere_ms(self, now_mono_ms: int) -> int | None:
        """Like `next_ms`, for all partitions: a message taken from one may make the others wait."""
        with self.lock:
            return soonest(*[gate.next_ms(now_mono_ms) for gate in self._gates])

    def _read_on(self, most: int | None) -> bool:
        """Read up to `most` more messages into the gate; returns whether there were any."""
        self.follower.kept.clear()
        return self._gate.fill(self._group, self._log.end, self._key_of, most)

    def _key_of(self, offset: int) -> bytes | None:
        try:
            return self.follower.kept_record(offset).key
        except (DamagedRange, OffsetOutOfRange):
            return None  # must not block a key; it is skipped as lost when its turn comes


def follow_keys(delivery: Delivery, keyed: Keyed, events: Sequence[Event] = ()) -> None:
    """Note the events; wake a consumer if they or the time passed have unblocked a key, and schedule the next look."""
    if events:
        keyed.note(events)
    if delivery.waiters and not delivery.paused and keyed.any_next(delivery.mono_ms()):
        delivery.waiters.wake()  # one is enough: its receive comes back here
    if keyed.limited:
        mono_ms = delivery.mono_ms()
        delivery.expect_within(keyed.next_anywhere_ms(mono_ms), mono_ms)


def next_due_ms(delivery: Delivery, now: Moment) -> int | None:
    """Return in how many milliseconds something is due; None if nothing is."""
    deadline, timer = delivery.group.deadlines.next_ms(), delivery.group.timers.next_ms()
    keyed = delivery.supply.keyed
    return soonest(
        delivery.renewals.next_ms(),
        None if deadline is None else max(deadline - now.mono_ms, 0),
        None if timer is None else max(timer - now.wall_ms, 0),
        None if keyed is None else keyed.next_ms(now.mono_ms),
    )


# Reading the log for one group.


logger = get_logger(__name__)

# Expired messages skipped at a time, while other threads wait for the group's lock.
_PASS_MOST: Final = 10_000
_PASS_FRAMES: Final = 1_000  # frames looked at for that: one takes as long as skipping ten messages
_AGE_EVERY_MS: Final = 100


class LoadedMessages(msgspec.Struct, frozen=True, gc=False):
    """Messages that can be handed out, and the offsets of those that cannot."""

    records: list[Record]
    expired: Sequence[int] = ()
    lost: Sequence[int] = ()
    passed: Sequence[int] = ()  # for another group only, or removed by compaction


class Supply:
    """Chooses and reads messages for one group, without leasing them. Callers hold the group's lock."""

    def __init__(self, log: Log, group: Group, settings: TopicSettings, name: str = DEFAULT_GROUP) -> None:
        self._log, self._writer = log, log.writer
        self._group = group
        self._name = name.encode()
        self.keyed: Keyed | None = None  # set if messages are chosen by key
        self.follower = log.follower()
        self._aged_at_ms = 0
        self._aged_below = 0
        self.change(settings)

    def change(self, settings: TopicSettings) -> None:
        """Apply new settings."""
        self._promote_after_ms = settings.promote_after_ms
        self._turns = PriorityTurns(settings.priority_weights) if settings.priority_choice == "fair" else None

    def choose(self, count: int, now: Moment, *, look: bool = False) -> Chosen:
        """The next messages; with `look`, fair turns of the priorities are not used up."""
        if self.keyed is not None:
            return Chosen(self.keyed.choose(count, now.mono_ms), self._group.cursor)
        turns = self._turns.copy() if look and self._turns is not None else self._turns
        return choose(self._group, count, self._log.end, aged_below=self._aged(now.wall_ms), turns=turns)

    def choose_one(self, now_ms: int) -> tuple[int, int]:
        """The fused form of `choose` for one message: (offset, cursor), or (-1, 0) if only `choose` can tell."""
        if self.keyed is not None or self._turns is not None:
            return -1, 0
        return choose_one(self._group, self._writer.readable_end, self._aged(now_ms))

    def record_or_none(self, offset: int) -> Record | None:
        """Read one message; None if there is none, or it cannot be read."""
        end = self._writer.readable_end
        if not 0 <= offset < end:
            return None
        try:
            return self.follower.record(offset, end - offset)
        except (DamagedRange, OffsetOutOfRange):
            return None

    def is_for(self, record: Record, now_ms: int) -> bool:
        """Whether the message has not expired and is for this group."""
        return not 0 < record.expires_at_ms <= now_ms and is_for(record, self._name)

    def load(self, offsets: Sequence[int], now_ms: int) -> LoadedMessages:
        """Read the messages at these offsets and sort out those that cannot be handed out."""
        if isinstance(offsets, range):
            with suppress(DamagedRange, OffsetOutOfRange):
                in_order = self.follower.records(offsets.start, offsets.stop)
                whole = len(in_order) == len(offsets)  # else compaction has removed some
                if whole and (self.follower.plain or not _any_special(in_order)):
                    return LoadedMessages(in_order)
        records: list[Record] = []
        expired: list[int] = []
        lost: list[int] = []
        passed: list[int] = []
        for offset in offsets:
            try:
                record = self.follower.record(offset)
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
        """Up to `count` next messages; with keys, the ready messages that follow the next one in the log."""
        if self.keyed is None:
            return self.choose(count, now, look=True).offsets
        # A key blocks all but its first message, so a choice would return a long run one at a time.
        phase, first = self._group.phase, self.keyed.choose(1, now.mono_ms)
        return [
            offset
            for start in first
            for offset in range(start, min(start + count, self._log.end))
            if phase(offset) is Phase.READY
        ]

    def removed_from(self, offset: int) -> range:
        """The run of messages from `offset` on that compaction has removed."""
        if not self._is_untouched(offset):
            return range(0)
        try:
            self.follower.record(offset)
        except Removed as gone:
            return range(offset, min(gone.next_offset, self._log.end))
        except (DamagedRange, OffsetOutOfRange):
            pass
        return range(0)

    def expired_from(self, offset: int, now_ms: int) -> range:
        """The run of expired messages from `offset` on, in whole frames."""
        start, end = offset, min(self._log.end, offset + _PASS_MOST)
        if not self._is_untouched(offset):
            return range(0)
        with suppress(DamagedRange, OffsetOutOfRange):
            for _ in range(_PASS_FRAMES):
                if offset >= end:
                    break
                frame = self.follower.frame(offset)
                times = frame.columns().expires_at_ms()
                if times is None or not (min(times) > 0 and max(times) <= now_ms):
                    break
                offset = frame.next_offset
        return range(start, min(offset, self._log.end))

    def _is_untouched(self, offset: int) -> bool:
        """Whether no event has touched any message from `offset` on."""
        ahead = self._group.ahead
        return self._group.cursor <= offset < self._log.end and not (ahead and ahead.max() >= offset)

    def unread_priorities(self) -> list[tuple[int, int]]:
        """(offset, priority) of messages that are written but not readable yet, so that a scan would miss them."""
        end, levels = self._log.end, self._group.lanes.levels
        return [(offset, level) for level, known in enumerate(levels) for offset in known if offset >= end]

    def scan(self, unread: Sequence[tuple[int, int]] = ()) -> list[int]:
        """Read the priorities that the group does not know yet; returns the offsets of messages for other groups."""
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
        lanes.scanned = max(lanes.scanned, end)  # not further: written but unreadable messages were not seen
        return for_others

    def _aged(self, now_ms: int) -> int:
        """The offset below which all messages have waited long enough to be promoted."""
        after_ms = self._promote_after_ms
        if after_ms is None or not self._group.lanes.used:
            return 0
        if not 0 <= now_ms - self._aged_at_ms < min(_AGE_EVERY_MS, after_ms):
            self._aged_at_ms = now_ms
            self._aged_below = self._log.find_time((now_ms - after_ms) * 1_000_000)
        return self._aged_below


def _any_special(records: Sequence[Record]) -> bool:
    """Whether any of them may be expired, or for another group only."""
    return bool([record.offset for record in records if record.flags & MOVED or record.expires_at_ms])


# Skipping runs of messages that cannot be handed out.
#
# If the next message is expired, lost or for another group, those after it often are too. Committing and choosing again
# for each would take quadratic time, so the look ahead widens for as long as it finds nothing to hand out. After about
# a thousand messages it stops, and the caller releases the lock to let other threads run.


_STEPS: Final = (4, 16, 64, 256, 1_000)
# Long enough for a thread that waits for a lock to wake up and take it.
_PAUSE_S: Final = 0.0002


def load(delivery: Delivery, offsets: Sequence[int], now: Moment) -> list[Record]:
    """Read messages; those that are expired, lost or not for this group are skipped durably and left out.

    The caller holds the lock.
    """
    loaded = delivery.supply.load(offsets, now.wall_ms)
    if loaded.lost:
        delivery.metrics.damaged.add(len(loaded.lost))
        delivery.commit_events([Lost(runs_of(loaded.lost))])
    if loaded.passed:
        behind = delivery.supply.removed_from(max(loaded.passed) + 1)
        delivery.commit_events([Cancelled(runs_of([*loaded.passed, *behind]))])
    if loaded.expired:
        pass_expired(delivery, loaded.expired, now)
    if delivery.tracer is not None:
        delivery.tracer.loaded(loaded.records)
    return loaded.records


def take(delivery: Delivery, offsets: Sequence[int], lease_ms: int, holder: str, moving_to: int) -> list[Delivered]:
    """Lease those of these messages that are ready, to move them into another log."""
    with delivery.lock:
        group, now = delivery.group, delivery.moment()
        records = load(delivery, [offset for offset in offsets if group.phase(offset) is Phase.READY], now)
        if not records:
            return []
        taken = [record.offset for record in records]
        delivery.commit(Receive(taken, group.cursor, lease_ms, holder, group.session, moving_to), now=now)
        delivery.expect_tick(now.mono_ms + lease_ms)
        return [Delivered(record, group.leases[record.offset], 1, delivery) for record in records]


def look_ahead(delivery: Delivery, now: Moment) -> bool:
    """Skip the next messages that cannot be handed out. The caller holds the lock.

    Returns False if there may be more of them, and the caller should release the lock for a moment.
    """
    for step in _STEPS:
        offsets = delivery.supply.coming(step, now)
        if not offsets or load(delivery, offsets, now):
            return True
    return False


def pass_expired(delivery: Delivery, offsets: Sequence[int], now: Moment) -> None:
    """Skip these messages, which have expired, and the run of expired ones behind them. The caller holds the lock."""
    behind = delivery.supply.expired_from(max(offsets) + 1, now.wall_ms)
    runs = runs_of([*offsets, *behind])
    if delivery.settings.expired_to_dead:
        delivery.commit(Bury(runs, EXPIRED), now=now)
        delivery.expect_tick(now.mono_ms)
    else:
        delivery.commit_events([Expired(runs)])
    delivery.metrics.expired.add(size(runs))


def give_way() -> None:
    """Let other threads run and take the locks that this one has released."""
    threading.Event().wait(_PAUSE_S)


# Peeking at the next messages of one partition.


_AT_A_TIME: Final = 64


def peek(delivery: Delivery, count: int, most_bytes: int | None) -> list[Record]:
    """The next messages, without leasing them; loads no more once there are more than `most_bytes`.

    Expired and lost messages on the way are skipped durably, as in a receive.
    """
    while True:
        with delivery.lock:
            records = _peek(delivery, count, most_bytes)
        if records is not None:
            return records
        give_way()


def _peek(delivery: Delivery, count: int, most_bytes: int | None) -> list[Record] | None:
    """One attempt under the lock; None if messages were skipped, because then others may be next."""
    now = delivery.moment()
    records: list[Record] = []
    size = 0
    whole = True
    for offsets in _parts(delivery.supply.choose(count, now, look=True).offsets):
        if not whole:  # some of these may have been skipped along with earlier ones
            offsets = [offset for offset in offsets if delivery.group.phase(offset) is Phase.READY]
        loaded = load(delivery, offsets, now)
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
