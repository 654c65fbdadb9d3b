"""Messages that wait for their time: which there are, and taken back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from heapq import nsmallest
from typing import TypeVar

from holdfast.broker.layout import parse_message_id
from holdfast.embedded.listed import Waiting
from holdfast.embedded.message import Place
from holdfast.env.checkpoints import checkpoint
from holdfast.errors import InvalidRequest, NotFound
from holdfast.protocol.dead import DelayedQuery
from holdfast.protocol.queues import Cancelled, Listed, ListedMessages
from holdfast.server.api.queues import Room, told
from holdfast.server.calls import Call
from holdfast.server.routing import Routes
from holdfast.server.scans import Scan

routes = Routes("delayed")

_Message = TypeVar("_Message")


@routes.add(
    "GET",
    "/v1/topics/{topic}/delayed",
    action="read",
    query=DelayedQuery,
    answers=ListedMessages,
    errors=("unknown_topic",),
)
async def list_delayed(call: Call) -> ListedMessages:
    """Messages that wait for their time, the next one first."""
    return ListedMessages(messages=await call.scan(_delayed, call))


def _delayed(_scan: Scan, call: Call) -> list[Listed]:
    query: DelayedQuery = call.query
    broker = call.service.broker
    with broker._engine.using(call.path["topic"]) as topic:
        waiting = (
            (message.due_at_ms, number, message.record.offset, message)
            for number, partition in enumerate(topic.partitions)
            if partition.delayed is not None
            for message in _stepwise(partition.delayed.waiting())
        )
        room = Room(bodies=query.bodies)
        return [
            room.use(
                told(Waiting(broker, Place(topic.name, number), message), bodies=room.left > 0)  # type: ignore[arg-type]
            )
            for _, number, _, message in nsmallest(query.limit, waiting)
        ]


def _stepwise(messages: Iterable[_Message]) -> Iterator[_Message]:
    for message in messages:
        checkpoint()
        yield message


@routes.add(
    "DELETE",
    "/v1/topics/{topic}/delayed/{id}",
    action="consume",
    answers=Cancelled,
    act=True,
    looks_first=True,  # or everybody who consumes could fill the audit log with what never was
    errors=("unknown_topic", "not_found"),
)
async def cancel_delayed(call: Call) -> Cancelled:
    """Take a message back that waits for its time; false where it waits no more."""
    if not await asyncio.to_thread(_cancel, call, only_look=True):
        return Cancelled(cancelled=False)
    await call.begin_act()
    return Cancelled(cancelled=await asyncio.to_thread(_cancel, call))


def _cancel(call: Call, *, only_look: bool = False) -> bool:
    name = call.path["topic"]
    with call.service.broker._engine.using(name) as topic:
        try:
            place = parse_message_id(call.path["id"], name)
        except InvalidRequest as error:
            raise NotFound(str(error)) from None
        if place.delayed_id is None:
            raise NotFound(f"{call.path['id']} is no id of a delayed message; those are told when it is stored")
        partition = topic.partition(place.partition)
        if only_look:
            return partition.delayed is not None and partition.delayed.get(place.delayed_id) is not None
        return partition.cancel_delayed(place.delayed_id)
