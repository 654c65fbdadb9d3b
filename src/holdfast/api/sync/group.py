# Generated from aio/group.py by tools/sync.py: do not edit it, edit that one and run "make sync".
"""Groups and queues for threads: receive messages, settle them, inspect them. A queue is a group with `put` and `get`."""

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

# Dead letters of a group, for threads.


class DeadLetters(Generic[Body]):
    """The dead letters of a group, as `queue.dead`.

    Look at them, fix the cause, then redrive them:

        for letter in queue.dead.list(where="attempts > 3"):
            print(letter.id, letter.reason, letter.error)
        queue.dead.redrive()
    """

    def __init__(self, port: GroupPort) -> None:
        self._port = port

    def list(self, *, where: Where = None, limit: int | None = None) -> Sequence[DeadLetter[Body]]:
        """Return dead letters, oldest first: all of them, or the first `limit` that match `where`.

        `where` is an expression such as "attempts > 3", or a function that takes a dead letter.
        """
        found: Any = self._port.messages("dead", where, limit)
        return list(found)

    def show(self, letter_id: str) -> DeadLetter[Body]:
        """Return one dead letter. Raises NotFound if it does not exist (any more)."""
        if not isinstance(letter_id, str):
            raise InvalidRequest(f"a dead letter's id is text, not {type(letter_id).__name__}")
        return self._port.letter(letter_id)

    def groups(self, *, where: Where = None) -> Sequence[DeadGroup]:
        """Count the dead letters by reason and kind of error, the most frequent first."""
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
        """Put dead letters back into the queue, in their original order, each once.

        Choose them by `ids` or by `where`; without either, all are redriven. `limit` is the maximum number, `rate`
        the maximum per second. With `to`, they become new messages of that topic instead, for all its groups. With
        `dry_run`, nothing changes. Returns how many matched, how many were redriven, and their ids.
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
        """Delete dead letters, chosen as in `redrive`. This cannot be undone."""
        check_limit(limit)
        ids, dry_run = chosen_ids(ids, where), switch(dry_run, "dry_run")
        return self._port.purge_letters(DeadLettersRequest(ids=ids, where=where, limit=limit, dry_run=dry_run))


class Group(Face, Generic[Body]):
    """A group of consumers in queue mode. Safe to use from any thread.

    Each message goes to one consumer of the group, which leases it and then acks it. Every group of a topic gets
    every message.
    """

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
        """The settings of the group."""
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
        """Lease the next message. Waits for one, up to `timeout`; raises Empty if none is ready in time.

        With block=False it does not wait. The message is yours for the time of `lease` (the group's own by default);
        with `renew`, the lease is extended until you settle the message. With `detached`, the lease outlives the
        process, for scripts that settle the message later by its receipt. `holder` is a name for this consumer, shown
        to people.

            with queue.get(timeout=5) as message:
                handle(message.body)
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
        """Lease the next message without waiting. Raises Empty if none is ready."""
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
        """Lease up to `count` messages. Waits for at least one; returns [] if none is ready within `timeout`.

        The other arguments are those of `receive`.
        """
        wanted = wanted_of(count, timeout, lease, holder, renew=renew, detached=detached)
        port = self._port
        return [Message(port, taken) for taken in port.take(wanted)]

    def __iter__(self) -> Iterator[Message[Body]]:
        """Iterate over the messages as they arrive, until the group is closed."""
        while True:
            try:
                message = self.receive()
            except Closed:
                return
            yield message
            del message  # not while waiting for the next one: it may have been dropped

    def resume(self, receipt: str) -> Message[Body]:
        """Return the message of an earlier delivery, by its receipt. Raises LeaseLost if its lease has ended."""
        if not isinstance(receipt, str):
            raise InvalidRequest(f"a receipt is text, not {type(receipt).__name__}")
        return Message(self._port, self._port.resume(receipt))

    def ack_many(self, messages: Sequence[Message[Body]], *, durability: Durability | None = None) -> None:
        """Ack several messages in one call. Raises LeaseLost if some leases have ended; the others are acked."""
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
        """Nack several messages in one call. Raises LeaseLost if some leases have ended; the others are nacked.

        `delay` and `error` are those of `Message.nack`.
        """
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
        """Return the next `count` messages without leasing them."""
        check_count(count)
        return self._port.peek(count)

    def cancel(self, message_id: str) -> bool:
        """Cancel a ready or delayed message. Returns False if it is too late: leased, done or dead.

        Raises InvalidRequest if no message ever had this id.
        """
        check_id(message_id)
        return self._port.cancel(message_id)

    def history(self, message_id: str) -> list[TraceStep]:
        """Return every step of a message that is still stored, from publish to ack or dead letter, with holders.

        Includes the steps of messages it was redriven into or out of. Raises NotFound if there is no such message.
        """
        check_id(message_id)
        return self._port.history(message_id)

    def committed(self) -> dict[int, int]:
        """Return, for each partition, the offset below which every message is settled."""
        return self._port.committed()

    def seek(
        self,
        to: str | None = None,
        *,
        offset: int | None = None,
        time: datetime | None = None,
        partition: int | None = None,
    ) -> int:
        """Move the group's position to "start", "end", an offset or a time; give one of them.

        Earlier messages are skipped, and later ones are delivered again even if they are done. Without `partition`,
        all partitions move. Returns the new offset (of the first partition that moved). Raises OffsetOutOfRange for
        an offset that is not stored.
        """
        check_seek(to, offset, time)
        return self._port.seek(to, offset, time, partition)

    def messages(
        self, phase: PhaseName = "ready", *, where: Where = None, limit: int | None = None
    ) -> Iterator[Listed[Body]]:
        """Iterate over the messages in one phase ("ready", "leased", "delayed" or "dead") without leasing them.

        `where` is an expression such as "priority >= 5", or a function that takes a message. `limit` is the maximum
        number of messages. Damaged messages are left out, and a warning in the log says how many.
        """
        check_phase(phase)
        check_limit(limit)
        return self._port.messages(phase, where, limit)

    @property
    def dead(self) -> DeadLetters[Body]:
        """The dead letters of this group."""
        return DeadLetters(self._port)

    def stats(self) -> QueueStats:
        """Return the number of messages in each phase, the size on disk, and the counters since opening."""
        return self._port.stats()

    def purge(self) -> int:
        """Drop every message that is not in flight, and return how many. For dead letters, use `dead.purge`.

        Delayed messages are dropped too, unless the topic has other groups, which are still to get them.
        """
        return self._port.purge()

    def compact(self) -> Compacted:
        """Delete messages that are done now, even if retention would keep them. Returns what was freed."""
        return self._port.compact()

    def apply_retention(self) -> Retained:
        """Apply the topic's retention settings now instead of at the next upkeep. Returns what was deleted."""
        return self._port.apply_retention()

    def observe(self, observer: Observer | None) -> None:
        """Report every count and duration to this observer from now on; None removes it.

        Only the process that owns the folder can do this; a server has /metrics instead.
        """
        self._port.observe(observer)

    def close(self) -> None:
        """Close this object. Its messages stay in flight, and the group itself stays. Closing twice is fine."""
        self._port.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


# The queue for threads: a topic with one group.


_NO_OPTIONS = (None,) * 8


class Queue(Group[Body], Generic[Body]):
    """A durable queue. Safe to use from any thread.

    `put` stores a message and returns when it is on disk; `get` leases the next one. Ack a message when you have
    handled it, or use it as a context manager, which acks it if the block succeeds:

        with holdfast.open("jobs") as queue:
            queue.put(b"resize 1")
            with queue.get(timeout=5) as message:
                print(message.body)
    """

    def put(
        self, body: Body, *, key: Text | None = None, headers: HeadersLike | None = None, priority: int = 0,
        delay: Seconds | None = None, at: datetime | None = None, ttl: Seconds | None = None,
        dedup_id: Text | None = None, correlation_id: str | None = None,
        durability: Durability | None = None, codec: CodecName | None = None,
    ) -> Stored:  # fmt: skip
        """Store a message. Returns its id and place when it is as durable as asked ("fsync" by default).

        - `key`: messages with the same key go to the same partition.
        - `headers`: a mapping, or pairs of name and value; values are str or bytes.
        - `priority`: 0 to 9; 9 is the most urgent.
        - `delay` or `at`: deliver it only after this time, or at this aware datetime.
        - `ttl`: skip it if it has not been delivered within this time.
        - `dedup_id`: store only the first message with this id within the deduplication window.
        - `correlation_id`: a text of your own; the message's id by default.
        - `durability`: "fsync", "interval" or "os", for this call.
        - `codec`: "none", "zstd", "lz4" or "gzip", for this call.

        Durations are seconds or a timedelta. Raises BadBody if the body does not fit the queue's type, MessageTooLarge
        and DiskFull; in each case nothing is stored.
        """
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
        """Store several messages; each is a body or a NewMessage, which takes the options of `put`.

        All of them are stored or none; on a topic with several partitions, this holds for each partition.
        """
        return self._port.put(messages, durability, codec)

    def put_stream(
        self, stream: Stream, *, size_hint: int | None = None, durability: Durability | None = None, **options: Any
    ) -> Stored:
        """Store one message whose body is read from a binary file or an iterator of bytes, never held in memory whole.

        `options` are those of `put` except `codec`: key, headers, priority, delay, at, ttl, dedup_id, correlation_id.
        If you pass the number of bytes as `size_hint`, a body that is too large is refused before it is read.
        """
        self._port.check_open()
        check_size_hint(size_hint)
        message = stream_options(options)
        return self._port.upload(
            StreamRequest(stream=stream, message=message, size_hint=size_hint, durability=durability)
        )

    put_nowait = put  # `put` never waits for space: it raises DiskFull at once
    get = Group.receive
    get_nowait = Group.receive_nowait
    get_many = Group.receive_many

    def qsize(self) -> int:
        """Return the number of ready messages. It may change before you act on it."""
        return self._port.qsize()

    def empty(self) -> bool:
        """Return whether no message is ready. This may change before you act on it."""
        return self.qsize() == 0

    def sync(self) -> None:
        """Wait until everything done so far, including acks, is on disk."""
        self._port.sync()

    def close(self) -> None:
        """Sync to disk and release the folder or the connection. Closing twice is fine.

        Messages in flight return to the queue, and their delivery does not count as an attempt. Closing a queue that
        you got from a broker leaves the broker open.
        """
        self._port.close()
