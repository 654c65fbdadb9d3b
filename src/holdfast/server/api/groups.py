"""Groups of both modes: list, describe, delete and reset them; members of stream groups; pauses of queue groups."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime

from holdfast.api.arguments import check_reason
from holdfast.api.contents import home_of, record_of
from holdfast.api.topics import GroupInfo, StreamMessage, to_of
from holdfast.broker.folder.layout import check_name, check_topic_name
from holdfast.broker.streams import GroupFacts, PartitionLag, lag_of
from holdfast.errors import InvalidRequest, UnknownGroup
from holdfast.protocol.messages import InGroup, PauseGroup, PauseTold
from holdfast.protocol.topics import (
    At,
    Beat,
    CommitDone,
    CommitOffsets,
    GroupOffsets,
    Groups,
    GroupsQuery,
    GroupTold,
    Join,
    Joined,
    MoveMember,
    OnTopic,
    Poll,
    Polled,
    ResetDone,
    ResetOffsets,
    ResetTold,
)
from holdfast.server.api.takes import existing_group
from holdfast.server.http.messages import Response
from holdfast.server.limits import check_new_member
from holdfast.server.members import Found, Messages, ServedMember, Waiting
from holdfast.server.routing import Routes
from holdfast.server.served import said
from holdfast.server.service import Call

routes = Routes("groups")


@routes.add("GET", "/v1/groups", action="read", scope="any", query=GroupsQuery, errors=("unknown_topic",))
async def list_groups(call: Call) -> Groups:
    """List the groups of a topic, or of all topics that you may see, in both modes."""
    query: GroupsQuery = call.query
    if query.topic is not None:
        call.principal.check("read", query.topic)
        check_topic_name(query.topic)
    found = [info for info in await call.service.port.groups(query.topic) if is_shown(call, info)]
    return Groups(groups=found[: query.limit])


def is_shown(call: Call, info: GroupInfo) -> bool:
    """Whether the caller may use the group and see its topic."""
    return call.principal.sees(info.topic) and call.principal.may_use(info.mode, info.name)


@routes.add("GET", "/v1/groups/{group}", action="read", scope="any", errors=("unknown_group",))
async def describe_group(call: Call) -> GroupTold:
    """Describe a group: its topics, its lag, and in stream mode its members."""
    name = call.path["group"]
    topics = [info for info in await call.service.port.groups(None) if info.name == name and is_shown(call, info)]
    stream = await asyncio.to_thread(_facts, call)
    if not topics and stream is None:
        call.principal.check_group(name)
        raise UnknownGroup(f"there is no group {name}: list the groups with GET /v1/groups")
    return GroupTold(name=name, topics=topics, stream=stream)


def _facts(call: Call) -> GroupFacts | None:
    """The stream group, if the caller may use it and see all topics that it reads; otherwise None."""
    streams, name = call.service.engine.streams, call.path["group"]
    if name not in streams.names() or name in streams.damaged or not call.principal.may_use_group(name):
        return None
    facts = streams.group(name).describe()
    topics = {lag.topic for lag in facts.lag} | {topic for member in facts.members for topic in member.topics}
    return facts if all(map(call.principal.sees, topics)) else None


async def _may_delete(call: Call) -> None:
    query: OnTopic = call.query
    name = call.path["group"]
    call.target = name if query.topic is None else f"{query.topic}/{name}"
    if query.topic is not None:
        call.principal.check("admin", query.topic)
        call.principal.check_queue_group(name)
    else:
        await _check_stream_group(call)


async def _check_stream_group(call: Call) -> None:
    """Raise Forbidden unless the caller may use the stream group's name and all its topics."""
    call.principal.check_group(call.path["group"])
    for topic in sorted(await asyncio.to_thread(_topics, call)):
        call.principal.check("admin", topic)


@routes.add(
    "DELETE",
    "/v1/groups/{group}",
    action="admin",
    scope="any",
    allowed=_may_delete,
    query=OnTopic,
    status=204,
    act=True,
    errors=("unknown_topic", "unknown_group"),
)
async def delete_group(call: Call) -> None:
    """Delete a group and its position: in queue mode on one topic, in stream mode on all of them."""
    query: OnTopic = call.query
    await call.service.port.delete_group(check_name(call.path["group"], "group"), query.topic)


def _topics(call: Call) -> set[str]:
    """The topics that a stream group, or a query of another process, reads or has read."""
    engine, name = call.service.engine, call.path["group"]
    if name not in engine.streams.names():
        infos = call.service.port.groups_now(None)
        return {info.topic for info in infos if info.name == name and info.mode == "query"}
    if name in engine.streams.damaged:
        return set(engine.topics())  # damaged: it may have read any topic
    return engine.streams.group(name).topics()


@routes.add(
    "GET",
    "/v1/groups/{group}/offsets",
    action="read",
    scope="any",
    query=OnTopic,
    errors=("unknown_topic", "unknown_group"),
)
async def offsets(call: Call) -> GroupOffsets:
    """Return the group's position in each partition, and its lag."""
    query: OnTopic = call.query
    if query.topic is not None:
        call.principal.check("read", query.topic)
        check_topic_name(query.topic)
    found = await asyncio.to_thread(_offsets, call, query.topic)
    return GroupOffsets(offsets=[lag for lag in found if call.principal.sees(lag.topic)])


def _offsets(call: Call, wanted: str | None) -> list[PartitionLag]:
    engine, name = call.service.engine, call.path["group"]
    found: list[PartitionLag] = []
    known = False
    if name in engine.streams.names() and call.principal.may_use_group(name):
        known = True
        if name not in engine.streams.damaged:  # the positions of a damaged group are unknown
            found += [lag for lag in engine.streams.group(name).lag() if wanted in (None, lag.topic)]
    for info in call.service.port.groups_now(wanted):
        if info.name == name and info.mode == "queue" and is_shown(call, info):
            known = True
            if info.problem:
                continue
            with engine.using(info.topic) as topic:
                group, now_ns = topic.group(name), engine.world.clock.now_ns()
                found += [
                    lag_of(delivery.partition.log, (topic.name, delivery.number), delivery.group.floor, now_ns)
                    for delivery in group.deliveries
                ]
    if not known:
        call.principal.check_group(name)
        where = "" if wanted is None else f" on {wanted}"
        raise UnknownGroup(f"there is no group {name}{where}: list the groups with GET /v1/groups")
    return found


async def _may_reset(call: Call) -> None:
    given: ResetOffsets = call.body
    call.target = f"{given.topic}/{call.path['group']}"
    call.principal.check("admin", given.topic)
    if await asyncio.to_thread(_is_in_queue_mode, call, given.topic):
        call.principal.check_queue_group(call.path["group"])
    else:
        await _check_stream_group(call)


def _is_in_queue_mode(call: Call, name: str) -> bool:
    with call.service.engine.using(name) as topic:
        return topic.has_group(call.path["group"])


@routes.add(
    "POST",
    "/v1/groups/{group}/reset",
    action="admin",
    scope="any",
    allowed=_may_reset,
    body=ResetOffsets,
    act=True,
    errors=("unknown_topic", "unknown_group"),
)
async def reset(call: Call) -> ResetDone:
    """Move the group's position; in stream mode it must have no active members on the topic."""
    given: ResetOffsets = call.body
    to: list[str | int | datetime] = [each for each in (given.to, given.offset, given.time) if each is not None]
    if len(to) != 1:
        raise InvalidRequest("give exactly one of to, offset and time")
    where, group = to_of(to[0]), check_name(call.path["group"], "group")
    found = await call.service.port.reset_offsets(
        group, check_topic_name(given.topic), where, given.partition, dry_run=given.dry_run
    )
    call.count = len(found)
    partitions = [
        ResetTold(
            topic=each.topic, partition=each.partition, before=each.before, after=each.after, messages=each.messages
        )
        for each in found
    ]
    return ResetDone(partitions=partitions, dry_run=given.dry_run)


# Members of stream groups: join, heartbeat, poll, commit, leave.


_FEW = 100  # messages that are encoded on the event loop; more go to a thread
_MEMBER = "/v1/groups/{group}/members/{member}"


def _member(call: Call) -> ServedMember:
    """The member in the path. Raises Forbidden unless the caller may use its group and all topics it reads."""
    call.principal.check_group(call.path["group"])
    member = call.service.members.find(call.path["group"], call.path["member"])
    for topic in member.topics:
        call.principal.check("consume", topic)
    return member


async def _may_join(call: Call) -> None:
    """Raise Forbidden unless the caller may use the group and all its topics: its members share them."""
    wanted: Join = call.body
    name, principal = call.path["group"], call.principal
    principal.check_group(name)
    for topic in wanted.topics:
        principal.check("consume", topic)
    streams = call.service.engine.streams
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
    status=201,
    errors=("unknown_topic", "bad_settings", "fenced"),
)
async def join(call: Call) -> Joined:
    """Join a group in stream mode, which is created if it does not exist."""
    wanted: Join = call.body
    engine, most = call.service.engine, call.service.settings.max_groups
    await asyncio.to_thread(check_new_member, engine, wanted.topics, call.path["group"], most)
    member = await call.service.members.join(call.path["group"], wanted, wanted.owner or call.principal.name)
    settings = member.port.settings
    return Joined(
        member=member.id,
        assignment=member.assignment(),
        epoch=member.epoch,
        session_ms=settings.session_ms,
        heartbeat_ms=settings.heartbeat_ms,
    )


@routes.add("POST", f"{_MEMBER}/heartbeat", action="consume", scope="any", errors=("fenced",))
async def heartbeat(call: Call) -> Beat:
    """Keep the member alive; needed if it polls less often than its session lasts."""
    member = _member(call)
    return Beat(assignment=member.assignment(), epoch=member.epoch)


def _waiting(call: Call) -> Waiting:
    """How a poll waits: within the limit on waiting calls, until the server stops or the token is revoked."""
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
    """Commit what was handled, then return the next messages of the member's partitions; waits for at least one."""
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
            return _poll_answer(call, polled, found)
        return await service.pool.run(lambda _: _poll_answer(call, polled, found))


def _poll_answer(call: Call, polled: Polled, found: Found) -> Response:
    polled.messages = [call.encoded(said(home_of(each), record_of(each))) for each in found]
    return call.answer(polled)


@routes.add(
    "POST",
    f"{_MEMBER}/commit",
    action="consume",
    scope="any",
    body=CommitOffsets,
    errors=("fenced", "offset_out_of_range", "unknown_topic"),
)
async def commit(call: Call) -> CommitDone:
    """Commit offsets of the member: for all these partitions, or, if one of them is no longer its own, for none."""
    given: CommitOffsets = call.body
    member = _member(call)
    async with member.turn():
        return CommitDone(committed=await member.commit(given.offsets, given.durability))


@routes.add(
    "POST", f"{_MEMBER}/seek", action="consume", scope="any", body=MoveMember, errors=("fenced", "offset_out_of_range")
)
async def seek(call: Call) -> Beat:
    """Move the position of the member, without committing it."""
    member = _member(call)
    async with member.turn():
        await member.move(call.body)
        return Beat(assignment=member.assignment(), epoch=member.epoch)


@routes.add("DELETE", _MEMBER, action="consume", scope="any", status=204, errors=("fenced",))
async def leave(call: Call) -> None:
    """Leave the group; others take over at once. A static member keeps its place until its session ends."""
    _member(call)
    await call.service.members.leave(call.path["group"], call.path["member"])


# Pausing a group in queue mode.


pause_routes = Routes("queues")


@pause_routes.add("POST", "/v1/queues/{queue}/pause", action="admin", query=InGroup, body=PauseGroup, act=True)
async def pause(call: Call) -> PauseTold:
    """Stop delivery to the group until it is resumed. Messages in flight can be settled, and publishing continues."""
    given: PauseGroup = call.body
    check_reason(given.reason)
    group = await existing_group(call)
    changed = await group.port.pause_group(given.reason)
    return PauseTold(changed=changed, paused=group.queue_group.paused)


@pause_routes.add("POST", "/v1/queues/{queue}/resume", action="admin", query=InGroup, body=InGroup, act=True)
async def resume(call: Call) -> PauseTold:
    """Resume delivery, and wake callers that are waiting."""
    group = await existing_group(call)
    changed = await group.port.resume_group()
    return PauseTold(changed=changed, paused=group.queue_group.paused)
