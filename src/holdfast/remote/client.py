"""A client of a server: its calls for tasks and threads, its publisher, and the thread that renews its leases."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from itertools import count
from queue import Empty as NothingThere
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import msgspec

from holdfast.api.drafts import Bodies, NewMessage, PublishRequest
from holdfast.broker.folder.layout import DEFAULT_TOPIC, run_receipt
from holdfast.broker.messages import TEXT_KEY, Draft, Place, check_partition
from holdfast.broker.producers import ProducerId
from holdfast.client.calling import Ask, Caller, packed, path_of
from holdfast.client.network import Network, TaskNetwork, ThreadNetwork, run
from holdfast.client.opening import Address
from holdfast.env import Clock, World, close_in_children, end_at_exit
from holdfast.env.process import asyncio, get_logger
from holdfast.errors import HoldfastError, LeaseLost, Unavailable
from holdfast.model import Durability, Record
from holdfast.producing.parcels import Outbox, Parcel
from holdfast.protocol import messages as wire
from holdfast.protocol.messages import Extend, Nack, Settled
from holdfast.protocol.topics import BeginProducer, NextSequence, ProducerBegun, Written
from holdfast.remote.publisher import KnownTopic, RemotePublisher, WireDrafter, is_loose
from holdfast.settings import ProducerSettings, TopicSettings

if TYPE_CHECKING:
    import ssl


_Result = TypeVar("_Result")


class Client:
    """What all faces of one connection share."""

    def __init__(
        self,
        world: World,
        address: Address,
        *,
        for_tasks: bool,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        threads = ThreadNetwork(world.clock)
        ways: Network = TaskNetwork(world.clock) if for_tasks else threads
        self.world = world
        self.default_topic = DEFAULT_TOPIC  # the name of a queue that is made without one
        self.caller = Caller(world, ways, address, token=token, tls=tls, timeout_s=timeout_s)
        # The thread has its own connections: those of a task belong to its event loop.
        self.beside = Caller(world, threads, address, token=token, tls=tls, timeout_s=timeout_s)
        self.publishing = RemotePublisher(self.caller)
        self.upkeep = LeaseThread(self.beside)
        self._on_close: Callable[[], None] | None = None
        self._note()
        close_in_children(self)
        end_at_exit(self)

    def inherit(self, take_over: Callable[[], None], on_close: Callable[[], None]) -> None:
        """Set what to do when the server is gone, and when this client is closed."""
        self.caller.on_broken = self.beside.on_broken = take_over
        self._on_close = on_close

    def _note(self) -> None:
        note = self.world.ids.process_note()
        self.holder = f"{note['host']}:{note['pid']}"
        self._own = self.world.ids.random_bytes(8).hex()
        self._numbers = count(1)
        # Takes that may have been done, by what they asked for. They are this process's: a child that gave one its name
        # again would have the messages that the parent has.
        self.unanswered: dict[tuple[Any, ...], str] = {}

    def attempt_id(self) -> str:
        """Return a unique name for a take."""
        return f"{self._own}-{next(self._numbers)}"

    def disown(self) -> None:
        """Start afresh in a child after a fork: connections, lanes and the thread are the parent's."""
        for caller in (self.caller, self.beside):
            caller.forget_idle()
        self.publishing.disown()
        self.upkeep.disown()
        self._note()

    def end(self) -> None:
        """At program exit, return dropped messages to their queues now instead of when their leases end."""
        self.upkeep.end(1.0)

    def close(self) -> None:
        """Return dropped messages to their queues and close. Closing twice is fine."""
        self.caller.close()
        self._end()

    def _end(self) -> None:
        self.upkeep.end()
        self.beside.close()
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()

    async def close_async(self) -> None:
        """Async version of `close`."""
        self.caller.close()
        await asyncio.to_thread(self._end)


# Calls to a server, for tasks and for threads: both run the same core, awaited or to its end.


class AsyncCalls:
    """The calls of tasks."""

    def __init__(self, client: Client) -> None:
        self._call = client.caller.call

    async def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Run the client's work and return its result."""
        return await work

    async def call(self, ask: Ask) -> Any:
        """Make a call and return its result. Raises the error if the server refuses it."""
        return await self._call(ask)

    async def ask(self, method: str, path: str, answers: Any, body: Any = None, **options: Any) -> Any:
        """Make a call whose body is a protocol value. The options are those of `ask_of`."""
        return await self._call(ask_of(method, path, answers, body, **options))


class Calls:
    """The calls of threads."""

    def __init__(self, client: Client) -> None:
        self._call = client.caller.call

    run = staticmethod(run)

    def call(self, ask: Ask) -> Any:
        """Make a call and return its result. Raises the error if the server refuses it."""
        return run(self._call(ask))

    def ask(self, method: str, path: str, answers: Any, body: Any = None, **options: Any) -> Any:
        """Make a call whose body is a protocol value. The options are those of `ask_of`."""
        return run(self._call(ask_of(method, path, answers, body, **options)))


def ask_of(method: str, path: str, answers: Any, body: Any = None, *, wait_s: float = 0.0, again: bool = True) -> Ask:
    """Return the request for a call whose body is a protocol value."""
    content = b"" if body is None else packed(body)
    return Ask(method=method, path=path, body=content, answers=answers, wait_s=wait_s, again=again)


# The port of a producer on a server: each parcel is a call that may be repeated, since the server knows its numbers.


_USUAL: Final = TopicSettings()
_MOST_PARTITIONS: Final = 10_000  # that a topic may have at all


class RemoteTopic:
    """A topic as a client knows it."""

    settings = _USUAL  # the server checks messages by those that it has
    closed = False

    def __init__(self, name: str, known: KnownTopic) -> None:
        self.name = name
        self.id = known.id
        self.count = known.count  # None: we may not ask
        self.partitions = range(self.count or 1)
        self.lost = known.lost


class RemoteDrafting:
    """Checks messages as far as a client can."""

    most_bytes = sys.maxsize  # the server has the limit

    def __init__(self, bodies: Bodies, clock: Clock) -> None:
        self._drafter = WireDrafter(bodies)
        self._clock = clock
        self.plain = bodies.plain

    def draft(self, message: NewMessage) -> tuple[Draft, wire.NewMessage, bool]:
        sent, draft = self._drafter.draft(message, self._clock.now_ns())
        return draft, sent, is_loose(sent)


class RemoteProducerPort:
    """The port of one producer on the partitions of a server. It has its own blocking connections."""

    blocks: Final = True
    most_parcel: Final = wire.MOST_MESSAGES
    most_partitions: Final = None

    def __init__(self, client: Client) -> None:
        self._client = client
        self.backing = client.caller
        self._caller = client.beside
        self._publishing = RemotePublisher(client.beside)  # gives dedup ids
        self.clock = client.world.clock
        self.settings = ProducerSettings()
        self.check_open = client.caller.check_open

    @property
    def place(self) -> str:
        return f"at {self._client.caller.address.text}"

    def begin(self, name: str | None, *, resume: bool) -> ProducerId:
        body = packed(BeginProducer(name=name, resume=resume))
        begun: ProducerBegun = self._call(
            Ask(method="POST", path=path_of("producers"), body=body, answers=ProducerBegun)
        )
        return ProducerId(int(begun.id), begun.epoch, begun.since)

    def open_topic(self, name: str) -> RemoteTopic:
        return RemoteTopic(name, run(self._client.publishing.look(name, self._caller)))

    def keep(self, topic: RemoteTopic) -> None:
        """Do nothing: the server holds its topics open."""

    release = keep

    def is_stale(self, topic: RemoteTopic) -> bool:
        known = self._client.publishing.known(topic.name)
        return known is None or (known.count, known.lost) != (topic.count, topic.lost)

    def check_partition(self, topic: RemoteTopic, partition: object) -> int:
        return check_partition(partition, topic.name, _MOST_PARTITIONS if topic.count is None else topic.count)

    def drafting(self, topic: RemoteTopic, bodies: Bodies) -> RemoteDrafting:
        return RemoteDrafting(bodies, self.clock)

    def check(self, identity: ProducerId) -> None:
        """Do nothing: the server does this with every call."""

    def is_prepared(self, outbox: Outbox) -> bool:
        return True

    def prepare(self, outbox: Outbox) -> None:
        """Do nothing: the server does this itself."""

    def next_sequence(self, outbox: Outbox, identity: ProducerId) -> int:
        return self._sequence(outbox, identity, 0, 0).sequence

    def offsets(self, outbox: Outbox, identity: ProducerId, first: int, count: int) -> Sequence[int | None]:
        return self._sequence(outbox, identity, first, count).offsets

    def append(self, parcel: Parcel, identity: ProducerId | None, durability: Durability) -> None:
        if identity is None:
            self.publish(parcel, identity, durability)
            return
        if parcel.request is None:
            parcel.request = packed(_batch(parcel))
        path = _partition_path(
            parcel.outbox,
            "append",
            producer=identity.id,
            epoch=identity.epoch,
            sequence=parcel.sequence,
            durability=durability,
        )
        written: Written = self._call(Ask(method="POST", path=path, body=parcel.request, answers=Written))
        parcel.durability = written.durability
        if written.offsets:
            parcel.offset = written.offsets[0]
        else:  # stored too long ago to say where
            parcel.skipped = len(parcel.values)

    def publish(self, parcel: Parcel, identity: ProducerId | None, durability: Durability) -> None:
        if parcel.request is None:
            messages = _messages(parcel)
            given = [message.dedup_id is not None or message.dedup_data is not None for message in messages]
            for message, has_id in zip(messages, given, strict=True):
                if not has_id:
                    message.dedup_id = self._publishing.new_id()
            parcel.request = messages, given
        messages, given = parcel.request
        outbox = parcel.outbox
        stored = run(
            self._publishing.publish_loose(outbox.destination.name, PublishRequest(messages, outbox.number, durability))
        )
        parcel.durability = stored[0].durability
        # A message with an id of ours is no duplicate: an earlier attempt stored it.
        parcel.places = [
            Place(each.offset, each.delayed_id, each.duplicate and has_id, each.partition)
            for each, has_id in zip(stored, given, strict=True)
        ]

    def written(self, parcel: Parcel, durability: Durability) -> None:
        """Do nothing: the server answers only when the messages are durable."""

    def wait(self, waiting: Any) -> None:
        """Do nothing: the server answers only when the messages are as durable as asked."""

    async def wait_async(self, waiting: Any) -> None:
        """Async version of `wait`."""

    def _sequence(self, outbox: Outbox, identity: ProducerId, first: int, count: int) -> NextSequence:
        query = {"producer": identity.id, "since": identity.since, "first": first, "count": count}
        path = _partition_path(outbox, "sequence", **query)
        answer: NextSequence = self._call(Ask(method="GET", path=path, answers=NextSequence))
        return answer

    def _call(self, ask: Ask) -> Any:
        return run(self._caller.call(ask))


def _partition_path(outbox: Outbox, call: str, **query: Any) -> str:
    return path_of("topics", outbox.destination.name, "partitions", outbox.number, call, **query)


def _batch(parcel: Parcel) -> wire.Batch:
    """Return what is to be stored: everything that was not skipped, as bare bodies if there are no keys or options."""
    if parcel.keys is None and not parcel.rest:
        return wire.Batch(bodies=parcel.values[parcel.skipped :])
    return wire.batch_of(_messages(parcel))


def _messages(parcel: Parcel) -> list[wire.NewMessage]:
    """Return the messages of the parcel one by one, without those that were skipped."""
    return [parcel.rest.get(i) or _message(parcel, i) for i in range(parcel.skipped, len(parcel.values))]


def _message(parcel: Parcel, i: int) -> wire.NewMessage:
    message = wire.NewMessage(body=parcel.values[i])
    key = None if parcel.keys is None else parcel.keys[i]
    if key is not None and parcel.flags is not None and parcel.flags[i] & TEXT_KEY:
        message.key = key.decode()
    else:
        message.key_data = key
    return message


# Background work of a client: it renews leases, returns dropped messages to their queues, and keeps members alive.
#
# Each client has one thread for this. It does not depend on an event loop, so a handler that blocks one loses no lease.


logger = get_logger(__name__)

_NS: Final = 1_000_000
_AT_ONCE: Final = 1_000
_SOON_NS: Final = 250 * _NS
_UNHANDLED: Final = (
    "a message of %s was dropped without ack or nack, and returns to the queue as after a failed attempt; use "
    "`with message:` (logged only once)"
)


# A struct is created in C. It needs no garbage collection (gc=False), because it refers to nothing but texts.
class HeldRun(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Messages that came as one run: where they are kept, and the token that stands for their receipts."""

    topic: str
    number: int
    start: str  # of their names
    token: bytes

    def id_of(self, record: Record) -> str:
        """The id of one of the messages."""
        return f"{self.start}{record.offset}"


class HeldLease(msgspec.Struct, eq=False, gc=False):
    """The lease of a message in flight, without the message: what the thread needs to know."""

    topic: str
    group: str
    given: str  # its receipt, unless it came in a run
    lease_ms: int
    until_ns: int
    due_ns: int  # when to renew it
    detached: bool = False
    renew: bool = False
    ended: bool = False
    lost: bool = False
    run: HeldRun | None = None
    offset: int = 0  # in the run's partition

    @property
    def receipt(self) -> str:
        """The proof of the lease as text."""
        run = self.run
        return self.given if run is None else run_receipt(run.token, run.start, self.offset)

    def begin(self, lease_ms: int, now_ns: int) -> None:
        """Restart the lease."""
        self.lease_ms = lease_ms
        self.until_ns, self.due_ns = lease_times(lease_ms, now_ns)

    def is_lost(self, now_ns: int) -> bool:
        return self.lost or now_ns >= self.until_ns


def lease_times(lease_ms: int, now_ns: int) -> tuple[int, int]:
    """When a lease that begins now ends, and when to renew it."""
    return now_ns + lease_ms * _NS, now_ns + lease_ms * _NS // 3


class Beating(Protocol):
    """Something that must send a sign of life now and then."""

    closed: bool

    def beat(self, now_ns: int) -> int:
        """Send a sign of life if that is due; returns when it is due again."""


class LeaseThread:
    """The thread of one client. `drop` may be called by a finalizer, anywhere."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._inbox: SimpleQueue[Any] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._ended = False

    def begin(self) -> None:
        """Start the thread, if it does not run yet."""
        if self._thread is None:
            self._start()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._ended:
                work = _LeaseWork(self._caller, self._inbox)
                self._thread = threading.Thread(target=work.run, name="holdfast-client", daemon=True)
                self._thread.start()

    def renew(self, held: HeldLease) -> None:
        """Renew the lease as long as the message is in flight."""
        held.renew = True
        self.begin()
        self._inbox.put(held)

    def drop(self, held: HeldLease) -> None:
        """Return a message to its queue that was dropped without being settled. Callable from a finalizer."""
        held.ended = True
        self._inbox.put((held,))

    def beat(self, beating: Beating) -> None:
        """Send signs of life for this object until it is closed."""
        self.begin()
        self._inbox.put(beating)

    def disown(self) -> None:
        """Start without a thread in a child after a fork: it is the parent's, with all its work."""
        self._thread = None
        self._inbox = SimpleQueue()
        self._lock = threading.Lock()

    def end(self, timeout_s: float = 2.0) -> None:
        """Return dropped messages to their queues, then stop."""
        self._ended = True
        if self._thread is not None:
            self._inbox.put(None)
            if self._thread is not threading.current_thread():
                self._thread.join(timeout_s)

    def __del__(self) -> None:
        self._inbox.put(None)  # nobody has the client any more


class _LeaseWork:
    """What the thread does; it knows the caller and the inbox, and keeps no client alive."""

    def __init__(self, caller: Caller, inbox: SimpleQueue[Any]) -> None:
        self._caller = caller
        self._inbox = inbox
        self._clock = caller.world.clock
        self._held: dict[HeldLease, None] = {}
        self._beating: dict[Beating, int] = {}
        self._dropped: list[HeldLease] = []
        self._ending = self._warned = False

    def run(self) -> None:
        """Run until the client is closed or gone."""
        while not self._ending:
            self._take_in()
            try:
                self._round()
            except Exception:  # whatever it was: without its thread every lease would end
                logger.exception("a round of upkeep failed", extra={"server": self._caller.address.text})

    def _take_in(self) -> None:
        """Wait for the next job, then take all that are there."""
        wait_s = self._wait_s()
        try:
            item = self._inbox.get(timeout=wait_s) if wait_s is None or wait_s > 0 else self._inbox.get_nowait()
            while True:
                self._note(item)
                item = self._inbox.get_nowait()
        except NothingThere:
            return

    def _note(self, item: Any) -> None:
        if item is None:
            self._ending = True
        elif isinstance(item, HeldLease):
            self._held[item] = None
        elif isinstance(item, tuple):
            self._dropped.append(item[0])
        else:
            self._beating[item] = 0

    def _wait_s(self) -> float | None:
        due_ns = min((*(held.due_ns for held in self._held), *self._beating.values()), default=None)
        if due_ns is None:
            return None
        return max(due_ns - self._clock.monotonic_ns(), 0) / 1e9

    def _round(self) -> None:
        if self._dropped:
            dropped, self._dropped = self._dropped, []
            self._give_back(dropped)
        now_ns = self._clock.monotonic_ns()
        for held in [held for held in self._held if held.ended or held.is_lost(now_ns)]:
            del self._held[held]
        due = [held for held in self._held if held.due_ns <= now_ns]
        for topic, group, some in _by_group(due):
            self._renew(topic, group, some)
        for beating, due_ns in list(self._beating.items()):
            if beating.closed:
                del self._beating[beating]
            elif due_ns <= now_ns:
                self._beating[beating] = beating.beat(now_ns)

    def _renew(self, topic: str, group: str, due: list[HeldLease]) -> None:
        now_ns = self._clock.monotonic_ns()
        lease_ms = due[0].lease_ms
        body = Extend(receipts=[held.receipt for held in due], group=group, lease=lease_ms / 1000)
        try:
            self._ask(topic, "extend", body)
        except LeaseLost as error:
            gone = set(error.receipts) or {held.receipt for held in due}
            for held in due:
                if held.receipt in gone:
                    held.lost = not held.ended
                    self._held.pop(held, None)
                else:
                    held.begin(held.lease_ms, now_ns)
        except Unavailable as error:
            logger.warning("leases not renewed yet", extra={"topic": topic, "messages": len(due), "why": str(error)})
            for held in due:
                held.due_ns = now_ns + _SOON_NS
        except HoldfastError as error:
            logger.warning("leases cannot be renewed", extra={"topic": topic, "messages": len(due), "why": str(error)})
            for held in due:
                self._held.pop(held, None)
        else:
            for held in due:
                held.begin(held.lease_ms, now_ns)

    def _give_back(self, dropped: list[HeldLease]) -> None:
        for held in dropped:
            self._held.pop(held, None)
        for topic, group, some in _by_group(dropped):
            if not self._warned:
                self._warned = True
                logger.warning(_UNHANDLED, topic)
            # The handler may have started before the message was dropped. Were this a deferral, a message that breaks
            # its handler would be delivered again and again, at once.
            body = Nack(receipts=[held.receipt for held in some], group=group, intent="drop")
            try:
                self._ask(topic, "nack", body)
            except LeaseLost:
                continue  # it was settled, or had ended by itself
            except HoldfastError as error:
                logger.warning("dropped messages return when their leases expire", extra={"why": str(error)})

    def _ask(self, topic: str, verb: str, body: Any) -> None:
        run(
            self._caller.call(
                Ask(method="POST", path=path_of("queues", topic, verb), body=packed(body), answers=Settled)
            )
        )


def _by_group(held: Iterable[HeldLease]) -> list[tuple[str, str, list[HeldLease]]]:
    """Group leases by group and length, in batches of limited size."""
    found: dict[tuple[str, str, int], list[HeldLease]] = {}
    for each in held:
        found.setdefault((each.topic, each.group, each.lease_ms), []).append(each)
    return [
        (topic, group, some[i : i + _AT_ONCE])
        for (topic, group, _), some in found.items()
        for i in range(0, len(some), _AT_ONCE)
    ]
