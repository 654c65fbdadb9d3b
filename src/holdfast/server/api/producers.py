"""Producers that send again what was not answered: each batch has a number, and is stored once."""

from __future__ import annotations

import asyncio

from holdfast.errors import InvalidRequest
from holdfast.model import Producer
from holdfast.protocol.media import JSON, LINES, MSGPACK
from holdfast.protocol.messages import Batch
from holdfast.protocol.topics import (
    AppendQuery,
    BeginProducer,
    NextSequence,
    ProducerBegun,
    SequenceQuery,
    Written,
)
from holdfast.server.api.topics import partition_of
from holdfast.server.batches import Drafts, drafts
from holdfast.server.calls import Call
from holdfast.server.http.messages import Response
from holdfast.server.routing import Routes

routes = Routes("producers")

_MOST_ID = 2**63 - 1


@routes.add(
    "POST", "/v1/producers", action="publish", scope="any", body=BeginProducer, answers=ProducerBegun, status=201
)
async def begin_producer(call: Call) -> ProducerBegun:
    """Be a producer whose batches are stored once, however often they are sent."""
    given: BeginProducer = call.body
    if given.resume and given.name is None:
        raise InvalidRequest("resume needs a name: it goes on where the last producer of that name had got to")
    if given.name is not None:
        call.principal.check_producer(given.name)
    engine = call.service.engine
    begun = await asyncio.to_thread(lambda: engine.producers().init(given.name, resume=given.resume))
    return ProducerBegun(id=str(begun.id), epoch=begun.epoch, since=begun.since)


@routes.add(
    "POST",
    "/v1/topics/{topic}/partitions/{partition}/append",
    action="publish",
    query=AppendQuery,
    answers=Written,
    status=201,
    takes=(JSON, MSGPACK, LINES),
    content=Batch,
    errors=("unknown_topic", "message_too_large", "out_of_sequence", "fenced", "queue_full", "disk_full"),
)
async def append(call: Call) -> Response:
    """Store a producer's batch in a partition, all of it or nothing. Sent again, it is answered as the first time."""
    began_ns = call.service.world.clock.monotonic_ns()
    query: AppendQuery = call.query
    messages = await drafts(call)
    _check_in_sequence(call, messages)
    producer = Producer(_number(query.producer), query.epoch, query.sequence)
    port, engine = call.service.port, call.service.engine
    with engine.using(call.path["topic"]) as topic:
        publisher, partition = port.publisher(topic), topic.partition(partition_of(call))
        if partition.sequences is None:  # not in the loop's time: it may read much
            await asyncio.to_thread(partition.open_sequences)
            await asyncio.to_thread(engine.producers)
        _check_name(call, producer.id)
        engine.producers().check(producer.id, producer.epoch)
        appended, known = await call.service.publishing.append(
            topic.name, partition, publisher, messages, producer, query.durability, query.codec
        )
        if known is None:
            topic.metrics.put_seconds.observe_ns(call.service.world.clock.monotonic_ns() - began_ns)
    offsets = range(appended.offset, appended.next_offset) if known is None else known.offsets
    return call.answer(Written(offsets=list(offsets), durability=appended.durability, duplicate=known is not None))


def _check_name(call: Call, producer_id: int) -> None:
    """Whoever has the id of a named producer must be allowed its name, too."""
    name = call.service.engine.producers().name_of(producer_id)
    if name is not None:
        call.principal.check_producer(name)


def _check_in_sequence(call: Call, messages: Drafts) -> None:
    for message in messages:
        if isinstance(message, bytes):
            return
        if message.delay is not None or message.at is not None or message.dedup_id is not None:
            raise InvalidRequest(
                "messages with a delay, a time or a dedup_id have no place in a producer's sequence: send them to "
                f"/v1/topics/{call.path['topic']}/messages, with a dedup_id each"
            )


@routes.add(
    "GET",
    "/v1/topics/{topic}/partitions/{partition}/sequence",
    action="publish",
    query=SequenceQuery,
    answers=NextSequence,
    errors=("unknown_topic",),
)
async def next_sequence(call: Call) -> NextSequence:
    """The number that a producer's next message for this partition must have, and where earlier ones are."""
    return await asyncio.to_thread(_next_sequence, call, _number(call.query.producer))


def _next_sequence(call: Call, producer_id: int) -> NextSequence:
    query: SequenceQuery = call.query
    _check_name(call, producer_id)
    with call.service.engine.using(call.path["topic"]) as topic:
        sequences = topic.partition(partition_of(call)).open_sequences()
        return NextSequence(
            sequence=sequences.next_sequence(producer_id, query.since),
            offsets=sequences.offsets(producer_id, query.first, query.count),
        )


def _number(text: str) -> int:
    number = int(text)
    if not 0 < number <= _MOST_ID:
        raise InvalidRequest(f"{text} is no producer's id; POST /v1/producers gives one")
    return number
