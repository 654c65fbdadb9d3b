"""The dead letters of a queue: list, group, redrive and delete them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from holdfast.api.bodies import Bodies
from holdfast.api.contents import PartitionHome, home_of
from holdfast.api.drafts import NewMessage
from holdfast.api.listing import (
    DeadGroup,
    DeadLetter,
    DeadLettersRequest,
    Redriven,
    Where,
    check_limit,
    chosen,
    grouped,
    no_letter,
    note_of,
)
from holdfast.broker.dead_letters import DeadLetter as StoredLetter
from holdfast.broker.dead_letters import LetterPlace
from holdfast.broker.delivery import Delivery
from holdfast.broker.folder.contents import Catalog, GroupNotes
from holdfast.broker.folder.layout import DEAD_SUFFIX, parse_message_id, topic_folder
from holdfast.broker.inspect.messages import letters_of
from holdfast.env import World
from holdfast.errors import CorruptData, InvalidRequest, NotFound, UnknownGroup
from holdfast.local.listing import listed
from holdfast.local.publisher import Publisher

if TYPE_CHECKING:
    from holdfast.local.group import LocalGroup


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
            there = f"there are {', '.join(groups[:10])}" if groups else "it has none yet"
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
                f"dead letters left where they are: {self._left}, since their partition is lost; "
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
