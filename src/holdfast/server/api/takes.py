"""Taking messages from a queue: at once, after a wait or as a stream; given back if the answer does not arrive."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, Final

import msgspec

from holdfast.broker.folder.layout import DEFAULT_GROUP, check_readable_name, message_id
from holdfast.broker.waiters import TaskWaiter
from holdfast.errors import HoldfastError, InvalidRequest, UnknownGroup
from holdfast.protocol.media import (
    EVENTS,
    FRAMES,
    LINES,
    MSGPACK,
    RAW,
    RUNS,
    ErrorAnswer,
    encode,
    encoder,
    fault_of,
    framed,
)
from holdfast.protocol.messages import Deliveries, Delivery, Said, Subscribe, Take, WatchQuery
from holdfast.server.api.topics import listening, visible_topic
from holdfast.server.http.heads import KnownHead
from holdfast.server.http.messages import Response, StreamResponse, Undelivered, payload
from holdfast.server.routing import Prepared, PreparedAnswer, Routes
from holdfast.server.served import (
    MOST_AT_ONCE,
    Leased,
    PlainRun,
    ServedGroup,
    Taken,
    plain_runs,
    receipts_of,
    said,
    wanted_at_once,
    within,
)
from holdfast.server.service import Call, Service, body_decoder
from holdfast.server.tokens import Principal
from holdfast.server.waiting import Attempt

routes = Routes("streams")

_AT_ONCE: Final = 100
_LARGE_BYTES: Final = 256 * 1024
_LEAST_STATS_S: Final = 0.1  # a shorter interval costs more than it is worth
_BEATS_PER_S: Final = 500  # heartbeats of all streams of one caller together
_KEEP_ALIVE: Final = b": \n\n"
_OTHERS: Final = 64  # calls for messages that are not as most are
_MANY: Final = 200  # messages that are encoded on the event loop; more go to a thread


async def group_of(call: Call, name: str | None) -> ServedGroup:
    """The group that a call is about, made where there is none and the caller may make it.

    The default group belongs to the queue: it is there for everybody who may consume.
    """
    queue = call.path["queue"]
    known = call.service.known_group(queue, name or DEFAULT_GROUP)
    if known is not None:
        return known
    if name not in (None, DEFAULT_GROUP) and not call.principal.creates_groups:
        info = await call.service.port.describe_topic(check_readable_name(queue))
        if name not in info.groups:
            call.principal.check_creates_group(name, queue)
    return await call.service.group(queue, name)


async def existing_group(call: Call) -> ServedGroup:
    """The group that the query or the body names, for those who only look: they make nothing."""
    queue, group = call.path["queue"], _group_named(call)
    known = call.service.known_group(queue, group)
    if known is not None:
        return known
    info = await call.service.port.describe_topic(check_readable_name(queue))
    if group not in info.groups:
        there = ", ".join(visible_topic(call, info).groups) or "none"
        raise UnknownGroup(f"{queue} has no group {group} in queue mode; known groups: {there}")
    return await call.service.group(queue, group)


def _group_named(call: Call) -> str:
    """The group in the query or in the body. Raises InvalidRequest if they name different ones."""
    named = {getattr(given, "group", None) for given in (call.query, call.body)} - {None}
    if len(named) > 1:
        raise InvalidRequest(
            f"the query names the group {call.query.group} and the body {call.body.group}: name it only once"
        )
    return next(iter(named), None) or DEFAULT_GROUP


async def take(call: Call, *, state: bool) -> Response | StreamResponse:
    """Lease messages, and wait for them if asked to. A retried call returns the same messages."""
    service = call.service
    group = await group_of(call, call.body.group)
    attempt = service.attempts.begin(call.principal, group, call.body)
    if attempt is None:
        return await _take(call, group, None, state=state)
    turn = attempt.turn
    try:
        return await _take(call, group, attempt, state=state)
    finally:
        service.attempts.ended(attempt, turn)


async def _take(call: Call, group: ServedGroup, attempt: Attempt | None, *, state: bool) -> Response | StreamResponse:
    wanted: Take = call.body
    service, turn = call.service, 0 if attempt is None else attempt.turn
    owner = wanted.owner or call.principal.name
    found: Taken = [] if attempt is None or not attempt.held else await attempt.again(group, wanted.lease)
    if not found:
        found = await group.take(wanted.count, wanted.lease, owner)
    waited = False
    if not found and wanted.wait != 0 and not service.leaving:
        most_s = service.settings.max_wait_ms / 1000
        wait_s = most_s if wanted.wait < 0 else min(wanted.wait, most_s)
        with service.waits.one_more(call.principal):
            found = await service.wait(call, group.take(wanted.count, wanted.lease, owner, wait_s), [])
        waited = True
    size, many = 0, False
    try:
        if waited:
            call.confirm()
        if wanted.count > MOST_AT_ONCE:
            with call.large_answer() as may:
                if may:
                    await group.take_more(found, wanted.count, wanted.lease, owner)
        runs: list[PlainRun] | None = None
        if wanted.count > 1:
            taken, many = found, sum(len(each) for _, each in found) > _MANY
            split = partial(_split, taken, runs=RUNS in call.request.headers.get("accept", ""))
            runs, found, surplus, size = await service.pool.run(lambda _: split()) if many else split()
            if surplus:
                await group.give_back(receipts_of(surplus))
        # Only the receipts: the bodies need not stay in memory until it is known whether the answer was read.
        leased = receipts_of(found)
        if attempt is not None:
            service.attempts.took(attempt, turn, found, leased)
        undelivered = partial(_give_back, group, leased, attempt, turn) if found else None
        if runs is not None:
            answered = partial(_answer_in_runs, call, group, runs, undelivered)
        elif size <= _LARGE_BYTES and not many:
            return _answer(call, group, found, undelivered, state=state)
        else:
            answered = partial(_long_answer, call, group, found, undelivered, state=state)
        return await service.pool.run(lambda _: answered()) if size > _LARGE_BYTES or many else answered()
    except BaseException:  # including cancellation when the client disconnects
        await _give_back(group, receipts_of(found), attempt, turn)
        raise


def prepare_take(service: Service, head: KnownHead, *, state: bool) -> Prepared | None:
    """Answers takes of messages that are ready. Not one that waits, or is not the first call of its take."""
    accepted = head.headers.get("accept", "")
    if RAW in accepted:
        return None
    queue, encode = head.topic, encoder(head.media)
    nothing = encode(Deliveries(messages=[]))
    # Calls for many messages that the handler answers, after one whose messages would not go in runs.
    others = 0 if RUNS in accepted else -1

    def answer(caller: Principal, wanted: Take, _: int | None) -> PreparedAnswer | None:
        nonlocal others
        group = service.known_group(queue, wanted.group or DEFAULT_GROUP)
        named = wanted.attempt_id is not None
        if group is None or (named and service.attempts.knows(caller, group, wanted)):
            return None
        if wanted.count != 1 and (others or wanted.count > MOST_AT_ONCE):
            others -= others > 0
            return None
        found = group.port.take_ready(wanted_at_once(wanted.count, 0, wanted.lease, wanted.owner or caller.name))
        if not found:
            return None if found is None or wanted.wait != 0 else nothing
        taken = receipts_of(found)
        try:
            if wanted.count == 1:
                message = group.delivery(found[0][0], found[0][1][0], state=state or wanted.state)
                body, correlation_id = encode(Deliveries(messages=[message])), message.correlation_id
            else:
                plain = plain_runs(found)
                if plain is None or plain[1] > _LARGE_BYTES:
                    others = _OTHERS
                    found, surplus, _ = within(found, _LARGE_BYTES)
                    group.give_back_soon(receipts_of(surplus))
                    taken = receipts_of(found)
                    messages = [
                        group.delivery(delivery, each, state=state or wanted.state)
                        for delivery, some in found
                        for each in some
                    ]
                    body, correlation_id = encode(Deliveries(messages=messages)), messages[0].correlation_id
                else:
                    body, correlation_id = encode(_in_runs(group, plain[0])), _first_of(plain[0])
            attempt = service.attempts.took_at_once(caller, group, wanted, found, taken) if named else None
        except BaseException:
            group.give_back_soon(taken)
            raise
        return body, correlation_id, partial(_give_back, group, taken, attempt, 1)

    return Prepared(body_decoder(head.takes, Take), answer)


async def _give_back(group: ServedGroup, taken: Leased, attempt: Attempt | None, turn: int) -> None:
    """Make messages of an undelivered answer ready again, except those that a later call of the take returns."""
    if attempt is not None:
        attempt.over(turn)
        taken = attempt.unneeded(turn, taken)
    await group.give_back(taken)


def _answer(
    call: Call, group: ServedGroup, found: Taken, undelivered: Undelivered | None, *, state: bool
) -> Response | StreamResponse:
    wanted: Take = call.body
    deliveries = [
        group.delivery(delivery, each, state=state or wanted.state) for delivery, taken in found for each in taken
    ]
    if wanted.count == 1 and RAW in call.request.headers.get("accept", ""):
        return _raw(call, deliveries, found, undelivered)
    if deliveries:
        _correlate(call, deliveries[0])
    return call.answer(Deliveries(messages=deliveries), undelivered=undelivered)


def _split(found: Taken, *, runs: bool) -> tuple[list[PlainRun] | None, Taken, Taken, int]:
    """The runs of messages, if they can be sent as such; the messages that are sent, those that are not, their size."""
    plain = plain_runs(found) if runs and found else None
    if plain is not None:
        return plain[0], found, [], plain[1]
    return None, *within(found)


def _answer_in_runs(call: Call, group: ServedGroup, runs: list[PlainRun], undelivered: Undelivered | None) -> Response:
    call.correlation_id = call.request.header("x-correlation-id") or _first_of(runs)
    return call.answer(_in_runs(group, runs), undelivered=undelivered)


def _in_runs(group: ServedGroup, runs: list[PlainRun]) -> Deliveries:
    return Deliveries(messages=[], runs=[group.run(run) for run in runs])


def _first_of(runs: list[PlainRun]) -> str:
    """The id of the first message."""
    delivery = runs[0].delivery
    return message_id(delivery.topic, delivery.number, runs[0].offsets[0], None)


def _long_answer(
    call: Call, group: ServedGroup, found: Taken, undelivered: Undelivered | None, *, state: bool
) -> Response:
    """An answer with many messages, encoded one by one, so that no step holds the interpreter lock for long."""
    as_listed: list[Delivery] = []
    for partition, taken in found:
        for each in taken:
            delivery = group.delivery(partition, each, state=state or call.body.state)
            if not as_listed:
                _correlate(call, delivery)
            as_listed.append(call.encoded(delivery))
    return call.answer(Deliveries(messages=as_listed), undelivered=undelivered)


def _correlate(call: Call, first: Delivery) -> None:
    call.correlation_id = call.request.header("x-correlation-id") or first.correlation_id


def _raw(call: Call, deliveries: list[Delivery], found: Taken, undelivered: Any) -> Response | StreamResponse:
    """An answer with the body of one message as it is, and everything else in a header."""
    if not deliveries:
        return Response(204)
    message = msgspec.structs.replace(deliveries[0], body=b"", omitted=False)
    header = json.dumps(msgspec.to_builtins(message))  # plain ASCII, as a header must be
    headers = [("holdfast-message", header), ("holdfast-receipt", message.receipt)]
    call.correlation_id = message.correlation_id
    (_, (delivered,)) = found[0]
    return payload(delivered.record.value, headers=headers, undelivered=undelivered)


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
    """Stream messages as they arrive, one JSON object per line; a periodic `{}` shows that the stream is alive.

    Never more than `prefetch` messages are out and unsettled: ack, nack or reject one, and the next one comes.
    """
    return await _subscribed(call, state=False)


@_subscription("/v1/queues/{queue}/subscribeWithState")
async def subscribe_with_state(call: Call) -> StreamResponse:
    """Like `subscribe`, with the state document of each message."""
    return await _subscribed(call, state=True)


@routes.add(
    "GET", "/v1/queues/{queue}/watch", action="read", query=WatchQuery, gives=(EVENTS,), errors=("too_many_waiters",)
)
async def watch(call: Call) -> StreamResponse:
    """Stream server-sent events about new messages without taking them: `message`, and periodically `stats`."""
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
