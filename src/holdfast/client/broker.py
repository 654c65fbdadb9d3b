"""The broker behind a server, for threads: the same names as in a data folder."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Literal

from holdfast.api.contents import Contents
from holdfast.api.drafts import HeadersLike, NewMessage, Seconds, Stored, Text, message_of
from holdfast.api.streams import Stream, stream_options
from holdfast.api.sync.consumer import Consumer
from holdfast.api.sync.group import Group
from holdfast.api.sync.locks import Documents, Locks
from holdfast.api.sync.producer import Producer
from holdfast.api.sync.queue import Queue
from holdfast.broker.streams.positions import Reset
from holdfast.broker.tracing.log import TraceStats
from holdfast.broker.tracing.steps import TraceStep
from holdfast.client.broker_face import RemoteBrokerFace
from holdfast.client.streams import publish_stream
from holdfast.client.ways import run
from holdfast.embedded.broker import Broker
from holdfast.embedded.topics import GroupInfo, TopicInfo
from holdfast.model import CodecName, Durability, Retained
from holdfast.producing.core import producer_settings
from holdfast.remote.opening import group_there, queue_there
from holdfast.remote.producer import RemoteProducerPort
from holdfast.remote.sync.consumer import RemoteConsumerPort
from holdfast.remote.sync.locks import RemoteLocksPort
from holdfast.settings import ProducerSettings, QueueSettings
from holdfast.storage.compaction import KeysCompacted

When = datetime | timedelta


class RemoteBroker(RemoteBrokerFace):
    """The topics of a server. Safe to use from any thread."""

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
        return run(
            self._queue(queue_there, name, create=create, body_type=body_type, settings=settings, changes=changes)
        )

    def create_topic(
        self, name: str, *, partitions: int | None = None, exist_ok: bool = False, **changes: Any
    ) -> TopicInfo:
        """Make a topic. `changes` are its settings by name, such as retention_hours=168; TopicExists if it is there."""
        return run(self._create_topic(name, partitions, changes, exist_ok=exist_ok))

    def alter_topic(self, name: str, **changes: Any) -> TopicInfo:
        """Change settings of a topic; they count at once, and are kept. `partitions` can only grow."""
        return run(self._alter_topic(name, changes))

    def add_partitions(self, name: str, count: int) -> TopicInfo:
        """Give the topic so many more partitions. From now on keys may go to other partitions than before."""
        return run(self._add_partitions(name, count))

    def describe_topic(self, name: str) -> TopicInfo:
        """What a topic is and holds."""
        return run(self._describe_topic(name))

    def topics(self) -> list[str]:
        """The names of all topics."""
        return run(self._topics())

    def delete_topic(self, name: str) -> None:
        """Take a topic away, with all its messages, groups and dead letters."""
        run(self._delete_topic(name))

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
        message = message_of(body, key, headers, priority, delay, at, ttl, dedup_id, correlation_id)
        return run(self._publish(topic, [message], partition, durability, codec))[0]

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
        return run(self._publish(topic, messages, partition, durability, codec))

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
        """Store what a binary file or an iterator of bytes gives as one message.

        `options` are those of `publish`, but `codec`.
        """
        return run(
            publish_stream(
                self._client.publishing, topic, stream, stream_options(options), partition, size_hint, durability
            )
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
        return run(self._read(topic, partition, offset, limit, on_damage))

    def group(
        self, topic: str, name: str, *, start: str = "earliest", body_type: Any = None, **changes: Any
    ) -> Group[Any]:
        """The group in queue mode, made where there is none: with all that is kept, or ("latest") with what comes.

        `changes` are settings of this group by name, such as key_order=True or max_attempts=3; they are kept.
        """
        return run(self._group(group_there, topic, name, start, body_type, changes))

    def producer(
        self, *, name: str | None = None, resume: bool = False, body_type: Any = None, **changes: Any
    ) -> Producer:
        """A producer that gathers messages into batches; `changes` are its settings, such as linger_ms=5, acks="all".

        One with a name fences an earlier one of that name. With `resume` it is given the same messages in the same
        order again after a crash, and stores those that are not stored yet.
        """
        producer = Producer(
            RemoteProducerPort(self._client),
            producer_settings(ProducerSettings(), changes),
            name=name,
            resume=resume,
            body_type=self._body_type(body_type),
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
        member = partial(RemoteConsumerPort.open, self._client)
        return Consumer.open(member, topics, group, body_type=self._body_type(body_type), **options)

    def compact_topic(self, name: str) -> KeysCompacted:
        """Of each key keep the last message, now; offsets never change. For topics whose cleanup asks for it."""
        return run(self._compact_topic(name))

    def apply_retention(self, name: str) -> Retained:
        """Drop now what the topic's retention settings let go, as upkeep does in time; answers with what is gone."""
        return run(self._apply_retention(name))

    def groups(self, topic: str | None = None) -> list[GroupInfo]:
        """The groups of a topic, or of all, in both modes."""
        return run(self._groups(topic))

    def delete_group(self, name: str, topic: str | None = None) -> None:
        """Forget a group and all that it knows: on one topic in queue mode, or a group in stream mode as a whole."""
        run(self._delete_group(name, topic))

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
        return run(self._reset_offsets(group, topic, to, partition, dry_run=dry_run))

    def trace(self, message_id: str) -> list[TraceStep]:
        """The life of a message step by step, with that of the messages that it was redriven into or out of.

        It is empty where the message was not sampled; see the topic's setting trace_sample.
        """
        return run(self._trace(message_id))

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
        question = {"topic": topic, "group": group, "event": event, "holder": holder, "error": error}
        return run(self._search_traces({**question, "since": since, "until": until}, limit, last=last))

    def trace_stats(
        self, *, topic: str | None = None, since: When | None = None, until: When | None = None
    ) -> TraceStats:
        """How long messages waited and were worked on, how often they were tried, what failed."""
        return run(self._trace_stats({"topic": topic, "since": since, "until": until}))

    @property
    def locks(self) -> Locks:
        """Locks with leases and fencing numbers, for whoever uses this server."""
        return Locks(RemoteLocksPort(self._client))

    @property
    def documents(self) -> Documents:
        """State documents, each a JSON value with a version."""
        return Documents(RemoteLocksPort(self._client))

    def sync(self) -> None:
        """Return when everything said so far, acks included, is on disk."""
        run(self._sync())

    def close(self) -> None:
        """Let producers send what they have, give back what was dropped, let go. Closing twice is fine."""
        for producer in list(self._sending):
            producer.close()
        self._client.close()

    def __enter__(self) -> RemoteBroker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


# One program, wherever the queue is: what takes the one takes the other.
Broker.register(RemoteBroker)
