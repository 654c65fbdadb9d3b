"""The dead letters of a queue: look at them, group them, put them back, drop them."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Self

import msgspec

from holdfast.broker.dead_letters import DeadLetter as StoredLetter
from holdfast.broker.dead_letters import LetterPlace
from holdfast.broker.folder.layout import DEAD_SUFFIX, parse_message_id
from holdfast.broker.station import Station
from holdfast.embedded.bodies import Bodies
from holdfast.embedded.drafts import NewMessage
from holdfast.embedded.listed import DeadLetter
from holdfast.embedded.listing import Where, check_limit, listed
from holdfast.embedded.message import Body
from holdfast.embedded.publisher import Publisher
from holdfast.errors import InvalidRequest

if TYPE_CHECKING:
    from holdfast.embedded.face import Face

# Errors that differ in numbers, addresses and quoted values only are one kind of error.
_DETAILS: Final = re.compile(r"0x[0-9a-fA-F]+|'[^']*'|\"[^\"]*\"|\d+")
_AT_ONCE: Final = 500

list_ = list  # inside DeadLetters the name means its method


class DeadGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Dead letters with the same reason and the same kind of error."""

    reason: str
    error: str
    count: int
    first: datetime
    last: datetime
    example: str


class Redriven(msgspec.Struct, frozen=True, kw_only=True):
    """What a redrive or a purge found and did."""

    matched: int
    done: int
    ids: list[str]


class ChosenLetter(NamedTuple):
    """A dead letter that is to be moved, without what it says: there may be very many."""

    id: str
    original_offset: int
    station: Station
    place: LetterPlace


class DeadLetters(Generic[Body]):
    """What `queue.dead` is."""

    def __init__(self, face: Face[Body]) -> None:
        self._face = face
        self._topic = face.name

    def list(self, *, where: Where = None, limit: int | None = None) -> list[DeadLetter[Body]]:
        """The dead letters that the condition chooses, oldest first."""
        return list_(self._each(where, limit))

    def _each(self, where: Where, limit: int | None) -> Iterator[DeadLetter[Body]]:
        return (found for found in listed(self._face, "dead", where, limit) if isinstance(found, DeadLetter))

    def show(self, letter_id: str) -> DeadLetter[Body]:
        """One of them."""
        place = parse_message_id(letter_id, self._topic + DEAD_SUFFIX)
        station = self._face._group.station(place.partition)
        letter = None if place.offset is None else station.letter(place.offset)
        if letter is None:
            raise no_letter(letter_id)
        return DeadLetter(self._face, station, letter)

    def groups(self, *, where: Where = None) -> list_[DeadGroup]:
        """The dead letters by reason and kind of error, the most frequent first."""
        return grouped(self._each(where, None))

    def redrive(
        self,
        ids: str | Iterable[str] | None = None,
        *,
        where: Where = None,
        limit: int | None = None,
        rate: float | None = None,
        dry_run: bool = False,
        to: str | None = None,
    ) -> Redriven:
        """Put dead letters back into the queue, in their original order, each once; `rate` is messages a second.

        With `to` they become new messages of that topic instead, for all who read it.
        """
        if rate is not None and (type(rate) not in (int, float) or not 0 < rate < float("inf")):
            raise InvalidRequest(f"rate={rate!r} cannot be used: give messages a second, above 0")
        letters = self._to_redrive(ids, where, limit)
        with Redriving(self._face, to) as redriving:
            if dry_run:
                return _result(letters, 0)
            return _result(letters, sum(map(redriving.put_back, self._paced(letters, rate))))

    def _to_redrive(self, ids: str | Iterable[str] | None, where: Where, limit: int | None) -> list_[ChosenLetter]:
        """Those that are meant, in the order in which they were published: those of one key must not overtake."""
        return in_order(self._chosen(ids, where, limit))

    def purge(
        self,
        ids: str | Iterable[str] | None = None,
        *,
        where: Where = None,
        limit: int | None = None,
        dry_run: bool = False,
    ) -> Redriven:
        """Drop dead letters for good."""
        letters = self._chosen(ids, where, limit)
        return _result(letters, 0 if dry_run else drop(letters))

    def _chosen(self, ids: object, where: Where, limit: int | None) -> list_[ChosenLetter]:
        if ids is None:
            return list_(map(choose, self._each(where, limit)))
        if where is not None:
            raise InvalidRequest("give ids or where, not both")
        check_limit(limit)
        if not isinstance(ids, Iterable) or isinstance(ids, bytes):
            raise InvalidRequest(f"ids must be ids of dead letters, not {type(ids).__name__}")
        wanted = dict.fromkeys([ids] if isinstance(ids, str) else ids)
        return [choose(self.show(letter_id)) for letter_id in wanted][:limit]

    def _paced(self, letters: list_[ChosenLetter], rate: float | None) -> Iterator[list_[ChosenLetter]]:
        size = at_once(rate)
        clock, never = self._face._engine.world.clock, threading.Event()
        for i in range(0, len(letters), size):
            if i and rate is not None:
                until_ns = clock.monotonic_ns() + round(size / rate * 1e9)
                while (left_ns := until_ns - clock.monotonic_ns()) > 0:
                    clock.wait(never, left_ns / 1e9)  # which may return early
                    self._face._check_open()
            yield letters[i : i + size]


def grouped(letters: Iterable[DeadLetter[Any]]) -> list_[DeadGroup]:
    """Letters by reason and kind of error, the most frequent first."""
    kinds = DeadKinds()
    for letter in letters:
        kinds.add(letter)
    return kinds.groups()


class DeadKinds:
    """Groups of letters, in the making."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], DeadGroup] = {}

    def add(self, letter: DeadLetter[Any]) -> None:
        kind, dead_at = (letter.reason, fingerprint(letter.error)), letter.dead_at
        before = self._found.get(kind)
        self._found[kind] = DeadGroup(
            reason=kind[0],
            error=kind[1],
            count=1 if before is None else before.count + 1,
            first=dead_at if before is None else min(before.first, dead_at),
            last=dead_at if before is None else max(before.last, dead_at),
            example=letter.id,
        )

    def groups(self) -> list_[DeadGroup]:
        """The most frequent first."""
        return sorted(self._found.values(), key=lambda group: (-group.count, group.error))


def at_once(rate: float | None) -> int:
    """How many letters to put back in one go, at so many a second."""
    return _AT_ONCE if rate is None else max(1, min(_AT_ONCE, int(rate / 10)))


class Redriving:
    """Puts dead letters back where they came from, or into another topic, which is held open meanwhile."""

    def __init__(self, face: Face[Any], to: str | None) -> None:
        self._face = face
        self._held = ExitStack()
        self._publisher: Publisher | None = None
        if to is not None and to != face.name:
            engine = face._engine
            self._publisher = Publisher(self._held.enter_context(engine.using(to)), Bodies(None), engine.world.clock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._held.close()

    def put_back(self, letters: Iterable[ChosenLetter]) -> int:
        """Let these letters be messages again; answers how many were still there."""
        done = 0
        for station, there in _by_station(letters):
            if self._publisher is None:
                done += station.graves().redrive(there)
            else:
                done += station.graves().hand_over(there, partial(self._publish, self._publisher, station))
        return done

    def _publish(self, publisher: Publisher, station: Station, stored: Sequence[StoredLetter]) -> None:
        letters: list_[DeadLetter[bytes]] = [DeadLetter(_BYTES, station, letter) for letter in stored]
        messages = [
            NewMessage(
                letter.raw,
                key=letter.key,
                headers=letter.headers.pairs,
                priority=letter.priority,
                correlation_id=letter.correlation_id,
                # After a crash, a second redrive finds by this what the first has stored. The time is in it, since a
                # topic that was deleted and made again has other letters at the same places.
                dedup_id=f"redrive {letter.id} of {self._face._group.topic.id} at {letter._stored.note.dead_at_ms}",
            )
            for letter in letters
        ]
        began_ns = self._face._engine.world.clock.monotonic_ns()
        parts = publisher.publish(messages, "fsync", None, verb="redrive") if messages else []
        publisher.wait(parts)
        publisher.stored(parts, began_ns)  # or the error of a part that was not


class _Bytes:
    _bodies = Bodies(None)


_BYTES: Final = _Bytes()


def drop(letters: Iterable[ChosenLetter]) -> int:
    """Drop these letters for good; answers how many were still there."""
    return sum(station.graves().purge(letters_there) for station, letters_there in _by_station(letters))


def in_order(letters: list_[ChosenLetter]) -> list_[ChosenLetter]:
    """The letters in the order in which they were published."""
    return sorted(letters, key=lambda letter: (letter.original_offset, letter.place.offset))


def no_letter(letter_id: str) -> InvalidRequest:
    """The error for an id that leads to nothing."""
    return InvalidRequest(f"there is no dead letter {letter_id}; it may have been redriven or purged")


def choose(letter: DeadLetter[Any]) -> ChosenLetter:
    """A letter as one that is to be moved."""
    return ChosenLetter(
        letter.id, letter.original_offset, letter._home, LetterPlace(letter.offset, len(letter._record.value))
    )


def _by_station(letters: Iterable[ChosenLetter]) -> list[tuple[Station, list_[LetterPlace]]]:
    """The letters by the partition that each is of, in their order."""
    found: dict[int, tuple[Station, list_[LetterPlace]]] = {}
    for letter in letters:
        found.setdefault(letter.station.number, (letter.station, []))[1].append(letter.place)
    return list(found.values())


def fingerprint(error: str) -> str:
    """An error's first line without its details."""
    return _DETAILS.sub("…", error.partition("\n")[0])[:200]


def _result(letters: list_[ChosenLetter], done: int) -> Redriven:
    return Redriven(matched=len(letters), done=done, ids=[letter.id for letter in letters])
