"""Members of stream groups in other processes. The server keeps each in its group while it sends heartbeats."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Final, TypeAlias

from holdfast.api.contents import record_of
from holdfast.api.topics import ConsumedPartition, MemberRequest, SeekTarget, StreamMessage, member_request
from holdfast.broker.engine import BrokerEngine
from holdfast.errors import BadSettings, Closed, Fenced, Forbidden, HoldfastError, InvalidRequest, Unauthenticated
from holdfast.local.aio.broker import AsyncLocalConsumerPort
from holdfast.membership import TopicPartition
from holdfast.model import Durability, extra_bytes
from holdfast.protocol.topics import Assigned, Join, MoveMember, Offset, Poll
from holdfast.server.http.messages import ANSWER_BYTES

logger = logging.getLogger(__name__)

Found: TypeAlias = Sequence[StreamMessage[bytes]]
Polling: TypeAlias = tuple[Found, list[TopicPartition]]
Messages: TypeAlias = Awaitable[list[StreamMessage[bytes]]]
Waiting: TypeAlias = Callable[[Callable[[], Messages]], Messages]

_DAY_MS: Final = 24 * 3600 * 1000
_NO_SETTINGS: Final = frozenset(
    {"self", "engine", "topics", "group", "body_type", "settings", "instance_id", "holder"}
    | {"on_assigned", "on_revoked", "auto_commit", "auto_commit_ms", "max_poll_ms"}
)


class ServedMember:
    """One member. Its calls run one at a time; a repeated poll gets the same answer."""

    def __init__(self, port: AsyncLocalConsumerPort, heard_at: float) -> None:
        self.id = port.member_id or ""
        self.port = port
        port.most_bytes = ANSWER_BYTES
        self.heard_at = heard_at
        self.changed = asyncio.Event()
        self._lock = asyncio.Lock()
        self._in_line = 0
        self._number = 0
        self._answer: Polling = ((), [])

    @property
    def topics(self) -> tuple[str, ...]:
        return self.port.request.topics

    @property
    def session_s(self) -> float:
        return self.port.settings.session_ms / 1000

    @property
    def epoch(self) -> int:
        return self.port.epoch

    @property
    def busy(self) -> bool:
        """Whether a call of the member is in progress, which proves that it is alive."""
        return self._lock.locked()

    @property
    def is_out(self) -> bool:
        """Whether the group has removed the member since it joined. Another member may own its partitions by now."""
        return self.port.closed or self.port.member_id != self.id

    def assignment(self) -> list[Assigned]:
        partitions = dict(self.port.partitions)  # one atomic copy: another thread may change them
        return [
            Assigned(topic=topic, partition=number, position=partitions[topic, number].given)
            for topic, number in sorted(partitions)
        ]

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Run one call at a time. A call that waits for messages gives way: its client may be gone unnoticed."""
        self._in_line += 1
        self.changed.set()
        try:
            await self._lock.acquire()
        finally:
            self._in_line -= 1
        try:
            yield
        finally:
            self._lock.release()

    async def poll(self, wanted: Poll, wait_s: float, waiting: Waiting) -> Polling:
        """Commit, then return new messages. Ends early when the member's partitions change, so that it learns of it."""
        if wanted.poll < self._number:
            raise InvalidRequest(
                f"poll {wanted.poll} is over: {self._number} has been requested since. Continue counting from there"
            )
        if wanted.poll == self._number:
            return self._answer
        refused = await self._commit_own(wanted.commit)
        self._pause({(place.topic, place.partition) for place in wanted.paused})
        before = set(self.port.partitions)
        found: list[StreamMessage[bytes]] = []
        try:
            count = wanted.max_records or self.port.settings.max_records
            found = await self._next(0, count)
            if not found and wait_s and before == set(self.port.partitions):
                given = self._given()
                try:
                    found = await waiting(partial(self._next, wait_s, count))
                except (Unauthenticated, Forbidden):
                    _give_back(given)  # the caller is no longer allowed to get them
                    raise
        except Closed:
            if not self.is_out:
                raise
        if self.is_out:
            raise unknown_member(self.id)
        self._number, self._answer = wanted.poll, (self._cut(found), refused)
        return self._answer

    async def _next(self, wait_s: float, count: int) -> list[StreamMessage[bytes]]:
        """Wait for messages until the timeout or a change. Messages that do not reach the caller are read again."""
        given = self._given()
        self.changed.clear()
        polling = asyncio.ensure_future(self._polled(0 if self._in_line else wait_s, count))
        changed = asyncio.ensure_future(self.changed.wait())
        try:
            await asyncio.wait((polling, changed), return_when=asyncio.FIRST_COMPLETED)
            if not polling.done():
                await _stopped(polling)
            if not polling.cancelled():
                return polling.result()
            _give_back(given)
            return await self._polled(0, count)
        except asyncio.CancelledError:
            await _stopped(polling)
            _give_back(given)
            raise
        finally:
            changed.cancel()

    async def _polled(self, wait_s: float, count: int) -> list[StreamMessage[bytes]]:
        self.port.check_open()
        found = await self.port.poll(count, round(wait_s * 1000))
        self.port.hand_out(found)
        return found

    def _given(self) -> list[tuple[ConsumedPartition, int]]:
        """The partitions with the positions up to which they were handed out."""
        return [(each, each.given) for each in self.port.partitions.values()]

    def _cut(self, found: list[StreamMessage[bytes]]) -> list[StreamMessage[bytes]]:
        """As many messages as one answer should hold; the rest are left for the next poll."""
        size = 0
        for i, message in enumerate(found):
            record = record_of(message)
            size += len(record.value) + extra_bytes(record)
            if i and size > ANSWER_BYTES:
                for left in reversed(found[i:]):
                    self.port.partitions[left.topic, left.partition].move(left.offset)
                return found[:i]
        return found

    async def _commit_own(self, offsets: Iterable[Offset]) -> list[TopicPartition]:
        """Commit the offsets of partitions that the member still owns. Returns those that it does not."""
        given = {(each.topic, each.partition): each.offset for each in offsets}
        refused = [place for place in given if place not in self.port.partitions]
        for place in refused:
            del given[place]
        if given:
            await self.port.commit(given)
        return refused

    def _pause(self, places: set[TopicPartition]) -> None:
        for place, each in self.port.partitions.items():
            each.paused = place in places

    async def commit(self, offsets: Iterable[Offset], durability: Durability | None) -> int:
        """Commit all offsets or none."""
        given = {(each.topic, each.partition): each.offset for each in offsets}
        await self.port.commit(given, durability)
        return len(given)

    def keep(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Note offsets that a transaction has committed."""
        for place, offset in offsets.items():
            if place in self.port.partitions:
                self.port.partitions[place].kept = offset

    async def move(self, wanted: MoveMember) -> None:
        """Move the member's positions."""
        if sum(each is not None for each in (wanted.to, wanted.offset, wanted.time)) != 1:
            raise InvalidRequest("give exactly one of to, offset and time")
        if wanted.offset is not None and (wanted.topic is None or wanted.partition is None):
            raise InvalidRequest("an offset belongs to one partition: give topic and partition")
        where = SeekTarget(
            topic=wanted.topic, partition=wanted.partition, offset=wanted.offset, to=wanted.to, time=wanted.time
        )
        self.port.check_open()
        await self.port.seek(where)


class ServedMembers:
    """All members, by group and id."""

    def __init__(self, engine: BrokerEngine) -> None:
        self._engine = engine
        self._members: dict[tuple[str, str], ServedMember] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._members)

    async def join(self, group: str, wanted: Join, owner: str) -> ServedMember:
        """Add a new member. It fences an earlier member with the same instance id."""
        for name in _NO_SETTINGS & wanted.settings.keys():
            raise BadSettings(
                f"{name} is not a setting of a remote member, whose client polls and commits: leave it out"
            )
        loop = asyncio.get_running_loop()
        holding: list[ServedMember] = []

        def changed(_: list[TopicPartition]) -> None:
            for member in holding:
                member.changed.set()

        options: dict[str, Any] = {
            **_with_heartbeat(wanted.settings),
            "auto_commit": False,
            "max_poll_ms": 30 * _DAY_MS,  # heartbeats tell whether it is alive
            "instance_id": wanted.instance_id,
            "holder": owner,
            "on_assigned": changed,
            "on_revoked": changed,
        }
        joining = asyncio.ensure_future(self._joined(member_request(wanted.topics, group, **options)))
        try:
            port = await asyncio.shield(joining)
        except asyncio.CancelledError:
            self._keep(loop.create_task(_unwanted(joining)))
            raise
        member = ServedMember(port, loop.time())
        holding.append(member)
        self._members[group, member.id] = member
        self._expect(group, member)
        return member

    async def _joined(self, request: MemberRequest) -> AsyncLocalConsumerPort:
        port = await AsyncLocalConsumerPort.open(self._engine, request)
        await port.join()
        return port

    def find(self, group: str, member_id: str) -> ServedMember:
        """The member, with its session renewed. Raises Fenced if there is none."""
        member = self._members.get((group, member_id))
        if member is None:
            raise unknown_member(member_id)
        if member.is_out:
            del self._members[group, member_id]
            self._end(member)
            raise unknown_member(member_id)
        member.heard_at = asyncio.get_running_loop().time()
        return member

    def heard(self, member: ServedMember) -> None:
        """A call of the member has just ended."""
        member.heard_at = asyncio.get_running_loop().time()

    async def leave(self, group: str, member_id: str) -> None:
        """Remove a member that leaves. A static member keeps its place until its session ends."""
        member = self.find(group, member_id)
        del self._members[group, member_id]
        # Shielded: if the caller disconnects now, nothing else would end the member.
        await asyncio.shield(self._end(member))

    async def put_out(self, topic: str) -> None:
        """Remove the members that read a topic, because it is leaving: they join again, where it will be."""
        for (group, member_id), member in list(self._members.items()):
            if topic in member.topics and self._members.pop((group, member_id), None) is not None:
                with suppress(HoldfastError):
                    await member.port.leave(for_good=True)

    def _expect(self, group: str, member: ServedMember) -> None:
        """End the member if its session is over, otherwise check again when it would be."""
        loop = asyncio.get_running_loop()
        left_s = member.heard_at + member.session_s - loop.time()
        if self._members.get((group, member.id)) is not member:
            return
        if member.busy or left_s > 0:
            loop.call_later(member.session_s if member.busy else left_s, self._expect, group, member)
            return
        del self._members[group, member.id]
        logger.warning("a member timed out", extra={"group": group, "member": member.id})
        self._end(member, session_over=True)

    def _end(self, member: ServedMember, *, session_over: bool = False) -> asyncio.Task[None]:
        return self._keep(asyncio.get_running_loop().create_task(_ended(member, session_over=session_over)))

    def _keep(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return task


async def _ended(member: ServedMember, *, session_over: bool) -> None:
    port = member.port
    try:
        async with member.turn():
            if not port.left:
                # Otherwise a static member would keep its place for another session.
                await port.leave(for_good=session_over)
    except HoldfastError as error:
        logger.debug("the end was not reported", extra={"group": port.request.group, "why": str(error)})


async def _unwanted(joining: Awaitable[AsyncLocalConsumerPort]) -> None:
    """Remove a member whose client disconnected before it got the member's id: it could never poll."""
    try:
        await (await joining).leave()
    except HoldfastError as error:
        logger.debug("the member did not join", extra={"why": str(error)})


def _with_heartbeat(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings, with a heartbeat of a third of the session if only the session is given."""
    session_ms = settings.get("session_ms")
    if type(session_ms) is not int or "heartbeat_ms" in settings:
        return settings
    return {**settings, "heartbeat_ms": max(session_ms // 3, 1)}


async def _stopped(polling: asyncio.Future[Any]) -> None:
    polling.cancel()
    await asyncio.wait([polling])


def _give_back(given: Iterable[tuple[ConsumedPartition, int]]) -> None:
    """Move positions back over messages that did not reach the client."""
    for partition, offset in given:
        if partition.given != offset:
            partition.move(offset)


def unknown_member(member_id: str) -> Fenced:
    """The error for a member that no longer exists, or never did."""
    return Fenced(
        f"member {member_id} no longer exists: it left, its session ended, or the server was restarted. "
        "Join again, and continue from the last commit"
    )
