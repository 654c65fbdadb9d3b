"""Reading on in one partition: the messages that a consumer of a stream group gets, and how far it came."""

from __future__ import annotations

import logging
from typing import Generic

import msgspec

from holdfast.api.bodies import Bodies
from holdfast.api.contents import Body, Home, MessageFields, Place
from holdfast.broker.messages import MOVED, is_for
from holdfast.broker.partition import Partition
from holdfast.broker.topic import Topic
from holdfast.env import Clock
from holdfast.errors import DamagedRange, HoldfastError, OffsetOutOfRange
from holdfast.membership.assignment import TopicPartition
from holdfast.model import Record

logger = logging.getLogger(__name__)


class StreamHome(Place):
    """One partition, as long as one consumer has it without a break: commits of what came before do not count."""


# A struct: made more than a million times a second, and in C four times as fast as other objects.
class StreamMessage(
    MessageFields[Body], msgspec.Struct, Generic[Body], frozen=True, gc=False, eq=False, repr_omit_defaults=True
):
    """A message of a stream: what it says, and where it stands."""

    _home: Home
    _bodies: Bodies
    _record: Record

    __repr__ = MessageFields.__repr__


class Feed(Generic[Body]):
    """One partition in the hands of a consumer.

    `position` is where it reads on; everything below `given` was handed to the user, below `handled` it is dealt
    with, and below `kept` committed.
    """

    def __init__(self, topic: Topic, number: int, position: int, *, group: str, bodies: Bodies, clock: Clock) -> None:
        self.topic = topic
        self.place: TopicPartition = topic.name, number
        self.partition: Partition = topic.partitions[number]
        self.log = self.partition.log
        self.home = StreamHome(topic.name, number)
        self.position = self.given = self.handled = self.kept = position
        self.paused = False
        self.passed_to: int | None = None  # up to there nothing lies behind what is committed but what is not for us
        self.told = False  # whether the user heard that it is ours
        self._follower = self.log.follower()
        self._group = group.encode()
        self._bodies = bodies
        self._now_ns = clock.now_ns

    @property
    def done(self) -> int:
        """Where somebody else would go on: behind what is handled, and behind what retention took away."""
        return max(self.handled, self.log.start)

    def move(self, position: int) -> None:
        """Read on there; what was handed out before counts as before, but the next commit is for this place."""
        self.position = self.given = self.handled = position
        self.passed_to = None

    def take(self, count: int) -> list[StreamMessage[Body]]:
        """The next messages, at most so many; none at the end, or while paused."""
        all_handled = self.position == self.given == self.handled
        all_kept = all_handled and self.position in (self.kept, self.passed_to)
        while self.position < self.log.end and not self.paused and not self.topic.closed:
            records = self._read(count)
            home, bodies = self.home, self._bodies
            found: list[StreamMessage[Body]] = [
                StreamMessage(home, bodies, record)
                for record in records
                if not (record.flags & MOVED or record.expires_at_ms)
            ]
            if len(found) < len(records):  # some need a closer look
                found = [StreamMessage(home, bodies, record) for record in records if self._is_meant(record)]
            if found:
                return found
        if all_handled:
            self.given = self.handled = self.position  # what was passed over need not be looked at again
            if all_kept and self.position != self.kept:
                self.passed_to = self.position
        return []

    def _read(self, count: int) -> list[Record]:
        """The records of the next offsets; fewer, or none, where some are gone."""
        start = self.position
        stop = min(start + count, self.log.end)
        try:
            records = self._follower.records(start, stop)
        except DamagedRange as damage:
            if damage.first_offset > start:
                return self._read(damage.first_offset - start)
            self._pass_over("messages damaged", damage.next_offset)
            return []
        except OffsetOutOfRange as trimmed:
            if trimmed.start <= start:
                raise
            self._pass_over("messages were trimmed before they were read", trimmed.start)
            return []
        except HoldfastError:
            if self.topic.closed:  # deleted just now: the group will tell
                return []
            raise
        self.position = stop
        return records

    def _is_meant(self, record: Record) -> bool:
        """Not for another group only, and not too late."""
        expires_ms = record.expires_at_ms
        return is_for(record, self._group) and not (expires_ms and expires_ms * 1_000_000 <= self._now_ns())

    def _pass_over(self, why: str, to: int) -> None:
        topic, number = self.place
        logger.error(why, extra={"topic": topic, "partition": number, "first": self.position, "next": to})
        self.position = to
