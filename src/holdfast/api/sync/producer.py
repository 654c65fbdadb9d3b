# Generated from aio/producer.py by tools/sync.py: do not edit it, edit that one and run "make sync".
"""The producer for threads: it collects messages by partition and stores them in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from types import TracebackType
from typing import Any

from holdfast.api import check_port
from holdfast.api.drafts import HeadersLike, NewMessage, Seconds, Text, duration_ms, message_of
from holdfast.broker.messages import TEXT_KEY
from holdfast.broker.waiters import ThreadWaiter
from holdfast.errors import HoldfastError, QueueFull, Unavailable
from holdfast.producing.core import Addressed, ProducerCore
from holdfast.producing.parcels import Callback, Destination, Outbox, Parcel, ProducerPort, Sent, SentMany, Span
from holdfast.producing.rounds import TaskRounds, ThreadRounds
from holdfast.settings import ProducerSettings


class Producer:
    """Sends messages to topics in batches. Safe to use from any thread."""

    def __init__(
        self,
        port: ProducerPort,
        settings: ProducerSettings | None = None,
        *,
        name: str | None = None,
        resume: bool = False,
        body_type: Any = None,
        rounds: Callable[[ProducerCore[Any]], ThreadRounds] | None = None,
    ) -> None:
        check_port(self, port)
        self._core = core = ProducerCore(
            port, settings or port.settings, Sent, name=name, resume=resume, body_type=body_type
        )
        self._add = core.accumulator.add
        self._destinations = core.destinations
        self._backing = port.backing
        self._is_stale = port.is_stale if port.blocks else None
        make = rounds or ThreadRounds
        self._rounds = make(core)
        self._waits = core.owner = ProducerWaits(core, self._rounds)
        core.face = self
        core.sender.begin()
        core.face = self

    @property
    def settings(self) -> ProducerSettings:
        """The settings of this producer."""
        return self._core.settings

    @property
    def name(self) -> str | None:
        """The name under which it can resume after a crash, or None."""
        return self._core.name

    @property
    def closed(self) -> bool:
        """Whether it is closed, so that nothing more can be sent."""
        return self._core.closed or self._backing.closed

    def __repr__(self) -> str:
        name = f" {self.name}" if self.name else ""
        return f"<{type(self).__name__}{name} {self._core.port.place}{' (closed)' if self.closed else ''}>"

    def send(
        self, topic: str, body: Any, *, key: Text | None = None, headers: HeadersLike | None = None, priority: int = 0,
        delay: Seconds | None = None, at: datetime | None = None, ttl: Seconds | None = None,
        dedup_id: Text | None = None, correlation_id: str | None = None,
        partition: int | None = None,
    ) -> Sent:  # fmt: skip
        """Send a message. This waits only for space in the buffer, not until the message is stored.

        Args:
            topic: The topic.
            body: The body, in the type that the producer was opened with: bytes by default.
            key: Messages with the same key go to the same partition.
            headers: A mapping, or pairs of name and value; values are str or bytes.
            priority: 0 to 9; 9 is the most urgent.
            delay: Deliver it only after this time, in seconds or as a timedelta.
            at: Deliver it only at this aware datetime or later.
            ttl: Skip it if it has not been delivered within this time.
            dedup_id: Store only the first message with this id within the deduplication window.
            correlation_id: A text of your own; the message's id by default.
            partition: The partition; by default that of its key, or else the next one in turn.

        Returns:
            What to wait for: its result is the message's id and place once it is stored.

        Raises:
            UnknownTopic: There is no such topic or partition.
            MessageTooLarge: It exceeds the limit in the settings.
            QueueFull: There was no space in the buffer within `block_ms`.
        """
        destination = self._ready(topic) or self._open(topic)
        # The fused form of `address` and `put` for the commonest messages.
        plain = type(body) is bytes and type(priority) is int and not priority and partition is None
        plain = plain and headers is None and delay is None and at is None and ttl is None
        plain = plain and dedup_id is None and correlation_id is None
        if plain and destination.settings is destination.topic.settings and destination.plain:
            if key is None and len(body) <= destination.most_bytes:
                outbox = destination.outboxes[0] if destination.count == 1 else destination.next()
                return self._add(outbox, body) or self._insist(Addressed(outbox, body, turns=1))
            flags = 0
            if type(key) is str and key.isascii():
                key, flags = key.encode(), TEXT_KEY
            if type(key) is bytes and len(body) + len(key) <= destination.most_bytes:
                outbox = destination.keyed(key)
                return self._add(outbox, body, key, flags) or self._insist(Addressed(outbox, body, key, flags))
        message = message_of(body, (key, headers, priority, delay, at, ttl, dedup_id, correlation_id))
        addressed = self._core.address(destination, message, partition)
        return self._core.put(addressed) or self._insist(addressed)

    def send_many(self, topic: str, messages: Iterable[Any | NewMessage], *, partition: int | None = None) -> SentMany:
        """Send several messages. This waits only for space in the buffer.

        Args:
            topic: The topic.
            messages: Each is a body or a NewMessage.
            partition: The partition for all of them.

        Returns:
            What to wait for: it has a result for all of them, and one for each.

        Raises:
            UnknownTopic: There is no such topic or partition.
            MessageTooLarge: A message exceeds the limit in the settings.
            QueueFull: There was no space in the buffer within `block_ms`.
        """
        destination = self._ready(topic) or self._open(topic)
        core = self._core
        messages = core.check_many(messages)
        plain = core.all_plain(destination, messages)
        spans: list[Span] = []
        try:
            if plain:
                for outbox, first, end, size in core.pieces(destination, messages, partition):
                    added = self._extend(outbox, messages[first:end], size)
                    spans.append((*added, range(first, end)))
            else:
                for i, message in enumerate(messages):
                    new = message if isinstance(message, NewMessage) else NewMessage(body=message)
                    addressed = core.address(destination, new, partition)
                    added = core.put_draft(addressed) or self._insist_draft(addressed)
                    spans.append((*added, (i,)))
        except HoldfastError as error:
            core.note_taken(error, spans, len(messages), destination if plain and partition is None else None)
            raise
        return SentMany(spans, len(messages))

    def flush(self, timeout: Seconds | None = None) -> None:
        """Send all collected messages and wait until they are stored.

        Args:
            timeout: How long to wait; without a limit by default.

        Raises:
            Unavailable: Not everything was stored in time; the rest is still being sent.
            HoldfastError: The first error of a message that has not been reported yet.
        """
        self._drain(_seconds(timeout))
        self._core.raise_unseen()

    def close(self, timeout: Seconds | None = None) -> None:
        """Send the remaining messages, wait until they are stored, and close. Closing twice is fine.

        Args:
            timeout: How long to wait; messages that are not stored by then fail with Closed.

        Raises:
            HoldfastError: The first error of a message that has not been reported yet.
        """
        if self._core.closed:
            return
        self._rounds.check_outside()
        timeout_s = _seconds(timeout)
        self._core.close()
        try:
            self._drain(timeout_s)
        except Unavailable:
            pass  # answered below
        finally:
            self._rounds.stop()
        self._core.raise_unseen()

    def __enter__(self) -> Producer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except HoldfastError as failure:
            if error is None:
                raise
            error.add_note(f"messages were not stored: {failure}")

    def _ready(self, topic: str) -> Destination | None:
        """Return the destination of an open topic; None if the topic has to be opened first."""
        if not self._core.usable or self._backing.closed:
            self._core.check_open()
        try:
            destination = self._destinations[topic]
        except (KeyError, TypeError):
            return None
        if self._is_stale is not None and self._is_stale(destination.topic):
            return None
        return destination

    def _open(self, topic: str) -> Destination:
        return self._core.open(topic)

    def _insist(self, addressed: Addressed) -> Sent:
        """Add a message to its batch as soon as there is space."""
        deadline_ns = self._waits.deadline_ns(self.settings.block_ms / 1000)
        while True:
            self._make_way(addressed.outbox, deadline_ns, addressed.turns)
            if (sent := self._core.put(addressed)) is not None:
                return sent

    def _insist_draft(self, addressed: Addressed) -> tuple[Parcel, int]:
        deadline_ns = self._waits.deadline_ns(self.settings.block_ms / 1000)
        while True:
            self._make_way(addressed.outbox, deadline_ns, addressed.turns)
            if (added := self._core.put_draft(addressed)) is not None:
                return added

    def _extend(self, outbox: Outbox, values: list[bytes], size: int) -> tuple[Parcel, int]:
        extend = self._core.accumulator.extend
        added = extend(outbox, values, size)
        if added is None:
            deadline_ns = self._waits.deadline_ns(self.settings.block_ms / 1000)
            while added is None:
                self._make_way(outbox, deadline_ns)
                added = extend(outbox, values, size)
        return added

    def _make_way(self, outbox: Outbox, deadline_ns: int | None, turns: int = 0) -> None:
        """Open the topic again if it was closed; otherwise wait until a batch was stored.

        If there is no space in time, the turns that the message took are given back.
        """
        self._core.check_open()
        if not outbox.destination.usable:
            self._core.open(outbox.destination.name)
            return
        try:
            self._waits.room(deadline_ns)
        except QueueFull:
            outbox.destination.give_back(turns)
            raise

    def _drain(self, timeout_s: float | None) -> None:
        if self._waits.answered_all(self._core.accumulator.hurry(), timeout_s) is not None:
            raise Unavailable(
                f"some messages were not stored within {timeout_s:g} s, and are still being sent: call `flush` again"
            )


def _seconds(timeout: Seconds | None) -> float | None:
    return None if timeout is None else duration_ms(timeout, "timeout") / 1000


class ProducerWaits:
    """How callers of one producer wait: for answers, and for space in its buffer."""

    def __init__(self, core: ProducerCore[Any], rounds: ThreadRounds | TaskRounds) -> None:
        self._core = core
        self._accumulator = core.accumulator
        self._clock = core.clock
        self._rounds = rounds

    def deadline_ns(self, timeout_s: float | None) -> int | None:
        """Return the deadline that many seconds from now."""
        return None if timeout_s is None else self._clock.monotonic_ns() + round(timeout_s * 1e9)

    def answered(self, parcel: Parcel, deadline_ns: int | None = None) -> bool:
        """Wait until the parcel is answered or the timeout passes; returns whether it is answered."""
        self._rounds.check_outside()
        waiter = ThreadWaiter(self._clock)
        if not self._accumulator.await_answer(parcel, waiter):
            return True
        try:
            while not parcel.done:
                left_s = self._left_s(deadline_ns)
                if left_s is not None and left_s <= 0:
                    return False
                waiter.wait(self._rounds.help(left_s))
        finally:
            if not parcel.done:
                self._accumulator.forget_answer(parcel, waiter)
        return True

    def answered_all(self, parcels: Iterable[Parcel], timeout_s: float | None) -> Parcel | None:
        """Wait until all are answered or the timeout passes; returns the first that is not answered."""
        deadline_ns = self.deadline_ns(timeout_s)
        for parcel in parcels:
            if not parcel.done and not self.answered(parcel, deadline_ns):
                return parcel
        return None

    def room(self, deadline_ns: int | None) -> None:
        """Return when something was stored, or now and then; QueueFull when the time is over."""
        self._rounds.check_outside()
        waiter = ThreadWaiter(self._clock)
        try:
            if not self._accumulator.await_room(waiter):
                return  # all was stored just now
            left_s = self._left_s(deadline_ns)
            if left_s is not None and left_s <= 0:
                raise self._core.full()
            waiter.wait(self._rounds.help(left_s))
        finally:
            self._accumulator.forget_room(waiter)

    def call_when_done(self, parcel: Parcel, callback: Callback) -> None:
        """Call once the parcel is answered; at once where it is."""
        self._accumulator.call_when_done(parcel, callback)

    def _left_s(self, deadline_ns: int | None) -> float | None:
        return None if deadline_ns is None else (deadline_ns - self._clock.monotonic_ns()) / 1e9
