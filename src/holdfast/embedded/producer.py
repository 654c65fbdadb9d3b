"""The producer for threads: messages are gathered by partition and stored in batches, by a thread of its own."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterable
from datetime import datetime
from types import TracebackType
from typing import Any

from holdfast.api.drafts import HeadersLike, NewMessage, Seconds, Text
from holdfast.api.times import duration_ms
from holdfast.broker.engine import BrokerEngine
from holdfast.broker.messages import TEXT_KEY
from holdfast.broker.partition import Publication
from holdfast.embedded.parcels import Lane, Parcel, Sent, SentMany, Span
from holdfast.embedded.producing import AFTER_ERROR_NS, NO_OPTIONS, Placed, Producing, Writing
from holdfast.embedded.route import Route
from holdfast.env import Clock, end_at_exit
from holdfast.errors import HoldfastError, QueueFull, Unavailable
from holdfast.settings import ProducerSettings

logger = logging.getLogger(__name__)


class Producer(Producing):
    """Sends messages to topics, many at once. Safe to use from any thread.

    Without a thread of its own (`thread=False`, for time that does not run by itself) whoever waits does its work.
    """

    def __init__(
        self,
        engine: BrokerEngine,
        settings: ProducerSettings | None = None,
        *,
        name: str | None = None,
        resume: bool = False,
        body_type: Any = None,
        thread: bool = True,
    ) -> None:
        super().__init__(engine, settings, name=name, resume=resume, body_type=body_type)
        self._sender.begin()
        self._with_thread = thread
        self._thread: threading.Thread | None = None
        self._round_lock = threading.Lock()
        self._work = threading.Event()
        self._room = threading.Event()
        self._stopping = False
        self._accumulator.on_work = self._wake
        self._accumulator.on_room = self._room.set
        end_at_exit(self)

    def send(
        self,
        topic: str,
        body: Any,
        *,
        key: Text | None = None,
        headers: HeadersLike | None = None,
        priority: int = 0,
        delay: Seconds | None = None,
        at: datetime | None = None,
        ttl: Seconds | None = None,
        dedup_id: Text | None = None,
        correlation_id: str | None = None,
        partition: int | None = None,
    ) -> Sent:
        """Send a message; returns at once, or when there is room for it. The answer comes to what is returned."""
        route = self._route(topic)
        options = (headers, delay, at, ttl, dedup_id, correlation_id)
        # The fused form of `_place` and `_put` for the commonest messages.
        plain = type(body) is bytes and type(priority) is int and not priority and partition is None
        if plain and options == NO_OPTIONS and route.settings is route.topic.settings and route.plain:
            if key is None and len(body) <= route.most_bytes:
                lane = route.lanes[0] if route.count == 1 else route.next()
                return self._add(lane, body) or self._insist((lane, body, None, 0, None, False), turns=1)
            flags = 0
            if type(key) is str and key.isascii():
                key, flags = key.encode(), TEXT_KEY
            if type(key) is bytes and len(body) + len(key) <= route.most_bytes:
                lane = route.keyed(key)
                return self._add(lane, body, key, flags) or self._insist((lane, body, key, flags, None, False))
        placed = self._place(route, body, key, priority, options, partition)
        turns = int(key is None and partition is None and dedup_id is None)
        return self._put(placed) or self._insist(placed, turns=turns)

    def send_many(self, topic: str, messages: Iterable[Any | NewMessage], *, partition: int | None = None) -> SentMany:
        """Send messages; an item is a body or a NewMessage. One answer for all of them, or one for each."""
        route = self._route(topic)
        messages = self._check_many(messages)
        spans: list[Span] = []
        turns_of: Route | None = None
        try:
            if self._all_plain(route, messages):
                turns_of = route if partition is None else None
                for lane, first, end, size in self._pieces(route, messages, partition):
                    parcel, index = self._insist_many(lane, messages[first:end], size)
                    spans.append((parcel, index, range(first, end)))
            else:
                for i, message in enumerate(messages):
                    new = message if isinstance(message, NewMessage) else NewMessage(body=message)
                    placed = self._place_new(route, new, partition)
                    turns = int(new.key is None and partition is None and new.dedup_id is None)
                    sent = self._put(placed) or self._insist(placed, turns=turns)
                    spans.append((sent._parcel, sent._index, (i,)))
        except HoldfastError as error:
            self._note_taken(error, spans, len(messages), turns_of)
            raise
        return SentMany(spans, len(messages))

    def flush(self, timeout: Seconds | None = None) -> None:
        """Send what was gathered and wait for its answers; raises the first error that nobody was told of yet."""
        self._drain(None if timeout is None else duration_ms(timeout, "timeout") / 1000)
        self._raise_unseen()

    def close(self, timeout: Seconds | None = None) -> None:
        """Send what is left, wait for its answers, end. What is not stored within the timeout is answered with Closed.

        Raises the first error that nobody was told of. Closing twice is fine.
        """
        if self._closed:
            return
        self._check_outside()
        timeout_s = None if timeout is None else duration_ms(timeout, "timeout") / 1000
        self._closed = True
        try:
            self._drain(timeout_s)
        except Unavailable:
            pass  # answered below
        finally:
            self._stopping = True
            self._work.set()
            if self._thread is not None and self._thread is not threading.current_thread():
                self._thread.join()
            with self._round_lock:
                self._let_go()  # first: from then on nothing more comes in
                self._give_up()
        self._raise_unseen()

    def end(self) -> None:
        """The program ends, and nobody closed us: store what is left, for as long as a send would have waited."""
        try:
            if not self._engine.closed:
                self.close(self.settings.block_ms / 1000)
        except HoldfastError as error:
            logger.error("messages were not stored at the end of the program: %s", error)

    def __enter__(self) -> Producer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except HoldfastError as failure:
            if error is None:
                raise
            error.add_note(f"messages were not stored: {failure}")

    def await_all(self, parcels: Iterable[Parcel], timeout_s: float | None) -> Parcel | None:
        """Return when they are answered, or when the time is over; answers with the first that is not."""
        deadline_ns = self._deadline_ns(timeout_s)
        return next((parcel for parcel in parcels if not self._await(parcel, deadline_ns)), None)

    def _await(self, parcel: Parcel, deadline_ns: int | None) -> bool:
        self._check_outside()
        with self._accumulator.lock:
            if parcel.event is None and not parcel.done:
                parcel.event = threading.Event()
        event = parcel.event
        while True:
            if parcel.done or event is None:
                return True
            left_s = self._left_s(deadline_ns)
            if left_s is not None and left_s <= 0:
                return False
            if not self._with_thread:
                left_s = self._help(left_s)
            self._clock.wait(event, left_s)

    def round(self) -> int | None:
        """Store what is due now; answers when more will be, in ns of the monotonic clock. The way of its thread."""
        with self._round_lock:
            self._rounding = threading.get_ident()
            try:
                now_ns = self._clock.monotonic_ns()
                for writing in self._write_due(now_ns):
                    self._finish(writing, now_ns)
                return self._next_ns(now_ns)
            finally:
                self._rounding = None

    def _finish(self, writing: Writing, now_ns: int) -> None:
        parcel, partition, waiting = writing
        try:
            if isinstance(waiting, Publication):
                partition.wait(waiting)
            else:
                partition.log.wait(waiting)
        except Exception as error:
            self._failed_later(parcel, error, now_ns)
        else:
            self._accumulator.settle(parcel)

    def _route(self, topic: str) -> Route:
        if self._closed or self._engine.closed or self._sender.failure is not None:
            self._check_open()
        try:
            return self._routes[topic]
        except (KeyError, TypeError):
            return self._open_route(topic)

    def _insist(self, placed: Placed, *, turns: int = 0) -> Sent:
        """Take a message in as soon as there is room for it; the turns that it had are free where there is none."""
        deadline_ns = self._deadline_ns(self.settings.block_ms / 1000)
        while True:
            try:
                self._make_way(placed[0], deadline_ns)
            except QueueFull:
                placed[0].route.give_back(turns)
                raise
            sent = self._put(placed)
            if sent is not None:
                return sent

    def _insist_many(self, lane: Lane, values: list[bytes], size: int) -> tuple[Parcel, int]:
        added = self._accumulator.extend(lane, values, size)
        if added is None:
            deadline_ns = self._deadline_ns(self.settings.block_ms / 1000)
            while added is None:
                self._make_way(lane, deadline_ns)
                added = self._accumulator.extend(lane, values, size)
        return added

    def _make_way(self, lane: Lane, deadline_ns: int | None) -> None:
        """Open the topic again where it was let go; otherwise wait until something was stored."""
        self._check_open()
        if not lane.route.usable:
            self._open_route(lane.route.name)
            return
        self._check_outside()
        self._room.clear()
        if not self._accumulator.hurry():
            return  # all was stored just now
        left_s = self._left_s(deadline_ns)
        if left_s is not None and left_s <= 0:
            raise self._full()
        if not self._with_thread:
            left_s = self._help(left_s)
        self._clock.wait(self._room, left_s)

    def _drain(self, timeout_s: float | None) -> None:
        if self.await_all(self._accumulator.hurry(), timeout_s) is not None:
            raise Unavailable(f"not everything was stored within {timeout_s:g} s; it is still on its way")

    def _help(self, left_s: float | None) -> float | None:
        """Do the thread's work; answers how long to wait for more of it."""
        later_ns = self.round()
        if later_ns is None:
            return left_s
        later_s = max(later_ns - self._clock.monotonic_ns(), 0) / 1e9
        return later_s if left_s is None else min(later_s, left_s)

    def _wake(self) -> None:
        if self._thread is None and self._with_thread:
            self._start()
        if not self._work.is_set():
            self._work.set()

    def _start(self) -> None:
        """Begin the thread; called under the accumulator's lock."""
        work = self._work
        # Weakly: a producer that nobody holds any more must end, as soon as nothing is left to send.
        me = weakref.ref(self, lambda _: work.set())
        self._thread = threading.Thread(
            target=_run, args=(me, self._clock, work), name="holdfast-producer", daemon=True
        )
        self._thread.start()


def _run(me: weakref.ref[Producer], clock: Clock, work: threading.Event) -> None:
    while (producer := me()) is not None and not producer._stopping:
        work.clear()
        try:
            later_ns = producer.round()
        except Exception:  # whatever it was: without its thread a producer would stand still, and nobody knew
            logger.exception("a round failed", extra={"folder": producer._engine.folder})
            later_ns = clock.monotonic_ns() + AFTER_ERROR_NS
        left_s = None if later_ns is None else max(later_ns - clock.monotonic_ns(), 0) / 1e9
        if not producer._accumulator.active:
            del producer
        if left_s is None or left_s > 0:
            clock.wait(work, left_s)
