"""The queue for tasks: the same names, awaited. The event loop never waits for the disk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from datetime import datetime
from functools import partial
from itertools import islice
from os import PathLike
from types import TracebackType
from typing import Any, Final, Generic, TypeVar

from holdfast.broker.engine import Compacted, QueueStats
from holdfast.broker.hands import Delivered
from holdfast.broker.layout import parse_receipt
from holdfast.broker.metrics import Observer
from holdfast.broker.waiters import TaskWaiter
from holdfast.embedded.dead import DeadGroup, DeadLetters, Redriven
from holdfast.embedded.drafts import HeadersLike, NewMessage, Seconds, Text
from holdfast.embedded.face import Face, Stored, Wanted, open_face
from holdfast.embedded.handle import INTERRUPTIONS, Handle, StateOf
from holdfast.embedded.listed import DeadLetter, Listed, PhaseName
from holdfast.embedded.listing import Where, listed
from holdfast.embedded.message import Body, Contents
from holdfast.env import World
from holdfast.errors import Closed, LeaseLost
from holdfast.model import CodecName, Durability
from holdfast.settings import QueueSettings

_Result = TypeVar("_Result")

_LISTED_AT_ONCE: Final = 64  # a way to a thread and back costs more than a message


class AsyncState(StateOf):
    """The document that goes with a message from one holder to the next, until it is acked."""

    async def load(self) -> Any:
        """The document, or None."""
        return self._load()

    async def save(self, value: Any, *, durability: Durability | None = None) -> None:
        """Replace it, if nobody has since it was loaded: Conflict otherwise. None takes it away."""
        await self._handle._engine.wait_async(self._save(value, durability))


class AsyncMessage(Handle[Body]):
    """A message in hand. As a context manager: ack on success, nack with the error on an exception."""

    __slots__ = ("_state",)
    _state: AsyncState

    async def ack(self, *, durability: Durability | None = None) -> None:
        """It is handled and never comes back."""
        await self._engine.wait_async(self._face._ack_all([self], durability))

    async def nack(self, *, delay: Seconds | None = None, error: object = None) -> None:
        """It failed: again after the queue's backoff, or after `delay`; to the dead letters after the last attempt."""
        await self._engine.wait_async(self._last(self._face._nack, delay, error))

    async def defer(self, *, delay: Seconds = 0) -> None:
        """Not now: it comes back without counting as an attempt."""
        await self._engine.wait_async(self._last(self._face._defer, delay))

    async def reject(self, reason: object = "") -> None:
        """It can never be handled: straight to the dead letters."""
        await self._engine.wait_async(self._last(self._face._reject, reason))

    async def extend(self, lease: Seconds | None = None) -> None:
        """So much time from now on; the queue's own lease where none is given."""
        await self._engine.wait_async(self._face._extend([self._delivered.receipt], lease))

    @property
    def state(self) -> AsyncState:
        try:
            return self._state
        except AttributeError:
            self._state = AsyncState(self)
            return self._state

    async def __aenter__(self) -> AsyncMessage[Body]:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._settled:
            return
        if error is None:
            await self.ack()
            return
        try:
            if isinstance(error, INTERRUPTIONS):
                await self.defer()
            else:
                await self.nack(error=error)
        except (LeaseLost, Closed) as late:
            error.add_note(f"the message could not be given back: {late}")


class AsyncDeadLetters(Generic[Body]):
    """What `queue.dead` is, for tasks."""

    def __init__(self, letters: DeadLetters[Body]) -> None:
        self._letters = letters

    async def list(self, *, where: Where = None, limit: int | None = None) -> Sequence[DeadLetter[Body]]:
        """The dead letters that the condition chooses, oldest first."""
        return await asyncio.to_thread(self._letters.list, where=where, limit=limit)

    async def show(self, letter_id: str) -> DeadLetter[Body]:
        """One of them."""
        return await asyncio.to_thread(self._letters.show, letter_id)

    async def groups(self, *, where: Where = None) -> Sequence[DeadGroup]:
        """The dead letters by reason and kind of error, the most frequent first."""
        return await asyncio.to_thread(self._letters.groups, where=where)

    async def redrive(
        self,
        ids: str | Iterable[str] | None = None,
        *,
        where: Where = None,
        limit: int | None = None,
        rate: float | None = None,
        dry_run: bool = False,
    ) -> Redriven:
        """Put dead letters back into the queue, in their original order, each once; `rate` is messages a second."""
        return await asyncio.to_thread(self._letters.redrive, ids, where=where, limit=limit, rate=rate, dry_run=dry_run)

    async def purge(
        self,
        ids: str | Iterable[str] | None = None,
        *,
        where: Where = None,
        limit: int | None = None,
        dry_run: bool = False,
    ) -> Redriven:
        """Drop dead letters for good."""
        return await asyncio.to_thread(self._letters.purge, ids, where=where, limit=limit, dry_run=dry_run)


class AsyncQueue(Face[Body], Generic[Body]):
    """A durable queue in a folder, for the tasks of any event loop."""

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
        began_ns = self._mono_ns()
        options = (key, headers, delay, at, ttl, dedup_id, correlation_id, codec)
        if self._is_plain(body, options, priority):
            appended = await self._log.append_one_async(body, durability)  # type: ignore[arg-type]
            return self._plain_stored(body, appended, began_ns)
        message = NewMessage(
            body=body,
            key=key,
            headers=headers,
            priority=priority,
            delay=delay,
            at=at,
            ttl=ttl,
            dedup_id=dedup_id,
            correlation_id=correlation_id,
        )
        return (await self.put_many([message], durability=durability, codec=codec))[0]

    async def put_many(
        self,
        messages: Iterable[Body | NewMessage],
        *,
        durability: Durability | None = None,
        codec: CodecName | None = None,
    ) -> list[Stored]:
        """Store messages, all of them or none; an item is a body or a NewMessage."""
        began_ns = self._mono_ns()
        if self._all_plain(messages, codec):
            appended = await self._log.append_async(messages, durability=durability)  # type: ignore[arg-type]
            return self._plain_many(messages, appended, began_ns)
        publication = self._publish(messages, durability, codec)
        await self._engine.partition.wait_async(publication)
        return self._stored(publication, began_ns)

    async def get(
        self,
        *,
        timeout: Seconds | None = None,
        lease: Seconds | None = None,
        holder: str | None = None,
        renew: bool = False,
        detached: bool = False,
    ) -> AsyncMessage[Body]:
        """The next message. Waits for one; Empty when the time is over."""
        wanted = self._wanted(1, timeout, lease, holder, renew=renew, detached=detached)
        taken = self._take(wanted) or await self._await(wanted)
        if not taken:
            raise self._empty(wanted)
        return AsyncMessage(self, taken[0])

    async def get_nowait(self, *, lease: Seconds | None = None) -> AsyncMessage[Body]:
        """The next message, or Empty at once."""
        return await self.get(timeout=0, lease=lease)

    async def get_many(
        self,
        count: int,
        *,
        timeout: Seconds | None = None,
        lease: Seconds | None = None,
        holder: str | None = None,
        renew: bool = False,
        detached: bool = False,
    ) -> list[AsyncMessage[Body]]:
        """What is there, up to `count`; waits for at least one, and answers [] when the time is over."""
        wanted = self._wanted(count, timeout, lease, holder, renew=renew, detached=detached)
        return [AsyncMessage(self, delivered) for delivered in self._take(wanted) or await self._await(wanted)]

    async def __aiter__(self) -> AsyncIterator[AsyncMessage[Body]]:
        """Every message as it comes, until the queue is closed."""
        while not self.closed:
            try:
                message = await self.get()
            except Closed:
                return
            yield message
            del message  # not while waiting for the next one: it may have been dropped

    async def resume(self, receipt: str) -> AsyncMessage[Body]:
        """The message that a receipt of an earlier `get` stands for; LeaseLost if it is no longer held."""
        return AsyncMessage(self, self._engine.resume(parse_receipt(receipt, self.name)))

    async def ack_many(self, messages: Sequence[AsyncMessage[Body]], *, durability: Durability | None = None) -> None:
        """Ack messages in one go. LeaseLost names those that were lost; the others are acked."""
        await self._engine.wait_async(self._ack_all(messages, durability))

    async def nack_many(
        self, messages: Sequence[AsyncMessage[Body]], *, delay: Seconds | None = None, error: object = None
    ) -> None:
        """Nack messages in one go. LeaseLost if some were lost; the others are nacked."""
        await self._engine.wait_async(self._nack_all(messages, delay, error))

    async def peek(self, count: int = 1) -> list[Contents[Body]]:
        """The messages that would come next, without taking them."""
        return await self._aside(self._peek, count)

    async def cancel(self, message_id: str) -> bool:
        """Take back a message that nobody works on; False where it is too late."""
        return await self._aside(self._engine.cancel, message_id)

    async def seek(self, to: str | None = None, *, offset: int | None = None, time: datetime | None = None) -> int:
        """Go on from there: all before is passed over, all behind comes again. The one way that done comes back."""
        return await self._aside(self._seek, to, offset, time)

    async def messages(
        self, phase: PhaseName = "ready", *, where: Where = None, limit: int | None = None
    ) -> AsyncIterator[Listed[Body]]:
        """What is ready, leased, delayed or dead, without taking it. `where`: a function or an expression."""
        found = listed(self, phase, where, limit)
        some: list[Listed[Body]]
        while some := await self._aside(list, islice(found, _LISTED_AT_ONCE)):
            for message in some:
                yield message

    @property
    def dead(self) -> AsyncDeadLetters[Body]:
        """The dead letters."""
        return AsyncDeadLetters(DeadLetters(self))

    async def stats(self) -> QueueStats:
        """How many messages stand where, what they take, and what was counted since opening."""
        return await self._aside(self._stats)

    async def compact(self) -> Compacted:
        """Let go of what is done now, whatever retention says; answers with what that freed."""
        return await self._aside(self._compact)

    async def sync(self) -> None:
        """Return when everything said so far, acks included, is on disk."""
        await self._aside(self._engine.sync)

    async def close(self) -> None:
        """Sync and let go of the folder; messages in hand come back at the next opening. Closing twice is fine."""
        await self._aside(self._engine.close)

    async def __aenter__(self) -> AsyncQueue[Body]:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _aside(self, call: Callable[..., _Result], *arguments: Any) -> _Result:
        """Something that may wait for the disk, on a thread."""
        return await asyncio.to_thread(call, *arguments)

    async def _await(self, wanted: Wanted) -> list[Delivered]:
        """Wait in line for a message."""
        if wanted.timeout_s == 0:
            return []
        deadline_ns = self._deadline_ns(wanted)
        waiters, waiter = self._delivery.waiters, TaskWaiter(self._engine.world.clock)
        while True:
            with waiters.in_line(waiter):
                taken = self._take(wanted)  # what came before we stood in line would wake nobody
                left_s = self._left_s(deadline_ns)
                if not taken and (left_s is None or left_s > 0):
                    await waiter.wait(left_s)
                    continue
            if taken and waiter.woken:
                waiters.wake()  # that was for another message than ours
            return taken


class Opening:
    """A queue that is being opened: `await` it, or enter it with `async with`."""

    def __init__(self, open_it: Callable[[], AsyncQueue[Any]]) -> None:
        self._open = open_it
        self._queue: AsyncQueue[Any] | None = None

    def __await__(self) -> Generator[Any, None, AsyncQueue[Any]]:
        return self._opened().__await__()

    async def __aenter__(self) -> AsyncQueue[Any]:
        self._queue = await self._opened()
        return self._queue

    async def _opened(self) -> AsyncQueue[Any]:
        """A thread cannot be cancelled: what it opens for nobody is closed again, or its folder would stay locked."""
        opened: Future[AsyncQueue[Any]] = Future()
        try:
            return await asyncio.to_thread(self._open_into, opened)
        except asyncio.CancelledError:
            opened.add_done_callback(lambda done: done.result()._engine.close())
            raise

    def _open_into(self, opened: Future[AsyncQueue[Any]]) -> AsyncQueue[Any]:
        queue = self._open()
        opened.set_result(queue)
        return queue

    async def __aexit__(self, *exc: object) -> None:
        if self._queue is not None:
            await self._queue.close()


def open(  # noqa: A001  the same name as in the module for threads
    folder: str | PathLike[str],
    *,
    create: bool = True,
    durability: Durability | None = None,
    body_type: Any = None,
    settings: QueueSettings | None = None,
    observer: Observer | None = None,
    world: World | None = None,
    **changes: Any,
) -> Opening:
    """Open the queue in a folder; `holdfast.open` says what the arguments mean."""
    return Opening(
        partial(
            open_face,
            AsyncQueue,
            folder,
            create=create,
            durability=durability,
            body_type=body_type,
            settings=settings,
            observer=observer,
            world=world,
            changes=changes,
        )
    )
