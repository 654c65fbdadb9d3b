"""One group on one partition: the shell where decide, journal and apply meet, always in this order."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Final

import msgspec

from holdfast.broker.journal import Journal, Snapshot
from holdfast.broker.metrics import Metrics
from holdfast.broker.waiters import Waiters
from holdfast.codec.columns import PRIORITIES
from holdfast.delivery.choose import Chosen, Turns, choose
from holdfast.delivery.claims import held, lost
from holdfast.delivery.commands import (
    DROPPED,
    LEASE_ENDED,
    NO_SESSION,
    Bury,
    Command,
    Extend,
    GiveUp,
    Nack,
    Open,
    Receipt,
    Receive,
    Seek,
    Tick,
)
from holdfast.delivery.decide import EXPIRED, Moment, decide
from holdfast.delivery.events import (
    Acked,
    Buried,
    Event,
    Expired,
    Leased,
    Lost,
    Released,
    Returned,
    Skipped,
    encode_event,
)
from holdfast.delivery.group import FAR, Group, Lease
from holdfast.delivery.image import image_of
from holdfast.delivery.runs import runs_of, size
from holdfast.env import World
from holdfast.errors import DamagedRange, LeaseLost, OffsetOutOfRange, Unavailable
from holdfast.model import Appended, Durability, Record
from holdfast.settings import QueueSettings
from holdfast.storage.log import Log

logger = logging.getLogger(__name__)

# A backlog that nobody reads makes no events; without a snapshot now and then, opening would have to look for
# the priorities of all of it.
_SCAN_MOST: Final = 500_000
# How many expired messages are passed over, or buried, at a time.
_PASS_MOST: Final = 100_000
_BURY_MOST: Final = 1_000
_AGE_EVERY_MS: Final = 100
_UNHURRIED: Final = ("interval", "os")

_EXPIRES: Final = attrgetter("expires_at_ms")
_LEASED_AT: Final = attrgetter("at_ms")
_TIMESTAMP: Final = attrgetter("timestamp_ns")


class Delivered(msgspec.Struct, frozen=True, gc=False):
    """A message in a holder's hands."""

    record: Record
    lease: Lease
    attempt: int

    @property
    def receipt(self) -> Receipt:
        return Receipt(self.record.offset, self.lease.fence)


class Delivery:
    """Hands out the messages of a log to the consumers of one group. Safe to use from any thread."""

    def __init__(
        self, world: World, log: Log, journal: Journal, group: Group, settings: QueueSettings, metrics: Metrics
    ) -> None:
        self._clock = world.clock
        self._now_ns, self._mono_ns = world.clock.now_ns, world.clock.monotonic_ns
        self._log = log
        self.journal = journal
        self.group = group
        self.settings = settings
        self.metrics = metrics
        self.lock = threading.Lock()
        self.waiters = Waiters()
        self.dead_end: Callable[[], int] = lambda: -1
        self.on_attention: Callable[[], None] = lambda: None
        self._follower = log.follower()
        self._turns = Turns(settings.priority_weights) if settings.priority_choice == "fair" else None
        self._dropped: list[Receipt] = []  # filled by finalizers, at any point of any thread: append and pop only
        self._renewing: dict[Receipt, int] = {}
        self._due_mono_ms = 0  # by then somebody will call `tick`
        self._aged_at_ms = 0
        self._aged_below = 0
        self._scanned_at = log.written_end
        self._floor_mark = (0, 0)
        self._skipped_to = 0
        self._count_delivered, self._count_acked = metrics.delivered.add, metrics.acked.add
        self._observe_wait, self._observe_handle = metrics.wait_seconds.observe_ns, metrics.handle_seconds.observe_ns

    @staticmethod
    def open(world: World, log: Log, folder: str, settings: QueueSettings, metrics: Metrics) -> Delivery:
        """The group whose journal is in the folder, brought up to the log as it is now."""
        journal, group = Journal.open(world, folder, settings, log.start)
        try:
            delivery = Delivery(world, log, journal, group, settings, metrics)
            # Synced, for two reasons: fencing numbers begin with the session, and what the group knew of a tail
            # that the log has lost must stay forgotten when other messages stand there.
            journal.log.wait(delivery._commit(Open(world.ids.boot_id(), log.written_end), durability="fsync"))
            delivery.scan_priorities()
            delivery.pin()
        except BaseException:
            journal.close()
            raise
        return delivery

    def recover(self) -> None:
        """What holders of earlier sessions had comes back. Moves that were cut short have been finished before."""
        with self.lock:
            self._commit(GiveUp())

    def scan_priorities(self) -> None:
        """Look through the log for the priorities that the group does not know yet. The caller may hold the lock."""
        lanes = self.group.lanes
        start = max(lanes.scanned, self.group.floor, self._log.start)
        for frame in self._log.read(min(start, self._log.end), on_damage="skip"):
            if frame.header.columns & PRIORITIES:
                levels = frame.columns().priorities()
                if levels is not None:
                    self.group.arrive(frame.base_offset, bytes(levels))
        lanes.scanned = self._scanned_at = self._log.written_end

    # Receiving

    def receive(
        self, count: int, *, lease_ms: int, holder: str, detached: bool = False, moving_to: int = -1
    ) -> list[Delivered]:
        """Up to `count` messages that are ready now, leased to the holder."""
        with self.lock:
            if self._dropped:
                self._take_back_dropped()
            group = self.group
            session = NO_SESSION if detached else group.session
            if count == 1 and not (group.lanes.filled or group.ahead) and group.cursor < self._log.end:
                one = self._receive_one(lease_ms, holder, session)
                if one is not None:
                    return [one]
            return self._receive(count, lease_ms, holder, session, moving_to)

    def _receive_one(self, lease_ms: int, holder: str, session: int) -> Delivered | None:
        """The fused form of `_receive` for one message in plain order; None where anything is special."""
        group = self.group
        offset = group.cursor
        try:
            record = self._follower.record(offset)
        except (DamagedRange, OffsetOutOfRange):
            return None
        if record.expires_at_ms:
            return None
        now_ns = self._now_ns()
        until_ms = self._mono_ns() // 1_000_000 + lease_ms
        fence = group.fence + 1
        at_ms = now_ns // 1_000_000
        self.journal.write_one(
            encode_event(Leased((offset, offset + 1), offset + 1, fence, session, lease_ms, until_ms, at_ms, holder)),
            now_ns,
        )
        lease = Lease(fence, session, lease_ms, until_ms, at_ms, holder)
        group.lease_one(offset, lease)
        if until_ms < self._due_mono_ms:
            self._due_mono_ms = until_ms
            self.on_attention()
        self._count_delivered()
        self._observe_wait(now_ns - record.timestamp_ns)
        return Delivered(record, lease, 1)

    def _receive(self, count: int, lease_ms: int, holder: str, session: int, moving_to: int) -> list[Delivered]:
        out: list[Delivered] = []
        while len(out) < count:
            now = self._moment()
            chosen = self._choose(count - len(out), now, self._turns)
            if not chosen.offsets:
                break
            records = self._load(chosen.offsets, now)
            if not records:
                continue  # all of them were expired or lost, and are passed over by now
            whole = len(records) == len(chosen.offsets)
            offsets = chosen.offsets if whole else [record.offset for record in records]
            command = Receive(offsets, chosen.cursor, lease_ms, holder, session, moving_to)
            self._commit(command, now=now)
            group = self.group
            self._expect_tick(now.mono_ms + lease_ms)
            lease = group.leases[offsets[0]]
            if group.histories:
                out += [Delivered(record, lease, group.attempts(record.offset) + 1) for record in records]
            else:
                out += [Delivered(record, lease, 1) for record in records]
            self._count_all(records)
        return out

    def take(self, offsets: Sequence[int], *, lease_ms: int, holder: str, moving_to: int) -> list[Delivered]:
        """Lease just these messages, as far as they are ready: for a move into another log."""
        with self.lock:
            now = self._moment()
            ready = [offset for offset in offsets if self.group.phase(offset).value == "ready"]
            records = self._load(ready, now)
            if not records:
                return []
            taken = [record.offset for record in records]
            self._commit(Receive(taken, self.group.cursor, lease_ms, holder, self.group.session, moving_to), now=now)
            self._expect_tick(now.mono_ms + lease_ms)
            return [Delivered(record, self.group.leases[record.offset], 1) for record in records]

    def peek(self, count: int) -> list[Record]:
        """The messages that would be handed out next; nothing changes but that expired ones are passed over."""
        with self.lock:
            now = self._moment()
            while True:
                turns = self._turns and self._turns.copy()
                chosen = self._choose(count, now, turns)
                before = len(chosen.offsets)
                records = self._load(chosen.offsets, now)
                if len(records) == before:
                    return records

    def _choose(self, count: int, now: Moment, turns: Turns | None) -> Chosen:
        return choose(self.group, count, self._log.end, aged_below=self._aged(now.wall_ms), turns=turns)

    def _aged(self, now_ms: int) -> int:
        """Below this offset everything has waited long enough to be promoted."""
        after_ms = self.settings.promote_after_ms
        if after_ms is None or not self.group.lanes.used:
            return 0
        if not 0 <= now_ms - self._aged_at_ms < min(_AGE_EVERY_MS, after_ms):
            self._aged_at_ms = now_ms
            self._aged_below = self._log.find_time((now_ms - after_ms) * 1_000_000)
        return self._aged_below

    def _load(self, offsets: Sequence[int], now: Moment) -> list[Record]:
        """The messages, without those that are expired or lost; these are passed over."""
        if isinstance(offsets, range):
            with suppress(DamagedRange, OffsetOutOfRange):
                in_order = self._follower.records(offsets.start, offsets.stop)
                if not any(map(_EXPIRES, in_order)):
                    return in_order
        records: list[Record] = []
        gone: list[int] = []
        expired: list[int] = []
        for offset in offsets:
            try:
                record = self._follower.record(offset)
            except (DamagedRange, OffsetOutOfRange) as error:
                logger.error("message passed over", extra={"offset": offset, "error": str(error)})
                gone.append(offset)
                continue
            if 0 < record.expires_at_ms <= now.wall_ms:
                expired.append(offset)
            else:
                records.append(record)
        if gone:
            self.commit_events([Lost(runs_of(gone))])
        if expired:
            self._pass_expired(expired, now)
        return records

    def _pass_expired(self, offsets: list[int], now: Moment) -> None:
        if self.settings.expired_to_dead:
            self._commit(Bury(offsets[:_BURY_MOST], EXPIRED), now=now)
            self.metrics.expired.add(len(offsets[:_BURY_MOST]))
            self._expect_tick(now.mono_ms)
            return
        runs = runs_of(offsets)
        if runs[-1] > self.group.cursor:
            runs = runs_of([*offsets, *self._expired_behind(runs[-1], now)])
        self.commit_events([Expired(runs)])
        self.metrics.expired.add(size(runs))

    def _expired_behind(self, offset: int, now: Moment) -> range:
        """How far everything is expired from there on: whole frames at a time."""
        group, start, end = self.group, offset, min(self._log.end, offset + _PASS_MOST)
        if group.ahead and group.ahead.max() >= offset:
            return range(0)
        try:
            while offset < end:
                frame = self._follower.frame(offset)
                times = frame.columns().expires_at_ms()
                if times is None or not (min(times) > 0 and max(times) <= now.wall_ms):
                    break
                offset = frame.next_offset
        except (DamagedRange, OffsetOutOfRange):
            pass
        return range(start, offset)

    # Settling

    def ack(self, receipts: Sequence[Receipt], durability: Durability | None = None) -> Appended | None:
        """They are handled. LeaseLost for those that somebody else may have by now; the others are acked."""
        durability = durability or self.settings.ack_durability
        with self.lock:
            if len(receipts) == 1 and durability in _UNHURRIED:
                self._ack_one(receipts[0])
                return None
            leases = self.group.leases
            held_by = [leases.get(receipt.offset) for receipt in receipts]
            good = [
                receipt
                for receipt, lease in zip(receipts, held_by, strict=True)
                if lease is not None and lease.fence == receipt.fence
            ]
            appended = None
            if good:
                offsets = {receipt.offset for receipt in good}
                times = Counter(map(_LEASED_AT, filter(None, held_by)))
                appended = self.commit_events([Acked(runs_of(offsets))], durability)
                self._count_acked(len(offsets))
                now_ns = self._now_ns()
                for at_ms, count in times.items():
                    self._observe_handle(now_ns - at_ms * 1_000_000, count)
            if len(good) < len(receipts):
                raise self._lost([receipt for receipt in receipts if receipt not in good])
        return appended

    def _ack_one(self, receipt: Receipt) -> None:
        """The fused form of `Ack` for one message."""
        group, offset = self.group, receipt.offset
        lease = group.leases.get(offset)
        if lease is None or lease.fence != receipt.fence:
            raise self._lost([receipt])
        now_ns = self._now_ns()
        self.journal.write_one(encode_event(Acked((offset, offset + 1))), now_ns)
        group.ack_one(offset)
        self._count_acked()
        self._observe_handle(now_ns - lease.at_ms * 1_000_000)

    def settle(self, command: Command, durability: Durability | None = None) -> tuple[list[Event], Appended | None]:
        """Carry out a command of a holder or an operator; answers with what happened, and what to wait for."""
        with self.lock:
            now = self._moment()
            try:
                events = decide(self.group, command, self.settings, now)
            except LeaseLost:
                self.metrics.lost_leases.add()
                raise
            if not events:
                return events, None
            appended = self.commit_events(events, durability or self.settings.ack_durability)
            self._after(events, now)
        return events, appended

    def ack_held(self, offsets: Sequence[int]) -> None:
        """Ack whatever holder has these: at opening, for moves that turned out to have taken place."""
        with self.lock:
            if offsets:
                self.commit_events([Acked(runs_of(offsets))])

    def fetch(self, offsets: Sequence[int]) -> list[Record]:
        """The messages at these offsets, as far as they can be read."""
        records: list[Record] = []
        with self.lock:
            for offset in offsets:
                try:
                    records.append(self._follower.record(offset))
                except (DamagedRange, OffsetOutOfRange) as error:
                    logger.error("message not read", extra={"offset": offset, "error": str(error)})
        return records

    def holds(self, receipt: Receipt) -> bool:
        """Whether the receipt is still good."""
        return held(self.group, receipt)

    def drop(self, receipt: Receipt) -> None:
        """Nobody has the message in hand any more, and nobody settled it. Callable from a finalizer."""
        self._dropped.append(receipt)
        self.on_attention()

    def renew(self, receipt: Receipt, lease_ms: int) -> None:
        """Keep the lease alive until `let_lapse`, whatever the holder does meanwhile."""
        with self.lock:
            self._renewing[receipt] = lease_ms
            self._expect_tick(self._mono_ns() // 1_000_000 + lease_ms // 3)

    def let_lapse(self, receipt: Receipt) -> None:
        self._renewing.pop(receipt, None)

    def seek(self, to: int) -> None:
        """Go on from there: all before is passed over, all behind comes again."""
        with self.lock:
            end, levels = self._log.end, self.group.lanes.levels
            unseen = [(offset, level) for level, known in enumerate(levels) for offset in known if offset >= end]
            self._commit(Seek(to), durability="interval")
            self.scan_priorities()
            for offset, level in unseen:  # written, but not readable yet
                self.group.arrive(offset, [level])
        self.waiters.wake_all()

    def refusal(self, receipt: Receipt) -> LeaseLost:
        """The error for a receipt that is no longer good."""
        with self.lock:
            return self._lost([receipt])

    def _lost(self, receipts: Sequence[Receipt]) -> LeaseLost:
        self.metrics.lost_leases.add(len(receipts))
        error = lost(self.group, receipts[0])
        error.offsets = tuple(receipt.offset for receipt in receipts)
        if len(receipts) > 1:
            error.args = (f"{error.args[0]}. So it is with {len(receipts)} messages of this call; the others are done",)
        return error

    # Time

    def tick(self) -> int | None:
        """Do what is due by now; answers in how many ms more will be due."""
        with self.lock:
            if self._dropped:
                self._take_back_dropped()
            now = self._moment()
            renewed_ms = self._renew(now)
            events = decide(self.group, Tick(), self.settings, now)
            if events:
                self.commit_events(events)
                self._after(events, now)
            if self.group.floor < self._log.start and self._skipped_to < self._log.start:
                self._skipped_to = self._log.start
                self.commit_events([Skipped(self._skipped_to)])  # trimmed away by force
            self.group.deadlines.forget(now.mono_ms)
            self.group.timers.forget(now.wall_ms)
            due_ms = self._next_due_ms(now, renewed_ms)
            self._due_mono_ms = FAR if due_ms is None else now.mono_ms + due_ms
            snapshot = self._snapshot_if_due()
        if snapshot is not None:
            self.journal.keep(snapshot)
        self.pin()
        journal_due_ms = self.journal.log.tick()
        return min((ms for ms in (due_ms, journal_due_ms) if ms is not None), default=None)

    def pin(self) -> None:
        """Let the log go up to the floor, as far as the events that raised it are on disk."""
        marked_at, floor = self._floor_mark
        if self.journal.log.synced_end >= marked_at:
            self._log.pin(self.journal.log.folder, floor)
            with self.lock:
                self._floor_mark = (self.journal.log.written_end, self.group.floor)

    def compact(self) -> int:
        """Let go of the journal behind a new snapshot; answers how many bytes that freed."""
        freed = self.save()
        self.journal.log.roll()
        return freed + self.save()  # the journal goes behind the last but one

    def save(self) -> int:
        """Take a snapshot now; answers how many bytes of old journal it freed."""
        with self.lock:
            snapshot = Snapshot(self.journal.log.written_end, image_of(self.group))
        return self.journal.keep(snapshot)

    def close(self) -> None:
        """Save, let go of the journal, and send away whoever waits."""
        self.waiters.wake_all()
        try:
            if self.journal.events_since_snapshot and self.journal.log.usable:
                self.save()
        except Unavailable as error:  # replay takes longer next time, nothing else
            logger.warning("no snapshot", extra={"folder": self.journal.log.folder, "error": str(error)})
        finally:
            self.journal.close()

    def _renew(self, now: Moment) -> int | None:
        """Extend what is kept alive and has used up a third; answers in how many ms to look again."""
        due: list[int] = []
        for receipt, lease_ms in list(self._renewing.items()):
            if not held(self.group, receipt):
                self._renewing.pop(receipt, None)
                continue
            lease = self.group.leases[receipt.offset]
            if lease.until_ms - now.mono_ms <= lease_ms * 2 // 3 + 1:
                self._commit(Extend([receipt], lease_ms), now=now)
            due.append(lease_ms // 3 + 1)
        return min(due, default=None)

    def _next_due_ms(self, now: Moment, renewed_ms: int | None) -> int | None:
        deadline, timer = self.group.deadlines.next_ms(), self.group.timers.next_ms()
        due = [renewed_ms] if renewed_ms is not None else []
        if deadline is not None:
            due.append(max(deadline - now.mono_ms, 0))
        if timer is not None:
            due.append(max(timer - now.wall_ms, 0))
        return min(due, default=None)

    def _snapshot_if_due(self) -> Snapshot | None:
        many = self.journal.events_since_snapshot >= self.settings.snapshot_events
        written = self._log.written_end
        if not many and written - self._scanned_at < _SCAN_MOST:
            return None
        self.group.lanes.scanned = self._scanned_at = written  # priorities are noted as they are written
        return Snapshot(self.journal.log.written_end, image_of(self.group))

    def _take_back_dropped(self) -> None:
        while self._dropped:
            receipt = self._dropped.pop()
            if held(self.group, receipt):
                delay_ms = self.settings.dropped_delay_ms
                now = self._moment()
                self._after(self._commit_all(Nack(receipt, delay_ms, why=DROPPED), now), now)

    # Decide, journal, apply

    def _moment(self) -> Moment:
        return Moment(self._now_ns() // 1_000_000, self._mono_ns() // 1_000_000, self.dead_end())

    def _commit(self, command: Command, *, now: Moment | None = None, durability: Durability | None = None) -> Appended:
        events = decide(self.group, command, self.settings, now or self._moment())
        return self.commit_events(events, durability)

    def _commit_all(self, command: Command, now: Moment) -> list[Event]:
        events = decide(self.group, command, self.settings, now)
        self.commit_events(events)
        return events

    def commit_events(self, events: Sequence[Event], durability: Durability | None = None) -> Appended:
        """Journal, then apply. The caller holds the lock."""
        appended = self.journal.append(events, durability)
        for event in events:
            self.group.apply(event)
        return appended

    def _after(self, events: Sequence[Event], now: Moment) -> None:
        """Whoever must know: waiting consumers, and the one who ticks."""
        released = sum(size(event.runs) for event in events if isinstance(event, Released))
        if released:
            self.waiters.wake(released)
        returned = [event.why for event in events if isinstance(event, Returned)]
        if returned:
            self.metrics.returned.add(len(returned))
        ended = returned.count(LEASE_ENDED)
        ended += sum(isinstance(event, Buried) and event.error == LEASE_ENDED for event in events)
        if ended:
            self.metrics.expired_leases.add(ended)
        if any(isinstance(event, Buried) for event in events):
            self._expect_tick(now.mono_ms)
        due_ms = self._next_due_ms(now, None)
        if due_ms is not None:
            self._expect_tick(now.mono_ms + due_ms)

    def _expect_tick(self, mono_ms: int) -> None:
        if mono_ms < self._due_mono_ms:
            self._due_mono_ms = mono_ms
            self.on_attention()

    def _count_all(self, records: Sequence[Record]) -> None:
        now_ns = self._now_ns()
        self._count_delivered(len(records))
        for timestamp_ns, times in Counter(map(_TIMESTAMP, records)).items():
            self._observe_wait(now_ns - timestamp_ns, times)
