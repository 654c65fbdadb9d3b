"""The producer for tasks: the same names, awaited. A task of its own stores what was gathered."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator, Iterable
from contextlib import suppress
from datetime import datetime
from types import TracebackType
from typing import Any

from holdfast.api.drafts import HeadersLike, NewMessage, Seconds, Stored, Text
from holdfast.api.times import duration_ms
from holdfast.broker.engine import BrokerEngine
from holdfast.broker.partition import Publication
from holdfast.embedded.parcels import Lane, Parcel, Sent, SentMany, Span
from holdfast.embedded.producing import AFTER_ERROR_NS, Placed, Producing, Writing
from holdfast.embedded.route import Route
from holdfast.errors import HoldfastError, InvalidRequest, QueueFull, Unavailable
from holdfast.settings import ProducerSettings

logger = logging.getLogger(__name__)


class AsyncSent:
    """A message that was sent: await it for what comes of it."""

    __slots__ = ("_index", "_parcel", "_producer")

    def __init__(self, producer: AsyncProducer, sent: Sent) -> None:
        self._producer = producer
        self._parcel = sent._parcel
        self._index = sent._index

    def done(self) -> bool:
        """Whether the answer is there."""
        return self._parcel.done or self._parcel.unheeded

    def __await__(self) -> Generator[Any, None, Stored | None]:
        if not self.done():
            yield from self._producer._answer(self._parcel).__await__()
        return self._parcel.stored(self._index)


class AsyncSentMany:
    """What `send_many` answers: await it for the places of all of them, in the order of the call."""

    __slots__ = ("_producer", "_sent")

    def __init__(self, producer: AsyncProducer, sent: SentMany) -> None:
        self._producer = producer
        self._sent = sent

    def done(self) -> bool:
        """Whether all answers are there."""
        return self._sent.done()

    def __len__(self) -> int:
        return len(self._sent)

    def __getitem__(self, index: int) -> AsyncSent:
        return AsyncSent(self._producer, self._sent[index])

    def __await__(self) -> Generator[Any, None, list[Stored | None]]:
        for parcel in self._sent.parcels():
            if not parcel.done and not parcel.unheeded:
                yield from self._producer._answer(parcel).__await__()
        return self._sent.result(0)


class AsyncProducer(Producing):
    """Sends messages to topics, many at once, for the tasks of one event loop.

    It begins with `async with`, or with its first message: one with a name fences those before it from then on.
    """

    def __init__(
        self,
        engine: BrokerEngine,
        settings: ProducerSettings | None = None,
        *,
        name: str | None = None,
        resume: bool = False,
        body_type: Any = None,
    ) -> None:
        super().__init__(engine, settings, name=name, resume=resume, body_type=body_type)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self._beginning = asyncio.Lock()
        self._work = asyncio.Event()
        self._room = asyncio.Event()
        self._accumulator.on_work = self._work.set
        self._accumulator.on_room = self._room.set
        self._answers: dict[Parcel, asyncio.Event] = {}

    async def send(
        self,
        topic: str,
        body: Any,
        *,
        key: Text | None = None,
        headers: HeadersLike | None = None,
        priority: int = 0,
        delay: Seconds | None = None,
        at: datetime | None = None,
        ttl: Seconds | None = None,
        dedup_id: Text | None = None,
        correlation_id: str | None = None,
        partition: int | None = None,
    ) -> AsyncSent:
        """Send a message; waits only for room. Await what is returned for the answer."""
        route = await self._route(topic)
        options = (headers, delay, at, ttl, dedup_id, correlation_id)
        placed = self._place(route, body, key, priority, options, partition)
        turns = int(key is None and partition is None and dedup_id is None)
        return AsyncSent(self, self._put(placed) or await self._insist(placed, turns=turns))

    async def send_many(
        self, topic: str, messages: Iterable[Any | NewMessage], *, partition: int | None = None
    ) -> AsyncSentMany:
        """Send messages; an item is a body or a NewMessage. Await what is returned for the answers."""
        route = await self._route(topic)
        messages = self._check_many(messages)
        spans: list[Span] = []
        turns_of = route if partition is None and self._all_plain(route, messages) else None
        try:
            await self._spread(route, messages, partition, spans)
        except HoldfastError as error:
            self._note_taken(error, spans, len(messages), turns_of)
            raise
        return AsyncSentMany(self, SentMany(spans, len(messages)))

    async def _spread(self, route: Route, messages: list[Any], partition: int | None, spans: list[Span]) -> None:
        if self._all_plain(route, messages):
            for lane, first, end, size in self._pieces(route, messages, partition):
                added = self._accumulator.extend(lane, messages[first:end], size)
                deadline_ns = self._deadline_ns(self.settings.block_ms / 1000)
                while added is None:
                    await self._make_way(lane, deadline_ns)
                    added = self._accumulator.extend(lane, messages[first:end], size)
                spans.append((*added, range(first, end)))
            return
        for i, message in enumerate(messages):
            new = message if isinstance(message, NewMessage) else NewMessage(body=message)
            placed = self._place_new(route, new, partition)
            turns = int(new.key is None and partition is None and new.dedup_id is None)
            sent = self._put(placed) or await self._insist(placed, turns=turns)
            spans.append((sent._parcel, sent._index, (i,)))

    async def flush(self, timeout: Seconds | None = None) -> None:
        """Send what was gathered and wait for its answers; raises the first error that nobody was told of yet."""
        await self._drain(None if timeout is None else duration_ms(timeout, "timeout") / 1000)
        self._raise_unseen()

    async def close(self, timeout: Seconds | None = None) -> None:
        """Send what is left, wait for its answers, end. What is not stored in time is answered with Closed."""
        if self._closed:
            return
        timeout_s = None if timeout is None else duration_ms(timeout, "timeout") / 1000
        self._closed = True
        try:
            await self._drain(timeout_s)
        except Unavailable:
            pass  # answered below
        finally:
            self._stopping = True
            self._work.set()
            if self._task is not None:
                await asyncio.wait([self._task])
            self._let_go()  # first: from then on nothing more comes in
            self._give_up()
            self._wake_answered()
        self._raise_unseen()

    async def __aenter__(self) -> AsyncProducer:
        await self._get_id()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except HoldfastError as failure:
            if error is None:
                raise
            error.add_note(f"messages were not stored: {failure}")

    async def _route(self, topic: str) -> Route:
        self._begin()
        if not self._sender.begun:
            await self._get_id()
        try:
            return self._routes[topic]
        except (KeyError, TypeError):
            return await asyncio.to_thread(self._open_route, topic)

    async def _get_id(self) -> None:
        async with self._beginning:
            await asyncio.to_thread(self._sender.begin)

    def _begin(self) -> None:
        """Check that it may be used here; its task begins with the first message."""
        if self._closed or self._engine.closed or self._sender.failure is not None:
            self._check_open()
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise InvalidRequest("this producer belongs to another event loop; make one for each loop")
        if self._task is None:
            self._task = loop.create_task(self._run(), name="holdfast-producer")

    async def _run(self) -> None:
        while not self._stopping:
            self._work.clear()
            try:
                later_ns = await self._round()
            except Exception:  # whatever it was: without its task a producer would stand still, and nobody knew
                logger.exception("a round failed", extra={"folder": self._engine.folder})
                later_ns = self._clock.monotonic_ns() + AFTER_ERROR_NS
            left_s = None if later_ns is None else max(later_ns - self._clock.monotonic_ns(), 0) / 1e9
            if left_s is None or left_s > 0:
                await self._clock.wait_async(self._work, left_s)
            else:
                await asyncio.sleep(0)

    async def _round(self) -> int | None:
        """Store what is due now; answers when more will be."""
        now_ns = self._clock.monotonic_ns()
        await self._open_sequences(now_ns)
        await asyncio.gather(*[self._finish(writing, now_ns) for writing in self._write_due(now_ns)])
        self._wake_answered()
        return self._next_ns(now_ns)

    async def _open_sequences(self, now_ns: int) -> None:
        """Read what partitions know of producers before they are written to, and not in the loop's time."""
        for lane in list(self._accumulator.active):
            if not self.settings.idempotent or not lane.queue or lane.queue[0].due_ns > now_ns:
                continue
            with suppress(Exception):  # then writing meets it again, and answers with it
                partition = lane.route.topic.partition(lane.number)
                if partition.sequences is None:
                    await asyncio.to_thread(partition.open_sequences)

    async def _finish(self, writing: Writing, now_ns: int) -> None:
        parcel, partition, waiting = writing
        try:
            if isinstance(waiting, Publication):
                await partition.wait_async(waiting)
            else:
                await partition.log.wait_async(waiting)
        except Exception as error:
            self._failed_later(parcel, error, now_ns)
        else:
            self._accumulator.settle(parcel)

    async def _answer(self, parcel: Parcel, timeout_s: float | None = None) -> bool:
        """Return when the parcel is answered, or when the time is over; answers whether it is."""
        deadline_ns = self._deadline_ns(timeout_s)
        while not parcel.done:
            left_s = self._left_s(deadline_ns)
            if left_s is not None and left_s <= 0:
                return False
            event = self._answers.setdefault(parcel, asyncio.Event())
            await self._clock.wait_async(event, left_s)
        return True

    def _wake_answered(self) -> None:
        for parcel in [parcel for parcel in self._answers if parcel.done]:
            self._answers.pop(parcel).set()

    async def _insist(self, placed: Placed, *, turns: int = 0) -> Sent:
        """Take a message in as soon as there is room for it; the turns that it had are free where there is none."""
        deadline_ns = self._deadline_ns(self.settings.block_ms / 1000)
        while True:
            try:
                await self._make_way(placed[0], deadline_ns)
            except QueueFull:
                placed[0].route.give_back(turns)
                raise
            sent = self._put(placed)
            if sent is not None:
                return sent

    async def _make_way(self, lane: Lane, deadline_ns: int | None) -> None:
        """Open the topic again where it was let go; otherwise wait until something was stored."""
        self._check_open()
        if not lane.route.usable:
            await asyncio.to_thread(self._open_route, lane.route.name)
            return
        self._room.clear()
        if not self._accumulator.hurry():
            return  # all was stored just now
        left_s = self._left_s(deadline_ns)
        if left_s is not None and left_s <= 0:
            raise self._full()
        await self._clock.wait_async(self._room, left_s)

    async def _drain(self, timeout_s: float | None) -> None:
        deadline_ns = self._deadline_ns(timeout_s)
        for parcel in self._accumulator.hurry():
            if not await self._answer(parcel, self._left_s(deadline_ns)):
                raise Unavailable(f"not everything was stored within {timeout_s:g} s; it is still on its way")
