"""A consumer for tasks: the same names, awaited. The event loop never waits for the disk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from datetime import datetime
from inspect import isawaitable
from typing import Any, Generic, Self, TypeVar

from holdfast.api.contents import Body
from holdfast.api.drafts import Seconds
from holdfast.broker.engine import BrokerEngine
from holdfast.broker.streams.positions import PartitionLag
from holdfast.broker.waiters import TaskWaiter
from holdfast.embedded.consuming import Consuming
from holdfast.embedded.feeds import StreamMessage
from holdfast.errors import Closed
from holdfast.membership.assignment import TopicPartition
from holdfast.model import Durability

_Result = TypeVar("_Result")


class AsyncConsumer(Consuming[Body], Generic[Body]):
    """Reads the partitions that its group gives it. For one task at a time: give each a consumer of its own.

    What `poll` answered counts as handled with the next `poll`; in a loop over the consumer, with the next message.
    """

    _user: asyncio.Task[Any] | None = None  # who polled last

    @classmethod
    async def open(cls, engine: BrokerEngine, topics: str | Iterable[str], group: str, **options: Any) -> Self:
        """Join the group, which is made where there is none."""
        consumer = await _aside(lambda: cls._open(engine, topics, group, **options))
        await consumer._follow()
        return consumer

    async def poll(self, timeout: Seconds | None = None, max_records: int | None = None) -> list[StreamMessage[Body]]:
        """What is there, up to `max_records`, from all our partitions; waits for at least one, [] after the time."""
        count, until_ns = self._begin_poll(max_records, timeout)
        self._user = asyncio.current_task()
        found = await self._next(count, until_ns)
        passed = self._passed()
        if passed:
            await _aside(lambda: self._keep_passed(passed))
        self._hand_out()  # last: who is cancelled before has got nothing
        return found

    async def __aiter__(self) -> AsyncIterator[StreamMessage[Body]]:
        """Every message as it comes, until the consumer is closed."""
        while True:
            try:
                if self._must_commit:
                    await _aside(lambda: self._auto_commit(self._feeds))
                message = self._pull()
                if message is None:
                    count, until_ns = self._begin_poll(None, None)
                    self._user = asyncio.current_task()
                    self._ahead.extend(await self._next(count, until_ns))
                    continue
            except Closed:
                if self.closed:
                    return
                raise
            yield message

    async def commit(
        self,
        messages: Iterable[StreamMessage[Body]] | None = None,
        *,
        offsets: Mapping[TopicPartition, int] | None = None,
        durability: Durability | None = None,
    ) -> None:
        """Note that all we got is handled; or only these messages and all before them; or these offsets.

        Fenced if a partition is not ours any more: then somebody else goes on from the commit before.
        """
        chosen = self._chosen_offsets(messages, offsets)
        appended = await _aside(lambda: self._write(chosen, durability))
        if appended is not None:
            await self._group.offsets.wait_async(appended)

    async def committed(self, topic: str, partition: int) -> int | None:
        """The offset at which the group goes on after a restart, None before it began there."""
        return await _aside(lambda: self._committed(topic, partition))

    async def seek(self, topic: str, partition: int, offset: int) -> None:
        """Go on at the offset."""
        self._seek(topic, partition, offset=offset)

    async def seek_to_start(self, topic: str | None = None, partition: int | None = None) -> None:
        """Go on with the oldest messages kept: of one partition, of a topic, or of all that are ours."""
        self._seek(topic, partition, to="start")

    async def seek_to_end(self, topic: str | None = None, partition: int | None = None) -> None:
        """Go on with what comes from now on: of one partition, of a topic, or of all that are ours."""
        self._seek(topic, partition, to="end")

    async def seek_to_time(self, time: datetime, topic: str | None = None, partition: int | None = None) -> None:
        """Go on with the first message of this time or later."""
        await _aside(lambda: self._seek(topic, partition, time=time))

    async def lag(self) -> list[PartitionLag]:
        """How far behind we are in each partition that is ours, in messages and seconds."""
        return await _aside(self._lag)

    async def close(self) -> None:
        """Commit (with auto_commit), leave the group. A static member keeps its place until its session ends.

        Called by another task than the one that polls, it does not commit what that one has in hand.
        """
        await self._close(failed=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self._close(failed=kind is not None)

    async def _close(self, *, failed: bool) -> None:
        if self._closed or self._leaving:
            return
        user = self._user
        elsewhere = user is not None and user is not asyncio.current_task() and not user.done()
        self._leaving = True
        try:
            if self._feeds and self._on_revoked is not None and not self._engine.closed:
                await _told(self._on_revoked(self.assignment()))  # which may still commit
        finally:
            self._closed = True
            self._line.wake_all()
            await _aside(lambda: self._leave(failed=failed or elsewhere))

    async def _follow(self) -> None:
        """Do what the group says: give back, take over, join again."""
        steps = self._steps()
        while (step := await _aside(lambda: next(steps, None))) is not None:
            told, places = step
            await _told(told(places))

    async def _next(self, count: int, until_ns: int | None) -> list[StreamMessage[Body]]:
        """Messages that are there, or come in time; [] otherwise."""
        waiter = TaskWaiter(self._clock)
        self._polling = True
        try:
            while True:
                if self._must_commit:
                    await _aside(lambda: self._auto_commit(self._feeds))
                if self._must_follow:
                    await self._follow()
                with self._line.in_line(waiter):
                    found = self._fetch(count)  # what came before we stood in line would wake nobody
                    if found or self._is_over(until_ns):
                        return found
                    if not self._must_follow:
                        await waiter.wait(self._wait_s(until_ns))
                self._check_open()
        finally:
            self._polling = False
            self._polled_ms = self._now_ms()


async def _told(answer: Any) -> None:
    """What the user was told may be told to a coroutine."""
    if isawaitable(answer):
        await answer


async def _aside(call: Callable[[], _Result]) -> _Result:
    """Something that may wait for the disk, on a thread. It is never left half done: who is cancelled waits for it."""
    done = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        await asyncio.gather(done, return_exceptions=True)  # whatever came of it
        raise
