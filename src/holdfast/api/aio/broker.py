"""The broker for tasks: topics, groups, producers, consumers and traces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, get_args

from holdfast.api import AsyncOpening
from holdfast.api.aio.group import AsyncGroup, AsyncQueue
from holdfast.api.aio.parts import AsyncBrokerParts
from holdfast.api.arguments import (
    Question,
    When,
    check_id,
    check_search,
    check_search_request,
    check_shard,
    durability_of,
    sampled_ms,
    switch,
)
from holdfast.api.contents import Contents
from holdfast.api.drafts import (
    NO_OPTIONS,
    AsyncStream,
    Bodies,
    HeadersLike,
    NewMessage,
    PublishRequest,
    Seconds,
    Stored,
    StreamRequest,
    Text,
    kind_of,
    message_of,
    stream_options,
)
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
from holdfast.errors import InvalidRequest
from holdfast.model import Acks, CodecName, Durability, Retained
from holdfast.settings import BrokerSettings, QueueSettings

if TYPE_CHECKING:
    from holdfast.api.aio.consumer import AsyncConsumer
    from holdfast.api.aio.ports import AsyncBrokerPort
    from holdfast.api.aio.producer import AsyncProducer
    from holdfast.api.listing import SearchPage
    from holdfast.broker.samples import Samples
    from holdfast.broker.streams import Reset
    from holdfast.broker.tracing import TraceStep
    from holdfast.broker.tracing.log import TraceStats
    from holdfast.broker.workers import Order, WorkerInfo
    from holdfast.storage.compaction import KeysCompacted


class AsyncBroker(AsyncBrokerParts):
    """The topics of a data folder or of a server, for the tasks of any event loop.

    Publish to topics, and receive from them as a queue, a group or a consumer. Once it is closed, its methods raise
    Closed.

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
        """Open the queue with this name: a topic with one group.

        Args:
            name: The name; without one, the only queue of the folder.
            create: Create it if it does not exist.
            body_type: bytes (the default), str, dict or any type that msgspec supports.
            settings: Its settings as an object.
            **changes: Its settings by name, such as max_attempts=3. They are stored with it.

        Returns:
            The queue.

        Raises:
            UnknownTopic: It does not exist, and `create` is False.
            BadSettings: A setting is unknown or outside its limits.
        """
        body_type = self._body_type(body_type)
        wanted = QueueRequest(name=name, body_type=body_type, settings=settings, changes=changes, create=create)
        return AsyncOpening(self._open_queue, wanted)

    async def _open_queue(self, request: QueueRequest) -> AsyncQueue[Any]:
        Bodies(request.body_type)  # a bad type is refused before anything is created
        switch(request.create, "create")
        if request.name is not None:
            check_topic_name(request.name)
        return AsyncQueue(await self._port.queue(request))

    async def create_topic(
        self, name: str, *, partitions: int | None = None, exist_ok: bool = False, shard: int | None = None,
        **changes: Any,
    ) -> TopicInfo:  # fmt: skip
        """Create a topic.

        Args:
            name: The name: letters, digits, dots, dashes and underscores.
            partitions: How many; 1 by default.
            exist_ok: Accept that it already exists.
            shard: The shard of a cluster where it is to live; by default, its name decides.
            **changes: Its settings by name, such as retention_hours=168.

        Returns:
            The topic's partitions, groups and settings.

        Raises:
            TopicExists: It already exists, and `exist_ok` is False; or it exists in another shard.
            BadSettings: A setting is unknown or outside its limits.
            InvalidRequest: There is no such shard, or no cluster.
        """
        check_topic_name(name)
        switch(exist_ok, "exist_ok")
        check_shard(shard)
        wanted = changes_of(changes)
        if self._port.body_type is not None:
            wanted.setdefault("bodies", kind_of(self._port.body_type))
        return await self._port.create_topic(name, partitions, wanted, exist_ok=exist_ok, shard=shard)

    async def alter_topic(self, name: str, **changes: Any) -> TopicInfo:
        """Change settings of a topic. They take effect at once and are stored.

        Args:
            name: The topic.
            **changes: Settings by name; `partitions` can only grow.

        Returns:
            The topic's partitions, groups and settings.

        Raises:
            UnknownTopic: The topic does not exist.
            BadSettings: A setting is unknown or outside its limits.
        """
        return await self._port.alter_topic(check_topic_name(name), check_changes(changes))

    async def add_partitions(self, name: str, count: int) -> TopicInfo:
        """Add partitions to a topic. From now on a key may go to another partition than before.

        Args:
            name: The topic.
            count: How many to add.

        Returns:
            The topic's partitions, groups and settings.

        Raises:
            UnknownTopic: The topic does not exist.
            InvalidRequest: The count cannot be used.
        """
        check_added(count)
        return await self._port.add_partitions(check_topic_name(name), count)

    async def describe_topic(self, name: str) -> TopicInfo:
        """Describe a topic.

        Args:
            name: The topic.

        Returns:
            The topic's partitions, groups and settings.

        Raises:
            UnknownTopic: The topic does not exist.
        """
        return await self._port.describe_topic(check_readable_name(name))

    async def topics(self) -> list[str]:
        """List the topics.

        Returns:
            The names of all topics.

        Raises:
            Closed: The broker is closed.
        """
        return await self._port.topics()

    async def delete_topic(self, name: str) -> None:
        """Delete a topic with all its messages, groups and dead letters. This cannot be undone.

        Args:
            name: The topic.

        Raises:
            UnknownTopic: The topic does not exist.
        """
        await self._port.delete_topic(check_topic_name(name))

    async def publish(
        self, topic: str, body: Any, *, key: Text | None = None, headers: HeadersLike | None = None, priority: int = 0,
        delay: Seconds | None = None, at: datetime | None = None, ttl: Seconds | None = None,
        dedup_id: Text | None = None, correlation_id: str | None = None,
        partition: int | None = None, durability: Durability | None = None, codec: CodecName | None = None,
        acks: Acks | None = None,
    ) -> Stored:  # fmt: skip
        """Store a message in a topic; every group of the topic gets it. If it raises, nothing is stored.

        Args:
            topic: The topic.
            body: The body, in the type that the broker was opened with: bytes by default.
            key: Messages with the same key go to the same partition.
            headers: A mapping, or pairs of name and value; values are str or bytes.
            priority: 0 to 9; 9 is the most urgent.
            delay: Deliver it only after this time, in seconds or as a timedelta.
            at: Deliver it only at this aware datetime or later.
            ttl: Skip it if it has not been delivered within this time.
            dedup_id: Store only the first message with this id within the deduplication window.
            correlation_id: A text of your own; the message's id by default.
            partition: The partition; by default that of its key, or else the next one in turn.
            durability: "fsync", "interval" or "os", for this call.
            codec: "none", "zstd", "lz4" or "gzip", for this call.
            acks: "all", "leader" or "none", another name for `durability`: "fsync", "os" and "os".

        Returns:
            The message's id and place.

        Raises:
            UnknownTopic: There is no such topic or partition.
            BadBody: The body does not fit the broker's type.
            MessageTooLarge: It exceeds the limit in the settings.
            DiskFull: The disk has no room for it.
        """
        if acks is not None:
            durability = durability_of(acks, durability)
        options = (key, headers, priority, delay, at, ttl, dedup_id, correlation_id)
        if codec is None:
            plain = type(body) is bytes and options == NO_OPTIONS and type(priority) is int
            stored = self._port.publish_now(topic, body, partition, durability, None if plain else options)
            if stored is None and plain:
                stored = await self._port.publish_plain(topic, body, partition, durability)
            if stored is not None:
                return stored
        message = message_of(body, options)
        return (await self._port.publish(topic, PublishRequest([message], partition, durability, codec)))[0]

    async def publish_many(
        self,
        topic: str,
        messages: Iterable[Any | NewMessage],
        *,
        partition: int | None = None,
        durability: Durability | None = None,
        codec: CodecName | None = None,
        acks: Acks | None = None,
    ) -> Sequence[Stored]:
        """Store several messages in one call. Of those that go to the same partition, all are stored or none.

        Args:
            topic: The topic.
            messages: Each is a body or a NewMessage. Those without a key go to one partition.
            partition: The partition for all of them.
            durability: "fsync", "interval" or "os", for this call.
            codec: "none", "zstd", "lz4" or "gzip", for this call.
            acks: "all", "leader" or "none", another name for `durability`: "fsync", "os" and "os".

        Returns:
            The ids and places, in the order of the messages.

        Raises:
            UnknownTopic: There is no such topic or partition.
            MessageTooLarge: A message or the batch exceeds the limits in the settings.
            DiskFull: The disk has no room for them.
        """
        durability = durability_of(acks, durability)
        return await self._port.publish(topic, PublishRequest(messages, partition, durability, codec))

    async def publish_stream(
        self,
        topic: str,
        stream: AsyncStream,
        size_hint: int | None = None,
        *,
        partition: int | None = None,
        durability: Durability | None = None,
        acks: Acks | None = None,
        **options: Any,
    ) -> Stored:
        """Store one message whose body is read piece by piece and never held in memory whole.

        Args:
            topic: The topic.
            stream: A binary file or an (async) iterator of bytes.
            size_hint: The number of bytes; a body that is too large is then refused before it is read.
            partition: The partition; by default that of its key, or else the next one in turn.
            durability: "fsync", "interval" or "os", for this call.
            acks: "all", "leader" or "none", another name for `durability`: "fsync", "os" and "os".
            **options: Those of `publish` except `codec`.

        Returns:
            The message's id and place.

        Raises:
            UnknownTopic: There is no such topic or partition.
            MessageTooLarge: The body exceeds the limit in the settings.
            DiskFull: The disk has no room for it.
        """
        wanted = StreamRequest(
            stream=stream, message=stream_options(options), size_hint=size_hint, partition=partition,
            durability=durability_of(acks, durability),
        )  # fmt: skip
        return await self._port.upload(topic, wanted)

    async def read(
        self,
        topic: str,
        *,
        partition: int = 0,
        offset: int | None = None,
        limit: int = 100,
        on_damage: Literal["raise", "skip"] = "raise",
    ) -> list[Contents[Any]]:
        """Read messages of a partition, whatever their phase. Nothing changes.

        Args:
            topic: The topic.
            partition: The partition.
            offset: The first offset to read; by default that of the oldest message.
            limit: The maximum number.
            on_damage: "skip" leaves damaged messages out.

        Returns:
            The messages in order; [] at the end.

        Raises:
            DamagedRange: The next messages are damaged; it says where to continue.
            OffsetOutOfRange: The offset is not stored.
            UnknownTopic: There is no such topic or partition.
        """
        check_readable_name(topic)
        check_read(offset, limit, on_damage)
        return await self._port.read(topic, partition, offset, limit, on_damage)

    def group(
        self, topic: str, name: str, *, start: str = "earliest", body_type: Any = None, **changes: Any
    ) -> AsyncOpening[AsyncGroup[Any]]:
        """Open a group in queue mode, which is created if needed.

        Args:
            topic: The topic.
            name: The name of the group.
            start: Where a new group begins: "earliest" is the oldest stored message, "latest" means only messages
                published from now on.
            body_type: bytes (the default), str, dict or any type that msgspec supports.
            **changes: Settings of this group by name, such as key_order=True or max_attempts=3; they are stored.

        Returns:
            The group.

        Raises:
            UnknownTopic: The topic does not exist.
            BadSettings: A setting is unknown or outside its limits.
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

        Args:
            name: A name that identifies it across restarts. It fences earlier producers of that name.
            resume: Send the same messages in the same order again after a crash: only those that are not stored yet are
                stored. Needs a name.
            body_type: bytes (the default), str, dict or any type that msgspec supports.
            **changes: Its settings by name, such as linger_ms=5 or acks="all".

        Returns:
            The producer.

        Raises:
            BadSettings: A setting is unknown or outside its limits.
        """
        return self._port.producer(name, self._body_type(body_type), changes, resume=resume)

    def consumer(
        self, topics: str | Iterable[str], *, group: str, body_type: Any = None, **options: Any
    ) -> AsyncOpening[AsyncConsumer[Any]]:
        """Open a consumer: a member of a group in stream mode, which is created if needed.

        Args:
            topics: One topic or several.
            group: The name of the group.
            body_type: bytes (the default), str, dict or any type that msgspec supports.
            **options: Settings by name, such as auto_commit=False or max_records=100; `instance_id` makes it a static
                member, which keeps its partitions over a short restart; `holder` is a name shown to people;
                `on_assigned` and `on_revoked` are functions called with a list of (topic, partition) that it got or has
                to give up.

        Returns:
            The consumer.

        Raises:
            UnknownTopic: A topic does not exist.
            BadSettings: A setting is unknown or outside its limits.
        """
        from holdfast.api.aio.consumer import AsyncConsumer

        body_type = self._body_type(body_type)
        return AsyncOpening(AsyncConsumer[Any].open, self._port.member, topics, group, body_type=body_type, **options)

    async def compact_topic(self, name: str) -> KeysCompacted:
        """Compact a topic by key now: only the last message of each key is kept, and offsets do not change.

        Args:
            name: The topic. Its `cleanup` setting must include compaction.

        Returns:
            What was removed.

        Raises:
            UnknownTopic: The topic does not exist.
            InvalidRequest: The topic is not set to be compacted.
        """
        return await self._port.compact_topic(check_topic_name(name))

    async def apply_retention(self, name: str) -> Retained:
        """Apply the topic's retention settings now instead of at the next upkeep.

        Args:
            name: The topic.

        Returns:
            What was deleted.

        Raises:
            UnknownTopic: The topic does not exist.
        """
        return await self._port.apply_retention(check_topic_name(name))

    async def groups(self, topic: str | None = None) -> list[GroupInfo]:
        """List groups, in queue mode and in stream mode.

        Args:
            topic: The topic; all of them by default.

        Returns:
            The groups with their positions and counts.

        Raises:
            UnknownTopic: The topic does not exist.
        """
        return await self._port.groups(None if topic is None else check_topic_name(topic))

    async def workers(self) -> list[WorkerInfo]:
        """List the workers that have reported within the last hour, also if they have stopped or are `lost` since.

        Returns:
            The workers by name: what each is doing, and when it was last seen.

        Raises:
            Closed: The broker is closed.
        """
        return await self._port.workers()

    async def order_worker(self, name: str, order: Order) -> list[str]:
        """Tell workers what to do at their next report.

        Args:
            name: The name of the workers, or the id of one.
            order: "drain" to finish current messages, take no more and stay idle; "resume" to take messages again;
                "stop" to end as after SIGTERM.

        Returns:
            The ids of the workers that get the order.

        Raises:
            NotFound: No such worker is reporting.
        """
        if not isinstance(name, str):
            raise InvalidRequest(f"a worker's name must be a str, not {type(name).__name__}: pass it as a str")
        from holdfast.broker.workers import Order as Orders  # for this call only

        if order not in get_args(Orders):
            raise InvalidRequest(f"order={order!r} cannot be used: give one of {', '.join(get_args(Orders))}")
        return await self._port.order_worker(name, order)

    async def delete_group(self, name: str, topic: str | None = None) -> None:
        """Delete a group with its positions.

        Args:
            name: The group.
            topic: The topic of a group in queue mode; leave it out for a group in stream mode.

        Raises:
            UnknownGroup: The group does not exist.
            InvalidRequest: The group is in use.
        """
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
        """Move the position of a group.

        Args:
            group: The group.
            topic: The topic.
            to: "earliest", "latest", an aware datetime or an offset.
            partition: The partition; all of them by default.
            dry_run: Only say what would change.

        Returns:
            For each partition, the offsets before and after and the number of messages between them.

        Raises:
            UnknownGroup: The group does not exist.
            UnknownTopic: The topic does not exist.
            InvalidRequest: The group has active consumers, or `to` cannot be used.
        """
        where, dry_run = to_of(to), switch(dry_run, "dry_run")
        check_name(group, "group")
        check_topic_name(topic)
        return await self._port.reset_offsets(group, topic, where, partition, dry_run=dry_run)

    async def trace(self, message_id: str) -> list[TraceStep]:
        """Return the traced steps of a message, and of messages it was redriven into or out of.

        Args:
            message_id: The id that `publish` returned.

        Returns:
            The steps in order; [] if the message was not sampled: see the topic's setting `trace_sample`.

        Raises:
            InvalidRequest: This is not the id of a message.
        """
        check_id(message_id)
        return await self._port.trace(message_id)

    async def search(self, text: str, *, limit: int = 50, after: str = "") -> SearchPage:
        """Search the messages of all queues, in every phase, for what you would type into the console's search box.

            page = broker.search("key=customer-7 age<1h")
            while True:
                for message, group in page.messages:
                    print(message.topic, message.id, message.phase)
                if not page.next:
                    break
                page = broker.search("key=customer-7 age<1h", after=page.next)

        Args:
            text: Terms that must all match: an id, key=VALUE, a header as NAME=VALUE, a field of a JSON body such as
                $.order.id=7, time=2026-11-17 (or time>, time<, age<1h), queue=TEXT, or a text. "where CONDITION" takes
                a condition as `messages` does.
            limit: The maximum number of messages, up to 1,000.
            after: The `next` of the previous page, to search further.

        Returns:
            The messages that were found, and what was searched. One call looks at a limited number of messages.

        Raises:
            InvalidRequest: The text cannot be understood, or another argument cannot be used.
        """
        check_search_request(text, limit, after)
        return await self._port.search(text, limit, after)

    async def search_traces(
        self, *, topic: str | None = None, group: str | None = None, event: str | None = None,
        holder: str | None = None, error: str | None = None, since: When | None = None,
        until: When | None = None, limit: int = 100, last: bool = False,
    ) -> list[TraceStep]:  # fmt: skip
        """Search the traced steps of all messages.

        Args:
            topic: Only those of this topic.
            group: Only those of this group.
            event: Only those of this kind, such as "acked".
            holder: Only those of this consumer.
            error: Only those whose error contains this text.
            since: An aware datetime, or a timedelta before now.
            until: An aware datetime, or a timedelta before now.
            limit: The maximum number.
            last: Return the last ones instead of the first ones.

        Returns:
            The steps, oldest first.

        Raises:
            InvalidRequest: One of the arguments cannot be used.
        """
        check_search(limit, last)
        question = Question(topic=topic, group=group, event=event, holder=holder, error=error, since=since, until=until)
        return await self._port.search_traces(question, limit, last=last)

    async def trace_stats(
        self, *, topic: str | None = None, since: When | None = None, until: When | None = None
    ) -> TraceStats:
        """Summarize traces: how long messages waited and were processed, how many attempts they took, what failed.

        Args:
            topic: Only those of this topic.
            since: An aware datetime, or a timedelta before now.
            until: An aware datetime, or a timedelta before now.

        Returns:
            The summary.

        Raises:
            InvalidRequest: One of the arguments cannot be used.
        """
        return await self._port.trace_stats(Question(topic=topic, since=since, until=until))

    async def samples(self, topic: str | None = None, group: str | None = None, *, last: Seconds = 900) -> Samples:
        """Return the recent rates, backlog and handling times of a group, a topic or the whole folder.

        Only the process that owns the folder takes samples, every 5 seconds while it is open.

        Args:
            topic: The topic; all of them together by default.
            group: The group; by default the topic's default group, or the topic itself if it has none.
            last: How far back, in seconds or as a timedelta; up to seven days.

        Returns:
            The samples, oldest first.

        Raises:
            InvalidRequest: One of the arguments cannot be used.
        """
        return await self._port.samples(topic, group, sampled_ms(topic, group, last))

    async def sync(self) -> None:
        """Wait until everything done so far, including acks, is on disk.

        Raises:
            DiskFailed: The disk reported an error.
            Closed: The broker is closed.
        """
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
