"""What a producer has gathered and not yet stored: parcels by partition, within a bounded buffer.

A parcel is due when it has enough messages, enough bytes, or is old enough; while the disk is busy it goes
on growing. Nothing here waits: time is an argument, and whoever drives it is told when to look.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeVar

from holdfast.broker.messages import Draft
from holdfast.broker.waiters import Waiter
from holdfast.env import Clock
from holdfast.producing.parcels import MESSAGE_COST, Callback, Outbox, Parcel
from holdfast.settings import ProducerSettings

_Sent = TypeVar("_Sent")

# A parcel that waits for its turn may grow up to here: about what fits in one frame.
MOST_MESSAGES: Final = 1_000
MOST_BYTES: Final = 128 * 1024


class Accumulator(Generic[_Sent]):
    """The buffer of one producer. Safe to use from any thread. `sent` makes what a sender is given."""

    def __init__(
        self, settings: ProducerSettings, clock: Clock, sent: Callable[[Parcel, int], _Sent], most_parcel: int | None
    ) -> None:
        self._sent = sent
        self._mono_ns = clock.monotonic_ns
        self._linger_ns = settings.linger_ms * 1_000_000
        self._batch_messages = min(settings.batch_messages, most_parcel or settings.batch_messages)
        self._batch_bytes = settings.batch_bytes
        # Where a server limits what goes at once, a parcel is what the settings say, and does not grow.
        self._limited = most_parcel is not None
        self.most_messages = self._batch_messages if self._limited else max(self._batch_messages, MOST_MESSAGES)
        self.most_bytes = settings.batch_bytes if self._limited else max(settings.batch_bytes, MOST_BYTES)
        self._buffer_bytes = settings.buffer_bytes
        self._unheeded = settings.acks == "none"
        self.lock = threading.Lock()
        self.active: dict[Outbox, None] = {}  # those with parcels
        self.buffered = 0
        self.on_work: Callable[[], None] = lambda: None  # there is something to do, now or soon
        self._for_room: list[Waiter] = []

    def add(self, outbox: Outbox, value: bytes, key: bytes | None = None, flags: int = 0) -> _Sent | None:
        """Take in a message that has no more than a value and a key; None where there is no room for it now."""
        size = len(value) if key is None else len(value) + len(key)
        sent = self._sent  # called by this name: Python calls an attribute that is no method more slowly
        with self.lock:
            buffered = self.buffered + size
            if buffered > self._buffer_bytes and self.buffered:
                return None
            parcel = outbox.open
            if parcel is None or parcel.loose:
                parcel = self._begin(outbox, loose=False)
                if parcel is None:
                    return None
            values = parcel.values
            index = len(values)
            if key is not None or parcel.keys is not None:
                parcel.add_key(key, flags)
            values.append(value)
            self.buffered = buffered + MESSAGE_COST
            parcel.bytes = total = parcel.bytes + size
            if index >= parcel.last or total >= parcel.enough_bytes:
                self._fill(outbox, parcel)
        return sent(parcel, index)

    def add_draft(self, outbox: Outbox, draft: Draft, rest: Any, *, loose: bool) -> tuple[Parcel, int] | None:
        """The same for a message that has more; answers with its parcel, and which of it the message is."""
        size = len(draft.value) + len(draft.key or b"")
        for name, value in draft.headers:
            size += len(name) + len(value)
        with self.lock:
            if self.buffered + size > self._buffer_bytes and self.buffered:
                return None
            parcel = outbox.open
            if parcel is None or parcel.loose is not loose:
                parcel = self._begin(outbox, loose=loose)
                if parcel is None:
                    return None
            index = len(parcel.values)
            parcel.add_draft(draft, rest)
            parcel.values.append(draft.value)  # type: ignore[arg-type]
            self.buffered += size + MESSAGE_COST
            parcel.bytes += size
            if index >= parcel.last or parcel.bytes >= parcel.enough_bytes:
                self._fill(outbox, parcel)
        return parcel, index

    def extend(self, outbox: Outbox, values: Sequence[bytes], size: int) -> tuple[Parcel, int] | None:
        """The same for values, which are so many bytes: their parcel, and which of it the first one is."""
        with self.lock:
            if self.buffered + size > self._buffer_bytes and self.buffered:
                return None
            parcel = outbox.open
            full = self._limited and parcel is not None and len(parcel.values) + len(values) > self.most_messages
            if parcel is None or parcel.loose or full:
                parcel = self._begin(outbox, loose=False)
                if parcel is None:
                    return None
            index, count = len(parcel.values), len(values)
            if parcel.keys is not None:
                parcel.keys[index:] = [None] * count
                if parcel.flags is not None:
                    parcel.flags[index:] = bytes(count)
            parcel.values += values
            self.buffered += size + MESSAGE_COST * count
            parcel.bytes += size
            if index + count > parcel.last or parcel.bytes >= parcel.enough_bytes:
                self._fill(outbox, parcel)
        return parcel, index

    def take(self, now_ns: int) -> list[list[Parcel]]:
        """The parcels that may go now, by outbox and in order: nothing is added to them any more."""
        due: list[list[Parcel]] = []
        with self.lock:
            for outbox in self.active:
                if outbox.due_ns > now_ns:
                    continue
                last = outbox.open
                if last is not None and last.due_ns <= now_ns:
                    outbox.open = last = None
                due.append([parcel for parcel in outbox.queue if parcel is not last])
        return due

    def due_ns(self) -> int | None:
        """When there is something to do next."""
        with self.lock:
            return min([outbox.due_ns for outbox in self.active], default=None)

    def settle(self, parcel: Parcel) -> None:
        """The parcel is answered: it leaves its outbox, and those who wait for it, or for room, go on."""
        outbox = parcel.outbox
        with self.lock:
            if parcel.done:  # it was given up while it was on its way
                return
            outbox.queue.remove(parcel)
            if not outbox.queue:
                del self.active[outbox]
                outbox.destination.pending -= 1
            self.buffered -= parcel.bytes + MESSAGE_COST * len(parcel.values)
            if not self.active:
                self.buffered = 0
            parcel.empty()  # whoever keeps an answer need not keep the messages
            parcel.done = True
            for_room, self._for_room = self._for_room, []
        for waiter in for_room:
            waiter.wake()
        if parcel.waiters or parcel.callbacks:
            parcel.tell()

    def await_room(self, waiter: Waiter) -> bool:
        """Wake the waiter as soon as something is settled, and hurry; answers whether there is anything to wait for."""
        with self.lock:
            if self.active:
                self._for_room.append(waiter)
        return bool(self.hurry())

    def forget_room(self, waiter: Waiter) -> None:
        """It waits no longer."""
        with self.lock:
            if waiter in self._for_room:
                self._for_room.remove(waiter)

    def await_answer(self, parcel: Parcel, waiter: Waiter) -> bool:
        """Wake the waiter when the parcel is answered; False where it is."""
        with self.lock:
            if not parcel.done:
                parcel.waiters.append(waiter)
            return not parcel.done

    def forget_answer(self, parcel: Parcel, waiter: Waiter) -> None:
        """It waits no longer."""
        with self.lock:
            if waiter in parcel.waiters:
                parcel.waiters.remove(waiter)

    def call_when_done(self, parcel: Parcel, callback: Callback) -> None:
        """Call once the parcel is answered; at once where it is."""
        with self.lock:
            if not parcel.done:
                parcel.callbacks.append(callback)
                return
        callback()

    def hurry(self) -> list[Parcel]:
        """Make everything due that was gathered so far; answers with it."""
        with self.lock:
            parcels = [parcel for outbox in self.active for parcel in outbox.queue]
            for parcel in parcels:
                parcel.due_ns = 0
        self.on_work()
        return parcels

    def disown(self, error: Exception) -> None:
        """In a child after a fork: nobody sends here, and whoever waits is answered with the error."""
        self.lock = threading.Lock()  # that of before may be held by a thread that is not here
        self.on_work = lambda: None
        for parcel in [parcel for outbox in self.active for parcel in outbox.queue]:
            parcel.error, parcel.done = error, True
        self.active = {}

    def _begin(self, outbox: Outbox, *, loose: bool) -> Parcel | None:
        """A new parcel behind the others of the outbox; None where its topic must be opened first. Under the lock."""
        destination = outbox.destination
        if not destination.usable:
            return None
        now_ns = self._mono_ns()
        if outbox.open is not None:
            outbox.open.due_ns = 0  # of another kind: it goes first
        parcel = outbox.open = Parcel(outbox, now_ns + self._linger_ns, loose=loose, unheeded=self._unheeded)
        parcel.last, parcel.enough_bytes = self._batch_messages - 1, self._batch_bytes
        if not outbox.queue:
            self.active[outbox] = None
            destination.pending += 1
            destination.used_ns = now_ns
        outbox.queue.append(parcel)
        self.on_work()
        return parcel

    def _fill(self, outbox: Outbox, parcel: Parcel) -> None:
        """It has enough to go; where it has as much as may go at once, nothing more is added. Under the lock."""
        if parcel.due_ns:
            parcel.due_ns = 0
            self.on_work()
        parcel.last, parcel.enough_bytes = self.most_messages - 1, self.most_bytes
        if len(parcel.values) >= self.most_messages or parcel.bytes >= self.most_bytes:
            outbox.open = None
