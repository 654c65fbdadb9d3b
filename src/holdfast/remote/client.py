"""A client of a server: its calls for tasks and for threads, its publisher, and the thread that keeps its leases."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, Final, TypeVar

from holdfast.api.bodies import Bodies
from holdfast.api.drafts import NewMessage, PublishRequest
from holdfast.broker.folder.layout import DEFAULT_TOPIC
from holdfast.broker.messages import TEXT_KEY, Draft, Place, check_partition
from holdfast.broker.producers import ProducerId
from holdfast.client.address import Address
from holdfast.client.calling import Ask, Caller, packed, path_of
from holdfast.client.network import Network, TaskNetwork, ThreadNetwork, run
from holdfast.env import Clock, World, close_in_children, end_at_exit
from holdfast.model import Durability
from holdfast.producing.parcels import Outbox, Parcel
from holdfast.protocol import messages as wire
from holdfast.protocol.topics import BeginProducer, NextSequence, ProducerBegun, Written
from holdfast.remote.leases import LeaseThread
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
        # The thread has connections of its own: a task's are of its loop only.
        self.beside = Caller(world, threads, address, token=token, tls=tls, timeout_s=timeout_s)
        self.publishing = RemotePublisher(self.caller)
        self.upkeep = LeaseThread(self.beside)
        self._on_close: Callable[[], None] | None = None
        self._note()
        close_in_children(self)
        end_at_exit(self)

    def inherit(self, take_over: Callable[[], None], on_close: Callable[[], None]) -> None:
        """What to do when there is no server any more; and when this client is closed."""
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
        """A name for a take that no other one has."""
        return f"{self._own}-{next(self._numbers)}"

    def disown(self) -> None:
        """In a child after a fork: connections, lanes and the thread are the parent's; the child makes its own."""
        for caller in (self.caller, self.beside):
            caller.forget_idle()
        self.publishing.disown()
        self.upkeep.disown()
        self._note()

    def end(self) -> None:
        """The program ends, and nobody closed us: what was dropped is given back now, and not when its lease ends."""
        self.upkeep.end(1.0)

    def close(self) -> None:
        """Give back what was dropped, and end. Closing twice is fine."""
        self.caller.close()
        self._end()

    def _end(self) -> None:
        self.upkeep.end()
        self.beside.close()
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()

    async def close_async(self) -> None:
        """The same for a task: the thread is waited for aside."""
        self.caller.close()
        await asyncio.to_thread(self._end)


# Calls to a server, for tasks and for threads: the one core of the transport, awaited or run to its end.


class AsyncCalls:
    """The calls of tasks."""

    def __init__(self, client: Client) -> None:
        self._call = client.caller.call

    async def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """What the work of the client comes to."""
        return await work

    async def call(self, ask: Ask) -> Any:
        """The answer's value; what the server refuses is raised."""
        return await self._call(ask)

    async def ask(self, method: str, path: str, answers: Any, body: Any = None, **options: Any) -> Any:
        """The same for a body that is one of the wire's values; `options` are those of `ask_of`."""
        return await self._call(ask_of(method, path, answers, body, **options))


class Calls:
    """The calls of threads."""

    def __init__(self, client: Client) -> None:
        self._call = client.caller.call

    def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """What the work of the client comes to."""
        return run(work)

    def call(self, ask: Ask) -> Any:
        """The answer's value; what the server refuses is raised."""
        return run(self._call(ask))

    def ask(self, method: str, path: str, answers: Any, body: Any = None, **options: Any) -> Any:
        """The same for a body that is one of the wire's values; `options` are those of `ask_of`."""
        return run(self._call(ask_of(method, path, answers, body, **options)))


def ask_of(method: str, path: str, answers: Any, body: Any = None, *, wait_s: float = 0.0, again: bool = True) -> Ask:
    """The request for a call whose body is one of the wire's values."""
    content = b"" if body is None else packed(body)
    return Ask(method=method, path=path, body=content, answers=answers, wait_s=wait_s, again=again)


# The port of a producer at a server: a parcel is a call that may be repeated, since the server knows its numbers.


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
        sent, draft = self._drafter.draft(message, self._clock.now_ns() // 1_000_000)
        return draft, sent, is_loose(sent)


class RemoteProducerPort:
    """The way of one producer to the partitions of a server. It has connections of its own, which block."""

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
        """Nothing: a server holds its topics itself."""

    let_go = keep

    def is_stale(self, topic: RemoteTopic) -> bool:
        known = self._client.publishing.known(topic.name)
        return known is None or (known.count, known.lost) != (topic.count, topic.lost)

    def check_partition(self, topic: RemoteTopic, partition: object) -> int:
        return check_partition(partition, topic.name, _MOST_PARTITIONS if topic.count is None else topic.count)

    def drafting(self, topic: RemoteTopic, bodies: Bodies) -> RemoteDrafting:
        return RemoteDrafting(bodies, self.clock)

    def check(self, identity: ProducerId) -> None:
        """Nothing: the server does so with every call."""

    def is_prepared(self, outbox: Outbox) -> bool:
        return True

    def prepare(self, outbox: Outbox) -> None:
        """Nothing: the server has read what it knows, or will."""

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
        outbox = parcel.outbox
        path = path_of(
            "topics",
            outbox.destination.name,
            "partitions",
            outbox.number,
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
        # What has an id of ours is no duplicate: an attempt before stored it.
        parcel.places = [
            Place(each.offset, each.delayed_id, each.duplicate and has_id, each.partition)
            for each, has_id in zip(stored, given, strict=True)
        ]

    def written(self, parcel: Parcel, durability: Durability) -> None:
        """Nothing is left to wait for: what the server has it has made durable before it answered."""

    def wait(self, waiting: Any) -> None:
        """Nothing: every call is answered when the messages are as durable as asked."""

    async def wait_async(self, waiting: Any) -> None:
        """Nothing, either."""

    def _sequence(self, outbox: Outbox, identity: ProducerId, first: int, count: int) -> NextSequence:
        path = path_of(
            "topics",
            outbox.destination.name,
            "partitions",
            outbox.number,
            "sequence",
            producer=identity.id,
            since=identity.since,
            first=first,
            count=count,
        )
        answer: NextSequence = self._call(Ask(method="GET", path=path, answers=NextSequence))
        return answer

    def _call(self, ask: Ask) -> Any:
        return run(self._caller.call(ask))


def _batch(parcel: Parcel) -> wire.Batch:
    """What is to be stored: all that was not skipped; by bodies alone where there is nothing else."""
    if parcel.keys is None and not parcel.rest:
        return wire.Batch(bodies=parcel.values[parcel.skipped :])
    return wire.batch_of(_messages(parcel))


def _messages(parcel: Parcel) -> list[wire.NewMessage]:
    """The same, message by message."""
    return [parcel.rest.get(i) or _message(parcel, i) for i in range(parcel.skipped, len(parcel.values))]


def _message(parcel: Parcel, i: int) -> wire.NewMessage:
    message = wire.NewMessage(body=parcel.values[i])
    key = None if parcel.keys is None else parcel.keys[i]
    if key is not None and parcel.flags is not None and parcel.flags[i] & TEXT_KEY:
        message.key = key.decode()
    else:
        message.key_data = key
    return message
