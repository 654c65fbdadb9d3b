"""Taking messages from a queue: leased at once or after a wait, and given back if the answer does not arrive."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import msgspec

from holdfast.broker.folder.layout import DEFAULT_GROUP, check_readable_name
from holdfast.protocol.media import RAW
from holdfast.protocol.messages import Deliveries, Delivery, Take
from holdfast.server.http.messages import Response, StreamResponse, Undelivered, payload
from holdfast.server.served import MOST_AT_ONCE, Leased, ServedGroup, Taken, receipts_of, within
from holdfast.server.service import Call
from holdfast.server.waiting import Attempt

_MANY = 200  # messages that are encoded on the event loop; more go to a thread
_LARGE_BYTES = 256 * 1024


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
        if wanted.count > 1:
            taken, many = found, sum(len(each) for _, each in found) > _MANY
            kept, surplus, size = await service.pool.run(lambda _: within(taken)) if many else within(taken)
            if surplus:
                await group.give_back(receipts_of(surplus))
            found = kept
        if attempt is not None:
            service.attempts.took(attempt, turn, found)
        # Only the receipts: the bodies need not stay in memory until it is known whether the answer was read.
        undelivered = partial(_give_back, group, receipts_of(found), attempt, turn) if found else None
        if size <= _LARGE_BYTES and not many:
            return _answer(call, group, found, undelivered, state=state)
        return await service.pool.run(lambda _: _long_answer(call, group, found, undelivered, state=state))
    except BaseException:  # including cancellation when the client disconnects
        await _give_back(group, receipts_of(found), attempt, turn)
        raise


def take_now(call: Call, *, state: bool) -> Response | None:
    """A take of one message that is ready; None if that takes a turn, a wait, or is not the first call of this take."""
    wanted: Take = call.body
    service = call.service
    group = service.known_group(call.path["queue"], wanted.group or DEFAULT_GROUP)
    if group is None or wanted.count != 1 or RAW in call.request.headers.get("accept", ""):
        return None
    if service.attempts.knows(call.principal, group, wanted):
        return None
    found = group.take_now(1, wanted.lease, wanted.owner or call.principal.name)
    if not found and (found is None or wanted.wait != 0):
        return None
    taken = receipts_of(found)
    try:
        undelivered = None
        if found:
            attempt = service.attempts.took_at_once(call.principal, group, wanted, found)
            undelivered = partial(_give_back, group, taken, attempt, 0 if attempt is None else attempt.turn)
        answer = _answer(call, group, found, undelivered, state=state)
        assert isinstance(answer, Response)
    except BaseException:
        group.give_back_soon(taken)
        raise
    return answer


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
