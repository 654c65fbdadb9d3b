# Generated from aio/group.py by tools/sync.py: do not edit it, edit that one and run "make sync".
"""Groups and queues for threads: receive messages, settle them, inspect them. A queue is a group with `put` and `get`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from itertools import repeat
from typing import TYPE_CHECKING, Any, Generic, Self, overload

from msgspec import UNSET, UnsetType

from holdfast.api import Face
from holdfast.api.arguments import (
    ONE,
    check_count,
    check_id,
    check_reason,
    check_seek,
    durability_of,
    error_text,
    messages_given,
    span_of,
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
from holdfast.api.sync.message import DeadLetters, Message, settle, taken_of
from holdfast.broker.folder.layout import DEFAULT_GROUP
from holdfast.errors import Closed, Empty, InvalidRequest, LeaseLost
from holdfast.later import on_demand
from holdfast.model import Acks, CodecName, Durability, Retained
from holdfast.settings import TopicSettings

if TYPE_CHECKING:
    from holdfast.api import listing
    from holdfast.api.listing import Listed, PhaseName, Where
    from holdfast.api.sync.ports import GroupPort
    from holdfast.broker.metrics import Compacted, Observer, QueueStats
    from holdfast.broker.samples import Samples
    from holdfast.broker.tracing import TraceStep
else:
    listing = on_demand("holdfast.api.listing")


class Group(Face, Generic[Body]):
    """A group of consumers in queue mode. Safe to use from any thread.

    Each message goes to one consumer of the group, which leases it and then acks it. Every group of a topic gets
    every message. Once it is closed, its methods raise Closed.
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
        """Lease the next message, and wait for one if none is ready.

            with queue.get(timeout=5) as message:
                handle(message.body)

        Args:
            block: Whether to wait. False is the same as timeout=0.
            timeout: How long to wait, in seconds or as a timedelta; without a limit by default.
            lease: How long the message is yours; by default the group's `lease_ms`.
            holder: A name for this consumer, shown to people; host and process id by default.
            renew: Extend the lease until you settle the message.
            detached: Let the lease outlive this process, for scripts that settle the message later by its receipt.

        Returns:
            The message. Ack it when you have handled it, or use it as a context manager.

        Raises:
            Empty: No message was ready in time.
            Closed: The queue is closed.
            TooManyWaiters: Too many calls are already waiting for messages.
        """
        usual = block is True and timeout is None and lease is None and holder is None
        if usual and renew is False and detached is False:
            one = self._port.take_next()
            if one is not None:
                return Message(self._port, one)
            wanted = ONE
        else:
            wanted = wanted_of(1, waiting(block, timeout), lease, holder, renew=renew, detached=detached)
        taken = self._port.take(wanted)
        if not taken:
            ready = f"became ready within {wanted.timeout_s:g} s" if wanted.timeout_s else "is ready"
            raise Empty(f"no message {ready} {self._port.where}")
        return Message(self._port, taken[0])

    def receive_nowait(self, *, lease: Seconds | None = None) -> Message[Body]:
        """Lease the next message if one is ready.

        Args:
            lease: How long the message is yours; by default the group's `lease_ms`.

        Returns:
            The message.

        Raises:
            Empty: No message is ready.
        """
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
        """Lease up to `count` messages, and wait for at least one.

        Args:
            count: The maximum number of messages.
            timeout: How long to wait for the first one; without a limit by default.
            lease: How long the messages are yours; by default the group's `lease_ms`.
            holder: A name for this consumer, shown to people.
            renew: Extend the leases until you settle the messages.
            detached: Let the leases outlive this process, as in `receive`.

        Returns:
            The messages that are ready now, or [] if there was none within `timeout`.

        Raises:
            InvalidRequest: One of the arguments cannot be used.
        """
        wanted = wanted_of(count, timeout, lease, holder, renew=renew, detached=detached)
        port = self._port
        return list(map(Message, repeat(port), port.take(wanted)))

    def __iter__(self) -> Iterator[Message[Body]]:
        """Iterate over the messages as they arrive, until the group is closed."""
        while True:
            try:
                message = self.receive()
            except Closed:
                return
            yield message
            del message  # not while waiting for the next one: it may have been dropped

    def pause(self, *, reason: str = "") -> bool:
        """Stop delivery until `resume()`, even across a restart.

        Publishing continues, and messages in flight can be settled as usual. Consumers wait as on an empty queue.

        Args:
            reason: A text shown wherever the group is listed. If the group is already paused, the first reason stays.

        Returns:
            False if the group is paused already.

        Raises:
            InvalidRequest: The reason cannot be used.
        """
        check_reason(reason)
        return self._port.pause_group(reason)

    @overload
    def resume(self) -> bool: ...

    @overload
    def resume(self, receipt: str) -> Message[Body]: ...

    def resume(self, receipt: str | UnsetType = UNSET) -> bool | Message[Body]:
        """End a pause: hand out messages again. With a receipt, return the message of an earlier delivery instead.

        Args:
            receipt: The message's `receipt`, to settle it in another call or process.

        Returns:
            False if the group is not paused; or the message, still leased.

        Raises:
            LeaseLost: The lease has ended.
            InvalidRequest: This is not a receipt of this group.
        """
        if receipt is UNSET:  # not None: a receipt that a program has lost must not resume a group
            return self._port.resume_group()
        if not isinstance(receipt, str):
            raise InvalidRequest(f"a receipt must be a str, not {type(receipt).__name__}: pass `message.receipt`")
        return Message(self._port, self._port.resume(receipt))

    def ack_many(self, messages: Sequence[Message[Body]], *, durability: Durability | None = None) -> None:
        """Ack several messages in one call.

        Args:
            messages: Messages of this group.
            durability: "fsync" returns when the acks are on disk; by default they are within a second.

        Raises:
            LeaseLost: Some leases have ended; all other messages are acked.
        """
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
        """Nack several messages in one call, so that they are retried.

        Args:
            messages: Messages of this group.
            delay: When to retry them; by default the group's backoff decides.
            error: An exception or a text that says why, stored with them.

        Raises:
            LeaseLost: Some leases have ended; all other messages are nacked.
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
        """Return the next messages without leasing them.

        Args:
            count: The maximum number.

        Returns:
            The messages that `receive` would return next, in that order.

        Raises:
            InvalidRequest: The count cannot be used.
        """
        check_count(count)
        return self._port.peek(count)

    def cancel(self, message_id: str) -> bool:
        """Cancel a ready or delayed message: it is not delivered.

        Args:
            message_id: The id that `put` returned.

        Returns:
            False if it is too late: the message is leased, done or dead.

        Raises:
            InvalidRequest: No message ever had this id.
        """
        check_id(message_id)
        return self._port.cancel(message_id)

    def take_back(self, message_id: str) -> bool:
        """End the lease of a message, no matter who holds it: it is ready at once, and the attempt is not counted.

        The holder may finish its work, but can no longer ack the message. On a server this needs an admin token.

        Args:
            message_id: The id that `put` returned.

        Returns:
            False if nobody holds it.

        Raises:
            InvalidRequest: No message ever had this id.
        """
        check_id(message_id)
        return self._port.take_back(message_id)

    def run_now(self, message_id: str) -> bool:
        """End the delay of a message, or its wait for a retry: it is ready at once.

        On a server this needs an admin token.

        Args:
            message_id: The id that `put` returned.

        Returns:
            False if it is not delayed.

        Raises:
            InvalidRequest: No message ever had this id.
        """
        check_id(message_id)
        return self._port.run_now(message_id)

    def history(self, message_id: str) -> list[TraceStep]:
        """Return what happened to a message, from publish to ack or dead letter, and who held it when.

        Args:
            message_id: The id of a message that is still stored.

        Returns:
            The steps in order, with those of messages that it was redriven into or out of.

        Raises:
            NotFound: There is no such message (any more).
        """
        check_id(message_id)
        return self._port.history(message_id)

    def committed(self) -> dict[int, int]:
        """Return how far the group has settled everything.

        Returns:
            For each partition, the offset below which every message is done or dead.

        Raises:
            Closed: The group or its queue is closed.
        """
        return self._port.committed()

    def seek(
        self,
        to: str | None = None,
        *,
        offset: int | None = None,
        time: datetime | None = None,
        partition: int | None = None,
    ) -> int:
        """Move the group's position: earlier messages are skipped, later ones delivered again even if they are done.

        Give one of `to`, `offset` and `time`.

        Args:
            to: "start" or "end".
            offset: The offset of the next message.
            time: An aware datetime; the next message is the first one published then or later.
            partition: The partition to move; all of them by default.

        Returns:
            The new offset, of the first partition that moved.

        Raises:
            OffsetOutOfRange: The offset is not stored.
            InvalidRequest: Not exactly one of `to`, `offset` and `time` is given.
        """
        check_seek(to, offset, time)
        return self._port.seek(to, offset, time, partition)

    def messages(
        self, phase: PhaseName = "ready", *, where: Where = None, limit: int | None = None
    ) -> Iterator[Listed[Body]]:
        """Iterate over the messages in one phase without leasing them.

        Damaged messages are left out, and a warning in the log says how many.

        Args:
            phase: "ready", "leased", "delayed", "dead" or "done"; those that are done are listed newest first, as long
                as the log holds them.
            where: An expression such as "priority >= 5", or a function that takes a message; all of them by default.
            limit: The maximum number.

        Returns:
            An iterator over the messages.

        Raises:
            InvalidRequest: One of the arguments cannot be used.
        """
        listing.check_phase(phase)
        listing.check_limit(limit)
        return self._port.messages(phase, where, limit)

    @property
    def dead(self) -> DeadLetters[Body]:
        """The dead letters of this group."""
        return DeadLetters(self._port)

    def stats(self) -> QueueStats:
        """Count the messages in each phase.

        Returns:
            The counts, the size on disk, and the metrics since opening.

        Raises:
            Closed: The group or its queue is closed.
        """
        return self._port.stats()

    def samples(self, *, last: Seconds = 900) -> Samples:
        """Return the recent rates, backlog and handling times of this group.

        Only the process that owns the folder takes samples, every 5 seconds while it is open.

        Args:
            last: How far back, in seconds or as a timedelta; up to seven days.

        Returns:
            The samples, oldest first.

        Raises:
            InvalidRequest: The time cannot be used.
        """
        return self._port.samples(span_of(last))

    def purge(self) -> int:
        """Drop every message that is not in flight. For dead letters, use `dead.purge`.

        Delayed messages are dropped too, unless the topic has other groups, which have yet to receive them.

        Returns:
            How many messages were dropped.

        Raises:
            Closed: The group or its queue is closed.
        """
        return self._port.purge()

    def compact(self) -> Compacted:
        """Delete messages that are done now, even if retention would keep them for replay.

        Returns:
            The segments and bytes that were freed.

        Raises:
            Closed: The group or its queue is closed.
        """
        return self._port.compact()

    def apply_retention(self) -> Retained:
        """Apply the topic's retention settings now instead of at the next upkeep.

        Returns:
            What was deleted.

        Raises:
            Closed: The group or its queue is closed.
        """
        return self._port.apply_retention()

    def observe(self, observer: Observer | None) -> None:
        """Report every count and duration to this observer from now on.

        Args:
            observer: An object with the methods of Observer; None removes it.

        Raises:
            InvalidRequest: This process does not own the folder. A server has /metrics instead.
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
        durability: Durability | None = None, codec: CodecName | None = None, acks: Acks | None = None,
    ) -> Stored:  # fmt: skip
        """Store a message, and return when it is as durable as requested.

        Durations are seconds or a timedelta. If it raises, nothing is stored.

        Args:
            body: The body, in the type that the queue was opened with: bytes by default.
            key: Messages with the same key go to the same partition.
            headers: A mapping, or pairs of name and value; values are str or bytes.
            priority: 0 to 9; 9 is the most urgent.
            delay: Deliver it only after this time.
            at: Deliver it only at this aware datetime or later.
            ttl: Skip it if it has not been delivered within this time.
            dedup_id: Store only the first message with this id within the deduplication window.
            correlation_id: A text of your own; the message's id by default.
            durability: "fsync", "interval" or "os", for this call; by default what the queue was opened with.
            codec: "none", "zstd", "lz4" or "gzip", for this call.
            acks: "all", "leader" or "none", another name for `durability`: "fsync", "os" and "os".

        Returns:
            The message's id and place. `duplicate` says that `dedup_id` was known.

        Raises:
            BadBody: The body does not fit the queue's type.
            MessageTooLarge: It exceeds the limit in the settings.
            DiskFull: The disk has no room for it.
        """
        if acks is not None:
            durability = durability_of(acks, durability)
        if (  # one by one: the usual case is the quickest
            type(body) is bytes and key is None and headers is None and delay is None and at is None and ttl is None
            and dedup_id is None and correlation_id is None and codec is None and type(priority) is int
            and not priority
        ):  # fmt: skip
            plain: Any = body
            stored = self._port.put_now(plain, durability)
            if stored is None:
                stored = self._port.put_plain(plain, durability)
            if stored is not None:
                return stored
        options = (key, headers, priority, delay, at, ttl, dedup_id, correlation_id)
        if codec is None:
            stored = self._port.put_now(body, durability, options)
            if stored is not None:
                return stored
        return self._port.put([message_of(body, options)], durability, codec)[0]

    def put_many(
        self,
        messages: Iterable[Body | NewMessage],
        *,
        durability: Durability | None = None,
        codec: CodecName | None = None,
        acks: Acks | None = None,
    ) -> Sequence[Stored]:
        """Store several messages in one call.

        All of them are stored or none; on a topic with several partitions, this holds for each partition.

        Args:
            messages: Each is a body, or a NewMessage, which takes the options of `put`.
            durability: "fsync", "interval" or "os", for this call.
            codec: "none", "zstd", "lz4" or "gzip", for this call.
            acks: "all", "leader" or "none", another name for `durability`: "fsync", "os" and "os".

        Returns:
            The ids and places, in the order of the messages.

        Raises:
            BadBody: A body does not fit the queue's type.
            MessageTooLarge: A message or the batch exceeds the limits in the settings.
            DiskFull: The disk has no room for them.
        """
        return self._port.put(messages, durability_of(acks, durability), codec)

    def put_stream(
        self, stream: Stream, *, size_hint: int | None = None, durability: Durability | None = None,
        acks: Acks | None = None, **options: Any,
    ) -> Stored:  # fmt: skip
        """Store one message whose body is read piece by piece and never held in memory whole.

        Args:
            stream: A binary file or an iterator of bytes.
            size_hint: The number of bytes; a body that is too large is then refused before it is read.
            durability: "fsync", "interval" or "os", for this call.
            acks: "all", "leader" or "none", another name for `durability`: "fsync", "os" and "os".
            **options: Those of `put` except `codec`: key, headers, priority, delay, at, ttl, dedup_id, correlation_id.

        Returns:
            The message's id and place.

        Raises:
            MessageTooLarge: The body exceeds the limit in the settings.
            DiskFull: The disk has no room for it.
        """
        if acks is not None:
            durability = durability_of(acks, durability)
        self._port.check_open()
        check_size_hint(size_hint)
        message = stream_options(options)
        return self._port.upload(
            StreamRequest(stream=stream, message=message, size_hint=size_hint, durability=durability)
        )

    put_nowait = put
    """The same as `put`, which never waits for space: it raises DiskFull at once."""
    get = Group.receive
    """Lease the next message: another name for `receive`, as in the standard library's queues."""
    get_nowait = Group.receive_nowait
    """Lease the next message if one is ready: another name for `receive_nowait`."""
    get_many = Group.receive_many
    """Lease several messages: another name for `receive_many`."""

    def qsize(self) -> int:
        """Count the ready messages.

        Returns:
            The number, which may change before you act on it.
        """
        return self._port.qsize()

    def empty(self) -> bool:
        """Say whether no message is ready.

        Returns:
            The answer, which may change before you act on it.
        """
        return self.qsize() == 0

    def sync(self) -> None:
        """Wait until everything done so far, including acks, is on disk.

        Raises:
            DiskFailed: The disk reported an error.
            Closed: The queue is closed.
        """
        self._port.sync()

    def close(self) -> None:
        """Sync to disk and release the folder or the connection. Closing twice is fine.

        Messages in flight return to the queue, and their delivery does not count as an attempt. Closing a queue that
        you got from a broker leaves the broker open.
        """
        self._port.close()
