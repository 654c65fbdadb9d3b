"""One member of a stream group in this process: joining, reading, committing. Nothing here blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final
from weakref import WeakMethod

import msgspec

from holdfast.api.contents import record_of
from holdfast.api.drafts import Bodies, instant_ns
from holdfast.api.topics import ConsumedPartition, Listener, MemberRequest, SeekTarget, StreamMessage, chosen_partitions
from holdfast.broker.engine import BrokerEngine
from holdfast.broker.messages import MOVED, is_for
from holdfast.broker.partition import Partition
from holdfast.broker.streams import PartitionLag, check_offset, lag_of
from holdfast.broker.streams.group import StreamGroup
from holdfast.broker.topic import Topic
from holdfast.broker.waiters import Waiters
from holdfast.env import Clock, close_in_children
from holdfast.env.process import get_logger
from holdfast.errors import Closed, DamagedRange, Fenced, HoldfastError, InvalidRequest, OffsetOutOfRange, UnknownTopic
from holdfast.membership import TopicPartition
from holdfast.model import Appended, Durability, Record, extra_bytes
from holdfast.settings import ConsumerSettings, load

logger = get_logger(__name__)

_AT_A_TIME: Final = 64


class Feed(ConsumedPartition):
    """A partition that is being read; `position` is the next offset."""

    def __init__(self, topic: Topic, number: int, position: int, *, group: str, bodies: Bodies, clock: Clock) -> None:
        super().__init__((topic.name, number), position)
        self.topic = topic
        self.partition: Partition = topic.partitions[number]
        self.log = self.partition.log
        self.position = position
        self.passed_to: int | None = None  # up to there nothing lies behind what is committed but what is not for us
        self.notified = False  # whether the user was notified of the assignment
        self._follower = self.log.follower()
        self._group = group.encode()
        self._bodies = bodies
        self._now_ns = clock.now_ns

    @property
    def start(self) -> int:
        """The offset of the oldest stored message."""
        return self.log.start

    @property
    def done(self) -> int:
        """The offset where another member would continue: after what is handled, and after what retention deleted."""
        return max(self.handled, self.log.start)

    def move(self, position: int) -> None:
        """Continue reading at this offset."""
        super().move(position)
        self.position = position
        self.passed_to = None

    def take(self, count: int) -> list[StreamMessage[Any]]:
        """Return the next messages, up to the count; none at the end or while paused."""
        all_handled = self.position == self.given == self.handled
        all_kept = all_handled and self.position in (self.kept, self.passed_to)
        while self.position < self.log.end and not self.paused and not self.topic.closed:
            records = self._read(count)
            home, bodies = self.home, self._bodies
            found: list[StreamMessage[Any]] = [
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
        """Return the records of the next offsets; fewer, or none, if some are gone."""
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
        """Return whether a record is for this group and has not expired."""
        expires_ms = record.expires_at_ms
        return is_for(record, self._group) and not (expires_ms and expires_ms * 1_000_000 <= self._now_ns())

    def _pass_over(self, why: str, to: int) -> None:
        topic, number = self.place
        logger.error(why, extra={"topic": topic, "partition": number, "first": self.position, "next": to})
        self.position = to


def member_of(engine: BrokerEngine, request: MemberRequest) -> tuple[StreamGroup, ConsumerSettings]:
    """Return the group to join, which is created if needed, and the settings in force."""
    base = msgspec.structs.asdict(request.settings or engine.settings.consumer)
    settings = load(ConsumerSettings, {**base, **request.changes})
    for name in request.topics:  # refused before a group is made
        with engine.using(name) as topic:
            if request.group in topic.groups:
                raise InvalidRequest(
                    f"the group {request.group} works on {name} in queue mode; choose another name to read it as a "
                    "stream"
                )
    return engine.streams.group(request.group, create=True), settings


class StreamMember:
    """One member of a group: its partitions, and how it follows its group."""

    def __init__(
        self, engine: BrokerEngine, group: StreamGroup, request: MemberRequest, settings: ConsumerSettings
    ) -> None:
        self.engine = engine
        self.request = request
        self.settings = settings
        self.partitions: dict[TopicPartition, Feed] = {}
        self.most_bytes: int | None = None  # a poll loads no more after this many
        self.member_id: str | None = None
        self.epoch = 0
        self.left = False
        self.stream_group = group
        self._clock = engine.world.clock
        self._line = Waiters()
        self._seen = -1  # the last known version of the group
        self._turn = 0
        self._polling = False
        self._joins = 0
        self._polled_ms = self._committed_ms = self._now_ms()
        close_in_children(self)

    @property
    def closed(self) -> bool:
        return self.left or self.engine.closed

    def check_open(self) -> None:
        """Raise Closed if the member has left or the broker is closed."""
        self.engine.check_open()
        if self.left:
            raise Closed(f"this consumer of {self.request.group} is closed; create a new one")

    def disown(self) -> None:
        """Give up the membership in a child after a fork: the parent is the member."""
        self.left = True

    def hand_out(self, found: Sequence[StreamMessage[Any]]) -> None:
        """Note that these messages are returned to the user."""
        for feed in self.partitions.values():
            feed.given = feed.position

    def needs_attention(self) -> bool:
        """Return whether a commit is due or the group has changed."""
        self.check_open()
        self._polled_ms = self._now_ms()
        return self._must_commit or self._must_follow

    def _begin_poll(self) -> None:
        """Mark all returned messages as handled; messages that were read but not returned will be read again."""
        self._polled_ms = self._now_ms()
        for feed in self.partitions.values():
            feed.position = feed.handled = feed.given

    @property
    def _must_follow(self) -> bool:
        """Return whether the group has changed since it was last followed."""
        return self.member_id is None or self.stream_group.changed(self._seen)

    def _fetch(self, count: int) -> list[StreamMessage[Any]]:
        """Return up to `count` available messages, from each partition in turn."""
        if self.most_bytes is None:
            return self._fetch_some(count)
        found: list[StreamMessage[Any]] = []
        left = self.most_bytes
        while len(found) < count and left > 0:
            some = self._fetch_some(min(count - len(found), _AT_A_TIME))
            if not some:
                break
            found += some
            left -= sum([len(record.value) + extra_bytes(record) for record in map(record_of, some)])
        return found

    def _fetch_some(self, count: int) -> list[StreamMessage[Any]]:
        feeds = list(self.partitions.values())
        if len(feeds) <= 1:
            return feeds[0].take(count) if feeds else []
        self._turn = first = (self._turn + 1) % len(feeds)
        found: list[StreamMessage[Any]] = []
        waiting = [*feeds[first:], *feeds[:first]]
        while waiting and count > 0:
            share = -(-count // len(waiting))
            left = []
            for feed in waiting:
                some = feed.take(min(share, count))
                found += some
                count -= len(some)
                if len(some) == share:
                    left.append(feed)  # it may have more
                if count == 0:
                    break
            waiting = left
        return found

    def _passed(self) -> dict[TopicPartition, int]:
        """What nobody has to handle, behind all that is committed: that need not wait for the user's next commit."""
        return {place: feed.passed_to for place, feed in self.partitions.items() if feed.passed_to is not None}

    def _keep_passed(self, offsets: Mapping[TopicPartition, int]) -> None:
        with suppress(HoldfastError):  # the group will tell
            self._write(offsets)
        for feed in self.partitions.values():
            feed.passed_to = None

    def _wait_s(self, until_ns: int | None) -> float | None:
        """Return how long to wait for messages: until the call's timeout, or until the next commit is due."""
        now_ns = self._clock.monotonic_ns()
        times = [] if until_ns is None else [(until_ns - now_ns) / 1e9]
        if self.settings.auto_commit and self._uncommitted(self.partitions):
            times.append(max(self._committed_ms + self.settings.auto_commit_ms - now_ns // 1_000_000, 0) / 1e3)
        return min(times, default=None)

    def _is_over(self, until_ns: int | None) -> bool:
        return until_ns is not None and self._clock.monotonic_ns() >= until_ns

    def _committed(self, topic: str, partition: int) -> int | None:
        with self.engine.using(topic) as found:
            return self.stream_group.committed(found, found.number(partition))

    def _lag(self) -> list[PartitionLag]:
        now_ns = self._clock.now_ns()
        feeds = [(place, feed) for place, feed in sorted(self.partitions.items()) if not feed.topic.closed]
        return [lag_of(feed.log, place, feed.given, now_ns) for place, feed in feeds]

    def _rewind(self) -> None:
        """Arrange for messages that were read but not returned to be read again."""
        for feed in self.partitions.values():
            feed.position = feed.given

    def _positions(self, where: SeekTarget) -> list[tuple[Feed, int]]:
        """Return the offsets of a seek. Raises OffsetOutOfRange if one does not exist."""
        chosen = chosen_partitions(self.partitions, self.request.topics, where.topic, where.partition)
        found = [self.partitions[each.place] for each in chosen]
        if where.offset is not None:
            return [(feed, check_offset(feed.log, where.offset, feed.place)) for feed in found]
        if where.time is not None:
            time_ns = instant_ns(where.time, "time")
            return [(feed, feed.log.find_time(time_ns)) for feed in found]
        return [(feed, feed.log.start if where.to == "start" else feed.log.end) for feed in found]

    def _move(self, positions: Iterable[tuple[Feed, int]]) -> None:
        self._rewind()
        for feed, position in positions:
            feed.move(position)

    @property
    def _must_commit(self) -> bool:
        """Return whether an automatic commit is due and there is something new."""
        due = self.settings.auto_commit and self._now_ms() - self._committed_ms >= self.settings.auto_commit_ms
        return due and bool(self._uncommitted(self.partitions))

    def _uncommitted(self, places: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Return what is handled and not committed, for topics that exist."""
        feeds = [self.partitions[place] for place in places]
        return {feed.place: feed.done for feed in feeds if feed.done != feed.kept and not feed.topic.closed}

    def _auto_commit(self, places: Iterable[TopicPartition]) -> None:
        """Commit what is handled. If that is refused, following the group will say why."""
        self._committed_ms = self._now_ms()
        try:
            self._write(self._uncommitted(places))
        except HoldfastError as error:
            logger.warning("not committed", extra={"group": self.request.group, "why": str(error)})

    def _steps(self) -> Iterator[tuple[Listener, list[TopicPartition]]]:
        """Follow the group step by step; each step is what to report to the user before continuing."""
        while not self.left:
            if self.member_id is None:
                self._join()
            version = self.stream_group.version
            # The topic was deleted; if there is a new one of its name, its partitions are assigned again.
            ended = sorted(place for place, feed in self.partitions.items() if feed.topic.closed)
            self._drop(ended)
            if ended and self.request.on_revoked is not None:
                yield self.request.on_revoked, ended
            try:
                share = self.stream_group.heartbeat(self.member_id or "", self.epoch, self.partitions)
            except Fenced as error:
                yield from self._put_out(error)
                continue
            self.epoch = share.epoch
            revoked = sorted(place for place in self.partitions if place not in share.partitions)
            assigned = [place for place in share.partitions if place not in self.partitions]
            if revoked:
                if self.settings.auto_commit:
                    self._auto_commit(revoked)
                if self.request.on_revoked is not None:
                    yield self.request.on_revoked, revoked
                self._drop(revoked)
            elif assigned:
                self._take_over(assigned)
            elif unnotified := sorted(place for place, feed in self.partitions.items() if not feed.notified):
                if self.request.on_assigned is not None:
                    yield self.request.on_assigned, unnotified
                for place in unnotified:
                    self.partitions[place].notified = True
            else:
                self._seen = version  # not before: a callback may fail, and must be asked again
                return

    def _put_out(self, error: Fenced) -> Iterator[tuple[Listener, list[TopicPartition]]]:
        """Join again after the group has removed this member, unless a newer one has replaced it."""
        logger.warning("removed from the group", extra={"group": self.request.group, "why": str(error)})
        lost = sorted(self.partitions)
        self.member_id = None
        self._drop(lost)
        if lost and self.request.on_revoked is not None:
            yield self.request.on_revoked, lost
        if self.request.instance_id and self.stream_group.is_taken(self.request.instance_id):
            self.left = True  # otherwise the two would remove each other forever
            raise Fenced(
                f"another consumer has taken over as {self.request.instance_id!r} in group {self.request.group}: an "
                "instance id may be used by one consumer at a time. This one is closed; give each consumer its own "
                "instance_id"
            ) from error

    def _join(self) -> None:
        again = self._joins > 0
        self._joins = joins = self._joins + 1
        self.member_id, self._line = self.stream_group.join(
            self.request.topics,
            self.settings,
            instance_id=self.request.instance_id,
            holder=self.request.holder or self.engine.holder,
            alive=_weakly(self._is_alive, joins),
            again=again,
        )
        self.epoch = self.stream_group.epoch_of(self.member_id)

    def _is_alive(self, joins: int) -> bool:
        """Whether the member lives that we became with that join: one that a signal cut short left nobody."""
        if self.left or joins != self._joins:
            return False
        return self._polling or self._now_ms() - self._polled_ms < self.settings.max_poll_ms

    def _take_over(self, places: Iterable[TopicPartition]) -> None:
        for place in places:
            topic, _, position = self.stream_group.listen(place, self._line)
            self.partitions[place] = Feed(
                topic, place[1], position, group=self.request.group, bodies=self.request.bodies, clock=self._clock
            )

    def _drop(self, places: Iterable[TopicPartition]) -> None:
        for place in places:
            del self.partitions[place]
            self.stream_group.silence(place, self._line)
        self._rewind()

    def _write(self, offsets: Mapping[TopicPartition, int], durability: Durability | None = None) -> Appended | None:
        if not offsets:
            # What was committed before may not be on disk yet.
            end = self.stream_group.offsets.log.written_end
            return Appended(0, end, durability) if durability == "fsync" else None
        for place in offsets:
            if place not in self.partitions:
                with self.engine.using(place[0]) as topic:
                    topic.partition(place[1])  # or UnknownTopic; one that is another's is refused below
            elif self.partitions[place].topic.closed:
                self.engine.check_here(place[0])
                raise UnknownTopic(
                    f"the topic {place[0]} was deleted, and nothing can be committed there: close this consumer"
                )
        topic_ids = {place: self.partitions[place].topic.id for place in offsets if place in self.partitions}
        appended = self.stream_group.commit(self.member_id or "", self.epoch, offsets, durability, topic_ids)
        for place, offset in offsets.items():
            self.partitions[place].kept = offset
        return appended

    def _leave(self, *, for_good: bool) -> None:
        """Commit what is handled and leave."""
        if self.settings.auto_commit:
            self._auto_commit(self.partitions)
        member, self.member_id = self.member_id, None
        self._drop(sorted(self.partitions))
        if member is not None and (for_good or not self.request.instance_id):
            try:
                self.stream_group.leave(member, self.epoch)
            except Closed as error:  # put out already, or the broker is closed
                logger.debug(
                    "leaving the group was not reported", extra={"group": self.request.group, "why": str(error)}
                )

    def _now_ms(self) -> int:
        return self._clock.monotonic_ns() // 1_000_000


def _weakly(method: Callable[[int], bool], joins: int) -> Callable[[], bool | None]:
    """Wrap a method so that it returns None once its object is gone: the group must not keep a consumer alive."""
    reference = WeakMethod(method)

    def ask() -> bool | None:
        found = reference()
        return None if found is None else found(joins)

    return ask
