"""What an engine knows of its topics, and of the groups that read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from holdfast.api.times import to_datetime
from holdfast.api.topics import GroupInfo, PartitionInfo, TopicInfo
from holdfast.broker.engine import BrokerEngine
from holdfast.broker.folder.contents import differing_settings
from holdfast.broker.partition import Partition
from holdfast.broker.streams.offsets import lag_of
from holdfast.broker.topic import Topic
from holdfast.errors import CorruptData
from holdfast.settings import TopicSettings


def describe(engine: BrokerEngine, topic: Topic) -> TopicInfo:
    """All that is known of a topic."""
    partitions = [partition_info(number, partition) for number, partition in enumerate(topic.partitions)]
    return TopicInfo(
        name=topic.name,
        id=topic.id,
        created_at=to_datetime(topic.created_ms * 1_000_000) if topic.created_ms else None,
        partitions=partitions,
        groups=sorted(topic.groups),
        stream_groups=[group.name for group in engine.streams.on(topic)],
        settings=differing_settings(topic.settings, TopicSettings()),
    )


def partition_info(number: int, partition: Partition) -> PartitionInfo:
    """What one partition holds."""
    segments = partition.log.segments()
    return PartitionInfo(
        number=number,
        start=partition.log.start,
        end=partition.log.end,
        bytes=sum(segment.bytes for segment in segments),
        segments=len(segments),
    )


def groups_on(engine: BrokerEngine, topic: Topic) -> list[GroupInfo]:
    """The groups of a topic, in both modes, and the queries that read it."""
    found = []
    now_ns = engine.world.clock.now_ns()
    for group in topic.groups.values():
        stats = group.stats()
        ages = [
            lag_of(delivery.partition.log, (topic.name, delivery.number), delivery.group.floor, now_ns).seconds
            for delivery in group.deliveries
        ]
        found.append(
            GroupInfo(
                name=group.name,
                topic=topic.name,
                mode="queue",
                lag=stats.ready + stats.leased + stats.delayed,
                members=group.members(),
                lag_seconds=max(ages),
            )
        )
    for stream in engine.streams.on(topic):
        facts = stream.describe()
        lags = [lag for lag in facts.lag if lag.topic == topic.name]
        found.append(
            GroupInfo(
                name=stream.name,
                topic=topic.name,
                mode="stream",
                lag=sum(lag.messages for lag in lags),
                members=sum(topic.name in member.topics for member in facts.members),
                lag_seconds=max((lag.seconds for lag in lags), default=0.0),
            )
        )
    return [*found, *_spoiled_on(engine, topic), *_queries_on(engine, topic)]


def _spoiled_on(engine: BrokerEngine, topic: Topic) -> Iterator[GroupInfo]:
    """The groups that cannot be opened; in stream mode all of them, for nobody knows which topics they read."""
    now_ns = engine.world.clock.now_ns()
    modes: tuple[tuple[Literal["queue", "stream"], Mapping[str, CorruptData]], ...] = (
        ("queue", topic.spoiled),
        ("stream", engine.streams.spoiled),
    )
    for mode, spoiled in modes:
        for name, error in sorted(spoiled.items()):
            lags = [
                lag_of(partition.log, (topic.name, number), partition.log.start, now_ns)
                for number, partition in enumerate(topic.partitions)
            ]
            yield GroupInfo(
                name=name,
                topic=topic.name,
                mode=mode,
                lag=sum(lag.messages for lag in lags),
                members=0,
                lag_seconds=max(lag.seconds for lag in lags),
                problem=str(error),
            )


def _queries_on(engine: BrokerEngine, topic: Topic) -> Iterator[GroupInfo]:
    for query, lags in engine.queries.on(topic):
        yield GroupInfo(
            name=query.group,
            topic=topic.name,
            mode="query",
            lag=sum(lag.messages for lag in lags),
            members=1,
            lag_seconds=max(lag.seconds for lag in lags),
            renewed_seconds=(query.renewed_ms_ago or 0) / 1000,
            timeout_seconds=query.ttl_ms / 1000,
        )
