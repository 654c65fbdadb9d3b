"""A group for threads: receive messages, settle them, look around. The queue is one, with put and get."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Generic, Self

from holdfast.broker.choose import give_way
from holdfast.broker.group import Compacted, QueueStats
from holdfast.broker.leases import Delivered
from holdfast.broker.station import Pending, Station
from holdfast.broker.tracing.steps import TraceStep
from holdfast.broker.waiters import ThreadWaiter, Waiter
from holdfast.embedded.dead import DeadLetters
from holdfast.embedded.drafts import Seconds
from holdfast.embedded.face import Face, Wanted, gives_back, waiting
from holdfast.embedded.handle import INTERRUPTIONS, Handle, StateOf
from holdfast.embedded.listed import Listed, PhaseName
from holdfast.embedded.listing import Where, listed
from holdfast.embedded.lookup import message_history
from holdfast.embedded.message import Body, Contents
from holdfast.errors import Closed, HoldfastError, LeaseLost
from holdfast.model import Durability, Retained


class State(StateOf):
    """The document that goes with a message from one holder to the next, until it is acked."""

    def load(self) -> Any:
        """The document, or None."""
        return self._load()

    def save(self, value: Any, *, durability: Durability | None = None) -> None:
        """Replace it, if nobody has since it was loaded: Conflict otherwise. None takes it away."""
        self._station.wait(self._save(value, durability))


class Message(Handle[Body], Generic[Body], eq=False, gc=False):
    """A message in hand. As a context manager: ack on success, nack with the error on an exception."""

    def ack(self, *, durability: Durability | None = None) -> None:
        """It is handled and never comes back."""
        if durability is None:
            try:
                self._face._ack_one(self._home, self._delivered)
            except LeaseLost:
                self._settled = True
                raise
            self._settled = True
        else:
            wait_all(self._face._ack_all([self], durability))

    def nack(self, *, delay: Seconds | None = None, error: object = None) -> None:
        """It failed: again after the queue's backoff, or after `delay`; to the dead letters after the last attempt."""
        self._home.wait(self._last(self._face._nack, delay, error))

    def defer(self, *, delay: Seconds = 0) -> None:
        """Not now: it comes back without counting as an attempt."""
        self._home.wait(self._last(self._face._defer, delay))

    def reject(self, reason: object = "") -> None:
        """It can never be handled: straight to the dead letters."""
        self._home.wait(self._last(self._face._reject, reason))

    def extend(self, lease: Seconds | None = None) -> None:
        """So much time from now on; the queue's own lease where none is given. 0 gives it back now, as `defer` does."""
        if gives_back(lease):
            self.defer()
            return
        self._home.wait(self._face._extend(self, lease))

    @property
    def state(self) -> State:
        if self._state is None:
            self._state = State(self)
        state: State = self._state
        return state

    def __enter__(self) -> Message[Body]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._settled:
            return
        if error is None:
            self.ack()
            return
        try:
            if isinstance(error, INTERRUPTIONS):
                self.defer()
            else:
                self.nack(error=error)
        except (LeaseLost, Closed) as late:
            error.add_note(f"the message could not be given back: {late}")


class Group(Face[Body], Generic[Body]):
    """A group of consumers in queue mode. Safe to use from any thread."""

    def receive(
        self,
        block: bool = True,  # noqa: FBT001, FBT002  as in queue.Queue: get(True, 1)
        timeout: Seconds | None = None,
        *,
        lease: Seconds | None = None,
        holder: str | None = None,
        renew: bool = False,
        detached: bool = False,
    ) -> Message[Body]:
        """The next message. Waits for one, unless block=False; Empty when the time is over.

        It is yours for `lease`; with `renew` for as long as you have it in hand. A detached lease outlives the
        process, for scripts that ack later by its receipt.
        """
        if block is True and not self._standing and self._is_usual(timeout, lease, holder, renew, detached):
            station = self._station if len(self._stations) == 1 else self._group.next_in_turn()
            try:
                one = station.delivery.receive_next()
            except HoldfastError:
                self._check_open()  # that it was closed says more
                raise
            if one is not None:
                return Message(self, station, one)
        wanted = self._wanted(1, waiting(block, timeout), lease, holder, renew=renew, detached=detached)
        taken = self._take_now(wanted) or self._await(wanted)
        if not taken:
            raise self._empty(wanted)
        station, (delivered, *_) = taken[0]
        return Message(self, station, delivered)

    def receive_nowait(self, *, lease: Seconds | None = None) -> Message[Body]:
        """The next message, or Empty at once."""
        return self.receive(timeout=0, lease=lease)

    def receive_many(
        self,
        count: int,
        *,
        timeout: Seconds | None = None,
        lease: Seconds | None = None,
        holder: str | None = None,
        renew: bool = False,
        detached: bool = False,
    ) -> list[Message[Body]]:
        """What is there, up to `count`; waits for at least one, and answers [] when the time is over."""
        wanted = self._wanted(count, timeout, lease, holder, renew=renew, detached=detached)
        found = self._take_now(wanted) or self._await(wanted)
        return [Message(self, station, delivered) for station, taken in found for delivered in taken]

    def __iter__(self) -> Iterator[Message[Body]]:
        """Every message as it comes, until it is closed."""
        while not self.closed:
            try:
                message = self.receive()
            except Closed:
                return
            yield message
            del message  # not while waiting for the next one: it may have been dropped

    def resume(self, receipt: str) -> Message[Body]:
        """The message that a receipt of an earlier `get` stands for; LeaseLost if it is no longer held."""
        self._check_open()
        return Message(self, *self._group.resume(receipt))

    def ack_many(self, messages: Sequence[Message[Body]], *, durability: Durability | None = None) -> None:
        """Ack messages in one go. LeaseLost names those that were lost; the others are acked."""
        wait_all(self._ack_all(messages, durability))

    def nack_many(
        self, messages: Sequence[Message[Body]], *, delay: Seconds | None = None, error: object = None
    ) -> None:
        """Nack messages in one go. LeaseLost if some were lost; the others are nacked."""
        wait_all(self._nack_all(messages, delay, error))

    def peek(self, count: int = 1) -> list[Contents[Body]]:
        """The messages that would come next, without taking them."""
        return self._peek(count)

    def cancel(self, message_id: str) -> bool:
        """Take back a message that nobody works on; False where it is too late."""
        self._check_open()
        return self._group.cancel(message_id)

    def history(self, message_id: str) -> list[TraceStep]:
        """Every step of a message that is still kept, living, done or dead: who had it, when, and how that ended.

        With the steps of the messages that it was redriven into or out of. NotFound where there is no such message.
        """
        self._check_open()
        return message_history(self, message_id)

    def committed(self) -> dict[int, int]:
        """For each partition the end of the contiguous run of messages that are settled, from the start on."""
        return self._committed()

    def seek(
        self,
        to: str | None = None,
        *,
        offset: int | None = None,
        time: datetime | None = None,
        partition: int | None = None,
    ) -> int:
        """Go on from there: all before is passed over, all behind comes again. The one way that done comes back."""
        return self._seek(to, offset, time, partition)

    def messages(
        self, phase: PhaseName = "ready", *, where: Where = None, limit: int | None = None
    ) -> Iterator[Listed[Body]]:
        """What is ready, leased, delayed or dead, without taking it. `where`: a function or an expression."""
        return listed(self, phase, where, limit)

    @property
    def dead(self) -> DeadLetters[Body]:
        """The dead letters."""
        return DeadLetters(self)

    def stats(self) -> QueueStats:
        """How many messages stand where, what they take, and what was counted since opening."""
        return self._stats()

    def purge(self) -> int:
        """Drop every message that nobody has in hand; answers how many. Dead letters have a `purge` of their own.

        Delayed ones are dropped with them, unless others read the topic, too: then those are theirs as well.
        """
        return self._purge()

    def compact(self) -> Compacted:
        """Let go of what is done now, whatever retention says; answers with what that freed."""
        return self._compact()

    def apply_retention(self) -> Retained:
        """Drop now what the topic's retention settings let go, as upkeep does in time; answers with what is gone."""
        return self._apply_retention()

    def close(self) -> None:
        """Let go of this view; what it has in hand stays so, and the group goes on. Closing twice is fine."""
        if not self._closed:
            self._closed = True
            self._group.topic.holders.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _take_now(self, wanted: Wanted, waiter: Waiter | None = None) -> list[tuple[Station, list[Delivered]]]:
        while (taken := self._take(wanted, waiter)) is None:
            give_way()
        return taken

    def _await(self, wanted: Wanted) -> list[tuple[Station, list[Delivered]]]:
        """Wait in line for a message."""
        if wanted.timeout_s == 0:
            return []
        deadline_ns = self._deadline_ns(wanted)
        group, waiter = self._group, ThreadWaiter(self._engine.world.clock, wanted.count)
        with group.in_line(waiter):
            while True:
                taken = self._take_now(wanted, waiter)  # what came before we stood in line would wake nobody
                left_s = self._left_s(deadline_ns)
                if taken or (left_s is not None and left_s <= 0):
                    return taken
                waiter.wait(left_s)
                group.waiters.stand(waiter)


def wait_all(pending: Sequence[tuple[Station, Pending]]) -> None:
    """Wait for what was decided in each partition, and tell of what was refused in any."""
    refused: LeaseLost | None = None
    for station, each in pending:
        try:
            station.wait(each)
        except LeaseLost as error:
            refused = error
    if refused is not None:
        raise refused
