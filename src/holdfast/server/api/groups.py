"""Groups of both modes: which there are, where they stand, where they go on."""

from __future__ import annotations

import asyncio
from datetime import datetime

from holdfast.broker.positions import GroupFacts, PartitionLag, lag_of
from holdfast.embedded.topics import GroupInfo
from holdfast.errors import InvalidRequest, UnknownGroup
from holdfast.protocol.groups import (
    GroupOffsets,
    Groups,
    GroupsQuery,
    GroupTold,
    OnTopic,
    ResetDone,
    ResetOffsets,
    ResetTold,
)
from holdfast.server.calls import Call
from holdfast.server.routing import Routes

routes = Routes("groups")


@routes.add(
    "GET",
    "/v1/groups",
    action="read",
    scope="any",
    query=GroupsQuery,
    answers=Groups,
    errors=("unknown_topic",),
)
async def list_groups(call: Call) -> Groups:
    """The groups of a topic, or of all that the caller may see, in both modes."""
    query: GroupsQuery = call.query
    if query.topic is not None:
        call.principal.check("read", query.topic)
    found = [info for info in await call.service.broker.groups(query.topic) if is_shown(call, info)]
    return Groups(groups=found[: query.limit])


def is_shown(call: Call, info: GroupInfo) -> bool:
    """Whether a group is one that the caller may use, on a topic that they may see."""
    return call.principal.sees(info.topic) and call.principal.may_use(info.mode, info.name)


@routes.add("GET", "/v1/groups/{group}", action="read", scope="any", answers=GroupTold, errors=("unknown_group",))
async def describe_group(call: Call) -> GroupTold:
    """A group: on which topics it is, how far behind, and in stream mode its members."""
    name = call.path["group"]
    topics = [info for info in await call.service.broker.groups() if info.name == name and is_shown(call, info)]
    stream = await asyncio.to_thread(_facts, call)
    if not topics and stream is None:
        call.principal.check_group(name)
        raise UnknownGroup(f"there is no group {name}")
    return GroupTold(name=name, topics=topics, stream=stream)


def _facts(call: Call) -> GroupFacts | None:
    """A group in stream mode, if the caller may use it and see all that it reads."""
    streams, name = call.service.broker._engine.streams, call.path["group"]
    if name not in streams.names() or name in streams.spoiled or not call.principal.may_use_group(name):
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
    """The group is the caller's by its name, and all topics that it has to do with are, too."""
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
    """Forget a group and all that it knows: on one topic in queue mode, or one in stream mode as a whole."""
    query: OnTopic = call.query
    await call.service.broker.delete_group(call.path["group"], query.topic)


def _topics(call: Call) -> set[str]:
    """All that a group in stream mode, or a query of another process, has to do with."""
    engine, name = call.service.broker._engine, call.path["group"]
    if name not in engine.streams.names():
        infos = call.service.broker._groups(None)
        return {info.topic for info in infos if info.name == name and info.mode == "query"}
    if name in engine.streams.spoiled:
        return set(engine.topics())  # it may have read any of them
    return engine.streams.group(name).topics()


@routes.add(
    "GET",
    "/v1/groups/{group}/offsets",
    action="read",
    scope="any",
    query=OnTopic,
    answers=GroupOffsets,
    errors=("unknown_topic", "unknown_group"),
)
async def offsets(call: Call) -> GroupOffsets:
    """Where the group goes on in each partition, and how far that is behind."""
    query: OnTopic = call.query
    if query.topic is not None:
        call.principal.check("read", query.topic)
    found = await asyncio.to_thread(_offsets, call, query.topic)
    return GroupOffsets(offsets=[lag for lag in found if call.principal.sees(lag.topic)])


def _offsets(call: Call, wanted: str | None) -> list[PartitionLag]:
    engine, name = call.service.broker._engine, call.path["group"]
    found: list[PartitionLag] = []
    known = False
    if name in engine.streams.names() and call.principal.may_use_group(name):
        known = True
        if name not in engine.streams.spoiled:  # where it goes on nobody knows
            found += [lag for lag in engine.streams.group(name).lag() if wanted in (None, lag.topic)]
    for info in call.service.broker._groups(wanted):
        if info.name == name and info.mode == "queue" and is_shown(call, info):
            known = True
            if info.problem:
                continue
            with engine.using(info.topic) as topic:
                group, now_ns = topic.group(name), engine.world.clock.now_ns()
                found += [
                    lag_of(station.partition.log, (topic.name, station.number), station.delivery.group.floor, now_ns)
                    for station in group.stations
                ]
    if not known:
        call.principal.check_group(name)
        raise UnknownGroup(f"there is no group {name}{'' if wanted is None else f' on {wanted}'}")
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
    with call.service.broker._engine.using(name) as topic:
        return topic.has_group(call.path["group"])


@routes.add(
    "POST",
    "/v1/groups/{group}/reset",
    action="admin",
    scope="any",
    allowed=_may_reset,
    body=ResetOffsets,
    answers=ResetDone,
    act=True,
    errors=("unknown_topic", "unknown_group"),
)
async def reset(call: Call) -> ResetDone:
    """Let a group go on elsewhere; in stream mode it must have nobody at work on the topic."""
    given: ResetOffsets = call.body
    to: list[str | int | datetime] = [each for each in (given.to, given.offset, given.time) if each is not None]
    if len(to) != 1:
        raise InvalidRequest("say where to go on with one of to, offset and time")
    found = await call.service.broker.reset_offsets(
        call.path["group"], given.topic, to=to[0], partition=given.partition, dry_run=given.dry_run
    )
    call.count = len(found)
    partitions = [
        ResetTold(
            topic=each.topic,
            partition=each.partition,
            before=each.before,
            after=each.after,
            messages=each.messages,
        )
        for each in found
    ]
    return ResetDone(partitions=partitions, dry_run=given.dry_run)
