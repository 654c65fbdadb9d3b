"""The core of a producer: where each message goes, what is due, what failed. Nothing here waits for an answer.

`Sent` is what a face gives to the one who sent a message: `Sent` for threads, `AsyncSent` for tasks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Generic, TypeAlias, TypeVar

import msgspec

from holdfast.api.drafts import Bodies, NewMessage
from holdfast.broker.folder.layout import check_name, check_topic_name
from holdfast.broker.messages import Draft, RoundRobin
from holdfast.broker.producers import ProducerId
from holdfast.broker.waiters import Waiter
from holdfast.env import Clock, close_in_children
from holdfast.env.process import get_logger
from holdfast.errors import Closed, HoldfastError, InvalidRequest, OutOfSequence, QueueFull
from holdfast.model import DURABILITY_OF_ACKS, Durability
from holdfast.producing.parcels import MESSAGE_COST, Callback, Destination, Outbox, Parcel, ProducerPort, Span
from holdfast.settings import ProducerSettings, load

_NAMED_STICK: Final = 100  # whatever its settings: one that resumes must give the same turns again
_MOST_FAILED: Final = 100
_LOOK_AGAIN_NS: Final = 1_000_000_000

_Sent = TypeVar("_Sent")


class Addressed(msgspec.Struct, frozen=True, gc=False):
    """A message and the outbox it goes to. One that has more than a value and a key has a draft."""

    outbox: Outbox
    value: bytes
    key: bytes | None = None
    flags: int = 0
    draft: Draft | None = None
    rest: Any = None  # what the port wants back of the draft
    loose: bool = False
    turns: int = 0  # that it took, where nothing but its turn says where it goes


Writing: TypeAlias = tuple[Parcel, Any]  # a parcel that is written, and what to wait for


def producer_settings(base: ProducerSettings, changes: Mapping[str, Any]) -> ProducerSettings:
    """Return the settings of one producer: those of the broker with these changes."""
    return load(ProducerSettings, {**msgspec.structs.asdict(base), **changes})


class ProducerCore(Generic[_Sent]):
    """What the producers for threads and for tasks share."""

    def __init__(
        self,
        port: ProducerPort,
        settings: ProducerSettings,
        sent: Callable[[Parcel, int], _Sent],
        *,
        name: str | None,
        resume: bool,
        body_type: Any,
    ) -> None:
        self.sender = Sender(port, settings, name, resume=resume)
        self.port = port
        self.settings = settings
        self.name = name
        self.clock = port.clock
        self.accumulator = Accumulator(settings, port.clock, sent, port.most_parcel)
        self.destinations: dict[str, Destination] = {}
        self.closed = False
        self.usable = True  # neither closed nor ended with an error
        self.owner: Any = None  # who waits for parcels
        self.face: Any = None  # the producer, which its broker must find for as long as anything is on its way
        self._sent = sent
        self._bodies = Bodies(body_type)
        self._failed: list[Parcel] = []
        close_in_children(self)

    def close(self) -> None:
        """Take in nothing more."""
        self.closed, self.usable = True, False

    def disown(self) -> None:
        """Stop in a child after a fork: the parent sends what is left."""
        self.close()
        self.accumulator.disown(
            Closed("the message was sent before a fork: the parent stores it, and only it can wait for that")
        )

    def check_open(self) -> None:
        self.port.check_open()
        if self.closed:
            raise Closed(f"the producer {self.port.place} is closed; create a new one")
        if self.sender.failure is not None:
            raise Closed(
                f"the producer has ended with an error: {self.sender.failure}. Create a new one with the same name"
            )

    def open(self, name: str) -> Destination:
        """The outboxes of a topic, which is open and held; this may take a while."""
        self.check_open()
        self._release_beyond_limit()
        topic = self.port.open_topic(check_topic_name(name))
        with self.accumulator.lock:
            if self.closed:  # meanwhile: whatever is put in now would find nobody who sends it
                self.port.release(topic)
                self.check_open()
            destination = self.destinations.get(name)
            if destination is None:
                turns = RoundRobin(_NAMED_STICK if self.name else self.settings.batch_messages)
                # One with a name may be resumed by another, which must come to the same partitions again.
                destination = Destination(
                    self.owner, self.port, topic, self._bodies, turns, may_pass_over=self.name is None
                )
                self.destinations[name] = destination
            elif topic is not destination.topic or not destination.usable:
                destination.hold(topic)
        return destination

    def _release_beyond_limit(self) -> None:
        """Let go of topics that nothing is on its way to, where this producer holds all that may be open."""
        if self.port.most_partitions is None:
            return
        with self.accumulator.lock:
            held = [each for each in self.destinations.values() if each.held]
            if sum(each.count for each in held) >= self.port.most_partitions:
                for destination in held:
                    if not destination.pending:
                        destination.release()

    # Where a message goes

    def address(self, destination: Destination, message: NewMessage, partition: object) -> Addressed:
        """Where a message goes, and as what."""
        destination.refresh()
        draft, rest, loose = destination.drafting.draft(message)
        destination.check_size(draft)
        outbox = destination.outbox_for(draft, partition)
        turns = int(partition is None and draft.key is None and draft.dedup_id is None)
        value: Any = draft.value
        return Addressed(outbox, value, draft.key, draft.flags, draft, rest, loose, turns)

    def put(self, addressed: Addressed) -> _Sent | None:
        """Take it in; None where its topic must be opened again, or room be made first."""
        if addressed.draft is None:
            return self.accumulator.add(addressed.outbox, addressed.value, addressed.key, addressed.flags)
        added = self.put_draft(addressed)
        return None if added is None else self._sent(*added)

    def put_draft(self, addressed: Addressed) -> tuple[Parcel, int] | None:
        """Add a message that has a draft; returns its parcel and its index there."""
        assert addressed.draft is not None
        return self.accumulator.add_draft(addressed.outbox, addressed.draft, addressed.rest, loose=addressed.loose)

    def pieces(
        self, destination: Destination, bodies: list[bytes], partition: object
    ) -> Iterator[tuple[Outbox, int, int, int]]:
        """A list of plain bodies as (outbox, first, behind the last, bytes), each small enough for one parcel."""
        if partition is None:
            runs = destination.spread(len(bodies))
        else:
            runs = [(destination.chosen(partition).number, 0, len(bodies))]
        most_messages, most_bytes = self.accumulator.most_messages, self.accumulator.most_bytes
        for number, start, end in runs:
            first = start
            while first < end:
                behind = min(first + most_messages, end)
                size = sum(map(len, bodies[first:behind]))
                if size > most_bytes and behind - first > 1:
                    behind = first + max((behind - first) * most_bytes // size, 1)
                    size = sum(map(len, bodies[first:behind]))
                yield destination.outboxes[number], first, behind, size
                first = behind

    @staticmethod
    def check_many(messages: object) -> list[Any]:
        """The messages of a call, as a list."""
        if isinstance(messages, (bytes, bytearray, str, Mapping)) or not isinstance(messages, Iterable):
            raise InvalidRequest(f"send_many takes a list of bodies or NewMessages, not {type(messages).__name__}")
        return messages if isinstance(messages, list) else list(messages)

    @staticmethod
    def all_plain(destination: Destination, messages: list[Any]) -> bool:
        """Return whether all messages are plain bytes and not too large."""
        destination.refresh()
        if not messages or set(map(type, messages)) != {bytes} or not destination.plain:
            return False
        largest = max(map(len, messages))
        if largest > destination.most_bytes:
            raise destination.too_large(largest)
        return True

    @staticmethod
    def note_taken(error: HoldfastError, spans: list[Span], count: int, turns_of: Destination | None) -> None:
        """Say how many messages of a call were sent before it failed; the turns that the others had are free."""
        taken = sum(len(which) for _, _, which in spans)
        if turns_of is not None and isinstance(error, QueueFull):
            turns_of.give_back(count - taken)
        if taken:
            error.add_note(f"the first {taken} of {count} messages were sent")

    def full(self) -> QueueFull:
        """The error for a buffer that stays full."""
        return QueueFull(
            f"the producer's buffer of {self.settings.buffer_bytes} bytes is full, and too little was stored within "
            f"{self.settings.block_ms} ms. The message was not sent; send more slowly, or raise buffer_bytes or "
            "block_ms"
        )

    # What rounds do

    def write_due(self, now_ns: int) -> list[Writing]:
        """Write all parcels that are due, and return what to wait for. Parcels that need no waiting are settled."""
        written: list[Writing] = []
        for parcels in self.accumulator.take(now_ns):
            for parcel in parcels:
                if parcel.done:  # the producer was closed meanwhile, and could not wait for this one
                    continue
                try:
                    waiting = self.sender.write(parcel)
                except Exception as error:  # whatever it was: those who wait must hear of it
                    if not self.fail(parcel, error):
                        break
                else:
                    if waiting is None:
                        self.accumulator.settle(parcel)
                    else:
                        written.append((parcel, waiting))
        return written

    def next_ns(self, now_ns: int) -> int | None:
        """When there is something to do next."""
        due_ns = self.accumulator.due_ns()
        return self.release(now_ns) if due_ns is None else due_ns

    def fail(self, parcel: Parcel, error: Exception) -> bool:
        """Answer the parcel with an error, or keep it for another attempt; whether it has its answer."""
        if parcel.done:
            return True
        if not self.sender.fails(parcel, error, self.clock.monotonic_ns()):
            return False
        if self.sender.failure is not None:
            self.usable = False
        parcel.error = error
        if not parcel.unheeded:  # before those who wait are woken: one of them may be a flush, which raises it
            with self.accumulator.lock:
                self._failed = [*[failed for failed in self._failed if not failed.seen][-_MOST_FAILED:], parcel]
        self.accumulator.settle(parcel)
        return True

    def raise_unseen(self) -> None:
        """Raise the first error that has not been reported."""
        with self.accumulator.lock:
            failed, self._failed = [parcel for parcel in self._failed if not parcel.seen], []
        for parcel in failed:
            parcel.seen = True
        if failed and failed[0].error is not None:
            raise failed[0].error

    def finish(self) -> None:
        """Release all topics, and answer the messages that are left: they will not be sent any more."""
        self.release()  # first: from then on nothing more comes in
        what = "it is no longer being sent" if self.port.blocks else "it is not stored"
        for parcel in self.accumulator.hurry():
            with self.accumulator.lock:
                if parcel.done:
                    continue
                parcel.error = Closed(f"the producer was closed before the message could be stored; {what}")
                self._failed.append(parcel)
            self.accumulator.settle(parcel)

    def release(self, now_ns: int | None = None) -> int | None:
        """Release topics without messages in flight; returns when to check again."""
        with self.accumulator.lock:
            for destination in self.destinations.values():
                if destination.held and (now_ns is None or destination.is_idle(now_ns)):
                    destination.release()
            waiting = any(each.held and not each.pending for each in self.destinations.values())
        return now_ns + _LOOK_AGAIN_NS if waiting and now_ns is not None else None


# What a producer has collected and not yet stored: parcels by partition, within a bounded buffer.
#
# A parcel is due when it has enough messages, enough bytes, or is old enough; while the disk is busy it goes
# on growing. Nothing here waits: time is an argument, and the caller gets the time of the next check.


# A parcel that waits for its turn may grow up to here: about what fits in one frame.
MOST_MESSAGES: Final = 1_000
MOST_BYTES: Final = 128 * 1024


class Accumulator(Generic[_Sent]):
    """The buffer of one producer. Safe to use from any thread. `sent` is the class that `send` returns."""

    def __init__(
        self, settings: ProducerSettings, clock: Clock, sent: Callable[[Parcel, int], _Sent], most_parcel: int | None
    ) -> None:
        self._sent = sent
        self._mono_ns = clock.monotonic_ns
        self._linger_ns = settings.linger_ms * 1_000_000
        self._batch_messages = min(settings.batch_messages, most_parcel or settings.batch_messages)
        self._batch_bytes = settings.batch_bytes
        # If a server limits the size of a batch, a parcel has the size of the settings and does not grow.
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
        """Add a message that is only a value and a key; returns None if there is no space now."""
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
        """Add a message that has more than a value and a key; returns its parcel and its index there."""
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
        """Add plain values of `size` bytes in total; returns their parcel and the index of the first one."""
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
        """Settle the parcel: it leaves its outbox, and callers that wait for it or for space continue."""
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
            parcel.empty()  # keeping an answer must not keep the messages
            parcel.done = True
            for_room, self._for_room = self._for_room, []
        for waiter in for_room:
            waiter.wake()
        if parcel.waiters or parcel.callbacks:
            parcel.tell()

    def await_room(self, waiter: Waiter) -> bool:
        """Wake the waiter as soon as something is settled, and hurry; returns whether there is anything to wait for."""
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
        """Make everything collected so far due, and return it."""
        with self.lock:
            parcels = [parcel for outbox in self.active for parcel in outbox.queue]
            for parcel in parcels:
                parcel.due_ns = 0
        self.on_work()
        return parcels

    def disown(self, error: Exception) -> None:
        """Stop in a child after a fork: nothing is sent here, and callers that wait get the error."""
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


# Writing parcels to partitions: with sequence numbers, retried after failures, and never stored twice.
#
# Every message of an idempotent producer has a number in its partition. A parcel gets its numbers when it is written
# first, and keeps them however often it is written again: the partition knows what it has and takes nothing twice, nor
# anything before what comes ahead of it. Where a parcel fails for good, what the partition has decides the next number.
# A producer with a name ends with such a failure instead: if later messages were stored without the one that failed,
# a producer that resumes would count wrongly.


logger = get_logger(__name__)

_NUMBERS: Final = 2**32


class Sender:
    """Writes the parcels of one producer, one after the other. Only one round at a time may use it."""

    def __init__(self, port: ProducerPort, settings: ProducerSettings, name: str | None, *, resume: bool) -> None:
        if not isinstance(resume, bool):
            raise InvalidRequest(f"resume={resume!r} cannot be used: give True or False")
        if (name is not None or resume) and not settings.idempotent:
            raise InvalidRequest("a producer with a name is idempotent: leave out idempotent=False, or the name")
        if resume and name is None:
            raise InvalidRequest(
                "resume=True needs a name: give name=..., to continue where the last producer with that name stopped"
            )
        self._port = port
        self._settings = settings
        self._durability: Durability = DURABILITY_OF_ACKS[settings.acks]
        self._name = None if name is None else check_name(name, "producer")
        self._resume = resume
        self._beginning = threading.Lock()
        self.identity: ProducerId | None = None
        self.failure: Exception | None = None  # with which a named producer has ended

    @property
    def begun(self) -> bool:
        return self.identity is not None or not self._settings.idempotent

    def begin(self) -> None:
        """Get a producer id; a producer with a name fences earlier ones from now on."""
        with self._beginning:  # a producer that began twice would fence itself
            if not self.begun:
                self.identity = self._port.begin(self._name, resume=self._resume)

    def write(self, parcel: Parcel) -> Any:
        """Write it to its partition; returns what to wait for."""
        self._check_usable()
        parcel.attempts += 1
        parcel.durability = self._durability
        if parcel.loose:
            return self._port.publish(parcel, self.identity, self._durability)
        if self.identity is not None and parcel.sequence is None:
            self._number(parcel)
        count = len(parcel.values) - parcel.skipped
        if not count:
            return self._port.written(parcel, self._durability)
        waiting = self._append(parcel)
        if parcel.sequence is not None:
            parcel.outbox.sequence = (parcel.sequence + count) % _NUMBERS
        return waiting

    def fails(self, parcel: Parcel, error: Exception, now_ns: int) -> bool:
        """Decide whether an error is the parcel's answer; otherwise it is retried later."""
        outbox, settings = parcel.outbox, self._settings
        again = isinstance(error, HoldfastError) and error.retryable and self.failure is None
        if again and (settings.retries is None or parcel.attempts <= settings.retries):
            wait_ms = min(settings.retry_backoff_ms << min(parcel.attempts - 1, 30), settings.retry_backoff_max_ms)
            outbox.retry_at_ns = now_ns + wait_ms * 1_000_000
            return False
        outbox.retry_at_ns = 0
        outbox.sequence = None  # what the partition has of it is what counts
        if self._name is not None and self.failure is None:
            self.failure = error
        if parcel.unheeded:
            logger.warning(
                "messages not stored",
                extra={"topic": outbox.destination.name, "partition": outbox.number, "messages": len(parcel.values)}
                | {"error": str(error)},
            )
        return True

    def _check_usable(self) -> None:
        self._port.check_open()
        if self.failure is not None:
            raise Closed(
                f"the producer has ended with an error: {self.failure}. This message was not stored; create a new "
                "producer with the same name"
            ) from self.failure
        if self._name is not None and self.identity is not None:
            self._port.check(self.identity)

    def _number(self, parcel: Parcel) -> None:
        """Give the parcel its sequence numbers; skip what an earlier producer has stored already."""
        assert self.identity is not None
        outbox, count = parcel.outbox, len(parcel.values)
        if outbox.sequence is None:
            outbox.sequence = self._first_sequence(outbox)
        if outbox.counted < outbox.known:
            parcel.skipped = min(count, outbox.known - outbox.counted)
            first = outbox.counted % _NUMBERS
            parcel.skipped_offsets = self._port.offsets(outbox, self.identity, first, parcel.skipped)
        outbox.counted += count
        parcel.sequence = outbox.sequence

    def _first_sequence(self, outbox: Outbox) -> int:
        assert self.identity is not None
        if not self._resume and (self._name is not None or not outbox.counted):
            return 0
        expected = self._port.next_sequence(outbox, self.identity)
        if self._resume and not outbox.counted:
            outbox.known = expected
        return expected

    def _append(self, parcel: Parcel) -> Any:
        try:
            return self._port.append(parcel, self.identity, self._durability)
        except OutOfSequence as error:
            if error.known or self._name is not None or parcel.attempts > 1 or not parcel.sequence:
                raise
            # It was idle so long that the partition has forgotten it. Nothing is missing: start a new sequence.
            parcel.sequence = 0
            return self._port.append(parcel, self.identity, self._durability)
