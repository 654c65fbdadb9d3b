"""The port of a producer on an engine in this process: a parcel is an idempotent append to its partition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import msgspec

from holdfast.api.bodies import Bodies
from holdfast.api.drafts import Drafter, NewMessage
from holdfast.broker.engine import BrokerEngine
from holdfast.broker.messages import DEDUP_ID, Draft, Publication, batch_of, check_partition
from holdfast.broker.partition import Partition
from holdfast.broker.producers import ProducerId
from holdfast.broker.topic import Topic
from holdfast.env import Clock
from holdfast.model import NO_PRODUCER, Appended, Batch, Durability, Producer
from holdfast.producing.parcels import Outbox, Parcel

# What was written, and where: the topic may be another one of its name by the time it is waited for.
WrittenParcel: TypeAlias = tuple[Partition, Publication | Appended]


class LocalDrafting:
    """Checks messages by the topic's settings."""

    def __init__(self, topic: Topic, bodies: Bodies, clock: Clock) -> None:
        self._drafter = Drafter(bodies, topic.settings)
        self._clock = clock
        self.plain = self._drafter.plain
        self.most_bytes = topic.settings.max_message_bytes

    def draft(self, message: NewMessage) -> tuple[Draft, Draft, bool]:
        draft = self._drafter.draft(message, self._clock.now_ns() // 1_000_000)
        return draft, draft, bool(draft.due_at_ms) or draft.dedup_id is not None


class LocalProducerPort:
    """The way of one producer to the partitions of a data folder."""

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

    def let_go(self, topic: Topic) -> None:
        topic.holders.discard(self)

    def is_stale(self, topic: Topic) -> bool:
        return False

    def check_partition(self, topic: Topic, partition: object) -> int:
        return check_partition(partition, topic.name, len(topic.partitions))

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
        elif known.offsets:  # it was stored by the attempt before, whatever went wrong then
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
    """What is to be stored: all that was not skipped."""
    if parcel.rest:
        return batch_of(_drafts(parcel))
    start, end = parcel.skipped, len(parcel.values)
    values = parcel.values[start:] if start else parcel.values
    if parcel.keys is None:
        return values
    flags = None if parcel.flags is None else bytes(parcel.flags[start:end])
    return Batch(values=values, keys=parcel.keys[start:end], flags=flags)


def _drafts(parcel: Parcel) -> list[Draft]:
    """The same, message by message."""
    keys, flags, rest = parcel.keys, parcel.flags, parcel.rest
    return [
        rest.get(i)
        or Draft(parcel.values[i], None if keys is None else keys[i], flags=0 if flags is None else flags[i])
        for i in range(parcel.skipped, len(parcel.values))
    ]


def _mark(parcel: Parcel, identity: ProducerId) -> None:
    """Give messages that go without a sequence a dedup id each, which makes them known when they are sent again.

    In the order in which they leave: whatever never came into a parcel has no number.
    """
    outbox = parcel.outbox
    for i, draft in parcel.rest.items():
        if draft.dedup_id is None:
            numbers = (identity.id, identity.since, outbox.number, next(outbox.loose))
            dedup_id = b"producer-%x-%x-%d-%d" % numbers
            headers = (*draft.headers, (DEDUP_ID, dedup_id))
            parcel.rest[i] = msgspec.structs.replace(draft, dedup_id=dedup_id, headers=headers)
