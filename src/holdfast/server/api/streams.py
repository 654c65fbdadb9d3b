"""Streaming answers: messages as they arrive, leased or only watched."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Final

from holdfast.broker.waiters import TaskWaiter
from holdfast.errors import HoldfastError
from holdfast.protocol.media import EVENTS, FRAMES, LINES, MSGPACK, ErrorAnswer, encode, fault_of, framed
from holdfast.protocol.messages import Delivery, Said, Subscribe, WatchQuery
from holdfast.server.api.queues import existing_group
from holdfast.server.api.takes import group_of
from holdfast.server.api.topics import listening
from holdfast.server.http.messages import StreamResponse
from holdfast.server.routing import Routes
from holdfast.server.served import ServedGroup, Taken, receipts_of, said, within
from holdfast.server.service import Call

routes = Routes("streams")

_AT_ONCE: Final = 100
_LARGE_BYTES: Final = 256 * 1024
_LEAST_STATS_S: Final = 0.1  # a shorter interval costs more than it is worth
_BEATS_PER_S: Final = 500  # heartbeats of all streams of one caller together
_KEEP_ALIVE: Final = b": \n\n"


def _beat_s(call: Call, wanted_s: float) -> float:
    """The heartbeat interval of a stream. It grows with the number of streams that the caller has."""
    return max(wanted_s, call.service.waits.of(call.principal) / _BEATS_PER_S)


async def _subscribed(call: Call, *, state: bool) -> StreamResponse:
    wanted: Subscribe = call.body
    group = await group_of(call, wanted.group)
    call.service.waits.check(call.principal)
    accepted = call.request.headers.get("accept", "")
    media = FRAMES if FRAMES in accepted or MSGPACK in accepted else LINES
    return StreamResponse(_deliveries(call, group, wanted, media, state=state or wanted.state), media)


async def _deliveries(
    call: Call, group: ServedGroup, wanted: Subscribe, media: str, *, state: bool
) -> AsyncIterator[bytes]:
    """Yield messages as the window has room, and empty heartbeats, so that each side notices if the other is gone."""
    service = call.service
    owner = wanted.owner or call.principal.name
    with service.windows.one_more(group, wanted.prefetch) as window, service.waits.one_more(call.principal):
        yield framed({}, media)  # tells the client that the stream has started
        while not service.leaving and not group.closed:
            found: Taken = []
            beat_s = _beat_s(call, wanted.heartbeat)
            try:
                if not await service.wait(call, window.wait_for_room(beat_s), nothing=False):
                    call.confirm()
                    yield framed({}, media)
                    continue
                found = await group.take(window.free, wanted.lease, owner)
                if not found:
                    waiting = group.take(window.free, wanted.lease, owner, beat_s)
                    found = await service.wait(call, waiting, [])
                call.confirm()
            except HoldfastError as error:
                await group.give_back(receipts_of(found))
                yield framed(ErrorAnswer(error=fault_of(error, correlation_id=call.correlation_id)), media)
                return
            found, surplus, size = within(found)
            try:
                if surplus:
                    await group.give_back(receipts_of(surplus))
                for delivery, taken in found:
                    for each in taken:
                        window.add(delivery, each.receipt)
                reported_s = partial(_encoded, group, found, media, state=state)
                content = (
                    reported_s()
                    if size <= _LARGE_BYTES
                    else await service.pool.run(lambda _, reported_s=reported_s: reported_s())
                )
                yield content or framed({}, media)
            except (GeneratorExit, asyncio.CancelledError):
                await group.give_back(receipts_of(found))  # they were not sent
                raise


def _encoded(group: ServedGroup, found: Taken, media: str, *, state: bool) -> bytes:
    return b"".join(
        framed(group.delivery(delivery, each, state=state), media) for delivery, taken in found for each in taken
    )


_subscription = partial(
    routes.add,
    "POST",
    action="consume",
    body=Subscribe,
    answers=Delivery,
    gives=(LINES, FRAMES),
    plain=False,
    errors=("too_many_waiters",),
)


@_subscription("/v1/queues/{queue}/subscribe")
async def subscribe(call: Call) -> StreamResponse:
    """Stream messages as they arrive, one JSON object per line; `{}` now and then shows that the stream is alive.

    Never more than `prefetch` messages are out and unsettled: ack, nack or reject one, and the next one comes.
    """
    return await _subscribed(call, state=False)


@_subscription("/v1/queues/{queue}/subscribeWithState")
async def subscribe_with_state(call: Call) -> StreamResponse:
    """The same, with the state document of each message."""
    return await _subscribed(call, state=True)


@routes.add(
    "GET", "/v1/queues/{queue}/watch", action="read", query=WatchQuery, gives=(EVENTS,), errors=("too_many_waiters",)
)
async def watch(call: Call) -> StreamResponse:
    """Stream server-sent events about new messages without taking them: `message`, and `stats` now and then."""
    query: WatchQuery = call.query
    group = await existing_group(call)
    call.service.waits.check(call.principal)
    return StreamResponse(_events(call, group, query), EVENTS, headers=[("cache-control", "no-store")])


async def _events(call: Call, group: ServedGroup, query: WatchQuery) -> AsyncIterator[bytes]:
    service = call.service
    with (
        listening(*(delivery.partition for delivery in group.deliveries)) as line,
        service.waits.one_more(call.principal),
    ):
        places = {delivery.number: delivery.partition.log.end for delivery in group.deliveries}
        waiter = TaskWaiter(service.world.clock)
        yield _event("stats", await group.port.stats())
        loop = asyncio.get_running_loop()
        reported_s = loop.time()
        while not service.leaving and not group.closed:
            every_s = _beat_s(call, max(query.stats, _LEAST_STATS_S)) if query.stats else 0
            try:
                with line.in_line(waiter):
                    fresh = await asyncio.to_thread(_fresh, group, places, query.bodies)
                    if not fresh:
                        await service.wait(call, waiter.wait(min(every_s or 15, 15)), None)
                call.confirm()
                due = every_s and loop.time() - reported_s >= every_s
                stats = await group.port.stats() if due else None
            except HoldfastError as error:
                yield _event("error", ErrorAnswer(error=fault_of(error, correlation_id=call.correlation_id)))
                return
            for message in fresh:
                yield _event("message", message)
            if stats is not None:
                reported_s = loop.time()
                yield _event("stats", stats)
            elif not fresh:
                yield _KEEP_ALIVE


def _event(name: str, value: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode(value, ""))


def _fresh(group: ServedGroup, places: dict[int, int], bodies: bool) -> list[Said]:  # noqa: FBT001  called by a thread
    """Messages that arrived since the last call, up to a limit."""
    found: list[Said] = []
    for delivery in list(group.deliveries):
        log = delivery.partition.log
        start = max(places.get(delivery.number, log.start), log.start)
        for record in log.records(start, on_damage="skip", whole=False):
            message = said(delivery, record)
            if not bodies:
                message.body, message.omitted = b"", True
            found.append(message)
            start = record.offset + 1
            if len(found) >= _AT_ONCE:
                break
        places[delivery.number] = start
    return found
