"""What is told of topics and groups, and the few arguments that mean a setting in another unit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, Literal

import msgspec

from holdfast.api.times import instant_ns, to_datetime
from holdfast.broker.engine import BrokerEngine
from holdfast.broker.folder.policy import check_settings, differing_settings
from holdfast.broker.partition import Partition
from holdfast.broker.streams.positions import To, lag_of
from holdfast.broker.topic import Topic
from holdfast.errors import BadSettings, CorruptData, InvalidRequest
from holdfast.settings import QueueSettings, TopicSettings


class PartitionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One partition at one moment."""

    number: int
    start: int
    end: int
    bytes: int
    segments: int


class TopicInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One topic at one moment; `settings` are those that differ from the defaults."""

    name: str
    id: int
    created_at: datetime | None
    partitions: list[PartitionInfo]
    groups: list[str]
    stream_groups: list[str]
    settings: dict[str, Any]

    @property
    def messages(self) -> int:
        """How many messages are kept."""
        return sum(partition.end - partition.start for partition in self.partitions)

    @property
    def bytes(self) -> int:
        return sum(partition.bytes for partition in self.partitions)


class GroupInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A group on one topic: how it reads, and how far it is behind.

    A query that runs in another process is a group, too: it is there for as long as it is `renewed_seconds` ago less
    than its `timeout_seconds`. Of a group that cannot be opened `problem` says why, and what to do: how far it came
    nobody knows, so all that is kept counts as its lag.
    """

    name: str
    topic: str
    mode: Literal["queue", "stream", "query"]
    lag: int
    members: int
    lag_seconds: float
    renewed_seconds: float | None = None
    timeout_seconds: float | None = None
    problem: str = ""


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


def to_of(to: object) -> To:
    """Where a reset goes: "earliest", "latest", a time or an offset."""
    if isinstance(to, str) and to in ("earliest", "latest"):
        return To(end="earliest" if to == "earliest" else "latest")
    if isinstance(to, datetime):
        return To(time_ns=instant_ns(to, "to"))
    if type(to) is int and to >= 0:
        return To(offset=to)
    raise InvalidRequest(f'to={to!r} cannot be used: give "earliest", "latest", a time or an offset')


def changes_to(settings: QueueSettings | None, kept: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """What must change for a topic that keeps these settings to follow the given ones, with the changes.

    Settings that are given stand instead of those that are kept: what only these say goes back to its default.
    """
    if settings is None:
        return changes_of(changes)
    usual = TopicSettings()
    given = msgspec.structs.asdict(check_settings(settings, {}))
    differing = {name: value for name, value in given.items() if value != getattr(usual, name)}
    reset = {name: getattr(usual, name) for name in kept if hasattr(usual, name)}
    wanted = {**reset, **differing}
    return changes_of({**{name: value for name, value in wanted.items() if kept.get(name) != value}, **changes})


def changes_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by name; `retention_hours` is understood, too."""
    changes = dict(given)
    for name in ("durability", "ack_durability"):
        if name in changes:
            raise BadSettings(
                f"{name} is not kept with a topic: each program chooses it for itself, when it opens the broker "
                f"(open_broker(durability=...), or the settings file) or for one call"
            )
    if "retention_hours" in changes:
        hours = changes.pop("retention_hours")
        if "retention_ms" in changes:
            raise BadSettings("give retention_hours or retention_ms, not both")
        if hours is not None and (type(hours) not in (int, float) or not 0 < hours <= 100 * 365 * 24):
            raise BadSettings(f"retention_hours={hours!r} cannot be used: give a number of hours, or None for ever")
        changes["retention_ms"] = None if hours is None else max(round(hours * 3_600_000), 1)
    return changes
