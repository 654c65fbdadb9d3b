"""Parcels: messages for one partition that are sent, stored and answered as one; and what a sender holds of them."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import Event
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias, overload

import msgspec

from holdfast.api.drafts import Stored
from holdfast.api.times import duration_ms
from holdfast.broker.partition import Draft, Place
from holdfast.errors import Unavailable
from holdfast.local.publisher import stored_at
from holdfast.model import Batch, Durability

if TYPE_CHECKING:
    from holdfast.api.drafts import Seconds
    from holdfast.embedded.route import Route

logger = logging.getLogger(__name__)

# What a message takes besides its bytes, so that a buffer of empty messages is bounded, too.
MESSAGE_COST: Final = 64

Callback: TypeAlias = Callable[[], object]


class Owner(Protocol):
    """The producer that parcels belong to."""

    def await_all(self, parcels: Iterable[Parcel], timeout_s: float | None) -> Parcel | None:
        """Return when they are answered, or when the time is over; answers with the first that is not."""

    def call_when_done(self, parcel: Parcel, callback: Callback) -> None:
        """Call once the parcel is answered; at once where it is."""


class Lane:
    """The way to one partition: parcels leave it in order, none before those ahead of it are answered."""

    __slots__ = ("counted", "known", "loose", "number", "open", "owner", "queue", "retry_at_ns", "route", "sequence")

    def __init__(self, owner: Owner, route: Route, number: int) -> None:
        self.owner = owner
        self.route = route
        self.number = number
        self.queue: deque[Parcel] = deque()
        self.open: Parcel | None = None  # the last of the queue, while more may be put into it
        self.retry_at_ns = 0
        self.sequence: int | None = None  # of the next message; None: the partition must say
        self.known = 0  # how many of the producer's messages the partition had when this one began
        self.counted = 0  # how many were sent since, those that it had included
        self.loose = itertools.count()  # numbers of messages that go without sequences

    @property
    def due_ns(self) -> int:
        """When the first of its parcels may go."""
        return max(self.queue[0].due_ns, self.retry_at_ns)


class Parcel:
    """Some messages for one partition, as columns; a column that none uses is None."""

    __slots__ = (
        "attempts", "bytes", "callbacks", "done", "due_ns", "durability", "enough_bytes", "error", "event", "flags",
        "keys", "lane", "last", "loose", "offset", "places", "rest", "seen", "sequence", "skipped", "skipped_offsets",
        "unheeded", "values",
    )  # fmt: skip

    def __init__(self, lane: Lane, due_ns: int, *, loose: bool, unheeded: bool) -> None:
        self.lane = lane
        self.due_ns = due_ns
        self.loose = loose  # delayed, or with dedup ids: no sequences
        self.unheeded = unheeded  # nobody waits for an answer
        self.values: list[bytes] = []
        self.keys: list[bytes | None] | None = None
        self.flags: bytearray | None = None
        self.rest: dict[int, Draft] = {}  # those that have more than a value and a key
        self.bytes = 0
        self.last = self.enough_bytes = 0  # with this message, or so many bytes, there is something to be done
        self.attempts = 0
        self.sequence: int | None = None
        self.skipped = 0  # so many from the front were stored before, by one that this producer resumes
        self.skipped_offsets: Sequence[int | None] = ()
        self.offset = 0  # of the first that was not skipped
        self.places: Sequence[Place] | None = None
        self.durability: Durability = "os"
        self.error: Exception | None = None
        self.seen = False  # whether somebody was told of the error
        self.done = False
        self.event: Event | None = None
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

    def add_draft(self, draft: Draft) -> None:
        """The value that is added next is that of this draft."""
        self.rest[len(self.values)] = draft
        if self.keys is not None:
            self.add_key(draft.key, draft.flags)

    def contents(self) -> Sequence[bytes] | Batch:
        """What is to be stored: all that was not skipped."""
        if self.keys is None and not self.rest:
            return self.values[self.skipped :] if self.skipped else self.values
        if not self.rest:
            start, end = self.skipped, len(self.values)
            keys = None if self.keys is None else self.keys[start:end]
            flags = None if self.flags is None else bytes(self.flags[start:end])
            return Batch(values=self.values[start:], keys=keys, flags=flags)
        drafts = self.drafts()
        return Batch(
            values=[draft.value for draft in drafts],
            keys=[draft.key for draft in drafts] if any(draft.key is not None for draft in drafts) else None,
            headers=[draft.headers for draft in drafts] if any(draft.headers for draft in drafts) else None,
            priorities=[draft.priority for draft in drafts] if any(draft.priority for draft in drafts) else None,
            expires_at_ms=[draft.expires_at_ms for draft in drafts] if any(d.expires_at_ms for d in drafts) else None,
            flags=[draft.flags for draft in drafts] if any(draft.flags for draft in drafts) else None,
        )

    def drafts(self) -> list[Draft]:
        """The same, message by message."""
        keys, flags, rest = self.keys, self.flags, self.rest
        return [
            rest.get(i)
            or Draft(self.values[i], None if keys is None else keys[i], flags=0 if flags is None else flags[i])
            for i in range(self.skipped, len(self.values))
        ]

    def stored(self, index: int) -> Stored | None:
        """The answer for one of its messages; None where nobody knows or waits."""
        if self.unheeded:
            return None
        if self.error is not None:
            self.seen = True
            raise self.error
        name, number = self.lane.route.name, self.lane.number
        if self.places is not None:
            return stored_at(self.places[index], name, number, self.durability)
        if index < self.skipped:
            offset = self.skipped_offsets[index] if self.skipped_offsets else None
            return Stored(name, offset, None, True, self.durability, number)
        return Stored(name, self.offset + index - self.skipped, None, False, self.durability, number)

    def stored_many(self, first: int, count: int) -> list[Stored | None]:
        """The answers for some of its messages, in one go where nothing is special about them."""
        if self.unheeded or self.error is not None or self.places is not None or first < self.skipped:
            return [self.stored(index) for index in range(first, first + count)]
        name, number, durability = self.lane.route.name, self.lane.number, self.durability
        start = self.offset + first - self.skipped
        return [Stored(name, offset, None, False, durability, number) for offset in range(start, start + count)]

    def empty(self) -> None:
        """Let go of the messages."""
        self.values, self.keys, self.flags, self.rest = [], None, None, {}

    def run_callbacks(self) -> None:
        """Tell those who asked; what they raise is theirs."""
        for callback in self.callbacks:
            try:
                callback()
            except Exception:
                logger.exception("a callback failed", extra={"topic": self.lane.route.name})


class Sent(msgspec.Struct, gc=False, eq=False, repr_omit_defaults=True):
    """A message that was sent: what comes of it, as soon as its parcel is answered."""

    # A struct, because one is made for each message, and this is the lightest kind of object there is.
    _parcel: Parcel
    _index: int

    def done(self) -> bool:
        """Whether the answer is there."""
        return self._parcel.done or self._parcel.unheeded

    def result(self, timeout: Seconds | None = None) -> Stored | None:
        """Where it is stored, or the error; waits for it. None at once with acks="none"."""
        parcel = self._parcel
        if not parcel.done and not parcel.unheeded:
            await_answers([parcel], timeout)
        return parcel.stored(self._index)

    def exception(self, timeout: Seconds | None = None) -> Exception | None:
        """The error, or None where it is stored; waits for it."""
        parcel = self._parcel
        if not parcel.done and not parcel.unheeded:
            await_answers([parcel], timeout)
        parcel.seen = True
        return None if parcel.unheeded else parcel.error

    def add_done_callback(self, callback: Callable[[Sent], object]) -> None:
        """Call with this object when the answer is there: in the sender's thread, or at once. It must not wait."""
        self._parcel.seen = True
        if self.done():
            callback(self)
        else:
            self._parcel.lane.owner.call_when_done(self._parcel, lambda: callback(self))

    def __repr__(self) -> str:
        parcel = self._parcel
        how = "waits" if not self.done() else "failed" if parcel.error is not None else "done"
        return f"<{type(self).__name__} {parcel.lane.route.name} partition {parcel.lane.number}, {how}>"


Span: TypeAlias = tuple[Parcel, int, Sequence[int]]  # a parcel, the first of its messages, which of the call they are


class SentMany(Sequence[Sent]):
    """What `send_many` answers: one answer for all of them; as a sequence, one for each."""

    def __init__(self, spans: list[Span], count: int) -> None:
        self._spans = spans
        self._count = count
        self._each: list[Sent] | None = None  # one for each message, made when somebody asks

    def parcels(self) -> list[Parcel]:
        return [parcel for parcel, _, _ in self._spans]

    def done(self) -> bool:
        """Whether all answers are there."""
        return all(parcel.done or parcel.unheeded for parcel, _, _ in self._spans)

    def result(self, timeout: Seconds | None = None) -> list[Stored | None]:
        """Where each is stored, in the order of the call, or the first error; waits for all of them."""
        await_answers([parcel for parcel in self.parcels() if not parcel.done and not parcel.unheeded], timeout)
        return self._results()

    def exception(self, timeout: Seconds | None = None) -> Exception | None:
        """The first error, or None where all are stored; waits for all of them."""
        try:
            self.result(timeout)
        except Exception as error:
            if not self.done():
                raise
            return error
        return None

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Sent: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Sent]: ...
    def __getitem__(self, index: int | slice) -> Sent | Sequence[Sent]:
        return self._all()[index]

    def __iter__(self) -> Iterator[Sent]:
        return iter(self._all())

    def _all(self) -> list[Sent]:
        if self._each is None:
            each = {
                i: Sent(parcel, index) for parcel, first, which in self._spans for index, i in enumerate(which, first)
            }
            self._each = [each[i] for i in range(self._count)]
        return self._each

    def _results(self) -> list[Stored | None]:
        results: list[Stored | None] = [None] * self._count
        for parcel, first, which in self._spans:
            for i, stored in zip(which, parcel.stored_many(first, len(which)), strict=True):
                results[i] = stored
        return results


def await_answers(parcels: Sequence[Parcel], timeout: Seconds | None) -> None:
    """Wait, as a thread, for parcels of one producer; Unavailable when the time is over."""
    timeout_s = None if timeout is None else duration_ms(timeout, "timeout") / 1000
    parcel = parcels[0].lane.owner.await_all(parcels, timeout_s) if parcels else None
    if parcel is not None:
        raise Unavailable(
            f"no answer from partition {parcel.lane.number} of {parcel.lane.route.name} within {timeout_s:g} s; the "
            "message is still on its way, ask again later"
        )
