"""Listing messages without leasing them, everything known about one message, and a queue's dead letters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, TypeAlias

import msgspec
from pyroaring import BitMap64

from holdfast.api.contents import PartitionHome, home_of, record_of
from holdfast.api.drafts import Bodies, NewMessage
from holdfast.api.listing import (
    DeadGroup,
    DeadLetter,
    DeadLettersRequest,
    Found,
    Listed,
    PhaseName,
    Redriven,
    Waiting,
    Where,
    check_limit,
    check_phase,
    chosen,
    due_ms_of,
    grouped,
    no_letter,
    note_of,
    warn_of_damage,
)
from holdfast.broker.dead_letters import DeadLetter as StoredLetter
from holdfast.broker.dead_letters import LetterPlace
from holdfast.broker.delivery import Delivery
from holdfast.broker.folder.contents import Catalog, GroupNotes
from holdfast.broker.folder.layout import DEAD_SUFFIX, parse_message_id, topic_folder
from holdfast.broker.history import history, history_of_letter
from holdfast.broker.inspect.messages import letters_of
from holdfast.broker.messages import is_for
from holdfast.broker.tracing import TraceStep
from holdfast.broker.tracing.log import DELAYED, LEASED, PUBLISHED
from holdfast.delivery.events import Phase
from holdfast.env import World
from holdfast.errors import CorruptData, InvalidRequest, NotFound, UnknownGroup
from holdfast.local.group import require_current, until_ms
from holdfast.local.publisher import Publisher
from holdfast.model import Record

if TYPE_CHECKING:
    from holdfast.local.group import LocalGroup

# Everything known about one message, wherever it is now.


def message_history(group: LocalGroup, message_id: str) -> list[TraceStep]:
    """Return every step of a stored message, whatever its phase. Raises NotFound if it does not exist (any more)."""
    found = find_message(group, message_id)
    if found is None:
        raise no_message(message_id, group.topic)
    return history_of(found.message)


def look_up(group: LocalGroup, message_id: str) -> Found | None:
    """Return the message with all its steps, which may require reading a whole journal; None if it does not exist."""
    found = find_message(group, message_id)
    return None if found is None else _with_history(found)


def no_message(message_id: str, topic: str) -> NotFound:
    """Return the error for the id of no message."""
    return NotFound(
        f"there is no message {message_id} in {topic}: check the id; if it is right, the message is done and was "
        "removed by retention"
    )


def history_of(found: Listed[Any]) -> list[TraceStep]:
    """Return every step of a message, and of the messages it was redriven into or out of."""
    delivery = home_of(found)
    if isinstance(found, DeadLetter):
        return history_of_letter(delivery, StoredLetter(record_of(found), note_of(found)))
    if isinstance(found, Waiting):
        published = TraceStep(found.timestamp_ns, PUBLISHED, found.id, delivery.topic, delivery.number)
        return [published, msgspec.structs.replace(published, step=DELAYED, due_ms=due_ms_of(found))]
    return history(delivery, found.offset)


def find_message(group: LocalGroup, message_id: str) -> Found | None:
    """The message, living or done, or the dead letter that it became; None where there is none (any more).

    The id of a letter that was redriven or purged leads to the message that died.
    """
    if message_id.startswith(f"{group.topic}{DEAD_SUFFIX}-"):
        return _dead_lookup(group, message_id)
    delivery, place = group.queue_group.place(message_id)
    offset, log = place.offset, delivery.partition.log
    if place.delayed_id is not None:
        store = delivery.partition.delayed
        waiting = None if store is None else store.get(place.delayed_id)
        if waiting is not None:
            return Found(Waiting(delivery, group.bodies, waiting.record, waiting.due_at_ms), "delayed")
        offset = delivery.partition.find_released(place.delayed_id, log.start)
        if offset is None:
            delivery.partition.check_delayed()
    if offset is None or offset >= log.end:
        return None
    if delivery.group.phase(offset).value == "done":  # unless a seek has brought it back in the meantime
        letter = delivery.dead.letter_of(offset)
        if letter is not None:
            return Found(DeadLetter(delivery, group.bodies, letter.record, letter.note), "dead")
    return _in_log(group, delivery, offset)


def _dead_lookup(group: LocalGroup, letter_id: str) -> Found | None:
    place = parse_message_id(letter_id, f"{group.topic}{DEAD_SUFFIX}")
    delivery = group.queue_group.delivery(place.partition)
    if place.offset is None:
        return None
    letter = delivery.dead.letter(place.offset)
    if letter is not None:
        return Found(DeadLetter(delivery, group.bodies, letter.record, letter.note), "dead")
    gone = delivery.dead.letter(place.offset, gone=True)  # redriven or purged: the message that it was can tell of it
    return None if gone is None else _in_log(group, delivery, gone.note.offset)


def _in_log(group: LocalGroup, delivery: Delivery, offset: int) -> Found | None:
    if offset < delivery.partition.log.start:
        return None
    records = delivery.fetch([offset])
    if not records:
        return None
    state = delivery.group
    phase = state.phase(offset).value
    listed: Any = phase  # `done` is no phase that can be listed, and is shown here nevertheless
    message = seen(group, delivery, records[0], listed, due_ms=state.waiting.get(offset, 0))
    lease, history, document = state.leases.get(offset), state.histories.get(offset), state.documents.get(offset)
    return Found(
        message,
        phase,
        leased_at_ms=0 if lease is None else lease.at_ms,
        lease_until_ms=0 if lease is None else until_ms(delivery, lease),
        first_delivery_ms=0 if history is None else history.first_ms,
        last_delivery_ms=0 if history is None else history.last_ms,
        failures=() if history is None else history.failures,
        state=None if document is None else msgspec.json.decode(document.content),
    )


def _with_history(found: Found) -> Found:
    """The same with all its steps; of a message that is done they are all that is left to tell of its deliveries."""
    steps = history_of(found.message)
    if found.phase != "done":
        return found._replace(history=steps)
    taken = [step for step in steps if step.step == LEASED and step.id == found.message.id]
    if taken:
        found.message.attempts, found.message.holder = taken[-1].attempt, taken[-1].holder
    return found._replace(
        history=steps,
        first_delivery_ms=taken[0].at_ns // 1_000_000 if taken else 0,
        last_delivery_ms=taken[-1].at_ns // 1_000_000 if taken else 0,
    )


# Told of each place in the list before it is looked at: partition, offset, and for what is not in the log yet its time
# and number. It may raise, to end the look there.
Look: TypeAlias = Callable[..., None]

# Called with the number of damaged messages that were left out.
Lost: TypeAlias = Callable[[int], None]

_AT_A_TIME: Final = 256
_LAST: Final = 2**62  # behind all that is in a log


_Listing: TypeAlias = Generator[Listed[Any], None, None]
_Source: TypeAlias = Callable[[Any, "Mark", Look, Lost], _Listing]


class Mark(NamedTuple):
    """A place in a list of messages, to go on behind it: the list is not the same any more by then.

    `offset` is that of a message in the log; for one that is not there yet, `due_ms` and its number count.
    """

    partition: int = -1
    offset: int = -1
    due_ms: int = 0
    number: int = 0

    @property
    def text(self) -> str:
        """Return the place as text, for callers that list page by page."""
        return ".".join(map(str, self))


def mark_of(message: Listed[Any]) -> Mark:
    """Return the place of a message in its list."""
    offset = record_of(message).offset
    if isinstance(message, Waiting):
        return Mark(message.partition, _LAST, due_ms_of(message), offset)
    return Mark(message.partition, offset)


def seen(group: LocalGroup, delivery: Delivery, record: Record, phase: PhaseName, *, due_ms: int = 0) -> Listed[Any]:
    """Return a message in the log, with what its group knows about it now."""
    state = delivery.group
    lease, history = state.leases.get(record.offset), state.histories.get(record.offset)
    return Listed(
        delivery,
        group.bodies,
        record,
        phase,
        due_ms=due_ms,
        attempts=state.attempts(record.offset),
        holder="" if lease is None else lease.holder,
        error=history.failures[-1].error if history is not None and history.failures else "",
        until_ms=0 if lease is None else until_ms(delivery, lease),
    )


def parse_mark(text: str) -> Mark:
    """Parse a place from text."""
    numbers = text.split(".")
    if len(numbers) != len(Mark._fields) or not all(each.isdecimal() and len(each) < 20 for each in numbers):
        raise InvalidRequest(f"after={text!r} cannot be used: give the `next` of the previous page")
    return Mark(*map(int, numbers))


def _unwatched(partition: int, offset: int, due_ms: int = 0, number: int = 0) -> None:
    """Ignore the place: the default for `look`."""


def listed(
    group: LocalGroup,
    phase: str,
    where: Where,
    limit: int | None,
    *,
    after: Mark | None = None,
    look: Look = _unwatched,
    lost: Lost | None = None,
) -> Iterator[Listed[Any]]:
    """The messages in a phase that the condition chooses, from the start or behind a place.

    Damaged ones are left out; at the end `lost` is called with their number, or it is logged.
    """
    check_phase(phase)
    check_limit(limit)
    group.check_open()
    now_ms = group.engine.world.clock.now_ns() // 1_000_000
    if lost is None:
        lost = partial(warn_of_damage, group.topic, group.group, phase)
    return chosen(_whole(_SOURCES[phase], group, after or Mark(), look, lost), where, limit, now_ms=now_ms)


def _whole(source: _Source, group: LocalGroup, after: Mark, look: Look, lost: Lost) -> Iterator[Listed[Any]]:
    """Iterate over the messages of a source; at the end, report how many were damaged."""
    require_current(group.engine)
    counts: list[int] = []
    try:
        yield from source(group, after, look, counts.append)
    finally:
        if any(counts):
            lost(sum(counts))


def _deliveries(group: LocalGroup, after: Mark) -> Iterator[tuple[Delivery, Mark]]:
    """Return the partitions that have messages after the place, and the place in each of them."""
    for delivery in group.deliveries:
        if delivery.number >= after.partition:
            yield delivery, after if delivery.number == after.partition else Mark()


def _ready(group: LocalGroup, after: Mark, look: Look, lost: Lost) -> _Listing:
    for delivery, mark in _deliveries(group, after):
        state, log = delivery.group, delivery.partition.log
        start = at = min(max(state.floor, log.start, mark.offset + 1), log.end)
        try:
            for record in log.records(start, on_damage="skip", whole=False):
                look(delivery.number, record.offset)
                at = record.offset + 1
                if state.phase(record.offset) is Phase.READY and is_for(record, delivery.name.encode()):
                    yield seen(group, delivery, record, "ready")
            at = log.end
        finally:
            lost(state.ready_of(log.damaged()).range_cardinality(start, at))


def _leased(group: LocalGroup, after: Mark, look: Look, lost: Lost) -> _Listing:
    for delivery, mark in _deliveries(group, after):
        leases = delivery.group.leases
        with delivery.lock:
            offsets = list(leases)  # and no more, while consumers wait for the lock
        offsets = sorted(offset for offset in offsets if offset > mark.offset)
        for record in _records(delivery, offsets, leases, lost):
            look(delivery.number, record.offset)
            yield seen(group, delivery, record, "leased")


def _delayed(group: LocalGroup, after: Mark, look: Look, lost: Lost) -> _Listing:
    for delivery, mark in _deliveries(group, after):
        with delivery.lock:
            waiting = dict(delivery.group.waiting)
        waiting = dict(sorted(each for each in waiting.items() if each[0] > mark.offset))
        for record in _records(delivery, list(waiting), delivery.group.waiting, lost):
            look(delivery.number, record.offset)
            yield seen(group, delivery, record, "delayed", due_ms=waiting[record.offset])
        delivery.partition.check_delayed()
        store = delivery.partition.delayed
        if store is not None:
            behind = (mark.due_ms, mark.number) if mark.offset == _LAST else None
            for message in store.waiting(after=behind):
                look(delivery.number, _LAST, message.due_at_ms, message.record.offset)
                yield Waiting(delivery, group.bodies, message.record, message.due_at_ms)


def _records(delivery: Delivery, offsets: list[int], among: Container[int], lost: Lost) -> Iterator[Record]:
    """Iterate over the messages at these offsets, in batches, without those that have left the phase meanwhile."""
    for i in range(0, len(offsets), _AT_A_TIME):
        wanted = [offset for offset in offsets[i : i + _AT_A_TIME] if offset in among]
        found = delivery.fetch(wanted)
        if len(found) < len(wanted):
            lost(len(delivery.partition.log.damaged().intersection(BitMap64(wanted))))
        yield from found


def _dead(group: LocalGroup, after: Mark, look: Look, lost: Lost) -> _Listing:
    for delivery, mark in _deliveries(group, after):
        at = mark.offset + 1
        try:
            for letter in delivery.dead.letters(mark.offset + 1, partial(look, delivery.number)):
                at = letter.record.offset + 1
                yield DeadLetter(delivery, group.bodies, letter.record, letter.note)
            at = _LAST
        finally:
            lost(delivery.dead.lost(mark.offset + 1, at))


def _done(group: LocalGroup, after: Mark, look: Look, lost: Lost) -> _Listing:
    """Iterate from the newest to the oldest: of what is done, the last is what people look for."""
    for delivery, mark in _deliveries(group, after):
        state, log = delivery.group, delivery.partition.log
        with delivery.lock:
            end = max(state.floor, state.done.max() + 1 if state.done else 0)
        died = {letter.note.offset for letter in delivery.dead.letters(0, lambda offset: None)}
        end = min(end, log.end) if mark.offset < 0 else min(end, log.end, mark.offset)
        while end > log.start:
            start = max(log.start, end - _AT_A_TIME)
            records = list(islice(log.records(start, on_damage="skip"), end - start))
            for record in reversed([each for each in records if each.offset < end]):
                look(delivery.number, record.offset)
                if state.phase(record.offset) is Phase.DONE and record.offset not in died:
                    yield seen(group, delivery, record, "done")
            lost(log.damaged().range_cardinality(start, end))
            end = start


_SOURCES: dict[str, _Source] = {
    "ready": _ready,
    "leased": _leased,
    "delayed": _delayed,
    "dead": _dead,
    "done": _done,
}


# The dead letters of a queue: list, group, redrive and delete them.


list_ = list  # inside LettersBeside the name means its method


class LettersBeside:
    """Reads dead letters without a lock and without writing. Those that the owner has not stored yet are missing."""

    def __init__(self, world: World, folder: str, topic: str, group: str) -> None:
        self._world = world
        self._folder = folder
        self._topic = topic
        self._group = group
        self._bodies = Bodies(None)
        self._count = Catalog(world, folder).facts(topic).partitions
        groups = GroupNotes(world, topic_folder(folder, topic)).names(self._count)
        if group not in groups:
            there = f"known groups: {', '.join(groups[:10])}" if groups else "it has none yet"
            raise UnknownGroup(f"{topic} has no group {group} in queue mode; {there}")

    def list(self, *, where: Where = None, limit: int | None = None) -> list[DeadLetter[bytes]]:
        """Return the dead letters that match the condition, oldest first."""
        now_ms = self._world.clock.now_ns() // 1_000_000
        return [*chosen(self._all(), where, limit, now_ms=now_ms)]

    def groups(self, *, where: Where = None) -> list_[DeadGroup]:
        """Group the dead letters by reason and kind of error, the most frequent first."""
        return grouped(self.list(where=where))

    def show(self, letter_id: str) -> DeadLetter[bytes]:
        """Return one dead letter, by its id or by an id of its message."""
        lived = letter_id.startswith(f"{self._topic}-")
        place = parse_message_id(letter_id, self._topic + ("" if lived else DEAD_SUFFIX))
        found = None
        for letter in self._in(place.partition) if place.partition < self._count else ():
            note = note_of(letter)
            same = note.offset == place.offset or letter_id in (note.id, note.first.id)
            if same if lived else letter.offset == place.offset:
                found = letter  # after a seek it may have died more than once: the last time counts
        if found is None:
            raise no_letter(f"of {letter_id}" if lived else letter_id)
        return found

    def _all(self) -> Iterator[DeadLetter[bytes]]:
        for number in range(self._count):
            yield from self._in(number)

    def _in(self, number: int) -> Iterator[DeadLetter[bytes]]:
        home = PartitionHome(self._topic, number)
        for seen in letters_of(self._world, self._folder, self._topic, number):
            if seen.state == "waiting" and seen.note.group == self._group:
                yield DeadLetter(home, self._bodies, seen.record, seen.note)


# The dead letters of a queue: list, group, redrive and delete them.


_AT_ONCE: Final = 500
_BYTES: Final = Bodies(None)


class ChosenLetter(NamedTuple):
    """A dead letter to move, without its contents: there may be very many."""

    id: str
    original_offset: int
    delivery: Delivery
    place: LetterPlace


class LocalLetters:
    """The dead letters of a group in this process."""

    def __init__(self, group: LocalGroup) -> None:
        self._group = group

    def _each(self, where: Where, limit: int | None) -> Iterator[DeadLetter[Any]]:
        return (found for found in listed(self._group, "dead", where, limit) if isinstance(found, DeadLetter))

    def show(self, letter_id: str) -> DeadLetter[Any]:
        """Return one dead letter. Raises NotFound if it does not exist."""
        try:
            return self._by_id(letter_id)
        except InvalidRequest as error:
            raise NotFound(str(error)) from None

    def _by_id(self, letter_id: str) -> DeadLetter[Any]:
        place = parse_message_id(letter_id, self._group.topic + DEAD_SUFFIX)
        delivery = self._group.queue_group.delivery(place.partition)
        letter = None if place.offset is None else delivery.dead.letter(place.offset)
        if letter is None:
            raise no_letter(letter_id)
        return DeadLetter(delivery, self._group.bodies, letter.record, letter.note)

    def id_of(self, message_id: str) -> str | None:
        """Return the id of the dead letter that a message became, by any id that the message has had."""
        delivery, place = self._group.queue_group.place(message_id)
        found = None
        for letter in delivery.dead.letters():
            if message_id in (letter.note.id, letter.note.first.id) or letter.note.offset == place.offset:
                found = letter  # after a seek it may have died more than once: the last time counts
        return None if found is None else DeadLetter(delivery, self._group.bodies, found.record, found.note).id

    def groups(self, where: Where) -> list[DeadGroup]:
        """Group the dead letters by reason and kind of error, the most frequent first."""
        return grouped(self._each(where, None))

    def redrive(self, request: DeadLettersRequest) -> Redriven:
        """Redrive dead letters in the order in which they were published, so that those of one key stay in order."""
        letters = in_order(self.chosen(request.ids, request.where, request.limit))
        with Redriving(self._group, request.to) as redriving:
            if request.dry_run:
                return _result(letters, 0)
            return _result(letters, sum(map(redriving.put_back, self._paced(letters, request.rate))))

    def purge(self, request: DeadLettersRequest) -> Redriven:
        """Delete dead letters."""
        letters = self.chosen(request.ids, request.where, request.limit)
        return _result(letters, 0 if request.dry_run else drop(letters))

    def chosen(self, ids: list[str] | None, where: Where, limit: int | None) -> list[ChosenLetter]:
        """Return the selected dead letters, by id or by condition."""
        if ids is None:
            return list(map(choose, self._each(where, limit)))
        check_limit(limit)
        return [choose(self._by_id(letter_id)) for letter_id in ids][:limit]

    def _paced(self, letters: list[ChosenLetter], rate: float | None) -> Iterator[list[ChosenLetter]]:
        size = at_once(rate)
        clock, never = self._group.engine.world.clock, threading.Event()
        for i in range(0, len(letters), size):
            if i and rate is not None:
                until_ns = clock.monotonic_ns() + round(size / rate * 1e9)
                while (left_ns := until_ns - clock.monotonic_ns()) > 0:
                    clock.wait(never, left_ns / 1e9)  # which may return early
                    self._group.check_open()
            yield letters[i : i + size]


def at_once(rate: float | None) -> int:
    """Return how many dead letters to redrive at once, at this rate per second."""
    return _AT_ONCE if rate is None else max(1, min(_AT_ONCE, int(rate / 10)))


class Redriving:
    """Redrives dead letters into their queue, or into another topic, which is held open meanwhile.

    Those of a partition that is lost stay where they are. The end says so, after all others have been redriven.
    """

    def __init__(self, group: LocalGroup, to: str | None) -> None:
        self._group = group
        self._done = self._left = 0
        self._lost: CorruptData | None = None  # why some were left
        self._held = ExitStack()
        self._publisher: Publisher | None = None
        if to is not None and to != group.topic:
            engine = group.engine
            self._publisher = Publisher(self._held.enter_context(engine.using(to)), Bodies(None), engine.world.clock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._held.close()
        if kind is None and self._lost is not None:
            raise CorruptData(
                f"dead letters left in place: {self._left}, because their partition is lost; "
                f"redriven: {self._done}. {self._lost}"
            ) from self._lost

    def put_back(self, letters: Iterable[ChosenLetter]) -> int:
        """Redrive these dead letters, and return how many still existed."""
        done = 0
        for delivery, there in _by_delivery(letters):
            if self._publisher is not None:
                done += delivery.dead.open().hand_over(there, partial(self._publish, self._publisher, delivery))
            elif delivery.partition.lost is None:
                done += delivery.dead.open().redrive(there)
            else:
                self._lost, self._left = delivery.partition.lost, self._left + len(there)
        self._done += done
        return done

    def _publish(self, publisher: Publisher, delivery: Delivery, stored: Sequence[StoredLetter]) -> None:
        letters: list[DeadLetter[bytes]] = [
            DeadLetter(delivery, _BYTES, letter.record, letter.note) for letter in stored
        ]
        messages = [
            NewMessage(
                letter.raw,
                key=letter.key,
                headers=letter.headers.pairs,
                priority=letter.priority,
                correlation_id=letter.correlation_id,
                # After a crash, a second redrive finds by this what the first has stored. The time is in it, since a
                # topic that was deleted and made again has other letters at the same places.
                dedup_id=f"redrive {letter.id} of {self._group.queue_group.topic.id} at {note_of(letter).dead_at_ms}",
            )
            for letter in letters
        ]
        began_ns = self._group.engine.world.clock.monotonic_ns()
        parts = publisher.publish(messages, "fsync", None, verb="redrive") if messages else []
        publisher.wait(parts)
        publisher.stored(parts, began_ns)  # or the error of a part that was not


def drop(letters: Iterable[ChosenLetter]) -> int:
    """Delete these dead letters, and return how many still existed."""
    return sum(delivery.dead.open().purge(letters_there) for delivery, letters_there in _by_delivery(letters))


def in_order(letters: list[ChosenLetter]) -> list[ChosenLetter]:
    """Return the dead letters in the order in which they were published."""
    return sorted(letters, key=lambda letter: (letter.original_offset, letter.place.offset))


def choose(letter: DeadLetter[Any]) -> ChosenLetter:
    """Return a dead letter as one to move."""
    return ChosenLetter(letter.id, letter.original_offset, home_of(letter), LetterPlace(letter.offset, letter.size))


def _by_delivery(letters: Iterable[ChosenLetter]) -> list[tuple[Delivery, list[LetterPlace]]]:
    """Group the dead letters by partition, keeping their order."""
    found: dict[int, tuple[Delivery, list[LetterPlace]]] = {}
    for letter in letters:
        found.setdefault(letter.delivery.number, (letter.delivery, []))[1].append(letter.place)
    return list(found.values())


def _result(letters: list[ChosenLetter], done: int) -> Redriven:
    return Redriven(matched=len(letters), done=done, ids=[letter.id for letter in letters])
