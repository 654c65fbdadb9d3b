"""The core of a producer: where each message goes, what is due, what failed. Nothing here waits for an answer.

`Sent` is what a face gives to the one who sent a message: `Sent` for threads, `AsyncSent` for tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Generic, TypeAlias, TypeVar

import msgspec

from holdfast.api.bodies import Bodies
from holdfast.api.drafts import NewMessage
from holdfast.broker.folder.layout import check_topic_name
from holdfast.broker.messages import Draft, RoundRobin
from holdfast.env import close_in_children
from holdfast.errors import Closed, HoldfastError, InvalidRequest, QueueFull
from holdfast.producing.accumulator import Accumulator
from holdfast.producing.parcels import Destination, Outbox, Parcel, Span
from holdfast.producing.port import ProducerPort
from holdfast.producing.sender import Sender
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
    """The settings of one producer: those of the broker, changed as asked."""
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
        """In a child after a fork: the parent sends what is left."""
        self.close()
        self.accumulator.disown(Closed("the message was sent before a fork, by the parent, which stores it"))

    def check_open(self) -> None:
        self.port.check_open()
        if self.closed:
            raise Closed(f"the producer {self.port.place} is closed; make a new one")
        if self.sender.failure is not None:
            raise Closed(f"the producer has ended with an error: {self.sender.failure}. Make a new one of its name")

    def open(self, name: str) -> Destination:
        """The outboxes of a topic, which is open and held; this may take a while."""
        self.check_open()
        self._let_go_beyond_limit()
        topic = self.port.open_topic(check_topic_name(name))
        with self.accumulator.lock:
            if self.closed:  # meanwhile: whatever is put in now would find nobody who sends it
                self.port.let_go(topic)
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

    def _let_go_beyond_limit(self) -> None:
        """Let go of topics that nothing is on its way to, where this producer holds all that may be open."""
        if self.port.most_partitions is None:
            return
        with self.accumulator.lock:
            held = [each for each in self.destinations.values() if each.held]
            if sum(each.count for each in held) >= self.port.most_partitions:
                for destination in held:
                    if not destination.pending:
                        destination.let_go()

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
        """The same for one with a draft: its parcel, and which of it the message is."""
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
        """Whether all are nothing but bytes, and not too large."""
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
        """Write all parcels that are due; answers what to wait for. Those that need not be waited for are settled."""
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
        return self.let_go(now_ns) if due_ns is None else due_ns

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
        """Raise the first error that nobody was told of."""
        with self.accumulator.lock:
            failed, self._failed = [parcel for parcel in self._failed if not parcel.seen], []
        for parcel in failed:
            parcel.seen = True
        if failed and failed[0].error is not None:
            raise failed[0].error

    def finish(self) -> None:
        """Let go of all topics; whatever is left is answered: nobody sends it any more."""
        self.let_go()  # first: from then on nothing more comes in
        what = "nobody sends it any more" if self.port.blocks else "it is not stored"
        for parcel in self.accumulator.hurry():
            with self.accumulator.lock:
                if parcel.done:
                    continue
                parcel.error = Closed(f"the producer was closed before the message could be stored; {what}")
                self._failed.append(parcel)
            self.accumulator.settle(parcel)

    def let_go(self, now_ns: int | None = None) -> int | None:
        """Let go of topics that nothing is on its way to; answers when to look again."""
        with self.accumulator.lock:
            for destination in self.destinations.values():
                if destination.held and (now_ns is None or destination.is_idle(now_ns)):
                    destination.let_go()
            waiting = any(each.held and not each.pending for each in self.destinations.values())
        return now_ns + _LOOK_AGAIN_NS if waiting and now_ns is not None else None
