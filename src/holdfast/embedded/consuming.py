"""What the consumers for threads and for tasks share: joining, reading, committing; no waiting."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Generic, Self, TypeAlias
from weakref import WeakMethod

import msgspec

from holdfast.api.bodies import Bodies
from holdfast.api.contents import Body
from holdfast.api.drafts import Seconds
from holdfast.api.times import duration_ms
from holdfast.broker.engine import BrokerEngine
from holdfast.broker.folder.layout import check_topic_name
from holdfast.broker.streams.group import StreamGroup
from holdfast.broker.waiters import Waiters
from holdfast.embedded.feeds import Feed, StreamMessage
from holdfast.embedded.standing import Standing
from holdfast.env import close_in_children
from holdfast.errors import Closed, Fenced, HoldfastError, InvalidRequest, UnknownTopic
from holdfast.membership.assignment import TopicPartition
from holdfast.model import Appended, Durability, extra_bytes
from holdfast.settings import ConsumerSettings, load

logger = logging.getLogger(__name__)

Told: TypeAlias = Callable[[list[TopicPartition]], Any]

_MOST_AT_ONCE: Final = 1_000_000
_AT_A_TIME: Final = 64
_MOST_TEXT: Final = 200


class Consuming(Standing[Body], Generic[Body]):
    """One member of a group in stream mode, as one thread or task uses it."""

    def __init__(
        self,
        engine: BrokerEngine,
        group: StreamGroup,
        topics: Sequence[str],
        settings: ConsumerSettings,
        *,
        bodies: Bodies,
        instance_id: str = "",
        holder: str = "",
        on_assigned: Told | None = None,
        on_revoked: Told | None = None,
    ) -> None:
        super().__init__(engine, group, tuple(topics))
        self.settings = settings
        self.instance_id = instance_id
        self._holder = holder or engine.holder
        self._bodies = bodies
        self._on_assigned = on_assigned
        self._on_revoked = on_revoked
        self._member: str | None = None
        self._epoch = 0
        self._line = Waiters()
        self._seen = -1  # the group's version that we know
        self._turn = 0
        self.most_bytes: int | None = None  # behind so many a poll loads no more
        self._out: Feed[Body] | None = None  # where the message comes from that an iteration handed out last
        self._polling = self._leaving = False
        self._joins = 0
        self._polled_ms = self._committed_ms = self._now_ms()
        close_in_children(self)

    @classmethod
    def _open(
        cls,
        engine: BrokerEngine,
        topics: str | Iterable[str],
        group: str,
        *,
        body_type: Any = None,
        instance_id: str | None = None,
        holder: str | None = None,
        on_assigned: Told | None = None,
        on_revoked: Told | None = None,
        settings: ConsumerSettings | None = None,
        **changes: Any,
    ) -> Self:
        """A consumer that has not joined yet, of arguments that are all checked."""
        for name, told in (("on_assigned", on_assigned), ("on_revoked", on_revoked)):
            if told is not None and not callable(told):
                raise InvalidRequest(f"{name}={told!r} cannot be used: give a function that takes a list of partitions")
        base = msgspec.structs.asdict(settings or engine.settings.consumer)
        chosen = load(ConsumerSettings, {**base, **changes})
        names = _topic_names(topics)
        for name in names:  # refused before a group is made
            with engine.using(name) as topic:
                if group in topic.groups:
                    raise InvalidRequest(
                        f"the group {group} works on {name} in queue mode; choose another name to read it as a stream"
                    )
        told_of = {"instance_id": _text(instance_id, "instance_id"), "holder": _text(holder, "holder")}
        bodies = Bodies(body_type)
        made = engine.streams.group(group, create=True)
        return cls(
            engine, made, names, chosen, bodies=bodies, on_assigned=on_assigned, on_revoked=on_revoked, **told_of
        )

    @property
    def member_id(self) -> str | None:
        """The name under which the group knows this consumer; another one after each time that it joins."""
        return self._member

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self._feeds)} partitions"
        return f"<{type(self).__name__} of {self.group} on {', '.join(self.topics)} ({state})>"

    def disown(self) -> None:
        """In a child after a fork: the parent is the member."""
        self._closed = True

    def _begin_poll(self, max_records: int | None, timeout: Seconds | None) -> tuple[int, int | None]:
        """How many messages, and until when (None: as long as it takes). All handed out before is handled now."""
        self._check_open()
        count = self.settings.max_records if max_records is None else max_records
        if type(count) is not int or not 1 <= count <= _MOST_AT_ONCE:
            raise InvalidRequest(f"max_records={count!r} cannot be used: give a whole number from 1 to {_MOST_AT_ONCE}")
        now_ns = self._clock.monotonic_ns()
        until_ns = None if timeout is None else now_ns + duration_ms(timeout, "timeout") * 1_000_000
        if self._polling:
            raise InvalidRequest("this consumer is polling already: give each thread or task a consumer of its own")
        self._rewind()
        self._polled_ms = now_ns // 1_000_000
        for feed in self._feeds.values():
            feed.handled = feed.given
        return count, until_ns

    @property
    def _must_follow(self) -> bool:
        """Whether the group has something to tell us."""
        return self._member is None or self._group.changed(self._seen)

    def _fetch(self, count: int) -> list[StreamMessage[Body]]:
        """What is there, up to `count`, from each partition in turn."""
        if self.most_bytes is None:
            return self._fetch_some(count)
        found: list[StreamMessage[Body]] = []
        left = self.most_bytes
        while len(found) < count and left > 0:
            some = self._fetch_some(min(count - len(found), _AT_A_TIME))
            if not some:
                break
            found += some
            left -= sum([len(message._record.value) + extra_bytes(message._record) for message in some])
        return found

    def _fetch_some(self, count: int) -> list[StreamMessage[Body]]:
        feeds = list(self._feeds.values())
        if len(feeds) <= 1:
            return feeds[0].take(count) if feeds else []
        self._turn = first = (self._turn + 1) % len(feeds)
        found: list[StreamMessage[Body]] = []
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

    def _hand_out(self) -> None:
        """What was read is in the user's hands."""
        for feed in self._feeds.values():
            feed.given = feed.position

    def _passed(self) -> dict[TopicPartition, int]:
        """What nobody has to handle, behind all that is committed: that need not wait for the user's next commit."""
        return {place: feed.passed_to for place, feed in self._feeds.items() if feed.passed_to is not None}

    def _keep_passed(self, offsets: Mapping[TopicPartition, int]) -> None:
        with suppress(HoldfastError):  # the group will tell
            self._write(offsets)
        for feed in self._feeds.values():
            feed.passed_to = None

    def _wait_s(self, until_ns: int | None) -> float | None:
        """How long to wait for messages at most: until the call's time is over, or the next commit is due."""
        now_ns = self._clock.monotonic_ns()
        times = [] if until_ns is None else [(until_ns - now_ns) / 1e9]
        if self.settings.auto_commit and self._uncommitted(self._feeds):
            times.append(max(self._committed_ms + self.settings.auto_commit_ms - now_ns // 1_000_000, 0) / 1e3)
        return min(times, default=None)

    def _is_over(self, until_ns: int | None) -> bool:
        return until_ns is not None and self._clock.monotonic_ns() >= until_ns

    def _pull(self) -> StreamMessage[Body] | None:
        """The next message of an iteration, None where more must be read first. The one before it is handled."""
        self._check_open()
        self._polled_ms = self._now_ms()
        if not self._ahead:
            return None
        if self._must_follow:
            self._rewind()
            return None
        message = self._ahead.popleft()
        if self._out is not None:
            self._out.handled = self._out.given
        self._out = feed = self._feeds[message.topic, message.partition]
        feed.given = message.offset + 1
        return message

    def _steps(self) -> Iterator[tuple[Told, list[TopicPartition]]]:
        """Follow the group, step by step: each is what to tell the user before going on."""
        while not self._closed:
            if self._member is None:
                self._join()
            version = self._group.version
            # The topic was deleted; should there be another of its name, its partitions come anew.
            ended = sorted(place for place, feed in self._feeds.items() if feed.topic.closed)
            self._drop(ended)
            if ended and self._on_revoked is not None:
                yield self._on_revoked, ended
            try:
                share = self._group.heartbeat(self._member or "", self._epoch, self._feeds)
            except Fenced as error:
                yield from self._put_out(error)
                continue
            self._epoch = share.epoch
            revoked = sorted(place for place in self._feeds if place not in share.partitions)
            assigned = [place for place in share.partitions if place not in self._feeds]
            if revoked:
                if self.settings.auto_commit:
                    self._auto_commit(revoked)
                if self._on_revoked is not None:
                    yield self._on_revoked, revoked
                self._drop(revoked)
            elif assigned:
                self._take_over(assigned)
            elif untold := sorted(place for place, feed in self._feeds.items() if not feed.told):
                if self._on_assigned is not None:
                    yield self._on_assigned, untold
                for place in untold:
                    self._feeds[place].told = True
            else:
                self._seen = version  # not before: a callback may fail, and must be asked again
                return

    def _put_out(self, error: Fenced) -> Iterator[tuple[Told, list[TopicPartition]]]:
        """The group takes us for gone, or for another: join again, unless that one is there."""
        logger.warning("put out of the group", extra={"group": self.group, "why": str(error)})
        lost = sorted(self._feeds)
        self._member = None
        self._drop(lost)
        if lost and self._on_revoked is not None:
            yield self._on_revoked, lost
        if self.instance_id and self._group.is_taken(self.instance_id):
            self._closed = True  # or the two would put each other out for ever
            raise Fenced(
                f"another consumer has taken over as {self.instance_id!r} in group {self.group}: an instance id is for "
                "one consumer at a time. This one is closed"
            ) from error

    def _join(self) -> None:
        again = self._joins > 0
        self._joins = joins = self._joins + 1
        self._member, self._line = self._group.join(
            self.topics,
            self.settings,
            instance_id=self.instance_id,
            holder=self._holder,
            alive=_weakly(self._is_alive, joins),
            again=again,
        )
        self._epoch = self._group.epoch_of(self._member)

    def _is_alive(self, joins: int) -> bool:
        """Whether the member lives that we became with that join: one that a signal cut short left nobody."""
        if self._closed or joins != self._joins:
            return False
        return self._polling or self._now_ms() - self._polled_ms < self.settings.max_poll_ms

    def _take_over(self, places: Iterable[TopicPartition]) -> None:
        for place in places:
            topic, _, position = self._group.listen(place, self._line)
            self._feeds[place] = Feed(
                topic, place[1], position, group=self.group, bodies=self._bodies, clock=self._clock
            )

    def _drop(self, places: Iterable[TopicPartition]) -> None:
        for place in places:
            del self._feeds[place]
            self._group.silence(place, self._line)
        self._rewind()

    def _chosen_offsets(
        self, messages: Iterable[StreamMessage[Body]] | None, offsets: Mapping[TopicPartition, int] | None
    ) -> Mapping[TopicPartition, int]:
        """What a call of `commit` is to commit."""
        self._check_open()
        if messages is not None and offsets is not None:
            raise InvalidRequest("messages and offsets are both given: choose one of them")
        if messages is not None:
            offsets = self._behind(messages)
        elif offsets is None:
            given = {place: max(feed.given, feed.log.start) for place, feed in self._feeds.items()}
            offsets = {place: offset for place, offset in given.items() if offset != self._feeds[place].kept}
        return _checked(offsets)

    def _write(self, offsets: Mapping[TopicPartition, int], durability: Durability | None = None) -> Appended | None:
        if not offsets:
            # What was committed before may not be on disk yet.
            end = self._group.offsets.log.written_end
            return Appended(0, end, durability) if durability == "fsync" else None
        for place in offsets:
            if place not in self._feeds:
                with self._engine.using(place[0]) as topic:
                    topic.partition(place[1])  # or UnknownTopic; one that is another's is refused below
            elif self._feeds[place].topic.closed:
                raise UnknownTopic(f"the topic {place[0]} was deleted, and nothing can be committed there any more")
        topic_ids = {place: self._feeds[place].topic.id for place in offsets if place in self._feeds}
        appended = self._group.commit(self._member or "", self._epoch, offsets, durability, topic_ids)
        for place, offset in offsets.items():
            self._feeds[place].kept = offset
        return appended

    def _behind(self, messages: Iterable[StreamMessage[Body]]) -> dict[TopicPartition, int]:
        """Where each partition goes on behind the last of these messages."""
        offsets: dict[TopicPartition, int] = {}
        if not isinstance(messages, Iterable):
            raise InvalidRequest(f"commit takes messages, not {type(messages).__name__}")
        for message in messages:
            if not isinstance(message, StreamMessage):
                raise InvalidRequest(f"{message!r} is no message of a consumer")
            place = message.topic, message.partition
            feed = self._feeds.get(place)
            if feed is None or feed.home is not message._home:
                raise Fenced(
                    f"{message.id} came when partition {place[1]} of {place[0]} was this consumer's, which it was not "
                    "all the time since: others may have handled it. Nothing was committed; poll, and go on from there"
                )
            offsets[place] = max(message.offset + 1, feed.log.start, offsets.get(place, 0))
        return offsets

    @property
    def _must_commit(self) -> bool:
        """Whether it is time to commit by ourselves, and there is something new."""
        due = self.settings.auto_commit and self._now_ms() - self._committed_ms >= self.settings.auto_commit_ms
        return due and bool(self._uncommitted(self._feeds))

    def _uncommitted(self, places: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """What is handled and not committed, of topics that are there."""
        feeds = [self._feeds[place] for place in places]
        return {feed.place: feed.done for feed in feeds if feed.done != feed.kept and not feed.topic.closed}

    def _auto_commit(self, places: Iterable[TopicPartition]) -> None:
        """Commit what is handled; if that is refused, the group will tell why."""
        self._committed_ms = self._now_ms()
        try:
            self._write(self._uncommitted(places))
        except HoldfastError as error:
            logger.warning("not committed", extra={"group": self.group, "why": str(error)})

    def _leave(self, *, failed: bool) -> None:
        """Commit what is handled and go; a static member stays one until its session ends."""
        if not failed:
            for feed in self._feeds.values():
                feed.handled = feed.given
        if self.settings.auto_commit:
            self._auto_commit(self._feeds)
        member, self._member = self._member, None
        self._drop(sorted(self._feeds))
        if member is not None and not self.instance_id:
            try:
                self._group.leave(member, self._epoch)
            except Closed as error:  # put out already, or the broker is closed
                logger.debug("left without saying so", extra={"group": self.group, "why": str(error)})

    def _now_ms(self) -> int:
        return self._clock.monotonic_ns() // 1_000_000


def _weakly(method: Callable[[int], bool], joins: int) -> Callable[[], bool | None]:
    """The method's answer while its object lives, then None: the group must not keep a consumer alive."""
    reference = WeakMethod(method)

    def ask() -> bool | None:
        found = reference()
        return None if found is None else found(joins)

    return ask


def _topic_names(topics: object) -> list[str]:
    if isinstance(topics, str):
        return [check_topic_name(topics)]
    if not isinstance(topics, Iterable):
        raise InvalidRequest(f"topics={topics!r} cannot be used: give a list of names")
    names = list(dict.fromkeys(check_topic_name(name) for name in topics))
    if not names:
        raise InvalidRequest("a consumer needs at least one topic")
    return names


def _text(value: object, name: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str) or not value or len(value) > _MOST_TEXT or not value.isprintable():
        raise InvalidRequest(f"{name}={value!r} cannot be used: give a short text")
    return value


def _checked(offsets: object) -> Mapping[TopicPartition, int]:
    if not isinstance(offsets, Mapping) or not all(
        isinstance(place, tuple) and tuple(map(type, place)) == (str, int) and type(offset) is int
        for place, offset in offsets.items()
    ):
        raise InvalidRequest(f"offsets={offsets!r} cannot be used: give {{(topic, partition): offset}}")
    return offsets
