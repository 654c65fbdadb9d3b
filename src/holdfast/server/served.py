"""A group in queue mode as the server sees it: callers hold messages by their receipts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import msgspec

from holdfast.api.arguments import ReceiveRequest, check_state, wanted_of
from holdfast.api.contents import Contents, Home
from holdfast.api.drafts import Bodies, PublishRequest, Stored
from holdfast.broker.delivery import Delivery as PartitionDelivery
from holdfast.broker.engine import BrokerEngine
from holdfast.broker.folder.layout import message_id, run_receipt
from holdfast.broker.group import QueueGroup
from holdfast.broker.leases import TOKEN_CHARACTERS, Delivered
from holdfast.broker.messages import MOVED, TEXT_KEY, TOMBSTONE, original_of
from holdfast.broker.partition import Partition
from holdfast.broker.producers import KnownBatch
from holdfast.delivery.events import DEFERRED, Nack, Receipt, Save
from holdfast.delivery.group import Lease
from holdfast.errors import HoldfastError, InvalidRequest, LeaseLost
from holdfast.local.aio.broker import AsyncLocalBrokerPort
from holdfast.local.aio.group import AsyncLocalGroupPort
from holdfast.local.group import CLAIMS_AT_ONCE
from holdfast.local.publisher import Publisher
from holdfast.model import Appended, CodecName, Durability, Producer, Record, extra_bytes
from holdfast.protocol.messages import Delivery, DeliveryRun, Header, Receipts, RunReceipts, Said, State
from holdfast.server.http.messages import ANSWER_BYTES
from holdfast.server.turns import Job, Pool, other_turns
from holdfast.settings import TopicSettings

Taken: TypeAlias = list[tuple[PartitionDelivery, list[Delivered]]]
Leased: TypeAlias = list[tuple[PartitionDelivery, list[Receipt]]]

MOST_AT_ONCE: Final = 100  # messages that are handled before other tasks get a turn
_MOST_BYTES: Final = 2 * ANSWER_BYTES  # messages are taken before their size is known; what exceeds this goes back
_KEPT_REQUESTS: Final = 256  # consumers ask for the same again and again
_NO_STATE: Final = State()
_RECORD: Final = attrgetter("record")
_PLACE: Final = attrgetter("record.offset")
_FENCE: Final = attrgetter("lease.fence")
_OFFSET, _TIMESTAMP, _VALUE = (attrgetter(name) for name in ("offset", "timestamp_ns", "value"))
_LEASE, _ATTEMPT = attrgetter("lease"), attrgetter("attempt")
# What a message may have besides its value, and what it is where it has nothing.
_REST: Final = attrgetter("key", "headers", "priority", "expires_at_ms", "due_at_ms", "flags")
_NOTHING: Final = (None, (), 0, 0, 0, 0)

_giving: Final[set[asyncio.Task[None]]] = set()  # the loop holds only weak references to tasks


class ServedGroupPort(AsyncLocalGroupPort):
    """A group's port that shares the event loop fairly among callers, and among the calls of one caller."""

    async def pause(self) -> None:
        await other_turns()

    def ack_runs_now(self, runs: Sequence[RunReceipts]) -> bool:
        """Ack messages by the runs in which they were leased, in one step.

        False if this takes more: they are many, not all of them are still leased, or acks wait for a sync.
        """
        proven = [self._proven(run) for run in runs] if sum([len(run.offsets) for run in runs]) <= MOST_AT_ONCE else []
        if not proven or None in proven:
            return False
        for run, proof in zip(runs, proven, strict=True):
            if proof is not None:
                refused = proof[0].ack_leased(run.offsets, [proof[1]] * len(run.offsets)).refused
                if isinstance(refused, LeaseLost):  # their leases have ended since
                    gone = [run_receipt(run.token, proof[0].receipts.start, offset) for offset in refused.offsets]
                    refused.receipts = tuple(gone)
                    raise refused
        return True

    def _proven(self, run: RunReceipts) -> tuple[PartitionDelivery, Lease] | None:
        """Where the messages of a run are leased, all of them, and their lease; None if any is not."""
        deliveries = self.queue_group.deliveries
        delivery = deliveries[run.partition] if run.partition < len(deliveries) else None
        if delivery is None or not delivery.unhurried:
            return None
        leases = list(map(delivery.group.leases.get, run.offsets))
        lease = leases[0]
        if lease is None or leases.count(lease) != len(leases) or len(set(run.offsets)) != len(leases):
            return None
        proof = delivery.receipts.proven_run(run.token)
        if proof is None or proof.fence != lease.fence or not proof.is_of(lease.at_ms):
            return None
        return delivery, lease


async def texts_of(group: ServedGroup, given: Receipts) -> list[str]:
    """All receipts that were given, those of runs, too. Where they are many, others have their turn in between."""
    texts, made = list(given.receipts), 0
    for run in given.runs:
        start = message_id(group.topic, run.partition, 0, None)[:-1]
        for offset in run.offsets:
            made += 1
            if not made % CLAIMS_AT_ONCE:
                await group.port.pause()
            texts.append(run_receipt(run.token, start, offset))
    return texts


class ServedGroup:
    """One group of one topic. Messages stay leased to their callers when connections end."""

    def __init__(self, engine: BrokerEngine, group: QueueGroup, bodies: Bodies) -> None:
        self.port = ServedGroupPort(engine, group, bodies)
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
        """Close the port. Messages stay leased."""
        await self.port.close()

    async def take(self, count: int, lease_s: float | None, owner: str | None, wait_s: float = 0) -> Taken:
        """Lease what is ready. With `wait_s`, wait in line that long until something is."""
        wanted = wanted_at_once(count, wait_s, lease_s, owner)
        if wait_s:
            return await self.port.stand_in_line(wanted)
        ready = self.port.take_ready(wanted)
        return await self.port.take_to_end(wanted) if ready is None else ready

    async def take_more(self, found: Taken, count: int, lease_s: float | None, owner: str | None) -> None:
        """Add more ready messages to `found`, up to `count` in all and to about what one answer holds.

        Gives other tasks a turn in between. Everything in `found` is leased, even if this is cancelled.
        """
        taken, size = _extent(found)
        while MOST_AT_ONCE <= taken < count and size < ANSWER_BYTES:
            await other_turns()
            try:
                some = self.port.take_ready(wanted_at_once(count - taken, 0, lease_s, owner))
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
        """Make messages that did not reach the caller ready again at once; the attempt is not counted.

        All of them are given back even if the calling task is cancelled, as it is when its client disconnects.
        """
        await asyncio.shield(self.give_back_soon(taken))

    def give_back_soon(self, taken: Leased) -> asyncio.Task[None]:
        """Begin to give messages back. The task comes to its end whether or not anybody waits for it."""
        giving = asyncio.get_running_loop().create_task(self._give_back(taken))
        _giving.add(giving)
        giving.add_done_callback(_giving.discard)
        return giving

    async def _give_back(self, taken: Leased) -> None:
        for delivery, receipts in taken:
            for i in range(0, len(receipts), MOST_AT_ONCE):
                some = receipts[i : i + MOST_AT_ONCE]
                commands = [Nack(receipt, 0, why=DEFERRED, counted=False) for receipt in some]
                with suppress(LeaseLost):  # leased to another caller by now, or settled
                    await delivery.wait_async(delivery.settle_all(commands))
                await other_turns()

    def state(self, receipt: str) -> State:
        """The state document of a message in flight."""
        delivery, parsed = self.port.claim(receipt)
        return self.state_at(delivery, parsed.offset)

    def state_at(self, delivery: PartitionDelivery, offset: int) -> State:
        """The state document of a message."""
        document = delivery.group.documents.get(offset)
        if document is None:
            return _NO_STATE
        return State(value=msgspec.json.decode(document.content), version=document.version)

    async def save_state(
        self, receipt: str, version: int, value: Any, durability: Durability | None, content: bytes | None = None
    ) -> State:
        """Save the state document of a message in flight if its version is still `version`. None deletes it.

        `content` is the encoded value, if the caller has it already.
        """
        delivery, parsed = self.port.claim(receipt)
        content = None if value is None else document_content(value) if content is None else content
        await delivery.wait_async(self.port.save(delivery, Save(parsed, version, content), durability))
        return State(value=value, version=0 if content is None else version + 1)

    def holds(self, delivery: PartitionDelivery, receipt: Receipt) -> bool:
        return not self.port.ended and delivery.holds(receipt)

    def run(self, plain: PlainRun) -> DeliveryRun:
        """Leased messages as they are sent together."""
        delivery, lease = plain.delivery, plain.lease
        place: dict[str, Any] = {"topic": delivery.topic, "partition": delivery.number}
        terms: dict[str, Any] = {"fence": lease.fence, "holder": lease.holder, "lease_ms": lease.lease_ms}
        columns: dict[str, Any] = {
            "offsets": plain.offsets,
            "timestamps_ns": plain.timestamps_ns,
            "bodies": plain.bodies,
        }
        return DeliveryRun(**place, **columns, **terms, token=delivery.receipts.run(lease))

    def delivery(self, delivery: PartitionDelivery, delivered: Delivered, *, state: bool = False) -> Delivery:
        """A leased message as it is sent."""
        record, lease = delivered.record, delivered.lease
        receipt = delivery.receipts.text(record.offset, lease)
        if (
            type(record.value) is bytes
            and _has_only_a_body(record)
            and not (state and record.offset in delivery.group.documents)
        ):
            name = receipt[: -TOKEN_CHARACTERS - 1]  # what stands before the token is the message's id
            # No more than 15 arguments by keyword: with more, Python makes a dictionary of them first.
            return Delivery(
                id=name,
                topic=delivery.topic,
                partition=delivery.number,
                offset=record.offset,
                timestamp_ns=record.timestamp_ns,
                body=record.value,
                size=len(record.value),
                correlation_id=name,
                receipt=receipt,
                fence=lease.fence,
                attempt=delivered.attempt,
                holder=lease.holder,
                lease_ms=lease.lease_ms,
                state=_NO_STATE if state else None,
            )
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


def _has_only_a_body(record: Record) -> bool:
    """Whether a message has nothing that must be told beside its value, as most have not."""
    return not (
        record.flags
        or record.headers
        or record.priority
        or record.expires_at_ms
        or record.due_at_ms
        or record.key is not None
    )


@lru_cache(maxsize=_KEPT_REQUESTS)
def wanted_at_once(count: int, wait_s: float | None, lease_s: float | None, owner: str | None) -> ReceiveRequest:
    """A request for at most `MOST_AT_ONCE` messages; after these their size is known, and other calls get a turn."""
    wanted = wanted_of(count, wait_s, lease_s, owner, detached=True)
    return msgspec.structs.replace(wanted, count=MOST_AT_ONCE) if wanted.count > MOST_AT_ONCE else wanted


def receipts_of(taken: Taken) -> Leased:
    """The receipts of messages, without the messages."""
    leased: Leased = []
    for delivery, delivered in taken:
        leased.append((delivery, list(map(Receipt, map(_PLACE, delivered), map(_FENCE, delivered)))))
    return leased


def _extent(taken: Taken) -> tuple[int, int]:
    """The number of messages, and their approximate size in an answer."""
    count = sum(len(delivered) for _, delivered in taken)
    return count, sum(answer_bytes(delivery, each) for delivery, delivered in taken for each in delivered)


def answer_bytes(delivery: PartitionDelivery, delivered: Delivered) -> int:
    """The approximate size of a message in an answer. Bodies too large to be sent inline do not count."""
    record = delivered.record
    size = len(record.value) if type(record.value) is bytes else 0
    if record.key is not None or record.headers:
        size += extra_bytes(record)
    document = delivery.group.documents.get(record.offset)
    return size if document is None else size + len(document.content)


class PlainRun(NamedTuple):
    """Messages of one partition that were leased together and have nothing but their bodies, each in its place."""

    delivery: PartitionDelivery
    lease: Lease
    offsets: list[int]
    timestamps_ns: list[int]
    bodies: list[bytes]


def plain_runs(found: Taken) -> tuple[list[PlainRun], int] | None:
    """Messages as runs, and their size; None if they must be sent one by one, or are too large for one answer."""
    runs, size = [], 0
    for delivery, taken in found:
        records, lease, documents = list(map(_RECORD, taken)), taken[0].lease, delivery.group.documents
        count = len(records)
        if list(map(_LEASE, taken)).count(lease) != count or list(map(_ATTEMPT, taken)).count(1) != count:
            return None
        if list(map(_REST, records)).count(_NOTHING) != count:
            return None
        offsets, bodies = list(map(_OFFSET, records)), list(map(_VALUE, records))
        if set(map(type, bodies)) != {bytes} or (documents and not documents.keys().isdisjoint(offsets)):
            return None
        size += sum(map(len, bodies))
        runs.append(PlainRun(delivery, lease, offsets, list(map(_TIMESTAMP, records)), bodies))
    return (runs, size) if size <= _MOST_BYTES else None


def within(found: Taken, most_bytes: int = _MOST_BYTES) -> tuple[Taken, Taken, int]:
    """Split messages into those that fit into one answer, at least one, and the rest; also returns the size."""
    kept: Taken = []
    left: Taken = []
    size = 0
    for delivery, taken in found:
        count = 0
        for each in taken if not left else ():
            more = answer_bytes(delivery, each)
            if size and size + more > most_bytes:
                break
            size += more
            count += 1
        if count:
            kept.append((delivery, taken[:count]))
        if count < len(taken):
            left.append((delivery, taken[count:]))
    return kept, left, size


def document_content(value: Any) -> bytes:
    """Encode a document for storage. Raises InvalidRequest or MessageTooLarge if it cannot be stored."""
    try:
        content = msgspec.json.encode(value)
        msgspec.msgpack.encode(msgspec.json.decode(content))  # it is sent in both
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise InvalidRequest(f"the state cannot be saved: {error}. Use only values that JSON can hold") from None
    check_state(content)
    return content


def said(home: Home, record: Record) -> Said:
    """A message as it is sent, leased or not."""
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
    else:  # too large to be sent inline: the client fetches the payload
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


# Storing messages: small calls on the event loop, large ones on a thread.
#
# While a large call is being stored in a topic, small calls to that topic use the threads too. On the event loop they
# would wait for a partition's lock, and every other caller with them.

_MANY: Final = 1_000
_LARGE_BYTES: Final = 256 * 1024
_HEADER_BYTES: Final = 64  # the approximate cost of a header

_Result = TypeVar("_Result")


class ServedPublishing:
    """Stores messages in the topics of a data folder."""

    def __init__(self, port: AsyncLocalBrokerPort, pool: Pool) -> None:
        self._port = port
        self._pool = pool
        self._busy: Counter[str] = Counter()  # topics with large calls in progress
        self._under_way: set[asyncio.Task[Any]] = set()

    async def publish(
        self,
        topic: str,
        messages: list[Any],
        *,
        partition: int | None,
        durability: Durability | None,
        codec: CodecName | None,
    ) -> list[Stored]:
        """Store messages. Those of one partition are stored together or not at all."""
        if not self.takes_a_thread(topic, messages):
            if len(messages) == 1 and codec is None and type(messages[0]) is bytes:
                stored = await self._port.publish_plain(topic, messages[0], partition, durability)
                if stored is not None:
                    return [stored]
            return list(await self._port.publish(topic, PublishRequest(messages, partition, durability, codec)))

        async def store() -> list[Stored]:
            began_ns = self._port.mono_ns()
            engine = self._port.engine
            if not engine.is_open(topic):
                await asyncio.to_thread(engine.topic, topic)  # opening reads files
            with self._on_its_way(topic), engine.using(topic) as used:
                publisher = self._port.publisher(used)
                if publisher.all_plain(messages, codec):
                    number = publisher.turn(partition)
                    log = publisher.log(number)
                    appended = await self._aside(lambda: log.write(messages, durability=durability))
                    await log.wait_async(appended)
                    return await self._aside(lambda: list(publisher.plain_many(number, messages, appended, began_ns)))
                parts = await self._aside(
                    lambda: publisher.publish(messages, durability, codec, partition, verb="publish_many")
                )
                await publisher.wait_async(parts)
                return await self._aside(lambda: publisher.stored(parts, began_ns))

        return await self._to_its_end(store())

    def publish_now(
        self, topic: str, body: bytes, partition: int | None, durability: Durability | None
    ) -> Stored | int | None:
        """Store one plain message in one step. None if that takes more: a large call, a topic to open, a long message.

        If it must be synced, nothing is stored: returns the partition whose turn it is.
        """
        if topic in self._busy:
            return None
        used = self._port.engine.enter_open(topic)
        if used is None:
            return None
        try:
            publisher = self._port.publisher(used)
            number = publisher.turn(partition)
            stored = publisher.put_now(body, durability, None, None if len(publisher.partitions) == 1 else number)
            if stored is not None:
                return stored
            began_ns = publisher.plain_since()
            if not began_ns:
                return None
            log = publisher.log(number)
            if (durability or log.settings.durability) == "fsync":
                return number
            return publisher.plain_stored(number, body, log.append_one(body, durability), began_ns)
        finally:
            used.users -= 1

    def takes_a_thread(self, topic: str, messages: list[Any]) -> bool:
        """Whether these messages are stored on a thread: they are many, or a large call is in progress."""
        return topic in self._busy or is_large(messages)

    async def append(
        self,
        topic: str,
        partition: Partition,
        publisher: Publisher,
        messages: list[Any],
        producer: Producer,
        durability: Durability | None,
        codec: CodecName | None,
    ) -> tuple[Appended, KnownBatch | None]:
        """Store a producer's messages in a partition. Returns the known batch if they were stored before."""

        def write() -> tuple[Appended, KnownBatch | None]:
            return append_to(partition, publisher, messages, producer, durability, codec)

        async def store() -> tuple[Appended, KnownBatch | None]:
            with self._on_its_way(topic):
                appended, known = await self._aside(write)
            await partition.log.wait_async(appended)
            return appended, known

        if self.takes_a_thread(topic, messages):
            return await self._to_its_end(store())
        appended, known = write()
        await partition.log.wait_async(appended)
        return appended, known

    async def settle(self) -> None:
        """Return when everything in progress is stored. Called before the folder is closed."""
        while self._under_way:
            await asyncio.wait(self._under_way)

    @contextmanager
    def _on_its_way(self, topic: str) -> Iterator[None]:
        self._busy[topic] += 1
        try:
            yield
        finally:
            self._busy[topic] -= 1
            if not self._busy[topic]:
                del self._busy[topic]

    async def _aside(self, work: Callable[[], _Result]) -> _Result:
        def run(_: Job) -> _Result:
            return work()

        return await self._pool.run(run)

    async def _to_its_end(self, storing: Coroutine[Any, Any, _Result]) -> _Result:
        """Finish storing even if the caller disconnects: what is written must be synced, and its waiters woken."""
        task = asyncio.get_running_loop().create_task(storing)
        self._under_way.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as retrieved: the caller got it, or is gone


def append_to(
    partition: Partition,
    publisher: Publisher,
    messages: list[Any],
    producer: Producer,
    durability: Durability | None,
    codec: CodecName | None,
) -> tuple[Appended, KnownBatch | None]:
    """Append a producer's messages. Returns the known batch if they were stored before."""
    if len(messages) == 1 and publisher.all_plain(messages, codec):  # nearly all calls
        chosen = partition.log.chosen(durability)
        offset = partition.append_one(messages[0], producer, chosen)
        if offset >= 0:
            publisher.count(messages)
            return Appended(offset, offset + 1, chosen), None
    batch = publisher.batch(messages, codec)
    appended, known = partition.append(batch, producer, durability=durability, codec=codec)
    if known is None:
        publisher.count(batch)
    return appended, known


def is_large(messages: list[Any]) -> bool:
    """Whether storing these messages takes long enough to need a thread."""
    if len(messages) > _MANY:
        return True
    if len(messages) == 1 and type(messages[0]) is bytes:  # nearly all calls
        return len(messages[0]) > _LARGE_BYTES
    size = 0
    for message in messages:
        if type(message) is bytes:
            size += len(message)
        else:
            size += len(message.body or b"") + _HEADER_BYTES * len(message.headers or ())
    return size > _LARGE_BYTES
