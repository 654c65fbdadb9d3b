"""A group for tasks: the same names, awaited. The event loop never waits for the disk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from datetime import datetime
from itertools import islice
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

from holdfast.broker.group import Compacted, QueueStats
from holdfast.broker.leases import Delivered
from holdfast.broker.station import Pending, Station
from holdfast.broker.tracing.steps import TraceStep
from holdfast.broker.waiters import TaskWaiter, Waiter
from holdfast.embedded.dead import DeadGroup, DeadLetters, Redriven
from holdfast.embedded.drafts import Seconds
from holdfast.embedded.face import Face, Wanted, gives_back, waiting
from holdfast.embedded.handle import INTERRUPTIONS, Handle, StateOf
from holdfast.embedded.listed import DeadLetter, Listed, PhaseName
from holdfast.embedded.listing import Where, listed
from holdfast.embedded.lookup import message_history
from holdfast.embedded.message import Body, Contents
from holdfast.errors import Closed, LeaseLost
from holdfast.model import Durability, Retained

_Result = TypeVar("_Result")

_LISTED_AT_ONCE: Final = 64  # a way to a thread and back costs more than a message


class AsyncState(StateOf):
    """The document that goes with a message from one holder to the next, until it is acked."""

    async def load(self) -> Any:
        """The document, or None."""
        return self._load()

    async def save(self, value: Any, *, durability: Durability | None = None) -> None:
        """Replace it, if nobody has since it was loaded: Conflict otherwise. None takes it away."""
        await self._station.wait_async(self._save(value, durability))


class AsyncMessage(Handle[Body], Generic[Body], eq=False, gc=False):
    """A message in hand. As a context manager: ack on success, nack with the error on an exception."""

    async def ack(self, *, durability: Durability | None = None) -> None:
        """It is handled and never comes back."""
        await wait_all(self._face._ack_all([self], durability))

    async def nack(self, *, delay: Seconds | None = None, error: object = None) -> None:
        """It failed: again after the queue's backoff, or after `delay`; to the dead letters after the last attempt."""
        await self._home.wait_async(self._last(self._face._nack, delay, error))

    async def defer(self, *, delay: Seconds = 0) -> None:
        """Not now: it comes back without counting as an attempt."""
        await self._home.wait_async(self._last(self._face._defer, delay))

    async def reject(self, reason: object = "") -> None:
        """It can never be handled: straight to the dead letters."""
        await self._home.wait_async(self._last(self._face._reject, reason))

    async def extend(self, lease: Seconds | None = None) -> None:
        """So much time from now on; the queue's own lease where none is given. 0 gives it back now, as `defer` does."""
        if gives_back(lease):
            await self.defer()
            return
        await self._home.wait_async(self._face._extend(self, lease))

    @property
    def state(self) -> AsyncState:
        if self._state is None:
            self._state = AsyncState(self)
        state: AsyncState = self._state
        return state

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
        to: str | None = None,
    ) -> Redriven:
        """Put dead letters back into the queue, in their original order, each once; `rate` is messages a second.

        With `to` they become new messages of that topic instead, for all who read it.
        """
        return await asyncio.to_thread(
            self._letters.redrive, ids, where=where, limit=limit, rate=rate, dry_run=dry_run, to=to
        )

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


class AsyncGroup(Face[Body], Generic[Body]):
    """A group of consumers in queue mode, for the tasks of any event loop."""

    async def receive(
        self,
        block: bool = True,  # noqa: FBT001, FBT002  as in queue.Queue: get(True, 1)
        timeout: Seconds | None = None,
        *,
        lease: Seconds | None = None,
        holder: str | None = None,
        renew: bool = False,
        detached: bool = False,
    ) -> AsyncMessage[Body]:
        """The next message. Waits for one, unless block=False; Empty when the time is over."""
        wanted = self._wanted(1, waiting(block, timeout), lease, holder, renew=renew, detached=detached)
        taken = self._take(wanted)
        if not taken:
            taken = await self._await(wanted, unfinished=taken is None)
        if not taken:
            raise self._empty(wanted)
        station, (delivered, *_) = taken[0]
        return AsyncMessage(self, station, delivered)

    async def receive_nowait(self, *, lease: Seconds | None = None) -> AsyncMessage[Body]:
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
    ) -> list[AsyncMessage[Body]]:
        """What is there, up to `count`; waits for at least one, and answers [] when the time is over."""
        wanted = self._wanted(count, timeout, lease, holder, renew=renew, detached=detached)
        found = self._take(wanted)
        if not found:
            found = await self._await(wanted, unfinished=found is None)
        return [AsyncMessage(self, station, delivered) for station, taken in found for delivered in taken]

    async def __aiter__(self) -> AsyncIterator[AsyncMessage[Body]]:
        """Every message as it comes, until it is closed."""
        while not self.closed:
            try:
                message = await self.receive()
            except Closed:
                return
            yield message
            del message  # not while waiting for the next one: it may have been dropped

    async def resume(self, receipt: str) -> AsyncMessage[Body]:
        """The message that a receipt of an earlier `get` stands for; LeaseLost if it is no longer held."""
        self._check_open()
        return AsyncMessage(self, *self._group.resume(receipt))

    async def ack_many(self, messages: Sequence[AsyncMessage[Body]], *, durability: Durability | None = None) -> None:
        """Ack messages in one go. LeaseLost names those that were lost; the others are acked."""
        await wait_all(self._ack_all(messages, durability))

    async def nack_many(
        self, messages: Sequence[AsyncMessage[Body]], *, delay: Seconds | None = None, error: object = None
    ) -> None:
        """Nack messages in one go. LeaseLost if some were lost; the others are nacked."""
        await wait_all(self._nack_all(messages, delay, error))

    async def peek(self, count: int = 1) -> list[Contents[Body]]:
        """The messages that would come next, without taking them."""
        return await self._aside(self._peek, count)

    async def cancel(self, message_id: str) -> bool:
        """Take back a message that nobody works on; False where it is too late."""
        self._check_open()
        return await self._aside(self._group.cancel, message_id)

    async def history(self, message_id: str) -> list[TraceStep]:
        """Every step of a message that is still kept, living, done or dead: who had it, when, and how that ended.

        With the steps of the messages that it was redriven into or out of. NotFound where there is no such message.
        """
        self._check_open()
        return await self._aside(message_history, self, message_id)

    async def committed(self) -> dict[int, int]:
        """For each partition the end of the contiguous run of messages that are settled, from the start on."""
        return self._committed()

    async def seek(
        self,
        to: str | None = None,
        *,
        offset: int | None = None,
        time: datetime | None = None,
        partition: int | None = None,
    ) -> int:
        """Go on from there: all before is passed over, all behind comes again. The one way that done comes back."""
        return await self._aside(self._seek, to, offset, time, partition)

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

    async def purge(self) -> int:
        """Drop every message that nobody has in hand; answers how many. Dead letters have a `purge` of their own.

        Delayed ones are dropped with them, unless others read the topic, too: then those are theirs as well.
        """
        return await self._aside(self._purge)

    async def compact(self) -> Compacted:
        """Let go of what is done now, whatever retention says; answers with what that freed."""
        return await self._aside(self._compact)

    async def apply_retention(self) -> Retained:
        """Drop now what the topic's retention settings let go, as upkeep does in time; answers with what is gone."""
        return await self._aside(self._apply_retention)

    async def close(self) -> None:
        """Let go of this view; what it has in hand stays so, and the group goes on. Closing twice is fine."""
        if not self._closed:
            self._closed = True
            self._group.topic.holders.discard(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _aside(self, call: Callable[..., _Result], *arguments: Any) -> _Result:
        """Something that may wait for the disk, on a thread."""
        return await asyncio.to_thread(call, *arguments)

    async def _go_on(self, wanted: Wanted, waiter: Waiter | None = None) -> list[tuple[Station, list[Delivered]]]:
        """What is ready now, where a first look has not come to its end: other tasks have their turn in between."""
        taken = None
        while taken is None:
            await asyncio.sleep(0)
            taken = self._take(wanted, waiter)
        return taken

    async def _await(self, wanted: Wanted, *, unfinished: bool = False) -> list[tuple[Station, list[Delivered]]]:
        """Wait in line for a message; `unfinished`: a first look has not come to its end."""
        if wanted.timeout_s == 0:
            return await self._go_on(wanted) if unfinished else []
        deadline_ns = self._deadline_ns(wanted)
        group, waiter = self._group, TaskWaiter(self._engine.world.clock, wanted.count)
        with group.in_line(waiter):
            while True:
                taken = self._take(wanted, waiter)  # what came before we stood in line would wake nobody
                if taken is None:
                    taken = await self._go_on(wanted, waiter)
                left_s = self._left_s(deadline_ns)
                if taken or (left_s is not None and left_s <= 0):
                    return taken
                await waiter.wait(left_s)
                group.waiters.stand(waiter)


async def wait_all(pending: Sequence[tuple[Station, Pending]]) -> None:
    """Wait for what was decided in each partition, and tell of what was refused in any."""
    refused: LeaseLost | None = None
    for station, each in pending:
        try:
            await station.wait_async(each)
        except LeaseLost as error:
            refused = error
    if refused is not None:
        raise refused
