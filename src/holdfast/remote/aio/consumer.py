"""A member of a stream group on a server.

Every poll has a number, and is sent again with the same one when its answer was lost: the server answers as before.
What was handled goes along with the next poll, so that an answer that never came counts for nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Self

import msgspec

from holdfast.api.aio.ports import tell
from holdfast.api.contents import home_of
from holdfast.api.topics import (
    ConsumedPartition,
    MemberRequest,
    SeekTarget,
    StreamMessage,
    TopicInfo,
    chosen_partitions,
)
from holdfast.broker.folder.layout import check_topic_name
from holdfast.broker.messages import check_partition
from holdfast.broker.streams import PartitionLag
from holdfast.client.calling import path_of
from holdfast.env.process import get_logger
from holdfast.errors import Closed, Fenced, HoldfastError
from holdfast.membership import TopicPartition
from holdfast.model import Durability
from holdfast.protocol import topics as wire
from holdfast.remote.broker import Heartbeats, member_settings, messages_from
from holdfast.remote.client import AsyncCalls, Client

logger = get_logger(__name__)

_MOST_AT_ONCE: Final = 10_000


class AsyncRemoteConsumerPort:
    """A member that the server keeps as long as it hears from this client."""

    def __init__(self, client: Client, request: MemberRequest) -> None:
        self.request = request
        self.settings, self._wishes = member_settings(request)
        self.partitions: dict[TopicPartition, ConsumedPartition] = {}
        self.member_id: str | None = None
        self.left = False
        self._client = client
        self._calls = AsyncCalls(client)
        self._clock = client.world.clock
        self._heartbeats = Heartbeats(client.beside)
        self._number = 0
        self._answered = True

    @classmethod
    async def open(cls, client: Client, request: MemberRequest) -> Self:
        """Return a member that has not joined yet."""
        return cls(client, request)

    @property
    def closed(self) -> bool:
        return self.left or self._client.caller.closed

    def check_open(self) -> None:
        """Raise Closed if the member has left or the client is closed."""
        self._client.caller.check_open()
        if self.left:
            raise Closed(f"this consumer of {self.request.group} is closed; create a new one")

    def __del__(self) -> None:
        heartbeats = getattr(self, "_heartbeats", None)  # __init__ may have failed
        if heartbeats is not None:
            heartbeats.closed = True

    async def join(self) -> None:
        self.member_id = None
        body = wire.Join(
            topics=list(self.request.topics),
            instance_id=self.request.instance_id or None,
            owner=self.request.holder or self._client.holder,
            settings=msgspec.to_builtins(self._wishes),
        )
        joined: wire.Joined = await self._calls.ask("POST", self._path(), wire.Joined, body)
        self.member_id, self._number, self._answered = joined.member, 0, True
        self._heartbeats.begin(self._path("heartbeat"), joined.heartbeat_ms, self.settings.max_poll_ms)
        self._client.upkeep.beat(self._heartbeats)
        await self._follow(joined.assignment)

    async def poll(
        self, count: int, timeout_ms: int | None, returned: Collection[TopicPartition]
    ) -> list[StreamMessage[Any]]:
        monotonic_ns = self._clock.monotonic_ns
        until_ns = None if timeout_ms is None else monotonic_ns() + timeout_ms * 1_000_000
        self._heartbeats.polling = True
        try:
            await self._rewind(returned)
            for each in self.partitions.values():
                each.handled = each.given
            while True:
                most_s = self._client.caller.most_wait_s
                left_s = most_s if until_ns is None else (until_ns - monotonic_ns()) / 1e9
                found = await self._ask_once(min(count, _MOST_AT_ONCE), min(max(left_s, 0), most_s))
                if found or (until_ns is not None and monotonic_ns() >= until_ns):
                    return found
                self.check_open()
        finally:
            self._heartbeats.polling = False
            self._heartbeats.polled_ns = monotonic_ns()

    def hand_out(self, found: Sequence[StreamMessage[Any]]) -> None:
        """Note that these messages are returned to the user."""
        for place, message in self._first_of_each(reversed(found)).items():
            self.partitions[place].given = message.offset + 1

    def needs_attention(self) -> bool:
        """Return False: changes of the group arrive with the next poll, which also sends the commits."""
        self.check_open()
        self._heartbeats.polled_ns = self._clock.monotonic_ns()
        return False

    async def attend(self) -> bool:
        return False

    async def commit(self, offsets: Mapping[TopicPartition, int], durability: Durability | None) -> None:
        if not offsets:
            return
        body = wire.CommitOffsets(
            offsets=[_offset(place, offset) for place, offset in offsets.items()], durability=durability
        )
        await self._calls.ask("POST", self._path("commit"), wire.CommitDone, body)
        for place, offset in offsets.items():
            if place in self.partitions:
                self.partitions[place].kept = offset

    async def committed(self, topic: str, partition: int) -> int | None:
        self.check_open()
        lag = (await self._lags()).get((topic, partition))
        if lag is not None:
            return lag.offset
        path = path_of("topics", check_topic_name(topic))
        info: TopicInfo = await self._calls.ask("GET", path, TopicInfo)
        check_partition(partition, topic, len(info.partitions))
        return None

    async def seek(self, where: SeekTarget, returned: Collection[TopicPartition]) -> None:
        chosen = chosen_partitions(self.partitions, self.request.topics, where.topic, where.partition)
        await self._rewind(returned)
        beat = await self._move(where)
        positions = {(each.topic, each.partition): each.position for each in beat.assignment}
        for each in chosen:
            if each.place in positions:
                each.move(positions[each.place])

    async def lag(self) -> list[PartitionLag]:
        lags = await self._lags()
        found = []
        for place, each in sorted(self.partitions.items()):
            if place in lags:
                behind = max(lags[place].end - each.given, 0)
                seconds = lags[place].seconds if behind else 0.0
                found.append(msgspec.structs.replace(lags[place], offset=each.given, messages=behind, seconds=seconds))
        return found

    async def leave(self) -> None:
        self.left = self._heartbeats.closed = True
        if self.member_id is None or self._client.caller.closed:
            return
        try:
            if self.settings.auto_commit:
                await self.commit(self._uncommitted(), None)
            if not self.request.instance_id:
                await self._calls.ask("DELETE", self._path(), None)
        except HoldfastError as error:
            logger.debug("leaving the group was not reported", extra={"group": self.request.group, "why": str(error)})

    def _path(self, *more: str) -> str:
        member = () if self.member_id is None else (self.member_id,)
        return path_of("groups", self.request.group, "members", *member, *more)

    async def _follow(self, assignment: Iterable[wire.Assigned]) -> None:
        """Apply the assignment, and report what was assigned and revoked to the user."""
        now = {(each.topic, each.partition): each.position for each in assignment}
        revoked = sorted(place for place in self.partitions if place not in now)
        for place in revoked:
            del self.partitions[place]
        if revoked:
            await tell(self.request.on_revoked, revoked)
        assigned = sorted(place for place in now if place not in self.partitions)
        for place in assigned:
            self.partitions[place] = ConsumedPartition(place, now[place])
        if assigned:
            await tell(self.request.on_assigned, assigned)

    async def _put_out(self, error: Fenced) -> None:
        """Join again after the group has removed this member, unless a newer one has replaced it."""
        group, instance_id = self.request.group, self.request.instance_id
        logger.warning("removed from the group", extra={"group": group, "why": str(error)})
        lost = sorted(self.partitions)
        self.partitions.clear()
        if lost:
            await tell(self.request.on_revoked, lost)
        if instance_id and await self._is_taken():
            self.left = self._heartbeats.closed = True  # otherwise the two would remove each other forever
            raise Fenced(
                f"another consumer has taken over as {instance_id!r} in group {group}: an instance id may be used by "
                "one consumer at a time. This one is closed; give each consumer its own instance_id"
            ) from error
        await self.join()

    async def _is_taken(self) -> bool:
        answer: wire.GroupTold = await self._calls.ask("GET", path_of("groups", self.request.group), wire.GroupTold)
        members = () if answer.stream is None else answer.stream.members
        return any(member.instance_id == self.request.instance_id and member.id != self.member_id for member in members)

    async def _ask_once(self, count: int, wait_s: float) -> list[StreamMessage[Any]]:
        commit = self._uncommitted() if self.settings.auto_commit else {}
        if self._answered:
            self._number += 1
        self._answered = False
        paused = sorted(place for place, each in self.partitions.items() if each.paused)
        body = wire.Poll(
            poll=self._number,
            max_records=count,
            wait=wait_s,
            commit=[_offset(place, offset) for place, offset in commit.items()],
            paused=[wire.At(topic=topic, partition=partition) for topic, partition in paused],
        )
        try:
            polled: wire.Polled = await self._calls.ask("POST", self._path("poll"), wire.Polled, body, wait_s=wait_s)
        except Fenced as error:
            await self._put_out(error)
            return []
        self._answered = True
        refused = {(each.topic, each.partition) for each in polled.refused}
        for place, offset in commit.items():
            if place in self.partitions and place not in refused:
                self.partitions[place].kept = offset
        await self._follow(polled.assignment)
        found = messages_from(self._client, self.request.bodies, self.partitions, polled.messages)
        first = self._first_of_each(found)
        for each in polled.assignment:
            place = each.topic, each.partition
            partition = self.partitions[place]
            if partition.handled == partition.given:  # what was passed over on the way needs no handling
                partition.move(first[place].offset if place in first else each.position)
        return found

    def _first_of_each(self, messages: Iterable[StreamMessage[Any]]) -> dict[TopicPartition, StreamMessage[Any]]:
        """The first message of each partition that is ours: there may be thousands, and few partitions."""
        homes: dict[Any, TopicPartition] = {each.home: place for place, each in self.partitions.items()}
        found: dict[TopicPartition, StreamMessage[Any]] = {}
        for message in messages:
            if not homes:
                break
            place = homes.pop(home_of(message), None)
            if place is not None:
                found[place] = message
        return found

    async def _rewind(self, places: Collection[TopicPartition]) -> None:
        """Arrange for messages that were polled but not returned to come again."""
        for place in places:
            if place in self.partitions:
                topic, partition = place
                await self._move(SeekTarget(topic=topic, partition=partition, offset=self.partitions[place].given))

    async def _move(self, where: SeekTarget) -> wire.Beat:
        body = wire.MoveMember(
            topic=where.topic, partition=where.partition, to=where.to, offset=where.offset, time=where.time
        )
        beat: wire.Beat = await self._calls.ask("POST", self._path("seek"), wire.Beat, body)
        return beat

    async def _lags(self) -> dict[TopicPartition, PartitionLag]:
        path = path_of("groups", self.request.group, "offsets")
        answer: wire.GroupOffsets = await self._calls.ask("GET", path, wire.GroupOffsets)
        return {(lag.topic, lag.partition): lag for lag in answer.offsets}

    def _uncommitted(self) -> dict[TopicPartition, int]:
        return {place: each.handled for place, each in self.partitions.items() if each.handled != each.kept}


def _offset(place: TopicPartition, offset: int) -> wire.Offset:
    return wire.Offset(topic=place[0], partition=place[1], offset=offset)
