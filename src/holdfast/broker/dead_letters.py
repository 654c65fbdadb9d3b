"""Dead letters: a topic of their own beside the queue's, and the two moves between them, each atomic.

A move spans two logs. First the journal of the one says what is to be moved and where the other log ends;
then the message is appended there, with a note of where it comes from; then the journal says that it is
done. A crash in between leaves the first without the last: the next opening looks in the other log from
the place that was noted, finds the message there or does not, and ends the move accordingly.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from holdfast.broker.leases import Delivered
from holdfast.broker.messages import (
    CORRELATION_ID,
    DEAD,
    DEDUP_ID,
    DELAYED_ID,
    ONLY_FOR,
    ORIGINAL,
    REDRIVEN_FROM,
    DeadNote,
    decode_note,
    encode_note,
    encode_original,
    mark,
    moved_batch,
    moved_records,
    original_of,
)
from holdfast.broker.tracing.log import TRACE
from holdfast.delivery.events import Ack, Acked, Cancel, Command, Interred, Nack, Phase, runs_of
from holdfast.delivery.group import Burial
from holdfast.env.world import checkpoint
from holdfast.errors import DamagedRange, HoldfastError, InvalidRequest, OffsetOutOfRange, Removed, Unavailable
from holdfast.model import Batch, HeaderPairs, Record
from holdfast.storage.batches import portions
from holdfast.storage.keeper import soonest

if TYPE_CHECKING:
    from holdfast.broker.delivery import Delivery
    from holdfast.broker.partition import Partition

logger = logging.getLogger(__name__)

_MOVE_MOST: Final = 1_000
_REDRIVE_LEASE_MS: Final = 3_600_000
_REDRIVER: Final = "redrive"


class DeadLetter(msgspec.Struct, frozen=True, gc=False):
    """A dead letter: the message as it was, and the note of what became of it."""

    record: Record
    note: DeadNote


class LetterPlace(NamedTuple):
    """Where a dead letter is, and how large: all that it takes to move it, and little to hold of many."""

    offset: int
    size: int


class DeadPartition:
    """Where the letters of one partition are kept, those of all its groups."""

    def __init__(self, source: Partition, target: Partition, letters: Delivery) -> None:
        self.source = source
        self.target = target
        self.letters = letters  # the delivery of the dead letters themselves

    def recover(self) -> None:
        """End the redrives that a crash cut short."""
        moving = {
            offset: lease.moving_to for offset, lease in self.letters.group.leases.items() if lease.moving_to >= 0
        }
        if moving:
            found = {
                int(value)
                for record in moved_records(self.source.log, min(moving.values()))
                if (value := mark(record, REDRIVEN_FROM)) is not None
            }
            moved = [offset for offset in moving if offset in found]
            if moved:
                with self.letters.lock:
                    self.letters.commit_events([Acked(runs_of(moved))])
        self.letters.end_sessions()

    def drop_letters_of(self, group: str) -> None:
        """Drop what a group has here that is to go; returns when none of it can come back."""
        state, log = self.letters.group, self.target.log
        found = [
            record.offset
            for record in log.records(max(state.floor, log.start), on_damage="skip", whole=False)
            if state.phase(record.offset) is Phase.READY and (note := note_of(record)) and note.group == group
        ]
        if found:
            self.letters.settle_all([Cancel(offset) for offset in found])
            self.letters.journal.log.sync()

    def tick(self) -> int | None:
        """Do what is due by now; answers in how many ms more will be due."""
        return soonest(self.target.tick(), self.letters.tick())

    def close(self) -> None:
        """Let go of the files, also where that fails for some."""
        try:
            self.letters.close()
        finally:
            self.target.close()


class Graveyard:
    """The dead letters of one group on one partition, once there are any: the moves into their log and out of it."""

    def __init__(self, place: DeadPartition, delivery: Delivery) -> None:
        self._source = place.source
        self._delivery = delivery
        self.target = place.target
        self.letters = place.letters
        self._group = delivery.name
        self._lock = threading.Lock()
        self._read = place.source.log.follower().record  # its own: consumers need not wait while letters are written
        self._interrupted = False  # whether a move began that may have come half way
        self._settling = threading.Lock()
        self._unsettled: list[Command] = []  # how redrives ended of which the letters' journal does not know yet

    def inter(self) -> int:
        """Move what was buried into its log; answers how many."""
        if not self._delivery.group.burials:
            return 0
        moved = 0
        with self._lock:
            if self._interrupted:
                moved = self._end_moved()
                self._delivery.metrics.buried.add(moved)
            while batch := self._next_burials():
                # The intent first: a letter without one would be the second life of a message that is still ready.
                self._delivery.journal.log.sync()
                self._interrupted = True  # until the journal knows: any error on the way may leave letters behind
                self._append(batch)
                with self._delivery.lock:
                    # Those that were dropped meanwhile, by other settings, have ended already.
                    left = [offset for offset in batch if offset in self._delivery.group.burials]
                    if left:
                        self._delivery.commit_events([Interred(runs_of(left))])
                self._interrupted = False
                moved += len(batch)
                self._delivery.metrics.buried.add(len(batch))
        return moved

    def between_moves(self) -> threading.Lock:
        """Whoever holds it may close the group: no move into the letters is under way, and none begins."""
        return self._lock

    def recover(self) -> None:
        """End the burials whose letter is in the log already: a crash came before the journal knew."""
        if self._delivery.group.burials:
            self._end_moved()

    def _end_moved(self) -> int:
        """End the burials whose letter is in the log already; answers how many."""
        burials = dict(self._delivery.group.burials)
        start = min([burial.dead_from for burial in burials.values()], default=self.target.log.end)
        # An offset may die more than once, after a seek: only a letter behind its own intent counts.
        found = {
            note.offset
            for record in moved_records(self.target.log, start)
            if (note := note_of(record)) is not None
            and note.group == self._group
            and note.offset in burials
            and record.offset >= burials[note.offset].dead_from
        }
        with self._delivery.lock:
            left = [offset for offset in sorted(found) if offset in self._delivery.group.burials]
            if left:
                self._delivery.commit_events([Interred(runs_of(left))])
        self._interrupted = False
        return len(left)

    def _next_burials(self) -> dict[int, Burial]:
        with self._delivery.lock:
            burials = {} if self._delivery.closed else self._delivery.group.burials
            # The first to have died, and not the lowest of all: to sort them for every batch would cost a square.
            return {offset: burials[offset] for offset in sorted(islice(burials, _MOVE_MOST))}

    def _append(self, burials: dict[int, Burial]) -> None:
        for part in portions(self._letters(burials), lambda letter: len(letter[0].value)):
            headers = [(*_without(record.headers, ONLY_FOR), (DEAD, encode_note(note))) for record, note in part]
            # Synced, whatever the queue's own policy: the journal must never know of a letter that is not there.
            self.target.append_moved(moved_batch([record for record, _ in part], headers))

    def _letters(self, burials: dict[int, Burial]) -> Iterator[tuple[Record, DeadNote]]:
        for offset, burial in burials.items():
            try:
                record = self._read(offset)
            except Removed:  # by key compaction: a later message of its key says what holds
                continue
            except (DamagedRange, OffsetOutOfRange) as error:  # damaged on disk since: nothing is left of it
                logger.error("message %d of %s cannot be read: %s", offset, self._source.log.folder, error)
                continue
            yield record, self._note(record, burial)

    def _note(self, record: Record, burial: Burial) -> DeadNote:
        history = burial.history
        document = self._delivery.group.documents.get(record.offset)
        last = history.failures[-1] if history.failures else None
        return DeadNote(
            id=self._delivery.id_of(record),
            topic=self._delivery.topic,
            partition=self._delivery.number,
            group=self._group,
            offset=record.offset,
            timestamp_ns=record.timestamp_ns,
            reason=burial.reason,
            error=last.error if last is not None else "",
            attempts=history.attempts,
            first_ms=history.first_ms,
            last_ms=history.last_ms,
            dead_at_ms=burial.at_ms,
            holder=burial.holder,
            priority=record.priority,
            failures=history.failures,
            state=None if document is None else document.content,
            original=original_of(record),
            expires_at_ms=record.expires_at_ms,
            due_at_ms=record.due_at_ms,
        )

    def letter(self, offset: int, *, gone: bool = False) -> DeadLetter | None:
        """The dead letter at an offset of its own log, unless it was redriven or purged; with `gone` even so."""
        log = self.target.log
        if not log.start <= offset < log.end:
            return None
        if not gone and self.letters.group.phase(offset) is not Phase.READY:
            return None
        found = next((_letter(record) for record in log.records(offset, whole=False)), None)
        return found if found is not None and found.note.group == self._group else None

    def letter_of(self, message: int) -> DeadLetter | None:
        """The dead letter that the message at an offset of the topic became; looks through all of them."""
        group, log = self.letters.group, self.target.log
        said = b'"offset":%d,' % message  # in a note; to read each of them would take ten times as long
        for record in log.records(min(max(group.floor, log.start), log.end), on_damage="skip", whole=False):
            checkpoint()
            if said in (mark(record, DEAD) or b"") and group.phase(record.offset) is Phase.READY:
                letter = _letter(record)
                if letter is not None and (letter.note.offset, letter.note.group) == (message, self._group):
                    return letter
        return None

    def all(self, start: int = 0, look: Callable[[int], None] | None = None) -> Iterator[DeadLetter]:
        """The group's dead letters, oldest first; those that are being moved back are left out."""
        group, log = self.letters.group, self.target.log
        start = min(max(group.floor, log.start, start), log.end)
        for record in log.records(start, on_damage="skip", whole=False):
            if look is not None:
                look(record.offset)
            if group.phase(record.offset) is Phase.READY:
                letter = _letter(record)
                if letter is not None and letter.note.group == self._group:
                    yield letter

    def redrive(self, letters: Sequence[LetterPlace]) -> int:
        """Put these back into the queue, in this order, each once; answers how many."""
        return sum(map(self._redrive, portions(letters, lambda letter: letter.size)))

    def _redrive(self, letters: Sequence[LetterPlace]) -> int:
        if self._source.lost is not None:
            raise self._source.lost
        moving = self._take(letters)
        if not moving:
            return 0
        self.letters.journal.log.sync()  # the intent first, as in `inter`
        tracer = self._source.tracer
        at_ns = 0 if tracer is None else tracer.now_ns()  # from before: whoever waits takes a message at once
        try:
            appended = self._source.append_moved(self._revived(moving))
        except (Unavailable, InvalidRequest):  # nothing was written; after any other error the next opening must look
            self._settle([Nack(delivered.receipt, 0, counted=False) for delivered in moving])
            raise
        self._settle([Ack([delivered.receipt for delivered in moving])])
        for other in list(self._source.deliveries):
            if other is not self._delivery:
                with suppress(HoldfastError):  # it passes over them when it comes there
                    other.pass_over(range(appended.offset, appended.next_offset))
        # The message may be done and trimmed away soon: then nothing else would tell that it was moved.
        self.letters.journal.log.sync()
        self._delivery.metrics.redriven.add(len(moving))
        if tracer is not None:
            notes = [(delivered.record, note_of(delivered.record)) for delivered in moving]
            tracer.redriven(notes, appended.offset, at_ns)
        return len(moving)

    def _take(self, letters: Sequence[LetterPlace]) -> list[Delivered]:
        """Those of the letters that are there, in this order; after a crash they are looked for in the queue's log."""
        taken = self.letters.take(
            [letter.offset for letter in letters],
            lease_ms=_REDRIVE_LEASE_MS,
            holder=_REDRIVER,
            moving_to=self._source.log.written_end,
        )
        by_offset = {delivered.record.offset: delivered for delivered in taken}
        return [by_offset[letter.offset] for letter in letters if letter.offset in by_offset]

    def hand_over(self, letters: Sequence[LetterPlace], store: Callable[[Sequence[DeadLetter]], None]) -> int:
        """Let `store` keep these elsewhere, and then be done with them; answers how many.

        A crash in between leaves letters that are stored there already: `store` must know them again.
        """
        return sum(self._hand_over(some, store) for some in portions(letters, lambda letter: letter.size))

    def _hand_over(self, letters: Sequence[LetterPlace], store: Callable[[Sequence[DeadLetter]], None]) -> int:
        moving = self._take(letters)
        try:
            store([letter for delivered in moving if (letter := _letter(delivered.record)) is not None])
        except BaseException:
            self._settle([Nack(delivered.receipt, 0, counted=False) for delivered in moving])
            raise
        if moving:
            self._settle([Ack([delivered.receipt for delivered in moving])])
            self.letters.journal.log.sync()
            self._delivery.metrics.redriven.add(len(moving))
        return len(moving)

    def end_redrives(self) -> None:
        """Tell the journal how redrives ended that it could not be told of: otherwise those would go a second time."""
        if self._unsettled:
            self._settle([])
            self.letters.journal.log.sync()

    def _settle(self, commands: Sequence[Command]) -> None:
        with self._settling:
            commands, self._unsettled = [*self._unsettled, *commands], []
            try:
                self.letters.settle_all(commands)
            except Unavailable:  # any other error leaves it to the next opening
                self._unsettled = commands
                raise

    def purge(self, letters: Sequence[LetterPlace]) -> int:
        """Drop these for good; answers how many."""
        return len(self.letters.settle_all([Cancel(letter.offset) for letter in letters]).events)

    def _revived(self, moving: Sequence[Delivered]) -> Batch:
        records = [delivered.record for delivered in moving]
        priorities = [letter.note.priority if (letter := _letter(record)) else 0 for record in records]
        return moved_batch(records, [self._revived_headers(record) for record in records], priorities=priorities)

    def _revived_headers(self, record: Record) -> tuple[tuple[str, bytes], ...]:
        """The headers of a message that comes back: it is a new one, nobody's duplicate, and for this group only."""
        kept = _without(record.headers, DEAD, DEDUP_ID, DELAYED_ID, REDRIVEN_FROM, ORIGINAL, ONLY_FOR, TRACE)
        note = note_of(record)
        if note is not None:
            kept.append((ORIGINAL, encode_original(note.first)))
        if note is not None and mark(record, CORRELATION_ID) is None:
            kept.append((CORRELATION_ID, note.id.encode()))  # what it was without one
        if note is not None and self._source.tracer is not None:
            kept += self._source.tracer.trace_header(record, note)
        return (*kept, (REDRIVEN_FROM, b"%d" % record.offset), (ONLY_FOR, self._group.encode()))


class GroupDeadLetters:
    """The dead letters of one group on one partition; their log is made when the first message dies."""

    def __init__(self, delivery: Delivery, open_place: Callable[[int], DeadPartition] | None) -> None:
        self._delivery = delivery
        self._open_place = open_place  # None for the dead letters themselves: none of them dies
        self._opening = threading.Lock()
        self.graveyard: Graveyard | None = None  # until the log is needed

    def open(self) -> Graveyard:
        """The graveyard, whose log is made where there is none."""
        with self._opening:
            if self.graveyard is None:
                self._delivery.check_open()
                if self._open_place is None:
                    raise InvalidRequest("dead letters have no dead letters of their own")
                self.graveyard = Graveyard(self._open_place(self._delivery.number), self._delivery)
            return self.graveyard

    def end(self) -> int:
        """Where the log of the letters ends: a letter of what dies from now on comes behind it."""
        if self.graveyard is None:
            return -1 if self._open_place is None else 0
        return self.graveyard.target.log.written_end

    def between_moves(self) -> AbstractContextManager[object]:
        """Keeps moves away, behind one that is under way."""
        return nullcontext() if self.graveyard is None else self.graveyard.between_moves()

    def letters(self, start: int = 0, look: Callable[[int], None] | None = None) -> Iterator[DeadLetter]:
        """The dead letters from an offset of their log on, also those on their way; each place is told to `look`."""
        graveyard = self._up_to_date()
        return iter(()) if graveyard is None else graveyard.all(start, look)

    def letter(self, offset: int, *, gone: bool = False) -> DeadLetter | None:
        """The dead letter at an offset of its own log, if there is one; with `gone` even if redriven or purged."""
        graveyard = self._up_to_date()
        return None if graveyard is None else graveyard.letter(offset, gone=gone)

    def letter_of(self, message: int) -> DeadLetter | None:
        """The dead letter that the message at an offset became, if it is there; looks through all of them."""
        graveyard = self._up_to_date()
        return None if graveyard is None else graveyard.letter_of(message)

    def _up_to_date(self) -> Graveyard | None:
        self._delivery.check_open()
        self.inter()
        return self.graveyard

    def lost(self, start: int, stop: int) -> int:
        """How many dead letters there cannot be read, as far as that is known; whose they were nobody can say."""
        if self.graveyard is None:
            return 0
        letters, log = self.graveyard.letters, self.graveyard.target.log
        return letters.group.ready_of(log.damaged()).range_cardinality(start, stop)

    def count(self) -> int:
        """How many dead letters the group has here, those on their way included."""
        graveyard, buried = self.graveyard, len(self._delivery.group.burials)
        if graveyard is None:
            return buried
        if len(self._delivery.partition.deliveries) == 1:  # then all of them are ours
            return buried + graveyard.letters.ready_count()
        return buried + sum(1 for _ in graveyard.all())

    def inter(self) -> None:
        """Move what died into the dead letters, whose log is made when the first one does."""
        delivery = self._delivery
        if self.graveyard is not None:
            self.graveyard.end_redrives()
        burials = delivery.group.burials
        if not burials:
            return
        if delivery.settings.dead_letters:
            self.open().inter()
            return
        with delivery.lock:
            dropped = sorted(burials)
            for offset in dropped:
                failures = burials[offset].history.failures
                logger.warning(
                    "message %s-%d-%d dropped, for the topic keeps no dead letters: %s: %s",
                    delivery.topic,
                    delivery.number,
                    offset,
                    burials[offset].reason,
                    failures[-1].error if failures else "",
                )
            delivery.commit_events([Interred(runs_of(dropped))])
            delivery.metrics.buried.add(len(dropped))

    def inter_if_possible(self) -> None:
        """The same for whoever has done his part: what the journal calls dead is dead.

        If the letter cannot be moved now, for the disk is full, then later: upkeep tries until it succeeds. Who
        rejected the message must not be told of an error, and do again what is done.
        """
        delivery = self._delivery
        try:
            self.inter()
        except HoldfastError as error:
            logger.warning(
                "dead letters wait to be moved",
                extra={
                    "topic": delivery.topic,
                    "partition": delivery.number,
                    "group": delivery.name,
                    "error": str(error),
                },
            )
            delivery.on_attention()


def note_of(record: Record) -> DeadNote | None:
    """The note of a dead letter; None for what is none."""
    text = mark(record, DEAD)
    if text is None:
        return None
    try:
        return decode_note(text)
    except msgspec.DecodeError:
        return None


def _letter(record: Record) -> DeadLetter | None:
    note = note_of(record)
    return None if note is None else DeadLetter(record, note)


def _without(headers: HeaderPairs, *names: str) -> list[tuple[str, bytes]]:
    return [pair for pair in headers if pair[0] not in names]
