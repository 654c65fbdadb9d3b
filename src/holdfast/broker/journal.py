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

This module has four parts: the snapshot files, the events that were trimmed from a group's journal (kept to answer
questions about single messages), the journal itself, and an index of which messages its events are about.
"""

from __future__ import annotations

import logging
import threading
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from struct import Struct
from typing import ClassVar, Final, Generic, NamedTuple, TypeVar

import msgspec

from holdfast.checksum import crc32c
from holdfast.codec.columns import plain_values
from holdfast.codec.frame import HEADER_BYTES, MAGIC, Codec, Frame, FrameHeader, Kind, frame_bytes
from holdfast.delivery.events import (
    Acked,
    Buried,
    BuriedReady,
    Cancelled,
    DeadStored,
    Event,
    Expired,
    Extended,
    Leased,
    Lost,
    Released,
    Returned,
    Saved,
    decode_event,
    encode_event,
)
from holdfast.delivery.group import FAR, Group, IllegalMove
from holdfast.delivery.image import GroupImage, group_of, image_of
from holdfast.env import World
from holdfast.errors import CorruptData, DamagedRange, DiskFull, HoldfastError, Unavailable
from holdfast.later import pattern
from holdfast.model import Appended, Durability
from holdfast.settings import LogSettings
from holdfast.storage.files import FULL_DISK, advice, durable_replace, join, read_file, segment_name, with_space
from holdfast.storage.frames import FrameRules, first_log_id, walk
from holdfast.storage.log import Log
from holdfast.storage.retention import SegmentFacts

# A snapshot file:
#
# at   size  field
# 0    4     magic    "HFS" and the version, 1
# 4    4     check    CRC32C of the rest
# 8    n     payload  MessagePack of a position in the journal, and the state after all events below it

logger = logging.getLogger(__name__)

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
            logger.error("snapshot damaged: going on from the one before", extra={"folder": self._folder, "file": name})
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


# Past events: segments trimmed from a group's journal, kept to show what happened to a message.
#
# Before a segment is trimmed, it is compressed as it is into one file, which is kept for as long as the log holds a
# message that it may be about. Its events are decoded only when a history is requested.
#
# The file name says what it contains, so that looking up one message opens few files:
#
#     <base>-<lowest>-<end>.past     events from `base` on, about messages from `lowest` up to, not including, `end`
#
# at   size  field
# 0    4     magic    "HFP" and the version, 1
# 4    4     check    CRC32C of the rest
# 8    n     payload  the segment's bytes, compressed with zlib


_NAME: Final = pattern(r"(\d{20})-(\d{20})-(\d{20})\.past")

_MAGIC_EVENTS: Final = b"HFP\x01"
_FAST: Final = 1  # zlib level: a journal is repetitive, so a higher one would save little
_MOST_RAW_BYTES: Final = LogSettings().max_raw_bytes


class Happened(NamedTuple):
    """An event, and the time at which it was journaled."""

    at_ns: int
    event: Event


class Past(NamedTuple):
    """One file: events from `base` on, about messages from `lowest` up to `end`."""

    base: int
    lowest: int
    end: int

    @property
    def name(self) -> str:
        return f"{self.base:020d}-{self.lowest:020d}-{self.end:020d}.past"


def is_past(name: str) -> bool:
    """Whether this is the name of a file of past events."""
    return _NAME.fullmatch(name) is not None


def damaged_pasts(world: World, folder: str) -> Iterator[str]:
    """Describe the damaged files of past events in a journal's folder."""
    for name in filter(is_past, world.disk.names(folder)):
        path = join(folder, name)
        try:
            content = read_file(world.disk, path)
            if content is not None:
                _unpack(content)
        except FileNotFoundError:
            continue  # removed by the owner meanwhile
        except (CorruptData, OSError) as error:
            yield f"{path} cannot be read: {error}; the history of some settled messages is lost, and nothing else"


class PastEvents:
    """The past events of one journal. `keep` and `forget` are called by one thread at a time."""

    def __init__(self, world: World, log: Log) -> None:
        self._world = world
        self._log = log
        self._extents = EventExtents(world, log)
        self._lock = threading.Lock()
        self._floors: list[tuple[int, int]] = []  # (position, floor): later events are about messages >= floor

    def note_floor(self, position: int, floor: int) -> None:
        """Note that all events from `position` on are about messages from `floor` on, unless a seek goes back."""
        with self._lock:
            self._floors.append((position, floor))

    def sought(self, to: int) -> None:
        """Note that a seek may deliver messages from `to` on again."""
        with self._lock:
            self._floors[:] = [(position, min(floor, to)) for position, floor in self._floors]

    def keep(self, before: int, *, end: int, pack: bool) -> None:
        """Compress the segments below `before`, if `pack`; `end` is the end of the message log.

        A failure is only logged: losing some history is better than letting the journal grow.
        """
        segments = self._log.segments()
        if not segments:
            return  # the journal was lost, and has no event yet
        going = [facts.base_offset for facts in segments[:-1] if facts.next_offset <= before]
        first_left = segments[len(going)].base_offset
        try:
            there = {past.base for past in self._files()} if going else set()
            for base in going:
                if pack and base not in there:
                    self._pack(Past(base, self._lowest(base), end))
        except (OSError, HoldfastError) as error:
            facts = {"folder": self._log.folder, "why": str(error)}
            logger.warning("what became of settled messages is forgotten", extra=facts)
        with self._lock:
            passed = sum(position <= first_left for position, _ in self._floors)
            del self._floors[: max(passed - 1, 0)]  # the last of them applies to the next segment

    def forget(self, start: int) -> None:
        """Remove the files that are only about messages below `start`, which the log has dropped."""
        with suppress(OSError):  # the next call tries again
            for past in self._files():
                if past.end <= start:
                    self._world.disk.remove(join(self._log.folder, past.name))

    def of(self, offset: int) -> Iterator[Happened]:
        """Events that may be about the message, oldest first: the past ones, then those still in the journal."""
        journal_start = self._log.start
        for past in self._files():
            if past.base < journal_start and past.lowest <= offset < past.end:
                yield from self._unpacked(past)
        self._log.sync()  # unsynced events cannot be read
        for start, end in self._extents.of(offset):
            for record in self._log.records(max(start, self._log.start), on_damage="skip"):
                if record.offset >= end:
                    break
                yield Happened(record.timestamp_ns, decode_event(bytes(record.value)))

    def _lowest(self, base: int) -> int:
        with self._lock:
            return max((floor for position, floor in self._floors if position <= base), default=0)

    def _files(self) -> list[Past]:
        found = map(_NAME.fullmatch, self._world.disk.names(self._log.folder))
        return sorted(Past(*map(int, match.groups())) for match in found if match)

    def _pack(self, past: Past) -> None:
        content = read_file(self._world.disk, join(self._log.folder, segment_name(past.base)))
        if content is not None:
            payload = zlib.compress(content, _FAST)
            durable_replace(
                self._world.disk, self._log.folder, past.name, _HEADER.pack(_MAGIC_EVENTS, crc32c(payload)) + payload
            )

    def _unpacked(self, past: Past) -> Iterator[Happened]:
        """The events of a file; none if it is damaged."""
        try:
            data = memoryview(_unpack(read_file(self._world.disk, join(self._log.folder, past.name)) or b""))
        except (CorruptData, OSError) as error:
            logger.warning("past events cannot be read", extra={"file": past.name, "why": str(error)})
            return
        for found in walk(data, FrameRules(first_log_id(data) or 0, past.base)):
            if isinstance(found, FrameHeader):
                start = found.position + HEADER_BYTES
                frame = Frame(found, data[start : start + found.body_bytes], max_raw_bytes=_MOST_RAW_BYTES)
                for record in frame.records():
                    yield Happened(record.timestamp_ns, decode_event(bytes(record.value)))


def _unpack(content: bytes) -> bytes:
    if len(content) < _HEADER.size:
        raise CorruptData("the file has no header")
    magic, crc = _HEADER.unpack_from(content)
    payload = memoryview(content)[_HEADER.size :]
    if magic != _MAGIC_EVENTS or crc != crc32c(payload):
        raise CorruptData("its bytes are not those that were written")
    try:
        return zlib.decompress(payload)
    except zlib.error as error:
        raise CorruptData(str(error)) from None


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
        except BaseException:
            self.log.close()
            raise
        self.log.fold = partial(self._fold, state)
        return state

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
    without_it = "all messages that are still kept come again"

    def __init__(self, world: World, folder: str, settings: LogSettings, start: int) -> None:
        super().__init__(world, folder, settings)
        self._start = start  # where a new group begins
        self.past = PastEvents(world, self.log)
        self.kept: Callable[[], tuple[int, int]] = lambda: (0, FAR)  # start and end of the message log

    def _keep(self, snapshot: StateSnapshot[GroupImage]) -> int:
        self.past.note_floor(snapshot.position, snapshot.image.floor)
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
        return journal, journal.load()

    def append(self, events: Sequence[Event], durability: Durability | None = None) -> Appended:
        """Write the events as one batch; pass the result to `log.wait`."""
        values = [encode_event(event) for event in events]
        one = self.log.write_single(values[0], durability) if len(values) == 1 else None
        return self.log.write(values, durability=durability) if one is None else one

    def _new(self) -> Group:
        return Group(self._start)

    def _restored(self, image: GroupImage) -> Group:
        return group_of(image)

    def _image(self, state: Group) -> GroupImage:
        return image_of(state)

    def _decoded(self, payload: bytes) -> Snapshot:
        return _decode(payload)

    def _apply_value(self, state: Group, value: bytes) -> None:
        state.apply(decode_event(value))


def newest_snapshot(world: World, folder: str) -> tuple[Snapshot | None, str]:
    """Return the newest intact snapshot of a group and its file name, or (None, "")."""
    return SnapshotFiles(world, folder).newest(_decode)


# Which messages the events of a journal are about, so that a lookup of one message reads few events.
#
# A journal may hold a hundred thousand events, and reading all of them takes seconds. So the lowest and highest message
# are noted for each stretch of some hundred events: in memory, on the first lookup, extended by later ones. Publishing,
# receiving and acking do no work for this.
#
# The index is a hint. Building it checks no checksums, but events are always read from the log with all checks. If a
# frame looks wrong, its stretch counts as being about every message.


_STRETCH_EVENTS: Final = 500
# Of a frame's header: magic, log_id, body_bytes, raw_bytes, count, kind, codec, columns, base_offset.
_HEADER_EXTENTS: Final = Struct("<4sI4xIIIBB2xIQ")
_ENDS_OF_ONE: Final = 8  # bytes before the value in a body that holds only one
_ANY: Final = (0, FAR)
_OF_RUNS: Final = (Leased, Acked, Released, Extended, DeadStored, Expired, Cancelled, Lost, BuriedReady)
_OF_ONE: Final = (Returned, Saved, Buried)


class EventExtent(NamedTuple):
    """Events from `start` up to `end`, about messages from `lowest` up to, not including, `highest`."""

    start: int
    end: int
    lowest: int
    highest: int


class EventExtents:
    """The stretches of one journal. Thread-safe."""

    def __init__(self, world: World, log: Log) -> None:
        self._disk = world.disk
        self._log = log
        self._lock = threading.Lock()
        self._stretches: list[EventExtent] = []
        self._base, self._position = 0, 0  # segment and position of the end of the last stretch; -1: unknown

    def of(self, offset: int) -> list[tuple[int, int]]:
        """Ranges of events that may be about a message, oldest first; covers all events that can be read."""
        with self._lock:
            self._extend()
            found: list[tuple[int, int]] = []
            for start, end, lowest, highest in self._stretches:
                if lowest <= offset < highest:
                    if found and found[-1][1] == start:
                        start = found.pop()[0]
                    found.append((start, end))
            return found

    def _extend(self) -> None:
        """Index the events added since the last call."""
        start, end = self._log.start, self._log.end
        self._stretches = [stretch for stretch in self._stretches if stretch.end > start]
        for segment in self._log.segments():
            at = self._stretches[-1].end if self._stretches else start
            stop = min(segment.next_offset, end)
            if at < stop:
                self._look_at(segment, at, stop)

    def _look_at(self, segment: SegmentFacts, at: int, stop: int) -> None:
        """Index the events of a segment from `at` up to `stop`."""
        if segment.base_offset != self._base or not self._stretches:
            self._base, self._position = segment.base_offset, 0 if at == segment.base_offset else -1
        if self._position >= 0:
            file = self._disk.open(join(self._log.folder, segment_name(self._base)))
            data = file.view(0, file.size())  # stays valid after the file is closed
            file.close()
            for stretch, position in self._quick_look(data, at, stop):
                self._add(stretch)
                at, self._position = stretch.end, position
        if at < stop:
            self._position = -1
            self._add(EventExtent(at, stop, *_ANY))

    def _quick_look(self, data: memoryview, at: int, stop: int) -> Iterator[tuple[EventExtent, int]]:
        """Stretches and the position at which each ends; stops at the first frame that looks wrong."""
        position, log_id, unpack_from = self._position, self._log.log_id, _HEADER_EXTENTS.unpack_from
        start, lowest, highest = at, FAR, 0
        while at < stop and position + HEADER_BYTES <= len(data):
            magic, of_log, body_bytes, raw_bytes, count, kind, codec, columns, first = unpack_from(data, position)
            end = position + frame_bytes(body_bytes)
            if magic != MAGIC or of_log != log_id or first != at or not count or end > len(data):
                break
            plain = kind < Kind.GAP and codec == Codec.NONE and not columns and raw_bytes == body_bytes
            body_at = position + HEADER_BYTES
            low, high = _extent(data[body_at : body_at + body_bytes], count) if plain else _ANY
            if low < lowest:
                lowest = low
            if high > highest:
                highest = high
            position, at = end, at + count
            if at - start >= _STRETCH_EVENTS:
                yield EventExtent(start, at, lowest, highest), position
                start, lowest, highest = at, FAR, 0
        if at > start:
            yield EventExtent(start, at, lowest, highest), position

    def _add(self, stretch: EventExtent) -> None:
        last = self._stretches[-1] if self._stretches else None
        if last is not None and last.end == stretch.start and last.end - last.start < _STRETCH_EVENTS:
            lowest, highest = min(last.lowest, stretch.lowest), max(last.highest, stretch.highest)
            self._stretches[-1] = EventExtent(last.start, stretch.end, lowest, highest)
        else:
            self._stretches.append(stretch)


def _extent(body: memoryview, count: int) -> tuple[int, int]:
    """The range of messages that the events in a frame's body are about."""
    try:
        if count == 1:  # nearly all of them, where messages are acked one by one
            return _about(decode_event(body[_ENDS_OF_ONE:]))
        extents = [_about(decode_event(value)) for value in plain_values(body, count)]
    except (CorruptData, msgspec.MsgspecError):
        return _ANY
    return min(extents)[0], max([highest for _, highest in extents])


def _about(event: Event) -> tuple[int, int]:
    if isinstance(event, _OF_RUNS):
        runs = event.runs
        return (runs[0], runs[1]) if len(runs) == 2 else (min(runs, default=FAR), max(runs, default=0))
    return (event.offset, event.offset + 1) if isinstance(event, _OF_ONE) else _ANY
