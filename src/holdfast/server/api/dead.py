"""The dead letters of a queue: look at them, group them, put them back, drop them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec

from holdfast.embedded.dead import ChosenLetter, DeadLetters, at_once, put_back
from holdfast.embedded.listed import DeadLetter, Listed
from holdfast.errors import HoldfastError, InvalidRequest, NotFound
from holdfast.protocol.dead import (
    DeadGroups,
    DeadGroupsQuery,
    DeadQuery,
    Letter,
    Letters,
    Purge,
    Redrive,
    RedriveTold,
)
from holdfast.protocol.errors import ErrorAnswer, fault_of
from holdfast.protocol.media import LINES, framed
from holdfast.protocol.queues import InGroup
from holdfast.server.api.queues import Room, existing_group, page, told
from holdfast.server.calls import Call
from holdfast.server.http.messages import StreamResponse
from holdfast.server.routing import Routes
from holdfast.server.served import ServedGroup

routes = Routes("dead letters")

_MOST_IDS = 1_000  # named in an answer
_STEP_S = 1.0


@routes.add(
    "GET",
    "/v1/queues/{queue}/dead",
    action="read",
    query=DeadQuery,
    answers=Letters,
    errors=("unknown_topic", "unknown_group"),
)
async def list_dead(call: Call) -> Letters:
    """Dead letters that the condition chooses, oldest first; page by page with `after`."""
    query: DeadQuery = call.query
    group = await existing_group(call, query.group)
    return await asyncio.to_thread(_letters, group, query)


def _letters(group: ServedGroup, query: DeadQuery) -> Letters:
    room = Room(bodies=query.bodies)

    def tell(letter: Listed[bytes]) -> Letter:
        assert isinstance(letter, DeadLetter)
        return room.use(_letter(letter, bodies=room.left > 0))

    letters, more = page(group, "dead", query, tell)
    return Letters(letters=letters, next=more)


def _letter(letter: DeadLetter[bytes], *, bodies: bool = True) -> Letter:
    facts = msgspec.structs.asdict(told(letter, bodies=bodies))
    return Letter(
        **facts,
        original_id=letter.original_id,
        original_offset=letter.original_offset,
        original_timestamp=letter.original_timestamp,
        dead_at=letter.dead_at,
        failures=list(letter.failures),
        first_delivery=letter.first_delivery,
        last_delivery=letter.last_delivery,
        state=letter.state,
    )


@routes.add(
    "GET",
    "/v1/queues/{queue}/dead/groups",
    action="read",
    query=DeadGroupsQuery,
    answers=DeadGroups,
    errors=("unknown_topic", "unknown_group"),
)
async def dead_groups(call: Call) -> DeadGroups:
    """Dead letters by reason and kind of error, the most frequent first."""
    query: DeadGroupsQuery = call.query
    group = await existing_group(call, query.group)
    found = await group.dead.groups(where=query.where)
    return DeadGroups(groups=list(found[: query.limit]))


@routes.add(
    "GET",
    "/v1/queues/{queue}/dead/{id}",
    action="read",
    query=InGroup,
    answers=Letter,
    errors=("unknown_topic", "unknown_group", "not_found"),
)
async def show_dead(call: Call) -> Letter:
    """One dead letter: every error, the reason, its original place, its state document."""
    query: InGroup = call.query
    group = await existing_group(call, query.group)
    try:
        letter = await group.dead.show(call.path["id"])
    except InvalidRequest as error:
        raise NotFound(str(error)) from None
    return await asyncio.to_thread(_letter, letter)


@routes.add(
    "POST",
    "/v1/queues/{queue}/dead/redrive",
    action="admin",
    body=Redrive,
    answers=RedriveTold,
    gives=(LINES,),
    act=True,
    errors=("unknown_topic", "unknown_group", "disk_full"),
)
async def redrive(call: Call) -> RedriveTold | StreamResponse:
    """Put dead letters back into the queue, each once. Asked for application/x-ndjson it tells how far it is."""
    wanted: Redrive = call.body
    group = await existing_group(call, wanted.group)
    letters = await asyncio.to_thread(DeadLetters(group)._to_redrive, wanted.ids, wanted.where, wanted.limit)
    call.count = len(letters) if wanted.dry_run else 0
    if wanted.dry_run:
        return _told(letters, 0)
    if LINES in call.request.header("accept"):
        return StreamResponse(_lines(call, letters), LINES)
    done = 0
    async for done in _redriven(call, letters):
        call.count = done  # also of one that is cut short
    return _told(letters, done)


async def _redriven(call: Call, letters: list[ChosenLetter]) -> AsyncIterator[int]:
    """Put them back, no faster than asked for; how many it were by then."""
    wanted: Redrive = call.body
    loop = asyncio.get_running_loop()
    done, size, due = 0, at_once(wanted.rate), loop.time()
    for i in range(0, len(letters), size):
        while (left_s := due - loop.time()) > 0:
            await asyncio.sleep(min(left_s, _STEP_S))
            yield done
        if call.service.leaving:
            return
        done += await asyncio.to_thread(put_back, letters[i : i + size])
        if wanted.rate is not None:
            due += size / wanted.rate
        yield done


async def _lines(call: Call, letters: list[ChosenLetter]) -> AsyncIterator[bytes]:
    done = 0
    yield framed(RedriveTold(matched=len(letters), done=0, ended=False), LINES)
    try:
        async for done in _redriven(call, letters):
            call.count = done
            call.confirm()
            yield framed(RedriveTold(matched=len(letters), done=done, ended=False), LINES)
    except (HoldfastError, asyncio.CancelledError) as caught:
        error = caught if isinstance(caught, HoldfastError) else call.why_ended()
        if error is None:
            raise
        call.error = error
        yield framed(ErrorAnswer(error=fault_of(error, correlation_id=call.correlation_id)), LINES)
    else:
        yield framed(_told(letters, done), LINES)


@routes.add(
    "POST",
    "/v1/queues/{queue}/dead/purge",
    action="admin",
    body=Purge,
    answers=RedriveTold,
    act=True,
    errors=("unknown_topic", "unknown_group"),
)
async def purge(call: Call) -> RedriveTold:
    """Drop dead letters for good."""
    wanted: Purge = call.body
    group = await existing_group(call, wanted.group)
    found = await group.dead.purge(wanted.ids, where=wanted.where, limit=wanted.limit, dry_run=wanted.dry_run)
    call.count = found.done
    return RedriveTold(matched=found.matched, done=found.done, ids=found.ids[:_MOST_IDS])


def _told(letters: list[ChosenLetter], done: int) -> RedriveTold:
    return RedriveTold(matched=len(letters), done=done, ids=[letter.id for letter in letters[:_MOST_IDS]])
