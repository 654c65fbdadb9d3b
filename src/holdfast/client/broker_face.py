"""What the brokers for threads and for tasks share: every call written once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, Final, NoReturn, TypeVar
from weakref import WeakSet

import msgspec

from holdfast.api.arguments import switch
from holdfast.api.bodies import Bodies, kind_of
from holdfast.api.contents import Contents
from holdfast.api.drafts import Stored
from holdfast.api.times import duration_ms, instant_ns, to_datetime
from holdfast.broker.folder.layout import DEFAULT_GROUP, check_name, check_readable_name, check_topic_name
from holdfast.broker.streams.positions import Reset
from holdfast.broker.tracing.log import TraceStats
from holdfast.broker.tracing.steps import TraceStep
from holdfast.client.calling import packed
from holdfast.client.client import Client
from holdfast.client.http import Ask, path_of
from holdfast.embedded.topics import GroupInfo, TopicInfo, changes_of, changes_to, to_of
from holdfast.env import refuse_to_pickle
from holdfast.errors import BadSettings, DamagedRange, DiskFull, Forbidden, InvalidRequest, NotAQueue, UnknownTopic
from holdfast.model import BodyKind, CodecName, Durability, Retained
from holdfast.protocol import groups as wire_groups
from holdfast.protocol import topics as wire
from holdfast.protocol.queues import CreateQueue
from holdfast.protocol.traces import Steps
from holdfast.remote.records import contents_told
from holdfast.settings import BrokerSettings, QueueSettings, TopicSettings
from holdfast.storage.compaction import KeysCompacted

_Group = TypeVar("_Group")

_MOST_READ: Final = 10_000
_MOST_AT_ONCE: Final = 100_000


class RemoteBrokerFace:
    """One server, seen by a user."""

    def __init__(self, client: Client, body_type: Any, durability: Durability | None = None) -> None:
        self._client = client
        self._caller = client.caller
        self._bodies_type = body_type
        self._bodies = Bodies(body_type)
        self._durability = durability
        self._sending: WeakSet[Any] = WeakSet()  # producers, which may have messages that are not stored yet

    @property
    def folder(self) -> str:
        """Where it is: the address of the server."""
        return self._caller.address.text

    @property
    def settings(self) -> BrokerSettings:
        """The defaults: those in force are the server's own, and `holdfast config show --at URL` tells them."""
        return BrokerSettings()

    @property
    def closed(self) -> bool:
        return self._caller.closed

    def __reduce__(self) -> NoReturn:
        refuse_to_pickle(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.folder}{' (closed)' if self.closed else ''}>"

    def _body_type(self, given: Any) -> Any:
        return self._bodies_type if given is None else given

    async def _ask(self, method: str, path: str, answers: Any, body: Any = None, *, again: bool = True) -> Any:
        content = b"" if body is None else packed(body)
        return await self._caller.call(Ask(method=method, path=path, body=content, answers=answers, again=again))

    async def _create_topic(
        self, name: str, partitions: int | None, changes: Mapping[str, Any], *, exist_ok: bool
    ) -> TopicInfo:
        name, exist_ok = check_topic_name(name), switch(exist_ok, "exist_ok")
        settings = _plain(changes_of(changes))
        if self._bodies_type is not None:
            settings.setdefault("bodies", kind_of(self._bodies_type))
        body = wire.CreateTopic(name=name, partitions=partitions, settings=settings, exist_ok=exist_ok)
        info: TopicInfo = await self._ask("POST", path_of("topics"), TopicInfo, body, again=exist_ok)
        return info

    async def _alter_topic(self, name: str, changes: Mapping[str, Any]) -> TopicInfo:
        if not changes:
            raise BadSettings("alter_topic changes settings: give at least one, such as max_attempts=3")
        body = wire.AlterTopic(settings=_plain(changes_of(changes)))
        info: TopicInfo = await self._ask("PATCH", path_of("topics", check_topic_name(name)), TopicInfo, body)
        self._client.publishing.forget(name)
        return info

    async def _add_partitions(self, name: str, count: int) -> TopicInfo:
        if type(count) is not int or count < 1:
            raise InvalidRequest(f"count={count!r} cannot be used: give how many partitions to add, 1 or more")
        path = path_of("topics", check_topic_name(name), "partitions")
        info: TopicInfo = await self._ask("POST", path, TopicInfo, wire.AddPartitions(count=count), again=False)
        self._client.publishing.forget(name)
        return info

    async def _describe_topic(self, name: str) -> TopicInfo:
        info: TopicInfo = await self._ask("GET", path_of("topics", check_readable_name(name)), TopicInfo)
        return info

    async def _topics(self) -> list[str]:
        found: list[str] = []
        more = True
        while more:
            after = found[-1] if found else None
            some: wire.Topics = await self._ask("GET", path_of("topics", after=after), wire.Topics)
            found += [info.name for info in some.topics]
            more = some.more and bool(some.topics)
        return found

    async def _delete_topic(self, name: str) -> None:
        try:
            await self._ask("DELETE", path_of("topics", check_topic_name(name)), None)
        except UnknownTopic as error:
            if not getattr(error, "repeated", False):  # otherwise the attempt before has done it
                raise
        self._client.publishing.forget(name)

    async def _compact_topic(self, name: str) -> KeysCompacted:
        path = path_of("topics", check_topic_name(name), "compact")
        done: KeysCompacted = await self._ask("POST", path, KeysCompacted)
        return done

    async def _apply_retention(self, name: str) -> Retained:
        path = path_of("topics", check_topic_name(name), "apply-retention")
        gone: Retained = await self._ask("POST", path, Retained)
        return gone

    async def _publish(
        self,
        topic: str,
        messages: Iterable[Any],
        partition: int | None,
        durability: Durability | None,
        codec: CodecName | None,
    ) -> list[Stored]:
        return await self._client.publishing.publish(
            check_topic_name(topic),
            messages,
            self._bodies,
            partition=partition,
            durability=durability or self._durability,
            codec=codec,
        )

    async def _read(
        self, topic: str, partition: int, offset: int | None, limit: int, on_damage: str
    ) -> list[Contents[Any]]:
        if type(limit) is not int or not 1 <= limit <= _MOST_AT_ONCE:
            raise InvalidRequest(f"limit={limit!r} cannot be used: give a whole number from 1 to {_MOST_AT_ONCE}")
        if offset is not None and type(offset) is not int:
            raise InvalidRequest(f"offset={offset!r} is no offset; give a whole number")
        if type(partition) is not int or partition < 0:
            raise UnknownTopic(f"topic {topic} has no partition {partition!r}")
        if on_damage not in ("raise", "skip"):
            raise InvalidRequest(f'on_damage={on_damage!r} cannot be used: "raise" or "skip"')
        found: list[Contents[Any]] = []
        while len(found) < limit:
            query: dict[str, Any] = {"offset": offset, "limit": min(limit - len(found), _MOST_READ)}
            if on_damage != "raise":  # an older server knows nothing of it
                query["on_damage"] = on_damage
            path = path_of("topics", check_readable_name(topic), "partitions", partition, "messages", **query)
            try:
                some: wire.ReadMessages = await self._ask("GET", path, wire.ReadMessages)
            except DamagedRange:
                if found:
                    break  # those before it first: who reads on from there is told
                raise
            found += [contents_told(self._client, self._bodies, each) for each in some.messages]
            if not some.messages or some.next_offset >= some.end:
                break
            offset = some.next_offset
        return found

    async def _group(
        self,
        kind: Callable[..., _Group],
        topic: str,
        name: str,
        start: str,
        body_type: Any,
        changes: Mapping[str, Any],
    ) -> _Group:
        body_type = self._body_type(body_type)
        Bodies(body_type)  # refused before anything is made
        if start not in ("earliest", "latest"):
            raise InvalidRequest(f'start={start!r} cannot be used: "earliest" or "latest"')
        topic, name = check_topic_name(topic), check_name(name, "group")
        settings: Mapping[str, Any] = {}
        body = wire.CreateGroup(start=start, settings=_plain(changes))  # type: ignore[arg-type]
        try:
            path = path_of("topics", topic, "groups", name)
            made: wire.GroupSettings = await self._ask("PUT", path, wire.GroupSettings, body)
            settings = made.settings
        except Forbidden:
            if changes or start != "earliest":
                raise  # otherwise it is made as soon as somebody receives who may make groups, or is there already
        return kind(self._client, topic, name, body_type, topic_settings(settings))

    async def _queue(
        self,
        kind: Callable[..., _Group],
        name: str | None,
        *,
        create: bool,
        body_type: Any,
        settings: QueueSettings | None,
        changes: Mapping[str, Any],
    ) -> _Group:
        body_type = self._body_type(body_type)
        Bodies(body_type)
        switch(create, "create")
        wanted = changes_to(settings, {}, changes)  # refused before anything is made
        if name is None:
            name = await self._only_topic()
        name = check_topic_name(name)
        info: TopicInfo | None = None
        try:
            info = await self._describe_topic(name)
            wanted = changes_to(settings, info.settings, changes)
        except UnknownTopic:
            if not create:
                raise NotAQueue(
                    f"the server at {self.folder} has no queue {name}; open it with create=True to make one"
                ) from None
        except Forbidden:
            if wanted:
                raise
            return kind(self._client, name, DEFAULT_GROUP, body_type, TopicSettings(), durability=self._durability)
        if info is None or wanted or DEFAULT_GROUP not in info.groups:
            try:
                info = await self._make_queue(name, info, wanted)
            except Forbidden:
                if info is None or wanted:
                    raise  # otherwise its default group is made as soon as somebody receives
        info = await self._keep_bodies(name, info, kind_of(body_type))
        known = topic_settings(info.settings)
        return kind(self._client, name, DEFAULT_GROUP, body_type, known, durability=self._durability)

    async def _keep_bodies(self, name: str, info: TopicInfo, kind: BodyKind | None) -> TopicInfo:
        """Note what bodies are, for workers; where that cannot be, the queue is as good without."""
        if kind is None or info.settings.get("bodies") is not None:
            return info
        try:
            return await self._make_queue(name, info, {"bodies": kind})
        except (BadSettings, Forbidden, DiskFull):  # an older server; one who may not change the queue; no room for it
            return info

    async def _make_queue(self, name: str, info: TopicInfo | None, changes: Mapping[str, Any]) -> TopicInfo:
        given = _plain(changes)
        partitions = given.pop("partitions", None)
        body = CreateQueue(partitions=partitions, settings=given)
        try:
            made: TopicInfo = await self._ask("PUT", path_of("queues", name), TopicInfo, body)
        except Forbidden:
            if info is None or changes:
                raise
            return info
        self._client.publishing.forget(name)
        return made

    async def _only_topic(self) -> str:
        """The one that the server has, or one by the name that a queue has by default."""
        found = await self._topics()
        if len(found) > 1:
            raise InvalidRequest(
                f"{self.folder} has {len(found)} topics; say which: topic={found[0]!r}, or use a broker"
            )
        return found[0] if found else self._client.default_topic

    async def _groups(self, topic: str | None) -> list[GroupInfo]:
        if topic is not None:
            check_topic_name(topic)
        path = path_of("groups", topic=topic, limit=_MOST_READ)
        found: wire_groups.Groups = await self._ask("GET", path, wire_groups.Groups)
        return found.groups

    async def _delete_group(self, name: str, topic: str | None) -> None:
        check_name(name, "group")
        await self._ask("DELETE", path_of("groups", name, topic=topic), None, again=False)

    async def _reset_offsets(
        self, group: str, topic: str, to: object, partition: int | None, *, dry_run: bool
    ) -> list[Reset]:
        where = to_of(to)
        body = wire_groups.ResetOffsets(
            topic=check_topic_name(topic),
            to=where.end if isinstance(to, str) else None,
            offset=to if type(to) is int else None,
            time=to if isinstance(to, datetime) else None,
            partition=partition,
            dry_run=switch(dry_run, "dry_run"),
        )
        path = path_of("groups", check_name(group, "group"), "reset")
        done: wire_groups.ResetDone = await self._ask("POST", path, wire_groups.ResetDone, body)
        return [
            Reset(topic=each.topic, partition=each.partition, before=each.before, after=each.after)
            for each in done.partitions
        ]

    async def _trace(self, message_id: str) -> list[TraceStep]:
        if not isinstance(message_id, str):
            raise InvalidRequest(f"a message's id is text, not {type(message_id).__name__}")
        found: Steps = await self._ask("GET", path_of("traces", message_id), Steps)
        return found.steps

    async def _search_traces(self, question: Mapping[str, Any], limit: int, *, last: bool) -> list[TraceStep]:
        if type(limit) is not int or not 1 <= limit <= 1_000_000:
            raise InvalidRequest(f"limit={limit!r} cannot be used: give a whole number from 1 to 1000000")
        asked = self._question(question)
        found: list[TraceStep] = []
        after: str | None = None
        while len(found) < limit and after != "":
            most = min(limit - len(found), _MOST_READ)
            path = path_of("traces", **asked, limit=most, last=switch(last, "last"), after=after)
            some: Steps = await self._ask("GET", path, Steps)
            found, after = found + some.steps, some.next
        return found

    async def _trace_stats(self, question: Mapping[str, Any]) -> TraceStats:
        stats: TraceStats = await self._ask("GET", path_of("traces", "stats", **self._question(question)), TraceStats)
        return stats

    def _question(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """A search as it is sent; a length of time is so long ago."""
        asked = dict(given)
        for name in ("since", "until"):
            value = asked.get(name)
            if isinstance(value, timedelta):
                now_ns = self._caller.world.clock.now_ns()
                value = to_datetime(now_ns - duration_ms(value, name) * 1_000_000)
            if value is not None:
                instant_ns(value, name)
                asked[name] = value.isoformat()
        return asked

    async def _sync(self) -> None:
        await self._ask("POST", path_of("admin", "sync"), None)


def topic_settings(differing: Mapping[str, Any]) -> TopicSettings:
    """Settings of those that differ from the defaults; what this release does not know is passed over."""
    known = {name: value for name, value in differing.items() if name in TopicSettings.__struct_fields__}
    return msgspec.convert(known, TopicSettings)


def _plain(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as plain values, which is how they are sent."""
    plain: dict[str, Any] = msgspec.to_builtins(dict(changes))
    return plain
