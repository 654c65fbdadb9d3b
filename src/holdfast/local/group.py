"""One group of an open topic: what the ports for tasks and threads share.

Waiting, for a message or for the disk, is in `local/aio` and `local/sync`. The server uses this module as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import cached_property
from itertools import islice
from typing import Any, Final, NamedTuple

from holdfast.api.arguments import MessageOutcome, ReceiveRequest
from holdfast.api.contents import Contents
from holdfast.api.drafts import Bodies, Stored, instant_ns
from holdfast.broker.delivery import Delivery
from holdfast.broker.engine import BrokerEngine
from holdfast.broker.group import QueueGroup
from holdfast.broker.leases import Delivered, Pending
from holdfast.broker.metrics import Compacted, Observer, QueueStats
from holdfast.broker.samples import Samples
from holdfast.broker.waiters import Waiter
from holdfast.codec.samples import SeriesKey
from holdfast.delivery.events import DEFERRED, DROPPED, NO_SESSION, Command, Extend, Nack, Phase, Receipt, Reject, Save
from holdfast.delivery.group import HolderState, Lease
from holdfast.errors import Closed, Conflict, DiskFailed, HoldfastError, InvalidRequest, LeaseLost, OffsetOutOfRange
from holdfast.local.publisher import Publisher
from holdfast.model import BodyKind, Durability, Pause, Retained
from holdfast.settings import TopicSettings
from holdfast.storage.log import Log


class LocalGroup:
    """One group of an open topic, which stays open for it."""

    def __init__(self, engine: BrokerEngine, group: QueueGroup, bodies: Bodies, *, alone: bool = False) -> None:
        self.engine = engine
        self.queue_group = group
        self.bodies = bodies
        self.topic = group.topic.name
        self.group = group.name
        self.deliveries = group.deliveries
        self._standing = group.waiters.standing
        self._store = engine.store
        self.alone = alone  # whether the folder is closed with it
        self.view_closed = False
        group.topic.holders.add(self)

    @property
    def place(self) -> str:
        """The data folder."""
        return self.engine.folder

    @property
    def where(self) -> str:
        """The place as part of a sentence, for error messages."""
        return f"in {self.engine.folder}"

    @property
    def settings(self) -> TopicSettings:
        return self.queue_group.settings

    @property
    def kept_bodies(self) -> BodyKind | None:
        """The kind of bodies stored with the topic, if it was opened with one."""
        return self.queue_group.topic.settings.bodies

    @property
    def closed(self) -> bool:
        group = self.queue_group  # `ended`, without a call: each message asks
        return self.view_closed or self.engine.closed or group.topic.closed or group.deleted

    @property
    def ended(self) -> bool:
        """Whether the group itself is closed, not only this view of it."""
        return self.engine.closed or self.queue_group.topic.closed or self.queue_group.deleted

    def check_open(self) -> None:
        self.engine.check_open()
        self.queue_group.check_open()
        if self.view_closed:
            raise Closed(f"this view of the group {self.group} is closed: get it again from the broker")

    def after_fork(self) -> Any:
        """Return the port for a child after a fork: a client of the parent if the folder is shared."""
        return self if self.engine.stand_in is None else self.engine.stand_in(self)

    def _close_view(self) -> None:
        if not self.view_closed:
            self.view_closed = True
            self.put_now = _nothing
            self.queue_group.topic.holders.discard(self)

    # Receiving

    def take_next(self) -> Delivered | None:
        """Return the next message on the fast path, with default arguments; None if the slow path is needed."""
        if self._standing or self.view_closed or self.engine.closed:
            return None
        if self._store is not None and not self._store.is_ready():
            return None
        deliveries = self.deliveries
        delivery = deliveries[0] if len(deliveries) == 1 else self.queue_group.next_in_turn()
        try:
            return delivery.receive_next()
        except HoldfastError:
            self.check_open()  # the more useful error is that it was closed
            raise

    def take_ready(
        self, wanted: ReceiveRequest, waiter: Waiter | None = None
    ) -> list[tuple[Delivery, list[Delivered]]] | None:
        """Lease what is ready now. Returns None if there is more to search and others should get a turn first."""
        if self.closed:
            self.check_open()
        lease_ms = self.settings.lease_ms if wanted.lease_ms is None else wanted.lease_ms
        holder = self.engine.holder if wanted.holder is None else wanted.holder
        try:
            found = self.queue_group.receive(
                wanted.count, lease_ms=lease_ms, holder=holder, detached=wanted.detached, waiter=waiter
            )
        except HoldfastError:
            self.check_open()  # the more useful error is that it was closed
            raise
        if found and wanted.renew:
            for delivery, taken in found:
                for delivered in taken:
                    delivery.renew(delivered.receipt, lease_ms)
        return found

    def deadline_ns(self, wanted: ReceiveRequest) -> int | None:
        """Return the deadline of a request by the monotonic clock; None if it has no timeout."""
        if wanted.timeout_s is None:
            return None
        return self.engine.world.clock.monotonic_ns() + round(wanted.timeout_s * 1e9)

    def left_s(self, deadline_ns: int | None) -> float | None:
        """Return the seconds left until the deadline."""
        if deadline_ns is None:
            return None
        return (deadline_ns - self.engine.world.clock.monotonic_ns()) / 1e9

    # Messages in flight

    def ack_now(self, taken: Delivered) -> bool:
        """Ack one message on the fast path; returns False if an ack needs waiting."""
        if self.engine.closed:
            self.check_open()
        delivery = taken.home
        if not delivery.unhurried or (self._store is not None and not self._store.is_ready()):
            return False
        refused = delivery.ack_one(taken.record.offset, taken.lease.fence)
        if refused is not None:
            self.queue_group.check_open()  # the more useful error is that it was deleted
            raise refused
        return True

    def ack_receipt_now(self, text: str) -> bool:
        """Ack one message by its receipt, on the fast path; returns False also if the receipt is not valid."""
        delivery, receipt = self.queue_group.proof(text)
        if receipt is None or not delivery.unhurried or (self._store is not None and not self._store.is_ready()):
            return False
        refused = delivery.ack_one(receipt.offset, receipt.fence)
        if refused is not None:
            self.queue_group.check_open()
            refused.receipts = (text,)
            raise refused
        return True

    def claim(self, text: str) -> tuple[Delivery, Receipt]:
        """Return the delivery of a receipt. Raises LeaseLost if its lease has ended."""
        self.check_open()
        delivery, receipt = self.queue_group.claim(text)
        if not delivery.holds(receipt):
            raise delivery.refusal(receipt)
        return delivery, receipt

    def _settle_part(
        self, delivery: Delivery, receipts: list[Receipt], outcome: MessageOutcome, durability: Durability | None
    ) -> Pending:
        if outcome.verb == "ack":
            return delivery.ack(receipts, durability)
        return delivery.settle_all(list(map(command_for(outcome, self.settings), receipts)), durability)

    def _count_settled(self, verb: str, count: int) -> None:
        """Count settled messages. Acks are counted where they are written; drops and extensions are not counted."""
        metrics = self.queue_group.metrics
        match verb:
            case "nack":
                metrics.nacked.add(count)
            case "defer":
                metrics.deferred.add(count)
            case "reject":
                metrics.rejected.add(count)

    def receipt(self, taken: Delivered) -> str:
        """Return the receipt of a delivery."""
        text: str = taken.home.receipts.text(taken.record.offset, taken.lease)
        return text

    def lost(self, taken: Delivered) -> bool:
        """Return whether the lease has ended."""
        return self.ended or not taken.home.holds(taken.receipt)

    def ends_ns(self, taken: Delivered) -> int:
        """Return when the lease ends, in nanoseconds since 1970; 0 if it has ended."""
        delivery = taken.home
        lease = delivery.group.leases.get(taken.record.offset)
        return 0 if lease is None else until_ms(delivery, lease) * 1_000_000

    def phase_now(self, taken: Delivered) -> tuple[str, int]:
        """Return the phase of a message, and when its lease or its delay ends."""
        group, offset = taken.home.group, taken.record.offset
        phase: str = group.phase(offset).value
        return phase, self.ends_ns(taken) // 1_000_000 if phase == "leased" else group.waiting.get(offset, 0)

    def drop(self, taken: Delivered) -> None:
        """Return a message to the queue that was dropped without being settled; called by its finalizer."""
        if self.ended:
            return
        delivery = taken.home
        if taken.lease.session == NO_SESSION:  # detached: it ends by itself, in its own time
            delivery.renewals.remove(taken.receipt)
        else:
            delivery.drop(taken.receipt)

    def state_version(self, taken: Delivered) -> int:
        """Return the version of the message's state; 0 if it has none."""
        document = self._document(taken)
        return 0 if document is None else document.version

    def _document(self, taken: Delivered) -> HolderState | None:
        document: HolderState | None = taken.home.group.documents.get(taken.record.offset)
        return document

    def _save_state(
        self, taken: Delivered, version: int, content: bytes | None, durability: Durability | None
    ) -> Pending:
        return self.save(taken.home, Save(taken.receipt, version, content), durability)

    def save(self, delivery: Delivery, command: Save, durability: Durability | None) -> Pending:
        """Save the state of a message; waiting for it raises Conflict if it has another version."""
        try:
            return delivery.settle(command, durability)
        except Conflict as error:  # it may tell of a call whose answer was lost: that must be on disk first
            written = delivery.journal.append((), durability or self.settings.ack_durability)
            return Pending(appended=written, refused=error)

    def _ack_all(self, taken: Sequence[Delivered], durability: Durability | None) -> list[tuple[Delivery, Pending]]:
        return [(delivery, delivery.ack_taken(own, durability)) for delivery, own in self._by_delivery(taken)]

    def _nack_all(self, taken: Sequence[Delivered], delay_ms: int | None, error: str) -> list[tuple[Delivery, Pending]]:
        pending = []
        for delivery, own in self._by_delivery(taken):
            # Several objects may be for one message, which can be nacked only once.
            receipts = dict.fromkeys(each.receipt for each in own)
            pending.append((delivery, delivery.settle_all([Nack(receipt, delay_ms, error) for receipt in receipts])))
            for receipt in receipts:
                delivery.renewals.remove(receipt)
            delivery.metrics.nacked.add(len(receipts))
        return pending

    def _by_delivery(self, taken: Sequence[Delivered]) -> list[tuple[Delivery, Sequence[Delivered]]]:
        """Group the messages by partition. Raises InvalidRequest if one is not of this group."""
        homes = {each.home for each in taken}
        for home in homes:
            if home not in self.deliveries:
                raise InvalidRequest(
                    "a message belongs to another queue, or was received before the queue was reopened; nothing was "
                    "changed. Settle it with the queue that it came from"
                )
        if len(homes) == 1:
            return [(homes.pop(), taken)]
        found: dict[Delivery, list[Delivered]] = {home: [] for home in homes}
        for each in taken:
            found[each.home].append(each)
        return list(found.items())

    def _defer(self, taken: Delivered, delay_ms: int) -> Pending:
        pending = self._last(taken, Nack(taken.receipt, delay_ms, why=DEFERRED, counted=False))
        taken.home.metrics.deferred.add()
        return pending

    def _reject(self, taken: Delivered, reason: str) -> Pending:
        pending = self._last(taken, Reject(taken.receipt, reason))
        taken.home.metrics.rejected.add()
        return pending

    def _last(self, taken: Delivered, command: Command) -> Pending:
        """Settle a message. After any error but LeaseLost it is still in flight."""
        try:
            pending: Pending = taken.home.settle(command)
        except LeaseLost:
            taken.home.renewals.remove(taken.receipt)
            raise
        taken.home.renewals.remove(taken.receipt)
        return pending

    def _extend(self, taken: Delivered, lease_ms: int | None) -> Pending:
        lease_ms = self.settings.lease_ms if lease_ms is None else lease_ms
        pending: Pending = taken.home.settle(Extend([taken.receipt], lease_ms))
        return pending

    # Inspecting and seeking

    def seek_now(self, to: str | None, offset: int | None, time: datetime | None, partition: int | None) -> int:
        """Move the group's position. Returns the new offset in the first partition that moved."""
        self.check_open()
        if offset is not None and partition is None and len(self.deliveries) > 1:
            raise InvalidRequest(
                f"{self.topic} has {len(self.deliveries)} partitions, each with offsets: give partition=..."
            )
        deliveries = self.deliveries if partition is None else [self.queue_group.delivery(partition)]
        targets = [(delivery, _target(delivery.partition.log, to, offset, time)) for delivery in deliveries]
        for delivery, target in targets:
            delivery.seek(target)
        return targets[0][1]

    def committed_now(self) -> dict[int, int]:
        """Return, for each partition, the offset below which every message is settled."""
        self.check_open()
        return {each.number: each.group.floor for each in self.deliveries if each.partition.lost is None}

    def oldest_ready_ns_now(self) -> int | None:
        """Return when the oldest ready message was published: each partition has its own order."""
        found = []
        for delivery in self.deliveries:
            group, log = delivery.group, delivery.partition.log
            for record in log.records(min(max(group.floor, log.start), log.end), on_damage="skip", whole=False):
                if group.phase(record.offset) is Phase.READY:
                    found.append(record.timestamp_ns)
                    break
        return min(found, default=None)

    def peek_now(self, count: int, most_bytes: int | None = None) -> list[Contents[Any]]:
        """Return the next messages without leasing them."""
        self.check_open()
        found = self.queue_group.peek(count, most_bytes)
        return [Contents(delivery, self.bodies, record) for delivery, record in found]

    def cancel_now(self, message_id: str) -> bool:
        """Cancel a ready or delayed message. Returns False if it is too late."""
        self.check_open()
        return self.queue_group.cancel(message_id)

    def take_back_now(self, message_id: str) -> bool:
        """End the lease of a message. Returns False if nobody holds it."""
        self.check_open()
        return self.queue_group.take_back(message_id)

    def end_delay_now(self, message_id: str) -> bool:
        """End the delay of a message, or its wait for a retry. Returns False if it has none."""
        self.check_open()
        return self.queue_group.run_now(message_id)

    def ready_now(self) -> int:
        """Return the number of ready messages."""
        self.check_open()
        return self.queue_group.ready_count()

    def stats_now(self) -> QueueStats:
        """Return the number of messages in each phase, and more."""
        self.check_open()
        return self.queue_group.stats()

    def samples_now(self, span_ms: int) -> Samples:
        """Return the samples of this group up to now."""
        self.check_open()
        topic = self.queue_group.topic
        key = SeriesKey("queue", topic.name, self.queue_group.name, topic.id)
        return self.engine.sampler.store.read(key, span_ms / 1000)

    def pause_group_now(self, reason: str) -> bool:
        """Pause the group. Returns False if it was paused already."""
        self.check_open()
        now_ms = self.engine.world.clock.now_ns() // 1_000_000
        return self.queue_group.topic.pause(self.queue_group, Pause(since_ms=now_ms, reason=reason))

    def resume_group_now(self) -> bool:
        """Resume the group. Returns False if it was not paused."""
        self.check_open()
        return self.queue_group.topic.pause(self.queue_group, None)

    def purge_now(self) -> int:
        """Drop every message that is not in flight, and return how many."""
        self.check_open()
        topic, engine = self.queue_group.topic, self.engine
        # Delayed messages are not in the log yet: they belong to all groups of the topic.
        alone = len(topic.groups) == 1 and not engine.streams.on(topic) and not engine.queries.on(topic)
        return self.queue_group.purge(delayed=alone)

    def compact_now(self) -> Compacted:
        """Delete messages that are done."""
        self.check_open()
        return self.queue_group.compact()

    def apply_retention_now(self) -> Retained:
        """Delete what the topic's retention settings no longer keep."""
        self.check_open()
        return self.queue_group.topic.apply_retention()

    def observe(self, observer: Observer | None) -> None:
        """Report every count and duration to this observer from now on; None removes it."""
        self.queue_group.metrics.set_observer(observer)

    # Publishing

    @cached_property
    def publisher(self) -> Publisher:
        """The publisher of the topic."""
        return Publisher(self.queue_group.topic, self.bodies, self.engine.world.clock)

    @cached_property
    def put_now(self) -> Callable[..., Stored | None]:
        """Store plain bytes, or a message, if that needs no waiting; otherwise it returns None."""
        if self.view_closed:
            return _nothing
        store, put_now = self.engine.store, self.publisher.put_now
        if store is None:
            return put_now
        return lambda *given: put_now(*given) if store.is_ready() else None


def _nothing(*_: object) -> None:
    """In place of a fast path that is closed."""


def _target(log: Log, to: str | None, offset: int | None, time: datetime | None) -> int:
    start, end = log.start, log.end
    if to is not None:
        return start if to == "start" else end
    if time is not None:
        return max(log.find_time(instant_ns(time, "time")), start)
    assert offset is not None
    if not start <= offset <= end:
        raise OffsetOutOfRange(
            f"cannot seek to {offset}: choose an offset from {start} to {end}", offset=offset, start=start, end=end
        )
    return offset


# Messages in flight by their receipts, for callers that have nothing else.


CLAIMS_AT_ONCE: Final = 50  # receipts that are read before others have a turn: each is parsed, and its MAC computed
SETTLED_AT_ONCE: Final = 100  # messages that are settled before that


class Claims(NamedTuple):
    """The deliveries of receipts, by partition and with the text of each; and the receipts that are not valid."""

    good: dict[Delivery, dict[Receipt, str]]
    bad: list[str]
    refused: LeaseLost | None

    def add(self, more: Claims) -> Claims:
        """Merge both; for a message that is in both, the first text counts."""
        for delivery, texts in more.good.items():
            first = self.good.setdefault(delivery, {})
            first.update({receipt: text for receipt, text in texts.items() if receipt not in first})
        return Claims(self.good, self.bad + more.bad, more.refused or self.refused)


def claims_of(group: QueueGroup, receipts: Iterable[str]) -> Claims:
    """Return the deliveries of receipts, each message once. Raises InvalidRequest for anything but a receipt."""
    good: dict[Delivery, dict[Receipt, str]] = {}
    bad: list[str] = []
    for text in receipts:
        delivery, receipt = group.proof(text)
        if receipt is None:
            bad.append(text)
        else:
            good.setdefault(delivery, {}).setdefault(receipt, text)
    # One error for all of them, so that thousands of forged receipts do not cost thousands of errors.
    return Claims(good, bad, group.unproven(bad[-1]) if bad else None)


def parts_of(texts: dict[Receipt, str]) -> Iterator[dict[Receipt, str]]:
    """Split the receipts of one partition into batches that are settled at once."""
    pairs = iter(texts.items())
    while part := dict(islice(pairs, SETTLED_AT_ONCE)):
        yield part


def command_for(outcome: MessageOutcome, settings: TopicSettings) -> Callable[[Receipt], Command]:
    """Return the function that makes the command for each receipt; acks do not use it."""
    delay_ms, why = outcome.delay_ms, outcome.why
    match outcome.verb:
        case "nack":
            return lambda receipt: Nack(receipt, delay_ms, why)
        case "defer":
            return lambda receipt: Nack(receipt, delay_ms or 0, why=DEFERRED, counted=False)
        case "drop":
            dropped_ms = settings.dropped_delay_ms if delay_ms is None else delay_ms
            return lambda receipt: Nack(receipt, dropped_ms, why=DROPPED)
        case "reject":
            return lambda receipt: Reject(receipt, why)
        case "extend":
            lease_ms = settings.lease_ms if outcome.lease_ms is None else outcome.lease_ms
            return lambda receipt: Extend([receipt], lease_ms)
    raise ValueError(f"an {outcome.verb} is not a command")


def lost_texts(texts: dict[Receipt, str], error: LeaseLost) -> list[str]:
    """Return the receipts that an error is about."""
    gone = set(error.offsets) or {receipt.offset for receipt in texts}
    return [text for receipt, text in texts.items() if receipt.offset in gone]


def until_ms(delivery: Delivery, lease: Lease) -> int:
    """Return when a lease ends by the wall clock; the lease itself is kept by the monotonic clock."""
    clock = delivery.clock
    return clock.now_ns() // 1_000_000 + lease.until_ms - clock.monotonic_ns() // 1_000_000


def require_current(engine: BrokerEngine) -> None:
    """Before saying how things are, be sure that nobody else can own a folder in a store by now; raises DiskFailed."""
    if engine.store is not None:
        with _explained(engine):
            engine.store.require_current()


async def require_current_async(engine: BrokerEngine) -> None:
    """Do the same without holding up the event loop."""
    if engine.store is not None:
        with _explained(engine):
            await engine.store.require_current_async()


@contextmanager
def _explained(engine: BrokerEngine) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DiskFailed(
            f"the state of {engine.folder} cannot be read: {error.strerror or error}. Check the disk, then reopen it"
        ) from error
