"""Looking through a queue without taking anything: what is ready, leased, delayed or dead."""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from pyroaring import BitMap64

from holdfast.api.contents import record_of
from holdfast.api.listed import (
    DeadLetter,
    Listed,
    PhaseName,
    Waiting,
    Where,
    check_limit,
    check_phase,
    chosen,
    due_ms_of,
    warn_of_damage,
)
from holdfast.broker.delivery import Delivery
from holdfast.broker.messages import is_for
from holdfast.delivery.events import Phase
from holdfast.delivery.group import Lease
from holdfast.errors import InvalidRequest
from holdfast.model import Record

if TYPE_CHECKING:
    from holdfast.local.group import LocalGroup

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
    offset = record_of(message).offset
    if isinstance(message, Waiting):
        return Mark(message.partition, _LAST, due_ms_of(message), offset)
    return Mark(message.partition, offset)


def seen(group: LocalGroup, delivery: Delivery, record: Record, phase: PhaseName, *, due_ms: int = 0) -> Listed[Any]:
    """A message in the log, with what its group knows of it at this moment."""
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


def until_ms(delivery: Delivery, lease: Lease) -> int:
    """When a lease ends by the clock on the wall; it is kept by one that nobody sets."""
    clock = delivery.clock
    return clock.now_ns() // 1_000_000 + lease.until_ms - clock.monotonic_ns() // 1_000_000


def parse_mark(text: str) -> Mark:
    """The place that a text stands for."""
    numbers = text.split(".")
    if len(numbers) != len(Mark._fields) or not all(each.isdecimal() and len(each) < 20 for each in numbers):
        raise InvalidRequest(f"after={text!r} cannot be used: give what the page before named as `next`")
    return Mark(*map(int, numbers))


def _unwatched(partition: int, offset: int, due_ms: int = 0, number: int = 0) -> None:
    """Nobody wants to know."""


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

    Damaged ones are left out: at the end `lost` is told how many, or the log is.
    """
    check_phase(phase)
    check_limit(limit)
    group.check_open()
    now_ms = group.engine.world.clock.now_ns() // 1_000_000
    if lost is None:
        lost = partial(warn_of_damage, group.topic, group.group, phase)
    return chosen(_whole(_SOURCES[phase], group, after or Mark(), look, lost), where, limit, now_ms=now_ms)


def messages(group: LocalGroup, phase: str, where: Where, limit: int | None) -> Iterator[Listed[Any]]:
    """The same for a thread that has the port: it looks as it goes, one message at a time."""
    return listed(group, phase, where, limit)


def _whole(source: _Source, group: LocalGroup, after: Mark, look: Look, lost: Lost) -> Iterator[Listed[Any]]:
    """The messages of a source; at their end, or when nobody wants more, it is told how many were damaged."""
    counts: list[int] = []
    try:
        yield from source(group, after, look, counts.append)
    finally:
        if any(counts):
            lost(sum(counts))


def _deliveries(group: LocalGroup, after: Mark) -> Iterator[tuple[Delivery, Mark]]:
    """The partitions that have something behind the place, and the place in each of them."""
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
    """The messages at these offsets, some at a time, without those that have left the phase meanwhile."""
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


_SOURCES: dict[str, _Source] = {
    "ready": _ready,
    "leased": _leased,
    "delayed": _delayed,
    "dead": _dead,
}
