"""What the consumers for threads and for tasks share: a member of a stream group that lives behind a server.

Every poll has a number, and is sent again with the same one when its answer was lost: the server answers as before.
What was handled goes along with the next poll, so that an answer that never came counts for nothing.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from inspect import isawaitable
from typing import Any, Final, Generic, TypeAlias

import msgspec

from holdfast.api.bodies import Bodies
from holdfast.api.contents import Body
from holdfast.api.drafts import Seconds
from holdfast.api.times import duration_ms, instant_ns
from holdfast.broker.folder.layout import check_name, check_topic_name
from holdfast.broker.routing import check_partition
from holdfast.broker.streams.positions import PartitionLag
from holdfast.client.calling import packed
from holdfast.client.client import Client
from holdfast.client.http import Ask, path_of
from holdfast.client.messages import Heard, payload_at
from holdfast.client.payloads import Payload
from holdfast.client.pulse import Pulse
from holdfast.embedded.consuming import _checked, _text, _topic_names
from holdfast.embedded.topics import TopicInfo
from holdfast.errors import Closed, Fenced, HoldfastError, InvalidRequest
from holdfast.membership.assignment import TopicPartition
from holdfast.model import Durability
from holdfast.protocol import groups as wire
from holdfast.protocol.messages import Said
from holdfast.settings import ConsumerSettings, load

logger = logging.getLogger(__name__)

Told: TypeAlias = Callable[[list[TopicPartition]], Any]

_MOST_AT_ONCE: Final = 10_000
_MOST_WAIT_S: Final = 20.0
_OURS: Final = frozenset({"auto_commit", "auto_commit_ms", "max_poll_ms"})  # the client's own business


class Share:
    """One partition in this consumer's hands, as long as it has it without a break."""

    def __init__(self, position: int) -> None:
        self.given = self.handled = self.kept = position
        self.paused = False


class RemoteStreamMessage(Heard[Body], Generic[Body]):
    """A message of a stream: what it says, and where it stands."""

    __slots__ = ("_bodies", "_client", "_share", "_told")

    def __init__(self, client: Client, bodies: Bodies, told: Said, share: Share | None) -> None:
        self._client = client
        self._bodies = bodies
        self._told = told
        self._share = share

    def _payload(self) -> Payload:
        return payload_at(self._client, self._told)


class RemoteConsuming(Generic[Body]):
    """One member of a group in stream mode, without the waiting."""

    def __init__(
        self,
        client: Client,
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
    ) -> None:
        for name, told in (("on_assigned", on_assigned), ("on_revoked", on_revoked)):
            if told is not None and not callable(told):
                raise InvalidRequest(f"{name}={told!r} cannot be used: give a function that takes a list of partitions")
        base = {} if settings is None else _differing(settings)
        self.settings = load(ConsumerSettings, {**base, **changes})
        self.topics = tuple(_topic_names(topics))
        self._name = check_name(group, "group")
        self.instance_id = _text(instance_id, "instance_id")
        self._holder = _text(holder, "holder") or client.holder
        self._wishes = {name: value for name, value in {**base, **changes}.items() if name not in _OURS}
        self._client = client
        self._caller = client.caller
        self._clock = client.world.clock
        self._bodies = Bodies(body_type)
        self._on_assigned, self._on_revoked = on_assigned, on_revoked
        self._member: str | None = None
        self._pulse = Pulse(client.beside)
        self._shares: dict[TopicPartition, Share] = {}
        self._ahead: deque[RemoteStreamMessage[Body]] = deque()
        self._out: Share | None = None
        self._number = 0
        self._answered = True
        self._polling = self._closed = False

    @property
    def group(self) -> str:
        """The name of the group."""
        return self._name

    @property
    def closed(self) -> bool:
        return self._closed or self._caller.closed

    @property
    def member_id(self) -> str | None:
        """The name under which the group knows this consumer; another one after each time that it joins."""
        return self._member

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self._shares)} partitions"
        return f"<{type(self).__name__} of {self.group} on {', '.join(self.topics)} ({state})>"

    def __del__(self) -> None:
        if hasattr(self, "_pulse"):
            self._pulse.closed = True

    def assignment(self) -> list[TopicPartition]:
        """The partitions that are ours now, as (topic, partition)."""
        return sorted(self._shares)

    def position(self, topic: str, partition: int) -> int:
        """The offset of the next message that we will get there."""
        return self._share(topic, partition).given

    def pause(self, topic: str | None = None, partition: int | None = None) -> None:
        """Get nothing from there until `resume`; it stays ours."""
        for place in self._chosen(topic, partition):
            self._shares[place].paused = True

    def resume(self, topic: str | None = None, partition: int | None = None) -> None:
        """Get messages from there again."""
        for place in self._chosen(topic, partition):
            self._shares[place].paused = False

    def paused(self) -> list[TopicPartition]:
        """The partitions that are paused."""
        return sorted(place for place, share in self._shares.items() if share.paused)

    def _check_open(self) -> None:
        self._caller.check_open()
        if self._closed:
            raise Closed(f"this consumer of {self.group} is closed; make a new one")

    def _share(self, topic: object, partition: object) -> Share:
        self._check_open()
        share = self._shares.get((topic, partition)) if type(topic) is str and type(partition) is int else None
        if share is None:
            ours = ", ".join(f"{name}-{number}" for name, number in self.assignment()[:10]) or "none"
            raise InvalidRequest(f"partition {partition!r} of {topic!r} is not this consumer's; its own are: {ours}")
        return share

    def _chosen(self, topic: str | None, partition: int | None) -> list[TopicPartition]:
        self._check_open()
        if partition is not None:
            self._share(topic, partition)
            return [(str(topic), partition)]
        if topic is not None and topic not in self.topics:
            raise InvalidRequest(f"this consumer reads {', '.join(self.topics)}, not {topic!r}")
        return [place for place in sorted(self._shares) if topic in (None, place[0])]

    def _path(self, *more: str) -> str:
        return path_of("groups", self.group, "members", *([self._member] if self._member else []), *more)

    async def _ask(self, method: str, path: str, answers: Any, body: Any = None, wait_s: float = 0.0) -> Any:
        content = b"" if body is None else packed(body)
        return await self._caller.call(Ask(method=method, path=path, body=content, answers=answers, wait_s=wait_s))

    async def _join(self) -> None:
        self._member = None
        body = wire.Join(
            topics=list(self.topics),
            instance_id=self.instance_id or None,
            owner=self._holder,
            settings=msgspec.to_builtins(self._wishes),
        )
        joined: wire.Joined = await self._ask("POST", self._path(), wire.Joined, body)
        self._member, self._number, self._answered = joined.member, 0, True
        self._pulse.begin(self._path("heartbeat"), joined.heartbeat_ms, self.settings.max_poll_ms)
        self._client.upkeep.beat(self._pulse)
        await self._follow(joined.assignment)

    async def _follow(self, assignment: Iterable[wire.Assigned]) -> None:
        """What is ours by now, and what is not any more; the user is told of both."""
        now = {(each.topic, each.partition): each.position for each in assignment}
        revoked = sorted(place for place in self._shares if place not in now)
        for place in revoked:
            del self._shares[place]
        if revoked:
            self._ahead = deque(each for each in self._ahead if (each.topic, each.partition) in now)
            await _tell(self._on_revoked, revoked)
        assigned = sorted(place for place in now if place not in self._shares)
        for place in assigned:
            self._shares[place] = Share(now[place])
        if assigned:
            await _tell(self._on_assigned, assigned)

    async def _put_out(self, error: Fenced) -> None:
        """The group takes us for gone, or for another: join again, unless that one is there."""
        logger.warning("put out of the group", extra={"group": self.group, "why": str(error)})
        lost = sorted(self._shares)
        self._shares.clear()
        self._ahead.clear()
        if lost:
            await _tell(self._on_revoked, lost)
        if self.instance_id and await self._is_taken():
            self._closed = self._pulse.closed = True  # or the two would put each other out for ever
            raise Fenced(
                f"another consumer has taken over as {self.instance_id!r} in group {self.group}: an instance id is for "
                "one consumer at a time. This one is closed"
            ) from error
        await self._join()

    async def _is_taken(self) -> bool:
        told: wire.GroupTold = await self._ask("GET", path_of("groups", self.group), wire.GroupTold)
        members = () if told.stream is None else told.stream.members
        return any(member.instance_id == self.instance_id and member.id != self._member for member in members)

    async def _poll(self, max_records: int | None, timeout: Seconds | None) -> list[RemoteStreamMessage[Body]]:
        """The next messages, up to so many; [] when the time is over. All that was handed out before is handled."""
        self._check_open()
        count = self.settings.max_records if max_records is None else max_records
        if type(count) is not int or not 1 <= count <= 1_000_000:
            raise InvalidRequest(f"max_records={count!r} cannot be used: give a whole number from 1 to 1000000")
        now_ns = self._clock.monotonic_ns()
        until_ns = None if timeout is None else now_ns + duration_ms(timeout, "timeout") * 1_000_000
        if self._polling:
            raise InvalidRequest("this consumer is polling already: give each thread or task a consumer of its own")
        self._polling = self._pulse.polling = True
        try:
            await self._rewind()
            for share in self._shares.values():
                share.handled = share.given
            while True:
                left_s = _MOST_WAIT_S if until_ns is None else (until_ns - self._clock.monotonic_ns()) / 1e9
                found = await self._ask_once(min(count, _MOST_AT_ONCE), min(max(left_s, 0), _MOST_WAIT_S))
                if found or (until_ns is not None and self._clock.monotonic_ns() >= until_ns):
                    return found
                self._check_open()
        finally:
            self._polling = self._pulse.polling = False
            self._pulse.polled_ns = self._clock.monotonic_ns()

    async def _ask_once(self, count: int, wait_s: float) -> list[RemoteStreamMessage[Body]]:
        commit = self._uncommitted() if self.settings.auto_commit else {}
        if self._answered:
            self._number += 1
        self._answered = False
        body = wire.Poll(
            poll=self._number,
            max_records=count,
            wait=wait_s,
            commit=[_offset(place, offset) for place, offset in commit.items()],
            paused=[wire.At(topic=topic, partition=partition) for topic, partition in self.paused()],
        )
        try:
            polled: wire.Polled = await self._ask("POST", self._path("poll"), wire.Polled, body, wait_s)
        except Fenced as error:
            await self._put_out(error)
            return []
        self._answered = True
        refused = {(each.topic, each.partition) for each in polled.refused}
        for place, offset in commit.items():
            if place in self._shares and place not in refused:
                self._shares[place].kept = offset
        await self._follow(polled.assignment)
        for each in polled.assignment:
            share = self._shares[each.topic, each.partition]
            if share.handled == share.given:  # what was passed over on the way needs no handling
                share.handled = share.given = min(
                    (
                        said.offset
                        for said in polled.messages
                        if (said.topic, said.partition) == (each.topic, each.partition)
                    ),
                    default=each.position,
                )
        return [
            RemoteStreamMessage(self._client, self._bodies, said, self._shares.get((said.topic, said.partition)))
            for said in polled.messages
        ]

    def _hand_out(self, found: Iterable[RemoteStreamMessage[Body]]) -> None:
        """What was read is in the user's hands."""
        for message in found:
            if message._share is not None:
                message._share.given = message.offset + 1

    def _pull(self) -> RemoteStreamMessage[Body] | None:
        """The next message of an iteration, None where more must be asked for. The one before it is handled."""
        self._check_open()
        self._pulse.polled_ns = self._clock.monotonic_ns()
        if not self._ahead:
            return None
        message = self._ahead.popleft()
        if self._out is not None:
            self._out.handled = self._out.given
        self._out = message._share
        self._hand_out([message])
        return message

    async def _rewind(self) -> None:
        """What was read ahead by an iteration and not handed out is to come again."""
        places = {(each.topic, each.partition) for each in self._ahead}
        self._ahead.clear()
        for place in places & self._shares.keys():
            await self._move(wire.MoveMember(topic=place[0], partition=place[1], offset=self._shares[place].given))

    async def _move(self, body: wire.MoveMember) -> wire.Beat:
        beat: wire.Beat = await self._ask("POST", self._path("seek"), wire.Beat, body)
        return beat

    async def _seek(
        self,
        topic: str | None,
        partition: int | None,
        *,
        to: Any = None,
        offset: int | None = None,
        time: datetime | None = None,
    ) -> None:
        if time is not None:
            instant_ns(time, "time")
        if offset is not None and type(offset) is not int:
            raise InvalidRequest(f"offset={offset!r} is no offset; give a whole number")
        places = self._chosen(topic, partition)
        await self._rewind()
        beat = await self._move(wire.MoveMember(topic=topic, partition=partition, to=to, offset=offset, time=time))
        positions = {(each.topic, each.partition): each.position for each in beat.assignment}
        for place in places:
            share = self._shares.get(place)
            if share is not None and place in positions:
                share.given = share.handled = positions[place]

    async def _lags(self) -> dict[TopicPartition, PartitionLag]:
        self._check_open()
        told: wire.GroupOffsets = await self._ask("GET", path_of("groups", self.group, "offsets"), wire.GroupOffsets)
        return {(lag.topic, lag.partition): lag for lag in told.offsets}

    async def _committed(self, topic: str, partition: int) -> int | None:
        lag = (await self._lags()).get((topic, partition))
        if lag is not None:
            return lag.offset
        info: TopicInfo = await self._ask("GET", path_of("topics", check_topic_name(topic)), TopicInfo)
        check_partition(partition, topic, len(info.partitions))
        return None

    async def _lag(self) -> list[PartitionLag]:
        lags = await self._lags()
        found = []
        for place, share in sorted(self._shares.items()):
            if place in lags:
                behind = max(lags[place].end - share.given, 0)
                seconds = lags[place].seconds if behind else 0.0
                found.append(msgspec.structs.replace(lags[place], offset=share.given, messages=behind, seconds=seconds))
        return found

    def _uncommitted(self) -> dict[TopicPartition, int]:
        return {place: share.handled for place, share in self._shares.items() if share.handled != share.kept}

    async def _commit(
        self,
        messages: Iterable[RemoteStreamMessage[Body]] | None,
        offsets: Mapping[TopicPartition, int] | None,
        durability: Durability | None,
    ) -> None:
        self._check_open()
        if messages is not None and offsets is not None:
            raise InvalidRequest("messages and offsets are both given: choose one of them")
        if messages is not None:
            offsets = self._behind(messages)
        elif offsets is None:
            offsets = {place: share.given for place, share in self._shares.items() if share.given != share.kept}
        await self._write(_checked(offsets), durability)

    async def _write(self, offsets: Mapping[TopicPartition, int], durability: Durability | None = None) -> None:
        if not offsets:
            return
        body = wire.CommitOffsets(
            offsets=[_offset(place, offset) for place, offset in offsets.items()], durability=durability
        )
        await self._ask("POST", self._path("commit"), wire.CommitDone, body)
        for place, offset in offsets.items():
            if place in self._shares:
                self._shares[place].kept = offset

    def _behind(self, messages: Iterable[RemoteStreamMessage[Body]]) -> dict[TopicPartition, int]:
        """Where each partition goes on behind the last of these messages."""
        offsets: dict[TopicPartition, int] = {}
        if not isinstance(messages, Iterable):
            raise InvalidRequest(f"commit takes messages, not {type(messages).__name__}")
        for message in messages:
            if not isinstance(message, RemoteStreamMessage):
                raise InvalidRequest(f"{message!r} is no message of a consumer")
            place = message.topic, message.partition
            if message._share is None or self._shares.get(place) is not message._share:
                raise Fenced(
                    f"{message.id} came when partition {place[1]} of {place[0]} was this consumer's, which it was not "
                    "all the time since: others may have handled it. Nothing was committed; poll, and go on from there"
                )
            offsets[place] = max(message.offset + 1, offsets.get(place, 0))
        return offsets

    async def _close(self, *, failed: bool) -> None:
        """Commit what is handled and go; a static member stays one until its session ends."""
        if self._closed:
            return
        failed = failed or self._polling  # another polls: what it has in hand is not handled
        try:
            if self._shares and not self._caller.closed:
                await _tell(self._on_revoked, self.assignment())  # which may still commit
            if not failed:
                for share in self._shares.values():
                    share.handled = share.given
        finally:
            self._closed = self._pulse.closed = True
            if self._member is not None and not self._caller.closed:
                await self._leave()

    async def _leave(self) -> None:
        try:
            if self.settings.auto_commit:
                await self._write(self._uncommitted())
            if not self.instance_id:
                await self._ask("DELETE", self._path(), None)
        except HoldfastError as error:
            logger.debug("left without saying so", extra={"group": self.group, "why": str(error)})


def _differing(settings: ConsumerSettings) -> dict[str, Any]:
    usual = ConsumerSettings()
    given = msgspec.structs.asdict(settings)
    return {name: value for name, value in given.items() if value != getattr(usual, name)}


def _offset(place: TopicPartition, offset: int) -> wire.Offset:
    return wire.Offset(topic=place[0], partition=place[1], offset=offset)


async def _tell(told: Told | None, places: list[TopicPartition]) -> None:
    """What the user is told may be told to a coroutine."""
    answer = None if told is None else told(places)
    if isawaitable(answer):
        await answer
