"""Dead letters of a queue: list, group, redrive and purge them. Also delayed messages of a topic."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from heapq import merge
from itertools import islice
from typing import Any, Final, TypeAlias

import msgspec

from holdfast.api.arguments import chosen_ids
from holdfast.api.bodies import Bodies
from holdfast.api.contents import PartitionHome
from holdfast.api.listing import DeadKinds, DeadLetter, Listed, Waiting, note_of
from holdfast.broker.folder.layout import check_topic_name, parse_message_id
from holdfast.broker.partition import Partition
from holdfast.env.world import checkpoint
from holdfast.errors import HoldfastError, InvalidRequest, NotFound
from holdfast.local.dead_letters import ChosenLetter, LocalLetters, Redriving, at_once, choose, drop, in_order
from holdfast.local.listing import Mark, listed, mark_of, parse_mark
from holdfast.protocol.media import LINES, ErrorAnswer, fault_of, framed
from holdfast.protocol.messages import (
    Cancelled,
    DeadGroups,
    DeadGroupsQuery,
    DeadQuery,
    DelayedQuery,
    InGroup,
    Letter,
    Letters,
    ListedMessages,
    Purge,
    Redrive,
    RedriveTold,
)
from holdfast.server.api.queues import BodyAllowance, existing_group, page, told
from holdfast.server.http.messages import StreamResponse
from holdfast.server.routing import Routes
from holdfast.server.served import ServedGroup
from holdfast.server.service import Call
from holdfast.server.turns import Full, Scan

routes = Routes("dead letters")

_MOST_IDS = 1_000  # ids in an answer
_STEP_S = 1.0
_AT_ONCE = 1_000  # dead letters purged at a time


@routes.add(
    "GET",
    "/v1/queues/{queue}/dead",
    action="read",
    query=DeadQuery,
    answers=Letters,
)
async def list_dead(call: Call) -> Letters:
    """Dead letters that the condition chooses, oldest first; page by page with `after`."""
    query: DeadQuery = call.query
    group = await existing_group(call)
    return await call.scan(_letters, group, query)


def _letters(scan: Scan, group: ServedGroup, query: DeadQuery) -> Letters:
    room = BodyAllowance(bodies=query.bodies)

    def tell(letter: Listed[bytes]) -> Letter:
        assert isinstance(letter, DeadLetter)
        return room.use(_letter(letter, bodies=room.left > 0))

    letters, more = page(scan, group, "dead", query, tell)
    return Letters(letters=letters, next=more, scanned=scan.looked, damaged=scan.damaged)


async def each_letter(
    call: Call, group: ServedGroup, where: str | None, limit: int | None, take: Callable[[DeadLetter[bytes]], None]
) -> None:
    """Pass on all dead letters that match the condition, some at a time, so that other scans get their turn."""
    after: Mark | None = None
    taken = 0

    def some(scan: Scan) -> bool:
        nonlocal after, taken
        left = None if limit is None else limit - taken
        try:
            for letter in listed(group.port, "dead", where, left, after=after, look=scan.look):
                assert isinstance(letter, DeadLetter)
                take(letter)
                taken += 1
        except Full:
            after = scan.mark
            return True
        return False

    while await call.scan(some):
        pass


async def _chosen(call: Call, group: ServedGroup) -> list[ChosenLetter]:
    """The dead letters that a redrive or a purge applies to."""
    wanted: Purge = call.body
    if wanted.ids is not None:
        ids = chosen_ids(wanted.ids, wanted.where)
        return await call.scan(lambda _: LocalLetters(group.port).chosen(ids, None, wanted.limit))
    letters: list[ChosenLetter] = []
    await each_letter(call, group, wanted.where, wanted.limit, lambda letter: letters.append(choose(letter)))
    return letters


def _letter(letter: DeadLetter[bytes], *, bodies: bool = True) -> Letter:
    note = note_of(letter)
    facts = msgspec.structs.asdict(told(letter, bodies=bodies))
    facts |= {"original_id": letter.original_id, "expires_at_ms": note.expires_at_ms, "due_at_ms": note.due_at_ms}
    return Letter(
        **facts,
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
)
async def dead_groups(call: Call) -> DeadGroups:
    """Dead letters by reason and kind of error, the most frequent first."""
    query: DeadGroupsQuery = call.query
    group = await existing_group(call)
    kinds = DeadKinds()
    await each_letter(call, group, query.where, None, kinds.add)
    return DeadGroups(groups=kinds.groups()[: query.limit])


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
    group = await existing_group(call)
    letter = await group.port.letter(call.path["id"])
    return await asyncio.to_thread(_letter, letter)


@routes.add(
    "POST",
    "/v1/queues/{queue}/dead/redrive",
    action="admin",
    body=Redrive,
    answers=RedriveTold,
    gives=(LINES,),
    act=True,
    errors=("message_too_large", "queue_full", "disk_full"),
)
async def redrive(call: Call) -> RedriveTold | StreamResponse:
    """Put dead letters back into the queue, each once. Asked for application/x-ndjson it tells how far it is.

    With `to` they become new messages of that topic, to which the caller must be allowed to publish.
    """
    wanted: Redrive = call.body
    group = await existing_group(call)
    if wanted.to is not None:
        call.principal.check("publish", wanted.to)
        # Raises UnknownTopic before anything is done.
        await call.service.port.describe_topic(check_topic_name(wanted.to))
    letters = await asyncio.to_thread(in_order, await _chosen(call, group))
    call.count = len(letters) if wanted.dry_run else 0
    if wanted.dry_run:
        return _told(letters, 0)
    if LINES in call.request.header("accept"):
        return StreamResponse(_lines(call, group, letters), LINES)
    done = 0
    async for done in _redriven(call, group, letters):
        call.count = done  # also if the call is cut short
    return _told(letters, done)


async def _redriven(call: Call, group: ServedGroup, letters: list[ChosenLetter]) -> AsyncIterator[int]:
    """Redrive dead letters at the requested rate. Yields the number done so far."""
    wanted: Redrive = call.body
    loop = asyncio.get_running_loop()
    done, size, due = 0, at_once(wanted.rate), loop.time()
    with Redriving(group.port, wanted.to) as redriving:
        for i in range(0, len(letters), size):
            while (left_s := due - loop.time()) > 0:
                await asyncio.sleep(min(left_s, _STEP_S))
                yield done
            if call.service.leaving:
                return
            done += await asyncio.to_thread(redriving.put_back, letters[i : i + size])
            if wanted.rate is not None:
                due += size / wanted.rate
            yield done


async def _lines(call: Call, group: ServedGroup, letters: list[ChosenLetter]) -> AsyncIterator[bytes]:
    done = 0
    yield framed(RedriveTold(matched=len(letters), done=0, ended=False), LINES)
    try:
        async for done in _redriven(call, group, letters):
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
)
async def purge(call: Call) -> RedriveTold:
    """Drop dead letters for good."""
    wanted: Purge = call.body
    group = await existing_group(call)
    letters = await _chosen(call, group)
    call.count = done = 0
    for i in range(0, 0 if wanted.dry_run else len(letters), _AT_ONCE):
        done += await asyncio.to_thread(drop, letters[i : i + _AT_ONCE])
        call.count = done  # also if the call is cut short
    return _told(letters, done)


def _told(letters: list[ChosenLetter], done: int) -> RedriveTold:
    return RedriveTold(matched=len(letters), done=done, ids=[letter.id for letter in letters[:_MOST_IDS]])


# Delayed messages: list and cancel them.


_BYTES: Final = Bodies(None)

delayed_routes = Routes("delayed")

_Line: TypeAlias = tuple[int, int, int, Any]  # due time, partition, number, message: in the order of the list
_LAST: Final = 2**62  # beyond any number


@delayed_routes.add(
    "GET",
    "/v1/topics/{topic}/delayed",
    action="read",
    query=DelayedQuery,
    answers=ListedMessages,
)
async def list_delayed(call: Call) -> ListedMessages:
    """Messages that wait for their time, the next one first; page by page with `after`."""
    return await call.scan(_delayed, call)


def _delayed(_scan: Scan, call: Call) -> ListedMessages:
    query: DelayedQuery = call.query
    after = None if query.after is None else parse_mark(query.after)
    with call.service.engine.using(call.path["topic"]) as topic:
        room, found, more = BodyAllowance(bodies=query.bodies), [], ""
        lines = [_of_partition(number, each, after, query.limit) for number, each in enumerate(topic.partitions)]
        for _, number, _, message in islice(merge(*lines), query.limit):
            home = PartitionHome(topic.name, number)
            waiting: Waiting[bytes] = Waiting(home, _BYTES, message.record, message.due_at_ms)
            found.append(room.use(told(waiting, bodies=room.left > 0)))
            if len(found) == query.limit:
                more = mark_of(waiting).text
        return ListedMessages(messages=found, next=more, scanned=len(found))


def _of_partition(number: int, partition: Partition, after: Mark | None, limit: int) -> Iterator[_Line]:
    """The delayed messages of a partition after a mark, in the order of the whole list."""
    if partition.delayed is None:
        return
    place: tuple[int, int] | None = None
    if after is not None:
        # Messages due at the same time are listed by partition: lower partitions are done, higher ones are not.
        place = after.due_ms, after.number if number == after.partition else _LAST if number < after.partition else -1
    for message in partition.delayed.waiting(after=place, limit=limit):
        checkpoint()
        yield message.due_at_ms, number, message.record.offset, message


@delayed_routes.add(
    "DELETE",
    "/v1/topics/{topic}/delayed/{id}",
    action="consume",
    answers=Cancelled,
    act=True,
    looks_first=True,  # otherwise any consumer could fill the audit log with ids that never existed
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
    with call.service.engine.using(name) as topic:
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
