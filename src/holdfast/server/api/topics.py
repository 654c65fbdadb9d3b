"""Topics: create, change and delete them; publish to them and read them by offset."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import msgspec

from holdfast.api.contents import Contents, home_of, record_of
from holdfast.api.topics import TopicInfo, changes_of, check_changes, check_read
from holdfast.broker.folder.contents import differing_settings
from holdfast.broker.folder.layout import check_readable_name, check_topic_name, partition_folder
from holdfast.broker.inspect import TopicStanding
from holdfast.broker.inspect.messages import count_beside
from holdfast.broker.inspect.status import FolderStatus
from holdfast.broker.partition import Partition
from holdfast.broker.upkeep import reading
from holdfast.broker.waiters import TaskWaiter, Waiters
from holdfast.codec.frame import stored_frame
from holdfast.errors import DamagedRange, InvalidRequest, NotInCluster, Unavailable, UnknownTopic
from holdfast.large import CHUNK_BYTES
from holdfast.local.aio.group import AsyncLocalGroupPort
from holdfast.model import Retained, extra_bytes
from holdfast.protocol.cluster import MoveTopic, TopicMoved
from holdfast.protocol.media import RAW
from holdfast.protocol.messages import Said
from holdfast.protocol.topics import (
    AddPartitions,
    AlterTopic,
    CreateGroup,
    CreateTopic,
    FramesQuery,
    GroupSettings,
    ReadMessages,
    ReadQuery,
    StandingQuery,
    Standings,
    Topics,
    TopicsQuery,
)
from holdfast.server.api.enqueue import BATCH_FACTS, drafts, publish, stored_batch
from holdfast.server.http.messages import ANSWER_BYTES, Response, StreamResponse
from holdfast.server.limits import check_partitions
from holdfast.server.routing import Routes
from holdfast.server.served import said
from holdfast.server.service import Call, TopicMover, partition_of
from holdfast.server.turns import Scan
from holdfast.settings import TopicSettings
from holdfast.storage.compaction import KeysCompacted
from holdfast.storage.log import Log

routes = Routes("topics")

_PUT_S: Final = 15.0  # how long a new topic may take to be put into a shard
_FEW: Final = 100  # messages that are encoded on the event loop; more go to a thread


@routes.add("GET", "/v1/topics", action="read", scope="any", query=TopicsQuery)
async def list_topics(call: Call) -> Topics:
    """List the topics that you may see, by name."""
    query: TopicsQuery = call.query
    port, after = call.service.port, query.after or ""
    names = [name for name in sorted(await port.topics()) if name > after and call.principal.sees(name)]
    found = []
    for name in names[: query.limit]:
        try:
            found.append(visible_topic(call, await port.describe_topic(name)))
        except UnknownTopic:
            continue  # deleted meanwhile
    return Topics(topics=found, more=len(names) > query.limit)


async def described(call: Call, topic: str) -> TopicInfo:
    """What a topic, or its dead letters, is and holds, as the caller may see it."""
    return visible_topic(call, await call.service.port.describe_topic(check_readable_name(topic)))


def visible_topic(call: Call, info: TopicInfo) -> TopicInfo:
    """The topic, with only those of its groups that the caller may use."""
    principal, mover = call.principal, call.service.mover
    return msgspec.structs.replace(
        info,
        shard=None if mover is None else mover.shard,
        groups=[name for name in info.groups if principal.may_use_queue_group(name)],
        stream_groups=[name for name in info.stream_groups if principal.may_use_group(name)],
    )


async def _may_create(call: Call) -> None:
    wanted: CreateTopic = call.body
    call.target = wanted.name
    call.principal.check("admin", wanted.name)


@routes.add(
    "POST",
    "/v1/topics",
    action="admin",
    scope="any",
    allowed=_may_create,
    body=CreateTopic,
    status=201,
    act=True,
    errors=("topic_exists", "bad_settings"),
)
async def create_topic(call: Call) -> TopicInfo:
    """Create a topic."""
    wanted: CreateTopic = call.body
    changes = changes_of(wanted.settings)
    if wanted.partitions is not None:
        changes["partitions"] = wanted.partitions
    check_new(call, changes)
    if wanted.shard is not None:
        await _put_here(call, wanted.name)
    info = await call.service.port.create_topic(wanted.name, None, changes, exist_ok=wanted.exist_ok)
    return visible_topic(call, info)


async def _put_here(call: Call, topic: str) -> None:
    """Have a name belong to this shard. Raises TopicExists if another shard has a topic of this name."""
    mover = _mover(call)
    told = await mover.move(topic, _PUT_S, only_new=True)
    if not told.moved:
        raise Unavailable(f"{topic} was not put into shard {mover.shard} in time; try again")


def _mover(call: Call) -> TopicMover:
    mover = call.service.mover
    if mover is None:
        raise InvalidRequest("this server is not a node of a cluster, so there are no shards to choose from")
    return mover


@routes.add(
    "POST", "/v1/topics/{topic}/move", action="admin", body=MoveTopic, act=True, errors=("unknown_topic", "conflict")
)
async def move_topic(call: Call) -> TopicMoved:
    """Move a topic to another shard of the cluster. Repeat the call until `moved` is true: it tells how far it is."""
    wanted: MoveTopic = call.body
    return await _mover(call).move(check_topic_name(call.path["topic"]), wanted.wait)


@routes.add("GET", "/v1/topics/{topic}", action="read")
async def describe_topic(call: Call) -> TopicInfo:
    """Describe a topic: its partitions, groups and settings."""
    return await described(call, call.path["topic"])


@routes.add("PATCH", "/v1/topics/{topic}", action="admin", body=AlterTopic, act=True, errors=("bad_settings",))
async def alter_topic(call: Call) -> TopicInfo:
    """Change settings of a topic; they take effect at once and are stored."""
    given: AlterTopic = call.body
    return visible_topic(call, await altered(call, call.path["topic"], given.settings))


def check_new(call: Call, changes: Mapping[str, Any]) -> None:
    """Refuse settings of a new topic that are beyond the limits for callers."""
    check_partitions(changes.get("partitions"), 0, call.service.settings.max_partitions)
    _check_schemas(call, changes)


def _check_schemas(call: Call, changes: Mapping[str, Any]) -> None:
    """Refuse a check that would look for schemas in the topic's own shard: the registry is in another one."""
    if call.service.is_shard and changes.get("schema_check", "off") != "off":
        raise NotInCluster(
            f"schema_check={changes['schema_check']!r} cannot be used in a cluster yet; check messages where they are "
            "published, with the serializers of the registry's clients"
        )


async def altered(call: Call, topic: str, changes: Mapping[str, Any]) -> TopicInfo:
    """Change settings of a topic within the limits for callers. Returns the changed topic."""
    _check_schemas(call, changes)
    if "partitions" in changes:
        known = len((await described(call, topic)).partitions)
        check_partitions(changes["partitions"], known, call.service.settings.max_partitions)
    return await call.service.port.alter_topic(topic, check_changes(changes))


@routes.add("DELETE", "/v1/topics/{topic}", action="admin", status=204, act=True)
async def delete_topic(call: Call) -> None:
    """Delete a topic with all its messages, groups and dead letters."""
    await call.service.port.delete_topic(call.path["topic"])


@routes.add(
    "POST", "/v1/topics/{topic}/partitions", action="admin", body=AddPartitions, act=True, errors=("bad_settings",)
)
async def add_partitions(call: Call) -> TopicInfo:
    """Add partitions to a topic. Keys may go to other partitions from now on."""
    given: AddPartitions = call.body
    topic = call.path["topic"]
    known = len((await described(call, topic)).partitions)
    check_partitions(known + given.count, known, call.service.settings.max_partitions)
    return visible_topic(call, await call.service.port.add_partitions(topic, given.count))


@routes.add("POST", "/v1/topics/{topic}/compact", action="admin", act=True)
async def compact_topic(call: Call) -> KeysCompacted:
    """Keep only the last message of each key, now; offsets never change. The topic's `cleanup` must allow it."""
    return await call.service.port.compact_topic(check_topic_name(call.path["topic"]))


@routes.add("POST", "/v1/topics/{topic}/apply-retention", action="admin", act=True)
async def apply_retention(call: Call) -> Retained:
    """Apply the retention settings of the topic now, instead of waiting for the regular upkeep."""
    return await call.service.port.apply_retention(check_topic_name(call.path["topic"]))


async def _may_create_group(call: Call) -> None:
    call.principal.check_queue_group(call.path["group"])


@routes.add(
    "PUT",
    "/v1/topics/{topic}/groups/{group}",
    action="admin",
    allowed=_may_create_group,
    body=CreateGroup,
    act=True,
    errors=("bad_settings",),
)
async def create_group(call: Call) -> GroupSettings:
    """Create a group in queue mode, or change the settings of an existing one."""
    wanted: CreateGroup = call.body
    topic, name = call.path["topic"], call.path["group"]
    changes = wanted.settings
    group = await call.service.port.served_group(
        AsyncLocalGroupPort, topic, name, check=call.service.check_group, start=wanted.start, changes=changes
    )
    try:
        return GroupSettings(name=name, topic=topic, settings=differing_settings(group.settings, TopicSettings()))
    finally:
        await group.close()


@routes.add(
    "POST",
    "/v1/topics/{topic}/messages",
    action="publish",
    **BATCH_FACTS,
    errors=("message_too_large", "queue_full", "disk_full"),
)
async def publish_messages(call: Call) -> Response:
    """Store messages, for each partition all or none: as JSON, MessagePack, or one JSON object per line."""
    return await stored_batch(call, await publish(call, call.path["topic"], await drafts(call), call.query))


@routes.add(
    "GET",
    "/v1/topics/{topic}/partitions/{partition}/messages",
    action="read",
    query=ReadQuery,
    answers=ReadMessages,
    errors=("offset_out_of_range", "damaged_range", "too_many_waiters"),
)
async def read_messages(call: Call) -> Response:
    """Read messages of a partition from an offset on, whoever holds them; `wait` waits for new ones.

    Where the next ones are damaged, the error `damaged_range` says where to read on; `on_damage=skip` leaves them out.
    """
    query: ReadQuery = call.query
    service, engine = call.service, call.service.engine
    topic, number = call.path["topic"], partition_of(call.path)
    with reading(engine.using, topic) as opened:
        chosen = partial(opened.partition, number)
        partition = await asyncio.to_thread(chosen) if opened.dead else chosen()  # it may have to be created
        log = partition.log
        offset = log.start if query.offset is None else query.offset
        found = await _read(call, offset, query.limit)
        if not found and query.wait and offset == log.end and not service.leaving:
            most_s = service.settings.max_wait_ms / 1000
            wait_s = most_s if query.wait < 0 else min(query.wait, most_s)
            with service.waits.one_more(call.principal):
                found = await service.wait(call, _arrived(call, partition, offset, wait_s), [])
            call.confirm()
        if len(found) <= _FEW:
            return _read_answer(call, found, offset, log)
        return await service.pool.run(lambda _: _read_answer(call, found, offset, log))


_FRAMES: Final[dict[str, Any]] = {"query": FramesQuery, "gives": (RAW,), "plain": False}


@routes.add(
    "GET",
    "/v1/topics/{topic}/partitions/{partition}/frames",
    action="read",
    **_FRAMES,
    errors=("offset_out_of_range", "damaged_range"),
)
async def read_frames(call: Call) -> StreamResponse:
    """Return the messages of a partition as they are stored, frame by frame; empty at the end of the log.

    The first frame may begin before the offset, and the last may end behind `stop`.
    """
    query: FramesQuery = call.query
    topic, number = call.path["topic"], partition_of(call.path)
    with reading(call.service.engine.using, topic) as opened:
        log = (await asyncio.to_thread(opened.partition, number)).log
        parts = await asyncio.to_thread(_stored, log, query)
    return StreamResponse(_in_chunks(parts), RAW, length=sum(map(len, parts)))


def _stored(log: Log, query: FramesQuery) -> list[bytes | memoryview]:
    """The parts of whole frames, at least one if there is any; bodies are views of the segments' files."""
    parts: list[bytes | memoryview] = []
    left = min(query.bytes, ANSWER_BYTES)
    try:
        for frame in log.read(query.offset):
            header = frame.header
            length = header.end - header.position
            if (query.stop is not None and header.base_offset >= query.stop) or (parts and length > left):
                break
            parts += stored_frame(frame)
            left -= length
    except DamagedRange:
        if not parts:  # otherwise the next call tells
            raise
    return parts


async def _in_chunks(parts: Sequence[bytes | memoryview]) -> AsyncIterator[bytes]:
    gathered: list[bytes | memoryview] = []
    size = 0
    for part in parts:
        for at in range(0, len(part), CHUNK_BYTES):
            piece = part[at : at + CHUNK_BYTES]
            gathered.append(piece)
            size += len(piece)
            if size >= CHUNK_BYTES:
                yield b"".join(gathered)
                gathered, size = [], 0
    if gathered:
        yield b"".join(gathered)


def _read_answer(call: Call, found: list[Contents[bytes]], offset: int, log: Log) -> Response:
    query: ReadQuery = call.query
    messages: list[Said] = []
    next_offset = max(offset, log.end)  # skips messages that are gone or damaged
    for message in _within(found, bodies=query.bodies):
        messages.append(call.encoded(message))
        next_offset = message.offset + 1
    return call.answer(ReadMessages(messages=messages, next_offset=next_offset, start=log.start, end=log.end))


async def _read(call: Call, offset: int, limit: int) -> list[Contents[bytes]]:
    query: ReadQuery = call.query
    check_read(offset, limit, query.on_damage)
    read = partial(call.service.port.read_now, on_damage=query.on_damage)
    return await asyncio.to_thread(read, call.path["topic"], partition_of(call.path), offset, limit, ANSWER_BYTES)


async def _arrived(call: Call, partition: Partition, offset: int, wait_s: float) -> list[Contents[bytes]]:
    """Wait for messages at the end of a partition, up to `wait_s`."""
    query: ReadQuery = call.query
    loop = asyncio.get_running_loop()
    until = loop.time() + wait_s
    waiter = TaskWaiter(call.service.world.clock)
    with listening(partition) as line:
        while True:
            with line.in_line(waiter):
                found = await _read(call, offset, query.limit)  # arrivals before we waited wake nobody
                left_s = until - loop.time()
                if found or left_s <= 0:
                    return found
                await waiter.wait(left_s)


@contextmanager
def listening(*partitions: Partition) -> Iterator[Waiters]:
    """Waiters that arrivals in the partitions wake, in addition to the consumers."""
    line = Waiters()
    for partition in partitions:
        partition.join(line)
    try:
        yield line
    finally:
        for partition in partitions:
            partition.leave(line)


def _within(found: list[Contents[bytes]], *, bodies: bool) -> Iterator[Said]:
    """Yield as many of the messages as one answer should hold."""
    size = 0
    for each in found:
        message = said(home_of(each), record_of(each))
        if not bodies:
            message.body, message.omitted = b"", True
        more = len(message.body) + extra_bytes(record_of(each))
        if size and size + more > ANSWER_BYTES:
            return
        size += more
        yield message


# Topics with all their groups, partition by partition, as `holdfast topic`, `group` and `top` show them.


@routes.add("GET", "/v1/standing", action="read", scope="any", query=StandingQuery, errors=("unknown_topic",))
async def standing(call: Call) -> Standings:
    """List topics with their partitions and groups, and each group's messages in flight and lag."""
    query: StandingQuery = call.query
    if query.topic is not None:
        call.principal.check("read", query.topic)
    return await call.scan(_look, call)


def _look(scan: Scan, call: Call) -> Standings:
    """Read the state from the files, as another process would, so that no other call waits."""
    query: StandingQuery = call.query
    found = FolderStatus(call.service.world, call.service.folder)
    if query.topic is not None:
        return _standing_answer(call, [found.topic(query.topic)])
    names = [name for name in found.names() if name > (query.after or "") and call.principal.sees(name)]
    topics: list[TopicStanding] = []
    for name in names[: query.limit]:
        scan.step()
        topics += found.if_there(name)
    return _standing_answer(call, topics, names[query.limit - 1] if len(names) > query.limit > 0 else "")


def _standing_answer(call: Call, topics: list[TopicStanding], following: str = "") -> Standings:
    seen = [_shown(call, topic) for topic in topics]
    return Standings(topics=seen, delayed={topic.name: _delayed(call, topic) for topic in seen}, next=following)


def _shown(call: Call, topic: TopicStanding) -> TopicStanding:
    """The topic, with only those of its groups that the caller may use."""
    groups = [group for group in topic.groups if call.principal.may_use(group.mode, group.name)]
    return msgspec.structs.replace(topic, groups=groups)


def _delayed(call: Call, topic: TopicStanding) -> int:
    service = call.service
    return sum(
        count_beside(service.world, partition_folder(service.folder, topic.name, each.number))
        for each in topic.partitions
    )
