# Generated from aio/group.py by tools/sync.py: do not edit it, edit that one and run "make sync".
"""A group for threads: receive messages, settle them, look around. The queue is one, with put and get."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any, Generic, Self

from holdfast.api.arguments import (
    check_count,
    check_id,
    check_rate,
    check_seek,
    chosen_ids,
    error_text,
    messages_given,
    switch,
    waiting,
    wanted_of,
)
from holdfast.api.contents import Body, Contents
from holdfast.api.drafts import (
    HeadersLike,
    NewMessage,
    Seconds,
    Stored,
    Stream,
    StreamRequest,
    Text,
    check_size_hint,
    duration_ms,
    message_of,
    stream_options,
)
from holdfast.api.listing import (
    DeadGroup,
    DeadLetter,
    DeadLettersRequest,
    Listed,
    PhaseName,
    Redriven,
    Where,
    check_limit,
    check_phase,
)
from holdfast.api.ports import Face
from holdfast.api.sync.message import Message, settle, taken_of
from holdfast.api.sync.ports import GroupPort
from holdfast.broker.folder.layout import DEFAULT_GROUP, check_topic_name
from holdfast.broker.group import Compacted, QueueStats
from holdfast.broker.metrics import Observer
from holdfast.broker.tracing.log import TraceStep
from holdfast.errors import Closed, Empty, InvalidRequest, LeaseLost
from holdfast.model import CodecName, Durability, Retained
from holdfast.settings import TopicSettings

# The dead letters of a group, for threads: look at them, group them, put them back, drop them.


class DeadLetters(Generic[Body]):
    """What `queue.dead` is."""

    def __init__(self, port: GroupPort) -> None:
        self._port = port

    def list(self, *, where: Where = None, limit: int | None = None) -> Sequence[DeadLetter[Body]]:
        """The dead letters that the condition chooses, oldest first."""
        found: Any = self._port.messages("dead", where, limit)
        return list(found)

    def show(self, letter_id: str) -> DeadLetter[Body]:
        """One of them; NotFound where there is none."""
        if not isinstance(letter_id, str):
            raise InvalidRequest(f"a dead letter's id is text, not {type(letter_id).__name__}")
        return self._port.letter(letter_id)

    def groups(self, *, where: Where = None) -> Sequence[DeadGroup]:
        """The dead letters by reason and kind of error, the most frequent first."""
        return self._port.letter_groups(where)

    def redrive(
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
        check_rate(rate)
        check_limit(limit)
        if to is not None:
            check_topic_name(to)
        ids, dry_run = chosen_ids(ids, where), switch(dry_run, "dry_run")
        return self._port.redrive(
            DeadLettersRequest(ids=ids, where=where, limit=limit, rate=rate, to=to, dry_run=dry_run)
        )

    def purge(
        self,
        ids: str | Iterable[str] | None = None,
        *,
        where: Where = None,
        limit: int | None = None,
        dry_run: bool = False,
    ) -> Redriven:
        """Drop dead letters for good."""
        check_limit(limit)
        ids, dry_run = chosen_ids(ids, where), switch(dry_run, "dry_run")
        return self._port.purge_letters(DeadLettersRequest(ids=ids, where=where, limit=limit, dry_run=dry_run))


class Group(Face, Generic[Body]):
    """A group of consumers in queue mode. Safe to use from any thread."""

    _port: GroupPort

    @property
    def name(self) -> str:
        """The name of the topic."""
        return self._port.topic

    @property
    def topic(self) -> str:
        """The name of the topic."""
        return self._port.topic

    @property
    def group(self) -> str:
        """The name of the group."""
        return self._port.group

    @property
    def settings(self) -> TopicSettings:
        return self._port.settings

    def __repr__(self) -> str:
        port = self._port
        of_group = "" if port.group == DEFAULT_GROUP else f" of {port.group}"
        return f"<{type(self).__name__}{of_group} {port.topic} {port.where}{' (closed)' if port.closed else ''}>"

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
        usual = block is True and timeout is None and lease is None and holder is None
        if usual and renew is False and detached is False:
            one = self._port.take_next()
            if one is not None:
                return Message(self._port, one)
        wanted = wanted_of(1, waiting(block, timeout), lease, holder, renew=renew, detached=detached)
        taken = self._port.take(wanted)
        if not taken:
            within = "now" if not wanted.timeout_s else f"within {wanted.timeout_s:g} s"
            raise Empty(f"no message is ready {within} {self._port.where}")
        return Message(self._port, taken[0])

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
        wanted = wanted_of(count, timeout, lease, holder, renew=renew, detached=detached)
        port = self._port
        return [Message(port, taken) for taken in port.take(wanted)]

    def __iter__(self) -> Iterator[Message[Body]]:
        """Every message as it comes, until it is closed."""
        while True:
            try:
                message = self.receive()
            except Closed:
                return
            yield message
            del message  # not while waiting for the next one: it may have been dropped

    def resume(self, receipt: str) -> Message[Body]:
        """The message that a receipt of an earlier `get` stands for; LeaseLost if it is no longer held."""
        if not isinstance(receipt, str):
            raise InvalidRequest(f"a receipt is text, not {type(receipt).__name__}")
        return Message(self._port, self._port.resume(receipt))

    def ack_many(self, messages: Sequence[Message[Body]], *, durability: Durability | None = None) -> None:
        """Ack messages in one go. LeaseLost names those that were lost; the others are acked."""
        given = messages_given(messages, "ack", Message)
        try:
            self._port.ack(list(map(taken_of, given)), durability)
        except LeaseLost:
            settle(given)
            raise
        settle(given)

    def nack_many(
        self, messages: Sequence[Message[Body]], *, delay: Seconds | None = None, error: object = None
    ) -> None:
        """Nack messages in one go. LeaseLost if some were lost; the others are nacked."""
        delay_ms = None if delay is None else duration_ms(delay, "delay")
        given = messages_given(messages, "nack", Message)
        text = error_text(error, self._port.settings.max_error_chars)
        try:
            self._port.nack(list(map(taken_of, given)), delay_ms, text)
        except LeaseLost:
            settle(given)
            raise
        settle(given)

    def peek(self, count: int = 1) -> list[Contents[Body]]:
        """The messages that would come next, without taking them."""
        check_count(count)
        return self._port.peek(count)

    def cancel(self, message_id: str) -> bool:
        """Take back a message that nobody works on; False where it is too late."""
        check_id(message_id)
        return self._port.cancel(message_id)

    def history(self, message_id: str) -> list[TraceStep]:
        """Every step of a message that is still kept, living, done or dead: who had it, when, and how that ended.

        With the steps of the messages that it was redriven into or out of. NotFound where there is no such message.
        """
        check_id(message_id)
        return self._port.history(message_id)

    def committed(self) -> dict[int, int]:
        """For each partition the end of the contiguous run of messages that are settled, from the start on."""
        return self._port.committed()

    def seek(
        self,
        to: str | None = None,
        *,
        offset: int | None = None,
        time: datetime | None = None,
        partition: int | None = None,
    ) -> int:
        """Go on from there: all before is passed over, all behind comes again. The one way that done comes back."""
        check_seek(to, offset, time)
        return self._port.seek(to, offset, time, partition)

    def messages(
        self, phase: PhaseName = "ready", *, where: Where = None, limit: int | None = None
    ) -> Iterator[Listed[Body]]:
        """What is ready, leased, delayed or dead, without taking it. `where`: a function or an expression."""
        check_phase(phase)
        check_limit(limit)
        return self._port.messages(phase, where, limit)

    @property
    def dead(self) -> DeadLetters[Body]:
        """The dead letters."""
        return DeadLetters(self._port)

    def stats(self) -> QueueStats:
        """How many messages stand where, what they take, and what was counted since it was opened."""
        return self._port.stats()

    def purge(self) -> int:
        """Drop every message that nobody has in hand; answers how many. Dead letters have a `purge` of their own.

        Delayed ones are dropped with them, unless others read the topic, too: then those are theirs as well.
        """
        return self._port.purge()

    def compact(self) -> Compacted:
        """Let go of what is done now, whatever retention says; answers with what that freed."""
        return self._port.compact()

    def apply_retention(self) -> Retained:
        """Drop now what the topic's retention settings let go, as upkeep does in time; answers with what is gone."""
        return self._port.apply_retention()

    def observe(self, observer: Observer | None) -> None:
        """From now on tell this one of every count and every time; None: nobody. A server has /metrics instead."""
        self._port.observe(observer)

    def close(self) -> None:
        """Let go of this view; what it has in hand stays so, and the group goes on. Closing twice is fine."""
        self._port.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


# The queue for threads: put and get, with a folder and nothing else. It is a topic with one group.


_NO_OPTIONS = (None,) * 8


class Queue(Group[Body], Generic[Body]):
    """A durable queue. Safe to use from any thread."""

    def put(
        self, body: Body, *, key: Text | None = None, headers: HeadersLike | None = None, priority: int = 0,
        delay: Seconds | None = None, at: datetime | None = None, ttl: Seconds | None = None,
        dedup_id: Text | None = None, correlation_id: str | None = None,
        durability: Durability | None = None, codec: CodecName | None = None,
    ) -> Stored:  # fmt: skip
        """Store a message; returns when it is as durable as asked."""
        options = (key, headers, delay, at, ttl, dedup_id, correlation_id, codec)
        if type(body) is bytes and options == _NO_OPTIONS and type(priority) is int and not priority:
            plain: Any = body
            stored = self._port.put_plain(plain, durability)
            if stored is not None:
                return stored
        message = message_of(body, key, headers, priority, delay, at, ttl, dedup_id, correlation_id)
        return self._port.put([message], durability, codec)[0]

    def put_many(
        self,
        messages: Iterable[Body | NewMessage],
        *,
        durability: Durability | None = None,
        codec: CodecName | None = None,
    ) -> list[Stored]:
        """Store messages, all of them or none; an item is a body or a NewMessage."""
        return self._port.put(messages, durability, codec)

    def put_stream(
        self, stream: Stream, *, size_hint: int | None = None, durability: Durability | None = None, **options: Any
    ) -> Stored:
        """Store what a binary file or an iterator of bytes gives as one message, without holding it in memory.

        `options` are those of `put`: key, headers, priority, delay, at, ttl, dedup_id, correlation_id. What is too
        large is refused at once where `size_hint` says how many bytes will come.
        """
        self._port.check_open()
        check_size_hint(size_hint)
        message = stream_options(options)
        return self._port.upload(
            StreamRequest(stream=stream, message=message, size_hint=size_hint, durability=durability)
        )

    put_nowait = put  # it never waits for room: a disk that is full is told at once
    get = Group.receive
    get_nowait = Group.receive_nowait
    get_many = Group.receive_many

    def qsize(self) -> int:
        """How many messages are ready. Others may take or put some before you act on it."""
        return self._port.qsize()

    def empty(self) -> bool:
        """Whether none is ready now."""
        return self.qsize() == 0

    def sync(self) -> None:
        """Return when everything said so far, acks included, is on disk."""
        self._port.sync()

    def close(self) -> None:
        """Sync and let go of what was opened for it; messages in hand come back. Closing twice is fine.

        A queue of a broker is only a view: it is let go of, and the broker goes on.
        """
        self._port.close()
