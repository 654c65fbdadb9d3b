"""What the brokers for threads and for tasks share: arguments in, engine called, answers out."""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any, Final, NoReturn, TypeVar
from weakref import WeakSet

import msgspec

from holdfast.api.arguments import switch
from holdfast.api.bodies import Bodies, kind_of
from holdfast.api.contents import Contents, Place
from holdfast.broker.engine import BrokerEngine, change_topic, folder_path, grow_topic
from holdfast.broker.folder.layout import DEFAULT_GROUP, check_name
from holdfast.broker.group import QueueGroup
from holdfast.broker.metrics import Observer
from holdfast.broker.streams.positions import Reset
from holdfast.broker.topic import Topic
from holdfast.broker.topic_locks import reading
from holdfast.embedded.topics import (
    GroupInfo,
    TopicInfo,
    changes_of,
    changes_to,
    describe,
    groups_on,
    partition_info,
    to_of,
)
from holdfast.env import World, close_in_children, real_world, refuse_to_pickle
from holdfast.env.process import environment
from holdfast.errors import BadSettings, DamagedRange, InvalidRequest, TopicExists, UnknownGroup, UnknownTopic
from holdfast.local.opening import keep_bodies
from holdfast.local.publisher import Publisher
from holdfast.model import Durability, Retained, extra_bytes
from holdfast.settings import BrokerSettings, QueueSettings
from holdfast.storage.compaction import KeysCompacted
from holdfast.storage.view import OnDamage

_Face = TypeVar("_Face", bound="BrokerFace")
_Group = TypeVar("_Group")
_Queue = TypeVar("_Queue")

_MOST_AT_ONCE: Final = 100_000


class BrokerFace(metaclass=ABCMeta):  # noqa: B024  others stand in for it, and are told of with `register`
    """One opened data folder, seen by a user."""

    def __init__(self, engine: BrokerEngine, body_type: Any, *, with_threads: bool = True) -> None:
        self._engine = engine
        self._with_threads = with_threads  # not where time does not run by itself
        self._bodies_type = body_type
        self._bodies = Bodies(body_type)
        self._mono_ns = engine.world.clock.monotonic_ns
        self._publishers: dict[str, Publisher] = {}
        self._sending: WeakSet[Any] = WeakSet()  # producers, which may have messages that are not stored yet
        close_in_children(self)

    def disown(self) -> None:
        """In a child after a fork: the parent goes on with it; where others may come to it, so may we."""
        if self._engine.stand_in is not None:
            self._engine.stand_in(self)

    @property
    def folder(self) -> str:
        return self._engine.folder

    @property
    def settings(self) -> BrokerSettings:
        return self._engine.settings

    @property
    def closed(self) -> bool:
        return self._engine.closed

    def __reduce__(self) -> NoReturn:
        refuse_to_pickle(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.folder}{' (closed)' if self.closed else ''}>"

    def _body_type(self, given: Any) -> Any:
        return self._bodies_type if given is None else given

    def _create_topic(
        self, name: str, partitions: int | None, changes: Mapping[str, Any], *, exist_ok: bool
    ) -> TopicInfo:
        changes = changes_of(changes)
        if partitions is not None:
            changes["partitions"] = partitions
        if self._bodies_type is not None:
            changes.setdefault("bodies", kind_of(self._bodies_type))
        try:
            self._engine.create_topic(name, None, changes)
        except TopicExists:
            if not switch(exist_ok, "exist_ok"):
                raise
        return self._describe_topic(name)

    def _change_topic(self, name: str, changes: Mapping[str, Any]) -> int:
        if not changes:
            raise BadSettings("alter_topic changes settings: give at least one, such as max_attempts=3")
        return change_topic(self._engine, name, changes_of(changes))

    def _count_with(self, name: str, count: int) -> int:
        """How many partitions the topic will have with so many more."""
        if type(count) is not int or count < 1:
            raise InvalidRequest(f"count={count!r} cannot be used: give how many partitions to add, 1 or more")
        with self._engine.using(name) as topic:
            return change_topic(self._engine, name, {"partitions": len(topic.partitions) + count})

    def _grow_topic(self, name: str, wanted: int) -> TopicInfo:
        while grow_topic(self._engine, name, wanted):
            pass
        return self._describe_topic(name)

    def _describe_topic(self, name: str) -> TopicInfo:
        with reading(self._engine.using, name) as found:
            info = describe(self._engine, found.topic)
            if name == info.name:
                return info
            letters = [partition_info(number, each) for number, each in enumerate(found.partitions())]
            return msgspec.structs.replace(
                info, name=name, partitions=letters, groups=[], stream_groups=[], settings={}
            )

    def _topics(self) -> list[str]:
        return self._engine.topics()

    def _delete_topic(self, name: str) -> None:
        self._engine.delete_topic(name)
        self._publishers.pop(name, None)

    def _compact_topic(self, name: str) -> KeysCompacted:
        with self._engine.using(name) as topic:
            if topic.settings.cleanup == "delete":
                raise InvalidRequest(
                    f"topic {name} is not one to be compacted: that would take away messages. "
                    'Use alter_topic(cleanup="compact") if only the last message of each key is wanted'
                )
            self._engine.streams.bring_pins(topic)
            return topic.compact_keys(roll=True)

    def _apply_retention(self, name: str) -> Retained:
        with self._engine.using(name) as topic:
            self._engine.streams.bring_pins(topic)
            return topic.apply_retention()

    def _publisher(self, topic: Topic) -> Publisher:
        publisher = self._publishers.get(topic.name)
        if publisher is None or publisher.topic is not topic:
            # Topics that were let go must not stay in memory for those that nobody publishes to any more.
            self._publishers = {other: each for other, each in list(self._publishers.items()) if not each.topic.closed}
            publisher = self._publishers[topic.name] = Publisher(topic, self._bodies, self._engine.world.clock)
        return publisher

    def _read(
        self,
        name: str,
        number: int,
        offset: int | None,
        limit: int,
        most_bytes: int | None = None,
        *,
        on_damage: OnDamage = "raise",
    ) -> list[Contents[Any]]:
        if type(limit) is not int or not 1 <= limit <= _MOST_AT_ONCE:
            raise InvalidRequest(f"limit={limit!r} cannot be used: give a whole number from 1 to {_MOST_AT_ONCE}")
        if on_damage not in ("raise", "skip"):
            raise InvalidRequest(f'on_damage={on_damage!r} cannot be used: "raise" or "skip"')
        with reading(self._engine.using, name) as found_topic:
            log = found_topic.partition(number).log
            if offset is not None and type(offset) is not int:
                raise InvalidRequest(f"offset={offset!r} is no offset; give a whole number")
            home = Place(name, number)
            found: list[Contents[Any]] = []
            size = 0
            start = log.start if offset is None else offset
            try:
                for record in log.records(start, on_damage=on_damage, whole=False):
                    found.append(Contents(home, self._bodies, record))
                    size += len(record.value) + extra_bytes(record)
                    if len(found) == limit or (most_bytes is not None and size > most_bytes):
                        break
            except DamagedRange:
                if not found:
                    raise  # those before it first: who reads on from there is told
            return found

    def _group(
        self,
        kind: Callable[[BrokerEngine, QueueGroup, Any], _Group],
        topic: str,
        name: str,
        start: str,
        body_type: Any,
        changes: Mapping[str, Any],
        check: Callable[[BrokerEngine, Topic, str], None] = lambda engine, topic, name: None,
    ) -> _Group:
        body_type = self._body_type(body_type)
        Bodies(body_type)  # refused before anything is made
        if start not in ("earliest", "latest"):
            raise InvalidRequest(f'start={start!r} cannot be used: "earliest" or "latest"')
        with self._engine.using(topic) as opened:
            self._engine.streams.check_free(name, opened)
            check(self._engine, opened, name)
            # Inside: from now on the face holds the topic, which would be let go at any moment otherwise.
            return kind(self._engine, opened.group(name, start=start, changes=changes), body_type)

    def _queue(
        self,
        kind: Callable[[BrokerEngine, QueueGroup, Any], _Queue],
        name: str | None,
        body_type: Any,
        settings: QueueSettings | None,
        changes: Mapping[str, Any],
        *,
        create: bool,
    ) -> _Queue:
        body_type = self._body_type(body_type)
        Bodies(body_type)  # refused before anything is made
        switch(create, "create")
        wanted = changes_to(settings, {}, changes)
        name = self._engine.queue_name(name, create=create)
        try:
            self._engine.create_topic(name, None, wanted)
        except TopicExists:
            wanted = changes_to(settings, self._describe_topic(name).settings, changes)
            if wanted:
                self._grow_topic(name, self._change_topic(name, wanted))
        queue = self._group(kind, name, DEFAULT_GROUP, "earliest", body_type, {})
        with self._engine.using(name) as topic:
            keep_bodies(self._engine, topic, body_type)
        return queue

    def _groups(self, name: str | None) -> list[GroupInfo]:
        found: list[GroupInfo] = []
        for each in self._engine.topics() if name is None else [name]:
            try:
                with self._engine.using(each) as topic:
                    found += groups_on(self._engine, topic)
            except UnknownTopic:
                if name is not None:  # otherwise it was deleted meanwhile
                    raise
        return sorted(found, key=lambda info: (info.name, info.topic))

    def _delete_group(self, name: str, topic: str | None) -> None:
        check_name(name, "group")
        if topic is not None:
            with self._engine.using(topic) as opened:
                if opened.has_group(name):
                    opened.delete_group(name)
                    return
                if any(stream.name == name for stream in self._engine.streams.on(opened)):
                    raise InvalidRequest(
                        f"the group {name} reads {topic} in stream mode, and maybe other topics: it is deleted as a "
                        "whole. Leave the topic out to do that"
                    )
        elif name in self._engine.streams.names():
            self._engine.streams.delete(name)
            return
        elif self._engine.queries.remove(name):
            return
        where = "" if topic is None else f" on {topic}"
        raise UnknownGroup(
            f"there is no group {name}{where or ' in stream mode'}; one in queue mode is deleted by its name and its "
            "topic's"
        )

    def _reset_offsets(self, group: str, name: str, to: object, number: int | None, *, dry_run: bool) -> list[Reset]:
        where = to_of(to)
        check_name(group, "group")
        with self._engine.using(name) as topic:
            known = topic.groups.get(group)
            if known is None:
                self._check_not_query(group, topic)
                return self._engine.streams.group(group).reset(name, where, partition=number, dry_run=dry_run)
            found = []
            for delivery in known.deliveries if number is None else [known.delivery(number)]:
                before, after = delivery.group.floor, where.find(delivery.partition.log)
                if not switch(dry_run, "dry_run"):
                    delivery.seek(after)
                    delivery.journal.log.sync()  # as in stream mode: it was asked for by hand, and is seldom
                found.append(Reset(topic=name, partition=delivery.number, before=before, after=after))
            return found

    def _check_not_query(self, group: str, topic: Topic) -> None:
        streams = self._engine.streams.names()
        if group not in streams and any(query.group == group for query, _ in self._engine.queries.on(topic)):
            raise InvalidRequest(
                f"{group} is a query that reads {topic.name} from another process, and keeps its positions itself: "
                "let it begin elsewhere by its own options"
            )

    def _close(self) -> None:
        self._engine.close()


def open_broker_face(
    kind: type[_Face],
    folder: str | PathLike[str] | None,
    *,
    create: bool,
    durability: Durability | None,
    body_type: Any,
    settings: BrokerSettings | None,
    settings_file: str | PathLike[str] | None,
    observer: Observer | None,
    world: World | None,
    trust_folder: bool | None,
) -> _Face:
    """A face of the data folder, with a thread that looks after it where time runs by itself."""
    Bodies(body_type)  # refused before anything is made
    switch(create, "create")
    if settings is not None and settings_file is not None:
        raise InvalidRequest("give settings or settings_file, not both")
    if settings is None:
        from holdfast.config.settings_file import read_settings

        path = None if settings_file is None else folder_path(settings_file, "the settings file")
        effective = read_settings(world or real_world(), environment() if world is None else {}, path)
        settings, folder = effective.broker, folder if folder is not None else effective.data_dir
    if folder is None:
        raise InvalidRequest("give the data folder, or a settings file that names it: data_dir in [broker]")
    if not isinstance(settings, BrokerSettings):
        raise BadSettings(f"settings must be BrokerSettings, not {type(settings).__name__}")
    if durability is not None:
        topic = msgspec.structs.replace(settings.topic, durability=durability)
        settings = msgspec.structs.replace(settings, topic=topic)
    if trust_folder is not None:
        settings = msgspec.structs.replace(settings, trust_folder=switch(trust_folder, "trust_folder"))
    engine = BrokerEngine.open(folder, create=create, settings=settings, observer=observer, world=world)
    try:
        if world is None:
            engine.keep()
        return kind(engine, body_type, with_threads=world is None)
    except BaseException:
        engine.close()
        raise
