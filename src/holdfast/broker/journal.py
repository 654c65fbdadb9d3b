"""Journals: logs of events, the state that replaying them gives, and snapshots that keep replay short.

    events      0 ........ 400 ........ 700 ........ 950
                            |            |            |
                     snapshot.before  snapshot   end of the journal
                     (trimmed below)

A snapshot holds the state after all events below its position. Opening loads the newest intact snapshot and replays the
events behind it. The previous snapshot is kept as well, and the journal is trimmed only up to that one: if the newer
file is damaged, opening starts from the older one and replays more, but loses nothing.

What must hold:

    The log is synced before a snapshot is written. A snapshot must never contain events that a power cut could remove
    from the journal. If events were lost anyway, `load` writes a new snapshot at the journal's end, because replay
    would not look at new events below the old snapshot's position.

    The old snapshot is renamed before the new one is put in place, and only if it is intact. A damaged file must not
    replace a good one.

    Replay applies the same events with the same code as live operation, so both arrive at the same state. An event
    that does not fit the state means corruption, except after a damaged range: there, events are known to be missing.

This module has three parts: the snapshot files, the journal itself, and the floor of a group, up to which its messages
need not be kept. `past` keeps what is trimmed from a group's journal, `scratch` takes notes of what comes into it.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from struct import Struct
from typing import ClassVar, Final, Generic, TypeVar

import msgspec

from holdfast.broker.past import PastEvents
from holdfast.broker.scratch import GroupReplay, Scratch, scratch_words
from holdfast.checksum import crc32c
from holdfast.codec.frame import Kind
from holdfast.delivery.events import Acked, Event, Skipped, encode_event
from holdfast.delivery.group import FAR, Group, IllegalMove, Lease
from holdfast.delivery.image import GroupImage, group_of, image_of
from holdfast.env import World
from holdfast.env.process import get_logger, logging
from holdfast.errors import CorruptData, DamagedRange, DiskFull, HoldfastError, Unavailable
from holdfast.model import Appended, Durability, count_of
from holdfast.settings import LogSettings
from holdfast.storage.files import FULL_DISK, advice, durable_replace, join, read_file, with_space
from holdfast.storage.log import Log

# A snapshot file:
#
# at   size  field
# 0    4     magic    "HFS" and the version, 1
# 4    4     check    CRC32C of the rest
# 8    n     payload  MessagePack of a position in the journal, and the state after all events below it

logger = get_logger(__name__)

SNAPSHOT: Final = "snapshot"
BEFORE: Final = "snapshot.before"

# A journal of at least this size, and of at least that of its snapshot, is worth folding on a full disk.
_WORTH_BYTES: Final = 64 * 1024
_LITTLE_BYTES: Final = 16 * 1024

_HEADER: Final = Struct("<4sI")
_MAGIC: Final = b"HFS\x01"
assert _HEADER.size == 8  # keeps the table above and the code in step

_State = TypeVar("_State")


def damaged_snapshot(folder: str, instead: str) -> CorruptData:
    """The error for a reader that finds the newest snapshot damaged; `instead` names the intact file, if any."""
    what = f"{join(folder, SNAPSHOT)} is damaged"
    if instead:
        return CorruptData(
            f"{what}; opening continues from the previous snapshot: it takes longer, and nothing is lost"
        )
    return CorruptData(
        f"{what}, and there is no intact one before it: unless the journal still has all events from the first one on, "
        "this part cannot be opened. Restore the file from a backup"
    )


class SnapshotFiles:
    """The current and the previous snapshot in one folder."""

    def __init__(self, world: World, folder: str) -> None:
        self._world = world
        self._folder = folder
        self._current_is_whole = True  # a damaged file must not replace the previous snapshot

    def newest(self, decode: Callable[[bytes], _State]) -> tuple[_State | None, str]:
        """Return the newest intact snapshot and its file name, or (None, "")."""
        for name in (SNAPSHOT, BEFORE):
            content = read_file(self._world.disk, join(self._folder, name))
            if content is None:
                continue
            try:
                magic, crc = _HEADER.unpack_from(content)
                payload = content[_HEADER.size :]
                if magic == _MAGIC and crc == crc32c(payload):
                    return decode(payload), name
            except Exception as error:  # whatever is wrong with it, the previous one may be intact
                logger.debug("snapshot unreadable", extra={"error": repr(error)})
            self._current_is_whole = False
            logger.error("snapshot damaged: using the previous one", extra={"folder": self._folder, "file": name})
        return None, ""

    def keep(self, payload: bytes) -> None:
        """Write a new snapshot; the current one becomes the previous one if it is intact.

        Raises DiskFull or Unavailable.
        """
        path = join(self._folder, SNAPSHOT)
        try:
            if self._current_is_whole and self._world.disk.exists(path):
                self._world.disk.rename(path, join(self._folder, BEFORE))
            content = _HEADER.pack(_MAGIC, crc32c(payload)) + payload
            with_space(
                self._world,
                len(content),
                lambda: durable_replace(self._world.disk, self._folder, SNAPSHOT, content),
            )
        except OSError as error:
            raise _not_written(self._folder, error) from error
        self._current_is_whole = True


def _not_written(folder: str, error: OSError) -> HoldfastError:
    """The error for a failed write. It is harmless: without a new snapshot the journal just keeps growing."""
    kind = DiskFull if error.errno in FULL_DISK else Unavailable
    return kind(f"no snapshot could be written in {folder}: {advice(error)}. The journal has everything")


# The journal, for any kind of state: see the top of this module.


_Image = TypeVar("_Image")


class StateSnapshot(msgspec.Struct, Generic[_Image], frozen=True, array_like=True):
    """The state after all events below `position` of the journal."""

    position: int
    image: _Image


_encode = msgspec.msgpack.Encoder().encode


class StateJournal(ABC, Generic[_State, _Image]):
    """A journal and the state that its events add up to. Subclasses define the state."""

    damage_means: ClassVar[str]  # what users notice if events cannot be read
    without_it: ClassVar[str]  # what happens if the folder is removed

    def __init__(self, world: World, folder: str, settings: LogSettings) -> None:
        self._world = world
        self._folder = folder
        self._snapshot_at = 0
        self._before_at = 0
        self._keeping = threading.Lock()
        self._files = SnapshotFiles(world, folder)
        self._folding = False
        self.on_folded: Callable[[], None] = lambda: None
        self.lost_events = 0  # events that could not be read at opening
        self.log = Log.open(folder, log_settings(settings), world, kind=Kind.JOURNAL)

    @abstractmethod
    def _new(self) -> _State:
        """The state before the first event."""

    @abstractmethod
    def _restored(self, image: _Image) -> _State:
        """The state that the image is a copy of."""

    @abstractmethod
    def _image(self, state: _State) -> _Image:
        """A copy of the state that can be encoded."""

    @abstractmethod
    def _decoded(self, payload: bytes) -> StateSnapshot[_Image]:
        """Decode the payload of a snapshot file."""

    @abstractmethod
    def _apply_value(self, state: _State, value: bytes) -> None:
        """Decode an event and apply it to the state."""

    def load(self) -> _State:
        """Return the state after all events. Closes the journal and raises CorruptData if it cannot be replayed."""
        try:
            state, self._snapshot_at = self._from_snapshot()
            if self._snapshot_at > self.log.written_end:
                # The journal lost events that the snapshot contains; new events would be below its position.
                self._snapshot_at = self.log.written_end
                self.snapshot(state)
            self._replay(state, self._snapshot_at)
            self.log.fold = partial(self._fold, state)
            self._replayed()
        except BaseException:
            self.log.close()
            raise
        return state

    def _replayed(self) -> None:
        """The state is complete: journal what replay has found elsewhere."""

    def _fold(self, state: _State, urgent: bool) -> bool:  # noqa: FBT001  a callback of the log
        """The disk is full: replace all events by a snapshot; returns whether that freed anything.

        The journal then begins again in the space that its events took. So acks continue for as long as there are
        messages, with no more space than a snapshot takes. The caller is about to append, so it holds the state's lock.
        """
        if self.log.written_end == self.log.start or not (urgent or self._is_worth_folding(state)):
            return False
        self._folding = True
        try:
            self.snapshot(state)
            self.log.roll()
            with self._keeping:
                freed = self._trim(self._snapshot_at)
            self._world.put_aside()
            with suppress(DiskFull):
                self.snapshot(state)  # so that there are two again
        except DiskFull:
            return False
        finally:
            self._folding = False
            self._world.put_aside()
        self.on_folded()
        return freed > 0

    def _is_worth_folding(self, state: _State) -> bool:
        """Whether the journal has grown, or little is left to write a snapshot with."""
        snapshot_bytes = len(_encode(StateSnapshot(self.log.written_end, self._image(state))))
        grown = sum(facts.bytes for facts in self.log.segments()) >= max(_WORTH_BYTES, snapshot_bytes)
        return grown or self._world.put_aside() < 2 * snapshot_bytes + _LITTLE_BYTES

    @property
    def events_since_snapshot(self) -> int:
        return self.log.written_end - self._snapshot_at

    def snapshot(self, state: _State) -> int:
        """Write a snapshot of the state after all events so far; returns the number of journal bytes freed."""
        return self.keep(StateSnapshot(self.log.written_end, self._image(state)))

    def keep(self, snapshot: StateSnapshot[_Image]) -> int:
        """Write a snapshot taken earlier, after syncing the journal; returns the number of journal bytes freed."""
        with self._keeping:
            return self._keep(snapshot)

    def _keep(self, snapshot: StateSnapshot[_Image]) -> int:
        if snapshot.position < self._snapshot_at:
            return 0  # another thread has written a later one meanwhile
        self.log.sync()
        self._files.keep(_encode(snapshot))
        self._before_at, self._snapshot_at = self._snapshot_at, snapshot.position
        return self._trim(self._before_at)

    def _trim(self, before: int) -> int:
        """Remove whole segments below `before`; returns the number of bytes freed."""
        return self.log.trim(before).bytes

    def close(self) -> None:
        self.log.close()

    def restore(self, state: _State) -> None:
        """Rebuild the state in place from the journal, after a call was interrupted at an unknown point."""
        self.log.sync()  # unsynced events cannot be read
        with self._keeping:
            fresh, at = self._from_snapshot()
            self._replay(fresh, at)
        vars(state).update(vars(fresh))
        self._replayed()

    def _from_snapshot(self) -> tuple[_State, int]:
        """The state of the newest intact snapshot and its position; without one, a new state and 0."""
        snapshot, _ = self._files.newest(self._decoded)
        return (self._new(), 0) if snapshot is None else (self._restored(snapshot.image), snapshot.position)

    def _replay(self, state: _State, at: int) -> None:
        """Apply the events from `at` to the end of the journal, skipping damaged ranges."""
        damaged = False
        if at < self.log.start:
            raise CorruptData(
                f"the journal in {self._folder} starts at event {self.log.start}, and no snapshot covers the events "
                f"before: restore {SNAPSHOT} from a backup, or remove the folder: then {self.without_it}"
            )
        while at < self.log.end:
            try:
                for record in self.log.records(at):
                    self._apply(state, bytes(record.value), lenient=damaged)
                    at = record.offset + 1
            except DamagedRange as damage:
                damaged = True
                at = damage.next_offset
                self.lost_events += damage.next_offset - damage.first_offset
                logger.error(
                    "journal damaged: %s",
                    self.damage_means,
                    extra={"folder": self._folder, "first": damage.first_offset, "next": damage.next_offset},
                )

    def _apply(self, state: _State, value: bytes, *, lenient: bool) -> None:
        try:
            self._apply_value(state, value)
        except IllegalMove as error:
            if not lenient:
                raise CorruptData(f"the journal in {self._folder} is wrong: {error}; run `holdfast check`") from error
            logger.warning("event skipped", extra={"folder": self._folder, "error": str(error)})
        except msgspec.DecodeError as error:
            raise CorruptData(
                f"the journal in {self._folder} has an unknown event: {error}; upgrade, or run `holdfast check` on it"
            ) from error


def log_settings(settings: LogSettings) -> LogSettings:
    """Settings of a journal: acks still work when there is no room for messages, and need no sync of their own."""
    return LogSettings(
        durability="interval",
        sync_interval_ms=settings.sync_interval_ms,
        segment_bytes=min(settings.segment_bytes, 16 * 1024 * 1024),
        min_free_bytes=0,
    )


class Snapshot(StateSnapshot[GroupImage], frozen=True, array_like=True):
    """A group after all events below `position` of its journal."""


_decode = msgspec.msgpack.Decoder(Snapshot).decode


class Journal(StateJournal[Group, GroupImage]):
    """The journal of a group on one partition."""

    damage_means = "some messages may be delivered again"
    without_it = "all messages that are still stored are delivered again"

    def __init__(self, world: World, folder: str, settings: LogSettings, start: int) -> None:
        super().__init__(world, folder, settings)
        self._start = start  # where a new group begins
        self.scratch = Scratch(world, self.log)
        self._noted = 0  # events in notes, since the last snapshot
        self.past = PastEvents(world, self.log)
        self.kept: Callable[[], tuple[int, int]] = lambda: (0, FAR)  # start and end of the message log

    @property
    def events_since_snapshot(self) -> int:
        return super().events_since_snapshot + self._noted

    def _keep(self, snapshot: StateSnapshot[GroupImage]) -> int:
        self.past.note_floor(snapshot.position, snapshot.image.floor)
        self._noted = 0
        return super()._keep(snapshot)

    def _trim(self, before: int) -> int:
        start, end = self.kept()
        # On a full disk, history would take the space that acks need.
        self.past.keep(before, end=end, pack=not self._folding)
        self.past.forget(start)
        return super()._trim(before)

    @staticmethod
    def open(world: World, folder: str, settings: LogSettings, start: int) -> tuple[Journal, Group]:
        """Open the journal in the folder and replay its group; a new group begins at `start`."""
        journal = Journal(world, folder, settings, start)
        group = journal.load()
        journal.scratch.erase()
        return journal, group

    def append(self, events: Sequence[Event], durability: Durability | None = None) -> Appended:
        """Write the events as one batch; pass the result to `log.wait`. Without events, that waits for earlier ones."""
        if not events:
            return Appended(self.log.written_end, self.log.written_end, self.log.chosen(durability))
        if self.scratch.is_noting:
            self.store_notes()
        self.scratch.interrupt()
        values = [encode_event(event) for event in events]
        one = self.log.write_single(values[0], durability) if len(values) == 1 else None
        return self.log.write(values, durability=durability) if one is None else one

    def lease_one(self, group: Group, offset: int, cursor: int, lease: Lease, now_ns: int) -> None:
        """Write the event of one lease that could not be noted; if that is worth it, the next ones can be."""
        scratch = self.scratch
        if scratch.is_noting:
            self.store_notes()
        passes = cursor == offset + 1
        steady = scratch.is_steady(lease) and (passes or cursor == group.cursor)
        if steady and self._begin_notes(group, lease, now_ns):
            if scratch.lease(offset, lease, passes):
                return
            scratch.end()  # it has no notes, and its first event is no longer the last one
        self._write(lease.event(offset, cursor), now_ns)

    def ack_one(self, group: Group, offset: int, lease: Lease, now_ns: int) -> None:
        """Write the event of one ack that could not be noted; if that is worth it, the next ones can be."""
        scratch = self.scratch
        if scratch.is_noting:
            self.store_notes()
        if scratch.is_steady(lease) and self._begin_notes(group, lease, now_ns):
            if scratch.ack(offset, now_ns // 1_000_000):
                return
            scratch.end()
        self._write(Acked((offset, offset + 1)), now_ns)

    def _begin_notes(self, group: Group, lease: Lease, now_ns: int) -> bool:
        """Begin a run of notes for leases like this one, and for acks; returns whether there can be one."""
        head = self.scratch.head(group, lease, now_ns // 1_000_000)
        if head is None or self._write(head, now_ns) != head.begun:
            return False
        self.scratch.begin(head)
        return True

    def _write(self, event: Event, now_ns: int) -> int:
        """Write one event; returns its position."""
        return self.log.write_one(encode_event(event), now_ns, False)

    def store_notes(self) -> None:
        """Write the notes of the current run into the journal. The caller holds the group's lock."""
        noted = self.scratch.end()
        if noted is not None:
            self.log.write_single(encode_event(noted), None)
            self.scratch.pending = None
            self._noted += len(noted.words) // 8

    def close(self) -> None:
        self.scratch.close()
        super().close()

    def _replay(self, state: Group, at: int) -> None:
        self._events, self._noted = GroupReplay(state, at), 0
        super()._replay(state, at)
        words = partial(scratch_words, self._world, self._folder)
        self.scratch.found(self._events.take_in(words, self.log.end))

    def _replayed(self) -> None:
        self.store_notes()

    def _new(self) -> Group:
        return Group(self._start)

    def _restored(self, image: GroupImage) -> Group:
        return group_of(image)

    def _image(self, state: Group) -> GroupImage:
        return image_of(state)

    def _decoded(self, payload: bytes) -> Snapshot:
        return _decode(payload)

    def _apply_value(self, state: Group, value: bytes) -> None:
        noted = self._events.apply(value)
        if noted is not None:
            self._noted += len(noted.words) // 8


def newest_snapshot(world: World, folder: str) -> tuple[Snapshot | None, str]:
    """Return the newest intact snapshot of a group and its file name, or (None, "")."""
    return SnapshotFiles(world, folder).newest(_decode)


# The floor of a group: it is done with every message below, so the log may be trimmed up to there.


# A backlog that nobody reads causes no events. Without a snapshot after this many messages, opening would have to scan
# the whole backlog for priorities.
_SCAN_MOST: Final = 500_000


class Floor:
    """What a group still needs of its partition's log and of its journal. Callers hold the delivery's lock."""

    def __init__(self, log: Log, journal: Journal, group: Group, name: str) -> None:
        self._log = log
        self._journal = journal
        self._group = group
        self._name = name
        self._mark = (0, 0)  # an end of the journal, and the floor at that point
        self._scanned_at = log.written_end
        self._skipped_to = 0
        journal.on_folded = self._pin_folded

    def pin(self) -> None:
        """Let the log be trimmed up to the floor, as far as the events that raised it are on disk.

        Beyond that point, a power cut could undo those events, and the group would need messages already removed.
        """
        marked_at, floor = self._mark
        if self._journal.log.synced_end >= marked_at:
            self._log.pin(self._journal.log.folder, floor)
            self._mark = (self._journal.log.written_end, self._group.floor)

    def _pin_folded(self) -> None:
        """Let the log be trimmed up to the current floor: all events are in a snapshot on disk."""
        for _ in range(2):  # the first call applies the previous mark, the second the current one
            self.pin()

    def hold(self) -> None:
        """Pin the log at the floor at once, after a seek has lowered it."""
        self._mark = (self._journal.log.written_end, self._group.floor)
        self._log.pin(self._journal.log.folder, self._group.floor)

    def snapshot(self) -> Snapshot:
        """A snapshot of the group as it is now."""
        return Snapshot(self._journal.log.written_end, image_of(self._group))

    def snapshot_if_due(self, after_events: int) -> Snapshot | None:
        """A snapshot if replay would take too long without one, else None."""
        group = self._group
        state = len(group.leases) + len(group.waiting) + len(group.histories)
        # A large state is written less often, or writing it would cost more than the replay it saves.
        many = self._journal.events_since_snapshot >= max(after_events, state)
        written = self._log.written_end
        if not many and written - self._scanned_at < _SCAN_MOST:
            return None
        group.lanes.scanned = self._scanned_at = written  # the group learns priorities as messages are written
        return self.snapshot()

    def skipped(self, *, forced: bool) -> Sequence[Event]:
        """The event that skips messages removed before the group was done with them; empty if there are none.

        `forced` says whether the retention settings allow that; otherwise it is logged as an error.
        """
        start, stop = self._group.floor, self._log.start
        if stop <= start or stop <= self._skipped_to:
            return ()
        self._skipped_to = stop
        count = stop - start - self._group.done.range_cardinality(start, stop)
        logger.log(
            logging.WARNING if forced else logging.ERROR,
            "%s %s that the group %s was not done with: offsets %d to %d of %s",
            "retention dropped" if forced else "somebody removed",
            count_of(count, "message"),
            self._name,
            start,
            stop - 1,
            self._log.folder,
            extra={
                "folder": self._log.folder,
                "group": self._name,
                "messages": count,
                "first_offset": start,
                "next_offset": stop,
            },
        )
        return [Skipped(stop)]
