# Generated from aio/broker.py by tools/sync.py: do not edit it, edit that one and run "make sync".
"""The broker for threads: topics, and the many ways to them."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Literal

from holdfast.api.arguments import Question, When, check_id, check_search, switch
from holdfast.api.bodies import Bodies, kind_of
from holdfast.api.contents import Contents
from holdfast.api.drafts import (
    HeadersLike,
    NewMessage,
    PublishRequest,
    Seconds,
    Stored,
    Stream,
    StreamRequest,
    Text,
    message_of,
    stream_options,
)
from holdfast.api.ports import Face
from holdfast.api.sync.consumer import Consumer
from holdfast.api.sync.group import Group, Queue
from holdfast.api.sync.locks import Documents, Locks
from holdfast.api.sync.ports import BrokerPort
from holdfast.api.sync.producer import Producer
from holdfast.api.topics import (
    GroupInfo,
    QueueRequest,
    TopicInfo,
    changes_of,
    check_added,
    check_changes,
    check_read,
    check_start,
    to_of,
)
from holdfast.broker.folder.layout import check_name, check_readable_name, check_topic_name
from holdfast.broker.streams.offsets import Reset
from holdfast.broker.tracing.log import TraceStats, TraceStep
from holdfast.model import CodecName, Durability, Retained
from holdfast.settings import BrokerSettings, QueueSettings
from holdfast.storage.compaction import KeysCompacted

_NO_OPTIONS = (None,) * 8


class Broker(Face):
    """The topics of a data folder or of a server. Safe to use from any thread."""

    _port: BrokerPort

    @property
    def settings(self) -> BrokerSettings:
        """Those of a folder. Of a server only the defaults: `holdfast config show --at URL` tells those in force."""
        return self._port.settings

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.folder}{' (closed)' if self.closed else ''}>"

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
        body_type = self._body_type(body_type)
        return self._open_queue(
            QueueRequest(name=name, body_type=body_type, settings=settings, changes=changes, create=create),
        )

    def _open_queue(self, request: QueueRequest) -> Queue[Any]:
        Bodies(request.body_type)  # refused before anything is made
        switch(request.create, "create")
        if request.name is not None:
            check_topic_name(request.name)
        return Queue(self._port.queue(request))

    def create_topic(
        self, name: str, *, partitions: int | None = None, exist_ok: bool = False, **changes: Any
    ) -> TopicInfo:
        """Make a topic. `changes` are its settings by name, such as retention_hours=168; TopicExists if it is there."""
        check_topic_name(name)
        switch(exist_ok, "exist_ok")
        wanted = changes_of(changes)
        if self._port.body_type is not None:
            wanted.setdefault("bodies", kind_of(self._port.body_type))
        return self._port.create_topic(name, partitions, wanted, exist_ok=exist_ok)

    def alter_topic(self, name: str, **changes: Any) -> TopicInfo:
        """Change settings of a topic; they count at once, and are kept. `partitions` can only grow."""
        return self._port.alter_topic(check_topic_name(name), check_changes(changes))

    def add_partitions(self, name: str, count: int) -> TopicInfo:
        """Give the topic so many more partitions. From now on keys may go to other partitions than before."""
        check_added(count)
        return self._port.add_partitions(check_topic_name(name), count)

    def describe_topic(self, name: str) -> TopicInfo:
        """What a topic is and holds."""
        return self._port.describe_topic(check_readable_name(name))

    def topics(self) -> list[str]:
        """The names of all topics."""
        return self._port.topics()

    def delete_topic(self, name: str) -> None:
        """Take a topic away, with all its messages, groups and dead letters."""
        self._port.delete_topic(check_topic_name(name))

    def publish(
        self, topic: str, body: Any, *, key: Text | None = None, headers: HeadersLike | None = None, priority: int = 0,
        delay: Seconds | None = None, at: datetime | None = None, ttl: Seconds | None = None,
        dedup_id: Text | None = None, correlation_id: str | None = None,
        partition: int | None = None, durability: Durability | None = None, codec: CodecName | None = None,
    ) -> Stored:  # fmt: skip
        """Store a message in the partition of its key, in the next one in turn, or in the one you choose."""
        options = (key, headers, delay, at, ttl, dedup_id, correlation_id, codec)
        if type(body) is bytes and options == _NO_OPTIONS and type(priority) is int and not priority:
            stored = self._port.publish_plain(topic, body, partition, durability)
            if stored is not None:
                return stored
        message = message_of(body, key, headers, priority, delay, at, ttl, dedup_id, correlation_id)
        return self._port.publish(topic, PublishRequest([message], partition, durability, codec))[0]

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
        return self._port.publish(topic, PublishRequest(messages, partition, durability, codec))

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
        """Store what an iterator of bytes or a binary file gives as one message, without holding it in memory.

        `options` are those of `publish`, but `codec`. What is too large is refused at once where `size_hint` says
        how many bytes will come.
        """
        message = stream_options(options)
        return self._port.upload(
            topic,
            StreamRequest(
                stream=stream, message=message, size_hint=size_hint, partition=partition, durability=durability
            ),
        )

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
        check_readable_name(topic)
        check_read(offset, limit, on_damage)
        return self._port.read(topic, partition, offset, limit, on_damage)

    def group(
        self, topic: str, name: str, *, start: str = "earliest", body_type: Any = None, **changes: Any
    ) -> Group[Any]:
        """The group in queue mode, made where there is none: with all that is kept, or ("latest") with what comes.

        `changes` are settings of this group by name, such as key_order=True or max_attempts=3; they are kept.
        """
        return self._open_group(topic, name, start, body_type, changes)

    def _open_group(self, topic: str, name: str, start: str, body_type: Any, changes: dict[str, Any]) -> Group[Any]:
        bodies = Bodies(self._body_type(body_type))  # refused before anything is made
        check_start(start)
        check_topic_name(topic)
        check_name(name, "group")
        return Group(self._port.group(topic, name, start, bodies, changes))

    def producer(
        self, *, name: str | None = None, resume: bool = False, body_type: Any = None, **changes: Any
    ) -> Producer:
        """A producer that gathers messages into batches; `changes` are its settings, such as linger_ms=5, acks="all".

        One with a name fences an earlier one of that name. With `resume` it is given the same messages in the same
        order again after a crash, and stores those that are not stored yet.
        """
        return self._port.producer(name, self._body_type(body_type), changes, resume=resume)

    def consumer(
        self, topics: str | Iterable[str], *, group: str, body_type: Any = None, **options: Any
    ) -> Consumer[Any]:
        """A member of a group in stream mode, which is made where there is none.

        `options` are settings, such as auto_commit=False or max_records=100, and instance_id, holder, on_assigned,
        on_revoked.
        """
        body_type = self._body_type(body_type)
        return Consumer[Any].open(self._port.member, topics, group, body_type=body_type, **options)

    def compact_topic(self, name: str) -> KeysCompacted:
        """Of each key keep the last message, now; offsets never change. For topics whose cleanup asks for it."""
        return self._port.compact_topic(check_topic_name(name))

    def apply_retention(self, name: str) -> Retained:
        """Drop now what the topic's retention settings let go, as upkeep does in time; answers with what is gone."""
        return self._port.apply_retention(check_topic_name(name))

    def groups(self, topic: str | None = None) -> list[GroupInfo]:
        """The groups of a topic, or of all, in both modes."""
        return self._port.groups(None if topic is None else check_topic_name(topic))

    def delete_group(self, name: str, topic: str | None = None) -> None:
        """Forget a group and all that it knows: on one topic in queue mode, or a group in stream mode as a whole."""
        self._port.delete_group(check_name(name, "group"), topic)

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
        where = to_of(to)
        check_name(group, "group")
        check_topic_name(topic)
        switch(dry_run, "dry_run")
        return self._port.reset_offsets(group, topic, where, partition, dry_run=dry_run)

    def trace(self, message_id: str) -> list[TraceStep]:
        """The life of a message step by step, with that of the messages that it was redriven into or out of.

        It is empty where the message was not sampled; see the topic's setting trace_sample.
        """
        check_id(message_id)
        return self._port.trace(message_id)

    def search_traces(
        self,
        *,
        topic: str | None = None,
        group: str | None = None,
        event: str | None = None,
        holder: str | None = None,
        error: str | None = None,
        since: When | None = None,
        until: When | None = None,
        limit: int = 100,
        last: bool = False,
    ) -> list[TraceStep]:
        """The steps that fit, oldest first: the first `limit` of them, or the last. A time may be "so long ago"."""
        check_search(limit, last)
        question = Question(topic=topic, group=group, event=event, holder=holder, error=error, since=since, until=until)
        return self._port.search_traces(question, limit, last=last)

    def trace_stats(
        self, *, topic: str | None = None, since: When | None = None, until: When | None = None
    ) -> TraceStats:
        """How long messages waited and were worked on, how often they were tried, what failed."""
        return self._port.trace_stats(Question(topic=topic, since=since, until=until))

    @property
    def locks(self) -> Locks:
        """Locks with leases and fencing numbers, for everybody who shares the folder or the server."""
        return Locks(self._port.locks())

    @property
    def documents(self) -> Documents:
        """State documents, each a JSON value with a version."""
        return Documents(self._port.locks())

    def sync(self) -> None:
        """Return when everything said so far, acks included, is on disk."""
        self._port.sync()

    def close(self) -> None:
        """Let producers send what they have, sync, let go of the folder or the connection. Closing twice is fine.

        Messages in hand come back at the next opening.
        """
        self._port.close()

    def _body_type(self, given: Any) -> Any:
        return self._port.body_type if given is None else given

    def __enter__(self) -> Broker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
