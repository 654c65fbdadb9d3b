"""The history of a message, reconstructed from the journals, whether or not it was traced.

    published -> leased -> nacked -> released -> leased -> buried      in the group's journal
                                                             |
                                             redriven or purged        in the journal of the dead letters
                                                 |
                             published -> leased -> acked              in the group's journal, as a new message

The pieces are linked by what is on disk anyway. A burial notes where the log of the dead letters ended, so the letter
comes after that offset. The redrive leases the letter and notes where the message log ended, so the new message comes
after that one, and it has the letter's offset in a header. A chain can be followed in both directions from any message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Final

from holdfast.broker.dead_letters import DeadLetter, note_of
from holdfast.broker.delivery import Delivery
from holdfast.broker.folder.layout import DEAD_SUFFIX, message_id
from holdfast.broker.messages import REDRIVEN_FROM, DeadNote, mark, moved_records
from holdfast.broker.past import Happened
from holdfast.broker.tracing import TraceStep, log
from holdfast.delivery import events
from holdfast.model import Record
from holdfast.storage.log import Log

_MS: Final = 1_000_000
_MOST_LIVES: Final = 100  # redrives followed for one message
_MOST_STEPS: Final = 1_000  # of a longer history, the beginning and the end are shown
_ENDS: Final[dict[type, str]] = {events.Expired: log.EXPIRED, events.Cancelled: log.CANCELLED, events.Lost: log.LOST}


def history(delivery: Delivery, offset: int) -> list[TraceStep]:
    """All steps of a message, including those of messages that it was redriven from or into."""
    steps: list[TraceStep] = []
    at: int | None = _first_life(delivery, offset)
    while at is not None and len({step.id for step in steps}) < _MOST_LIVES:
        life = _life(delivery, at)
        steps += life.steps
        at = life.went_on_at
    return _abridged(steps)


def _abridged(steps: list[TraceStep]) -> list[TraceStep]:
    left_out = steps[_MOST_STEPS // 2 : -_MOST_STEPS // 2]
    if not left_out:
        return steps
    first = left_out[0]
    omitted = TraceStep(
        first.at_ns, log.OMITTED, first.id, first.topic, first.partition, first.offset, why=f"{len(left_out)} steps"
    )
    return [*steps[: _MOST_STEPS // 2], omitted, *steps[-_MOST_STEPS // 2 :]]


def history_of_letter(delivery: Delivery, letter: DeadLetter) -> list[TraceStep]:
    """The history of the message behind a dead letter, even if the message itself is no longer kept."""
    if _record(delivery.partition.log, letter.note.offset) is not None:
        return history(delivery, letter.note.offset)
    return steps_of_letter(letter.note)


class _MessageLife:
    """The steps of one message, collected from the events of one journal."""

    def __init__(self, delivery: Delivery, offset: int, name: str) -> None:
        self._place = name, delivery.topic, delivery.number, offset
        self._group = delivery.name
        self._offset = offset
        self.steps: list[TraceStep] = []
        self.went_on_at: int | None = None  # offset of the message that it was redriven into
        self.dead_from: int | None = None  # where to start looking for its dead letter
        self.moving_to: int | None = None  # of a dead letter: where to start looking for the redriven message
        self._begin()

    def _begin(self) -> None:
        self.steps.clear()
        self.dead_from = self.moving_to = None
        self._phase = events.Phase.READY
        self._attempts = 0
        self._holder = ""
        self._waits = False

    def add(self, at_ns: int, step: str, **more: Any) -> None:
        """Append a step."""
        self.steps.append(TraceStep(at_ns, step, *self._place, **more))

    def read(self, events: Iterable[Happened]) -> None:
        """Collect the steps of this message from a journal's events, oldest first."""
        for at_ns, event in events:
            tell = self._READERS.get(type(event))
            if tell is not None and self._is_meant(event):
                tell(self, at_ns, event)

    def _is_meant(self, event: Any) -> bool:
        """Whether the event is about this message, or about all messages."""
        runs = getattr(event, "runs", None)
        if runs is not None:
            return any(start <= self._offset < stop for start, stop in events.pairs(runs))
        return bool(getattr(event, "offset", self._offset) == self._offset)

    def _leased(self, _at_ns: int, event: events.Leased) -> None:
        self._phase, self._holder = events.Phase.LEASED, event.holder
        self.moving_to = event.moving_to if event.moving_to >= 0 else None
        self._taken(event.at_ms * _MS, log.LEASED, until_ms=event.at_ms + event.lease_ms)

    def _released(self, at_ns: int, _event: events.Released) -> None:
        self._phase = events.Phase.READY
        if self._waits:
            self.add(at_ns, log.RELEASED, group=self._group)

    def _acked(self, at_ns: int, _event: events.Acked) -> None:
        self._phase = events.Phase.DONE
        self._taken(at_ns, log.ACKED)

    def _ended(self, at_ns: int, event: events.Expired | events.Cancelled | events.Lost) -> None:
        self._phase = events.Phase.DONE
        self.add(at_ns, _ENDS[type(event)], group=self._group)

    def _skipped(self, at_ns: int, event: events.Skipped) -> None:
        if self._offset < event.to and self._phase in (events.Phase.READY, events.Phase.DELAYED):
            self._phase = events.Phase.DONE
            self.add(at_ns, log.SKIPPED, group=self._group)

    def _replayed(self, at_ns: int, event: events.Replayed) -> None:
        if self._offset >= event.to and self._phase is events.Phase.DONE:
            self._phase, self._attempts = events.Phase.READY, 0
            self.add(at_ns, log.REPLAYED, group=self._group)

    def _opened(self, _at_ns: int, event: events.Opened) -> None:
        if event.end <= self._offset:  # the log lost its tail: the earlier events were about another message
            self._begin()

    def _returned(self, _at_ns: int, event: events.Returned) -> None:
        step, why = _way_back(event.why)
        self._waits = event.due_ms > event.at_ms
        due_ms = event.due_ms if self._waits else 0
        self._taken(event.at_ms * _MS, step, why=why, error=event.error, due_ms=due_ms)
        self._phase = events.Phase.DELAYED
        self._attempts += event.counted

    def _buried(self, _at_ns: int, event: events.Buried) -> None:
        leased = self._phase is events.Phase.LEASED
        self._phase, self.dead_from = events.Phase.DONE, event.dead_from
        tell = self._taken if leased else self.add
        tell(event.at_ms * _MS, log.BURIED, why=event.reason, error=event.error)

    def _taken(self, at_ns: int, step: str, **more: Any) -> None:
        self.add(at_ns, step, group=self._group, holder=self._holder, attempt=self._attempts + 1, **more)

    # Other events are not steps: a renewed lease, a saved document, the second half of a burial.
    _READERS: ClassVar[dict[type, Callable[[Any, int, Any], None]]] = {
        events.Leased: _leased,
        events.Released: _released,
        events.Returned: _returned,
        events.Buried: _buried,
        events.Acked: _acked,
        events.Expired: _ended,
        events.Cancelled: _ended,
        events.Lost: _ended,
        events.Skipped: _skipped,
        events.Replayed: _replayed,
        events.Opened: _opened,
    }


def _life(delivery: Delivery, offset: int) -> _MessageLife:
    """The steps of one message, including its publication and what happened to its dead letter."""
    record = _record(delivery.partition.log, offset)
    name = message_id(delivery.topic, delivery.number, offset, None) if record is None else delivery.id_of(record)
    life = _MessageLife(delivery, offset, name)
    delivery.sync()  # unsynced events cannot be read
    life.read(delivery.journal.past.of(offset))
    if record is not None:
        life.steps.insert(0, _published(delivery, record, name))
    if life.dead_from is not None:
        _follow_letter(delivery, life, offset)
    return life


def _published(delivery: Delivery, record: Record, name: str) -> TraceStep:
    source = _source(delivery, record)
    return TraceStep(
        record.timestamp_ns,
        log.PUBLISHED,
        name,
        delivery.topic,
        delivery.number,
        record.offset,
        why="" if mark(record, REDRIVEN_FROM) is None else log.REDRIVEN,
        related="" if source is None else source.id,
    )


def _follow_letter(delivery: Delivery, life: _MessageLife, offset: int) -> None:
    """Add what happened to the dead letter: nothing yet, purged, or redriven."""
    graves = delivery.dead.dead_log
    if graves is None:
        return  # the topic keeps no dead letters
    letter = next(_letters(graves.target.log, delivery.name, offset, life.dead_from or 0), None)
    if letter is None:
        return
    name = message_id(delivery.topic + DEAD_SUFFIX, delivery.number, letter, None)
    fate = _MessageLife(delivery, letter, name)
    graves.letters.sync()
    fate.read(graves.letters.journal.past.of(letter))
    last = fate.steps[-1] if fate.steps else None
    if last is not None and last.step == log.CANCELLED:
        life.add(last.at_ns, log.CANCELLED, group=delivery.name, why="purged", related=name)
    elif last is not None and last.step in (log.LEASED, log.ACKED) and fate.moving_to is not None:
        again = _came_back(delivery.partition.log, letter, fate.moving_to)
        if again is not None:
            life.add(again.timestamp_ns, log.REDRIVEN, group=delivery.name, related=delivery.id_of(again))
            life.went_on_at = again.offset
        elif last.step == log.ACKED:  # redriven into another topic, or the message is no longer kept
            life.add(last.at_ns, log.REDRIVEN, group=delivery.name)


def _letters(log: Log, group: str, offset: int, start: int) -> Iterator[int]:
    """Offsets of a message's dead letters from `start` on, including settled ones."""
    for record in moved_records(log, start):
        note = note_of(record)
        if note is not None and note.offset == offset and note.group == group:
            yield record.offset


def _came_back(log: Log, letter: int, start: int) -> Record | None:
    wanted = b"%d" % letter
    return next((record for record in moved_records(log, start) if mark(record, REDRIVEN_FROM) == wanted), None)


def _first_life(delivery: Delivery, offset: int) -> int:
    """Offset of the first message in the chain that is still kept."""
    for _ in range(_MOST_LIVES):
        record = _record(delivery.partition.log, offset)
        source = None if record is None else _source(delivery, record)
        if source is None or _record(delivery.partition.log, source.offset) is None:
            break
        offset = source.offset
    return offset


def _source(delivery: Delivery, record: Record) -> DeadNote | None:
    """The note of the dead letter that a message was redriven from, if it is still kept."""
    noted = mark(record, REDRIVEN_FROM)
    if noted is None or delivery.dead.dead_log is None:
        return None
    letter = _record(delivery.dead.dead_log.target.log, int(noted))
    return None if letter is None else note_of(letter)


def _record(log: Log, offset: int) -> Record | None:
    """The message at an offset, or None if it is not kept or cannot be read."""
    if not log.start <= offset < log.end:
        return None
    record = next(iter(log.records(offset, on_damage="skip", whole=False)), None)
    return record if record is not None and record.offset == offset else None


def _way_back(why: str) -> tuple[str, str]:
    return (log.NACKED, "") if why == events.NACKED else (log.RETURNED, why)


def steps_of_letter(note: DeadNote) -> list[TraceStep]:
    """The steps that the note of a dead letter contains."""

    def step(at_ns: int, name: str, **more: Any) -> TraceStep:
        return TraceStep(at_ns, name, note.id, note.topic, note.partition, note.offset, **more)

    steps = [step(note.timestamp_ns, log.PUBLISHED)]
    for number, failure in enumerate(note.failures[:-1], 1):
        name, why = _way_back(failure.why)
        facts = {"group": note.group, "holder": failure.holder, "attempt": number, "why": why, "error": failure.error}
        steps.append(step(failure.at_ms * _MS, name, **facts))
    facts = {"group": note.group, "holder": note.holder, "attempt": note.attempts}
    steps.append(step(note.dead_at_ms * _MS, log.BURIED, why=note.reason, error=note.error, **facts))
    return steps
