"""A group of an engine in this process, for tasks. The event loop never waits for the disk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.api.arguments import MessageOutcome, ReceiveRequest
from holdfast.api.contents import Contents
from holdfast.api.drafts import Stored, StreamRequest
from holdfast.broker.choose import give_way  # noqa: F401  threads do
from holdfast.broker.delivery import Delivery
from holdfast.broker.leases import Delivered, Pending
from holdfast.broker.metrics import Compacted, QueueStats
from holdfast.broker.samples import Samples
from holdfast.broker.tracing import TraceStep
from holdfast.broker.waiters import TaskWaiter, Waiter
from holdfast.broker.workers import Order, WorkerReport
from holdfast.delivery.events import Receipt
from holdfast.errors import LeaseLost
from holdfast.later import module
from holdfast.local.group import (
    CLAIMS_AT_ONCE,
    Claims,
    LocalGroup,
    claims_of,
    lost_texts,
    parts_of,
    require_current_async,
)
from holdfast.local.publisher import SpooledUpload
from holdfast.model import CodecName, Durability, Retained

if TYPE_CHECKING:
    from holdfast.api.listing import DeadGroup, DeadLetter, DeadLettersRequest, Found, Listed, Redriven, Where
    from holdfast.local import listing
else:  # of no use to those who only put and take
    listing = module("holdfast.local.listing")

_LISTED_AT_ONCE: Final = 64  # a way to a thread and back costs more than a message


class AsyncLocalGroupPort(LocalGroup):
    """A group's port on an engine in this process."""

    async def take(self, wanted: ReceiveRequest) -> list[Delivered]:
        """Lease ready messages, up to `wanted.count`; waits in line for the first one."""
        found = await self.take_waiting(wanted)
        return found[0][1] if len(found) == 1 else [each for _, taken in found for each in taken]

    async def take_waiting(self, wanted: ReceiveRequest) -> list[tuple[Delivery, list[Delivered]]]:
        """Lease ready messages, by partition."""
        if self.engine.store is not None:  # async only
            await self.engine.store.ready()
        found = self.take_ready(wanted)
        if found is None:
            found = await self.take_to_end(wanted)
        if not found and self.engine.store is not None:
            await require_current_async(self.engine)
        return found or await self.stand_in_line(wanted)

    async def take_to_end(
        self, wanted: ReceiveRequest, waiter: Waiter | None = None
    ) -> list[tuple[Delivery, list[Delivered]]]:
        """What is ready now, where a first look has not come to its end: others have their turn in between."""
        found = None
        while found is None:
            await self.pause()
            found = self.take_ready(wanted, waiter)
        return found

    async def stand_in_line(self, wanted: ReceiveRequest) -> list[tuple[Delivery, list[Delivered]]]:
        """Wait in line for a message."""
        if wanted.timeout_s == 0:
            return []
        deadline_ns = self.deadline_ns(wanted)
        group, waiter = self.queue_group, TaskWaiter(self.engine.world.clock, wanted.count)
        with group.in_line(waiter):
            while True:
                found = self.take_ready(wanted, waiter)  # what arrived before we lined up would not wake us
                if found is None:
                    found = await self.take_to_end(wanted, waiter)
                left_s = self.left_s(deadline_ns)
                if found or (left_s is not None and left_s <= 0):
                    return found
                await waiter.wait(left_s)
                if self.engine.store is not None:  # async only
                    await self.engine.store.ready()
                group.waiters.stand(waiter)

    async def resume(self, receipt: str) -> Delivered:
        """Return the message of a receipt. Raises LeaseLost if its lease has ended."""
        self.check_open()
        _, delivered = await asyncio.to_thread(self.queue_group.resume, receipt)
        return delivered

    async def holds(self, receipt: str) -> bool:
        """Return whether the receipt is of a delivery of this group whose lease has not ended."""
        await require_current_async(self.engine)
        return self.queue_group.holds(receipt)

    async def phase(self, taken: Delivered) -> tuple[str, int]:
        """Return the phase of a message, and when its lease or its delay ends."""
        await require_current_async(self.engine)
        return self.phase_now(taken)

    async def ack(self, taken: Sequence[Delivered], durability: Durability | None) -> None:
        """Ack messages in one call. LeaseLost names those whose lease has ended; the others are acked."""
        if self.engine.store is not None:  # async only
            await self.engine.store.ready()
        await wait_all(self._ack_all(taken, durability))

    async def nack(self, taken: Sequence[Delivered], delay_ms: int | None, error: str) -> None:
        """Return messages to the queue after a failure."""
        if self.engine.store is not None:  # async only
            await self.engine.store.ready()
        await wait_all(self._nack_all(taken, delay_ms, error))

    async def defer(self, taken: Delivered, delay_ms: int) -> None:
        """Return a message to the queue without counting an attempt."""
        if self.engine.store is not None:  # async only
            await self.engine.store.ready()
        await taken.home.wait_async(self._defer(taken, delay_ms))

    async def release(self, taken: Delivered) -> None:
        """Return a message whose handler was interrupted to the queue."""
        await self.defer(taken, 0)

    async def reject(self, taken: Delivered, reason: str) -> None:
        """Make a message a dead letter."""
        if self.engine.store is not None:  # async only
            await self.engine.store.ready()
        await taken.home.wait_async(self._reject(taken, reason))

    async def extend(self, taken: Delivered, lease_ms: int | None) -> None:
        """Restart the lease."""
        if self.engine.store is not None:  # async only
            await self.engine.store.ready()
        await taken.home.wait_async(self._extend(taken, lease_ms))

    async def settle(self, receipts: Sequence[str], outcome: MessageOutcome, durability: Durability | None) -> None:
        """Say what became of messages, by their receipts. LeaseLost names those that were lost; the others are settled.

        Each partition's messages are settled first, then all are waited for.
        """
        self.check_open()
        verb = outcome.verb
        if verb == "ack" and len(receipts) == 1 and durability is None and self.ack_receipt_now(receipts[0]):
            return
        if self.engine.store is not None:  # async only
            await self.engine.store.ready()
        claims = await self.claims(receipts)
        settled: list[tuple[Delivery, dict[Receipt, str], Pending]] = []
        for delivery, texts in claims.good.items():
            for part in parts_of(texts):
                if settled:
                    await self.pause()
                settled.append((delivery, part, self._settle_part(delivery, list(part), outcome, durability)))
        refused, lost = claims.refused, list(claims.bad)
        self.queue_group.metrics.lost_leases.add(len(lost))
        for delivery, texts, pending in settled:
            try:
                await delivery.wait_async(pending)
            except LeaseLost as error:
                refused = error
                lost += lost_texts(texts, error)
        if refused is not None:
            refused.receipts = tuple(lost)
            raise refused
        self._count_settled(verb, sum(map(len, claims.good.values())))

    async def claims(self, receipts: Sequence[str]) -> Claims:
        """What receipts prove; where they are many, others have their turn in between."""
        claims = claims_of(self.queue_group, receipts[:CLAIMS_AT_ONCE])
        for i in range(CLAIMS_AT_ONCE, len(receipts), CLAIMS_AT_ONCE):
            await self.pause()
            claims = claims.add(claims_of(self.queue_group, receipts[i : i + CLAIMS_AT_ONCE]))
        return claims

    async def pause(self) -> None:
        """Let others have their turn."""
        await asyncio.sleep(0)  # sync: give_way()

    async def load_state(self, taken: Delivered) -> tuple[Any, int]:
        """Return the state of a message and its version."""
        document = self._document(taken)
        return (None, 0) if document is None else (msgspec.json.decode(document.content), document.version)

    async def save_state(
        self, taken: Delivered, version: int, content: bytes | None, durability: Durability | None
    ) -> int:
        """Replace the state if it still has this version. Returns the new version."""
        if self.engine.store is not None:  # async only
            await self.engine.store.ready()
        await taken.home.wait_async(self._save_state(taken, version, content, durability))
        return 0 if content is None else version + 1

    async def peek(self, count: int) -> list[Contents[Any]]:
        """Return the next messages without leasing them."""
        await require_current_async(self.engine)
        return await asyncio.to_thread(self.peek_now, count)

    async def cancel(self, message_id: str) -> bool:
        """Cancel a ready or delayed message. Returns False if it is too late."""
        return await asyncio.to_thread(self.cancel_now, message_id)

    async def take_back(self, message_id: str) -> bool:
        """End the lease of a message. Returns False if nobody holds it."""
        return await asyncio.to_thread(self.take_back_now, message_id)

    async def run_now(self, message_id: str) -> bool:
        """End the delay of a message, or its wait for a retry. Returns False if it has none."""
        return await asyncio.to_thread(self.end_delay_now, message_id)

    async def history(self, message_id: str) -> list[TraceStep]:
        """Return every step of a message that is still stored."""
        await require_current_async(self.engine)
        self.check_open()
        return await asyncio.to_thread(listing.message_history, self, message_id)

    async def look_up(self, message_id: str) -> Found | None:
        """Return everything known about a message; None if it does not exist (any more)."""
        await require_current_async(self.engine)
        self.check_open()
        return await asyncio.to_thread(listing.look_up, self, message_id)

    async def oldest_ready_ns(self) -> int | None:
        """Return when the oldest ready message was published."""
        await require_current_async(self.engine)
        return await asyncio.to_thread(self.oldest_ready_ns_now)

    async def committed(self) -> dict[int, int]:
        """Return, for each partition, the offset below which every message is settled."""
        await require_current_async(self.engine)
        return self.committed_now()

    async def seek(self, to: str | None, offset: int | None, time: datetime | None, partition: int | None) -> int:
        """Move the group's position."""
        return await asyncio.to_thread(self.seek_now, to, offset, time, partition)

    def messages(self, phase: str, where: Where, limit: int | None) -> AsyncIterator[Listed[Any]]:
        """Iterate over the messages in one phase that match the condition."""
        # sync: return listing.listed(self, phase, where, limit)
        return _in_pieces(listing.listed(self, phase, where, limit))  # async only

    async def letter(self, letter_id: str) -> DeadLetter[Any]:
        """Return one dead letter."""
        await require_current_async(self.engine)
        return await asyncio.to_thread(listing.LocalLetters(self).show, letter_id)

    async def letter_id_of(self, message_id: str) -> str | None:
        """Return the id of the dead letter that a message became."""
        await require_current_async(self.engine)
        return await asyncio.to_thread(listing.LocalLetters(self).id_of, message_id)

    async def letter_groups(self, where: Where) -> list[DeadGroup]:
        """Group dead letters by reason and kind of error."""
        await require_current_async(self.engine)
        return await asyncio.to_thread(listing.LocalLetters(self).groups, where)

    async def redrive(self, request: DeadLettersRequest) -> Redriven:
        """Redrive dead letters."""
        return await asyncio.to_thread(listing.LocalLetters(self).redrive, request)

    async def purge_letters(self, request: DeadLettersRequest) -> Redriven:
        """Delete dead letters."""
        return await asyncio.to_thread(listing.LocalLetters(self).purge, request)

    async def qsize(self) -> int:
        """Return the number of ready messages."""
        await require_current_async(self.engine)
        return self.ready_now()

    async def stats(self) -> QueueStats:
        """Return the number of messages in each phase, and more."""
        await require_current_async(self.engine)
        return await asyncio.to_thread(self.stats_now)

    async def samples(self, span_ms: int) -> Samples:
        """Return the samples of this group up to now."""
        return await asyncio.to_thread(self.samples_now, span_ms)

    async def pause_group(self, reason: str) -> bool:
        """Pause the group. Returns False if it was paused already."""
        return await asyncio.to_thread(self.pause_group_now, reason)

    async def resume_group(self) -> bool:
        """Resume the group. Returns False if it was not paused."""
        return await asyncio.to_thread(self.resume_group_now)

    async def report_worker(self, report: WorkerReport) -> Order | None:
        """List a worker of this group, and return what it was told to do."""
        return self.engine.workers.report("", self.topic, self.group, report)

    async def purge(self) -> int:
        """Drop every message that is not in flight, and return how many."""
        return await asyncio.to_thread(self.purge_now)

    async def compact(self) -> Compacted:
        """Delete messages that are done."""
        return await asyncio.to_thread(self.compact_now)

    async def apply_retention(self) -> Retained:
        """Delete what the topic's retention settings no longer keep."""
        return await asyncio.to_thread(self.apply_retention_now)

    async def put_plain(self, body: bytes, durability: Durability | None) -> Stored | None:
        """Store a message without options on the fast path; returns None if that is not possible."""
        if self.view_closed:
            self.check_open()
        if self.engine.store is not None:  # async only
            await self.engine.store.ready()
        publisher = self.publisher
        began_ns = publisher.plain_since()
        if not began_ns:
            return None
        number = publisher.turn()
        appended = await publisher.partitions[number].log.append_one_async(body, durability)
        return publisher.plain_stored(number, body, appended, began_ns)

    async def put(
        self, messages: Iterable[Any], durability: Durability | None, codec: CodecName | None
    ) -> Sequence[Stored]:
        """Store bodies or NewMessages. Of those that go to one partition, all are stored or none."""
        if self.engine.store is not None:  # async only
            await self.engine.store.ready()
        publisher = self.publisher
        began_ns = publisher.mono_ns()
        if self.view_closed:
            self.check_open()
        single = publisher.write_single(messages, durability, codec)
        if single is not None:
            if single.held:
                await publisher.log(single.number).wait_async(single.appended)
            return [publisher.single_stored(single, began_ns)]
        if publisher.all_plain(messages, codec):
            number = publisher.turn()
            appended = await publisher.log(number).append_async(messages, durability=durability)  # type: ignore[arg-type]
            return publisher.plain_many(number, messages, appended, began_ns)
        self.check_open()
        parts = publisher.publish(messages, durability, codec)
        await publisher.wait_async(parts)
        return publisher.stored(parts, began_ns)

    async def upload(self, request: StreamRequest) -> Stored:
        """Store one message whose body is read from the stream."""
        self.check_open()
        return await SpooledUpload(self.engine.world, self.publisher, request).run_async()

    async def sync(self) -> None:
        """Wait until everything done so far, including acks, is on disk."""
        await asyncio.to_thread(self.engine.sync)

    async def close(self) -> None:
        """Close this view, and the folder if it was opened only for it."""
        if self.alone:
            await asyncio.to_thread(self.engine.close)
        else:
            self._close_view()


# async only: a thread looks as it goes
async def _in_pieces(found: Any) -> AsyncIterator[Listed[Any]]:
    """Messages that are looked for on a thread, some at a time."""
    some: list[Listed[Any]]
    while some := await asyncio.to_thread(list, islice(found, _LISTED_AT_ONCE)):
        for message in some:
            yield message


async def wait_all(pending: Sequence[tuple[Delivery, Pending]]) -> None:
    """Wait for what was decided in each partition, and tell of what was refused in any."""
    refused: LeaseLost | None = None
    for delivery, each in pending:
        try:
            await delivery.wait_async(each)
        except LeaseLost as error:
            refused = error
    if refused is not None:
        raise refused
