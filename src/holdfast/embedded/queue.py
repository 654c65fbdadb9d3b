"""The queue for threads: put and get, with a folder and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from os import PathLike
from types import TracebackType
from typing import Any, Generic

from holdfast.broker.engine import Compacted, QueueStats
from holdfast.broker.hands import Delivered
from holdfast.broker.layout import parse_receipt
from holdfast.broker.metrics import Observer
from holdfast.broker.waiters import ThreadWaiter
from holdfast.embedded.dead import DeadLetters
from holdfast.embedded.drafts import HeadersLike, NewMessage, Seconds, Text
from holdfast.embedded.face import Face, Stored, Wanted, open_face
from holdfast.embedded.handle import INTERRUPTIONS, Handle, StateOf
from holdfast.embedded.listed import Listed, PhaseName
from holdfast.embedded.listing import Where, listed
from holdfast.embedded.message import Body, Contents
from holdfast.env import World
from holdfast.errors import Closed, LeaseLost
from holdfast.model import CodecName, Durability
from holdfast.settings import QueueSettings


class State(StateOf):
    """The document that goes with a message from one holder to the next, until it is acked."""

    def load(self) -> Any:
        """The document, or None."""
        return self._load()

    def save(self, value: Any, *, durability: Durability | None = None) -> None:
        """Replace it, if nobody has since it was loaded: Conflict otherwise. None takes it away."""
        self._handle._engine.wait(self._save(value, durability))


class Message(Handle[Body]):
    """A message in hand. As a context manager: ack on success, nack with the error on an exception."""

    __slots__ = ("_state",)
    _state: State

    def ack(self, *, durability: Durability | None = None) -> None:
        """It is handled and never comes back."""
        if durability is None:
            try:
                self._face._ack_one(self._delivered)
            except LeaseLost:
                self._settled = True
                raise
            self._settled = True
        else:
            self._engine.wait(self._face._ack_all([self], durability))

    def nack(self, *, delay: Seconds | None = None, error: object = None) -> None:
        """It failed: again after the queue's backoff, or after `delay`; to the dead letters after the last attempt."""
        self._engine.wait(self._last(self._face._nack, delay, error))

    def defer(self, *, delay: Seconds = 0) -> None:
        """Not now: it comes back without counting as an attempt."""
        self._engine.wait(self._last(self._face._defer, delay))

    def reject(self, reason: object = "") -> None:
        """It can never be handled: straight to the dead letters."""
        self._engine.wait(self._last(self._face._reject, reason))

    def extend(self, lease: Seconds | None = None) -> None:
        """So much time from now on; the queue's own lease where none is given."""
        self._engine.wait(self._face._extend([self._delivered.receipt], lease))

    @property
    def state(self) -> State:
        try:
            return self._state
        except AttributeError:
            self._state = State(self)
            return self._state

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


class Queue(Face[Body], Generic[Body]):
    """A durable queue in a folder. Safe to use from any thread."""

    def put(
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
            return self._plain_stored(body, self._log.append_one(body, durability), began_ns)  # type: ignore[arg-type]
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
        return self.put_many([message], durability=durability, codec=codec)[0]

    def put_many(
        self,
        messages: Iterable[Body | NewMessage],
        *,
        durability: Durability | None = None,
        codec: CodecName | None = None,
    ) -> list[Stored]:
        """Store messages, all of them or none; an item is a body or a NewMessage."""
        began_ns = self._mono_ns()
        if self._all_plain(messages, codec):
            appended = self._log.append(messages, durability=durability)  # type: ignore[arg-type]
            return self._plain_many(messages, appended, began_ns)
        publication = self._publish(messages, durability, codec)
        self._engine.partition.wait(publication)
        return self._stored(publication, began_ns)

    def get(
        self,
        *,
        timeout: Seconds | None = None,
        lease: Seconds | None = None,
        holder: str | None = None,
        renew: bool = False,
        detached: bool = False,
    ) -> Message[Body]:
        """The next message. Waits for one; Empty when the time is over.

        It is yours for `lease`; with `renew` for as long as you have it in hand. A detached lease outlives the
        process, for scripts that ack later by its receipt.
        """
        if self._is_usual(timeout, lease, holder, renew, detached):
            one = self._delivery.receive_next()
            if one is not None:
                return Message(self, one)
        wanted = self._wanted(1, timeout, lease, holder, renew=renew, detached=detached)
        taken = self._take(wanted) or self._await(wanted)
        if not taken:
            raise self._empty(wanted)
        return Message(self, taken[0])

    def get_nowait(self, *, lease: Seconds | None = None) -> Message[Body]:
        """The next message, or Empty at once."""
        return self.get(timeout=0, lease=lease)

    def get_many(
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
        return [Message(self, delivered) for delivered in self._take(wanted) or self._await(wanted)]

    def __iter__(self) -> Iterator[Message[Body]]:
        """Every message as it comes, until the queue is closed."""
        while not self.closed:
            try:
                message = self.get()
            except Closed:
                return
            yield message
            del message  # not while waiting for the next one: it may have been dropped

    def resume(self, receipt: str) -> Message[Body]:
        """The message that a receipt of an earlier `get` stands for; LeaseLost if it is no longer held."""
        return Message(self, self._engine.resume(parse_receipt(receipt, self.name)))

    def ack_many(self, messages: Sequence[Message[Body]], *, durability: Durability | None = None) -> None:
        """Ack messages in one go. LeaseLost names those that were lost; the others are acked."""
        self._engine.wait(self._ack_all(messages, durability))

    def nack_many(
        self, messages: Sequence[Message[Body]], *, delay: Seconds | None = None, error: object = None
    ) -> None:
        """Nack messages in one go. LeaseLost if some were lost; the others are nacked."""
        self._engine.wait(self._nack_all(messages, delay, error))

    def peek(self, count: int = 1) -> list[Contents[Body]]:
        """The messages that would come next, without taking them."""
        return self._peek(count)

    def cancel(self, message_id: str) -> bool:
        """Take back a message that nobody works on; False where it is too late."""
        return self._engine.cancel(message_id)

    def seek(self, to: str | None = None, *, offset: int | None = None, time: datetime | None = None) -> int:
        """Go on from there: all before is passed over, all behind comes again. The one way that done comes back."""
        return self._seek(to, offset, time)

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

    def compact(self) -> Compacted:
        """Let go of what is done now, whatever retention says; answers with what that freed."""
        return self._compact()

    def sync(self) -> None:
        """Return when everything said so far, acks included, is on disk."""
        self._engine.sync()

    def close(self) -> None:
        """Sync and let go of the folder; messages in hand come back at the next opening. Closing twice is fine."""
        self._engine.close()

    def __enter__(self) -> Queue[Body]:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _await(self, wanted: Wanted) -> list[Delivered]:
        """Wait in line for a message."""
        if wanted.timeout_s == 0:
            return []
        deadline_ns = self._deadline_ns(wanted)
        waiters, waiter = self._delivery.waiters, ThreadWaiter(self._engine.world.clock)
        while True:
            with waiters.in_line(waiter):
                taken = self._take(wanted)  # what came before we stood in line would wake nobody
                left_s = self._left_s(deadline_ns)
                if not taken and (left_s is None or left_s > 0):
                    waiter.wait(left_s)
                    continue
            if taken and waiter.woken:
                waiters.wake()  # that was for another message than ours
            return taken


def open_queue(
    folder: str | PathLike[str],
    *,
    create: bool = True,
    durability: Durability | None = None,
    body_type: Any = None,
    settings: QueueSettings | None = None,
    observer: Observer | None = None,
    world: World | None = None,
    **changes: Any,
) -> Queue[Any]:
    """Open the queue in a folder, which is made where there is none (unless create=False).

    `changes` are settings by name, such as max_attempts=3; they are kept with the queue. `body_type` is bytes,
    str, dict or any type that msgspec knows.
    """
    return open_face(
        Queue,
        folder,
        create=create,
        durability=durability,
        body_type=body_type,
        settings=settings,
        observer=observer,
        world=world,
        changes=changes,
    )
