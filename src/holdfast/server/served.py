"""A group in queue mode as a server sees it: messages go out and come back by their receipts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from holdfast.api.arguments import Wanted, check_state, error_text, gives_back, wanted_of
from holdfast.api.bodies import Bodies
from holdfast.api.contents import Contents, Home
from holdfast.api.times import duration_ms, lease_of
from holdfast.broker.delivery import Delivery as PartitionDelivery
from holdfast.broker.engine import BrokerEngine
from holdfast.broker.folder.layout import message_id
from holdfast.broker.group import QueueGroup
from holdfast.broker.leases import Delivered, Pending
from holdfast.broker.messages import MOVED, TEXT_KEY, TOMBSTONE, original_of
from holdfast.delivery.events import DEFERRED, DROPPED, Command, Nack, Receipt, Reject, Save
from holdfast.delivery.events import Extend as ExtendLease
from holdfast.errors import HoldfastError, InvalidRequest, LeaseLost
from holdfast.local.aio.group import AsyncLocalGroupPort
from holdfast.model import Durability, Record, extra_bytes
from holdfast.protocol.messages import Delivery, Header, Said, State
from holdfast.server.payload import ANSWER_BYTES
from holdfast.server.turns import other_turns
from holdfast.settings import TopicSettings

Taken: TypeAlias = list[tuple[PartitionDelivery, list[Delivered]]]
Leased: TypeAlias = list[tuple[PartitionDelivery, list[Receipt]]]

MOST_AT_ONCE: Final = 100  # messages that are handled before other tasks have their turn
CLAIMS_AT_ONCE: Final = 50  # receipts that are read before that: each is a text to take apart and a MAC to compute
_MOST_BYTES: Final = 2 * ANSWER_BYTES  # of what was taken at once, its size unseen; the rest goes back
_NO_STATE: Final = State()

_giving: Final[set[asyncio.Task[None]]] = set()  # a loop alone does not keep them alive


class Claims(NamedTuple):
    """The deliveries that receipts prove, by partition and with the text of each; and those that prove none."""

    good: dict[PartitionDelivery, dict[Receipt, str]]
    bad: list[str]
    refused: LeaseLost | None


class ServedGroup:
    """One group of one topic, for callers that come and go. Whatever they take outlives their connection."""

    def __init__(self, engine: BrokerEngine, group: QueueGroup, bodies: Bodies) -> None:
        self.port = AsyncLocalGroupPort(engine, group, bodies)
        self.queue_group = group
        self.deliveries = group.deliveries
        self.topic = group.topic.name
        self.group = group.name

    @property
    def settings(self) -> TopicSettings:
        return self.queue_group.settings

    @property
    def closed(self) -> bool:
        return self.port.closed

    async def close(self) -> None:
        """Let go of it; what was taken stays so."""
        await self.port.close()

    def take_now(self, count: int, lease_s: float | None, owner: str | None) -> Taken | None:
        """What is ready now, leased to the owner; None where there is more to look through: `take_further`."""
        return self.port.take_ready(wanted_at_once(count, 0, lease_s, owner))

    async def take_further(self, count: int, lease_s: float | None, owner: str | None) -> Taken:
        """The same to its end, with turns for other tasks in between."""
        return await self.port.take_to_end(wanted_at_once(count, 0, lease_s, owner))

    async def take(self, count: int, wait_s: float | None, lease_s: float | None, owner: str | None) -> Taken:
        """The same, after a wait in line."""
        return await self.port.stand_in_line(wanted_at_once(count, wait_s, lease_s, owner))

    async def take_more(self, found: Taken, count: int, lease_s: float | None, owner: str | None) -> None:
        """Add what else is ready, up to `count` in all and to about what one answer holds.

        With turns for other tasks in between. What is in `found` is leased, also when this is cancelled.
        """
        taken, size = _extent(found)
        while MOST_AT_ONCE <= taken < count and size < ANSWER_BYTES:
            await other_turns()
            try:
                some = self.take_now(count - taken, lease_s, owner)
            except HoldfastError:
                return  # what is leased already must reach its caller
            if not some:
                return
            found += some
            more, more_bytes = _extent(some)
            if more < min(MOST_AT_ONCE, count - taken):
                return
            taken, size = taken + more, size + more_bytes

    async def give_back(self, taken: Leased) -> None:
        """They did not reach the one who asked: ready again at once, as if they had not been touched.

        All of them, also where the call that gives them back is ended meanwhile, as one is whose client is gone.
        """
        giving = asyncio.ensure_future(self._give_back(taken))
        _giving.add(giving)
        giving.add_done_callback(_giving.discard)
        await asyncio.shield(giving)

    async def _give_back(self, taken: Leased) -> None:
        for delivery, receipts in taken:
            for i in range(0, len(receipts), MOST_AT_ONCE):
                some = receipts[i : i + MOST_AT_ONCE]
                commands = [Nack(receipt, 0, why=DEFERRED, counted=False) for receipt in some]
                with suppress(LeaseLost):  # somebody has them by now, or they are done
                    await delivery.wait_async(delivery.settle_all(commands))
                await other_turns()

    async def all_claims(self, receipts: Sequence[str]) -> Claims:
        """What receipts prove, with turns for other tasks where they are many."""
        if len(receipts) <= CLAIMS_AT_ONCE:
            return self.claims(receipts)
        good: dict[PartitionDelivery, dict[Receipt, str]] = {}
        bad: list[str] = []
        refused: LeaseLost | None = None
        for i in range(0, len(receipts), CLAIMS_AT_ONCE):
            some = self.claims(receipts[i : i + CLAIMS_AT_ONCE])
            for delivery, texts in some.good.items():
                first = good.setdefault(delivery, {})
                first.update({receipt: text for receipt, text in texts.items() if receipt not in first})
            bad += some.bad
            refused = some.refused or refused
            await other_turns()
        return Claims(good, bad, refused)

    def claims(self, receipts: Iterable[str]) -> Claims:
        """What receipts prove, each message once; InvalidRequest for a text that is no receipt of this topic."""
        good: dict[PartitionDelivery, dict[Receipt, str]] = {}
        bad: list[str] = []
        refused: LeaseLost | None = None
        for text in receipts:
            delivery, receipt = self.queue_group.proof(text)
            if receipt is None:
                bad.append(text)
            else:
                good.setdefault(delivery, {}).setdefault(receipt, text)
        if bad:  # one error for all of them: whoever makes up thousands should not have thousands made
            refused = self.queue_group.unproven(bad[-1])
        return Claims(good, bad, refused)

    async def ack(self, receipts: Sequence[str], durability: Durability | None) -> None:
        self.port.check_open()
        if len(receipts) == 1 and durability is None and self._ack_now(receipts[0]):
            return
        await self._settle_all(await self.all_claims(receipts), lambda delivery, own: delivery.ack(own, durability))

    def _ack_now(self, text: str) -> bool:
        """Ack one message by the short way; False where its receipt proves nothing, or an ack has to be waited for."""
        delivery, receipt = self.queue_group.proof(text)
        if receipt is None or not delivery.unhurried:
            return False
        refused = delivery.ack_one(receipt.offset, receipt.fence)
        if refused is not None:
            refused.receipts = (text,)
            raise refused
        return True

    async def nack(
        self,
        receipts: Sequence[str],
        delay_s: float | None,
        error: str | None,
        durability: Durability | None = None,
    ) -> None:
        delay_ms = None if delay_s is None else duration_ms(delay_s, "delay")
        text = error_text(error, self.settings.max_error_chars)
        count = await self._settle(receipts, lambda receipt: Nack(receipt, delay_ms, text), durability)
        self.queue_group.metrics.nacked.add(count)

    async def defer(self, receipts: Sequence[str], delay_s: float | None, durability: Durability | None = None) -> None:
        delay_ms = duration_ms(delay_s or 0, "delay")
        count = await self._settle(
            receipts, lambda receipt: Nack(receipt, delay_ms, why=DEFERRED, counted=False), durability
        )
        self.queue_group.metrics.deferred.add(count)

    async def drop(self, receipts: Sequence[str], delay_s: float | None, durability: Durability | None = None) -> None:
        """Whoever had them let go of them without a word: as in this process, that is a failed attempt."""
        delay_ms = self.settings.dropped_delay_ms if delay_s is None else duration_ms(delay_s, "delay")
        await self._settle(receipts, lambda receipt: Nack(receipt, delay_ms, why=DROPPED), durability)

    async def reject(self, receipts: Sequence[str], reason: str | None, durability: Durability | None = None) -> None:
        text = error_text(reason, self.settings.max_error_chars)
        count = await self._settle(receipts, lambda receipt: Reject(receipt, text), durability)
        self.queue_group.metrics.rejected.add(count)

    async def extend(
        self, receipts: Sequence[str], lease_s: float | None, durability: Durability | None = None
    ) -> None:
        if gives_back(lease_s):
            await self.defer(receipts, 0, durability)
            return
        lease_ms = self.lease_ms(lease_s)
        await self._settle(receipts, lambda receipt: ExtendLease([receipt], lease_ms), durability)

    def lease_ms(self, lease_s: float | None) -> int:
        """How long a lease is, where a call says so or not."""
        return self.settings.lease_ms if lease_s is None else lease_of(lease_s)

    async def _settle(
        self, receipts: Sequence[str], command: Callable[[Receipt], Command], durability: Durability | None
    ) -> int:
        self.port.check_open()
        claims = await self.all_claims(receipts)
        await self._settle_all(claims, lambda delivery, own: delivery.settle_all(list(map(command, own)), durability))
        return sum(map(len, claims.good.values()))

    async def _settle_all(self, claims: Claims, settle: Callable[[PartitionDelivery, list[Receipt]], Pending]) -> None:
        """Settle each partition's messages, then wait for all; the error names every receipt that was not good."""
        settled: list[tuple[PartitionDelivery, dict[Receipt, str], Pending]] = []
        for delivery, texts in claims.good.items():
            for part in _parts(texts):
                if settled:
                    await other_turns()
                settled.append((delivery, part, settle(delivery, list(part))))
        refused, lost = claims.refused, list(claims.bad)
        self.queue_group.metrics.lost_leases.add(len(lost))
        for delivery, texts, pending in settled:
            try:
                await delivery.wait_async(pending)
            except LeaseLost as error:
                refused = error
                gone = set(error.offsets) or {receipt.offset for receipt in texts}
                lost += [text for receipt, text in texts.items() if receipt.offset in gone]
        if refused is not None:
            refused.receipts = tuple(lost)
            raise refused

    def state(self, receipt: str) -> State:
        """The document that goes with a message in hand."""
        delivery, parsed = self._held(receipt)
        return self.state_at(delivery, parsed.offset)

    def state_at(self, delivery: PartitionDelivery, offset: int) -> State:
        """The document of a message."""
        document = delivery.group.documents.get(offset)
        if document is None:
            return _NO_STATE
        return State(value=msgspec.json.decode(document.content), version=document.version)

    async def save_state(
        self, receipt: str, version: int, value: Any, durability: Durability | None, content: bytes | None = None
    ) -> State:
        """Keep a document with a message in hand, if the version is still that one; None drops it.

        `content` is the value as it is stored, where somebody has made that already.
        """
        delivery, parsed = self._held(receipt)
        content = None if value is None else document_content(value) if content is None else content
        await delivery.wait_async(delivery.settle(Save(parsed, version, content), durability))
        return State(value=value, version=0 if content is None else version + 1)

    def _held(self, receipt: str) -> tuple[PartitionDelivery, Receipt]:
        self.port.check_open()
        delivery, parsed = self.queue_group.claim(receipt)
        if not delivery.holds(parsed):
            raise delivery.refusal(parsed)
        return delivery, parsed

    def holds(self, delivery: PartitionDelivery, receipt: Receipt) -> bool:
        return not self.port.ended and delivery.holds(receipt)

    def delivery(self, delivery: PartitionDelivery, delivered: Delivered, *, state: bool = False) -> Delivery:
        """A message in somebody's hands, as it is told."""
        record, lease = delivered.record, delivered.lease
        receipt = delivery.receipts.text(record.offset, lease)
        if type(record.value) is bytes and record.key is None and not record.headers and not record.flags:
            return self._plain_delivery(delivery, delivered, receipt, state=state)
        contents: Contents[bytes] = Contents(delivery, self.port.bodies, record)
        return Delivery(
            **_said(contents, record),
            receipt=receipt,
            fence=lease.fence,
            attempt=delivered.attempt,
            holder=lease.holder,
            lease_ms=lease.lease_ms,
            state=self.state_at(delivery, record.offset) if state else None,
        )

    def _plain_delivery(
        self, delivery: PartitionDelivery, delivered: Delivered, receipt: str, *, state: bool
    ) -> Delivery:
        """The same for a message that is little more than its bytes, as most are: in half the time."""
        record, lease = delivered.record, delivered.lease
        name = message_id(delivery.topic, delivery.number, record.offset, None)
        return Delivery(
            id=name,
            topic=delivery.topic,
            partition=delivery.number,
            offset=record.offset,
            timestamp_ns=record.timestamp_ns,
            body=record.value,  # type: ignore[arg-type]  # bytes, as was looked at
            size=len(record.value),
            priority=record.priority,
            expires_at_ms=record.expires_at_ms,
            due_at_ms=record.due_at_ms,
            correlation_id=name,
            receipt=receipt,
            fence=lease.fence,
            attempt=delivered.attempt,
            holder=lease.holder,
            lease_ms=lease.lease_ms,
            state=self.state_at(delivery, record.offset) if state else None,
        )


def wanted_at_once(count: int, wait_s: float | None, lease_s: float | None, owner: str | None) -> Wanted:
    """Not all at once: the first of many tell how large they are, and others have their turn behind them."""
    wanted = wanted_of(count, wait_s, lease_s, owner, detached=True)
    return msgspec.structs.replace(wanted, count=MOST_AT_ONCE) if wanted.count > MOST_AT_ONCE else wanted


def receipts_of(taken: Taken) -> Leased:
    """What proves that messages are held, without the messages."""
    return [(delivery, [each.receipt for each in delivered]) for delivery, delivered in taken]


def _parts(texts: dict[Receipt, str]) -> Iterator[dict[Receipt, str]]:
    """Receipts of one partition, as many at a time as are settled in one go."""
    pairs = iter(texts.items())
    while part := dict(islice(pairs, MOST_AT_ONCE)):
        yield part


def _extent(taken: Taken) -> tuple[int, int]:
    """How many messages these are, and about how many bytes of an answer."""
    count = sum(len(delivered) for _, delivered in taken)
    return count, sum(told_bytes(delivery, each) for delivery, delivered in taken for each in delivered)


def told_bytes(delivery: PartitionDelivery, delivered: Delivered) -> int:
    """What a message takes in an answer, or about: one that is too large to be told is left out of it."""
    record = delivered.record
    document = delivery.group.documents.get(record.offset)
    size = extra_bytes(record) + (len(record.value) if isinstance(record.value, bytes) else 0)
    return size if document is None else size + len(document.content)


def within(found: Taken) -> tuple[Taken, Taken, int]:
    """As many messages as one answer should hold, at least one; the others; and how many bytes the first are."""
    kept: Taken = []
    left: Taken = []
    size = 0
    for delivery, taken in found:
        count = 0
        for each in taken if not left else ():
            more = told_bytes(delivery, each)
            if size and size + more > _MOST_BYTES:
                break
            size += more
            count += 1
        if count:
            kept.append((delivery, taken[:count]))
        if count < len(taken):
            left.append((delivery, taken[count:]))
    return kept, left, size


def document_content(value: Any) -> bytes:
    """A document as it is stored; InvalidRequest or MessageTooLarge where it cannot be."""
    try:
        content = msgspec.json.encode(value)
        msgspec.msgpack.encode(msgspec.json.decode(content))  # it is sent in both
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise InvalidRequest(f"the state cannot be saved: {error}. It must be a value that JSON knows") from None
    check_state(content)
    return content


def said(home: Home, record: Record) -> Said:
    """A message as it is told, whoever has it."""
    return Said(**_said(Contents(home, None, record), record))  # type: ignore[arg-type]  # its bytes are all we tell


def _said(contents: Contents[Any], record: Record) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "id": contents.id,
        "topic": contents.topic,
        "partition": contents.partition,
        "offset": record.offset,
        "timestamp_ns": record.timestamp_ns,
        "body": b"",
        "size": len(record.value),
        "priority": contents.priority,
        "expires_at_ms": record.expires_at_ms,
        "due_at_ms": record.due_at_ms,
        "correlation_id": contents.correlation_id,
    }
    if isinstance(record.value, bytes):
        facts["body"] = record.value
    else:  # too large to be held here: whoever wants it asks for the payload
        facts["omitted"] = True
    if record.key is not None:
        facts["key" if record.flags & TEXT_KEY else "key_data"] = contents.key
    if record.headers:
        facts["headers"] = [
            Header(name=name, value=value) if isinstance(value, str) else Header(name=name, data=value)
            for name, value in contents.headers.pairs
        ]
    if record.flags & TOMBSTONE:
        facts["tombstone"] = True
    if record.flags & MOVED and (original := original_of(record)) is not None:
        facts["original_id"] = original.id
    return facts
