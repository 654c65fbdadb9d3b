"""Messages that wait for their time: which there are, and taken back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from heapq import merge
from itertools import islice
from typing import Any, Final, TypeAlias

from holdfast.broker.layout import parse_message_id
from holdfast.broker.partition import Partition
from holdfast.embedded.listed import Waiting
from holdfast.embedded.listing import Mark, mark_of, parse_mark
from holdfast.embedded.message import Place
from holdfast.env.checkpoints import checkpoint
from holdfast.errors import InvalidRequest, NotFound
from holdfast.protocol.dead import DelayedQuery
from holdfast.protocol.queues import Cancelled, ListedMessages
from holdfast.server.api.queues import Room, told
from holdfast.server.calls import Call
from holdfast.server.routing import Routes
from holdfast.server.scans import Scan

routes = Routes("delayed")

_Line: TypeAlias = tuple[int, int, int, Any]  # when, partition, number, message: the order of the list
_LAST: Final = 2**62  # behind all numbers


@routes.add(
    "GET",
    "/v1/topics/{topic}/delayed",
    action="read",
    query=DelayedQuery,
    answers=ListedMessages,
    errors=("unknown_topic",),
)
async def list_delayed(call: Call) -> ListedMessages:
    """Messages that wait for their time, the next one first; page by page with `after`."""
    return await call.scan(_delayed, call)


def _delayed(_scan: Scan, call: Call) -> ListedMessages:
    query: DelayedQuery = call.query
    after = None if query.after is None else parse_mark(query.after)
    broker = call.service.broker
    with broker._engine.using(call.path["topic"]) as topic:
        room, found, more = Room(bodies=query.bodies), [], ""
        lines = [_of_partition(number, each, after, query.limit) for number, each in enumerate(topic.partitions)]
        for _, number, _, message in islice(merge(*lines), query.limit):
            waiting: Any = Waiting(broker, Place(topic.name, number), message)  # type: ignore[arg-type]
            found.append(room.use(told(waiting, bodies=room.left > 0)))
            if len(found) == query.limit:
                more = mark_of(waiting).text
        return ListedMessages(messages=found, next=more, scanned=len(found))


def _of_partition(number: int, partition: Partition, after: Mark | None, limit: int) -> Iterator[_Line]:
    """What waits in a partition behind a place in the list of all, in the order of that list."""
    if partition.delayed is None:
        return
    place: tuple[int, int] | None = None
    if after is not None:
        # Of what is due at the same time, the partitions before that place have had their turn, those behind it not.
        place = after.due_ms, after.number if number == after.partition else _LAST if number < after.partition else -1
    for message in partition.delayed.waiting(after=place, limit=limit):
        checkpoint()
        yield message.due_at_ms, number, message.record.offset, message


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
