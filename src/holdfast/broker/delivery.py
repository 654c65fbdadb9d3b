"""One group on one partition: which consumer holds which message, from its first delivery until it is done.

Every change takes three steps, in this order and under one lock:

    decide     turn the command into events, or refuse it. Pure: no state has changed yet.
    journal    write the events. If this raises, nothing has happened.
    apply      change the state. This cannot fail, because `decide` has already checked everything.

The journal is written before the state changes so that nobody acts on a state that a crash would undo: after a restart,
replay must arrive at what callers have seen. Only a signal such as Ctrl-C can interrupt between the last two steps;
`_mend` then rebuilds the state from the journal.

`lock` protects the state (`group`), the choice of the next message, and the order of events in the journal. A write
with priorities takes it from outside (`Partition.telling_groups`); the lock of the key limits (`KeyedGroup`) is taken
after it. It is never held during a sync: callers that need one release it and call `wait`. Finalizers can run at any
point of any thread, so they take no lock; they only add a receipt to `_dropped`.

`receive_next` and `ack_one` fuse the three steps for a single message. If something is special (a pause, fair turns of
priorities, or a message that has expired or is for another group), they return before writing anything, and the caller
falls back to the general path. Keep the two paths in step; tests compare them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from itertools import repeat
from operator import attrgetter
from typing import TYPE_CHECKING, Final, Self

from holdfast.broker.choose import Keyed, KeyedGroup, Supply, follow_keys, give_way, load, look_ahead, next_due_ms
from holdfast.broker.dead_letters import GroupDeadLetters
from holdfast.broker.folder.layout import DEFAULT_GROUP
from holdfast.broker.journal import Floor, Journal, Snapshot
from holdfast.broker.leases import Delivered, Dropped, Pending, Receipts, Renewals, lease_lost
from holdfast.broker.messages import MOVED, id_of
from holdfast.broker.metrics import Metrics
from holdfast.broker.waiters import Waiters
from holdfast.delivery.decide import Moment, decide, held
from holdfast.delivery.events import (
    DROPPED,
    NO_SESSION,
    PROVEN,
    Acked,
    Cancelled,
    CloseGroup,
    Command,
    Event,
    Extend,
    GiveUp,
    Nack,
    OpenGroup,
    Phase,
    Receipt,
    Receive,
    Released,
    Seek,
    Tick,
    runs_of,
    size,
)
from holdfast.delivery.group import FAR, Group, Lease
from holdfast.env import World
from holdfast.env.process import asyncio, get_logger, stand_back
from holdfast.errors import CorruptData, HoldfastError, LeaseLost, Unavailable
from holdfast.model import Appended, Durability, Record
from holdfast.settings import TopicSettings
from holdfast.storage.keeper import soonest
from holdfast.storage.log import Log

if TYPE_CHECKING:
    from holdfast.broker.partition import Partition, Site
    from holdfast.broker.tracing.observer import GroupTracer

logger = get_logger(__name__)

_END_MOST: Final = 100  # leases and delays ended before the lock is released for a moment
_FENCE: Final = attrgetter("fence")
_OFFSET: Final = attrgetter("offset")


class Delivery:
    """Leases the messages of a log to the consumers of one group. Thread-safe.

    Only `wait` and `wait_async` block. The delivery of a dead-letter log has no site: `partition` and `receipts` are
    not set, and its messages never become dead letters themselves.
    """

    # What every message needs: a slot is found faster than one of many entries in a dict.
    __slots__ = (
        "__dict__", "__weakref__", "_acked", "_delivered", "_dropped", "_due_mono_ms", "_journal_log", "_mono_ns",
        "_note_ack", "_note_lease", "_now_ns", "_observe_handle", "_observe_wait", "group", "holder", "journal", "lock",
        "paused", "settings", "supply", "tracer", "unhurried", "waiters",
    )  # fmt: skip

    partition: Partition
    receipts: Receipts

    def __init__(
        self,
        world: World,
        log: Log,
        journal: Journal,
        group: Group,
        settings: TopicSettings,
        metrics: Metrics,
        name: str = DEFAULT_GROUP,
        site: Site | None = None,
    ) -> None:
        self.clock = world.clock
        self._doubted_ms = world.doubted_ms
        self._now_ns, self._mono_ns = world.clock.now_ns, world.clock.monotonic_ns
        self._log = log
        self.journal = journal
        journal.kept = lambda: (log.start, log.written_end)
        self.group = group
        self.name = name
        self.settings = settings
        self.metrics = metrics
        self.lock = threading.Lock()
        self.closed = self.paused = False
        self.waiters = Waiters()
        self.holder = ""  # holder of messages received without a name
        self.on_attention: Callable[[], None] = lambda: None
        self.supply = Supply(log, group, settings, name)
        self._dropped = Dropped(log.folder)
        self.renewals = Renewals()
        self._due_mono_ms = 0  # when the next `tick` is expected
        self._floor = Floor(log, journal, group, name)
        self.unhurried = settings.ack_durability != "fsync"  # acks do not wait for a sync
        self.topic, self.number = ("", 0) if site is None else (site.topic, site.number)
        self.check_open: Callable[[], None] = (lambda: None) if site is None else site.check_open
        self.dead = GroupDeadLetters(self, None if site is None else site.open_dead)
        if site is not None:
            self.partition = site.partition
            self.receipts = Receipts(site.topic, site.number, group, site.prover)
        self.tracer: GroupTracer | None = None  # must see every event
        self._keyed_group: KeyedGroup | None = None
        # Bound once, for the fused paths.
        self._note_lease, self._note_ack, self._journal_log = journal.scratch.lease, journal.scratch.ack, journal.log
        self._delivered, self._acked = metrics.delivered, metrics.acked
        self._observe_wait, self._observe_handle = metrics.wait_seconds.observe_ns, metrics.handle_seconds.observe_ns

    @classmethod
    def open(
        cls,
        world: World,
        log: Log,
        folder: str,
        settings: TopicSettings,
        metrics: Metrics,
        *,
        name: str = DEFAULT_GROUP,
        start: int | None = None,
        site: Site | None = None,
    ) -> Self:
        """Open the group whose journal is in the folder; a new group begins at `start`, by default the log's start."""
        journal, group = Journal.open(world, folder, settings, log.start if start is None else start)
        try:
            delivery = cls(world, log, journal, group, settings, metrics, name, site)
            # Synced, because fences contain the session, and because state about a lost tail of the log must not
            # come back once new messages have taken those offsets.
            journal.log.wait(delivery.commit(OpenGroup(world.ids.boot_id(), log.written_end), durability="fsync"))
            delivery.scan()
            journal.past.note_floor(journal.log.written_end, delivery.group.floor)
            delivery.pin()
        except BaseException:
            journal.close()
            raise
        return delivery

    def mono_ms(self) -> int:
        """Monotonic time in ms, the clock of leases."""
        return self._mono_ns() // 1_000_000

    def change(self, settings: TopicSettings, keyed: KeyedGroup | None = None, *, paused: bool = False) -> None:
        """Apply new settings; current leases keep their deadlines. While `paused`, nothing is handed out."""
        with self.lock:
            self.settings, self.paused = settings, paused
            self.unhurried = settings.ack_durability != "fsync"
            self.supply.change(settings)
        self.follow_keys(keyed)

    def follow_keys(self, keyed: KeyedGroup | None) -> None:
        """Choose messages by key from now on, or stop doing so if None."""
        with self.lock:
            if keyed is not self._keyed_group:
                self.supply.keyed = None if keyed is None else Keyed(keyed, self._log, self.group)
                self._keyed_group = keyed
        self.waiters.wake_all()

    def scan(self, unread: Sequence[tuple[int, int]] = ()) -> None:
        """Read the priorities of messages that the group has not seen yet. The caller holds the lock."""
        self._pass_over(self.supply.scan(unread))

    def pass_over(self, offsets: Sequence[int]) -> None:
        """Skip messages that are for another group only, so that they no longer count as ready here."""
        with self.lock:
            if not self.closed:
                self._pass_over(offsets)

    def _pass_over(self, offsets: Sequence[int]) -> None:
        ready = [offset for offset in offsets if self.group.phase(offset) is Phase.READY]
        if ready:
            self.commit_events([Cancelled(runs_of(ready))])

    def recover(self, *, dead: bool) -> None:
        """Finish what a crash interrupted; `dead` says whether the partition already has dead letters."""
        if dead:
            self.dead.open().recover()
        self.end_sessions()
        self.dead.store_dead_if_possible()

    def end_sessions(self) -> None:
        """Return the messages that earlier sessions held, and finish moves whose dead letter was already written."""
        with self.lock:
            self.commit(GiveUp(self._doubted_ms))

    def receive_next(self) -> Delivered | None:
        """Lease the next message with the default lease time; None if the general path is needed (see above)."""
        if self.lock.locked():
            stand_back(self.lock)
        with self.lock:
            if self.supply.keyed is None:
                return self._receive_one(self.settings.lease_ms, self.holder, self.group.session)
            with self.supply.keyed.lock:
                return self._receive_one(self.settings.lease_ms, self.holder, self.group.session)

    def _receive_one(self, lease_ms: int, holder: str, session: int) -> Delivered | None:
        """Fused form of `_receive` for one message; None if the general path is needed."""
        if self.paused or self._dropped.receipts:
            return None
        group, supply = self.group, self.supply
        now_ns, until_ms = self._now_ns(), self._mono_ns() // 1_000_000 + lease_ms
        at_ms, keyed, record = now_ns // 1_000_000, supply.keyed, None
        if keyed is not None:
            offset, cursor = keyed.choose_one(until_ms - lease_ms), group.cursor
            record = keyed.follower.kept.pop(offset, None)
        elif group.lanes.filled or group.ahead:
            offset, cursor = supply.choose_one(at_ms)
        else:
            offset, cursor = group.cursor, group.cursor + 1
        if record is None:
            ahead = supply.follower.ahead
            record = ahead.pop() if ahead and ahead[-1].offset == offset else supply.record_or_none(offset)
            if record is None:
                return None
        if (record.expires_at_ms or record.flags & MOVED) and not supply.is_for(record, at_ms):
            return None
        lease = Lease((group.fence + 1) | PROVEN, session, lease_ms, until_ms, at_ms, holder)  # as next_fence
        tracer = self.tracer
        step = None if tracer is None else tracer.lease_one(record, lease, now_ns)
        self._lease_one(offset, cursor, lease, now_ns)
        if tracer is not None and step is not None:
            tracer.written_one(step, offset)
        if until_ms < self._due_mono_ms:
            self.expect_tick(until_ms)
        delivered = self._delivered
        delivered.value += 1  # as `add` does it
        if delivered.relay is not None:
            delivered.relay.count(delivered.name, 1)
        self._observe_wait(now_ns - record.timestamp_ns)
        attempt = group.attempts(offset) + 1 if group.histories else 1
        return Delivered(record, lease, attempt, self)

    def _lease_one(self, offset: int, cursor: int, lease: Lease, now_ns: int) -> None:
        """Journal a lease and apply it."""
        group, keyed, passes = self.group, self.supply.keyed, cursor == offset + 1
        try:
            if not ((passes or cursor == group.cursor) and self._note_lease(offset, lease, passes)):
                self.journal.lease_one(group, offset, cursor, lease, now_ns)
            if self._journal_log.unsynced_since_ns is None:
                self._journal_log.note_unsynced()
            group.lease_one(offset, cursor, lease)
            if keyed is not None:
                keyed.lease_one(offset, lease.until_ms - lease.lease_ms)
                if keyed.limited or self.waiters:
                    follow_keys(self, keyed)
        except BaseException as error:
            self._mend(error)
            raise

    def receive(self, count: int, *, lease_ms: int, holder: str, detached: bool = False) -> list[Delivered] | None:
        """Lease up to `count` ready messages to the holder.

        Returns None after skipping many expired messages, to let other threads have the lock: call again.
        """
        if self.lock.locked():
            stand_back(self.lock)
        with self.lock:
            session = NO_SESSION if detached else self.group.session
            keyed = self.supply.keyed
            if keyed is None:
                return self._receive_some(count, lease_ms, holder, session)
            with keyed.lock:
                taken = self._receive_some(count, lease_ms, holder, session)
            if taken == []:  # a rate limit may allow more later
                mono_ms = self.mono_ms()
                self.expect_within(keyed.next_ms(mono_ms), mono_ms)
            return taken

    def _receive_some(self, count: int, lease_ms: int, holder: str, session: int) -> list[Delivered] | None:
        one = self._receive_one(lease_ms, holder, session) if count == 1 else None
        if one is not None:
            return [one]
        self._take_back_dropped()
        return self._receive(count, lease_ms, holder, session)

    def _receive(self, count: int, lease_ms: int, holder: str, session: int) -> list[Delivered] | None:
        out: list[Delivered] = []
        while len(out) < count and not self.paused:
            now = self.moment()
            chosen = self.supply.choose(count - len(out), now)
            if not chosen.offsets:
                break
            records = load(self, chosen.offsets, now)
            if not records:  # all were expired or lost, and `load` has skipped them
                if not look_ahead(self, now):
                    return out or None
                continue
            whole = len(records) == len(chosen.offsets)
            offsets = chosen.offsets if whole else [record.offset for record in records]
            self.commit(Receive(offsets, chosen.cursor, lease_ms, holder, session), now=now)
            self.expect_tick(now.mono_ms + lease_ms)
            lease, attempts = self.group.leases[offsets[0]], self.group.attempts
            if self.group.histories:
                out += [Delivered(record, lease, attempts(record.offset) + 1, self) for record in records]
            else:
                out += map(Delivered, records, repeat(lease), repeat(1), repeat(self))
            self._delivered.add(len(records))
            self.metrics.wait_seconds.observe_since(self._now_ns(), [record.timestamp_ns for record in records])
        return out

    def ack(self, receipts: Sequence[Receipt], durability: Durability | None = None) -> Pending:
        """Ack the messages whose leases are still valid; `wait` raises LeaseLost for others, once that is durable."""
        self.check_open()
        durability = durability or self.settings.ack_durability
        if self.lock.locked():
            stand_back(self.lock)
        with self.lock:
            offsets = set(map(_OFFSET, receipts))
            held_by = list(map(self.group.leases.get, map(_OFFSET, receipts)))
            good: Sequence[Receipt] = receipts
            if None in held_by or list(map(_FENCE, held_by)) != list(map(_FENCE, receipts)):
                good = [receipt for receipt in receipts if held(self.group, receipt)]
                offsets = set(map(_OFFSET, good))
            leases = list(filter(None, held_by))
            appended = self._ack(offsets, leases, durability) if good else self.journal.append((), durability)
            lost = () if len(good) == len(receipts) else set(receipts).difference(good)
            refused = self._lost(sorted(lost, key=_OFFSET)) if lost else None
        return Pending(appended=appended, refused=refused)

    def ack_taken(self, taken: Sequence[Delivered], durability: Durability | None = None) -> Pending:
        """Fast form of `ack` for messages received together: usually with unchanged leases."""
        return self.ack_leased([one.record.offset for one in taken], [one.lease for one in taken], durability)

    def ack_leased(
        self, offsets: Sequence[int], leases: Sequence[Lease], durability: Durability | None = None
    ) -> Pending:
        """Fast form of `ack` for messages with the leases under which they were received."""
        self.check_open()
        in_order = range(offsets[0], offsets[0] + len(offsets))
        distinct: Collection[int] = in_order if offsets == list(in_order) else set(offsets)
        if self.lock.locked():
            stand_back(self.lock)
        with self.lock:
            if list(map(self.group.leases.get, offsets)) == leases and len(distinct) == len(offsets):
                return Pending(appended=self._ack(distinct, leases, durability or self.settings.ack_durability))
        return self.ack(list(map(Receipt, offsets, map(_FENCE, leases))), durability)

    def _ack(self, offsets: Collection[int], leases: Sequence[Lease], durability: Durability) -> Appended:
        appended = self.commit_events([Acked(runs_of(offsets))], durability)
        self._acked.add(len(offsets))
        together = leases.count(leases[0]) == len(leases)
        leased_at_ms = [leases[0].at_ms] * len(leases) if together else [lease.at_ms for lease in leases]
        self.metrics.handle_seconds.observe_since(self._now_ns(), leased_at_ms, unit_ns=1_000_000)
        return appended

    def ack_one(self, offset: int, fence: int) -> LeaseLost | None:
        """Fused form of `ack` for one message, for acks that need no sync. Returns the error instead of raising it."""
        if self.lock.locked():
            stand_back(self.lock)
        with self.lock:
            group, keyed, tracer, now_ns = self.group, self.supply.keyed, self.tracer, self._now_ns()
            lease = group.leases.get(offset)
            if lease is None or lease.fence != fence:
                return self._lost([Receipt(offset, fence)])
            step = None if tracer is None else tracer.ack_one(offset, lease, now_ns)
            try:
                if not self._note_ack(offset, now_ns // 1_000_000):
                    self.journal.ack_one(group, offset, lease, now_ns)
                if self._journal_log.unsynced_since_ns is None:
                    self._journal_log.note_unsynced()
                group.ack_one(offset)
                if keyed is not None:
                    keyed.ack_one(offset)
                    if keyed.limited or self.waiters:
                        follow_keys(self, keyed)
            except BaseException as error:
                self._mend(error)
                raise
            self._acked.add()
            if tracer is not None and step is not None:
                tracer.written_one(step, offset)
        self._observe_handle(now_ns - lease.at_ms * 1_000_000)
        return None

    def count_next(self, most: int) -> int:
        """Number of messages to hand out, up to `most`, with those that have expired but are not yet skipped."""
        with self.lock:
            self._take_back_dropped()
            return len(self.supply.choose(0 if self.paused else most, self.moment(), look=True).offsets)

    def settle(self, command: Command, durability: Durability | None = None) -> Pending:
        """Carry out a command. Call `wait` afterwards. Raises LeaseLost if the command's receipt is not valid."""
        pending = self.settle_all([command], durability)
        if pending.refused is not None:
            raise pending.refused
        return pending

    def settle_all(self, commands: Sequence[Command], durability: Durability | None = None) -> Pending:
        """Carry out commands for distinct messages in one write; `wait` raises LeaseLost for those refused."""
        self.check_open()
        events: list[Event] = []
        refused: LeaseLost | None = None
        with self.lock:
            now = self.moment()
            for command in commands:
                try:
                    events += decide(self.group, command, self.settings, now)
                except LeaseLost as error:
                    self.metrics.lost_leases.add()
                    error.offsets = (*(() if refused is None else refused.offsets), *error.offsets)
                    refused = error
            appended = self.commit_events(events, durability or self.settings.ack_durability)
            self._after(events, now)
        return Pending(events, appended, refused)

    def wait(self, pending: Pending) -> None:
        """Wait until the change is durable, then move new dead letters. Raises LeaseLost if any receipt was refused."""
        if pending.appended is not None:
            self.journal.log.wait(pending.appended)
        if pending.buried:
            self.dead.store_dead_if_possible()
        if pending.refused is not None:
            raise pending.refused

    async def wait_async(self, pending: Pending) -> None:
        """Async version of `wait`."""
        if pending.appended is not None:
            await self.journal.log.wait_async(pending.appended)
        if pending.buried:
            await asyncio.to_thread(self.dead.store_dead_if_possible)
        if pending.refused is not None:
            raise pending.refused

    def fetch(self, offsets: Sequence[int]) -> list[Record]:
        """Return the messages at these offsets that can be read."""
        with self.lock:
            return self.read(offsets)

    def read(self, offsets: Sequence[int]) -> list[Record]:
        """Like `fetch`, for a caller that holds the lock."""
        return self.supply.load(offsets, now_ms=0).records

    def holds(self, receipt: Receipt) -> bool:
        """Whether the receipt's lease is still valid."""
        return held(self.group, receipt)

    def resume(self, receipt: Receipt) -> Delivered:
        """Return the message leased under a receipt. Raises LeaseLost, or CorruptData if it cannot be read."""
        self.check_open()
        if not self.holds(receipt):
            raise self.refusal(receipt)
        (record,) = self.fetch([receipt.offset]) or (None,)
        if record is None:
            raise CorruptData(f"message {receipt.offset} cannot be read; run `holdfast check` on {self._log.folder}")
        group = self.group
        return Delivered(record, group.leases[receipt.offset], group.attempts(receipt.offset) + 1, self)

    def id_of(self, record: Record) -> str:
        """The message's id, which is still its delayed id if it was published with a delay."""
        return id_of(self.topic, self.number, record)

    def drop(self, receipt: Receipt) -> None:
        """Return a message that was garbage-collected without being settled. Callable from a finalizer."""
        self._dropped.add(receipt)
        self.on_attention()

    def renew(self, receipt: Receipt, lease_ms: int) -> None:
        """Extend the lease automatically until the message is settled or dropped."""
        with self.lock:
            self.renewals.add(receipt, lease_ms)
            self.expect_tick(self.mono_ms() + lease_ms // 3)

    def seek(self, to: int) -> None:
        """Move the group's position: earlier messages are skipped, later ones are delivered again."""
        with self.lock:
            self._seek(to)
        self.waiters.wake_all()

    def _seek(self, to: int) -> None:
        unread = self.supply.unread_priorities()
        self.journal.past.sought(to)
        self.commit(Seek(to), durability="interval")
        self.scan(unread)
        self._floor.hold()

    def purge(self) -> int:
        """Skip all messages that are ready or waiting for a retry, durably; returns how many."""
        with self.lock:
            end, count = self._log.end, self.ready_count() + len(self.group.waiting)
            if count:
                self._seek(end)
        self.sync()
        return count

    def ready_count(self) -> int:
        """Number of ready messages that are not known to be damaged; exact if the caller holds the lock."""
        return self.group.ready_count(self._log.end, self._log.damaged())

    def refusal(self, receipt: Receipt) -> LeaseLost:
        """The error for a receipt that is no longer valid."""
        with self.lock:
            return self._lost([receipt])

    def _lost(self, receipts: Sequence[Receipt]) -> LeaseLost:
        self.metrics.lost_leases.add(len(receipts))
        return lease_lost(self.group, receipts)

    def tick(self) -> int | None:
        """Do what is due; returns in how many ms to call again."""
        ended: tuple[int | None, Snapshot | None] | None = None
        with self.lock:
            if self.supply.keyed is not None:
                follow_keys(self, self.supply.keyed)
        while ended is None:
            with self.lock:
                now = self._end_leases()
                ended = None if now is None else self._end_tick(now)
            if ended is None:  # tens of thousands may end at once while an event loop waits for the lock
                give_way()
        due_ms, snapshot = ended
        if snapshot is not None:
            self.journal.keep(snapshot)
        self.pin()
        next_ms = self.journal.log.tick()
        if self.journal.scratch.is_noting:  # since the notes were stored; maybe nobody else asks for their sync
            self.journal.log.note_unsynced()
        return soonest(due_ms, next_ms)

    def _end_leases(self) -> Moment | None:
        """Return dropped messages, renew leases, end up to _END_MOST leases and delays; None if more are due."""
        self._take_back_dropped()
        now = self.moment()
        for receipt, lease_ms in self.renewals.due(self.group, now.mono_ms):
            self.commit(Extend([receipt], lease_ms), now=now)
        events = self._carry_out(Tick(_END_MOST), now)
        ended = sum(size(event.runs) if isinstance(event, Released) else 1 for event in events)
        if ended < _END_MOST:
            return now
        self.group.forget_ended(now.wall_ms, now.mono_ms)  # or each round would scan those of all earlier rounds
        return None

    def _end_tick(self, now: Moment) -> tuple[int | None, Snapshot | None]:
        """Finish a tick; returns in how many ms more is due, and a snapshot if it is time to write one."""
        self.journal.store_notes()
        self.journal.scratch.rest()
        skipped = self._floor.skipped(forced=self.settings.retention_ignores_pins)
        if skipped:
            self.commit_events(skipped)
        self.group.deadlines.forget(now.mono_ms)
        self.group.timers.forget(now.wall_ms)
        due_ms = next_due_ms(self, now)
        self._due_mono_ms = FAR if due_ms is None else now.mono_ms + due_ms
        return due_ms, self._floor.snapshot_if_due(self.settings.snapshot_events)

    def due_ms(self) -> int | None:
        """Ms until the next lease or delay ends; None if there is none."""
        with self.lock:
            return next_due_ms(self, self.moment())

    def pin(self) -> None:
        """Let the log be trimmed up to the floor, as far as the events that raised it are on disk."""
        with self.lock:  # or a floor from before a `seek` could replace the one after it
            if not self.closed:
                self.journal.store_notes()  # or the mark would be before what raised the floor
                self._floor.pin()

    def compact(self) -> int:
        """Trim the journal up to a new snapshot; returns the number of bytes freed."""
        freed = self.save()
        self.journal.log.roll()
        freed += self.save()  # the journal is trimmed only up to the last snapshot but one
        self.bring_pin()
        return freed

    def bring_pin(self) -> None:
        """Let the log be trimmed up to the current floor."""
        self.sync()
        for _ in range(2):  # the first call applies the previous mark, the second the current one
            self.pin()

    def save(self) -> int:
        """Write a snapshot now; returns the number of journal bytes freed."""
        with self.lock:
            self.journal.store_notes()
            snapshot = self._floor.snapshot()
        return self.journal.keep(snapshot)

    def sync(self) -> None:
        """Wait until everything that happened so far is on disk."""
        with self.lock:
            self.journal.store_notes()
        self.journal.log.sync()

    def close(self) -> None:
        """End this session's leases, write a snapshot, close the journal and wake all waiters.

        Waits for a running move to the dead letters to finish.
        """
        with self.dead.between_moves():
            self.waiters.wake_all()
            try:
                with self.lock:
                    self.closed = True
                    if self.journal.log.usable:
                        self.journal.store_notes()
                        if self.group.leases:
                            self.commit(CloseGroup())
                if self.journal.events_since_snapshot and self.journal.log.usable:
                    self.save()
            except Unavailable as error:  # the only cost is a longer replay at the next start
                logger.warning("no snapshot", extra={"folder": self.journal.log.folder, "error": str(error)})
            finally:
                self.journal.close()

    def _take_back_dropped(self) -> None:
        for receipt in self._dropped.take(self.group):
            self._carry_out(Nack(receipt, self.settings.dropped_delay_ms, why=DROPPED), self.moment())

    def _carry_out(self, command: Command, now: Moment) -> Sequence[Event]:
        events = decide(self.group, command, self.settings, now)
        if events:
            self.commit_events(events)
            self._after(events, now)
        return events

    def moment(self) -> Moment:
        return Moment(self._now_ns() // 1_000_000, self._mono_ns() // 1_000_000, self.dead.end())

    def commit(self, command: Command, *, now: Moment | None = None, durability: Durability | None = None) -> Appended:
        events = decide(self.group, command, self.settings, now or self.moment())
        return self.commit_events(events, durability)

    def commit_events(self, events: Sequence[Event], durability: Durability | None = None) -> Appended:
        """Journal the events, then apply them. The caller holds the lock."""
        tracer = self.tracer
        steps = None if tracer is None else tracer.steps(events, self._now_ns())  # needs the state before the events
        try:
            appended = self.journal.append(events, durability)
            for event in events:
                self.group.apply(event)
            keyed = self.supply.keyed
            if keyed is not None:
                follow_keys(self, keyed, events)
        except BaseException as error:
            self._mend(error)
            raise
        if tracer is not None and steps is not None:
            tracer.written(steps)
        return appended

    def _mend(self, error: BaseException) -> None:
        """Rebuild the state from the journal if a signal such as Ctrl-C came between the two."""
        if not isinstance(error, HoldfastError):
            unread = self.supply.unread_priorities()
            self.journal.restore(self.group)
            self.supply.scan(unread)
            if self.supply.keyed is not None:
                self.supply.keyed.begin()

    def _after(self, events: Sequence[Event], now: Moment) -> None:
        """Count the events, wake consumers for released messages, and schedule the next tick."""
        released = sum(size(event.runs) for event in events if isinstance(event, Released))
        if released:
            self.waiters.wake(released)
        self.metrics.count_returned(events)
        if Pending(events).buried:
            self.expect_tick(now.mono_ms)
        self.expect_within(next_due_ms(self, now), now.mono_ms)

    def expect_tick(self, mono_ms: int) -> None:
        if mono_ms < self._due_mono_ms:
            self._due_mono_ms = mono_ms
            self.on_attention()

    def expect_within(self, due_ms: int | None, mono_ms: int) -> None:
        if due_ms is not None:
            self.expect_tick(mono_ms + due_ms)
