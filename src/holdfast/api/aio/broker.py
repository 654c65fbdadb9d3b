"""The broker for tasks: topics, groups, producers, consumers, traces, locks and documents."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Literal

from holdfast.api.aio.consumer import AsyncConsumer
from holdfast.api.aio.group import AsyncGroup, AsyncQueue
from holdfast.api.aio.locks import AsyncDocuments, AsyncLocks
from holdfast.api.aio.opening import AsyncOpening
from holdfast.api.aio.ports import AsyncBrokerPort
from holdfast.api.aio.producer import AsyncProducer
from holdfast.api.arguments import Question, When, check_id, check_search, switch
from holdfast.api.bodies import Bodies, kind_of
from holdfast.api.contents import Contents
from holdfast.api.drafts import (
    AsyncStream,
    HeadersLike,
    NewMessage,
    PublishRequest,
    Seconds,
    Stored,
    StreamRequest,
    Text,
    message_of,
    stream_options,
)
from holdfast.api.ports import Face
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


class AsyncBroker(Face):
    """The topics of a data folder or of a server, for the tasks of any event loop.

    Publish to topics, and receive from them as a queue, a group or a consumer:

        async with holdfast.aio.open_broker("shop") as broker:
            await broker.create_topic("orders", partitions=4)
            await broker.publish("orders", b"1 book", key="customer-7")
    """

    _port: AsyncBrokerPort

    @property
    def settings(self) -> BrokerSettings:
        """The settings of the data folder. For a server, the defaults: see `holdfast config show --at URL` instead."""
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
    ) -> AsyncOpening[AsyncQueue[Any]]:
        """Open the queue with this name; without a name, the only one. It is created if needed, unless create=False.

        The arguments are those of `holdfast.open`; `changes` are settings by name.
        """
        body_type = self._body_type(body_type)
        return AsyncOpening(
            self._open_queue,
            QueueRequest(name=name, body_type=body_type, settings=settings, changes=changes, create=create),
        )

    async def _open_queue(self, request: QueueRequest) -> AsyncQueue[Any]:
        Bodies(request.body_type)  # a bad type is refused before anything is created
        switch(request.create, "create")
        if request.name is not None:
            check_topic_name(request.name)
        return AsyncQueue(await self._port.queue(request))

    async def create_topic(
        self, name: str, *, partitions: int | None = None, exist_ok: bool = False, **changes: Any
    ) -> TopicInfo:
        """Create a topic. `changes` are its settings by name, such as retention_hours=168.

        Raises TopicExists if the topic exists, unless exist_ok=True.
        """
        check_topic_name(name)
        switch(exist_ok, "exist_ok")
        wanted = changes_of(changes)
        if self._port.body_type is not None:
            wanted.setdefault("bodies", kind_of(self._port.body_type))
        return await self._port.create_topic(name, partitions, wanted, exist_ok=exist_ok)

    async def alter_topic(self, name: str, **changes: Any) -> TopicInfo:
        """Change settings of a topic. They take effect at once and are stored. `partitions` can only grow."""
        return await self._port.alter_topic(check_topic_name(name), check_changes(changes))

    async def add_partitions(self, name: str, count: int) -> TopicInfo:
        """Add `count` partitions to the topic. From now on a key may go to another partition than before."""
        check_added(count)
        return await self._port.add_partitions(check_topic_name(name), count)

    async def describe_topic(self, name: str) -> TopicInfo:
        """Return the partitions, groups and settings of a topic. Raises UnknownTopic if it does not exist."""
        return await self._port.describe_topic(check_readable_name(name))

    async def topics(self) -> list[str]:
        """Return the names of all topics."""
        return await self._port.topics()

    async def delete_topic(self, name: str) -> None:
        """Delete a topic with all its messages, groups and dead letters."""
        await self._port.delete_topic(check_topic_name(name))

    async def publish(
        self, topic: str, body: Any, *, key: Text | None = None, headers: HeadersLike | None = None, priority: int = 0,
        delay: Seconds | None = None, at: datetime | None = None, ttl: Seconds | None = None,
        dedup_id: Text | None = None, correlation_id: str | None = None,
        partition: int | None = None, durability: Durability | None = None, codec: CodecName | None = None,
    ) -> Stored:  # fmt: skip
        """Store a message in a topic; every group of the topic gets it. The options are those of `AsyncQueue.put`.

        It goes to `partition` if given, otherwise to the partition of its key, otherwise to the next one in turn.
        """
        options = (key, headers, delay, at, ttl, dedup_id, correlation_id, codec)
        if type(body) is bytes and options == _NO_OPTIONS and type(priority) is int and not priority:
            stored = await self._port.publish_plain(topic, body, partition, durability)
            if stored is not None:
                return stored
        message = message_of(body, key, headers, priority, delay, at, ttl, dedup_id, correlation_id)
        return (await self._port.publish(topic, PublishRequest([message], partition, durability, codec)))[0]

    async def publish_many(
        self,
        topic: str,
        messages: Iterable[Any | NewMessage],
        *,
        partition: int | None = None,
        durability: Durability | None = None,
        codec: CodecName | None = None,
    ) -> list[Stored]:
        """Store several messages; each is a body or a NewMessage. Those without a key go to one partition.

        Of the messages that go to the same partition, all are stored or none.
        """
        return await self._port.publish(topic, PublishRequest(messages, partition, durability, codec))

    async def publish_stream(
        self,
        topic: str,
        stream: AsyncStream,
        size_hint: int | None = None,
        *,
        partition: int | None = None,
        durability: Durability | None = None,
        **options: Any,
    ) -> Stored:
        """Store one message whose body is read from a binary file or an (async) iterator of bytes, piece by piece.

        `options` are those of `publish` except `codec`. If you pass the number of bytes as `size_hint`, a body that
        is too large is refused before it is read.
        """
        message = stream_options(options)
        return await self._port.upload(
            topic,
            StreamRequest(
                stream=stream, message=message, size_hint=size_hint, partition=partition, durability=durability
            ),
        )

    async def read(
        self,
        topic: str,
        *,
        partition: int = 0,
        offset: int | None = None,
        limit: int = 100,
        on_damage: Literal["raise", "skip"] = "raise",
    ) -> list[Contents[Any]]:
        """Return up to `limit` messages of a partition from an offset on, whatever their phase. Nothing changes.

        Without an offset it begins with the oldest message. If the next messages are damaged, raises DamagedRange,
        which says where to continue; with on_damage="skip" they are left out.
        """
        check_readable_name(topic)
        check_read(offset, limit, on_damage)
        return await self._port.read(topic, partition, offset, limit, on_damage)

    def group(
        self, topic: str, name: str, *, start: str = "earliest", body_type: Any = None, **changes: Any
    ) -> AsyncOpening[AsyncGroup[Any]]:
        """Open a group in queue mode. It is created if needed, and then begins at `start`.

        "earliest" is the oldest message still stored; "latest" means only messages published from now on. `changes`
        are settings of this group by name, such as key_order=True or max_attempts=3; they are stored.
        """
        return AsyncOpening(self._open_group, topic, name, start, body_type, changes)

    async def _open_group(
        self, topic: str, name: str, start: str, body_type: Any, changes: dict[str, Any]
    ) -> AsyncGroup[Any]:
        bodies = Bodies(self._body_type(body_type))  # a bad type is refused before anything is created
        check_start(start)
        check_topic_name(topic)
        check_name(name, "group")
        return AsyncGroup(await self._port.group(topic, name, start, bodies, changes))

    def producer(
        self, *, name: str | None = None, resume: bool = False, body_type: Any = None, **changes: Any
    ) -> AsyncProducer:
        """Return a producer, which collects messages and stores them in batches.

        `changes` are its settings by name, such as linger_ms=5 or acks="all". A producer with a name fences earlier
        producers of that name. With `resume`, send the same messages in the same order again after a crash: only
        those that are not stored yet are stored.
        """
        return self._port.producer(name, self._body_type(body_type), changes, resume=resume)

    def consumer(
        self, topics: str | Iterable[str], *, group: str, body_type: Any = None, **options: Any
    ) -> AsyncOpening[AsyncConsumer[Any]]:
        """Open a consumer: a member of a group in stream mode, which is created if needed.

        `options` are settings by name, such as auto_commit=False or max_records=100, and:

        - `instance_id`: makes it a static member, which keeps its partitions over a short restart.
        - `holder`: a name for this consumer, shown to people.
        - `on_assigned`, `on_revoked`: functions called with a list of (topic, partition) that it got or has to give up.
        """
        body_type = self._body_type(body_type)
        return AsyncOpening(AsyncConsumer[Any].open, self._port.member, topics, group, body_type=body_type, **options)

    async def compact_topic(self, name: str) -> KeysCompacted:
        """Compact the topic by key now: only the last message of each key is kept, and offsets do not change.

        The topic's `cleanup` setting must include compaction. Returns what was removed.
        """
        return await self._port.compact_topic(check_topic_name(name))

    async def apply_retention(self, name: str) -> Retained:
        """Apply the topic's retention settings now instead of at the next upkeep. Returns what was deleted."""
        return await self._port.apply_retention(check_topic_name(name))

    async def groups(self, topic: str | None = None) -> list[GroupInfo]:
        """Return the groups of one topic, or of all topics, in queue mode and in stream mode."""
        return await self._port.groups(None if topic is None else check_topic_name(topic))

    async def delete_group(self, name: str, topic: str | None = None) -> None:
        """Delete a group with its positions. With `topic`, a group in queue mode; without, one in stream mode."""
        await self._port.delete_group(check_name(name, "group"), topic)

    async def reset_offsets(
        self,
        group: str,
        topic: str,
        *,
        to: str | int | datetime,
        partition: int | None = None,
        dry_run: bool = False,
    ) -> list[Reset]:
        """Move the position of a group to "earliest", "latest", an aware datetime or an offset.

        Without `partition`, all partitions move. With `dry_run`, nothing changes. Returns, for each partition, the
        offsets before and after and the number of messages between them.
        """
        where = to_of(to)
        check_name(group, "group")
        check_topic_name(topic)
        switch(dry_run, "dry_run")
        return await self._port.reset_offsets(group, topic, where, partition, dry_run=dry_run)

    async def trace(self, message_id: str) -> list[TraceStep]:
        """Return the traced steps of a message, and of messages it was redriven into or out of.

        The list is empty if the message was not sampled: see the topic's setting trace_sample.
        """
        check_id(message_id)
        return await self._port.trace(message_id)

    async def search_traces(
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
        """Return the traced steps that match, oldest first: the first `limit` of them, or the last if last=True.

        `since` and `until` are aware datetimes, or timedeltas before now.
        """
        check_search(limit, last)
        question = Question(topic=topic, group=group, event=event, holder=holder, error=error, since=since, until=until)
        return await self._port.search_traces(question, limit, last=last)

    async def trace_stats(
        self, *, topic: str | None = None, since: When | None = None, until: When | None = None
    ) -> TraceStats:
        """Summarize traces: how long messages waited and were processed, how many attempts they took, what failed."""
        return await self._port.trace_stats(Question(topic=topic, since=since, until=until))

    @property
    def locks(self) -> AsyncLocks:
        """Locks with leases and fencing numbers, shared by all who use the folder or the server."""
        return AsyncLocks(self._port.locks())

    @property
    def documents(self) -> AsyncDocuments:
        """State documents, each a JSON value with a version."""
        return AsyncDocuments(self._port.locks())

    async def sync(self) -> None:
        """Wait until everything done so far, including acks, is on disk."""
        await self._port.sync()

    async def close(self) -> None:
        """Flush producers, sync to disk, and release the folder or the connection. Closing twice is fine.

        Messages in flight return to their queues at the next opening.
        """
        await self._port.close()

    def _body_type(self, given: Any) -> Any:
        return self._port.body_type if given is None else given

    async def __aenter__(self) -> AsyncBroker:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
