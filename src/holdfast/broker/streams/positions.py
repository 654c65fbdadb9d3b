"""Where a group in stream mode stands in a partition, where it could stand, and how far behind it is."""

from __future__ import annotations

import logging
from typing import Literal

import msgspec

from holdfast.broker.streams.offsets import Committed
from holdfast.errors import DamagedRange, InvalidRequest, OffsetOutOfRange, TailLost
from holdfast.membership.assignment import TopicPartition
from holdfast.storage.log import Log

logger = logging.getLogger(__name__)


class PartitionLag(msgspec.Struct, frozen=True, kw_only=True):
    """How far behind a group is in a partition: in messages, and in the age of the first one not handled."""

    topic: str
    partition: int
    offset: int
    end: int
    messages: int
    seconds: float


class Reset(msgspec.Struct, frozen=True, kw_only=True):
    """What a reset does to one partition; `messages` come again, or are passed over if below 0."""

    topic: str
    partition: int
    before: int | None
    after: int

    @property
    def messages(self) -> int:
        return 0 if self.before is None else self.before - self.after


class ResetEffect(msgspec.Struct, frozen=True, kw_only=True):
    """What a reset does to a partition's messages: `again` were handled and come again, `passed_over` never come."""

    topic: str
    partition: int
    before: int | None
    after: int
    again: int
    passed_over: int


def effect_of(reset: Reset, counts: tuple[int, int] | None = None) -> ResetEffect:
    """The effect of a reset; without `counts`, all messages between the two positions are counted."""
    again, passed_over = counts or (max(reset.messages, 0), max(-reset.messages, 0))
    return ResetEffect(
        topic=reset.topic,
        partition=reset.partition,
        before=reset.before,
        after=reset.after,
        again=again,
        passed_over=passed_over,
    )


class MemberFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A member of a group at one moment."""

    id: str
    instance_id: str
    holder: str
    topics: tuple[str, ...]
    partitions: tuple[TopicPartition, ...]
    epoch: int
    heard_ms_ago: int


class GroupFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A group in stream mode at one moment."""

    name: str
    state: Literal["empty", "stable", "rebalancing"]
    epoch: int
    assignor: str
    rebalance: str
    members: list[MemberFacts]
    lag: list[PartitionLag]


class To(msgspec.Struct, frozen=True, kw_only=True):
    """Where to go on: one of the two ends, the first message of a time, or an offset."""

    end: Literal["earliest", "latest"] | None = None
    time_ns: int | None = None
    offset: int | None = None

    def __post_init__(self) -> None:
        if sum(choice is not None for choice in (self.end, self.time_ns, self.offset)) != 1:
            raise InvalidRequest("say where to go on: earliest, latest, a time or an offset, and only one of them")

    def find(self, log: Log) -> int:
        """The offset in this log; one that it does not hold becomes the nearest that it does."""
        if self.end is not None:
            return log.start if self.end == "earliest" else log.end
        if self.time_ns is not None:
            return log.find_time(self.time_ns)
        return max(log.start, min(self.offset or 0, log.end))


def usable_offset(log: Log, committed: Committed) -> int:
    """Where to go on from a commit: there, unless the log has lost messages before or behind that place."""
    facts = {"topic": committed.topic, "partition": committed.partition, "committed": committed.offset}
    try:
        log.check_position(committed.position)
    except TailLost as lost:
        # Other messages will stand, or stand already, where those were that the group had read.
        logger.warning("a tail was lost that had been read", extra={**facts, "go_on": lost.epoch_end})
        return max(lost.epoch_end, log.start)
    if committed.offset < log.start:
        logger.warning("messages were trimmed before they were read", extra={**facts, "go_on": log.start})
        return log.start
    return min(committed.offset, log.end)


def check_offset(log: Log, offset: object, place: TopicPartition) -> int:
    """The offset, if a consumer of this partition may stand there."""
    start, end = log.start, log.end
    if type(offset) is int and start <= offset <= end:
        return offset
    topic, partition = place
    holds = f"it holds {start} to {end - 1}" if end > start else f"it is empty, and goes on at {end}"
    if type(offset) is not int:
        raise InvalidRequest(f"offset={offset!r} cannot be used for partition {partition} of {topic}: {holds}")
    raise OffsetOutOfRange(
        f"offset {offset} is not in partition {partition} of {topic}: {holds}", offset=offset, start=start, end=end
    )


def lag_of(log: Log, place: TopicPartition, offset: int, now_ns: int) -> PartitionLag:
    """How far behind somebody is who goes on at the offset."""
    start, end = log.start, log.end
    at = max(start, min(offset, end))
    return PartitionLag(
        topic=place[0],
        partition=place[1],
        offset=offset,
        end=end,
        messages=end - at,
        seconds=max(now_ns - _time_ns(log, at, now_ns), 0) / 1e9,
    )


def _time_ns(log: Log, at: int, now_ns: int) -> int:
    """When the first message from the offset on was published; now, if there is none."""
    while at < log.end:
        try:
            return next((record.timestamp_ns for record in log.records(at, whole=False)), now_ns)
        except DamagedRange as damage:
            at = damage.next_offset
        except OffsetOutOfRange as trimmed:
            at = trimmed.start
    return now_ns
