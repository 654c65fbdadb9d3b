"""What the producers for threads and for tasks share: arguments in, lanes chosen, parcels written; no waiting."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias

import msgspec

from holdfast.api.bodies import Bodies
from holdfast.api.drafts import NewMessage, message_of
from holdfast.broker.engine import BrokerEngine
from holdfast.broker.folder.layout import check_topic_name
from holdfast.broker.messages import TEXT_KEY
from holdfast.broker.partition import Draft, Partition, Publication
from holdfast.broker.routing import RoundRobin, check_partition
from holdfast.embedded.accumulator import Accumulator
from holdfast.embedded.parcels import Callback, Lane, Parcel, Sent, Span
from holdfast.embedded.route import Route
from holdfast.embedded.sender import Sender
from holdfast.env import close_in_children
from holdfast.errors import Closed, HoldfastError, InvalidRequest, QueueFull
from holdfast.model import Appended
from holdfast.settings import ProducerSettings, load

NO_OPTIONS: Final = (None,) * 6
_PLAIN_KEYS: Final = frozenset({type(None), bytes, str})
_NAMED_STICK: Final = 100  # whatever its settings: one that resumes must give the same turns again
_MOST_FAILED: Final = 100
_LOOK_AGAIN_NS: Final = 1_000_000_000
AFTER_ERROR_NS: Final = 1_000_000_000

Writing: TypeAlias = tuple[Parcel, Partition, Publication | Appended]
Placed: TypeAlias = tuple[Lane, bytes, bytes | None, int, Draft | None, bool]  # the last two: more than a key, loose


def producer_settings(base: ProducerSettings, changes: Mapping[str, Any]) -> ProducerSettings:
    """The settings of one producer: those of the broker, changed as asked."""
    return load(ProducerSettings, {**msgspec.structs.asdict(base), **changes})


class Producing:
    """One producer, without the waiting."""

    def __init__(
        self,
        engine: BrokerEngine,
        settings: ProducerSettings | None = None,
        *,
        name: str | None = None,
        resume: bool = False,
        body_type: Any = None,
    ) -> None:
        if not isinstance(resume, bool):
            raise InvalidRequest(f"resume={resume!r} cannot be used: give True or False")
        self._engine = engine
        self.settings = settings or engine.settings.producer
        self.name = name
        self._clock = engine.world.clock
        self._sender = Sender(engine, self.settings, name, resume=resume)
        self._bodies = Bodies(body_type)
        self._accumulator = Accumulator(self.settings, self._clock)
        self._add = self._accumulator.add
        self._routes: dict[str, Route] = {}
        self._failed: list[Parcel] = []
        self._closed = False
        self._rounding: int | None = None  # the thread that stores what is due
        close_in_children(self)

    @property
    def closed(self) -> bool:
        return self._closed or self._engine.closed

    def __repr__(self) -> str:
        name = f" {self.name}" if self.name else ""
        return f"<{type(self).__name__}{name} in {self._engine.folder}{' (closed)' if self.closed else ''}>"

    def disown(self) -> None:
        """In a child after a fork: the parent sends what is left."""
        self._closed = True
        self._accumulator.disown(Closed("the message was sent before a fork, by the parent, which stores it"))

    def _check_open(self) -> None:
        self._engine.check_open()
        if self._closed:
            raise Closed(f"the producer in {self._engine.folder} is closed; make a new one")
        if self._sender.failure is not None:
            raise Closed(f"the producer has ended with an error: {self._sender.failure}. Make a new one of its name")

    def _open_route(self, name: str) -> Route:
        """The lanes to a topic, which is open and held; this may take a while."""
        self._check_open()
        self._let_go_beyond_limit()
        topic = self._engine.hold(check_topic_name(name), self)
        with self._accumulator.lock:
            if self._closed:  # meanwhile: whatever is put in now would find nobody who sends it
                topic.holders.discard(self)
                self._check_open()
            route = self._routes.get(name)
            if route is None:
                turns = RoundRobin(_NAMED_STICK if self.name else self.settings.batch_messages)
                route = self._routes[name] = Route(self, topic, self._bodies, turns)
            elif not route.usable:
                topic.holders.add(self)  # once more: it may have been let go just now
                route.topic, route.held = topic, True
                route.used_ns = self._clock.monotonic_ns()
                route.look()
        return route

    def _let_go_beyond_limit(self) -> None:
        """Let go of topics that nothing is on its way to, where this producer holds all that may be open."""
        with self._accumulator.lock:
            held = [route for route in self._routes.values() if route.held]
            if sum(route.count for route in held) >= self._engine.settings.open_partitions:
                for route in held:
                    if not route.pending:
                        route.held = False
                        route.topic.holders.discard(self)

    def _place(
        self, route: Route, body: Any, key: Any, priority: Any, options: tuple[Any, ...], partition: object
    ) -> Placed:
        """Where a message goes, and as what."""
        plain = type(body) is bytes and options == NO_OPTIONS and type(priority) is int and not priority
        route.refresh()
        if plain and partition is None and type(key) in _PLAIN_KEYS and route.plain:
            stored_key, flags = (key.encode(), TEXT_KEY) if type(key) is str and key.isascii() else (key, 0)
            if type(stored_key) is not str:
                size = len(body) if stored_key is None else len(body) + len(stored_key)
                if size > route.most_bytes:
                    raise route.too_large(size)
                lane = route.next() if stored_key is None else route.keyed(stored_key)
                return lane, body, stored_key, flags, None, False
        headers, delay, at, ttl, dedup_id, correlation_id = options
        message = message_of(body, key, headers, priority, delay, at, ttl, dedup_id, correlation_id)
        return self._place_new(route, message, partition)

    def _place_new(self, route: Route, message: NewMessage, partition: object) -> Placed:
        route.refresh()
        draft = route.drafter.draft(message, self._clock.now_ns() // 1_000_000)
        route.check_size(draft)
        lane = route.lane_for(draft, partition)
        loose = bool(draft.due_at_ms) or draft.dedup_id is not None
        return lane, draft.value, draft.key, draft.flags, draft, loose  # type: ignore[return-value]

    def _put(self, placed: Placed) -> Sent | None:
        """Take it in; None where its topic must be opened again, or room be made first."""
        lane, value, key, flags, draft, loose = placed
        if draft is None:
            return self._add(lane, value, key, flags)
        return self._accumulator.add_draft(lane, draft, loose=loose)

    def _pieces(self, route: Route, bodies: list[bytes], partition: object) -> Iterator[tuple[Lane, int, int, int]]:
        """A list of plain bodies as (lane, first, behind the last, bytes), each small enough for one parcel."""
        if partition is None:
            runs = route.spread(len(bodies))
        else:
            runs = [(check_partition(partition, route.name, route.count), 0, len(bodies))]
        most_messages, most_bytes = self._accumulator.most_messages, self._accumulator.most_bytes
        for number, start, end in runs:
            first = start
            while first < end:
                behind = min(first + most_messages, end)
                size = sum(map(len, bodies[first:behind]))
                if size > most_bytes and behind - first > 1:
                    behind = first + max((behind - first) * most_bytes // size, 1)
                    size = sum(map(len, bodies[first:behind]))
                yield route.lanes[number], first, behind, size
                first = behind

    def _check_many(self, messages: object) -> list[Any]:
        if isinstance(messages, (bytes, bytearray, str, Mapping)) or not isinstance(messages, Iterable):
            raise InvalidRequest(f"send_many takes a list of bodies or NewMessages, not {type(messages).__name__}")
        return messages if isinstance(messages, list) else list(messages)

    def _all_plain(self, route: Route, messages: list[Any]) -> bool:
        """Whether all are nothing but bytes, and not too large."""
        route.refresh()
        if not messages or set(map(type, messages)) != {bytes} or not route.plain:
            return False
        largest = max(map(len, messages))
        if largest > route.most_bytes:
            raise route.too_large(largest)
        return True

    @staticmethod
    def _note_taken(error: HoldfastError, spans: list[Span], count: int, turns_of: Route | None) -> None:
        """Say how many messages of a call were sent before it failed; the turns that the others had are free."""
        taken = sum(len(which) for _, _, which in spans)
        if turns_of is not None and isinstance(error, QueueFull):
            turns_of.give_back(count - taken)
        if taken:
            error.add_note(f"the first {taken} of {count} messages were sent")

    def _full(self) -> QueueFull:
        return QueueFull(
            f"the producer's buffer of {self.settings.buffer_bytes} bytes is full, and too little was stored within "
            f"{self.settings.block_ms} ms. The message was not sent; send more slowly, or raise buffer_bytes or "
            "block_ms"
        )

    def _check_outside(self) -> None:
        """Refuse to wait inside a callback: the one who calls it is the one who would be waited for."""
        if self._rounding == threading.get_ident():
            raise InvalidRequest(
                "a callback of a producer must not wait for it, nor close it; let another thread do so"
            )

    def _deadline_ns(self, timeout_s: float | None) -> int | None:
        return None if timeout_s is None else self._clock.monotonic_ns() + round(timeout_s * 1e9)

    def _left_s(self, deadline_ns: int | None) -> float | None:
        return None if deadline_ns is None else (deadline_ns - self._clock.monotonic_ns()) / 1e9

    def _write_due(self, now_ns: int) -> list[Writing]:
        """Write all parcels that are due; answers what to wait for."""
        written: list[Writing] = []
        for parcels in self._accumulator.take(now_ns):
            for parcel in parcels:
                try:
                    written.append((parcel, *self._sender.write(parcel)))
                except Exception as error:  # whatever it was: those who wait must hear of it
                    if self._failed_later(parcel, error, now_ns):
                        break
        return written

    def _next_ns(self, now_ns: int) -> int | None:
        """When there is something to do next."""
        due_ns = self._accumulator.due_ns()
        return self._let_go(now_ns) if due_ns is None else due_ns

    def _failed_later(self, parcel: Parcel, error: Exception, now_ns: int) -> bool:
        """Answer the parcel with an error, or keep it for another attempt; answers whether it is kept."""
        if self._sender.fail(parcel, error, now_ns):
            return True
        self._accumulator.settle(parcel)
        if not parcel.unheeded:
            with self._accumulator.lock:
                self._failed = [*[failed for failed in self._failed if not failed.seen][-_MOST_FAILED:], parcel]
        return False

    def _raise_unseen(self) -> None:
        """Raise the first error that nobody was told of."""
        with self._accumulator.lock:
            failed, self._failed = [parcel for parcel in self._failed if not parcel.seen], []
        for parcel in failed:
            parcel.seen = True
        if failed and failed[0].error is not None:
            raise failed[0].error

    def _give_up(self) -> None:
        """Answer what is left: nobody sends it any more."""
        for parcel in self._accumulator.hurry():
            parcel.error = Closed("the producer was closed before the message could be stored; it is not stored")
            self._accumulator.settle(parcel)
            self._failed.append(parcel)

    def _let_go(self, now_ns: int | None = None) -> int | None:
        """Let go of topics that nothing is on its way to; answers when to look again."""
        with self._accumulator.lock:
            for route in self._routes.values():
                if route.held and (now_ns is None or route.is_idle(now_ns)):
                    route.held = False
                    route.topic.holders.discard(self)
            waiting = any(route.held and not route.pending for route in self._routes.values())
        return now_ns + _LOOK_AGAIN_NS if waiting and now_ns is not None else None

    def await_all(self, parcels: Iterable[Parcel], timeout_s: float | None) -> Parcel | None:
        """Return when they are answered, or when the time is over; answers with the first that is not.

        For threads only.
        """
        raise NotImplementedError

    def call_when_done(self, parcel: Parcel, callback: Callback) -> None:
        """Call once the parcel is answered; at once where it is."""
        with self._accumulator.lock:
            if not parcel.done:
                parcel.callbacks.append(callback)
                return
        callback()
