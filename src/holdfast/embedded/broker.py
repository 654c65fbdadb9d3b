"""The broker for threads: topics, and the many ways to them, in one data folder."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from datetime import datetime
from functools import partial
from os import PathLike
from typing import Any, Literal

from holdfast.api.contents import Contents
from holdfast.api.drafts import HeadersLike, NewMessage, Seconds, Stored, Text, message_of
from holdfast.api.streams import Stream, stream_options
from holdfast.api.sync.consumer import Consumer
from holdfast.api.sync.group import Group
from holdfast.api.sync.locks import Documents, Locks
from holdfast.api.sync.producer import Producer
from holdfast.api.sync.queue import Queue
from holdfast.broker.metrics import Observer
from holdfast.broker.streams.positions import Reset
from holdfast.embedded.broker_face import BrokerFace, open_broker_face
from holdfast.embedded.topics import GroupInfo, TopicInfo
from holdfast.embedded.traces import TraceFace
from holdfast.env import World
from holdfast.local.opening import group_here, queue_here
from holdfast.local.producer import LocalProducerPort
from holdfast.local.sync.consumer import LocalConsumerPort
from holdfast.local.sync.locks import LocalLocksPort
from holdfast.local.upload import Upload
from holdfast.model import CodecName, Durability, Retained
from holdfast.producing.core import producer_settings
from holdfast.producing.rounds import ThreadRounds
from holdfast.settings import BrokerSettings, QueueSettings
from holdfast.storage.compaction import KeysCompacted


class Broker(TraceFace, BrokerFace):
    """The topics of a data folder. Safe to use from any thread."""

    def queue(
        self,
        name: str | None = None,
        *,
        create: bool = True,
        body_type: Any = None,
        settings: QueueSettings | None = None,
        **changes: Any,
    ) -> Queue[Any]:
        """The queue by this name, made where there is none (unless create=False); see `holdfast.open`."""
        return self._queue(queue_here, name, body_type, settings, changes, create=create)

    def create_topic(
        self, name: str, *, partitions: int | None = None, exist_ok: bool = False, **changes: Any
    ) -> TopicInfo:
        """Make a topic. `changes` are its settings by name, such as retention_hours=168; TopicExists if it is there."""
        return self._create_topic(name, partitions, changes, exist_ok=exist_ok)

    def alter_topic(self, name: str, **changes: Any) -> TopicInfo:
        """Change settings of a topic; they count at once, and are kept. `partitions` can only grow."""
        return self._grow_topic(name, self._change_topic(name, changes))

    def add_partitions(self, name: str, count: int) -> TopicInfo:
        """Give the topic so many more partitions. From now on keys may go to other partitions than before."""
        return self._grow_topic(name, self._count_with(name, count))

    def describe_topic(self, name: str) -> TopicInfo:
        """What a topic is and holds."""
        return self._describe_topic(name)

    def topics(self) -> list[str]:
        """The names of all topics."""
        return self._topics()

    def delete_topic(self, name: str) -> None:
        """Take a topic away, with all its messages, groups and dead letters."""
        self._delete_topic(name)

    def publish(
        self,
        topic: str,
        body: Any,
        *,
        key: Text | None = None,
        headers: HeadersLike | None = None,
        priority: int = 0,
        delay: Seconds | None = None,
        at: datetime | None = None,
        ttl: Seconds | None = None,
        dedup_id: Text | None = None,
        correlation_id: str | None = None,
        partition: int | None = None,
        durability: Durability | None = None,
        codec: CodecName | None = None,
    ) -> Stored:
        """Store a message in the partition of its key, in the next one in turn, or in the one you choose."""
        began_ns = self._mono_ns()
        options = (key, headers, delay, at, ttl, dedup_id, correlation_id, codec)
        with self._engine.using(topic) as used:
            publisher = self._publisher(used)
            if publisher.is_plain(body, options, priority):
                number = publisher.turn(partition)
                appended = publisher.log(number).append_one(body, durability)
                return publisher.plain_stored(number, body, appended, began_ns)
            message = message_of(body, key, headers, priority, delay, at, ttl, dedup_id, correlation_id)
            parts = publisher.publish([message], durability, codec, partition)
            publisher.wait(parts)
            return publisher.stored(parts, began_ns)[0]

    def publish_many(
        self,
        topic: str,
        messages: Iterable[Any | NewMessage],
        *,
        partition: int | None = None,
        durability: Durability | None = None,
        codec: CodecName | None = None,
    ) -> list[Stored]:
        """Store messages; those that go to one partition all or not at all. Without keys they stay together."""
        began_ns = self._mono_ns()
        with self._engine.using(topic) as used:
            publisher = self._publisher(used)
            if publisher.all_plain(messages, codec):
                number = publisher.turn(partition)
                appended = publisher.log(number).append(messages, durability=durability)  # type: ignore[arg-type]
                return publisher.plain_many(number, messages, appended, began_ns)
            parts = publisher.publish(messages, durability, codec, partition, verb="publish_many")
            publisher.wait(parts)
            return publisher.stored(parts, began_ns)

    def publish_stream(
        self,
        topic: str,
        stream: Stream,
        size_hint: int | None = None,
        *,
        partition: int | None = None,
        durability: Durability | None = None,
        **options: Any,
    ) -> Stored:
        """Store what a binary file or an iterator of bytes gives as one message, without holding it in memory.

        `options` are those of `publish`, but `codec`. What is too large is refused at once where `size_hint` says
        how many bytes will come.
        """
        with self._engine.using(topic) as used:
            publisher = self._publisher(used)
            upload = Upload(self._engine.world, publisher, stream_options(options), partition, size_hint)
            return upload.run(stream, durability)

    def read(
        self,
        topic: str,
        *,
        partition: int = 0,
        offset: int | None = None,
        limit: int = 100,
        on_damage: Literal["raise", "skip"] = "raise",
    ) -> list[Contents[Any]]:
        """Messages of a partition from an offset on, whoever has them; nothing changes.

        Where the next ones are damaged, DamagedRange says where to read on; with on_damage="skip" they are left out.
        """
        return self._read(topic, partition, offset, limit, on_damage=on_damage)

    def group(
        self, topic: str, name: str, *, start: str = "earliest", body_type: Any = None, **changes: Any
    ) -> Group[Any]:
        """The group in queue mode, made where there is none: with all that is kept, or ("latest") with what comes.

        `changes` are settings of this group by name, such as key_order=True or max_attempts=3; they are kept.
        """
        return self._group(group_here, topic, name, start, body_type, changes)

    def producer(
        self, *, name: str | None = None, resume: bool = False, body_type: Any = None, **changes: Any
    ) -> Producer:
        """A producer that gathers messages into batches; `changes` are its settings, such as linger_ms=5, acks="all".

        One with a name fences an earlier one of that name. With `resume` it is given the same messages in the same
        order again after a crash, and stores those that are not stored yet.
        """
        producer = Producer(
            LocalProducerPort(self._engine),
            producer_settings(self._engine.settings.producer, changes),
            name=name,
            resume=resume,
            body_type=self._body_type(body_type),
            rounds=partial(ThreadRounds, thread=self._with_threads),
        )
        self._sending.add(producer)
        return producer

    def consumer(
        self, topics: str | Iterable[str], *, group: str, body_type: Any = None, **options: Any
    ) -> Consumer[Any]:
        """A member of a group in stream mode, which is made where there is none.

        `options` are settings, such as auto_commit=False or max_records=100, and instance_id, holder, on_assigned,
        on_revoked.
        """
        member = partial(LocalConsumerPort.open, self._engine)
        return Consumer.open(member, topics, group, body_type=self._body_type(body_type), **options)

    def compact_topic(self, name: str) -> KeysCompacted:
        """Of each key keep the last message, now; offsets never change. For topics whose cleanup asks for it."""
        return self._compact_topic(name)

    def apply_retention(self, name: str) -> Retained:
        """Drop now what the topic's retention settings let go, as upkeep does in time; answers with what is gone."""
        return self._apply_retention(name)

    def groups(self, topic: str | None = None) -> list[GroupInfo]:
        """The groups of a topic, or of all, in both modes."""
        return self._groups(topic)

    def delete_group(self, name: str, topic: str | None = None) -> None:
        """Forget a group and all that it knows: on one topic in queue mode, or a group in stream mode as a whole."""
        self._delete_group(name, topic)

    def reset_offsets(
        self,
        group: str,
        topic: str,
        *,
        to: str | int | datetime,
        partition: int | None = None,
        dry_run: bool = False,
    ) -> list[Reset]:
        """Let a group go on from "earliest", "latest", a time or an offset; with `dry_run` only say what would be."""
        return self._reset_offsets(group, topic, to, partition, dry_run=dry_run)

    @property
    def locks(self) -> Locks:
        """Locks with leases and fencing numbers, for everybody who shares this folder."""
        return Locks(LocalLocksPort(self._engine))

    @property
    def documents(self) -> Documents:
        """State documents, each a JSON value with a version."""
        return Documents(LocalLocksPort(self._engine))

    def sync(self) -> None:
        """Return when everything said so far, acks included, is on disk."""
        self._engine.sync()

    def close(self) -> None:
        """Let producers send what they have, sync, let go of the folder. Closing twice is fine.

        Messages in hand come back at the next opening.
        """
        with ExitStack() as closing:
            closing.callback(self._close)
            for producer in list(self._sending):
                closing.callback(producer.close)

    def __enter__(self) -> Broker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_broker(
    folder: str | PathLike[str] | None = None,
    *,
    create: bool = True,
    durability: Durability | None = None,
    body_type: Any = None,
    settings: BrokerSettings | None = None,
    settings_file: str | PathLike[str] | None = None,
    observer: Observer | None = None,
    world: World | None = None,
    trust_folder: bool | None = None,
) -> Broker:
    """Own the topics in a data folder, which is made where there is none (unless create=False).

    `settings_file` is a TOML file; where none is given, the one that HOLDFAST_CONFIG names. Its data_dir is used
    where no folder is given. `durability` is what topics promise by default.
    """
    return open_broker_face(
        Broker,
        folder,
        create=create,
        durability=durability,
        body_type=body_type,
        settings=settings,
        settings_file=settings_file,
        observer=observer,
        world=world,
        trust_folder=trust_folder,
    )
