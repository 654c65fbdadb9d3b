# Generated from aio/group.py by tools/sync.py: do not edit it, edit that one and run "make sync".
"""A group of an engine in this process, for threads. The event loop never waits for the disk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.api.arguments import MessageOutcome, ReceiveRequest
from holdfast.api.contents import Contents
from holdfast.api.drafts import Stored, StreamRequest
from holdfast.broker.choose import give_way
from holdfast.broker.delivery import Delivery
from holdfast.broker.leases import Delivered, Pending
from holdfast.broker.metrics import Compacted, QueueStats
from holdfast.broker.samples import Samples
from holdfast.broker.tracing import TraceStep
from holdfast.broker.waiters import ThreadWaiter, Waiter
from holdfast.broker.workers import Order, WorkerReport
from holdfast.delivery.events import Receipt
from holdfast.errors import LeaseLost
from holdfast.later import module
from holdfast.local.group import CLAIMS_AT_ONCE, Claims, LocalGroup, claims_of, lost_texts, parts_of, require_current
from holdfast.local.publisher import SpooledUpload
from holdfast.model import CodecName, Durability, Retained

if TYPE_CHECKING:
    from holdfast.api.listing import DeadGroup, DeadLetter, DeadLettersRequest, Found, Listed, Redriven, Where
    from holdfast.local import listing
else:  # of no use to those who only put and take
    listing = module("holdfast.local.listing")

_LISTED_AT_ONCE: Final = 64  # a way to a thread and back costs more than a message


class LocalGroupPort(LocalGroup):
    """A group's port on an engine in this process."""

    def take(self, wanted: ReceiveRequest) -> list[Delivered]:
        """Lease ready messages, up to `wanted.count`; waits in line for the first one."""
        found = self.take_waiting(wanted)
        return found[0][1] if len(found) == 1 else [each for _, taken in found for each in taken]

    def take_waiting(self, wanted: ReceiveRequest) -> list[tuple[Delivery, list[Delivered]]]:
        """Lease ready messages, by partition."""
        found = self.take_ready(wanted)
        if found is None:
            found = self.take_to_end(wanted)
        if not found and self.engine.store is not None:
            require_current(self.engine)
        return found or self.stand_in_line(wanted)

    def take_to_end(
        self, wanted: ReceiveRequest, waiter: Waiter | None = None
    ) -> list[tuple[Delivery, list[Delivered]]]:
        """What is ready now, where a first look has not come to its end: others have their turn in between."""
        found = None
        while found is None:
            self.pause()
            found = self.take_ready(wanted, waiter)
        return found

    def stand_in_line(self, wanted: ReceiveRequest) -> list[tuple[Delivery, list[Delivered]]]:
        """Wait in line for a message."""
        if wanted.timeout_s == 0:
            return []
        deadline_ns = self.deadline_ns(wanted)
        group, waiter = self.queue_group, ThreadWaiter(self.engine.world.clock, wanted.count)
        with group.in_line(waiter):
            while True:
                found = self.take_ready(wanted, waiter)  # what arrived before we lined up would not wake us
                if found is None:
                    found = self.take_to_end(wanted, waiter)
                left_s = self.left_s(deadline_ns)
                if found or (left_s is not None and left_s <= 0):
                    return found
                waiter.wait(left_s)
                group.waiters.stand(waiter)

    def resume(self, receipt: str) -> Delivered:
        """Return the message of a receipt. Raises LeaseLost if its lease has ended."""
        self.check_open()
        _, delivered = self.queue_group.resume(receipt)
        return delivered

    def holds(self, receipt: str) -> bool:
        """Return whether the receipt is of a delivery of this group whose lease has not ended."""
        require_current(self.engine)
        return self.queue_group.holds(receipt)

    def phase(self, taken: Delivered) -> tuple[str, int]:
        """Return the phase of a message, and when its lease or its delay ends."""
        require_current(self.engine)
        return self.phase_now(taken)

    def ack(self, taken: Sequence[Delivered], durability: Durability | None) -> None:
        """Ack messages in one call. LeaseLost names those whose lease has ended; the others are acked."""
        wait_all(self._ack_all(taken, durability))

    def nack(self, taken: Sequence[Delivered], delay_ms: int | None, error: str) -> None:
        """Return messages to the queue after a failure."""
        wait_all(self._nack_all(taken, delay_ms, error))

    def defer(self, taken: Delivered, delay_ms: int) -> None:
        """Return a message to the queue without counting an attempt."""
        taken.home.wait(self._defer(taken, delay_ms))

    def release(self, taken: Delivered) -> None:
        """Return a message whose handler was interrupted to the queue."""
        self.defer(taken, 0)

    def reject(self, taken: Delivered, reason: str) -> None:
        """Make a message a dead letter."""
        taken.home.wait(self._reject(taken, reason))

    def extend(self, taken: Delivered, lease_ms: int | None) -> None:
        """Restart the lease."""
        taken.home.wait(self._extend(taken, lease_ms))

    def settle(self, receipts: Sequence[str], outcome: MessageOutcome, durability: Durability | None) -> None:
        """Say what became of messages, by their receipts. LeaseLost names those that were lost; the others are settled.

        Each partition's messages are settled first, then all are waited for.
        """
        self.check_open()
        verb = outcome.verb
        if verb == "ack" and len(receipts) == 1 and durability is None and self.ack_receipt_now(receipts[0]):
            return
        claims = self.claims(receipts)
        settled: list[tuple[Delivery, dict[Receipt, str], Pending]] = []
        for delivery, texts in claims.good.items():
            for part in parts_of(texts):
                if settled:
                    self.pause()
                settled.append((delivery, part, self._settle_part(delivery, list(part), outcome, durability)))
        refused, lost = claims.refused, list(claims.bad)
        self.queue_group.metrics.lost_leases.add(len(lost))
        for delivery, texts, pending in settled:
            try:
                delivery.wait(pending)
            except LeaseLost as error:
                refused = error
                lost += lost_texts(texts, error)
        if refused is not None:
            refused.receipts = tuple(lost)
            raise refused
        self._count_settled(verb, sum(map(len, claims.good.values())))

    def claims(self, receipts: Sequence[str]) -> Claims:
        """What receipts prove; where they are many, others have their turn in between."""
        claims = claims_of(self.queue_group, receipts[:CLAIMS_AT_ONCE])
        for i in range(CLAIMS_AT_ONCE, len(receipts), CLAIMS_AT_ONCE):
            self.pause()
            claims = claims.add(claims_of(self.queue_group, receipts[i : i + CLAIMS_AT_ONCE]))
        return claims

    def pause(self) -> None:
        """Let others have their turn."""
        give_way()

    def load_state(self, taken: Delivered) -> tuple[Any, int]:
        """Return the state of a message and its version."""
        document = self._document(taken)
        return (None, 0) if document is None else (msgspec.json.decode(document.content), document.version)

    def save_state(self, taken: Delivered, version: int, content: bytes | None, durability: Durability | None) -> int:
        """Replace the state if it still has this version. Returns the new version."""
        taken.home.wait(self._save_state(taken, version, content, durability))
        return 0 if content is None else version + 1

    def peek(self, count: int) -> list[Contents[Any]]:
        """Return the next messages without leasing them."""
        require_current(self.engine)
        return self.peek_now(count)

    def cancel(self, message_id: str) -> bool:
        """Cancel a ready or delayed message. Returns False if it is too late."""
        return self.cancel_now(message_id)

    def take_back(self, message_id: str) -> bool:
        """End the lease of a message. Returns False if nobody holds it."""
        return self.take_back_now(message_id)

    def run_now(self, message_id: str) -> bool:
        """End the delay of a message, or its wait for a retry. Returns False if it has none."""
        return self.end_delay_now(message_id)

    def history(self, message_id: str) -> list[TraceStep]:
        """Return every step of a message that is still stored."""
        require_current(self.engine)
        self.check_open()
        return listing.message_history(self, message_id)

    def look_up(self, message_id: str) -> Found | None:
        """Return everything known about a message; None if it does not exist (any more)."""
        require_current(self.engine)
        self.check_open()
        return listing.look_up(self, message_id)

    def oldest_ready_ns(self) -> int | None:
        """Return when the oldest ready message was published."""
        require_current(self.engine)
        return self.oldest_ready_ns_now()

    def committed(self) -> dict[int, int]:
        """Return, for each partition, the offset below which every message is settled."""
        require_current(self.engine)
        return self.committed_now()

    def seek(self, to: str | None, offset: int | None, time: datetime | None, partition: int | None) -> int:
        """Move the group's position."""
        return self.seek_now(to, offset, time, partition)

    def messages(self, phase: str, where: Where, limit: int | None) -> Iterator[Listed[Any]]:
        """Iterate over the messages in one phase that match the condition."""
        return listing.listed(self, phase, where, limit)

    def letter(self, letter_id: str) -> DeadLetter[Any]:
        """Return one dead letter."""
        require_current(self.engine)
        return listing.LocalLetters(self).show(letter_id)

    def letter_id_of(self, message_id: str) -> str | None:
        """Return the id of the dead letter that a message became."""
        require_current(self.engine)
        return listing.LocalLetters(self).id_of(message_id)

    def letter_groups(self, where: Where) -> list[DeadGroup]:
        """Group dead letters by reason and kind of error."""
        require_current(self.engine)
        return listing.LocalLetters(self).groups(where)

    def redrive(self, request: DeadLettersRequest) -> Redriven:
        """Redrive dead letters."""
        return listing.LocalLetters(self).redrive(request)

    def purge_letters(self, request: DeadLettersRequest) -> Redriven:
        """Delete dead letters."""
        return listing.LocalLetters(self).purge(request)

    def qsize(self) -> int:
        """Return the number of ready messages."""
        require_current(self.engine)
        return self.ready_now()

    def stats(self) -> QueueStats:
        """Return the number of messages in each phase, and more."""
        require_current(self.engine)
        return self.stats_now()

    def samples(self, span_ms: int) -> Samples:
        """Return the samples of this group up to now."""
        return self.samples_now(span_ms)

    def pause_group(self, reason: str) -> bool:
        """Pause the group. Returns False if it was paused already."""
        return self.pause_group_now(reason)

    def resume_group(self) -> bool:
        """Resume the group. Returns False if it was not paused."""
        return self.resume_group_now()

    def report_worker(self, report: WorkerReport) -> Order | None:
        """List a worker of this group, and return what it was told to do."""
        return self.engine.workers.report("", self.topic, self.group, report)

    def purge(self) -> int:
        """Drop every message that is not in flight, and return how many."""
        return self.purge_now()

    def compact(self) -> Compacted:
        """Delete messages that are done."""
        return self.compact_now()

    def apply_retention(self) -> Retained:
        """Delete what the topic's retention settings no longer keep."""
        return self.apply_retention_now()

    def put_plain(self, body: bytes, durability: Durability | None) -> Stored | None:
        """Store a message without options on the fast path; returns None if that is not possible."""
        if self.view_closed:
            self.check_open()
        publisher = self.publisher
        began_ns = publisher.plain_since()
        if not began_ns:
            return None
        number = publisher.turn()
        appended = publisher.partitions[number].log.append_one(body, durability)
        return publisher.plain_stored(number, body, appended, began_ns)

    def put(self, messages: Iterable[Any], durability: Durability | None, codec: CodecName | None) -> Sequence[Stored]:
        """Store bodies or NewMessages. Of those that go to one partition, all are stored or none."""
        publisher = self.publisher
        began_ns = publisher.mono_ns()
        if self.view_closed:
            self.check_open()
        single = publisher.write_single(messages, durability, codec)
        if single is not None:
            if single.held:
                publisher.log(single.number).wait(single.appended)
            return [publisher.single_stored(single, began_ns)]
        if publisher.all_plain(messages, codec):
            number = publisher.turn()
            appended = publisher.log(number).append(messages, durability=durability)  # type: ignore[arg-type]
            return publisher.plain_many(number, messages, appended, began_ns)
        self.check_open()
        parts = publisher.publish(messages, durability, codec)
        publisher.wait(parts)
        return publisher.stored(parts, began_ns)

    def upload(self, request: StreamRequest) -> Stored:
        """Store one message whose body is read from the stream."""
        self.check_open()
        return SpooledUpload(self.engine.world, self.publisher, request).run()

    def sync(self) -> None:
        """Wait until everything done so far, including acks, is on disk."""
        self.engine.sync()

    def close(self) -> None:
        """Close this view, and the folder if it was opened only for it."""
        if self.alone:
            self.engine.close()
        else:
            self._close_view()


def wait_all(pending: Sequence[tuple[Delivery, Pending]]) -> None:
    """Wait for what was decided in each partition, and tell of what was refused in any."""
    refused: LeaseLost | None = None
    for delivery, each in pending:
        try:
            delivery.wait(each)
        except LeaseLost as error:
            refused = error
    if refused is not None:
        raise refused
