"""Parcels: messages for one partition that are sent, stored and answered as one; their outboxes; a producer's port."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Sequence, Sized
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeAlias, TypeVar, overload

import msgspec

from holdfast.api.drafts import Stored, duration_ms, stored_at
from holdfast.broker.messages import Draft, Place, RoundRobin, murmur3
from holdfast.broker.producers import ProducerId
from holdfast.broker.waiters import Waiter
from holdfast.env import Clock
from holdfast.env.process import get_logger
from holdfast.errors import MessageTooLarge, Unavailable
from holdfast.model import Durability
from holdfast.settings import ProducerSettings, TopicSettings

if TYPE_CHECKING:
    from holdfast.api.drafts import Bodies, NewMessage, Seconds

# The port of a producer: what it needs from a data folder of this process or from a server.


class OpenTopic(Protocol):
    """A topic that messages can be sent to."""

    @property
    def name(self) -> str: ...

    @property
    def id(self) -> object:
        """Another one where the topic was deleted and made anew: it has nothing of the producer then."""

    @property
    def settings(self) -> TopicSettings:
        """Another object once anything has changed, the number of partitions included."""

    @property
    def partitions(self) -> Sized: ...

    @property
    def lost(self) -> Collection[int]:
        """The partitions that take nothing; there are others."""

    @property
    def closed(self) -> bool: ...


class Drafting(Protocol):
    """Encodes messages for sending."""

    @property
    def plain(self) -> bool:
        """Whether a message of bytes and a key needs nothing more."""

    @property
    def most_bytes(self) -> int:
        """Of a message with its key and headers; larger ones are not even sent."""

    def draft(self, message: NewMessage) -> tuple[Draft, Any, bool]:
        """The message as it will be stored, as the port wants it back in a parcel, and whether it has no sequence.

        Raises InvalidRequest, which names what is wrong with it.
        """


class Backing(Protocol):
    """What a port stands on. It is closed by others."""

    @property
    def closed(self) -> bool: ...


class ProducerPort(Protocol):
    """The way of one producer to the partitions. But for `wait_async` its calls may block."""

    @property
    def clock(self) -> Clock: ...

    @property
    def settings(self) -> ProducerSettings:
        """Those of producers there, where nothing else is asked for."""

    @property
    def blocks(self) -> bool:
        """Whether `append` and `publish` wait for a server: then they are no work for an event loop."""

    @property
    def most_parcel(self) -> int | None:
        """How many messages may go at once; None: a parcel that waits may grow beyond its batch."""

    @property
    def most_partitions(self) -> int | None:
        """How many partitions may be open at once; None: it opens none."""

    @property
    def place(self) -> str:
        """Where messages go, for people: "in /data" or "at http://..."."""

    @property
    def backing(self) -> Backing:
        """The engine or the connection behind it."""

    def check_open(self) -> None:
        """Raise Closed where nothing can be sent any more."""

    def begin(self, name: str | None, *, resume: bool) -> ProducerId:
        """Get a producer id; a producer with a name fences earlier ones of that name."""

    def open_topic(self, name: str) -> OpenTopic:
        """Open the topic, which stays open until it is released. Raises UnknownTopic."""

    def keep(self, topic: Any) -> None:
        """Hold the topic, which is open; needs no time."""

    def release(self, topic: Any) -> None:
        """The topic may be closed: nothing is on its way to it."""

    def is_stale(self, topic: Any) -> bool:
        """Whether to ask for the topic again before the next message; asked only where `blocks` is true."""

    def check_partition(self, topic: Any, partition: object) -> int:
        """A partition that was chosen by hand, if the topic has it; UnknownTopic where it has not."""

    def drafting(self, topic: Any, bodies: Bodies) -> Drafting:
        """Checks messages for the topic, by its settings of now."""

    def check(self, identity: ProducerId) -> None:
        """Raise Fenced where a newer producer of the name has begun."""

    def prepare(self, outbox: Outbox) -> None:
        """Load what the partition knows about producers, if that takes long."""

    def is_prepared(self, outbox: Outbox) -> bool: ...

    def next_sequence(self, outbox: Outbox, identity: ProducerId) -> int:
        """The number that the partition expects the producer's next message to have."""

    def offsets(self, outbox: Outbox, identity: ProducerId, first: int, count: int) -> Sequence[int | None]:
        """Where messages are that the producer has stored before, counted from `first`."""

    def append(self, parcel: Parcel, identity: ProducerId | None, durability: Durability) -> Any:
        """Store the parcel unless the partition has it; returns what to `wait` for, None if nothing is left to do.

        Notes in the parcel where its messages are.
        """

    def publish(self, parcel: Parcel, identity: ProducerId | None, durability: Durability) -> Any:
        """Store messages without a sequence number: delayed ones, and those with a dedup id."""

    def written(self, parcel: Parcel, durability: Durability) -> Any:
        """Return what to wait for if the resumed producer had stored all messages of a parcel."""

    def wait(self, waiting: Any) -> None:
        """Wait until what was appended or published is as durable as asked."""

    async def wait_async(self, waiting: Any) -> None:
        """Async version of `wait`; used only where `blocks` is false."""


# Parcels and outboxes.


logger = get_logger(__name__)

# Memory of a message besides its bytes, so that a buffer of empty messages is bounded, too.
MESSAGE_COST: Final = 64

Callback: TypeAlias = Callable[[], object]
Span: TypeAlias = "tuple[Parcel, int, Sequence[int]]"  # a parcel, the first of its messages, which of the call they are


class Outbox:
    """The parcels for one partition. They are sent in order, each after the ones ahead of it are answered."""

    __slots__ = (
        "counted", "destination", "known", "loose", "number", "open", "owner", "queue", "retry_at_ns", "sequence",
    )  # fmt: skip

    def __init__(self, owner: Any, destination: Destination, number: int) -> None:
        self.owner = owner  # the producer, which knows how to wait
        self.destination = destination
        self.number = number
        self.queue: deque[Parcel] = deque()
        self.open: Parcel | None = None  # the last of the queue, while more may be put into it
        self.retry_at_ns = 0
        self.sequence: int | None = None  # of the next message; None: the partition must say
        self.known = 0  # how many of the producer's messages the partition had when this one began
        self.counted = 0  # how many were sent since, those that it had included
        self.loose = itertools.count()  # numbers of messages that go without sequences

    def begin_anew(self) -> None:
        """The topic is another one of the same name: it has nothing of this producer."""
        self.sequence, self.known, self.counted = None, 0, 0

    @property
    def due_ns(self) -> int:
        """When the first of its parcels may go."""
        return max(self.queue[0].due_ns, self.retry_at_ns)


class Parcel:
    """Some messages for one partition, as columns; a column that none uses is None."""

    __slots__ = (
        "attempts", "bytes", "callbacks", "done", "due_ns", "durability", "enough_bytes", "error", "flags", "keys",
        "last", "loose", "offset", "outbox", "places", "request", "rest", "seen", "sequence", "skipped",
        "skipped_offsets", "unheeded", "values", "waiters",
    )  # fmt: skip

    def __init__(self, outbox: Outbox, due_ns: int, *, loose: bool, unheeded: bool) -> None:
        self.outbox = outbox
        self.due_ns = due_ns
        self.loose = loose  # delayed, or with dedup ids: no sequences
        self.unheeded = unheeded  # no one waits for an answer
        self.values: list[bytes] = []
        self.keys: list[bytes | None] | None = None
        self.flags: bytearray | None = None
        self.rest: dict[int, Any] = {}  # those that have more than a value and a key, as the port drafted them
        self.bytes = 0
        self.last = self.enough_bytes = 0  # at this message, or at this many bytes, there is work to do
        self.attempts = 0
        self.sequence: int | None = None
        self.skipped = 0  # this many from the front were stored before, by the producer that this one resumes
        self.skipped_offsets: Sequence[int | None] = ()  # fewer, where it is not known any more where they are
        self.request: Any = None  # what a port keeps from one attempt to the next
        self.offset = 0  # of the first that was not skipped
        self.places: Sequence[Place] | None = None
        self.durability: Durability = "os"
        self.error: Exception | None = None
        self.seen = False  # whether the error was reported
        self.done = False
        self.waiters: list[Waiter] = []
        self.callbacks: list[Callback] = []

    # A column is added to before the values, which alone say how many messages there are: a signal may come between
    # the two, and the next caller that adds a message then cuts off what it left.

    def add_key(self, key: bytes | None, flags: int = 0) -> None:
        """The value that is added next has this key."""
        count, keys, marks = len(self.values), self.keys, self.flags
        if keys is None:
            keys = self.keys = [None] * count
        elif len(keys) > count:
            del keys[count:]
        keys.append(key)
        if marks is None:
            if flags:
                self.flags = bytearray(count + 1)
                self.flags[count] = flags
        else:
            if len(marks) > count:
                del marks[count:]
            marks.append(flags)

    def add_draft(self, draft: Draft, rest: Any) -> None:
        """The value that is added next is that of this draft."""
        self.rest[len(self.values)] = rest
        if self.keys is not None:
            self.add_key(draft.key, draft.flags)

    def stored(self, index: int) -> Stored | None:
        """Return the answer for one of its messages; None if it is unknown or nobody waits."""
        if self.unheeded:
            return None
        if self.error is not None:
            self.seen = True
            raise self.error
        name, number = self.outbox.destination.name, self.outbox.number
        if self.places is not None:
            return stored_at(self.places[index], name, number, self.durability)
        if index < self.skipped:
            offset = self.skipped_offsets[index] if index < len(self.skipped_offsets) else None
            return Stored(name, offset, None, True, self.durability, number)
        return Stored(name, self.offset + index - self.skipped, None, False, self.durability, number)

    def stored_many(self, first: int, count: int) -> list[Stored | None]:
        """Return the answers for some of its messages; in bulk for the usual case."""
        if self.unheeded or self.error is not None or self.places is not None or first < self.skipped:
            return [self.stored(index) for index in range(first, first + count)]
        name, number, durability = self.outbox.destination.name, self.outbox.number, self.durability
        start = self.offset + first - self.skipped
        return [Stored(name, offset, None, False, durability, number) for offset in range(start, start + count)]

    def empty(self) -> None:
        """Free the messages."""
        self.values, self.keys, self.flags, self.rest, self.request = [], None, None, {}, None

    def tell(self) -> None:
        """Answer it: wake the waiters, then run the callbacks, whose errors are only logged."""
        for waiter in self.waiters:
            waiter.wake()
        for callback in self.callbacks:
            try:
                callback()
            except Exception:
                logger.exception("a callback failed", extra={"topic": self.outbox.destination.name})


# A topic as a producer sees it: which outbox a message goes to. It is held open while anything is on its way.


_KEEP_NS: Final = 1_000_000_000


class Destination:
    """The outboxes for the partitions of one topic."""

    def __init__(
        self,
        owner: Any,
        port: ProducerPort,
        topic: OpenTopic,
        bodies: Bodies,
        turns: RoundRobin,
        *,
        may_pass_over: bool = True,
    ) -> None:
        self._owner = owner
        self._port = port
        self._bodies = bodies
        self._turns = turns
        self._may_pass_over = may_pass_over  # partitions that take nothing, when they would be next in turn
        self.name = topic.name
        self.topic: Any = topic  # what the port has opened, which alone knows more of it
        self.held = True
        self.pending = 0  # outboxes with parcels
        self.used_ns = port.clock.monotonic_ns()
        self.outboxes: list[Outbox] = []
        self._topic_id = topic.id
        self._lock = threading.Lock()
        self.look()

    def look(self) -> None:
        """Read the topic's settings and partitions again."""
        with self._lock:
            self._look()

    def _look(self) -> None:
        settings = self.topic.settings
        if self.topic.id != self._topic_id:
            self._topic_id = self.topic.id
            for outbox in self.outboxes:
                outbox.begin_anew()
        self.drafting = self._port.drafting(self.topic, self._bodies)
        self.plain = self.drafting.plain
        self.most_bytes = self.drafting.most_bytes
        count = len(self.topic.partitions)
        for number in range(len(self.outboxes), count):
            self.outboxes.append(Outbox(self._owner, self, number))
        self.count = count  # there may be more outboxes: another topic of the same name may have fewer partitions
        self.settings = settings  # last: a thread that sees these settings must see the rest

    def hold(self, topic: OpenTopic) -> None:
        """The topic was opened again; under the accumulator's lock."""
        self._port.keep(topic)  # again: it may have been released just now
        self.topic, self.held = topic, True
        self.used_ns = self._port.clock.monotonic_ns()
        self.look()

    def release(self) -> None:
        """Let the topic be closed: nothing is on its way to it."""
        self.held = False
        self._port.release(self.topic)

    @property
    def usable(self) -> bool:
        """Whether the topic is held, and open."""
        return self.held and not self.topic.closed

    def refresh(self) -> None:
        """Look again where anything has changed; partitions that were added come with other settings."""
        if self.settings is not self.topic.settings:
            self.look()

    def keyed(self, key: bytes) -> Outbox:
        return self.outboxes[murmur3()(key, 0) % self.count]

    def next(self) -> Outbox:
        return self.outboxes[0 if self.count == 1 else self._turns.take(self.count, self._without())]

    def spread(self, count: int) -> Sequence[tuple[int, int, int]]:
        """The next messages in turn, as runs: (partition, first, behind the last)."""
        return [(0, 0, count)] if self.count == 1 else list(self._turns.spread(count, self.count, self._without()))

    def give_back(self, turns: int) -> None:
        """The last messages, as many as these, were not taken in: the next ones get their turns."""
        if self.count > 1:
            self._turns.give_back(turns, self.count, self._without())

    def _without(self) -> Collection[int]:
        return self.topic.lost if self._may_pass_over else ()

    def chosen(self, partition: object) -> Outbox:
        """By hand. Where the number of partitions is secret, an outbox is made when it is needed."""
        number = self._port.check_partition(self.topic, partition)
        if number >= len(self.outboxes):
            with self._lock:
                for missing in range(len(self.outboxes), number + 1):
                    self.outboxes.append(Outbox(self._owner, self, missing))
        return self.outboxes[number]

    def outbox_for(self, draft: Draft, partition: object) -> Outbox:
        """By hand, by key (or dedup id), or in turn."""
        if partition is not None:
            return self.chosen(partition)
        if draft.key is not None:
            return self.keyed(draft.key)
        if draft.dedup_id is not None:
            chosen = self.keyed(draft.dedup_id)
            if chosen.number not in self._without():  # otherwise anywhere: a dedup id holds for the whole topic
                return chosen
        return self.next()

    def check_size(self, draft: Draft) -> None:
        size = len(draft.value) + len(draft.key or b"")
        for name, value in draft.headers:
            size += len(name.encode()) + len(value)
        if size > self.most_bytes:
            raise self.too_large(size)

    def too_large(self, size: int) -> MessageTooLarge:
        return MessageTooLarge(
            f"the message has {size} bytes with key and headers, the limit of {self.name} is {self.most_bytes}; it was "
            "not sent. Send it in parts, or raise max_message_bytes"
        )

    def is_idle(self, now_ns: int) -> bool:
        """Return whether its topic may be released: nothing is in flight, nor was just now."""
        return self.held and not self.pending and now_ns - self.used_ns > _KEEP_NS


# What `send` and `send_many` return: an answer for each message, or one for a list. Threads ask, tasks await.


_Sent = TypeVar("_Sent", bound="SentMessage")


class SentMessage(msgspec.Struct, gc=False, eq=False, repr_omit_defaults=True):
    """A message of a parcel."""

    # A struct, because one is created for each message, and this is the cheapest kind of object.
    _parcel: Parcel
    _index: int

    def done(self) -> bool:
        """Return whether the answer has arrived: the message is stored, or storing it failed."""
        return self._parcel.done or self._parcel.unheeded

    def __repr__(self) -> str:
        outbox = self._parcel.outbox
        how = "waits" if not self.done() else "failed" if self._parcel.error is not None else "done"
        return f"<{type(self).__name__} {outbox.destination.name} partition {outbox.number}, {how}>"


class Sent(SentMessage, gc=False, eq=False, repr_omit_defaults=True):
    """A message that was sent. Call `result` to wait until it is stored."""

    def result(self, timeout: Seconds | None = None) -> Stored | None:
        """Wait until the message is stored, and return where. Raises the error if storing it failed.

        Returns None at once with acks="none". Raises Unavailable after `timeout`; you can call it again later.
        """
        parcel = self._parcel
        if not parcel.done and not parcel.unheeded:
            _await_answers([parcel], timeout)
        return parcel.stored(self._index)

    def exception(self, timeout: Seconds | None = None) -> Exception | None:
        """Wait for the answer, and return the error, or None if the message is stored."""
        parcel = self._parcel
        if not parcel.done and not parcel.unheeded:
            _await_answers([parcel], timeout)
        parcel.seen = True
        return None if parcel.unheeded else parcel.error

    def add_done_callback(self, callback: Callable[[Sent], object]) -> None:
        """Call `callback` with this object when the answer arrives; at once if it has.

        It is called in the producer's thread and must not block.
        """
        self._parcel.seen = True
        if self.done():
            callback(self)
        else:
            self._parcel.outbox.owner.call_when_done(self._parcel, lambda: callback(self))


class AsyncSent(SentMessage, gc=False, eq=False, repr_omit_defaults=True):
    """A message that was sent. Await it to wait until it is stored, and to get where; raises the error if it failed."""

    def __await__(self) -> Generator[Any, None, Stored | None]:
        if not self.done():
            yield from self._parcel.outbox.owner.answered(self._parcel).__await__()
        return self._parcel.stored(self._index)


class SentList(Sequence[_Sent], Generic[_Sent]):
    """The answers for the messages of one call, as a sequence."""

    _one: type[_Sent]

    def __init__(self, spans: list[Span], count: int) -> None:
        self._spans = spans
        self._count = count
        self._each: list[_Sent] | None = None  # one for each message, created on first use

    def done(self) -> bool:
        """Return whether all answers have arrived."""
        return all(parcel.done or parcel.unheeded for parcel, _, _ in self._spans)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> _Sent: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[_Sent]: ...
    def __getitem__(self, index: int | slice) -> _Sent | Sequence[_Sent]:
        return self._all()[index]

    def __iter__(self) -> Iterator[_Sent]:
        return iter(self._all())

    def _all(self) -> list[_Sent]:
        if self._each is None:
            each = {
                i: self._one(parcel, index)
                for parcel, first, which in self._spans
                for index, i in enumerate(which, first)
            }
            self._each = [each[i] for i in range(self._count)]
        return self._each

    def _unanswered(self) -> list[Parcel]:
        return [parcel for parcel, _, _ in self._spans if not parcel.done and not parcel.unheeded]

    def _results(self) -> list[Stored | None]:
        results: list[Stored | None] = [None] * self._count
        for parcel, first, which in self._spans:
            for i, stored in zip(which, parcel.stored_many(first, len(which)), strict=True):
                results[i] = stored
        return results


class SentMany(SentList[Sent]):
    """What `send_many` returns: call `result` to wait for all messages, or use it as a sequence of `Sent`."""

    _one = Sent

    def result(self, timeout: Seconds | None = None) -> list[Stored | None]:
        """Wait until all messages are stored, and return where, in the order of the call. Raises the first error."""
        _await_answers(self._unanswered(), timeout)
        return self._results()

    def exception(self, timeout: Seconds | None = None) -> Exception | None:
        """Wait for all answers, and return the first error, or None if all messages are stored."""
        try:
            self.result(timeout)
        except Exception as error:
            if not self.done():
                raise
            return error
        return None


class AsyncSentMany(SentList[AsyncSent]):
    """What `send_many` returns: await it to get where each message is stored, or use it as a sequence."""

    _one = AsyncSent

    def __await__(self) -> Generator[Any, None, list[Stored | None]]:
        for parcel in self._unanswered():
            yield from parcel.outbox.owner.answered(parcel).__await__()
        return self._results()


def _await_answers(parcels: Sequence[Parcel], timeout: Seconds | None) -> None:
    """Block the calling thread until parcels of one producer are answered. Raises Unavailable after the timeout."""
    timeout_s = None if timeout is None else duration_ms(timeout, "timeout") / 1000
    parcel = parcels[0].outbox.owner.answered_all(parcels, timeout_s) if parcels else None
    if parcel is not None:
        raise Unavailable(
            f"no response from partition {parcel.outbox.number} of {parcel.outbox.destination.name} within "
            f"{timeout_s:g} s; the message is still being sent; ask again later"
        )
