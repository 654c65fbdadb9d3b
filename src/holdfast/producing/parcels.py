"""Parcels: messages for one partition that are sent, stored and answered as one; and the outboxes they wait in."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from holdfast.api.drafts import Stored, stored_at
from holdfast.broker.messages import Draft, Place
from holdfast.broker.waiters import Waiter
from holdfast.model import Durability

if TYPE_CHECKING:
    from holdfast.producing.destination import Destination

logger = logging.getLogger(__name__)

# What a message takes besides its bytes, so that a buffer of empty messages is bounded, too.
MESSAGE_COST: Final = 64

Callback: TypeAlias = Callable[[], object]
Span: TypeAlias = "tuple[Parcel, int, Sequence[int]]"  # a parcel, the first of its messages, which of the call they are


class Outbox:
    """The parcels for one partition: they leave in order, none before those ahead of it are answered."""

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
        self.unheeded = unheeded  # nobody waits for an answer
        self.values: list[bytes] = []
        self.keys: list[bytes | None] | None = None
        self.flags: bytearray | None = None
        self.rest: dict[int, Any] = {}  # those that have more than a value and a key, as the port drafted them
        self.bytes = 0
        self.last = self.enough_bytes = 0  # with this message, or so many bytes, there is something to be done
        self.attempts = 0
        self.sequence: int | None = None
        self.skipped = 0  # so many from the front were stored before, by one that this producer resumes
        self.skipped_offsets: Sequence[int | None] = ()  # fewer, where it is not known any more where they are
        self.request: Any = None  # what a port keeps from one attempt to the next
        self.offset = 0  # of the first that was not skipped
        self.places: Sequence[Place] | None = None
        self.durability: Durability = "os"
        self.error: Exception | None = None
        self.seen = False  # whether somebody was told of the error
        self.done = False
        self.waiters: list[Waiter] = []
        self.callbacks: list[Callback] = []

    # A column is added to before the values, which alone say how many messages there are: a signal may come between
    # the two, and whoever adds the next message then cuts off what it left.

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
        """The answer for one of its messages; None where nobody knows or waits."""
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
        """The answers for some of its messages, in one go where nothing is special about them."""
        if self.unheeded or self.error is not None or self.places is not None or first < self.skipped:
            return [self.stored(index) for index in range(first, first + count)]
        name, number, durability = self.outbox.destination.name, self.outbox.number, self.durability
        start = self.offset + first - self.skipped
        return [Stored(name, offset, None, False, durability, number) for offset in range(start, start + count)]

    def empty(self) -> None:
        """Let go of the messages."""
        self.values, self.keys, self.flags, self.rest, self.request = [], None, None, {}, None

    def tell(self) -> None:
        """It is answered: wake those who wait, then call those who asked to be called; what they raise is theirs."""
        for waiter in self.waiters:
            waiter.wake()
        for callback in self.callbacks:
            try:
                callback()
            except Exception:
                logger.exception("a callback failed", extra={"topic": self.outbox.destination.name})
