"""Groups in stream mode: their members, their committed offsets, and queries that other processes run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from holdfast.errors import DamagedRange, InvalidRequest, OffsetOutOfRange
from holdfast.membership import TopicPartition

if TYPE_CHECKING:
    from holdfast.storage.log import Log


class PartitionLag(msgspec.Struct, frozen=True, kw_only=True):
    """How far a group is behind in a partition: in messages, and in the age of the first one not handled."""

    topic: str
    partition: int
    offset: int
    end: int
    messages: int
    seconds: float


def check_offset(log: Log, offset: object, place: TopicPartition) -> int:
    """Return the offset if it is a valid position in this partition; raises otherwise."""
    start, end = log.start, log.end
    if type(offset) is int and start <= offset <= end:
        return offset
    topic, partition = place
    holds = f"it holds {start} to {end - 1}" if end > start else f"it is empty, and continues at {end}"
    if type(offset) is not int:
        raise InvalidRequest(f"offset={offset!r} cannot be used for partition {partition} of {topic}: {holds}")
    raise OffsetOutOfRange(
        f"offset {offset} is not in partition {partition} of {topic}: {holds}", offset=offset, start=start, end=end
    )


def lag_of(log: Log, place: TopicPartition, offset: int, now_ns: int) -> PartitionLag:
    """Return the lag of a reader at the offset."""
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
    """Return when the first message from the offset on was published; `now_ns` if there is none.

    Of a segment that only a store has, the latest time must do: it is not fetched to tell an age.
    """
    while at < log.end:
        try:
            away_ns = log.away_latest_ns(at)
            if away_ns is not None:
                return away_ns
            return next((record.timestamp_ns for record in log.records(at, whole=False)), now_ns)
        except DamagedRange as damage:
            at = damage.next_offset
        except OffsetOutOfRange as trimmed:
            at = trimmed.start
    return now_ns


class Reset(msgspec.Struct, frozen=True, kw_only=True):
    """What a reset does to one partition: `messages` are redelivered, or skipped if below 0."""

    topic: str
    partition: int
    before: int | None
    after: int

    @property
    def messages(self) -> int:
        return 0 if self.before is None else self.before - self.after


class ResetEffect(msgspec.Struct, frozen=True, kw_only=True):
    """What a reset does to a partition: `again` handled messages are redelivered, `passed_over` are never delivered."""

    topic: str
    partition: int
    before: int | None
    after: int
    again: int
    passed_over: int


def effect_of(reset: Reset, counts: tuple[int, int] | None = None) -> ResetEffect:
    """Return the effect of a reset; without `counts`, all messages between the two positions are counted."""
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
    """The target of a reset: the start, the end, the first message of a time, or an offset."""

    end: Literal["earliest", "latest"] | None = None
    time_ns: int | None = None
    offset: int | None = None

    def __post_init__(self) -> None:
        if sum(choice is not None for choice in (self.end, self.time_ns, self.offset)) != 1:
            raise InvalidRequest("say where to continue: give exactly one of earliest, latest, a time or an offset")

    def find(self, log: Log) -> int:
        """Return the offset in this log, clamped to those that it holds."""
        if self.end is not None:
            return log.start if self.end == "earliest" else log.end
        if self.time_ns is not None:
            return log.find_time(self.time_ns)
        return max(log.start, min(self.offset or 0, log.end))
