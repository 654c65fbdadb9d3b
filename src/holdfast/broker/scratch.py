"""The scratch file of a group's journal: leases and acks of single messages, noted with one store each.

A frame for every lease and ack would cost more than all the rest of a `get` and an `ack`. So while nothing else happens
in a group, these two are noted as words in a small mapped file, and written to the journal later, all in one frame:

    journal   ... | Noted, no words |                       ... | Noted, no words |  Noted, 1,024 words  | ...
    scratch           word, word, word, ...                          (free again)

The event without words begins a run. It says what all notes of the run have in common, and where it is itself, which
gives the run its mark. As long as it is the last event of the journal, the words with its mark count, from the first
one up to the first that is none. Any other event, a sync, a snapshot, a tick or a look at the history first stores the
notes of the run in the journal, as the same event with its words.

What must hold:

    A note survives the death of the process exactly like a frame in the mapped journal: both are stores into a map. A
    power cut may keep some words and lose others, as it does with unsynced frames. The words before the first that is
    missing did happen. What was synced is in frames.

    No note counts twice. A snapshot has all notes of runs that began below its position, and of two events with the
    same beginning the first counts: a signal may come right after it was written, and a full disk may be the reason for
    a snapshot in the very moment in which the notes are stored.

    No note counts for another run. Marks differ between any two runs that are less than a million events apart. A
    power cut can take the end of a journal with its events but leave the words, and then positions are used again; so
    the words that opening finds are erased, durably, before the next run begins.

    A version that does not know the file must not open the folder and miss the notes: the event that begins a run is
    unknown to it, too, and makes it refuse the journal. After a clean close a snapshot covers everything.

The file is used only where stores into a map cannot fail. If it is lost or damaged, some notes are lost at most, and
their messages are delivered again.

    word  field
    0     magic    "HFNOTES" and the version, 1
    1     notes    1,024 of them: see `delivery/events.py`
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from holdfast.delivery.events import NOTE_PRIME, PLACES, SPAN_MS, Event, Noted, decode_event
from holdfast.delivery.group import Group, IllegalMove, Lease
from holdfast.env import World
from holdfast.env.disk import File, write_fully
from holdfast.env.process import close_in_children, get_logger
from holdfast.storage.files import join, read_file
from holdfast.storage.log import Log
from holdfast.storage.state import StateWords, release_words

logger = get_logger(__name__)

SCRATCH: Final = "scratch"
NOTES: Final = 1_024
_MAGIC: Final = b"HFNOTES\x01"
_BYTES: Final = 8 + NOTES * 8
# What a place, a millisecond and the rest of the payload, which is (more_ms << 1 | passes) or an ack, add to a word.
_PLACE: Final = NOTE_PRIME << 4
_MS: Final = NOTE_PRIME << 28
_LEASED: Final = tuple(kind * 2 * NOTE_PRIME for kind in range(8))
_ACKED: Final = NOTE_PRIME
_NO_TIME: Final = -(2**63)
_STEADY: Final = 4  # single leases and acks in a row after which a run begins: otherwise it would only cost frames


def scratch_words(world: World, folder: str) -> bytes:
    """The words in the scratch file of a journal; empty if there is none."""
    content = read_file(world.disk, join(folder, SCRATCH)) or b""
    return content[8:] if content.startswith(_MAGIC) else b""


class GroupReplay:
    """Applies the events of a group's journal from a position on: see above for what counts, and what does not."""

    def __init__(self, group: Group, at: int) -> None:
        self._group = group
        self._noted_to = at  # runs that began below are known
        self._begun: Noted | None = None

    def apply(self, value: bytes) -> Noted | None:
        """Apply one event; returns it if it has notes. For those that do not fit, it raises IllegalMove at the end."""
        event = decode_event(value)
        self._begun = None
        if type(event) is not Noted:
            self._group.apply(event)
            return None
        if not event.words:
            self._begun = event
        elif event.begun >= self._noted_to:
            self._noted_to = event.begun + 1
            wrong = [error for _, each in event.events() if (error := self._refused(each)) is not None]
            if wrong:
                raise wrong[0]
            return event
        return None

    def take_in(self, words: Callable[[], bytes], end: int | None = None) -> Noted | None:
        """Apply the notes in the scratch file if they follow the last event; returns those applied.

        Where damaged events are skipped, `end` is the end of the journal: the last event may be among them.
        """
        begun, self._begun = self._begun, None
        if begun is None or end not in (None, begun.begun + 1):
            return None
        noted, count = begun.with_words(begun.intact(words())), 0
        for _, event in noted.events():
            wrong = self._refused(event)
            if wrong is not None:
                logger.error("a note does not fit, and those after it do not count", extra={"error": str(wrong)})
                break
            count += 1
        return noted.with_words(noted.words[: count * 8]) if count else None

    def _refused(self, event: Event) -> IllegalMove | None:
        try:
            self._group.apply(event)
        except IllegalMove as error:
            return error
        return None


class Scratch:
    """The run of notes of a group, if there is one. Callers hold the group's lock."""

    # What every note needs: a slot takes half the time of an entry in a dict.
    __slots__ = (
        "__weakref__", "_ahead_ms", "_at", "_base", "_base_end", "_file", "_holder", "_lease_ms", "_log", "_now_ms",
        "_now_word", "_run", "_session", "_steady", "_stop", "_unusable", "_used", "_words", "_world", "_writer",
        "pending",
    )  # fmt: skip

    def __init__(self, world: World, log: Log) -> None:
        self._world = world
        self._log = log
        self._writer = log.writer
        self._file: File | None = None
        self._words: StateWords = ()  # type: ignore[assignment]
        self._run: Noted | None = None
        self._at = self._stop = 0  # the number of the next word, and the one after the last; both 0 without a run
        self._base = self._base_end = self._ahead_ms = 0
        self._now_ms, self._now_word = _NO_TIME, 0  # what all words of this millisecond have in common
        self._holder, self._lease_ms, self._session = "", 0, 0
        self._steady = 0
        self._unusable = self._used = False
        self.pending: Noted | None = None  # must be in the journal before any other event
        close_in_children(self)

    def lease(self, offset: int, lease: Lease, passes: bool) -> bool:  # noqa: FBT001  a keyword costs time
        """Note a lease; False if it takes an event of its own."""
        at, at_ms = self._at, lease.at_ms
        more_ms = lease.until_ms - at_ms - self._ahead_ms
        if (
            at >= self._stop
            or lease.holder != self._holder
            or lease.lease_ms != self._lease_ms
            or lease.session != self._session
            or not (self._base <= offset < self._base_end and 0 <= more_ms < 4 and self._writer.failure is None)
            or (at_ms != self._now_ms and not self._is_now(at_ms))
        ):
            return False
        self._words[at] = self._now_word + offset * _PLACE + _LEASED[more_ms << 1 | passes]
        self._at = at + 1
        return True

    def ack(self, offset: int, at_ms: int) -> bool:
        """Note an ack; False if it takes an event of its own."""
        at = self._at
        if (
            at >= self._stop
            or not (self._base <= offset < self._base_end and self._writer.failure is None)
            or (at_ms != self._now_ms and not self._is_now(at_ms))
        ):
            return False
        self._words[at] = self._now_word + offset * _PLACE + _ACKED
        self._at = at + 1
        return True

    def _is_now(self, at_ms: int) -> bool:
        """Prepare the words of another millisecond; False if the run cannot express it."""
        run = self._run
        if run is None or not 0 <= at_ms - run.since_ms < SPAN_MS:
            return False
        self._now_ms = _NO_TIME  # first: a signal may come between any two of these lines
        self._now_word = (at_ms - run.since_ms) * _MS + run.mark - run.base * _PLACE
        self._now_ms = at_ms
        return True

    def is_steady(self, lease: Lease) -> bool:
        """Whether a run is worth beginning: several leases like this one were given or acked, and nothing else came."""
        if lease.holder != self._holder or lease.lease_ms != self._lease_ms or lease.session != self._session:
            self._holder, self._lease_ms, self._session = lease.holder, lease.lease_ms, lease.session
            self._steady = 0
        self._steady += 1
        return self._steady > _STEADY and not self._unusable

    def interrupt(self) -> None:
        """Something else happened: the next run must be worth it again."""
        self._steady = 0

    def head(self, group: Group, lease: Lease, at_ms: int) -> Noted | None:
        """The event that begins a run with this lease or its ack, to be journaled before `begin`; None if none can."""
        if not self._is_open():
            return None
        begun, ahead_ms = self._log.written_end, lease.until_ms - lease.at_ms - 1
        common = (lease.holder, lease.session, lease.lease_ms)
        return Noted(begun, group.floor, at_ms, *common, ahead_ms, group.fence)

    def begin(self, head: Noted) -> None:
        """Begin a run. Its first event is in the journal."""
        self._now_ms = _NO_TIME
        self._base, self._base_end, self._ahead_ms = head.base, head.base + PLACES, head.ahead_ms
        self._used = True
        self._run, self._at, self._stop = head, 1, 1 + NOTES

    def end(self) -> Noted | None:
        """End the run; returns what has to be stored in the journal, until `pending` is None again."""
        run = self._run
        if run is not None:
            self._stop = 0  # what `pending` does not have must not be noted
            if self._at > 1 and self._file is not None:
                self.pending = run.with_words(self._file.read(8, (self._at - 1) * 8))
            self._run, self._at = None, 0
        return self.pending

    @property
    def is_noting(self) -> bool:
        """Whether there is a run, or one that has not been stored in the journal yet."""
        return self._run is not None or self.pending is not None

    def found(self, noted: Noted | None) -> None:
        """Start over after a replay that found these notes; they are still to be stored."""
        self._run, self._at, self._stop, self._steady = None, 0, 0, 0
        self.pending = noted

    def rest(self) -> None:
        """Close the file if it has not been used since the last call."""
        if self._run is None and not self._used:
            self._release()
        self._used = False

    def erase(self) -> None:
        """Erase the words that an earlier owner left, durably: see the top of this module."""
        words = scratch_words(self._world, self._log.folder)
        if any(words):
            try:
                file = self._world.disk.open(join(self._log.folder, SCRATCH), write=True)
                try:
                    write_fully(file, 8, [bytes(len(words))])
                    file.sync()
                finally:
                    file.close()
            except OSError as error:
                self._unusable = True
                logger.warning("no notes are taken", extra={"folder": self._log.folder, "error": str(error)})

    def close(self) -> None:
        """Close the file; what it holds is in the journal, or counts at the next opening."""
        self._stop = 0
        self._release()

    def disown(self) -> None:
        """After a fork, in the child: the map belongs to the parent."""
        self._run = self.pending = None
        self._at = self._stop = 0
        self._unusable = True

    def _is_open(self) -> bool:
        if self._file is None and not self._unusable:
            try:
                self._open()
            except OSError as error:  # most likely the disk is full
                self._unusable = True
                logger.info("no notes are taken", extra={"folder": self._log.folder, "error": str(error)})
        return self._file is not None

    def _open(self) -> None:
        disk, folder = self._world.disk, self._log.folder
        if not disk.can_map(folder):
            self._unusable = True
            return
        file = disk.open(join(folder, SCRATCH), write=True, create=True)
        try:
            file.reserve(_BYTES)
            if file.read(0, 8) != _MAGIC:
                write_fully(file, 0, [_MAGIC, bytes(_BYTES - 8)])
            self._words = file.words(1 + NOTES)
        except BaseException:
            file.close()
            raise
        self._file = file

    def _release(self) -> None:
        file, self._file = self._file, None
        words, self._words = self._words, ()  # type: ignore[assignment]
        release_words(words)
        if file is not None:
            file.close()
