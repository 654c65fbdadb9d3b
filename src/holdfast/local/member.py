"""One member of a group in stream mode in this process: joining, reading, committing. Nothing here waits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final
from weakref import WeakMethod

import msgspec

from holdfast.api.bodies import Bodies
from holdfast.api.consumers import (
    ConsumedPartition,
    Listener,
    MemberRequest,
    SeekTarget,
    StreamMessage,
    chosen_partitions,
)
from holdfast.api.contents import record_of
from holdfast.api.drafts import instant_ns
from holdfast.broker.engine import BrokerEngine
from holdfast.broker.messages import MOVED, is_for
from holdfast.broker.partition import Partition
from holdfast.broker.streams.group import StreamGroup
from holdfast.broker.streams.offsets import PartitionLag, check_offset, lag_of
from holdfast.broker.topic import Topic
from holdfast.broker.waiters import Waiters
from holdfast.env import Clock, close_in_children
from holdfast.errors import (
    Closed,
    DamagedRange,
    Fenced,
    HoldfastError,
    InvalidRequest,
    OffsetOutOfRange,
    UnknownTopic,
)
from holdfast.membership.assignment import TopicPartition
from holdfast.model import Appended, Durability, Record, extra_bytes
from holdfast.settings import ConsumerSettings, load

logger = logging.getLogger(__name__)

_AT_A_TIME: Final = 64


class Feed(ConsumedPartition):
    """A partition that is read on, message by message; `position` is where."""

    def __init__(self, topic: Topic, number: int, position: int, *, group: str, bodies: Bodies, clock: Clock) -> None:
        super().__init__((topic.name, number), position)
        self.topic = topic
        self.partition: Partition = topic.partitions[number]
        self.log = self.partition.log
        self.position = position
        self.passed_to: int | None = None  # up to there nothing lies behind what is committed but what is not for us
        self.told = False  # whether the user heard that it is ours
        self._follower = self.log.follower()
        self._group = group.encode()
        self._bodies = bodies
        self._now_ns = clock.now_ns

    @property
    def start(self) -> int:
        """The first offset that retention has left."""
        return self.log.start

    @property
    def done(self) -> int:
        """Where somebody else would go on: behind what is handled, and behind what retention took away."""
        return max(self.handled, self.log.start)

    def move(self, position: int) -> None:
        """Read on there."""
        super().move(position)
        self.position = position
        self.passed_to = None

    def take(self, count: int) -> list[StreamMessage[Any]]:
        """The next messages, at most so many; none at the end, or while paused."""
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


def member_of(engine: BrokerEngine, request: MemberRequest) -> tuple[StreamGroup, ConsumerSettings]:
    """The group that somebody wants to join, made where there is none, and the settings in force."""
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
    """One member of a group: the partitions that it has, and what its group tells it to do."""

    def __init__(
        self, engine: BrokerEngine, group: StreamGroup, request: MemberRequest, settings: ConsumerSettings
    ) -> None:
        self.engine = engine
        self.request = request
        self.settings = settings
        self.partitions: dict[TopicPartition, Feed] = {}
        self.most_bytes: int | None = None  # behind so many a poll loads no more
        self.member_id: str | None = None
        self.epoch = 0
        self.left = False
        self.stream_group = group
        self._clock = engine.world.clock
        self._line = Waiters()
        self._seen = -1  # the group's version that we know
        self._turn = 0
        self._polling = False
        self._joins = 0
        self._polled_ms = self._committed_ms = self._now_ms()
        close_in_children(self)

    @property
    def closed(self) -> bool:
        return self.left or self.engine.closed

    def check_open(self) -> None:
        """Raise Closed where the member has left, or the broker is closed."""
        self.engine.check_open()
        if self.left:
            raise Closed(f"this consumer of {self.request.group} is closed; make a new one")

    def disown(self) -> None:
        """In a child after a fork: the parent is the member."""
        self.left = True

    def hand_out(self, found: Sequence[StreamMessage[Any]]) -> None:
        """What was read is in the user's hands."""
        for feed in self.partitions.values():
            feed.given = feed.position

    def needs_attention(self) -> bool:
        """Whether a commit is due, or the group has something to say."""
        self.check_open()
        self._polled_ms = self._now_ms()
        return self._must_commit or self._must_follow

    def _begin_poll(self) -> None:
        """All handed out before is handled now; what was read and not handed out is to be read again."""
        self._polled_ms = self._now_ms()
        for feed in self.partitions.values():
            feed.position = feed.handled = feed.given

    @property
    def _must_follow(self) -> bool:
        """Whether the group has something to tell us."""
        return self.member_id is None or self.stream_group.changed(self._seen)

    def _fetch(self, count: int) -> list[StreamMessage[Any]]:
        """What is there, up to `count`, from each partition in turn."""
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
        """How long to wait for messages at most: until the call's time is over, or the next commit is due."""
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
        """What was read and not handed out is to be read again."""
        for feed in self.partitions.values():
            feed.position = feed.given

    def _positions(self, where: SeekTarget) -> list[tuple[Feed, int]]:
        """The offsets that a seek means; OffsetOutOfRange where there is no such."""
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
        """Whether it is time to commit by ourselves, and there is something new."""
        due = self.settings.auto_commit and self._now_ms() - self._committed_ms >= self.settings.auto_commit_ms
        return due and bool(self._uncommitted(self.partitions))

    def _uncommitted(self, places: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """What is handled and not committed, of topics that are there."""
        feeds = [self.partitions[place] for place in places]
        return {feed.place: feed.done for feed in feeds if feed.done != feed.kept and not feed.topic.closed}

    def _auto_commit(self, places: Iterable[TopicPartition]) -> None:
        """Commit what is handled; if that is refused, the group will tell why."""
        self._committed_ms = self._now_ms()
        try:
            self._write(self._uncommitted(places))
        except HoldfastError as error:
            logger.warning("not committed", extra={"group": self.request.group, "why": str(error)})

    def _steps(self) -> Iterator[tuple[Listener, list[TopicPartition]]]:
        """Follow the group, step by step: each is what to tell the user before going on."""
        while not self.left:
            if self.member_id is None:
                self._join()
            version = self.stream_group.version
            # The topic was deleted; should there be another of its name, its partitions come anew.
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
            elif untold := sorted(place for place, feed in self.partitions.items() if not feed.told):
                if self.request.on_assigned is not None:
                    yield self.request.on_assigned, untold
                for place in untold:
                    self.partitions[place].told = True
            else:
                self._seen = version  # not before: a callback may fail, and must be asked again
                return

    def _put_out(self, error: Fenced) -> Iterator[tuple[Listener, list[TopicPartition]]]:
        """Join again after the group has removed this member, unless a newer one has replaced it."""
        logger.warning("put out of the group", extra={"group": self.request.group, "why": str(error)})
        lost = sorted(self.partitions)
        self.member_id = None
        self._drop(lost)
        if lost and self.request.on_revoked is not None:
            yield self.request.on_revoked, lost
        if self.request.instance_id and self.stream_group.is_taken(self.request.instance_id):
            self.left = True  # or the two would put each other out for ever
            raise Fenced(
                f"another consumer has taken over as {self.request.instance_id!r} in group {self.request.group}: an "
                "instance id is for one consumer at a time. This one is closed"
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
                raise UnknownTopic(f"the topic {place[0]} was deleted, and nothing can be committed there any more")
        topic_ids = {place: self.partitions[place].topic.id for place in offsets if place in self.partitions}
        appended = self.stream_group.commit(self.member_id or "", self.epoch, offsets, durability, topic_ids)
        for place, offset in offsets.items():
            self.partitions[place].kept = offset
        return appended

    def _leave(self, *, for_good: bool) -> None:
        """Commit what is handled and go."""
        if self.settings.auto_commit:
            self._auto_commit(self.partitions)
        member, self.member_id = self.member_id, None
        self._drop(sorted(self.partitions))
        if member is not None and (for_good or not self.request.instance_id):
            try:
                self.stream_group.leave(member, self.epoch)
            except Closed as error:  # put out already, or the broker is closed
                logger.debug("left without saying so", extra={"group": self.request.group, "why": str(error)})

    def _now_ms(self) -> int:
        return self._clock.monotonic_ns() // 1_000_000


def _weakly(method: Callable[[int], bool], joins: int) -> Callable[[], bool | None]:
    """The method's answer while its object lives, then None: the group must not keep a consumer alive."""
    reference = WeakMethod(method)

    def ask() -> bool | None:
        found = reference()
        return None if found is None else found(joins)

    return ask
