"""A group in queue mode: any number of consumers lease messages from all partitions of a topic, round robin."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from holdfast.broker.choose import KeyedGroup, peek
from holdfast.broker.delivery import Delivery
from holdfast.broker.folder.layout import MessagePlace, parse_message_id, parse_receipt
from holdfast.broker.leases import TOKEN_CHARACTERS, Delivered
from holdfast.broker.messages import check_partition
from holdfast.broker.metrics import Compacted, Metrics, QueueStats
from holdfast.broker.waiters import Waiter, Waiters
from holdfast.delivery.events import TAKEN_BACK, Cancel, Nack, Receipt, Released, runs_of
from holdfast.delivery.group import Lease
from holdfast.delivery.key_policy import KeyPolicy
from holdfast.errors import HoldfastError, InvalidRequest, LeaseLost, UnknownGroup
from holdfast.model import Pause, Record, extra_bytes
from holdfast.settings import TopicSettings
from holdfast.storage.keeper import soonest

if TYPE_CHECKING:
    from holdfast.broker.topic import Topic


class QueueGroup:
    """One group of a topic. Thread-safe."""

    def __init__(self, topic: Topic, name: str, settings: TopicSettings, metrics: Metrics) -> None:
        self.topic = topic
        self.name = name
        self.settings = settings
        self.metrics = metrics
        self.waiters = Waiters()  # one line for all partitions: a waiting consumer takes from any of them
        self.deliveries: list[Delivery] = []
        self.deleted = False
        self.paused: Pause | None = None  # kept in the group's note by its topic
        self._keyed: KeyedGroup | None = None
        self._turn = 0

    def check_open(self) -> None:
        """Raise Closed or UnknownTopic if the topic can no longer be used, UnknownGroup if the group was deleted."""
        self.topic.check_open()
        if self.deleted:
            raise UnknownGroup(
                f"the group {self.name} on {self.topic.name} was deleted: open it again to create a new one"
            )

    def add(self, delivery: Delivery) -> None:
        """Add a partition."""
        delivery.waiters = self.waiters
        if self._keyed is None:
            self._keyed = KeyedGroup.of(self.settings, now_mono_ms=delivery.mono_ms(), new=delivery.group.session == 1)
        delivery.change(self.settings, self._keyed, paused=self.paused is not None)
        delivery.partition.join(self.waiters)
        self.deliveries.append(delivery)  # in place: the API objects share this list
        self.waiters.wake_all()  # messages already in the partition have woken nobody

    def change(self, settings: TopicSettings) -> None:
        """Apply new settings."""
        self.settings = settings
        new: KeyedGroup | None = None
        if KeyPolicy.of(settings) != (None if self._keyed is None else self._keyed.policy):
            now_mono_ms = self.deliveries[0].mono_ms()
            self._keyed = new = KeyedGroup.of(settings, now_mono_ms=now_mono_ms, new=False)
        # Hold the lock of new limits until all partitions have counted their leases, or the limits would be exceeded.
        # Never that of the limits in use: a receive takes a delivery's lock first, and theirs second.
        with nullcontext() if new is None else new.lock:
            for delivery in self.deliveries:
                delivery.change(settings, self._keyed, paused=self.paused is not None)

    def pause(self, pause: Pause | None) -> None:
        """Hand out nothing from now on, or again if None. Wakes all waiters, who look whether there is something."""
        self.paused = pause
        self.change(self.settings)

    def next_in_turn(self) -> Delivery:
        """The partition whose turn it is. Needs no lock: it does no harm if two callers get the same one."""
        self._turn = turn = (self._turn + 1) % len(self.deliveries)
        return self.deliveries[turn]

    def receive(
        self, count: int, *, lease_ms: int, holder: str, detached: bool, waiter: Waiter | None = None
    ) -> list[tuple[Delivery, list[Delivered]]] | None:
        """Lease up to `count` ready messages to the holder, from the partitions in turn.

        Consumers that wait in line come first; the caller gets only what they leave.
        Returns None if a partition skipped many expired messages and has more to look through: call again.
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
        """Wait in line during the block; afterwards, wake the next waiter if there is something left."""
        try:
            with self.waiters.in_line(waiter):
                yield
        except GeneratorExit:
            raise  # an abandoned task; this thread may hold a partition's lock, so do not look for messages
        except BaseException:
            self._wake_next()
            raise
        self._wake_next()

    def _left_for(self, waiter: Waiter | None, count: int) -> int:
        """Number of ready messages, up to `count`, beyond those claimed by earlier waiters."""
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
        """Wake the first sleeping waiter if there is a message for it."""
        waiter = self.waiters.first()
        if waiter is not None:
            try:
                left = self._left_for(waiter, 1)
            except HoldfastError:
                left = 1  # let it find out
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
                        return found  # already leased: raising would lose track of them
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
        """The next ready messages, one partition after the other, until about `most_bytes`; nothing is leased."""
        for delivery in self.deliveries:
            for record in peek(delivery, count, most_bytes) if count else ():
                count -= 1
                yield delivery, record
                if most_bytes is not None:
                    most_bytes -= len(record.value) + extra_bytes(record)
                    if most_bytes <= 0:
                        return

    def delivery(self, number: int) -> Delivery:
        """The group on one partition. Raises UnknownTopic if there is no such partition."""
        return self.deliveries[check_partition(number, self.topic.name, len(self.deliveries))]

    def resume(self, receipt: object) -> tuple[Delivery, Delivered]:
        """Return the message leased under a receipt. Raises LeaseLost."""
        delivery, claimed = self.claim(receipt)
        return delivery, delivery.resume(claimed)

    def claim(self, receipt: object) -> tuple[Delivery, Receipt]:
        """Check a receipt, whether or not its lease is still valid. Raises LeaseLost if it is not of this group."""
        delivery, proven = self.proof(receipt)
        if proven is None:
            raise self.unproven(receipt)
        return delivery, proven

    def proof(self, receipt: object) -> tuple[Delivery, Receipt | None]:
        """Like `claim`, but returns None for a receipt that is not of this group."""
        current = self._current(receipt) if type(receipt) is str else None
        if current is not None:
            return current
        given = parse_receipt(receipt, self.topic.name)
        delivery = self.delivery(given.partition)
        return delivery, delivery.receipts.proof(given)

    def _current(self, text: str) -> tuple[Delivery, Receipt] | None:
        """What a receipt proves if its lease is still there and this is its very text; None if `proof` must parse it.

        The text tells only where to look. Nothing in it is believed before the whole of it is compared.
        """
        try:
            _, number, offset = text[: -TOKEN_CHARACTERS - 1].rsplit("-", 2)
            delivery = self.deliveries[int(number)]
            receipt = delivery.receipts.current(text, int(offset))
        except (ValueError, IndexError):
            return None
        return None if receipt is None else (delivery, receipt)

    def unproven(self, receipt: object) -> LeaseLost:
        """The error for a receipt that is not of this group."""
        given = parse_receipt(receipt, self.topic.name)
        return self.delivery(given.partition).receipts.unproven(given)

    def place(self, message: object) -> tuple[Delivery, MessagePlace]:
        """The partition and place of the message with this id."""
        place = parse_message_id(message, self.topic.name)
        return self.delivery(self.topic.usable(place.partition)), place

    def cancel(self, message: object) -> bool:
        """Cancel a ready or delayed message; False if it is leased, done or dead. Raises InvalidRequest if unknown."""
        delivery, place = self.place(message)
        self.check_open()
        partition, offset, delayed_id = delivery.partition, place.offset, place.delayed_id
        done = False
        if delayed_id is not None:
            if not partition.was_delayed(delayed_id):
                raise InvalidRequest(f"there is no message {message}: check the id, as `put` returned it")
            done = partition.cancel_delayed(delayed_id)
            offset = None if done else partition.find_released(delayed_id, delivery.group.floor)
        if offset is not None:
            if offset >= partition.log.written_end:
                raise InvalidRequest(f"there is no message {message}: check the id, as `put` returned it")
            pending = delivery.settle(Cancel(offset))
            delivery.wait(pending)
            done = bool(pending.events)
        if done:
            self.metrics.cancelled.add()
        return done

    def take_back(self, message: object) -> bool:
        """End the lease of a message, whoever holds it: it is ready at once, and the attempt is not counted.

        False if nobody holds it. Its holder may still finish the work, but can no longer ack the message.
        """
        delivery, offset = self._in_log(message)
        with delivery.lock:
            lease = None if offset is None else delivery.group.leases.get(offset)
        if offset is None or lease is None:
            return False
        try:
            delivery.wait(delivery.settle(Nack(Receipt(offset, lease.fence), 0, why=TAKEN_BACK, counted=False)))
        except LeaseLost:  # settled by its holder in this moment
            return False
        return True

    def run_now(self, message: object) -> bool:
        """End the delay of a message, of a new one or before a retry: it is ready at once; False if it has none."""
        delivery, place = self.place(message)
        self.check_open()
        if place.delayed_id is not None and delivery.partition.release_now(place.delayed_id):
            return True
        delivery, offset = self._in_log(message)
        with delivery.lock:
            if offset is None or offset not in delivery.group.waiting:
                return False
            appended = delivery.commit_events([Released(runs_of([offset]))])
        delivery.journal.log.wait(appended)
        self.waiters.wake()
        return True

    def _in_log(self, message: object) -> tuple[Delivery, int | None]:
        """The partition of a message, and its offset if it is in the log. Raises InvalidRequest if it never existed."""
        delivery, place = self.place(message)
        self.check_open()
        partition, offset = delivery.partition, place.offset
        if place.delayed_id is not None:
            if not partition.was_delayed(place.delayed_id):
                raise InvalidRequest(f"there is no message {message}: check the id, as `put` returned it")
            offset = partition.find_released(place.delayed_id, delivery.group.floor)
        elif offset is not None and offset >= partition.log.written_end:
            raise InvalidRequest(f"there is no message {message}: check the id, as `put` returned it")
        return delivery, offset

    def purge(self, *, delayed: bool) -> int:
        """Drop all messages that are not leased, with `delayed` also delayed ones; returns how many."""
        total = 0
        for delivery in self.deliveries:
            self.check_open()
            # Delayed messages first: those released meanwhile are then dropped with the ready ones.
            count = delivery.partition.purge_delayed() if delayed else 0
            count += delivery.purge()
            self.metrics.cancelled.add(count)
            total += count
        return total

    def ready_count(self) -> int:
        """Number of ready messages."""
        count = 0
        for delivery in self.deliveries:
            with delivery.lock:
                count += delivery.ready_count()
        return count

    def holds(self, receipt: object) -> bool:
        """Whether the receipt is of this group and its lease is still valid."""
        try:
            delivery, claimed = self.claim(receipt)
        except LeaseLost:
            return False
        return delivery.holds(claimed)

    def members(self) -> int:
        """Number of active consumers: distinct holders of messages, plus waiting ones."""
        leases: list[Lease] = []
        for delivery in self.deliveries:
            with delivery.lock:
                leases += delivery.group.leases.values()
        return len({lease.holder for lease in leases}) + len(self.waiters)

    def due_ms(self) -> int | None:
        """Ms until a lease, delay or scheduled message is due, not counting upkeep of files."""
        return soonest(*[due for each in self.deliveries for due in (each.partition.due_ms(), each.due_ms())])

    def compact(self) -> Compacted:
        """Remove messages that every group is done with, and trim the journals up to new snapshots."""
        self.check_open()
        segments, size = self.topic.trim()
        journal_bytes = sum([delivery.compact() for delivery in self.deliveries])
        for delivery in self.deliveries:
            delivery.journal.past.forget(delivery.partition.log.start)
        return Compacted(segments=segments, bytes=size, journal_bytes=journal_bytes + self.topic.compact_dead())

    def stats(self) -> QueueStats:
        """Messages by phase, their size on disk, and the metrics since opening."""
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
            paused=self.paused,
            **total,
        )

    @staticmethod
    def _stats(delivery: Delivery) -> dict[str, int]:
        log, group, delayed = delivery.partition.log, delivery.group, delivery.partition.delayed
        # These read from disk, so do not hold the lock.
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
