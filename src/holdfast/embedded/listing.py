"""Looking through a queue without taking anything: what is ready, leased, delayed or dead."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Generator, Iterator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypeVar, get_args

from pyroaring import BitMap64

from holdfast.broker.messages import is_for
from holdfast.broker.station import Station
from holdfast.delivery.events import Phase
from holdfast.delivery.where import compile_where
from holdfast.embedded.listed import DeadLetter, Listed, PhaseName, Waiting
from holdfast.embedded.message import Body
from holdfast.errors import InvalidRequest
from holdfast.model import Record

if TYPE_CHECKING:
    from holdfast.embedded.face import Face

logger = logging.getLogger(__name__)

Message = TypeVar("Message", bound=Listed[Any])
Where: TypeAlias = str | Callable[[Any], object] | None

# Told of each place in the list before it is looked at: partition, offset, and for what is not in the log yet its time
# and number. It may raise, to end the look there.
Look: TypeAlias = Callable[..., None]

# Told how many messages were left out because they are damaged.
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
        """As it is told to those who list page by page."""
        return ".".join(map(str, self))


def mark_of(message: Listed[Any]) -> Mark:
    """The place of a message in its list."""
    offset = message._record.offset
    if isinstance(message, Waiting):
        return Mark(message._home.number, _LAST, message._due_ms, offset)
    return Mark(message._home.number, offset)


def parse_mark(text: str) -> Mark:
    """The place that a text stands for."""
    numbers = text.split(".")
    if len(numbers) != len(Mark._fields) or not all(each.isdecimal() and len(each) < 20 for each in numbers):
        raise InvalidRequest(f"after={text!r} cannot be used: give what the page before named as `next`")
    return Mark(*map(int, numbers))


def _unwatched(partition: int, offset: int, due_ms: int = 0, number: int = 0) -> None:
    """Nobody wants to know."""


def listed(
    face: Face[Body],
    phase: str,
    where: Where,
    limit: int | None,
    *,
    after: Mark | None = None,
    look: Look = _unwatched,
    lost: Lost | None = None,
) -> Iterator[Listed[Body]]:
    """The messages in a phase that the condition chooses, from the start or behind a place.

    Damaged ones are left out: at the end `lost` is told how many, or the log is.
    """
    if phase not in get_args(PhaseName):
        raise InvalidRequest(f"phase={phase!r} is not known; choose from {', '.join(get_args(PhaseName))}")
    check_limit(limit)
    face._check_open()
    now_ms = face._engine.world.clock.now_ns() // 1_000_000
    if lost is None:
        lost = partial(warn_of_damage, face.topic, face.group, phase)
    return chosen(_whole(_SOURCES[phase], face, after or Mark(), look, lost), where, limit, now_ms=now_ms)


def _whole(source: _Source, face: Face[Any], after: Mark, look: Look, lost: Lost) -> Iterator[Listed[Any]]:
    """The messages of a source; at their end, or when nobody wants more, it is told how many were damaged."""
    counts: list[int] = []
    try:
        yield from source(face, after, look, counts.append)
    finally:
        if any(counts):
            lost(sum(counts))


def warn_of_damage(topic: str, group: str, phase: str, messages: int) -> None:
    """Say once for a list that it is not all there should be."""
    logger.warning(
        "%d damaged messages of %s were left out of a list; run `holdfast check` on the folder",
        messages,
        topic,
        extra={"topic": topic, "group": group, "phase": phase, "messages": messages},
    )


def chosen(messages: Iterator[Message], where: Where, limit: int | None, *, now_ms: int) -> Iterator[Message]:
    """Those of the messages that the condition chooses."""
    check_limit(limit)
    wanted = compile_where(where, now_ms=now_ms)
    # A function sees what the caller will get; an expression sees the bytes of the body, whatever its type.
    as_seen = _Raw if isinstance(where, str) else _as_it_is
    return islice((message for message in messages if wanted(as_seen(message))), limit)


def _as_it_is(message: Listed[Any]) -> Any:
    return message


def check_limit(limit: object) -> None:
    """Refuse what is no number of messages."""
    if limit is not None and (type(limit) is not int or limit < 0):
        raise InvalidRequest(f"limit={limit!r} cannot be used: give a whole number, 0 or more")


class _Raw:
    """A message as conditions see it: with the bytes of its body, whatever its type."""

    def __init__(self, message: Listed[Any]) -> None:
        self._message = message

    @property
    def body(self) -> bytes:
        return self._message.raw

    def __getattr__(self, name: str) -> Any:
        return getattr(self._message, name)


def _stations(face: Face[Any], after: Mark) -> Iterator[tuple[Station, Mark]]:
    """The partitions that have something behind the place, and the place in each of them."""
    for station in face._stations:
        if station.number >= after.partition:
            yield station, after if station.number == after.partition else Mark()


def _ready(face: Face[Any], after: Mark, look: Look, lost: Lost) -> _Listing:
    for station, mark in _stations(face, after):
        group, log = station.delivery.group, station.partition.log
        start = at = min(max(group.floor, log.start, mark.offset + 1), log.end)
        try:
            for record in log.records(start, on_damage="skip", whole=False):
                look(station.number, record.offset)
                at = record.offset + 1
                if group.phase(record.offset) is Phase.READY and is_for(record, station.group.encode()):
                    yield Listed(face, station, record, "ready")
            at = log.end
        finally:
            lost(group.ready_of(log.damaged()).range_cardinality(start, at))


def _leased(face: Face[Any], after: Mark, look: Look, lost: Lost) -> _Listing:
    for station, mark in _stations(face, after):
        leases = station.delivery.group.leases
        with station.delivery.lock:
            offsets = list(leases)  # and no more, while consumers wait for the lock
        offsets = sorted(offset for offset in offsets if offset > mark.offset)
        for record in _records(station, offsets, leases, lost):
            look(station.number, record.offset)
            yield Listed(face, station, record, "leased")


def _delayed(face: Face[Any], after: Mark, look: Look, lost: Lost) -> _Listing:
    for station, mark in _stations(face, after):
        with station.delivery.lock:
            waiting = dict(station.delivery.group.waiting)
        waiting = dict(sorted(each for each in waiting.items() if each[0] > mark.offset))
        for record in _records(station, list(waiting), station.delivery.group.waiting, lost):
            look(station.number, record.offset)
            yield Listed(face, station, record, "delayed", due_ms=waiting[record.offset])
        store = station.partition.delayed
        if store is not None:
            behind = (mark.due_ms, mark.number) if mark.offset == _LAST else None
            for message in store.waiting(after=behind):
                look(station.number, _LAST, message.due_at_ms, message.record.offset)
                yield Waiting(face, station, message)


def _records(station: Station, offsets: list[int], among: Container[int], lost: Lost) -> Iterator[Record]:
    """The messages at these offsets, some at a time, without those that have left the phase meanwhile."""
    for i in range(0, len(offsets), _AT_A_TIME):
        wanted = [offset for offset in offsets[i : i + _AT_A_TIME] if offset in among]
        found = station.delivery.fetch(wanted)
        if len(found) < len(wanted):
            lost(len(station.partition.log.damaged().intersection(BitMap64(wanted))))
        yield from found


def _dead(face: Face[Any], after: Mark, look: Look, lost: Lost) -> _Listing:
    for station, mark in _stations(face, after):
        at = mark.offset + 1
        try:
            for letter in station.letters(mark.offset + 1, partial(look, station.number)):
                at = letter.record.offset + 1
                yield DeadLetter(face, station, letter)
            at = _LAST
        finally:
            lost(station.lost_letters(mark.offset + 1, at))


_SOURCES: dict[str, _Source] = {
    "ready": _ready,
    "leased": _leased,
    "delayed": _delayed,
    "dead": _dead,
}
