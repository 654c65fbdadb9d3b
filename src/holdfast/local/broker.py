"""The topics of an engine, as far as no turn is waited for: the ports for tasks and threads stand on it.

What ends with `_now` may take a while, and reads or writes files: `local/aio` calls it on a thread. The server calls
some of these as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar
from weakref import WeakSet

import msgspec

from holdfast.api.bodies import Bodies, kind_of
from holdfast.api.contents import Contents, Place
from holdfast.api.topics import GroupInfo, TopicInfo, changes_to
from holdfast.broker.engine import BrokerEngine, change_topic, grow_topic
from holdfast.broker.folder.layout import DEFAULT_GROUP
from holdfast.broker.group import QueueGroup
from holdfast.broker.streams.offsets import Reset, To
from holdfast.broker.topic import Topic
from holdfast.broker.topic_locks import reading
from holdfast.errors import DamagedRange, DiskFull, InvalidRequest, TopicExists, UnknownGroup, UnknownTopic
from holdfast.local.publisher import Publisher
from holdfast.local.topics import describe, groups_on, partition_info
from holdfast.model import Retained, extra_bytes
from holdfast.settings import BrokerSettings, QueueSettings
from holdfast.storage.compaction import KeysCompacted
from holdfast.storage.view import OnDamage

_Group = TypeVar("_Group")


class LocalBroker:
    """One opened data folder."""

    def __init__(self, engine: BrokerEngine, body_type: Any = None, *, with_threads: bool = True) -> None:
        self.engine = engine
        self.body_type = body_type
        self.bodies = Bodies(body_type)
        self.mono_ns = engine.world.clock.monotonic_ns
        self.with_threads = with_threads  # not where time does not run by itself
        self._publishers: dict[str, Publisher] = {}
        self._sending: WeakSet[Any] = WeakSet()  # producers, which may have messages that are not stored yet

    @property
    def place(self) -> str:
        """The data folder."""
        return self.engine.folder

    @property
    def settings(self) -> BrokerSettings:
        return self.engine.settings

    @property
    def closed(self) -> bool:
        return self.engine.closed

    def after_fork(self) -> Any:
        """What a face uses in a child: the parent goes on with this one; where others may come to it, so may we."""
        return self if self.engine.stand_in is None else self.engine.stand_in(self)

    # Topics

    def create_topic_now(
        self, name: str, partitions: int | None, changes: Mapping[str, Any], *, exist_ok: bool
    ) -> TopicInfo:
        """Make a topic."""
        given = {} if partitions is None else {"partitions": partitions}
        try:
            self.engine.create_topic(name, None, {**changes, **given})
        except TopicExists:
            if not exist_ok:
                raise
        return self.describe_topic_now(name)

    def partitions_with(self, name: str, count: int) -> int:
        """How many partitions the topic will have with so many more."""
        with self.engine.using(name) as topic:
            return change_topic(self.engine, name, {"partitions": len(topic.partitions) + count})

    def describe_topic_now(self, name: str) -> TopicInfo:
        """What a topic is and holds."""
        with reading(self.engine.using, name) as found:
            info = describe(self.engine, found.topic)
            if name == info.name:
                return info
            letters = [partition_info(number, each) for number, each in enumerate(found.partitions())]
            return msgspec.structs.replace(
                info, name=name, partitions=letters, groups=[], stream_groups=[], settings={}
            )

    def delete_topic_now(self, name: str) -> None:
        """Take a topic away."""
        self.engine.delete_topic(name)
        self._publishers.pop(name, None)

    def compact_topic_now(self, name: str) -> KeysCompacted:
        """Of each key keep the last message."""
        with self.engine.using(name) as topic:
            if topic.settings.cleanup == "delete":
                raise InvalidRequest(
                    f"topic {name} is not one to be compacted: that would take away messages. "
                    'Use alter_topic(cleanup="compact") if only the last message of each key is wanted'
                )
            self.engine.streams.bring_pins(topic)
            return topic.compact_keys(roll=True)

    def apply_retention_now(self, name: str) -> Retained:
        """Drop what the topic's retention settings let go."""
        with self.engine.using(name) as topic:
            self.engine.streams.bring_pins(topic)
            return topic.apply_retention()

    # Messages

    def publisher(self, topic: Topic) -> Publisher:
        """What publishes to the topic, which is in use."""
        publisher = self._publishers.get(topic.name)
        if publisher is None or publisher.topic is not topic:
            # Topics that were let go must not stay in memory for those that nobody publishes to any more.
            self._publishers = {other: each for other, each in list(self._publishers.items()) if not each.topic.closed}
            publisher = self._publishers[topic.name] = Publisher(topic, self.bodies, self.engine.world.clock)
        return publisher

    def read_now(
        self,
        name: str,
        number: int,
        offset: int | None,
        limit: int,
        most_bytes: int | None = None,
        *,
        on_damage: OnDamage = "raise",
    ) -> list[Contents[Any]]:
        """Messages of a partition from an offset on; those before a damage first."""
        with reading(self.engine.using, name) as found_topic:
            log = found_topic.partition(number).log
            home = Place(name, number)
            found: list[Contents[Any]] = []
            size = 0
            start = log.start if offset is None else offset
            try:
                for record in log.records(start, on_damage=on_damage, whole=False):
                    found.append(Contents(home, self.bodies, record))
                    size += len(record.value) + extra_bytes(record)
                    if len(found) == limit or (most_bytes is not None and size > most_bytes):
                        break
            except DamagedRange:
                if not found:
                    raise  # those before it first: who reads on from there is told
            return found

    # Groups

    def open_group(
        self,
        kind: Callable[[BrokerEngine, QueueGroup, Bodies], _Group],
        topic: str,
        name: str,
        start: str,
        bodies: Bodies,
        changes: Mapping[str, Any],
        check: Callable[[BrokerEngine, Topic, str], None] | None = None,
    ) -> _Group:
        """The group in queue mode as an object of this kind, if `check` lets it be made."""
        with self.engine.using(topic) as opened:
            self.engine.streams.check_free(name, opened)
            if check is not None:
                check(self.engine, opened, name)
            # Inside: from now on the port holds the topic, which would be let go at any moment otherwise.
            return kind(self.engine, opened.group(name, start=start, changes=changes), bodies)

    def open_queue(
        self,
        kind: Callable[[BrokerEngine, QueueGroup, Bodies], _Group],
        name: str | None,
        body_type: Any,
        settings: QueueSettings | None,
        changes: Mapping[str, Any],
        *,
        create: bool,
    ) -> _Group:
        """The default group of a topic, both made where there is none."""
        wanted = changes_to(settings, {}, changes)
        name = self.engine.queue_name(name, create=create)
        try:
            self.engine.create_topic(name, None, wanted)
        except TopicExists:
            wanted = changes_to(settings, self.describe_topic_now(name).settings, changes)
            if wanted:
                count = change_topic(self.engine, name, wanted)
                while grow_topic(self.engine, name, count):
                    pass
        queue = self.open_group(kind, name, DEFAULT_GROUP, "earliest", Bodies(body_type), {})
        with self.engine.using(name) as topic:
            keep_bodies(self.engine, topic, body_type)
        return queue

    def groups_now(self, name: str | None) -> list[GroupInfo]:
        """The groups of a topic, or of all, in both modes."""
        found: list[GroupInfo] = []
        for each in self.engine.topics() if name is None else [name]:
            try:
                with self.engine.using(each) as topic:
                    found += groups_on(self.engine, topic)
            except UnknownTopic:
                if name is not None:  # otherwise it was deleted meanwhile
                    raise
        return sorted(found, key=lambda info: (info.name, info.topic))

    def delete_group_now(self, name: str, topic: str | None) -> None:
        """Forget a group."""
        if topic is not None:
            with self.engine.using(topic) as opened:
                if opened.has_group(name):
                    opened.delete_group(name)
                    return
                if any(stream.name == name for stream in self.engine.streams.on(opened)):
                    raise InvalidRequest(
                        f"the group {name} reads {topic} in stream mode, and maybe other topics: it is deleted as a "
                        "whole. Leave the topic out to do that"
                    )
        elif name in self.engine.streams.names():
            self.engine.streams.delete(name)
            return
        elif self.engine.queries.remove(name):
            return
        where = "" if topic is None else f" on {topic}"
        raise UnknownGroup(
            f"there is no group {name}{where or ' in stream mode'}; one in queue mode is deleted by its name and its "
            "topic's"
        )

    def reset_offsets_now(self, group: str, name: str, to: To, number: int | None, *, dry_run: bool) -> list[Reset]:
        """Let a group go on from elsewhere."""
        with self.engine.using(name) as topic:
            known = topic.groups.get(group)
            if known is None:
                self._check_not_query(group, topic)
                return self.engine.streams.group(group).reset(name, to, partition=number, dry_run=dry_run)
            found = []
            for delivery in known.deliveries if number is None else [known.delivery(number)]:
                before, after = delivery.group.floor, to.find(delivery.partition.log)
                if not dry_run:
                    delivery.seek(after)
                    delivery.journal.log.sync()  # as in stream mode: it was asked for by hand, and is seldom
                found.append(Reset(topic=name, partition=delivery.number, before=before, after=after))
            return found

    def _check_not_query(self, group: str, topic: Topic) -> None:
        streams = self.engine.streams.names()
        if group not in streams and any(query.group == group for query, _ in self.engine.queries.on(topic)):
            raise InvalidRequest(
                f"{group} is a query that reads {topic.name} from another process, and keeps its positions itself: "
                "let it begin elsewhere by its own options"
            )


def keep_bodies(engine: BrokerEngine, topic: Topic, body_type: Any) -> None:
    """Note what the bodies of a queue are, for workers; where there is no room for that, it is as good without."""
    kind = kind_of(body_type)
    if kind is not None and topic.settings.bodies is None:
        with suppress(OSError, DiskFull):
            engine.alter_topic(topic.name, {"bodies": kind})
