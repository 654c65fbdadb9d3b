"""Groups and queues behind a server, for threads: the same names as in a folder."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Generic, Self

from holdfast.broker.group import Compacted, QueueStats
from holdfast.broker.metrics import Observer
from holdfast.broker.tracing.steps import TraceStep
from holdfast.client.dead import RemoteDeadLetters
from holdfast.client.group_face import GroupFace, StateOf
from holdfast.client.messages import RemoteContents, RemoteHandle, RemoteListed
from holdfast.client.streams import publish_stream
from holdfast.client.ways import run
from holdfast.embedded.drafts import HeadersLike, NewMessage, Seconds, Text, message_of
from holdfast.embedded.face import waiting
from holdfast.embedded.group import Group
from holdfast.embedded.handle import INTERRUPTIONS
from holdfast.embedded.listed import PhaseName
from holdfast.embedded.listing import Where
from holdfast.embedded.message import Body
from holdfast.embedded.publisher import Stored
from holdfast.embedded.queue import Queue
from holdfast.embedded.streaming import Stream
from holdfast.errors import Closed, LeaseLost, Unavailable
from holdfast.model import CodecName, Durability, Retained


class RemoteState(StateOf):
    """The document that goes with a message from one holder to the next, until it is acked."""

    def load(self) -> Any:
        """The document, or None."""
        return run(self._load())

    def save(self, value: Any, *, durability: Durability | None = None) -> None:
        """Replace it, if nobody has since it was loaded: Conflict otherwise. None takes it away."""
        run(self._save(value, durability))


class RemoteMessage(RemoteHandle[Body], Generic[Body]):
    """A message in hand. As a context manager: ack on success, nack with the error on an exception."""

    __slots__ = ()

    def ack(self, *, durability: Durability | None = None) -> None:
        """It is handled and never comes back."""
        run(self._face._ack([self], durability))

    def nack(self, *, delay: Seconds | None = None, error: object = None) -> None:
        """It failed: again after the queue's backoff, or after `delay`; to the dead letters after the last attempt."""
        run(self._face._nack([self], delay, error))

    def defer(self, *, delay: Seconds = 0) -> None:
        """Not now: it comes back without counting as an attempt."""
        run(self._face._defer(self, delay))

    def reject(self, reason: object = "") -> None:
        """It can never be handled: straight to the dead letters."""
        run(self._face._reject(self, reason))

    def extend(self, lease: Seconds | None = None) -> None:
        """So much time from now on; the queue's own lease where none is given. 0 gives it back now, as `defer` does."""
        run(self._face._extend(self, lease))

    @property
    def state(self) -> RemoteState:
        if self._state is None:
            self._state = RemoteState(self)
        state: RemoteState = self._state
        return state

    def __enter__(self) -> RemoteMessage[Body]:
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
        except (LeaseLost, Closed, Unavailable) as late:
            error.add_note(f"the message could not be given back: {late}")


class RemoteGroup(GroupFace[Body], Generic[Body]):
    """A group of consumers in queue mode, behind a server. Safe to use from any thread."""

    _message = RemoteMessage

    def receive(
        self,
        block: bool = True,  # noqa: FBT001, FBT002  as in queue.Queue: get(True, 1)
        timeout: Seconds | None = None,
        *,
        lease: Seconds | None = None,
        holder: str | None = None,
        renew: bool = False,
        detached: bool = False,
    ) -> RemoteMessage[Body]:
        """The next message. Waits for one, unless block=False; Empty when the time is over.

        It is yours for `lease`; with `renew` for as long as you have it in hand. A detached one is not given back
        when it is dropped: for scripts that ack later by its receipt.
        """
        found: RemoteMessage[Body] = run(
            self._receive_one(waiting(block, timeout), lease, holder, renew=renew, detached=detached)
        )
        return found

    def receive_nowait(self, *, lease: Seconds | None = None) -> RemoteMessage[Body]:
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
    ) -> list[RemoteMessage[Body]]:
        """What is there, up to `count`; waits for at least one, and answers [] when the time is over."""
        return run(self._receive(count, timeout, lease, holder, renew=renew, detached=detached))

    def __iter__(self) -> Iterator[RemoteMessage[Body]]:
        """Every message as it comes, until it is closed."""
        while not self.closed:
            try:
                message = self.receive()
            except Closed:
                return
            yield message
            del message  # not while waiting for the next one: it may have been dropped

    def resume(self, receipt: str) -> RemoteMessage[Body]:
        """The message that a receipt of an earlier `get` stands for; LeaseLost if it is no longer held."""
        found: RemoteMessage[Body] = run(self._resume(receipt))
        return found

    def ack_many(self, messages: Sequence[RemoteMessage[Body]], *, durability: Durability | None = None) -> None:
        """Ack messages in one go. LeaseLost names those that were lost; the others are acked."""
        run(self._ack(messages, durability))

    def nack_many(
        self, messages: Sequence[RemoteMessage[Body]], *, delay: Seconds | None = None, error: object = None
    ) -> None:
        """Nack messages in one go. LeaseLost if some were lost; the others are nacked."""
        run(self._nack(messages, delay, error))

    def peek(self, count: int = 1) -> list[RemoteContents[Body]]:
        """The messages that would come next, without taking them."""
        return run(self._peek(count))

    def cancel(self, message_id: str) -> bool:
        """Take back a message that nobody works on; False where it is too late."""
        return run(self._cancel(message_id))

    def history(self, message_id: str) -> list[TraceStep]:
        """Every step of a message that is still kept, living, done or dead: who had it, when, and how that ended.

        With the steps of the messages that it was redriven into or out of. NotFound where there is no such message.
        """
        return run(self._history(message_id))

    def committed(self) -> dict[int, int]:
        """For each partition the end of the contiguous run of messages that are settled, from the start on."""
        return run(self._committed())

    def seek(
        self,
        to: str | None = None,
        *,
        offset: int | None = None,
        time: datetime | None = None,
        partition: int | None = None,
    ) -> int:
        """Go on from there: all before is passed over, all behind comes again. The one way that done comes back."""
        return run(self._seek(to, offset, time, partition))

    def messages(
        self, phase: PhaseName = "ready", *, where: Where = None, limit: int | None = None
    ) -> Iterator[RemoteListed[Body]]:
        """What is ready, leased, delayed or dead, without taking it. `where`: a function or an expression."""
        listing = self._listing(phase, where, limit)
        return itertools.chain.from_iterable(iter(lambda: run(listing.page()), []))

    @property
    def dead(self) -> RemoteDeadLetters[Body]:
        """The dead letters."""
        return RemoteDeadLetters(self)

    def stats(self) -> QueueStats:
        """How many messages stand where, what they take, and what was counted since the server began."""
        return run(self._stats())

    def purge(self) -> int:
        """Drop every message that nobody has in hand; answers how many. Dead letters have a `purge` of their own.

        Delayed ones are dropped with them, unless others read the topic, too: then those are theirs as well.
        """
        return run(self._purge())

    def compact(self) -> Compacted:
        """Let go of what is done now, whatever retention says; answers with what that freed."""
        return run(self._compact())

    def apply_retention(self) -> Retained:
        """Drop now what the topic's retention settings let go, as upkeep does in time; answers with what is gone."""
        return run(self._apply_retention())

    def observe(self, observer: Observer | None) -> None:
        """Refused: the server counts and measures; its /metrics tells."""
        raise self._unobserved(observer)

    def close(self) -> None:
        """Let go of this view; what it has in hand stays so, and the group goes on. Closing twice is fine."""
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class RemoteQueue(RemoteGroup[Body], Generic[Body]):
    """A durable queue behind a server. Safe to use from any thread."""

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
        message = message_of(body, key, headers, priority, delay, at, ttl, dedup_id, correlation_id)
        return run(self._put([message], durability, codec))[0]

    def put_many(
        self,
        messages: Iterable[Body | NewMessage],
        *,
        durability: Durability | None = None,
        codec: CodecName | None = None,
    ) -> list[Stored]:
        """Store messages, all of them or none; an item is a body or a NewMessage."""
        return run(self._put(messages, durability, codec))

    def put_stream(
        self, stream: Stream, *, size_hint: int | None = None, durability: Durability | None = None, **options: Any
    ) -> Stored:
        """Store what a binary file or an iterator of bytes gives as one message.

        `options` are those of `put`, but `codec`. What is too large is refused at once where `size_hint` says how
        many bytes will come.
        """
        self._check_open()
        return run(
            publish_stream(
                self._client.publishing, self._topic, stream, None, size_hint, durability or self._durability, options
            )
        )

    put_nowait = put  # it never waits for room: a disk that is full is told at once
    get = RemoteGroup.receive
    get_nowait = RemoteGroup.receive_nowait
    get_many = RemoteGroup.receive_many

    def qsize(self) -> int:
        """How many messages are ready. Others may take or put some before you act on it."""
        return run(self._qsize())

    def empty(self) -> bool:
        """Whether none is ready now."""
        return self.qsize() == 0

    def sync(self) -> None:
        """Return when everything said so far, acks included, is on disk."""
        run(self._sync())

    def close(self) -> None:
        """Let go of the queue, and of the connection where it is this queue's own. Closing twice is fine."""
        super().close()
        if self._alone:
            self._client.close()


# One program, wherever the queue is: what takes the one takes the other.
Group.register(RemoteGroup)
Queue.register(RemoteQueue)
