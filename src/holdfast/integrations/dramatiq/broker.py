"""The broker of dramatiq: its queues are ours, of the same name.

A message that a worker holds is a lease, which is renewed for as long as that takes. Delays are ours too, so the queues
for delayed messages that other brokers have (`default.DQ`) do not exist, and no worker keeps such messages in memory.
A message that failed for good is a dead letter with its error.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from typing import Any, Final, Literal

import dramatiq
from dramatiq.errors import ConnectionClosed, DecodeError, QueueJoinTimeout, QueueNotFound

import holdfast
from holdfast.env import real_world
from holdfast.errors import Closed, HoldfastError, LeaseLost, Unavailable
from holdfast.integrations.places import Shared, Tls, check_threads, place_of, places, topic_name

# Dramatiq counts retries itself, as new messages. An attempt here is a delivery whose worker died.
_QUEUE_SETTINGS: Final = {"max_attempts": 20}
_MOST_PRIORITY: Final = 9
_JOIN_S: Final = 0.05


class HoldfastBroker(dramatiq.Broker):
    """A broker on a folder, a server or a store.

    Args:
        url: A folder, the address of a server, or a store.
        middleware: As for every broker: by default dramatiq's own.
        prefix: Of the names of topics, if several programs share a place.
        lease: How long a dead worker keeps its messages, in seconds; by default the queue's `lease_ms`.
        durability: What `send` survives: "fsync", "interval" or "os".
        queue_settings: Settings for new queues.
        tls: For a server whose certificate comes from an authority of your own.
    """

    def __init__(
        self,
        url: str,
        *,
        middleware: list[dramatiq.Middleware] | None = None,
        prefix: str = "",
        lease: float | None = None,
        durability: Literal["fsync", "interval", "os"] = "fsync",
        queue_settings: dict[str, Any] | None = None,
        tls: Tls = None,
    ) -> None:
        super().__init__(middleware)
        check_threads(place_of(url)[0])  # here, because a consumer that fails is begun again
        self.url = url
        self.lease = lease
        self._prefix = prefix
        self._durability = durability
        self._new_queue = _QUEUE_SETTINGS | (queue_settings or {})
        self._opening = {} if tls is None else {"tls": tls}
        self._clock = real_world().clock
        self.actor_options.add("broker_priority")  # 0 to 9, where 9 is the most urgent: RabbitMQ's name for it

    @property
    def shared(self) -> Shared:
        """The broker at the URL, opened when it is first used: importing a module with actors opens nothing."""
        return places.at(self.url, self._opening)

    def queue(self, queue_name: str) -> holdfast.Queue[bytes]:
        """The Holdfast queue of a declared queue."""
        if queue_name not in self.queues:
            raise QueueNotFound(queue_name)
        return self.shared.queue(self._prefix + queue_name, self._new_queue)

    def declare_queue(self, queue_name: str) -> None:
        if queue_name not in self.queues:
            self.emit_before("declare_queue", queue_name)
            self.queues[queue_name] = topic_name(self._prefix + queue_name)
            self.emit_after("declare_queue", queue_name)

    def enqueue(self, message: dramatiq.Message[Any], *, delay: int | None = None) -> dramatiq.Message[Any]:
        """Store a message; it is on disk when this returns."""
        if message.queue_name not in self.queues:
            raise QueueNotFound(message.queue_name)
        self.emit_before("enqueue", message, delay)
        try:
            self.queue(message.queue_name).put(
                message.encode(),
                delay=None if delay is None else timedelta(milliseconds=max(0, delay)),
                priority=self._priority(message),
                headers={"task": message.actor_name, "id": message.message_id},
                durability=self._durability,
            )
        except (Unavailable, Closed) as error:
            raise ConnectionClosed(error) from error
        self.emit_after("enqueue", message, delay)
        return message

    def _priority(self, message: dramatiq.Message[Any]) -> int:
        """What `send_with_options` says, or else the actor."""
        actor = self.actors.get(message.actor_name)
        options = {} if actor is None else actor.options
        priority = message.options.get("broker_priority", options.get("broker_priority"))
        return min(_MOST_PRIORITY, max(0, int(priority or 0)))

    def consume(self, queue_name: str, prefetch: int = 1, timeout: int = 30_000) -> HoldfastConsumer:
        if queue_name not in self.queues:
            raise QueueNotFound(queue_name)
        try:
            queue = self.shared.open_queue(self._prefix + queue_name, self._new_queue)
        except (Unavailable, Closed) as error:
            raise ConnectionClosed(error) from error
        return HoldfastConsumer(self, queue, prefetch, timeout)

    def flush(self, queue_name: str) -> None:
        """Drop all messages that nobody works on, delayed ones too."""
        self.queue(queue_name).purge()

    def flush_all(self) -> None:
        for queue_name in self.queues:
            self.flush(queue_name)

    def join(self, queue_name: str, *, timeout: int | None = None) -> None:
        """Wait until all messages of a queue are done or dead, delayed ones too. For tests."""
        queue, nothing = self.queue(queue_name), threading.Event()
        until_ns = None if timeout is None else self._clock.monotonic_ns() + timeout * 1_000_000
        while True:
            stats = queue.stats()
            if not (stats.ready or stats.delayed or stats.leased):
                return
            if until_ns is not None and self._clock.monotonic_ns() >= until_ns:
                raise QueueJoinTimeout(queue_name)
            self._clock.wait(nothing, _JOIN_S)


class HeldMessage(dramatiq.MessageProxy):
    """A message with its lease, and with the consumer that has a place for it."""

    def __init__(
        self, message: dramatiq.Message[Any], lease: holdfast.Message[bytes], consumer: HoldfastConsumer
    ) -> None:
        super().__init__(message)
        self.lease = lease
        self.consumer = consumer
        self.reason: str = ""

    def stuff_exception(self, exception: BaseException) -> None:
        super().stuff_exception(exception)
        self.reason = f"{type(exception).__name__}: {exception}"  # dramatiq drops the exception before it nacks


class HoldfastConsumer(dramatiq.Consumer):
    """Takes the messages of a queue, at most `prefetch` at a time. Acks may come from any thread."""

    def __init__(self, broker: HoldfastBroker, queue: holdfast.Queue[bytes], prefetch: int, timeout: int) -> None:
        self.logger = broker.logger
        self._broker = broker
        self._queue = queue
        self._prefetch = prefetch
        self._timeout_s = timeout / 1000
        self._taken: deque[holdfast.Message[bytes]] = deque()
        self._changed = threading.Condition()
        self._held = 0  # messages that were delivered and not settled yet

    def __next__(self) -> HeldMessage | None:
        """The next message, None if there is none within the timeout."""
        if not self._taken:
            self._take()
        while self._taken:
            lease = self._taken.popleft()
            with self._changed:
                self._held += 1
            try:
                return HeldMessage(dramatiq.Message.decode(lease.raw), lease, self)
            except DecodeError as error:
                self.logger.error("Moving a message that cannot be decoded to the dead letters: %s", error)
                self._settle_quietly(lease, partial(lease.reject, f"the message cannot be decoded: {error}"))
                self.release()
        return None

    def _take(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._held < self._prefetch, self._timeout_s)
            room = self._prefetch - self._held
        if room <= 0:
            return
        try:
            self._taken.extend(
                self._queue.receive_many(room, timeout=self._timeout_s, lease=self._broker.lease, renew=True)
            )
        except (Unavailable, Closed) as error:
            raise ConnectionClosed(error) from error

    def ack(self, message: HeldMessage) -> None:
        self._settle(message, message.lease.ack)

    def nack(self, message: HeldMessage) -> None:
        """Make it a dead letter."""
        self._settle(message, lambda: message.lease.reject(message.reason or "the actor failed"))

    def requeue(self, messages: Iterable[HeldMessage]) -> None:
        """Put messages back where they were; no attempt is counted."""
        for message in messages:
            self._settle_quietly(message.lease, message.lease.defer)
            message.consumer.release()

    def close(self) -> None:
        """Put back what was taken and not delivered."""
        while self._taken:
            lease = self._taken.popleft()
            self._settle_quietly(lease, lease.defer)

    def _settle(self, message: HeldMessage, act: Any) -> None:
        try:
            act()
        except LeaseLost as error:
            self.logger.warning("Handled a message, but its lease was lost, so it may run again: %s", error)
        except Unavailable as error:
            raise ConnectionClosed(error) from error  # dramatiq tries again
        except BaseException:
            message.consumer.release()  # dramatiq does not try again
            raise
        message.consumer.release()

    def _settle_quietly(self, lease: holdfast.Message[bytes], act: Any) -> None:
        try:
            act()
        except HoldfastError as error:
            self.logger.warning(
                "Could not settle the message %s, which returns when its lease ends: %s", lease.id, error
            )

    def release(self) -> None:
        """Give the place of a message back."""
        with self._changed:
            self._held -= 1
            self._changed.notify_all()
