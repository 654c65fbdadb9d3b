"""A group in queue mode: any number of consumers lease messages from all partitions of a topic, in turn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import msgspec

from holdfast.broker.choose import KeyedGroup, peek
from holdfast.broker.delivery import Delivery
from holdfast.broker.folder.layout import MessagePlace, parse_message_id, parse_receipt
from holdfast.broker.leases import Delivered
from holdfast.broker.messages import check_partition
from holdfast.broker.metrics import Metrics, MetricsSnapshot
from holdfast.broker.waiters import Waiter, Waiters
from holdfast.delivery.events import Cancel, Receipt
from holdfast.delivery.group import Lease
from holdfast.delivery.keys import KeyPolicy
from holdfast.errors import Closed, HoldfastError, InvalidRequest, LeaseLost
from holdfast.model import Durability, Record, extra_bytes
from holdfast.settings import TopicSettings
from holdfast.storage.keeper import soonest

if TYPE_CHECKING:
    from holdfast.broker.topic import Topic


class QueueStats(msgspec.Struct, frozen=True, kw_only=True):
    """A queue at one moment: how many messages stand where, what they take, and what was counted since opening.

    Over several partitions all of these are sums, `start`, `end` and `floor` too.
    """

    name: str
    folder: str
    ready: int
    leased: int
    delayed: int
    dead: int
    start: int
    end: int
    floor: int
    bytes: int
    segments: int
    waiters: int
    durability: Durability
    metrics: MetricsSnapshot
    group: str = "default"
    partitions: int = 1
    damaged: int = 0


class Compacted(msgspec.Struct, frozen=True, kw_only=True):
    """What a compaction freed."""

    segments: int
    bytes: int
    journal_bytes: int


class QueueGroup:
    """One group of a topic. Safe to use from any thread."""

    def __init__(self, topic: Topic, name: str, settings: TopicSettings, metrics: Metrics) -> None:
        self.topic = topic
        self.name = name
        self.settings = settings
        self.metrics = metrics
        self.waiters = Waiters()  # one line for all partitions: whoever waits takes from any of them
        self.deliveries: list[Delivery] = []
        self.deleted = False
        self._keyed: KeyedGroup | None = None
        self._turn = 0

    def check_open(self) -> None:
        self.topic.check_open()
        if self.deleted:
            raise Closed(f"the group {self.name} on {self.topic.name} was deleted")

    def add(self, delivery: Delivery) -> None:
        """Serve one more partition."""
        delivery.waiters = self.waiters
        if self._keyed is None:
            self._keyed = KeyedGroup.of(self.settings, now_mono_ms=delivery.mono_ms(), new=delivery.group.session == 1)
        delivery.follow_keys(self._keyed)
        delivery.partition.lines.append(self.waiters)
        self.deliveries.append(delivery)  # in place: the faces look at this list
        self.waiters.wake_all()  # what has come there before could wake nobody

    def change(self, settings: TopicSettings) -> None:
        """Go on with other settings."""
        self.settings = settings
        new: KeyedGroup | None = None
        if KeyPolicy.of(settings) != (None if self._keyed is None else self._keyed.policy):
            now_mono_ms = self.deliveries[0].mono_ms()
            self._keyed = new = KeyedGroup.of(settings, now_mono_ms=now_mono_ms, new=False)
        # By new limits nobody is served before all partitions have said what they have leased, or more would be.
        # Only by new ones: whoever is served by those in use takes a delivery's lock first, and then theirs.
        with nullcontext() if new is None else new.lock:
            for delivery in self.deliveries:
                delivery.change(settings, self._keyed)

    def next_in_turn(self) -> Delivery:
        """The partition whose turn it is. No lock: two callers that get the same one do no harm."""
        self._turn = turn = (self._turn + 1) % len(self.deliveries)
        return self.deliveries[turn]

    def receive(
        self, count: int, *, lease_ms: int, holder: str, detached: bool, waiter: Waiter | None = None
    ) -> list[tuple[Delivery, list[Delivered]]] | None:
        """Up to `count` messages that are ready now, from each partition in turn, leased to the holder.

        None where there is more to look through: call again, after others had their turn.
        Those who wait come before everybody who came later: the others get what these leave.
        """
        waiters = self.waiters
        if not waiters.standing:
            return self._receive(count, lease_ms=lease_ms, holder=holder, detached=detached)
        with waiters.turn:
            if not waiters.is_first(waiter):
                count = self._left_for(waiter, count)
            if count:
                return self._receive(count, lease_ms=lease_ms, holder=holder, detached=detached)
        self._wake_next()
        return []

    @contextmanager
    def in_line(self, waiter: Waiter) -> Iterator[None]:
        """Stand in line for messages; afterwards what is left is for the next one."""
        try:
            with self.waiters.in_line(waiter):
                yield
        except GeneratorExit:
            raise  # a task was given up, perhaps by who holds a partition's lock at this moment: no look, then
        except BaseException:
            self._wake_next()
            raise
        self._wake_next()

    def _left_for(self, waiter: Waiter | None, count: int) -> int:
        """How many messages are ready, up to `count`, beyond what those before it may take."""
        if not self._count_next(1):
            return 0
        claims = self.waiters.claims_before(waiter)
        return max(self._count_next(claims + count) - claims, 0)

    def _count_next(self, most: int) -> int:
        ready = 0
        for delivery in self.deliveries:
            ready += delivery.count_next(most - ready)
            if ready == most:
                break
        return ready

    def _wake_next(self) -> None:
        """Wake the first who is asleep, if something is left for it."""
        waiter = self.waiters.first()
        if waiter is not None:
            try:
                left = self._left_for(waiter, 1)
            except HoldfastError:
                left = 1  # it will see for itself
            if left:
                self.waiters.wake()

    def _receive(
        self, count: int, *, lease_ms: int, holder: str, detached: bool
    ) -> list[tuple[Delivery, list[Delivered]]] | None:
        deliveries = self.deliveries
        if len(deliveries) == 1:
            taken = deliveries[0].receive(count, lease_ms=lease_ms, holder=holder, detached=detached)
            return [(deliveries[0], taken)] if taken else None if taken is None else []
        first = self.next_in_turn().number  # the next call begins with the next partition
        found: list[tuple[Delivery, list[Delivered]]] = []
        waiting = [*deliveries[first:], *deliveries[:first]]
        unfinished = False
        while waiting and count > 0:
            share = -(-count // len(waiting))
            left = []
            for delivery in waiting:
                some = min(share, count)
                if some == 0:
                    break
                try:
                    taken = delivery.receive(some, lease_ms=lease_ms, holder=holder, detached=detached)
                except HoldfastError:
                    if found:
                        return found  # these are leased: raised now, they would be in nobody's hands
                    raise
                if taken is None:
                    unfinished = True
                    continue
                if taken:
                    found.append((delivery, taken))
                    count -= len(taken)
                if len(taken) == some:
                    left.append(delivery)  # it may have more
            waiting = left
        return found or (None if unfinished else [])

    def peek(self, count: int, most_bytes: int | None = None) -> Iterator[tuple[Delivery, Record]]:
        """The messages that would be handed out next, of one partition after the other, up to so many bytes or so."""
        for delivery in self.deliveries:
            for record in peek(delivery, count, most_bytes) if count else ():
                count -= 1
                yield delivery, record
                if most_bytes is not None:
                    most_bytes -= len(record.value) + extra_bytes(record)
                    if most_bytes <= 0:
                        return

    def delivery(self, number: int) -> Delivery:
        """The group on one partition."""
        return self.deliveries[check_partition(number, self.topic.name, len(self.deliveries))]

    def resume(self, receipt: object) -> tuple[Delivery, Delivered]:
        """The message that a receipt stands for, if it is still held."""
        delivery, claimed = self.claim(receipt)
        return delivery, delivery.resume(claimed)

    def claim(self, receipt: object) -> tuple[Delivery, Receipt]:
        """The delivery that a receipt proves, held or not; LeaseLost where it is none of this group."""
        delivery, proven = self.proof(receipt)
        if proven is None:
            raise self.unproven(receipt)
        return delivery, proven

    def proof(self, receipt: object) -> tuple[Delivery, Receipt | None]:
        """The same; None for a receipt that proves nothing here."""
        given = parse_receipt(receipt, self.topic.name)
        delivery = self.delivery(given.partition)
        return delivery, delivery.receipts.proof(given)

    def unproven(self, receipt: object) -> LeaseLost:
        """The error for a receipt that proves nothing here."""
        given = parse_receipt(receipt, self.topic.name)
        return self.delivery(given.partition).receipts.unproven(given)

    def place(self, message: object) -> tuple[Delivery, MessagePlace]:
        """Where the message with this id is or was."""
        place = parse_message_id(message, self.topic.name)
        return self.delivery(self.topic.usable(place.partition)), place

    def cancel(self, message: object) -> bool:
        """Take back a message that nobody works on, wherever it waits; False where it is too late."""
        delivery, place = self.place(message)
        self.check_open()
        partition, offset, delayed_id = delivery.partition, place.offset, place.delayed_id
        done = False
        if delayed_id is not None:
            if not partition.was_delayed(delayed_id):
                raise InvalidRequest(f"there is no message {message}")
            done = partition.cancel_delayed(delayed_id)
            offset = None if done else partition.find_released(delayed_id, delivery.group.floor)
        if offset is not None:
            if offset >= partition.log.written_end:
                raise InvalidRequest(f"there is no message {message}")
            pending = delivery.settle(Cancel(offset))
            delivery.wait(pending)
            done = bool(pending.events)
        if done:
            self.metrics.cancelled.add()
        return done

    def purge(self, *, delayed: bool) -> int:
        """Drop all that nobody has in hand, `delayed` messages too; answers how many."""
        total = 0
        for delivery in self.deliveries:
            self.check_open()
            # Delayed ones first: what comes due meanwhile is dropped after them.
            count = delivery.partition.purge_delayed() if delayed else 0
            count += delivery.purge()
            self.metrics.cancelled.add(count)
            total += count
        return total

    def ready_count(self) -> int:
        """How many messages are ready."""
        count = 0
        for delivery in self.deliveries:
            with delivery.lock:
                count += delivery.ready_count()
        return count

    def holds(self, receipt: object) -> bool:
        """Whether the receipt proves a delivery of this group that still holds its message."""
        try:
            delivery, claimed = self.claim(receipt)
        except LeaseLost:
            return False
        return delivery.holds(claimed)

    def members(self) -> int:
        """How many are at work: holders of messages, each once, and those who wait for one."""
        leases: list[Lease] = []
        for delivery in self.deliveries:
            with delivery.lock:
                leases += delivery.group.leases.values()
        return len({lease.holder for lease in leases}) + len(self.waiters)

    def due_ms(self) -> int | None:
        """In how many ms something happens to a message by itself; upkeep of the files is not counted."""
        return soonest(*[due for each in self.deliveries for due in (each.partition.due_ms(), each.due_ms())])

    def compact(self) -> Compacted:
        """Let go of all messages that are done for every group, and of the journals behind new snapshots."""
        self.check_open()
        segments, size = self.topic.trim()
        journal_bytes = sum([delivery.compact() for delivery in self.deliveries])
        for delivery in self.deliveries:
            delivery.journal.past.forget(delivery.partition.log.start)
        return Compacted(segments=segments, bytes=size, journal_bytes=journal_bytes + self.topic.compact_dead())

    def stats(self) -> QueueStats:
        """How many messages stand where, what they take, and what was counted since opening."""
        self.check_open()
        each = [self._stats(delivery) for delivery in self.deliveries]
        total = {name: sum(stats[name] for stats in each) for name in each[0]}
        return QueueStats(
            name=self.topic.name,
            folder=self.topic.root,
            waiters=len(self.waiters),
            durability=self.settings.durability,
            metrics=self.metrics.snapshot(),
            group=self.name,
            partitions=len(self.deliveries),
            **total,
        )

    @staticmethod
    def _stats(delivery: Delivery) -> dict[str, int]:
        log, group, delayed = delivery.partition.log, delivery.group, delivery.partition.delayed
        # These read from disk: not while consumers wait for the lock.
        segments, dead = log.segments(), delivery.dead.count()
        with delivery.lock:
            return {
                "ready": delivery.ready_count(),
                "leased": len(group.leases),
                "delayed": len(group.waiting) + (0 if delayed is None else len(delayed)),
                "dead": dead,
                "start": log.start,
                "end": log.end,
                "floor": group.floor,
                "bytes": sum(segment.bytes for segment in segments),
                "segments": len(segments),
                "damaged": len(log.damaged()),
            }
