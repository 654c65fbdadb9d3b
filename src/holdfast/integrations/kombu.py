"""The kombu transport: Celery, and whatever else speaks kombu, on a folder, a server or a store.

    broker_url = "holdfast:///var/lib/app/jobs"          a folder, shared by all processes of this machine
    broker_url = "holdfast+http://:TOKEN@host:7700"      a server
    broker_url = "holdfast+s3://bucket/jobs"             a folder in a store

A kombu queue is a Holdfast queue of the same name, and an unacked message is a lease that is renewed for as long as the
process holds it. So nothing depends on kombu's own table of unacked messages, and there is no visibility timeout to
choose: a task may run for hours, and if its worker dies, the message returns once the lease has ended.

Every consumer has a thread that waits for messages: no polling. A thread waits only while the channel has room for
another message (`prefetch_count`). Several threads may wait for the last place; one gets it, and the others put back
what they took, which costs the message nothing: it is ready again at once, at its old place, with the same count of
attempts. A channel therefore never holds more messages than it was allowed.

What kombu keeps in memory, which queue is bound to which exchange, has to be known to all processes here. It is stored
as one document for each exchange. A queue that is deleted with its consumer (`auto_delete`: replies, events, remote
control) is held by a lock while its consumer lives; whoever publishes to the exchange removes the queue once that lock
is gone, so a killed process leaves nothing behind.

A connection to a server is made only if the server answers: kombu then retries, or goes on to the next of its
alternates (`broker_url = "holdfast+http://a:7700;holdfast+http://b:7700"`).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from heapq import heappop, heappush
from itertools import count
from typing import Any, Final

import msgspec
from kombu.transport import virtual
from kombu.utils.url import as_url, parse_url
from kombu.utils.uuid import uuid

import holdfast
from holdfast.env import real_world
from holdfast.env.sockets import bell
from holdfast.errors import Closed, HoldfastError, LeaseLost, LockHeld, Unavailable, UnknownTopic
from holdfast.integrations import register_transport
from holdfast.integrations.places import Shared, check_answers, check_threads, place_of, places, shown_url, topic_name

logger = logging.getLogger(__name__)
register_transport()

ENVELOPE: Final = "kombu"  # the header with everything that kombu keeps beside the body

# Retries are counted by Celery, as new messages. An attempt here is a delivery that ended badly: the worker died, or
# asked for the message to be delivered again. As with RabbitMQ's quorum queues, 20 of them are enough.
_QUEUE_SETTINGS: Final = {"max_attempts": 20}

_BINDINGS: Final = "kombu.bindings."
_QUEUE_LOCK: Final = "kombu.queue."
_FIRST: Final = 10  # more urgent than any message
_UNLIMITED: Final = 100  # how many messages a thread takes at a time where kombu sets no limit
_LOOK_AGAIN_S: Final = 30.0
_LONGEST_WAIT_S: Final = 1.0  # how long a consumer's thread waits for messages before it looks whether it was stopped
_PAUSES_S: Final = (0.1, 5.0)  # the first and the longest pause after an error that may pass
_CONNECT_S: Final = 5.0  # how long a server may take to answer where kombu sets no limit: kombu's own

_json = msgspec.json.Encoder()


class HeldMessage(virtual.Message):
    """A delivered message, which knows its lease, and whether its body could be decoded."""

    def __init__(self, payload: dict[str, Any], channel: Any = None, **kwargs: Any) -> None:
        self.lease: holdfast.Message[bytes] | None = payload.get("lease")
        self._undecodable: Exception | None = None
        super().__init__(payload, channel=channel, **kwargs)

    def decode(self) -> Any:
        try:
            return super().decode()
        except Exception as error:
            self._undecodable = error
            raise

    @property
    def problem(self) -> str:
        """Why the body could not be decoded, or decompressed; empty if it could, or if nobody has tried."""
        error = self.errors[0][1] if self.errors else self._undecodable
        return "" if error is None else f"the body cannot be decoded: {error}"


class QoS(virtual.QoS):
    """The unacked messages of a channel. Acks may come from any thread."""

    def can_consume(self) -> bool:
        return bool(self.channel.room())

    def append(self, message: HeldMessage, delivery_tag: str) -> None:
        self._delivered[delivery_tag] = message

    def ack(self, delivery_tag: str) -> None:
        """Ack it, or make it a dead letter if its body could not be decoded: Celery acks it then, to drop it."""
        message = self._delivered.get(delivery_tag)
        problem = "" if message is None else message.problem
        self._settle(delivery_tag, lambda lease: lease.reject(problem) if problem else lease.ack())

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:  # noqa: FBT001, FBT002  kombu's signature
        """Deliver it again at once, which counts as an attempt, or make it a dead letter."""
        if requeue:
            self._settle(delivery_tag, lambda lease: lease.nack(delay=0, error="the consumer asked for a redelivery"))
        else:
            self._settle(delivery_tag, lambda lease: lease.reject("the consumer rejected the message"))

    def restore_unacked(self) -> list[tuple[BaseException, HeldMessage]]:
        """Give everything back that was not acked; no attempt is counted."""
        for tag in list(self._delivered):
            with suppress(HoldfastError):  # it returns when its lease ends
                self._settle(tag, lambda lease: lease.defer())
        return []

    def restore_unacked_once(self, stderr: Any = None) -> None:
        del stderr  # kombu prints what it failed to restore; here nothing is lost by that
        self._on_collect.cancel()
        self.restore_unacked()

    def _settle(self, delivery_tag: str, act: Callable[[holdfast.Message[bytes]], None]) -> None:
        message = self._delivered.pop(delivery_tag, None)
        if message is None:
            return
        try:
            act(message.lease)
        except LeaseLost as error:
            logger.warning("a message was handled, but its lease was lost, so it may be delivered again: %s", error)
        finally:
            self.channel.release()


class Channel(virtual.Channel):
    """Queues, exchanges and consumers of one connection."""

    Message = HeldMessage
    QoS = QoS
    supports_fanout = True
    body_encoding = None  # bodies are stored as they are, so that the console and `holdfast show` can read them

    lease: float | None = None
    durability: str | None = None
    queue_settings: dict[str, Any] = _QUEUE_SETTINGS
    from_transport_options = (
        *virtual.Channel.from_transport_options,
        "durability",
        "lease",
        "queue_settings",
        "visibility_timeout",
    )

    def __init__(self, connection: HoldfastTransport, **kwargs: Any) -> None:
        self._changed = threading.Condition()
        self._held = 0  # messages on their way to the consumer, or not settled by it yet
        self._consuming: dict[str, Consuming] = {}
        self._temporary: dict[str, Any] = {}  # queues that end with this channel, and the locks that keep them
        self._looked_at: dict[str, float] = {}
        self._clock = real_world().clock
        super().__init__(connection, **kwargs)
        self.shared = connection.shared

    @property
    def visibility_timeout(self) -> float | None:
        """The name that users of Redis and SQS know for `lease`; it is renewed while a message is held."""
        return self.lease

    @visibility_timeout.setter
    def visibility_timeout(self, seconds: float) -> None:
        self.lease = seconds

    # Queues

    def _new_queue(self, queue: str, auto_delete: bool = False, **kwargs: Any) -> None:  # noqa: FBT001, FBT002
        self._queue(queue)
        if auto_delete and queue not in self._temporary:
            with suppress(LockHeld):  # another consumer of the queue keeps it
                hold = self.shared.broker.locks.hold(_QUEUE_LOCK + topic_name(queue), wait=0)
                hold.__enter__()
                self._temporary[queue] = hold

    def _queue(self, name: str) -> holdfast.Queue[bytes]:
        return self.shared.queue(name, self.queue_settings)

    def _has_queue(self, queue: str, **kwargs: Any) -> bool:
        return topic_name(queue) in self.shared.broker.topics()

    def _size(self, queue: str) -> int:
        return self._queue(queue).qsize() if self._has_queue(queue) else 0

    def _purge(self, queue: str) -> int:
        return self._queue(queue).purge() if self._has_queue(queue) else 0

    def queue_delete(self, queue: str, if_unused: bool = False, if_empty: bool = False, **kwargs: Any) -> None:  # noqa: FBT001, FBT002
        """Delete the queue with its messages and bindings."""
        if if_empty and self._size(queue):
            return
        for exchange in list(self._exchanges()):
            self.shared.change(_BINDINGS + topic_name(exchange), lambda rows: [row for row in rows if row[2] != queue])
        self.state.queue_bindings_delete(queue)
        self.shared.forget(queue)
        with suppress(UnknownTopic):
            self.shared.broker.delete_topic(topic_name(queue))

    # Exchanges

    def _exchanges(self) -> Iterator[str]:
        for name in self.shared.broker.documents.list():
            if name.startswith(_BINDINGS):
                yield name.removeprefix(_BINDINGS)

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str, queue: str) -> None:
        row = [routing_key or "", pattern or "", queue or "", queue in self._temporary]
        self.shared.change(_BINDINGS + topic_name(exchange), lambda rows: rows if row in rows else [*rows, row])

    def queue_unbind(self, queue: str, exchange: str = "", routing_key: str = "", *args: Any, **kwargs: Any) -> None:
        self.state.binding_delete(queue, exchange, routing_key)
        key = [routing_key or "", queue]
        self.shared.change(
            _BINDINGS + topic_name(exchange), lambda rows: [row for row in rows if [row[0], row[2]] != key]
        )

    def get_table(self, exchange: str) -> list[tuple[str, str, str]]:
        """The bindings of an exchange, in all processes."""
        found = self.shared.broker.documents.get(_BINDINGS + topic_name(exchange))
        rows = found.value if found else []
        return [
            (key, pattern, queue) for key, pattern, queue, temporary in rows if not (temporary and self._gone(queue))
        ]

    def _gone(self, queue: str) -> bool:
        """Whether nobody keeps a temporary queue any more; it is deleted then."""
        now_s = self._clock.monotonic_ns() / 1e9
        if queue in self._temporary or now_s - self._looked_at.get(queue, -_LOOK_AGAIN_S) < _LOOK_AGAIN_S:
            return False
        if self.shared.broker.locks.describe(_QUEUE_LOCK + topic_name(queue)).held:
            self._looked_at[queue] = now_s
            return False
        self.queue_delete(queue)
        return True

    # Publishing

    def _put(self, queue: str, message: dict[str, Any], **kwargs: Any) -> None:
        body = message["body"]
        rest = {name: value for name, value in message.items() if name != "body"}
        headers, properties = message.get("headers") or {}, message["properties"]
        options: dict[str, Any] = {}
        if eta := headers.get("eta"):
            at = datetime.fromisoformat(eta)
            options["at"] = at if at.tzinfo else at.replace(tzinfo=UTC)
        if expiration := properties.get("expiration"):
            options["ttl"] = int(expiration) / 1000
        if dedup_id := properties.get("dedup_id"):
            options["dedup_id"] = dedup_id
        names = {name: str(headers[name]) for name in ("task", "id") if headers.get(name)}
        put = {
            "priority": self._get_message_priority(message),
            "headers": {**names, ENVELOPE: _json.encode(rest).decode()},
            "correlation_id": properties.get("correlation_id"),
            "durability": self.durability,
            **options,
        }
        encoded = body.encode() if isinstance(body, str) else bytes(body)
        try:
            self._queue(queue).put(encoded, **put)
        except (UnknownTopic, Closed):
            if self.shared.broker.closed:
                raise
            self.shared.forget(queue)  # it was deleted by another process since we opened it
            self._queue(queue).put(encoded, **put)

    def _put_fanout(self, exchange: str, message: dict[str, Any], routing_key: str, **kwargs: Any) -> None:
        for _, _, queue in self.get_table(exchange):
            self._put(queue, message)

    # Consuming

    def payload(self, lease: holdfast.Message[bytes]) -> dict[str, Any]:
        """The message as kombu expects it."""
        envelope = lease.headers.get(ENVELOPE)
        payload = msgspec.json.decode(envelope) if envelope else {"headers": dict(lease.headers), "properties": {}}
        properties = payload["properties"]
        properties["delivery_tag"] = uuid()
        properties.setdefault("delivery_info", {"exchange": "", "routing_key": lease.topic})
        properties["delivery_info"]["redelivered"] = lease.attempt > 1
        payload["body"] = lease.raw
        payload["lease"] = lease
        return payload

    def _get(self, queue: str, timeout: float | None = None) -> dict[str, Any]:
        lease = self._queue(queue).receive(timeout=timeout or 0, lease=self.lease, renew=True)
        self.hold(1)
        return self.payload(lease)

    def basic_consume(self, queue: str, no_ack: bool, callback: Any, consumer_tag: str, **kwargs: Any) -> None:  # noqa: FBT001
        super().basic_consume(queue, no_ack, callback, consumer_tag, **kwargs)
        deliver = self.connection._callbacks[queue]  # noqa: SLF001  kombu's own way from channel to transport

        def settled(payload: dict[str, Any]) -> Any:
            self.settle_now(payload["lease"].ack)
            return deliver(payload)

        if no_ack:
            self.connection._callbacks[queue] = settled  # noqa: SLF001
        self._consuming[consumer_tag] = Consuming(self, queue)

    def basic_cancel(self, consumer_tag: str) -> None:
        consuming = self._consuming.pop(consumer_tag, None)
        if consuming is not None:
            consuming.stop()
            for lease in self.connection.arrived.take_back(self, consuming.queue):
                with suppress(HoldfastError):  # it returns when its lease ends
                    self.settle_now(lease.defer)
        super().basic_cancel(consumer_tag)

    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> Any:  # noqa: FBT001, FBT002
        message = super().basic_get(queue, no_ack=no_ack, **kwargs)
        if message is not None and no_ack:
            self.settle_now(message.lease.ack)
        return message

    def basic_qos(self, prefetch_size: int = 0, prefetch_count: int = 0, apply_global: bool = False) -> None:  # noqa: FBT001, FBT002
        super().basic_qos(prefetch_size, prefetch_count, apply_global)
        self.wake()

    def settle_now(self, act: Callable[[], None]) -> None:
        """Settle a message that the consumer never will."""
        try:
            with suppress(LeaseLost):
                act()
        finally:
            self.release()

    def room(self) -> int:
        """How many more messages the consumer may be given."""
        most = self.qos.prefetch_count
        return max(0, most - self._held) if most else _UNLIMITED

    def hold(self, count: int) -> int:
        """Take up to `count` places for messages that are going to be delivered; returns how many were free."""
        with self._changed:
            count = min(count, self.room())
            self._held += count
            return count

    def release(self) -> None:
        """Give a place back."""
        with self._changed:
            self._held -= 1
            self._changed.notify_all()

    def wait_for_room(self, consuming: Consuming) -> int:
        """Wait until another message may be delivered. Returns how many, 0 if the consumer has ended."""
        with self._changed:
            self._changed.wait_for(lambda: consuming.stopped or self.room())
            return 0 if consuming.stopped else self.room()

    def wait_for_stop(self, consuming: Consuming, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: consuming.stopped, timeout_s)

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        if self.closed:
            return
        for consumer in list(self._consumers):
            self.basic_cancel(consumer)
        temporary, self._temporary = self._temporary, {}
        for queue, hold in temporary.items():  # while the channel still has a connection
            with suppress(HoldfastError):
                self.queue_delete(queue)
            with suppress(HoldfastError):
                hold.__exit__(None, None, None)
        super().close()


class Consuming:
    """The thread that waits for the messages of one consumer."""

    def __init__(self, channel: Channel, queue: str) -> None:
        self._channel = channel
        self.queue = queue
        self._transport = channel.connection
        self._source = channel.shared.open_queue(queue, channel.queue_settings)
        self.stopped = False
        self._thread = threading.Thread(target=self._run, name=f"holdfast-kombu-{queue}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Returns when it has put back what it had taken and not delivered."""
        self.stopped = True
        self._channel.wake()
        self._thread.join(5 * _LONGEST_WAIT_S)

    def _run(self) -> None:
        pause_s, longest_s = _PAUSES_S
        while count := self._channel.wait_for_room(self):
            try:
                lease_s = self._channel.lease
                leases = self._source.receive_many(count, timeout=_LONGEST_WAIT_S, lease=lease_s, renew=True)
            except Unavailable as error:
                # The server restarts, or the folder changes hands. What was delivered is still held, and the client
                # renews it, so there is no reason to tell the worker, which would cancel its consumers.
                logger.warning("cannot take messages of the queue %s, trying again: %s", self.queue, error)
                self._channel.wait_for_stop(self, pause_s)
                pause_s = min(2 * pause_s, longest_s)
            except HoldfastError as error:
                if not self.stopped:
                    self._transport.arrived.put(self._channel, self.queue, error)
                return
            else:
                pause_s = _PAUSES_S[0]
                self._hand_over(leases)

    def _hand_over(self, leases: list[holdfast.Message[bytes]]) -> None:
        taken = 0 if self.stopped else self._channel.hold(len(leases))
        for lease in leases[:taken]:
            self._transport.arrived.put(self._channel, self.queue, lease)
        for lease in leases[taken:]:
            with suppress(HoldfastError):  # it returns when its lease ends
                lease.defer()


class TakenMessages:
    """What the threads have taken for the consumers of a connection, until kombu asks for it.

    The queues take turns in the order in which their messages came; in its turn, a queue gives the most urgent of them.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._turns: deque[tuple[Channel, str]] = deque()
        self._arrived: dict[tuple[Channel, str], list[tuple[int, int, holdfast.Message[bytes] | HoldfastError]]] = {}
        self._numbers = count()
        self._wake: Callable[[], Any] = bool

    def wake_by(self, wake: Callable[[], Any]) -> None:
        """Call this whenever a message comes, too."""
        with self._changed:
            self._wake = wake
            if self._turns:
                wake()

    def put(self, channel: Channel, queue: str, arrived: holdfast.Message[bytes] | HoldfastError) -> None:
        urgency = _FIRST if isinstance(arrived, HoldfastError) else arrived.priority
        with self._changed:
            self._turns.append((channel, queue))
            heappush(self._arrived.setdefault((channel, queue), []), (-urgency, next(self._numbers), arrived))
            self._changed.notify()
            self._wake()

    def get(self, timeout: float | None) -> tuple[Channel, str, holdfast.Message[bytes] | HoldfastError]:
        """Return the next one; waits for it. Raises TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._turns, timeout):
                raise TimeoutError
            channel, queue = turn = self._turns.popleft()
            _, _, arrived = heappop(self._arrived[turn])
            if not self._arrived[turn]:
                del self._arrived[turn]
            return channel, queue, arrived

    def count(self, channel: Channel, queue: str) -> int:
        """Return how many wait for a consumer."""
        with self._changed:
            return len(self._arrived.get((channel, queue), []))

    def take_back(self, channel: Channel, queue: str) -> list[holdfast.Message[bytes]]:
        """Return the messages of a consumer that has ended, the most urgent first."""
        turn = (channel, queue)
        with self._changed:
            arrived = sorted(self._arrived.pop(turn, []))
            self._turns = deque(each for each in self._turns if each != turn)
        return [each for _, _, each in arrived if not isinstance(each, HoldfastError)]


class Bell:
    """Calls a function in kombu's event loop when another thread has rung."""

    def __init__(self, loop: Any, answer: Callable[[Any], None], connection: Any) -> None:
        self._loop = loop
        self._answer = answer
        self._heard, self._rung = bell()
        loop.add_reader(self._heard, self._hear, connection)

    def ring(self) -> None:
        with suppress(BlockingIOError):  # it has rung, and nobody has heard it yet
            self._rung.send(b"\0")

    def _hear(self, connection: Any) -> None:
        with suppress(BlockingIOError):
            self._heard.recv(4096)
        self._answer(connection)

    def close(self) -> None:
        self._loop.remove(self._heard)
        self._heard.close()
        self._rung.close()


class HoldfastTransport(virtual.Transport):
    """Connections of kombu to Holdfast."""

    Channel = Channel
    can_parse_url = True
    driver_type = "holdfast"
    driver_name = "holdfast"
    connection_errors = (*virtual.Transport.connection_errors, OSError, Unavailable, Closed)
    channel_errors = (*virtual.Transport.channel_errors, HoldfastError)
    implements = virtual.Transport.implements.extend(
        asynchronous=True, exchange_type=frozenset({"direct", "topic", "fanout"})
    )

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        restore_url(client)
        check_threads(place_of(client.hostname)[0])  # here, because what a connection raises is tried again
        self.arrived = TakenMessages()
        self._bell: Bell | None = None

    @property
    def shared(self) -> Shared:
        return places.at(self.client.hostname, self._opening)

    @property
    def _opening(self) -> dict[str, Any]:
        options = self.client.transport_options
        return {name: options[name] for name in ("tls",) if name in options}

    def establish_connection(self) -> Any:
        """Connect, unless the server does not answer: the error lets kombu try again, or try another URL."""
        most_s = self.client.connect_timeout or _CONNECT_S  # for all alternates together, says kombu
        check_answers(self.client.hostname, most_s / max(1, len(self.client.alt or ())), self._opening)
        return super().establish_connection()

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        """Let Celery's event loop deliver messages, between replies of its children, timers and remote control."""
        if self._bell is not None:
            self._bell.close()
        self._bell = Bell(loop, self._deliver_arrived, connection)
        self.arrived.wake_by(self._bell.ring)

    def _deliver_arrived(self, connection: Any) -> None:
        for _ in range(_UNLIMITED):
            try:
                self.drain_events(connection, timeout=0)
            except TimeoutError:
                return
        assert self._bell is not None
        self._bell.ring()  # others have their turn first

    def close_connection(self, connection: Any) -> None:
        if self._bell is not None:
            self.arrived.wake_by(bool)
            self._bell.close()
            self._bell = None
        super().close_connection(connection)

    def driver_version(self) -> str:
        return holdfast.__version__

    def as_uri(self, uri: str, include_password: bool = False, mask: str = "**") -> str:  # noqa: FBT001, FBT002
        return shown_url(uri, None if include_password else mask)

    def drain_events(self, connection: Any, timeout: float | None = None) -> None:
        """Deliver one message, and wait for it if need be."""
        channel, queue, arrived = self.arrived.get(timeout)
        if isinstance(arrived, HoldfastError):
            raise arrived
        if channel.closed or queue not in self._callbacks:
            channel.settle_now(arrived.defer)
        else:
            self._deliver(channel.payload(arrived), queue)


def restore_url(client: Any) -> None:
    """Give a connection its URL back. On a failover, kombu leaves only parts of it, which this transport cannot use.

    The alternate with these parts is the URL: put together from them, it might have other letters and slashes.
    """
    if not isinstance(client.transport_cls, str) or "/" in (client.hostname or ""):
        return  # a URL or a path
    parts = {name: getattr(client, name) for name in ("hostname", "port", "userid", "password", "virtual_host")}
    parts["transport"] = client.transport_cls
    # Kombu keeps a port and a path of the URL before if the new one has none.
    for lasting in ((), ("port",), ("virtual_host",), ("port", "virtual_host")):
        wanted = parts | dict.fromkeys(lasting)
        for url in client.alt or ():
            if "://" in url and parse_url(url) == wanted:
                client.hostname, client.port, client.virtual_host = url.removeprefix("holdfast+"), None, "/"
                return
    path = "" if client.virtual_host == "/" else client.virtual_host
    made = as_url(client.transport_cls, client.hostname, client.port, client.userid, client.password, path)
    client.hostname, client.port, client.virtual_host = made.removeprefix("holdfast+").removesuffix("/"), None, "/"
