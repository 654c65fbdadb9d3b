"""Groups and queues behind a server, for tasks: the same names, awaited."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Generic, Self

from holdfast.broker.group import Compacted, QueueStats
from holdfast.broker.metrics import Observer
from holdfast.broker.tracing.steps import TraceStep
from holdfast.client.dead import AsyncRemoteDeadLetters
from holdfast.client.group_face import GroupFace, StateOf
from holdfast.client.messages import RemoteContents, RemoteHandle, RemoteListed
from holdfast.client.streams import publish_stream
from holdfast.embedded.aio import AsyncQueue
from holdfast.embedded.aio_group import AsyncGroup
from holdfast.embedded.drafts import HeadersLike, NewMessage, Seconds, Text, message_of
from holdfast.embedded.face import waiting
from holdfast.embedded.handle import INTERRUPTIONS
from holdfast.embedded.listed import PhaseName
from holdfast.embedded.listing import Where
from holdfast.embedded.message import Body
from holdfast.embedded.publisher import Stored
from holdfast.embedded.streaming import AsyncStream
from holdfast.errors import Closed, LeaseLost, Unavailable
from holdfast.model import CodecName, Durability, Retained


class AsyncRemoteState(StateOf):
    """The document that goes with a message from one holder to the next, until it is acked."""

    async def load(self) -> Any:
        """The document, or None."""
        return await self._load()

    async def save(self, value: Any, *, durability: Durability | None = None) -> None:
        """Replace it, if nobody has since it was loaded: Conflict otherwise. None takes it away."""
        await self._save(value, durability)


class AsyncRemoteMessage(RemoteHandle[Body], Generic[Body]):
    """A message in hand. As a context manager: ack on success, nack with the error on an exception."""

    __slots__ = ()

    async def ack(self, *, durability: Durability | None = None) -> None:
        """It is handled and never comes back."""
        await self._face._ack([self], durability)

    async def nack(self, *, delay: Seconds | None = None, error: object = None) -> None:
        """It failed: again after the queue's backoff, or after `delay`; to the dead letters after the last attempt."""
        await self._face._nack([self], delay, error)

    async def defer(self, *, delay: Seconds = 0) -> None:
        """Not now: it comes back without counting as an attempt."""
        await self._face._defer(self, delay)

    async def reject(self, reason: object = "") -> None:
        """It can never be handled: straight to the dead letters."""
        await self._face._reject(self, reason)

    async def extend(self, lease: Seconds | None = None) -> None:
        """So much time from now on; the queue's own lease where none is given. 0 gives it back now, as `defer` does."""
        await self._face._extend(self, lease)

    @property
    def state(self) -> AsyncRemoteState:
        if self._state is None:
            self._state = AsyncRemoteState(self)
        state: AsyncRemoteState = self._state
        return state

    async def __aenter__(self) -> AsyncRemoteMessage[Body]:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._settled:
            return
        if error is None:
            await self.ack()
            return
        if isinstance(error, INTERRUPTIONS):
            self._settled = True  # by the thread beside: a task that is being cancelled should not wait for a server
            self._face._let_go(self._held)
            return
        try:
            await self.nack(error=error)
        except (LeaseLost, Closed, Unavailable) as late:
            error.add_note(f"the message could not be given back: {late}")


class AsyncRemoteGroup(GroupFace[Body], Generic[Body]):
    """A group of consumers in queue mode, behind a server, for the tasks of any event loop."""

    _message = AsyncRemoteMessage

    async def receive(
        self,
        block: bool = True,  # noqa: FBT001, FBT002  as in queue.Queue: get(True, 1)
        timeout: Seconds | None = None,
        *,
        lease: Seconds | None = None,
        holder: str | None = None,
        renew: bool = False,
        detached: bool = False,
    ) -> AsyncRemoteMessage[Body]:
        """The next message. Waits for one, unless block=False; Empty when the time is over.

        `RemoteGroup.receive` says more.
        """
        found: AsyncRemoteMessage[Body] = await self._receive_one(
            waiting(block, timeout), lease, holder, renew=renew, detached=detached
        )
        return found

    async def receive_nowait(self, *, lease: Seconds | None = None) -> AsyncRemoteMessage[Body]:
        """The next message, or Empty at once."""
        return await self.receive(timeout=0, lease=lease)

    async def receive_many(
        self,
        count: int,
        *,
        timeout: Seconds | None = None,
        lease: Seconds | None = None,
        holder: str | None = None,
        renew: bool = False,
        detached: bool = False,
    ) -> list[AsyncRemoteMessage[Body]]:
        """What is there, up to `count`; waits for at least one, and answers [] when the time is over."""
        return await self._receive(count, timeout, lease, holder, renew=renew, detached=detached)

    async def __aiter__(self) -> AsyncIterator[AsyncRemoteMessage[Body]]:
        """Every message as it comes, until it is closed."""
        while not self.closed:
            try:
                message = await self.receive()
            except Closed:
                return
            yield message
            del message  # not while waiting for the next one: it may have been dropped

    async def resume(self, receipt: str) -> AsyncRemoteMessage[Body]:
        """The message that a receipt of an earlier `get` stands for; LeaseLost if it is no longer held."""
        found: AsyncRemoteMessage[Body] = await self._resume(receipt)
        return found

    async def ack_many(
        self, messages: Sequence[AsyncRemoteMessage[Body]], *, durability: Durability | None = None
    ) -> None:
        """Ack messages in one go. LeaseLost names those that were lost; the others are acked."""
        await self._ack(messages, durability)

    async def nack_many(
        self, messages: Sequence[AsyncRemoteMessage[Body]], *, delay: Seconds | None = None, error: object = None
    ) -> None:
        """Nack messages in one go. LeaseLost if some were lost; the others are nacked."""
        await self._nack(messages, delay, error)

    async def peek(self, count: int = 1) -> list[RemoteContents[Body]]:
        """The messages that would come next, without taking them."""
        return await self._peek(count)

    async def cancel(self, message_id: str) -> bool:
        """Take back a message that nobody works on; False where it is too late."""
        return await self._cancel(message_id)

    async def history(self, message_id: str) -> list[TraceStep]:
        """Every step of a message that is still kept, living, done or dead: who had it, when, and how that ended.

        With the steps of the messages that it was redriven into or out of. NotFound where there is no such message.
        """
        return await self._history(message_id)

    async def committed(self) -> dict[int, int]:
        """For each partition the end of the contiguous run of messages that are settled, from the start on."""
        return await self._committed()

    async def seek(
        self,
        to: str | None = None,
        *,
        offset: int | None = None,
        time: datetime | None = None,
        partition: int | None = None,
    ) -> int:
        """Go on from there: all before is passed over, all behind comes again. The one way that done comes back."""
        return await self._seek(to, offset, time, partition)

    async def messages(
        self, phase: PhaseName = "ready", *, where: Where = None, limit: int | None = None
    ) -> AsyncIterator[RemoteListed[Body]]:
        """What is ready, leased, delayed or dead, without taking it. `where`: a function or an expression."""
        listing = self._listing(phase, where, limit)
        while some := await listing.page():
            for message in some:
                yield message

    @property
    def dead(self) -> AsyncRemoteDeadLetters[Body]:
        """The dead letters."""
        return AsyncRemoteDeadLetters(self)

    async def stats(self) -> QueueStats:
        """How many messages stand where, what they take, and what was counted since the server began."""
        return await self._stats()

    async def purge(self) -> int:
        """Drop every message that nobody has in hand; answers how many. Dead letters have a `purge` of their own.

        Delayed ones are dropped with them, unless others read the topic, too: then those are theirs as well.
        """
        return await self._purge()

    async def compact(self) -> Compacted:
        """Let go of what is done now, whatever retention says; answers with what that freed."""
        return await self._compact()

    async def apply_retention(self) -> Retained:
        """Drop now what the topic's retention settings let go, as upkeep does in time; answers with what is gone."""
        return await self._apply_retention()

    def observe(self, observer: Observer | None) -> None:
        """Refused: the server counts and measures; its /metrics tells."""
        raise self._unobserved(observer)

    async def close(self) -> None:
        """Let go of this view; what it has in hand stays so, and the group goes on. Closing twice is fine."""
        self._closed = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


class AsyncRemoteQueue(AsyncRemoteGroup[Body], Generic[Body]):
    """A durable queue behind a server, for the tasks of any event loop."""

    async def put(
        self,
        body: Body,
        *,
        key: Text | None = None,
        headers: HeadersLike | None = None,
        priority: int = 0,
        delay: Seconds | None = None,
        at: datetime | None = None,
        ttl: Seconds | None = None,
        dedup_id: Text | None = None,
        correlation_id: str | None = None,
        durability: Durability | None = None,
        codec: CodecName | None = None,
    ) -> Stored:
        """Store a message; returns when it is as durable as asked."""
        message = message_of(body, key, headers, priority, delay, at, ttl, dedup_id, correlation_id)
        return (await self._put([message], durability, codec))[0]

    async def put_many(
        self,
        messages: Iterable[Body | NewMessage],
        *,
        durability: Durability | None = None,
        codec: CodecName | None = None,
    ) -> list[Stored]:
        """Store messages, all of them or none; an item is a body or a NewMessage."""
        return await self._put(messages, durability, codec)

    async def put_stream(
        self, stream: AsyncStream, *, size_hint: int | None = None, durability: Durability | None = None, **options: Any
    ) -> Stored:
        """Store what an (async) iterator of bytes or a binary file gives as one message.

        `options` are those of `put`, but `codec`.
        """
        self._check_open()
        return await publish_stream(
            self._client.publishing, self._topic, stream, None, size_hint, durability or self._durability, options
        )

    put_nowait = put  # it never waits for room: a disk that is full is told at once
    get = AsyncRemoteGroup.receive
    get_nowait = AsyncRemoteGroup.receive_nowait
    get_many = AsyncRemoteGroup.receive_many

    async def qsize(self) -> int:
        """How many messages are ready. Others may take or put some before you act on it."""
        return await self._qsize()

    async def empty(self) -> bool:
        """Whether none is ready now."""
        return await self.qsize() == 0

    async def sync(self) -> None:
        """Return when everything said so far, acks included, is on disk."""
        await self._sync()

    async def close(self) -> None:
        """Let go of the queue, and of the connection where it is this queue's own. Closing twice is fine."""
        await super().close()
        if self._alone:
            await self._client.close_async()


# One program, wherever the queue is: what takes the one takes the other.
AsyncGroup.register(AsyncRemoteGroup)
AsyncQueue.register(AsyncRemoteQueue)
