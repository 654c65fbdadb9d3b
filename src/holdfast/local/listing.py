"""Listing messages without leasing them, and everything known about one message."""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Iterator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import msgspec
from pyroaring import BitMap64

from holdfast.api.contents import home_of, record_of
from holdfast.api.listing import (
    DeadLetter,
    Found,
    Listed,
    PhaseName,
    Waiting,
    Where,
    check_limit,
    check_phase,
    chosen,
    due_ms_of,
    note_of,
    warn_of_damage,
)
from holdfast.broker.dead_letters import DeadLetter as StoredLetter
from holdfast.broker.delivery import Delivery
from holdfast.broker.folder.layout import DEAD_SUFFIX, parse_message_id
from holdfast.broker.history import history, history_of_letter
from holdfast.broker.messages import is_for
from holdfast.broker.tracing.log import DELAYED, LEASED, PUBLISHED, TraceStep
from holdfast.delivery.events import Phase
from holdfast.delivery.group import Lease
from holdfast.errors import InvalidRequest, NotFound
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


def until_ms(delivery: Delivery, lease: Lease) -> int:
    """Return when a lease ends by the wall clock; the lease itself is kept by the monotonic clock."""
    clock = delivery.clock
    return clock.now_ns() // 1_000_000 + lease.until_ms - clock.monotonic_ns() // 1_000_000


def parse_mark(text: str) -> Mark:
    """Parse a place from text."""
    numbers = text.split(".")
    if len(numbers) != len(Mark._fields) or not all(each.isdecimal() and len(each) < 20 for each in numbers):
        raise InvalidRequest(f"after={text!r} cannot be used: give what the page before named as `next`")
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


def messages(group: LocalGroup, phase: str, where: Where, limit: int | None) -> Iterator[Listed[Any]]:
    """List messages for a thread that has the port, reading one message at a time."""
    return listed(group, phase, where, limit)


def _whole(source: _Source, group: LocalGroup, after: Mark, look: Look, lost: Lost) -> Iterator[Listed[Any]]:
    """Iterate over the messages of a source; at the end, report how many were damaged."""
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
