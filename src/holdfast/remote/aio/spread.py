"""A consumer of several topics on a server, which may be a cluster that has them in different shards.

A group has its members and positions in each shard. If one member can read all topics, there is one; otherwise there is
one for each topic, and together they are one consumer to its user. They are polled in turn, each call beginning with
another one, and each gets its share of a call before any gets more. If there is nothing, the call waits at one after
the other, for a part of `_ROUND_S` each.

Messages that one member has returned and the user will not get, because the call ended otherwise, are read again.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from holdfast.api.aio.ports import tell
from holdfast.api.topics import ConsumedPartition, MemberRequest, SeekTarget, StreamMessage
from holdfast.broker.streams import PartitionLag
from holdfast.errors import HoldfastError, NotInCluster
from holdfast.membership import TopicPartition
from holdfast.model import Durability
from holdfast.remote.aio.consumer import AsyncRemoteConsumerPort
from holdfast.remote.client import Client
from holdfast.settings import ConsumerSettings

_ROUND_S: Final = 0.5
_LEAST_MS: Final = 20


class AsyncSpreadConsumerPort:
    """The members of one consumer."""

    def __init__(self, client: Client, request: MemberRequest) -> None:
        self.request = request
        self._client = client
        self._clock = client.world.clock
        self._take([AsyncRemoteConsumerPort(client, request)])
        self._next = 0
        self._returned: set[TopicPartition] = set()

    @property
    def member_id(self) -> str | None:
        found = [each.member_id for each in self._members if each.member_id is not None]
        return ", ".join(found) if found else None

    @property
    def left(self) -> bool:
        return any(each.left for each in self._members)

    @property
    def closed(self) -> bool:
        return any(each.closed for each in self._members)

    def check_open(self) -> None:
        """Raise Closed if a member has left or the client is closed."""
        for each in self._members:
            each.check_open()

    async def join(self) -> None:
        try:
            await self._members[0].join()
        except NotInCluster:
            await self._split()

    async def poll(
        self, count: int, timeout_ms: int | None, returned: Collection[TopicPartition]
    ) -> list[StreamMessage[Any]]:
        self._returned.update(returned)
        if len(self._members) == 1:
            try:
                found = await self._poll_one(self._members[0], count, timeout_ms)
            except NotInCluster:  # a topic has moved to another shard
                await self._split()
            else:
                return found
        monotonic_ns = self._clock.monotonic_ns
        until_ns = None if timeout_ms is None else monotonic_ns() + timeout_ms * 1_000_000
        found = await self._round(count, 0)
        slice_ms = max(round(_ROUND_S * 1000 / len(self._members)), _LEAST_MS)
        while not found:
            left_ms = slice_ms if until_ns is None else (until_ns - monotonic_ns()) // 1_000_000
            if left_ms <= 0:
                return []
            self._next += 1
            found = await self._poll_one(self._turn(0), count, min(left_ms, slice_ms))
            self.check_open()
        return found

    async def _round(self, count: int, wait_ms: int) -> list[StreamMessage[Any]]:
        """What is there, from each member its share; then more from those that have more."""
        self._next += 1
        found: list[StreamMessage[Any]] = []
        share, full = -(-count // len(self._members)), []
        try:
            for at in range(len(self._members)):
                member = self._turn(at)
                some = await self._poll_one(member, min(share, count - len(found)), wait_ms)
                found += some
                if len(some) == share:
                    full.append(member)
                if len(found) == count:
                    break
        except HoldfastError:
            if not found:
                raise  # otherwise the next call meets it again
        except BaseException:
            self._returned.update((each.topic, each.partition) for each in found)
            raise
        return found

    async def _poll_one(
        self, member: AsyncRemoteConsumerPort, count: int, timeout_ms: int | None
    ) -> list[StreamMessage[Any]]:
        mine = {place for place in self._returned if place[0] in member.request.topics}
        found = await member.poll(count, timeout_ms, mine)
        self._returned -= mine
        return found

    def _turn(self, at: int) -> AsyncRemoteConsumerPort:
        return self._members[(self._next + at) % len(self._members)]

    def hand_out(self, found: Sequence[StreamMessage[Any]]) -> None:
        """Note that these messages are returned to the user."""
        for member in self._members:
            mine = [each for each in found if each.topic in member.request.topics]
            if mine:
                member.hand_out(mine)

    def needs_attention(self) -> bool:
        """Note that all members are alive; see the port of one."""
        found = False
        for each in self._members:
            found = each.needs_attention() or found
        return found

    async def attend(self) -> bool:
        return False

    async def commit(self, offsets: Mapping[TopicPartition, int], durability: Durability | None) -> None:
        for member in self._members:
            mine = {place: offset for place, offset in offsets.items() if place[0] in member.request.topics}
            await member.commit(mine, durability)

    async def committed(self, topic: str, partition: int) -> int | None:
        return await self._of(topic).committed(topic, partition)

    async def seek(self, where: SeekTarget, returned: Collection[TopicPartition]) -> None:
        self._returned.update(returned)
        for member in self._members if where.topic is None else [self._of(where.topic)]:
            mine = {place for place in self._returned if place[0] in member.request.topics}
            if member.partitions:
                await member.seek(where, mine)
            self._returned -= mine

    async def lag(self) -> list[PartitionLag]:
        return [lag for member in self._members for lag in await member.lag()]

    async def leave(self) -> None:
        for member in self._members:
            await member.leave()

    def _of(self, topic: str) -> AsyncRemoteConsumerPort:
        return next((each for each in self._members if topic in each.request.topics), self._members[0])

    def _take(self, members: list[AsyncRemoteConsumerPort]) -> None:
        self._members = members
        self.settings: ConsumerSettings = members[0].settings
        self.partitions: Mapping[TopicPartition, ConsumedPartition] = ChainMap(*(each.partitions for each in members))

    async def _split(self) -> None:
        """Join with a member for each topic, and tell the user once of all that was assigned."""
        assigned: list[TopicPartition] = []
        lost = sorted(self.partitions)
        self._take([AsyncRemoteConsumerPort(self._client, self._request_for(each)) for each in self.request.topics])
        if lost:
            await tell(self.request.on_revoked, lost)
        joined: list[AsyncRemoteConsumerPort] = []
        try:
            for member in self._members:
                member.request = msgspec.structs.replace(member.request, on_assigned=partial(_note, assigned))
                await member.join()
                joined.append(member)
        except BaseException:
            for member in joined:
                await member.leave()
            raise
        for member in self._members:
            member.request = msgspec.structs.replace(member.request, on_assigned=self.request.on_assigned)
        if assigned:
            await tell(self.request.on_assigned, sorted(assigned))

    def _request_for(self, topic: str) -> MemberRequest:
        """One for a single topic. Its static name is its own: two topics may be in one shard."""
        instance = f"{self.request.instance_id}.{topic}" if self.request.instance_id else ""
        return msgspec.structs.replace(self.request, topics=(topic,), instance_id=instance)


def _note(found: list[TopicPartition], places: list[TopicPartition]) -> None:
    found += places
