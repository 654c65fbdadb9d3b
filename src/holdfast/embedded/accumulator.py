"""What a producer has gathered and not yet stored: parcels by partition, within a bounded buffer.

A parcel is due when it has enough messages, enough bytes, or is old enough; while the disk is busy it goes
on growing. Nothing here waits: time is an argument, and whoever drives it is told when to look.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final

from holdfast.broker.partition import Draft
from holdfast.embedded.parcels import MESSAGE_COST, Lane, Parcel, Sent
from holdfast.env import Clock
from holdfast.settings import ProducerSettings

# A parcel that waits for its turn may grow up to here: about what fits in one frame.
MOST_MESSAGES: Final = 1_000
MOST_BYTES: Final = 128 * 1024


class Accumulator:
    """The buffer of one producer. Safe to use from any thread."""

    def __init__(self, settings: ProducerSettings, clock: Clock) -> None:
        self._mono_ns = clock.monotonic_ns
        self._linger_ns = settings.linger_ms * 1_000_000
        self._batch_messages = settings.batch_messages
        self._batch_bytes = settings.batch_bytes
        self.most_messages = max(settings.batch_messages, MOST_MESSAGES)
        self.most_bytes = max(settings.batch_bytes, MOST_BYTES)
        self._buffer_bytes = settings.buffer_bytes
        self._unheeded = settings.acks == "none"
        self.lock = threading.Lock()
        self.active: dict[Lane, None] = {}  # lanes with parcels
        self.buffered = 0
        self.on_work: Callable[[], None] = lambda: None  # there is something to do, now or soon
        self.on_room: Callable[[], None] = lambda: None

    def add(self, lane: Lane, value: bytes, key: bytes | None = None, flags: int = 0) -> Sent | None:
        """Take in a message that has no more than a value and a key; None where there is no room for it now."""
        size = len(value) if key is None else len(value) + len(key)
        with self.lock:
            buffered = self.buffered + size
            if buffered > self._buffer_bytes and self.buffered:
                return None
            parcel = lane.open
            if parcel is None or parcel.loose:
                parcel = self._begin(lane, loose=False)
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
                self._fill(lane, parcel)
        return Sent(parcel, index)

    def add_draft(self, lane: Lane, draft: Draft, *, loose: bool) -> Sent | None:
        """The same for a message that has more."""
        size = len(draft.value) + len(draft.key or b"") + sum(len(name) + len(value) for name, value in draft.headers)
        with self.lock:
            if self.buffered + size > self._buffer_bytes and self.buffered:
                return None
            parcel = lane.open
            if parcel is None or parcel.loose is not loose:
                parcel = self._begin(lane, loose=loose)
                if parcel is None:
                    return None
            index = len(parcel.values)
            parcel.add_draft(draft)
            parcel.values.append(draft.value)  # type: ignore[arg-type]
            self.buffered += size + MESSAGE_COST
            parcel.bytes += size
            if index >= parcel.last or parcel.bytes >= parcel.enough_bytes:
                self._fill(lane, parcel)
        return Sent(parcel, index)

    def extend(self, lane: Lane, values: Sequence[bytes], size: int) -> tuple[Parcel, int] | None:
        """The same for values, which are so many bytes: their parcel, and which of it the first one is."""
        with self.lock:
            if self.buffered + size > self._buffer_bytes and self.buffered:
                return None
            parcel = lane.open
            if parcel is None or parcel.loose:
                parcel = self._begin(lane, loose=False)
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
                self._fill(lane, parcel)
        return parcel, index

    def take(self, now_ns: int) -> list[list[Parcel]]:
        """The parcels that may go now, by lane and in order: nothing is added to them any more."""
        due: list[list[Parcel]] = []
        with self.lock:
            for lane in self.active:
                if lane.due_ns > now_ns:
                    continue
                last = lane.open
                if last is not None and last.due_ns <= now_ns:
                    lane.open = last = None
                due.append([parcel for parcel in lane.queue if parcel is not last])
        return due

    def due_ns(self) -> int | None:
        """When there is something to do next."""
        with self.lock:
            return min([lane.due_ns for lane in self.active], default=None)

    def settle(self, parcel: Parcel) -> None:
        """The parcel is answered: it leaves its lane, and those who wait for it, or for room, go on."""
        lane = parcel.lane
        with self.lock:
            lane.queue.remove(parcel)
            if not lane.queue:
                del self.active[lane]
                lane.route.pending -= 1
            self.buffered -= parcel.bytes + MESSAGE_COST * len(parcel.values)
            if not self.active:
                self.buffered = 0
            parcel.empty()  # whoever keeps an answer need not keep the messages
            parcel.done = True
            event = parcel.event
        if event is not None:
            event.set()
        self.on_room()
        if parcel.callbacks:
            parcel.run_callbacks()

    def hurry(self) -> list[Parcel]:
        """Make everything due that was gathered so far; answers with it."""
        with self.lock:
            parcels = [parcel for lane in self.active for parcel in lane.queue]
            for parcel in parcels:
                parcel.due_ns = 0
        self.on_work()
        return parcels

    def disown(self, error: Exception) -> None:
        """In a child after a fork: nobody sends here, and whoever waits is answered with the error."""
        self.lock = threading.Lock()  # that of before may be held by a thread that is not here
        self.on_work = self.on_room = lambda: None
        for parcel in [parcel for lane in self.active for parcel in lane.queue]:
            parcel.error, parcel.done = error, True
        self.active = {}

    def _begin(self, lane: Lane, *, loose: bool) -> Parcel | None:
        """A new parcel behind the others of the lane; None where its topic must be opened first. Under the lock."""
        route = lane.route
        if not route.usable:
            return None
        now_ns = self._mono_ns()
        if lane.open is not None:
            lane.open.due_ns = 0  # of another kind: it goes first
        parcel = lane.open = Parcel(lane, now_ns + self._linger_ns, loose=loose, unheeded=self._unheeded)
        parcel.last, parcel.enough_bytes = self._batch_messages - 1, self._batch_bytes
        if not lane.queue:
            self.active[lane] = None
            route.pending += 1
            route.used_ns = now_ns
        lane.queue.append(parcel)
        self.on_work()
        return parcel

    def _fill(self, lane: Lane, parcel: Parcel) -> None:
        """It has enough to go; where it has as much as may go at once, nothing more is added. Under the lock."""
        if parcel.due_ns:
            parcel.due_ns = 0
            self.on_work()
        parcel.last, parcel.enough_bytes = self.most_messages - 1, self.most_bytes
        if len(parcel.values) >= self.most_messages or parcel.bytes >= self.most_bytes:
            lane.open = None
