"""Dead letters: a log of their own beside the topic's, and the atomic moves into it and back.

A move spans two logs and takes three steps:

    intent     the source's journal notes what is to be moved and where the target log ends; it is synced
    append     the message is appended to the target log, synced, with a header that says where it comes from
    done       the source's journal notes that the move is done

After a crash between the first and the last step, the next opening searches the target log from the noted end. If it
finds the message, it notes the move as done; otherwise the move starts over. So a message is never lost or moved twice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from holdfast.broker.choose import take
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
    decoded_mark,
    encode_note,
    encode_original,
    mark,
    moved_batch,
    moved_records,
    original_of,
)
from holdfast.broker.tracing.log import TRACE
from holdfast.delivery.events import Ack, Acked, Cancel, Command, DeadStored, Nack, Phase, runs_of
from holdfast.delivery.group import Burial
from holdfast.env.process import get_logger
from holdfast.env.world import checkpoint
from holdfast.errors import DamagedRange, HoldfastError, InvalidRequest, OffsetOutOfRange, Removed, Unavailable
from holdfast.model import Batch, HeaderPairs, Record
from holdfast.storage.batches import portions
from holdfast.storage.keeper import soonest

if TYPE_CHECKING:
    from holdfast.broker.delivery import Delivery
    from holdfast.broker.partition import Partition

logger = get_logger(__name__)

_MOVE_MOST: Final = 1_000
_REDRIVE_LEASE_MS: Final = 3_600_000
_REDRIVER: Final = "redrive"


class DeadLetter(msgspec.Struct, frozen=True, gc=False):
    """A dead letter: the original message, and the note of what happened to it."""

    record: Record
    note: DeadNote


class LetterPlace(NamedTuple):
    """Offset and size of a dead letter: all that moving it takes, and cheap to keep for many."""

    offset: int
    size: int


class DeadPartition:
    """The dead letters of one partition, for all its groups."""

    def __init__(self, source: Partition, target: Partition, letters: Delivery) -> None:
        self.source = source
        self.target = target
        self.letters = letters  # the delivery of the dead letters themselves

    def recover(self) -> None:
        """Finish the redrives that a crash interrupted."""
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
        """Drop the dead letters of a group that is being deleted, durably."""
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
        """Do what is due; returns in how many ms to call again."""
        return soonest(self.target.tick(), self.letters.tick())

    def close(self) -> None:
        """Close all files, even if closing one of them fails."""
        try:
            self.letters.close()
        finally:
            self.target.close()


class DeadLetterLog:
    """Moves the dead letters of one group on one partition into their log and out of it."""

    def __init__(self, place: DeadPartition, delivery: Delivery) -> None:
        self._source = place.source
        self._delivery = delivery
        self.target = place.target
        self.letters = place.letters
        self._group = delivery.name
        self._lock = threading.Lock()
        self._read = place.source.log.follower().record  # a reader of its own, so that consumers need not wait
        self._interrupted = False  # whether a move may have stopped half way
        self._settling = threading.Lock()
        self._unsettled: list[Command] = []  # outcomes of redrives that the journal could not take yet

    def store_dead(self) -> int:
        """Move buried messages into the log of the dead letters; returns how many."""
        if not self._delivery.group.burials:
            return 0
        moved = 0
        with self._lock:
            if self._interrupted:
                moved = self._end_moved()
                self._delivery.metrics.buried.add(moved)
            while batch := self._next_dead():
                # Sync the intent first: if it were lost, the message would be ready again and have a dead letter too.
                self._delivery.journal.log.sync()
                self._interrupted = True  # until the journal says done: an error may leave letters behind
                self._append(batch)
                self._note_moved(batch)
                moved += len(batch)
                self._delivery.metrics.buried.add(len(batch))
        return moved

    def between_moves(self) -> threading.Lock:
        """A lock that keeps moves into the dead letters from running; held while the group is closed."""
        return self._lock

    def recover(self) -> None:
        """Finish the burials whose letter was written before a crash."""
        if self._delivery.group.burials:
            self._end_moved()

    def _end_moved(self) -> int:
        """Note the burials whose letter is already in the log as done; returns how many."""
        burials = dict(self._delivery.group.burials)
        start = min([burial.dead_from for burial in burials.values()], default=self.target.log.end)
        # After a seek, a message may die again: only a letter written after the current intent counts.
        found = {
            note.offset
            for record in moved_records(self.target.log, start)
            if (note := note_of(record)) is not None
            and note.group == self._group
            and note.offset in burials
            and record.offset >= burials[note.offset].dead_from
        }
        return self._note_moved(found)

    def _note_moved(self, offsets: Iterable[int]) -> int:
        """Journal that these are moved; returns how many."""
        with self._delivery.lock:
            # Some may have been dropped meanwhile, because the settings have changed.
            left = [offset for offset in sorted(offsets) if offset in self._delivery.group.burials]
            if left:
                self._delivery.commit_events([DeadStored(runs_of(left))])
        self._interrupted = False
        return len(left)

    def _next_dead(self) -> dict[int, Burial]:
        with self._delivery.lock:
            burials = {} if self._delivery.closed else self._delivery.group.burials
            # Those that died first, not the lowest offsets: sorting all of them for each batch would be quadratic.
            return {offset: burials[offset] for offset in sorted(islice(burials, _MOVE_MOST))}

    def _append(self, burials: dict[int, Burial]) -> None:
        for part in portions(self._letters(burials), lambda letter: len(letter[0].value)):
            headers = [(*_without(record.headers, ONLY_FOR), (DEAD, encode_note(note))) for record, note in part]
            # This syncs, whatever the topic's durability: the journal must never say done before the letter is on disk.
            self.target.append_moved(moved_batch([record for record, _ in part], headers))

    def _letters(self, burials: dict[int, Burial]) -> Iterator[tuple[Record, DeadNote]]:
        for offset, burial in burials.items():
            try:
                record = self._read(offset)
            except Removed:  # by key compaction: a later message of its key has replaced it
                continue
            except (DamagedRange, OffsetOutOfRange) as error:
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
        """The dead letter at an offset of its own log; None if redriven or purged, unless `gone`."""
        log = self.target.log
        if not log.start <= offset < log.end:
            return None
        if not gone and self.letters.group.phase(offset) is not Phase.READY:
            return None
        found = next((_letter(record) for record in log.records(offset, whole=False)), None)
        return found if found is not None and found.note.group == self._group else None

    def letter_of(self, message: int) -> DeadLetter | None:
        """The dead letter of the message at an offset of the topic; searches all of them."""
        group, log = self.letters.group, self.target.log
        said = b'"offset":%d,' % message  # as in a note: decoding every note would take ten times as long
        for record in log.records(min(max(group.floor, log.start), log.end), on_damage="skip", whole=False):
            checkpoint()
            if said in (mark(record, DEAD) or b"") and group.phase(record.offset) is Phase.READY:
                letter = _letter(record)
                if letter is not None and (letter.note.offset, letter.note.group) == (message, self._group):
                    return letter
        return None

    def all(self, start: int = 0, look: Callable[[int], None] | None = None) -> Iterator[DeadLetter]:
        """The group's dead letters from `start` on, oldest first, without those being redriven."""
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
        """Put these back into the topic in this order, each once; returns how many."""
        return sum(map(self._redrive, portions(letters, lambda letter: letter.size)))

    def _redrive(self, letters: Sequence[LetterPlace]) -> int:
        if self._source.lost is not None:
            raise self._source.lost
        moving = self._take(letters)
        if not moving:
            return 0
        self.letters.journal.log.sync()  # the intent first, as in `store_dead`
        tracer = self._source.tracer
        at_ns = 0 if tracer is None else tracer.now_ns()  # before the write: a message may be received at once
        try:
            appended = self._source.append_moved(self._revived(moving))
        except (Unavailable, InvalidRequest):  # nothing was written; other errors are left to the next opening
            self._give_back(moving)
            raise
        self._settle([Ack([delivered.receipt for delivered in moving])])
        for other in list(self._source.deliveries):
            if other is not self._delivery:
                with suppress(HoldfastError):  # otherwise it skips them when their turn comes
                    other.pass_over(range(appended.offset, appended.next_offset))
        # Once the message is done and trimmed, only the journal shows that it was moved.
        self.letters.journal.log.sync()
        self._delivery.metrics.redriven.add(len(moving))
        if tracer is not None:
            notes = [(delivered.record, note_of(delivered.record)) for delivered in moving]
            tracer.redriven(notes, appended.offset, at_ns)
        return len(moving)

    def _take(self, letters: Sequence[LetterPlace]) -> list[Delivered]:
        """Lease those of the letters that still exist, in this order, with the intent to move them."""
        offsets, end = [letter.offset for letter in letters], self._source.log.written_end
        taken = take(self.letters, offsets, _REDRIVE_LEASE_MS, _REDRIVER, moving_to=end)
        by_offset = {delivered.record.offset: delivered for delivered in taken}
        return [by_offset[letter.offset] for letter in letters if letter.offset in by_offset]

    def hand_over(self, letters: Sequence[LetterPlace], store: Callable[[Sequence[DeadLetter]], None]) -> int:
        """Pass the letters to `store`, which keeps them elsewhere, then ack them; returns how many.

        After a crash in between, `store` gets the same letters again and must recognize them.
        """
        return sum(self._hand_over(some, store) for some in portions(letters, lambda letter: letter.size))

    def _hand_over(self, letters: Sequence[LetterPlace], store: Callable[[Sequence[DeadLetter]], None]) -> int:
        moving = self._take(letters)
        try:
            store([letter for delivered in moving if (letter := _letter(delivered.record)) is not None])
        except BaseException:
            self._give_back(moving)
            raise
        if moving:
            self._settle([Ack([delivered.receipt for delivered in moving])])
            self.letters.journal.log.sync()
            self._delivery.metrics.redriven.add(len(moving))
        return len(moving)

    def end_redrives(self) -> None:
        """Journal the outcomes of redrives that could not be journaled before, or they would be redriven again."""
        if self._unsettled:
            self._settle([])
            self.letters.journal.log.sync()

    def _give_back(self, moving: Sequence[Delivered]) -> None:
        self._settle([Nack(delivered.receipt, 0, counted=False) for delivered in moving])

    def _settle(self, commands: Sequence[Command]) -> None:
        with self._settling:
            commands, self._unsettled = [*self._unsettled, *commands], []
            try:
                self.letters.settle_all(commands)
            except Unavailable:  # other errors are left to the next opening
                self._unsettled = commands
                raise

    def purge(self, letters: Sequence[LetterPlace]) -> int:
        """Drop these for good; returns how many."""
        return len(self.letters.settle_all([Cancel(letter.offset) for letter in letters]).events)

    def _revived(self, moving: Sequence[Delivered]) -> Batch:
        records = [delivered.record for delivered in moving]
        priorities = [letter.note.priority if (letter := _letter(record)) else 0 for record in records]
        return moved_batch(records, [self._revived_headers(record) for record in records], priorities=priorities)

    def _revived_headers(self, record: Record) -> tuple[tuple[str, bytes], ...]:
        """The headers of a redriven message: a new message, not a duplicate, and for this group only."""
        kept = _without(record.headers, DEAD, DEDUP_ID, DELAYED_ID, REDRIVEN_FROM, ORIGINAL, ONLY_FOR, TRACE)
        note = note_of(record)
        if note is not None:
            kept.append((ORIGINAL, encode_original(note.first)))
        if note is not None and mark(record, CORRELATION_ID) is None:
            kept.append((CORRELATION_ID, note.id.encode()))  # defaults to the message's id, which changes now
        if note is not None and self._source.tracer is not None:
            kept += self._source.tracer.trace_header(record, note)
        return (*kept, (REDRIVEN_FROM, b"%d" % record.offset), (ONLY_FOR, self._group.encode()))


class GroupDeadLetters:
    """The dead letters of one group on one partition; their log is created when the first message dies."""

    def __init__(self, delivery: Delivery, open_place: Callable[[int], DeadPartition] | None) -> None:
        self._delivery = delivery
        self._open_place = open_place  # None for the delivery of the dead letters themselves
        self._opening = threading.Lock()
        self.dead_log: DeadLetterLog | None = None  # None until the log is needed

    def open(self) -> DeadLetterLog:
        """Return the log of the dead letters, creating its log if needed."""
        with self._opening:
            if self.dead_log is None:
                self._delivery.check_open()
                if self._open_place is None:
                    raise InvalidRequest(
                        "dead letters have no dead letters of their own: name the queue that they came from"
                    )
                self.dead_log = DeadLetterLog(self._open_place(self._delivery.number), self._delivery)
            return self.dead_log

    def end(self) -> int:
        """The end of the log of the letters, where letters of messages that die from now on will be."""
        if self.dead_log is None:
            return -1 if self._open_place is None else 0
        return self.dead_log.target.log.written_end

    def between_moves(self) -> AbstractContextManager[object]:
        """Wait for a running move to finish, and keep others from starting during the block."""
        return nullcontext() if self.dead_log is None else self.dead_log.between_moves()

    def letters(self, start: int = 0, look: Callable[[int], None] | None = None) -> Iterator[DeadLetter]:
        """The dead letters from an offset of their log on; `look` is called with each offset visited."""
        dead_log = self._up_to_date()
        return iter(()) if dead_log is None else dead_log.all(start, look)

    def letter(self, offset: int, *, gone: bool = False) -> DeadLetter | None:
        """The dead letter at an offset of its own log; None if redriven or purged, unless `gone`."""
        dead_log = self._up_to_date()
        return None if dead_log is None else dead_log.letter(offset, gone=gone)

    def letter_of(self, message: int) -> DeadLetter | None:
        """The dead letter of the message at an offset of the topic; searches all of them."""
        dead_log = self._up_to_date()
        return None if dead_log is None else dead_log.letter_of(message)

    def _up_to_date(self) -> DeadLetterLog | None:
        self._delivery.check_open()
        self.store_dead()
        return self.dead_log

    def lost(self, start: int, stop: int) -> int:
        """Number of dead letters in this range known to be unreadable, of any group."""
        if self.dead_log is None:
            return 0
        letters, log = self.dead_log.letters, self.dead_log.target.log
        return letters.group.ready_of(log.damaged()).range_cardinality(start, stop)

    def count(self) -> int:
        """Number of dead letters of the group here, including dead messages that are not moved yet."""
        dead_log, buried = self.dead_log, len(self._delivery.group.burials)
        if dead_log is None:
            return buried
        if self.counts_fast:
            return buried + dead_log.letters.ready_count()
        return buried + sum(1 for _ in dead_log.all())

    @property
    def counts_fast(self) -> bool:
        """Whether `count` reads no letters: there are none, or all of them belong to this group."""
        return self.dead_log is None or len(self._delivery.partition.deliveries) == 1

    def store_dead(self) -> None:
        """Move dead messages to the dead letters, or drop them if the topic keeps none."""
        delivery = self._delivery
        if self.dead_log is not None:
            self.dead_log.end_redrives()
        burials = delivery.group.burials
        if not burials:
            return
        if delivery.settings.dead_letters:
            self.open().store_dead()
            return
        with delivery.lock:
            dropped = sorted(burials)
            for offset in dropped:
                failures = burials[offset].history.failures
                logger.warning(
                    "message %s-%d-%d dropped because the topic keeps no dead letters: %s: %s",
                    delivery.topic,
                    delivery.number,
                    offset,
                    burials[offset].reason,
                    failures[-1].error if failures else "",
                )
            delivery.commit_events([DeadStored(runs_of(dropped))])
            delivery.metrics.buried.add(len(dropped))

    def store_dead_if_possible(self) -> None:
        """Like `store_dead`, but only log a failure, such as a full disk; upkeep tries again until it succeeds.

        The message is already dead in the journal. A caller that rejected it must not get an error and retry.
        """
        delivery = self._delivery
        try:
            self.store_dead()
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
    """The note of a dead letter; None if the record is not one."""
    return decoded_mark(record, DEAD, decode_note)


def _letter(record: Record) -> DeadLetter | None:
    note = note_of(record)
    return None if note is None else DeadLetter(record, note)


def _without(headers: HeaderPairs, *names: str) -> list[tuple[str, bytes]]:
    return [pair for pair in headers if pair[0] not in names]
