"""Publishing to one topic, for threads and tasks: checks messages and chooses their partitions."""

from __future__ import annotations

from collections.abc import AsyncIterable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, TypeAlias, get_args

import msgspec

from holdfast.api.drafts import (
    NO_OPTIONS,
    Bodies,
    Drafter,
    MessageOptions,
    NewMessage,
    Stored,
    StoredRun,
    StreamRequest,
    check_size_hint,
    is_read_once,
    pieces_of,
    stored_at,
)
from holdfast.broker.engine import BrokerEngine
from holdfast.broker.messages import DEDUP_ID, Draft, Publication, RoundRobin, batch_of, head_bytes, partition_for
from holdfast.broker.partition import Partition
from holdfast.broker.producers import ProducerId
from holdfast.broker.topic import Topic
from holdfast.codec.encode import message_sizes
from holdfast.env import Clock, World
from holdfast.env.process import asyncio
from holdfast.errors import HoldfastError, InvalidRequest, MessageTooLarge
from holdfast.large import Value
from holdfast.model import NO_PRODUCER, Appended, Batch, CodecName, Durability, Producer
from holdfast.storage.batches import Spool, most_plain_bytes
from holdfast.storage.log import Log

if TYPE_CHECKING:
    from holdfast.producing.parcels import Outbox, Parcel

# Messages that come as a stream: they are spooled next to their log, and stored as one message when complete.


class SpooledUpload:
    """One message that is being uploaded. Its options are checked before the first byte is read, as far as possible."""

    def __init__(self, world: World, publisher: Publisher, request: StreamRequest) -> None:
        publisher.topic.check_open()
        check_size_hint(request.size_hint)
        self._publisher = publisher
        self._request = request
        self._began_ns = world.clock.monotonic_ns()
        draft = publisher.draft(request.message, b"")
        self._number = publisher.route(draft, request.partition)
        log = self._log = publisher.log(self._number)
        head, hint = head_bytes(draft), request.size_hint
        self._spool = Spool(world, log.folder, log.settings, head_bytes=head, size_hint=hint)

    def run(self) -> Stored:
        """Read the whole stream and store it."""
        with self._spool:
            self._take(pieces_of(self._request.stream))
            parts = self._store()
        self._publisher.wait(parts)
        return self._publisher.stored(parts, self._began_ns)[0]

    async def run_async(self) -> Stored:
        """Read and store the stream from a task; threads wait for the disk and for streams that block."""
        stream = self._request.stream
        with self._spool as spool:
            if isinstance(stream, AsyncIterable):
                async for piece in stream:
                    if spool.add(piece):
                        await asyncio.to_thread(spool.write_gathered)
            else:
                await asyncio.to_thread(self._take, pieces_of(stream))
            in_memory = spool.in_memory  # then storing it waits for nothing
            parts = self._store() if in_memory else await asyncio.to_thread(self._store)
        await self._publisher.wait_async(parts)
        return self._publisher.stored(parts, self._began_ns)[0]

    def _take(self, pieces: Iterator[object]) -> None:
        for piece in pieces:
            if self._spool.add(piece):
                self._spool.write_gathered()

    def _store(self) -> list[PartitionShare]:
        durability = self._request.durability
        # Checked again, because a delay or a time to live begins now.
        draft = self._publisher.draft(self._request.message, self._spool.value())
        if (durability or self._log.settings.durability) == "fsync":
            self._spool.sync()  # before anybody waits for us
        return self._publisher.write_one(self._number, draft, durability)


_NAMED_MOST: Final = 20
_TIMED: Final = 63  # of the puts that do not wait for the disk, those whose number has none of these bits are timed
_AT_ONCE: Final = (None, None, None)  # without delay, time and dedup id


class PartitionShare(msgspec.Struct, gc=False):
    """The share of one partition in a call: which messages, and what to wait for, or the error."""

    number: int
    partition: Partition
    publication: Publication
    indexes: Sequence[int]
    error: HoldfastError | None = None


class Single(msgspec.Struct, frozen=True, gc=False):
    """A message that took the fast path: its partition, its value and its place; `held`: it waits for a sync."""

    number: int
    value: Value
    appended: Appended
    held: bool


class Publisher:
    """Publishes to one topic. Safe to use from any thread."""

    def __init__(self, topic: Topic, bodies: Bodies, clock: Clock) -> None:
        self.topic = topic
        self._bodies = bodies
        self.mono_ns, self._now_ns = clock.monotonic_ns, clock.now_ns
        self.partitions = topic.partitions
        self._turns = RoundRobin()
        metrics = topic.metrics
        self._put_seconds = metrics.put_seconds
        self._published = metrics.published
        self._published_bytes = metrics.published_bytes
        self._look()

    def _look(self) -> None:
        settings = self.topic.settings
        self._drafter = Drafter(self._bodies, settings)
        self._most_single = most_plain_bytes(settings)
        self._most_plain = self._most_single if self._drafter.plain else -1
        self._never_waits = settings.durability == "os"
        self._settings = settings  # last: a thread that sees these settings must find the new drafter

    def put_now(
        self, body: Any, durability: Durability | None, options: MessageOptions | None = None, chosen: object = None
    ) -> Stored | None:
        """Store one message without waiting: the fused form of `publish`; None if only that can do it.

        Without options, the body is plain bytes. `chosen` is the partition, if the caller has chosen one.
        """
        topic, partitions, published = self.topic, self.partitions, self._published
        if self._settings is not topic.settings:
            self._look()
        if topic.closed or not (self._never_waits if durability is None else durability == "os"):
            return None
        began_ns = 0 if published.value & _TIMED else self.mono_ns()
        if options is None and len(body) <= self._most_plain:
            number = 0 if chosen is None and len(partitions) == 1 else self.turn(chosen)
            partition, delayed_id, size = partitions[number], None, len(body)
            clock, write = self._now_ns, partition.log.write_one  # called as methods, they take longer
            offset: int | None = write(body, clock(), False)
        else:
            written = self._write_now(body, NO_OPTIONS if options is None else options, chosen)
            if written is None:
                return None
            number, partition, offset, delayed_id, size = written
        if began_ns:
            self._put_seconds.observe_ns(self.mono_ns() - began_ns)
        if delayed_id is None:
            for line in partition.lines:  # as in `Partition.wake`
                if line.standing:
                    line.wake()
        if published.relay is None:
            published.value += 1
            self._published_bytes.value += size
        else:
            published.add()
            self._published_bytes.add(size)
        return Stored(topic.name, offset, delayed_id, False, "os", number)

    def _write_now(
        self, body: Any, options: MessageOptions, chosen: object
    ) -> tuple[int, Partition, int | None, int | None, int] | None:
        """Write a message for `put_now`; returns where it is, and its size. None if it may wait, or be read once."""
        headers = options[1]
        if self._most_single < 0 or (headers is not None and type(headers) is not dict and is_read_once(headers)):
            return None
        now_ns = self._now_ns()
        fields = self._drafter.fields(body, options, now_ns)
        number = 0 if chosen is None and len(self.partitions) == 1 else self._route(fields[1], fields[6], chosen)
        partition, due_at_ms = self.partitions[number], fields[5]
        if due_at_ms and not partition.delays_at_once(due_at_ms, now_ns // 1_000_000):
            return None
        at = partition.publish_one(fields, "os", now_ns)
        if at < 0:
            return None
        size = len(fields[0])
        return (number, partition, None, at, size) if due_at_ms else (number, partition, at, None, size)

    def plain_since(self) -> int:
        """Return the monotonic time at which a plain put begins; 0 if plain bytes cannot take the fast path."""
        if self._settings is not self.topic.settings:
            self._look()
        return self.mono_ns() if self._drafter.plain and not self.topic.closed else 0

    def _is_current(self) -> bool:
        if self._settings is not self.topic.settings:
            self._look()
        return True

    def turn(self, partition: object = None) -> int:
        """Return the partition for messages without a key: the given one, or the next in turn."""
        count = len(self.partitions)
        if partition is not None:
            return self.topic.usable(partition)
        return 0 if count == 1 else self._turns.take(count, self.topic.lost)

    def log(self, number: int) -> Log:
        """Return the log of a partition."""
        return self.partitions[number].log

    def plain_stored(self, number: int, body: Any, appended: Appended, began_ns: int) -> Stored:
        """Return the result for a message that took the fast path."""
        offset, durability = appended.offset, appended.durability
        # A put that does not wait for the disk is timed only now and then: timing costs a tenth of it.
        if durability == "fsync":
            self._put_seconds.observe_ns(self.mono_ns() - began_ns)
        else:
            if not offset & _TIMED:
                self._put_seconds.observe_ns(self.mono_ns() - began_ns)
            self.partitions[number].wake()  # otherwise the sync has woken it
        self._published.add()
        self._published_bytes.add(len(body))
        return Stored(self.topic.name, offset, None, False, durability, number)

    def single_stored(self, single: Single, began_ns: int) -> Stored:
        """Return the result of `write_single`."""
        return self.plain_stored(single.number, single.value, single.appended, began_ns)

    def all_plain(self, messages: object, codec: object) -> bool:
        """Return whether these are plain bodies that can take the fast path."""
        plain = isinstance(messages, list) and set(map(type, messages)) == {bytes} and codec is None
        return plain and self._is_current() and self._drafter.plain and not self.topic.closed

    def plain_many(self, number: int, bodies: Any, appended: Appended, began_ns: int) -> StoredRun:
        """Return the results for messages that took the fast path."""
        self._put_seconds.observe_ns(self.mono_ns() - began_ns)
        self.count(bodies)
        if appended.durability != "fsync":
            self.partitions[number].wake(len(bodies))
        return StoredRun(self.topic.name, range(appended.offset, appended.next_offset), appended.durability, number)

    def write_single(
        self, messages: object, durability: Durability | None, codec: object, partition: object = None
    ) -> Single | None:
        """Write a list of one message on the fast path; returns None if `publish` has to be called instead.

        If it is held, wait for the log; then call `single_stored`.
        """
        if type(messages) is not list or len(messages) != 1 or codec is not None or self.topic.closed:
            return None
        message = messages[0]
        if type(message) is NewMessage and (
            (message.delay, message.at, message.dedup_id) != _AT_ONCE or is_read_once(message.headers)
        ):
            return None
        draft = self.draft(message)
        number = self.route(draft, partition)
        partition = self.partitions[number]
        applied = partition.log.chosen(durability)
        offset = partition.publish_one(msgspec.structs.astuple(draft), applied)
        if offset < 0:
            return None
        return Single(number, draft.value, Appended(offset, offset + 1, applied), applied == "fsync")

    def batch(self, messages: Any, codec: CodecName | None) -> list[bytes] | Batch:
        """Return messages without a delay and a dedup id as a partition appends them."""
        return messages if self.all_plain(messages, codec) else batch_of(self.drafts(messages, codec, "append"))

    def count(self, batch: list[bytes] | Batch) -> None:
        """Count messages that were written."""
        values = batch.values if isinstance(batch, Batch) else batch
        self._published.add(len(values))
        self._published_bytes.add(sum(map(len, values)))

    def publish(
        self,
        messages: Iterable[Any],
        durability: Durability | None,
        codec: Any,
        partition: object = None,
        *,
        verb: str = "put_many",
    ) -> list[PartitionShare]:
        """Write bodies or NewMessages, all that go to one partition or none. Then call `wait` and `stored`."""
        self.topic.check_open()
        drafts = self.drafts(messages, codec, verb)
        if len(self.partitions) == 1 and partition is None:
            return [self._write(0, drafts, range(len(drafts)), durability, codec)]
        routed = self._routed(drafts, partition)
        if self.topic.lost:
            for number in routed:
                self.topic.usable(number)  # refused as a whole, before others have stored their part
        if len(routed) > 1:
            self.check_sizes(drafts, routed)
        parts: list[PartitionShare] = []
        for number, indexes in routed.items():
            try:
                parts.append(self._write(number, [drafts[i] for i in indexes], indexes, durability, codec))
            except HoldfastError as error:
                if not parts:
                    raise
                # The others are written and must still be waited for: they will be readable soon.
                done = {i for part in parts for i in part.indexes}
                left = [i for i in range(len(drafts)) if i not in done]
                return [*parts, PartitionShare(number, self.partitions[number], Publication([], "fsync"), left, error)]
        return parts

    def check_sizes(self, drafts: Sequence[Draft], routed: Mapping[int, Sequence[int]]) -> None:
        """Refuse the whole call for what one partition would refuse after others have stored their share."""
        sizes, settings = message_sizes(batch_of(drafts)), self._settings
        for i, size in enumerate(sizes):
            if size > settings.max_message_bytes:
                raise MessageTooLarge(
                    f"message {i} of the call has {size} bytes with key and headers, the limit is "
                    f"{settings.max_message_bytes}; nothing was stored. Send it in parts, or raise max_message_bytes"
                )
        for number, indexes in routed.items():
            total = sum(sizes[i] for i in indexes)
            if total > settings.max_batch_bytes:
                raise MessageTooLarge(
                    f"the messages for partition {number} have {total} bytes, the limit is {settings.max_batch_bytes}; "
                    "nothing was stored. Send fewer at a time"
                )

    def wait(self, parts: Sequence[PartitionShare]) -> None:
        """Wait until each part is as durable as asked, or has failed."""
        for part in parts:
            try:
                if part.error is None:
                    part.partition.wait(part.publication)
            except HoldfastError as error:
                part.error = error

    async def wait_async(self, parts: Sequence[PartitionShare]) -> None:
        """Async version of `wait`."""
        if len(parts) == 1:
            await self._wait_async(parts[0])
        else:  # concurrently: after a cancellation, a part that nobody waits for would not be synced
            await asyncio.gather(*map(self._wait_async, parts))

    async def _wait_async(self, part: PartitionShare) -> None:
        try:
            if part.error is None:
                await part.partition.wait_async(part.publication)
        except HoldfastError as error:
            part.error = error

    def drafts(self, messages: object, codec: object, verb: str) -> list[Draft]:
        """Return the messages as they will be stored. Raises InvalidRequest if something is wrong with one."""
        if isinstance(messages, (bytes, bytearray, str, Mapping)) or not isinstance(messages, Iterable):
            raise InvalidRequest(f"{verb} takes a list of bodies or NewMessages, not {type(messages).__name__}")
        _check_codec(codec)
        return list(map(self.draft, messages))

    def draft(self, message: Any, stored: Value | None = None) -> Draft:
        """Return one message as it will be stored; `stored` is its body if that is encoded already."""
        self._is_current()
        new = message if isinstance(message, NewMessage) else NewMessage(body=message)
        return self._drafter.draft(new, self._now_ns(), stored)

    def route(self, draft: Draft, partition: object) -> int:
        """Return the partition that a message goes to."""
        return self._route(draft.key, draft.dedup_id, partition)

    def _route(self, key: bytes | None, dedup_id: bytes | None, partition: object) -> int:
        count, lost = len(self.partitions), self.topic.lost
        number = None if partition is not None or count == 1 else _by_key(key, dedup_id, count, lost)
        if number is None:
            return self.turn(partition)
        return self.topic.usable(number) if lost else number

    def write_one(self, number: int, draft: Draft, durability: Durability | None) -> list[PartitionShare]:
        """Write a message to its chosen partition. Then call `wait` and `stored`."""
        return [self._write(number, [draft], range(1), durability, None)]

    def _routed(self, drafts: Sequence[Draft], partition: object) -> dict[int, list[int]]:
        """Assign messages to partitions: by key (or dedup id), in turn, or as the caller says."""
        count = len(self.partitions)
        if partition is not None:
            return {self.topic.usable(partition): list(range(len(drafts)))}
        routed: dict[int, list[int]] = {}
        in_turn: int | None = None
        lost = self.topic.lost
        for i, draft in enumerate(drafts):
            number = _by_key(draft.key, draft.dedup_id, count, lost)
            if number is None:
                # Messages of one call stay together: they are stored in one write.
                number = in_turn = self._turns.take(count, lost) if in_turn is None else in_turn
            routed.setdefault(number, []).append(i)
        return routed

    def _write(
        self, number: int, drafts: Sequence[Draft], indexes: Sequence[int], durability: Durability | None, codec: Any
    ) -> PartitionShare:
        partition = self.partitions[number]
        publication = partition.publish(drafts, durability=durability, codec=codec)
        fresh = [draft for draft, place in zip(drafts, publication.places, strict=True) if not place.duplicate]
        self._published.add(len(fresh))
        self._published_bytes.add(sum(len(draft.value) for draft in fresh))
        return PartitionShare(number, partition, publication, indexes)

    def stored(self, parts: Sequence[PartitionShare], began_ns: int) -> list[Stored]:
        """Return the results in the order of the messages; or raise the first error, with a note of what is stored."""
        for part in parts:
            if part.error is not None:
                raise _with_note(part.error, parts)
        self._put_seconds.observe_ns(self.mono_ns() - began_ns)
        topic = self.topic.name
        answers = [
            stored_at(place, topic, part.number, part.publication.durability)
            for part in parts
            for place in part.publication.places
        ]
        if len(parts) > 1:
            found = dict(zip(chain.from_iterable(part.indexes for part in parts), answers, strict=True))
            answers = [found[i] for i in range(len(found))]
        return answers


def _by_key(key: bytes | None, dedup_id: bytes | None, count: int, lost: Container[int]) -> int | None:
    """Return the partition of a message's key or dedup id; None if it is to take its turn."""
    if key is not None:
        return partition_for(key, count)
    if dedup_id is None:
        return None
    # A dedup id is valid for the whole topic, so the partition does not matter; for a key it does.
    number = partition_for(dedup_id, count)
    return None if number in lost else number


def _with_note(error: HoldfastError, parts: Sequence[PartitionShare]) -> HoldfastError:
    """Return the error of one part, with a note on what happened to the others."""
    stored = sorted(i for part in parts if part.error is None for i in part.indexes)
    if stored:
        some = f"{', '.join(map(str, stored[:_NAMED_MOST]))}{', ...' if len(stored) > _NAMED_MOST else ''}"
        count = sum(len(part.indexes) for part in parts)
        error.add_note(
            f"{len(stored)} of {count} messages are stored, in other partitions: those at indexes {some} of the call; "
            "resend only the rest"
        )
    return error


def _check_codec(codec: object) -> None:
    if codec is not None and not (isinstance(codec, str) and codec in get_args(CodecName)):
        raise InvalidRequest(f"codec={codec!r} is not known; use one of {', '.join(get_args(CodecName))}")


# The port of a producer on an engine in this process: each parcel is an idempotent append to its partition.


# What was written, and where: while waiting, the topic may be replaced by a new one of the same name.
WrittenParcel: TypeAlias = tuple[Partition, Publication | Appended]


class LocalDrafting:
    """Checks messages against the topic's settings."""

    def __init__(self, topic: Topic, bodies: Bodies, clock: Clock) -> None:
        self._drafter = Drafter(bodies, topic.settings)
        self._clock = clock
        self.plain = self._drafter.plain
        self.most_bytes = topic.settings.max_message_bytes

    def draft(self, message: NewMessage) -> tuple[Draft, Draft, bool]:
        draft = self._drafter.draft(message, self._clock.now_ns())
        return draft, draft, bool(draft.due_at_ms) or draft.dedup_id is not None


class LocalProducerPort:
    """The port of one producer on the partitions of a data folder."""

    blocks: Final = False
    most_parcel: Final = None

    def __init__(self, engine: BrokerEngine) -> None:
        self._engine = self.backing = engine
        self.clock = engine.world.clock
        self.settings = engine.settings.producer
        self.most_partitions = engine.settings.open_partitions
        self.check_open = engine.check_open

    @property
    def place(self) -> str:
        return f"in {self._engine.folder}"

    def begin(self, name: str | None, *, resume: bool) -> ProducerId:
        return self._engine.producers().init(name, resume=resume)

    def open_topic(self, name: str) -> Topic:
        return self._engine.hold(name, self)

    def keep(self, topic: Topic) -> None:
        topic.holders.add(self)

    def release(self, topic: Topic) -> None:
        topic.holders.discard(self)

    def is_stale(self, topic: Topic) -> bool:
        return False

    def check_partition(self, topic: Topic, partition: object) -> int:
        return topic.number(partition)

    def drafting(self, topic: Topic, bodies: Bodies) -> LocalDrafting:
        return LocalDrafting(topic, bodies, self.clock)

    def check(self, identity: ProducerId) -> None:
        self._engine.producers().check(identity.id, identity.epoch)

    def is_prepared(self, outbox: Outbox) -> bool:
        return _partition(outbox).sequences is not None

    def prepare(self, outbox: Outbox) -> None:
        _partition(outbox).open_sequences()

    def next_sequence(self, outbox: Outbox, identity: ProducerId) -> int:
        return _partition(outbox).open_sequences().next_sequence(identity.id, identity.since)

    def offsets(self, outbox: Outbox, identity: ProducerId, first: int, count: int) -> Sequence[int | None]:
        return _partition(outbox).open_sequences().offsets(identity.id, first, count)

    def append(self, parcel: Parcel, identity: ProducerId | None, durability: Durability) -> WrittenParcel:
        topic: Topic = parcel.outbox.destination.topic
        producer = NO_PRODUCER
        partition = topic.partition(parcel.outbox.number)
        if identity is not None:
            producer = Producer(identity.id, identity.epoch, parcel.sequence or 0)
        appended, known = partition.append(_contents(parcel), producer, durability=durability)
        messages = len(parcel.values) - parcel.skipped
        if known is None:
            parcel.offset = appended.offset
        elif known.offsets:  # an earlier attempt stored it, whatever went wrong then
            parcel.offset = known.offsets[0]
        else:
            parcel.skipped = len(parcel.values)
        _count(topic, messages, parcel.bytes)
        return partition, appended

    def publish(self, parcel: Parcel, identity: ProducerId | None, durability: Durability) -> WrittenParcel:
        topic: Topic = parcel.outbox.destination.topic
        partition = topic.partition(parcel.outbox.number)
        if identity is not None:
            _mark(parcel, identity)
        publication = partition.publish(_drafts(parcel), durability=durability)
        parcel.places = publication.places
        _count(topic, sum(not place.duplicate for place in publication.places), parcel.bytes)
        return partition, publication

    def written(self, parcel: Parcel, durability: Durability) -> WrittenParcel:
        partition = _partition(parcel.outbox)
        return partition, Appended(0, partition.log.written_end, durability)

    def wait(self, waiting: WrittenParcel) -> None:
        partition, what = waiting
        if isinstance(what, Publication):
            partition.wait(what)
        else:
            partition.log.wait(what)

    async def wait_async(self, waiting: WrittenParcel) -> None:
        partition, what = waiting
        if isinstance(what, Publication):
            await partition.wait_async(what)
        else:
            await partition.log.wait_async(what)


def _partition(outbox: Outbox) -> Partition:
    topic: Topic = outbox.destination.topic
    return topic.partition(outbox.number)


def _count(topic: Topic, messages: int, size: int) -> None:
    topic.metrics.published.add(messages)
    topic.metrics.published_bytes.add(size)


def _contents(parcel: Parcel) -> Sequence[bytes] | Batch:
    """Return what is to be stored: everything that was not skipped."""
    if parcel.rest:
        return batch_of(_drafts(parcel))
    start, end = parcel.skipped, len(parcel.values)
    values = parcel.values[start:] if start else parcel.values
    if parcel.keys is None:
        return values
    flags = None if parcel.flags is None else bytes(parcel.flags[start:end])
    return Batch(values=values, keys=parcel.keys[start:end], flags=flags)


def _drafts(parcel: Parcel) -> list[Draft]:
    """Return the messages of the parcel one by one, without those that were skipped."""
    keys, flags, rest = parcel.keys, parcel.flags, parcel.rest
    return [
        rest.get(i)
        or Draft(parcel.values[i], None if keys is None else keys[i], flags=0 if flags is None else flags[i])
        for i in range(parcel.skipped, len(parcel.values))
    ]


def _mark(parcel: Parcel, identity: ProducerId) -> None:
    """Give each message without a sequence number a dedup id, so that it is recognized when it is sent again.

    Numbers follow the order of sending; a message that never got into a parcel has none.
    """
    outbox = parcel.outbox
    for i, draft in parcel.rest.items():
        if draft.dedup_id is None:
            numbers = (identity.id, identity.since, outbox.number, next(outbox.loose))
            dedup_id = b"producer-%x-%x-%d-%d" % numbers
            headers = (*draft.headers, (DEDUP_ID, dedup_id))
            parcel.rest[i] = msgspec.structs.replace(draft, dedup_id=dedup_id, headers=headers)
