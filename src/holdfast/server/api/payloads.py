"""Bodies by themselves, as they are: large ones are sent piece by piece and are nowhere held as a whole."""

from __future__ import annotations

import asyncio
from typing import Any

from holdfast.api.contents import record_of
from holdfast.broker.topic_locks import reading
from holdfast.errors import NotFound
from holdfast.local.listing import find_message
from holdfast.model import Record
from holdfast.protocol.media import RAW
from holdfast.protocol.messages import Number, Receipt, Wire
from holdfast.protocol.queues import InGroup
from holdfast.server.api.queues import existing_group
from holdfast.server.api.topics import partition_of
from holdfast.server.calls import Call
from holdfast.server.http.messages import Response, StreamResponse
from holdfast.server.payload import payload
from holdfast.server.routing import Routes

routes = Routes("messages")

Answer = Response | StreamResponse


class InHand(InGroup, kw_only=True):
    """The message in hand whose body is meant."""

    receipt: Receipt


class AtOffset(Wire, kw_only=True):
    """The place of the message whose body is meant."""

    offset: Number


@routes.add(
    "GET",
    "/v1/queues/{queue}/payload",
    action="consume",
    query=InHand,
    gives=(RAW,),
    errors=("lease_lost", "unknown_topic", "unknown_group"),
)
async def payload_in_hand(call: Call) -> Answer:
    """The body of a message in hand, byte for byte."""
    query: InHand = call.query
    group = await existing_group(call, query.group)
    _, delivered = await asyncio.to_thread(group.queue_group.resume, query.receipt)
    return payload(delivered.record.value)


@routes.add(
    "GET",
    "/v1/queues/{queue}/messages/{id}/payload",
    action="read",
    query=InGroup,
    gives=(RAW,),
    errors=("not_found", "unknown_topic", "unknown_group"),
)
async def payload_of(call: Call) -> Answer:
    """The body of a message or a dead letter, whoever has it."""
    query: InGroup = call.query
    group = await existing_group(call, query.group)
    found = await call.scan(lambda _: find_message(group.port, call.path["id"]))
    if found is None:
        raise NotFound(f"there is no message {call.path['id']} any more, or not yet")
    return payload(record_of(found.message).value)


@routes.add(
    "GET",
    "/v1/topics/{topic}/partitions/{partition}/payload",
    action="read",
    query=AtOffset,
    gives=(RAW,),
    errors=("not_found", "unknown_topic", "offset_out_of_range", "removed"),
)
async def payload_at(call: Call) -> Answer:
    """The body of the message at an offset."""
    query: AtOffset = call.query
    record = await asyncio.to_thread(_record, call, query.offset)
    return payload(record.value)


def _record(call: Call, offset: int) -> Record:
    engine: Any = call.service.engine
    with reading(engine.using, call.path["topic"]) as topic:
        log = topic.partition(partition_of(call)).log
        for record in log.records(offset, whole=False):
            if record.offset == offset:
                found: Record = record
                return found
            break
    raise NotFound(f"there is no message at offset {offset} of {call.path['topic']}")
