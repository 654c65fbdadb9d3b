"""What is told of topics and groups, and the few arguments that mean a setting in another unit."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal

import msgspec

from holdfast.broker.broker import BrokerEngine
from holdfast.broker.policy import differing_settings
from holdfast.broker.topic import Topic
from holdfast.embedded.times import to_datetime
from holdfast.errors import BadSettings
from holdfast.settings import TopicSettings


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


class OffsetMove(msgspec.Struct, frozen=True, kw_only=True):
    """Where a group stands in a partition, and where a reset takes it."""

    topic: str
    partition: int
    before: int
    after: int
    dry_run: bool


class GroupInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A group on one topic: how it reads, and how far it is behind."""

    name: str
    topic: str
    mode: Literal["queue", "stream"]
    lag: int
    members: int
    lag_seconds: float | None = None


def describe(engine: BrokerEngine, topic: Topic, stream_groups: list[str]) -> TopicInfo:
    """All that is known of a topic."""
    partitions = []
    for number, partition in enumerate(topic.partitions):
        segments = partition.log.segments()
        partitions.append(
            PartitionInfo(
                number=number,
                start=partition.log.start,
                end=partition.log.end,
                bytes=sum(segment.bytes for segment in segments),
                segments=len(segments),
            )
        )
    return TopicInfo(
        name=topic.name,
        id=topic.id,
        created_at=to_datetime(topic.created_ms * 1_000_000) if topic.created_ms else None,
        partitions=partitions,
        groups=sorted(topic.groups),
        stream_groups=stream_groups,
        settings=differing_settings(topic.settings, TopicSettings()),
    )


def changes_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by name; `retention_hours` is understood, too."""
    changes = dict(given)
    if "retention_hours" in changes:
        hours = changes.pop("retention_hours")
        if "retention_ms" in changes:
            raise BadSettings("give retention_hours or retention_ms, not both")
        if hours is not None and (type(hours) not in (int, float) or not 0 < hours <= 100 * 365 * 24):
            raise BadSettings(f"retention_hours={hours!r} cannot be used: give a number of hours, or None for ever")
        changes["retention_ms"] = None if hours is None else max(round(hours * 3_600_000), 1)
    return changes
