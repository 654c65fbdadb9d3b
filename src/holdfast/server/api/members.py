"""Members of a group in stream mode, over the wire: join, be heard of, poll, commit, leave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from holdfast.embedded.feeds import StreamMessage
from holdfast.protocol.groups import (
    At,
    Beat,
    CommitDone,
    CommitOffsets,
    Join,
    Joined,
    MoveMember,
    Poll,
    Polled,
)
from holdfast.server.calls import Call
from holdfast.server.caps import check_new_member
from holdfast.server.http.messages import Response
from holdfast.server.members import Found, Member, Messages, Waiting
from holdfast.server.routing import Routes
from holdfast.server.served import said

routes = Routes("groups")

_FEW = 100  # messages that are told at once, and not on a thread
_MEMBER = "/v1/groups/{group}/members/{member}"


def _member(call: Call) -> Member:
    """The member that the path names, if the group is the caller's to use, and all that the member reads, too."""
    call.principal.check_group(call.path["group"])
    member = call.service.members.find(call.path["group"], call.path["member"])
    for topic in member.topics:
        call.principal.check("consume", topic)
    return member


async def _may_join(call: Call) -> None:
    """The group's name must be the caller's, and all that the group reads or has read: its members share that."""
    wanted: Join = call.body
    name, principal = call.path["group"], call.principal
    principal.check_group(name)
    for topic in wanted.topics:
        principal.check("consume", topic)
    streams = call.service.broker._engine.streams
    if name not in streams.names():
        principal.check_creates_group(name)
    else:
        for topic in sorted(await asyncio.to_thread(streams.group(name).topics)):
            principal.check("consume", topic)


@routes.add(
    "POST",
    "/v1/groups/{group}/members",
    action="consume",
    scope="any",
    allowed=_may_join,
    body=Join,
    answers=Joined,
    status=201,
    errors=("unknown_topic", "bad_settings", "fenced"),
)
async def join(call: Call) -> Joined:
    """Join a group in stream mode, which is made where there is none."""
    wanted: Join = call.body
    engine, most = call.service.broker._engine, call.service.settings.max_groups
    await asyncio.to_thread(check_new_member, engine, wanted.topics, call.path["group"], most)
    member = await call.service.members.join(call.path["group"], wanted, wanted.owner or call.principal.name)
    settings = member.consumer.settings
    return Joined(
        member=member.id,
        assignment=member.assignment(),
        epoch=member.epoch,
        session_ms=settings.session_ms,
        heartbeat_ms=settings.heartbeat_ms,
    )


@routes.add("POST", f"{_MEMBER}/heartbeat", action="consume", scope="any", answers=Beat, errors=("fenced",))
async def heartbeat(call: Call) -> Beat:
    """The member lives; needed between polls that are further apart than its session."""
    member = _member(call)
    return Beat(assignment=member.assignment(), epoch=member.epoch)


def _waiting(call: Call) -> Waiting:
    """How a poll waits: within the limits of all who do, not when the server goes, nor when its token does."""
    service = call.service

    async def wait(some: Callable[[], Messages]) -> list[StreamMessage[bytes]]:
        with service.waits.one_more(call.principal):
            found = await service.wait(call, some(), [])
        call.confirm()
        return found

    return wait


@routes.add(
    "POST",
    f"{_MEMBER}/poll",
    action="consume",
    scope="any",
    body=Poll,
    answers=Polled,
    errors=("fenced", "offset_out_of_range", "too_many_waiters"),
)
async def poll(call: Call) -> Response:
    """Commit what was handled, then the next messages of the member's partitions; waits for at least one."""
    wanted: Poll = call.body
    service, member = call.service, _member(call)
    most_s = service.settings.max_wait_ms / 1000
    wait_s = most_s if wanted.wait < 0 else min(wanted.wait, most_s)
    async with member.turn():
        found, refused = await member.poll(wanted, 0 if service.leaving else wait_s, _waiting(call))
        service.members.heard(member)
        polled = Polled(
            messages=[],
            assignment=member.assignment(),
            epoch=member.epoch,
            refused=[At(topic=topic, partition=partition) for topic, partition in refused],
        )
        if len(found) <= _FEW:
            return _told(call, polled, found)
        return await service.pool.run(lambda _: _told(call, polled, found))


def _told(call: Call, polled: Polled, found: Found) -> Response:
    polled.messages = [said(each._home, each._record) for each in found]
    return call.answer(polled)


@routes.add(
    "POST",
    f"{_MEMBER}/commit",
    action="consume",
    scope="any",
    body=CommitOffsets,
    answers=CommitDone,
    errors=("fenced", "offset_out_of_range", "unknown_topic"),
)
async def commit(call: Call) -> CommitDone:
    """Note how far the member came: for all these partitions, or, where one is not its own any more, for none."""
    given: CommitOffsets = call.body
    member = _member(call)
    async with member.turn():
        return CommitDone(committed=await member.commit(given.offsets, given.durability))


@routes.add(
    "POST",
    f"{_MEMBER}/seek",
    action="consume",
    scope="any",
    body=MoveMember,
    answers=Beat,
    errors=("fenced", "offset_out_of_range"),
)
async def seek(call: Call) -> Beat:
    """Let the member read on elsewhere; nothing is committed by that."""
    member = _member(call)
    async with member.turn():
        member.move(call.body)
        return Beat(assignment=member.assignment(), epoch=member.epoch)


@routes.add("DELETE", _MEMBER, action="consume", scope="any", status=204, errors=("fenced",))
async def leave(call: Call) -> None:
    """Leave the group; others take over at once. A static member keeps its place until its session ends."""
    _member(call)
    await call.service.members.leave(call.path["group"], call.path["member"])
