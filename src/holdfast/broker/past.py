"""Past events: segments trimmed from a group's journal, kept to show what happened to a message.

Before a segment is trimmed, it is compressed as it is into one file, which is kept for as long as the log holds a
message that it may be about. Its events are decoded only when a history is requested.

The file name says what it contains, so that looking up one message opens few files:

    <base>-<lowest>-<end>.past     events from `base` on, about messages from `lowest` up to, not including, `end`

    at   size  field
    0    4     magic    "HFP" and the version, 1
    4    4     check    CRC32C of the rest
    8    n     payload  the segment's bytes, compressed with zlib
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator
from contextlib import suppress
from struct import Struct
from typing import Final, NamedTuple

import msgspec

from holdfast.checksum import crc32c
from holdfast.codec.columns import plain_values
from holdfast.codec.frame import HEADER_BYTES, MAGIC, Codec, FrameHeader, Kind, frame_at, frame_bytes
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
    Noted,
    Released,
    Returned,
    Saved,
    decode_event,
)
from holdfast.delivery.group import FAR
from holdfast.env import World
from holdfast.env.process import get_logger
from holdfast.errors import CorruptData, HoldfastError
from holdfast.later import pattern
from holdfast.model import Record
from holdfast.settings import LogSettings
from holdfast.storage.files import durable_replace, join, read_file, segment_name
from holdfast.storage.frames import FrameRules, first_log_id, walk
from holdfast.storage.log import Log
from holdfast.storage.retention import SegmentFacts

logger = get_logger(__name__)

_HEADER: Final = Struct("<4sI")
assert _HEADER.size == 8  # keeps the table above and the code in step
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
            logger.warning("history of settled messages dropped", extra=facts)
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
                yield from self._unpacked(past, offset)
        for start, end in self._extents.of(offset):
            for record in self._log.records(max(start, self._log.start), on_damage="skip"):
                if record.offset >= end:
                    break
                yield from _happened(record, offset)

    def _lowest(self, base: int) -> int:
        with self._lock:
            return max((floor for position, floor in self._floors if position <= base), default=0)

    def _files(self) -> list[Past]:
        names = [name for name in self._world.disk.names(self._log.folder) if name.endswith(".past")]
        return sorted(Past(*map(int, match.groups())) for match in map(_NAME.fullmatch, names) if match)

    def _pack(self, past: Past) -> None:
        content = read_file(self._world.disk, join(self._log.folder, segment_name(past.base)))
        if content is not None:
            payload = zlib.compress(content, _FAST)
            durable_replace(
                self._world.disk, self._log.folder, past.name, _HEADER.pack(_MAGIC_EVENTS, crc32c(payload)) + payload
            )

    def _unpacked(self, past: Past, offset: int) -> Iterator[Happened]:
        """The events of a file that may be about the message; none if it is damaged."""
        try:
            data = memoryview(_unpack(read_file(self._world.disk, join(self._log.folder, past.name)) or b""))
        except (CorruptData, OSError) as error:
            logger.warning("past events cannot be read", extra={"file": past.name, "why": str(error)})
            return
        for found in walk(data, FrameRules(first_log_id(data) or 0, past.base)):
            if isinstance(found, FrameHeader):
                frame = frame_at(data, found.position, found, max_raw_bytes=_MOST_RAW_BYTES)
                for record in frame.records():
                    yield from _happened(record, offset)


def _happened(record: Record, offset: int) -> Iterator[Happened]:
    """The event of a record; of notes, those about the message."""
    event = decode_event(bytes(record.value))
    if type(event) is not Noted:
        yield Happened(record.timestamp_ns, event)
        return
    lowest, highest = event.places()
    if lowest <= offset < highest:
        for at_ms, noted in event.events():
            if noted.runs[0] == offset:
                yield Happened(at_ms * 1_000_000, noted)


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
    if type(event) is Noted:
        return event.places()
    if isinstance(event, _OF_RUNS):
        runs = event.runs
        return (runs[0], runs[1]) if len(runs) == 2 else (min(runs, default=FAR), max(runs, default=0))
    return (event.offset, event.offset + 1) if isinstance(event, _OF_ONE) else _ANY
