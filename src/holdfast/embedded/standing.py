"""Where a consumer stands in its partitions: positions, seeking, pausing, lag."""

from __future__ import annotations

from collections import deque
from datetime import datetime
from typing import Generic, Literal

from holdfast.api.contents import Body
from holdfast.api.times import instant_ns
from holdfast.broker.engine import BrokerEngine
from holdfast.broker.streams.group import StreamGroup
from holdfast.broker.streams.positions import PartitionLag, check_offset, lag_of
from holdfast.embedded.feeds import Feed, StreamMessage
from holdfast.errors import Closed, InvalidRequest
from holdfast.membership.assignment import TopicPartition


class Standing(Generic[Body]):
    """The partitions that a consumer has, and how far it came in each."""

    def __init__(self, engine: BrokerEngine, group: StreamGroup, topics: tuple[str, ...]) -> None:
        self._engine = engine
        self._group = group
        self._clock = engine.world.clock
        self.topics = topics
        self._feeds: dict[TopicPartition, Feed[Body]] = {}
        self._ahead: deque[StreamMessage[Body]] = deque()  # read by an iteration, and not handed out yet
        self._closed = False

    @property
    def group(self) -> str:
        """The name of the group."""
        return self._group.name

    @property
    def closed(self) -> bool:
        return self._closed or self._engine.closed

    def assignment(self) -> list[TopicPartition]:
        """The partitions that are ours now, as (topic, partition)."""
        return sorted(self._feeds)

    def position(self, topic: str, partition: int) -> int:
        """The offset of the next message that we will get there."""
        return self._feed(topic, partition).given

    def _committed(self, topic: str, partition: int) -> int | None:
        with self._engine.using(topic) as found:
            found.partition(partition)  # or UnknownTopic
            return self._group.committed(found, partition)

    def _seek(
        self,
        topic: str | None,
        partition: int | None,
        *,
        offset: int | None = None,
        to: Literal["start", "end"] | None = None,
        time: datetime | None = None,
    ) -> None:
        """Go on elsewhere: at an offset of one partition, or at an end or a time of one, of a topic, or of all."""
        if to is None and time is None:
            if offset is None:
                raise InvalidRequest("say where to go on: at an offset, at a time, or at the start or the end")
            feed = self._feed(topic, partition)
            self._move(feed, check_offset(feed.log, offset, feed.place))
            return
        time_ns = None if time is None else instant_ns(time, "time")
        for feed in self._chosen(topic, partition):
            if time_ns is not None:
                self._move(feed, feed.log.find_time(time_ns))
            else:
                self._move(feed, feed.log.start if to == "start" else feed.log.end)

    def pause(self, topic: str | None = None, partition: int | None = None) -> None:
        """Get nothing from there until `resume`; it stays ours."""
        self._rewind()
        for feed in self._chosen(topic, partition):
            feed.paused = True

    def resume(self, topic: str | None = None, partition: int | None = None) -> None:
        """Get messages from there again."""
        for feed in self._chosen(topic, partition):
            feed.paused = False

    def paused(self) -> list[TopicPartition]:
        """The partitions that are paused."""
        return sorted(place for place, feed in self._feeds.items() if feed.paused)

    def _lag(self) -> list[PartitionLag]:
        self._check_open()
        now_ns = self._clock.now_ns()
        feeds = [(place, feed) for place, feed in sorted(self._feeds.items()) if not feed.topic.closed]
        return [lag_of(feed.log, place, feed.given, now_ns) for place, feed in feeds]

    def _rewind(self) -> None:
        """What was read and not handed out, by an iteration or by a poll that failed, is to be read again."""
        self._ahead.clear()
        for feed in self._feeds.values():
            feed.position = feed.given

    def _feed(self, topic: object, partition: object) -> Feed[Body]:
        self._check_open()
        feed = self._feeds.get((topic, partition)) if type(topic) is str and type(partition) is int else None
        if feed is None:
            ours = ", ".join(f"{name}-{number}" for name, number in self.assignment()[:10]) or "none"
            raise InvalidRequest(f"partition {partition!r} of {topic!r} is not this consumer's; its own are: {ours}")
        return feed

    def _chosen(self, topic: str | None, partition: int | None) -> list[Feed[Body]]:
        self._check_open()
        if partition is not None:
            return [self._feed(topic, partition)]
        if topic is not None and topic not in self.topics:
            raise InvalidRequest(f"this consumer reads {', '.join(self.topics)}, not {topic!r}")
        return [feed for place, feed in sorted(self._feeds.items()) if topic in (None, place[0])]

    def _move(self, feed: Feed[Body], position: int) -> None:
        self._rewind()
        feed.move(position)

    def _check_open(self) -> None:
        self._engine.check_open()
        if self._closed:
            raise Closed(f"this consumer of {self.group} is closed; make a new one")
