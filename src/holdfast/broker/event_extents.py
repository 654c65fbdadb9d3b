"""Which messages the events of a journal are about: so that a look for one message reads few of them.

A journal that was not trimmed yet may hold a hundred thousand events, and to read all of them takes seconds. So the
lowest and the highest message are noted for each stretch of some hundred events: in memory, when somebody first asks,
and then for what was added since. Whoever gets, acks or puts does nothing for it.

What is noted is a hint. The quick look that makes it checks no checksum; whoever follows it reads the events in the
usual way, with all checks. Where a frame is not as expected, its stretch counts as being about every message.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from struct import Struct
from typing import Final, NamedTuple

import msgspec

from holdfast.codec.columns import plain_values
from holdfast.codec.compression import Codec
from holdfast.codec.frame import HEADER_BYTES, MAGIC, Kind, frame_bytes
from holdfast.delivery.events import (
    Acked,
    Buried,
    BuriedReady,
    Cancelled,
    Event,
    Expired,
    Extended,
    Interred,
    Leased,
    Lost,
    Released,
    Returned,
    Saved,
    decode_event,
)
from holdfast.delivery.group import FAR
from holdfast.env import World
from holdfast.errors import CorruptData
from holdfast.storage.files import join, segment_name
from holdfast.storage.log import Log
from holdfast.storage.retention import SegmentFacts

_STRETCH_EVENTS: Final = 500
# Of a frame's header: magic, log_id, body_bytes, raw_bytes, count, kind, codec, columns, base_offset.
_HEADER: Final = Struct("<4sI4xIIIBB2xIQ")
_ANY: Final = (0, FAR)
_OF_RUNS: Final = (Leased, Acked, Released, Extended, Interred, Expired, Cancelled, Lost, BuriedReady)
_OF_ONE: Final = (Returned, Saved, Buried)


class Stretch(NamedTuple):
    """Events from `start` up to `end`, about messages from `lowest` up to, not including, `highest`."""

    start: int
    end: int
    lowest: int
    highest: int


class EventExtents:
    """The stretches of one journal. Safe to use from any thread."""

    def __init__(self, world: World, log: Log) -> None:
        self._disk = world.disk
        self._log = log
        self._lock = threading.Lock()
        self._stretches: list[Stretch] = []
        self._base, self._position = 0, 0  # the segment and the place in it behind the last stretch; -1: not known

    def of(self, offset: int) -> list[tuple[int, int]]:
        """From where to where there may be events about a message, oldest first; all that can be read are known."""
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
        """Look at what came since the last time."""
        start, end = self._log.start, self._log.end
        self._stretches = [stretch for stretch in self._stretches if stretch.end > start]
        for segment in self._log.segments():
            at = self._stretches[-1].end if self._stretches else start
            stop = min(segment.next_offset, end)
            if at < stop:
                self._look_at(segment, at, stop)

    def _look_at(self, segment: SegmentFacts, at: int, stop: int) -> None:
        """Note what the events of a segment are about, from `at` up to `stop`."""
        if segment.base_offset != self._base or not self._stretches:
            self._base, self._position = segment.base_offset, 0 if at == segment.base_offset else -1
        if self._position >= 0:
            file = self._disk.open(join(self._log.folder, segment_name(self._base)))
            data = file.view(0, file.size())  # valid for as long as we hold it
            file.close()
            for stretch, position in self._quick_look(data, at, stop):
                self._add(stretch)
                at, self._position = stretch.end, position
        if at < stop:
            self._position = -1
            self._add(Stretch(at, stop, *_ANY))

    def _quick_look(self, data: memoryview, at: int, stop: int) -> Iterator[tuple[Stretch, int]]:
        """Stretches, as long as frames are as expected, and where in the segment each of them ends."""
        position, log_id, unpack_from = self._position, self._log.log_id, _HEADER.unpack_from
        start, lowest, highest = at, FAR, 0
        while at < stop and position + HEADER_BYTES <= len(data):
            magic, of_log, body_bytes, raw_bytes, count, kind, codec, columns, first = unpack_from(data, position)
            end = position + frame_bytes(body_bytes)
            if magic != MAGIC or of_log != log_id or first != at or not count or end > len(data):
                break
            plain = kind < Kind.GAP and codec == Codec.NONE and not columns and raw_bytes == body_bytes
            body_at = position + HEADER_BYTES
            low, high = _extent(data[body_at : body_at + body_bytes], count) if plain else _ANY
            lowest, highest = min(lowest, low), max(highest, high)
            position, at = end, at + count
            if at - start >= _STRETCH_EVENTS:
                yield Stretch(start, at, lowest, highest), position
                start, lowest, highest = at, FAR, 0
        if at > start:
            yield Stretch(start, at, lowest, highest), position

    def _add(self, stretch: Stretch) -> None:
        last = self._stretches[-1] if self._stretches else None
        if last is not None and last.end == stretch.start and last.end - last.start < _STRETCH_EVENTS:
            lowest, highest = min(last.lowest, stretch.lowest), max(last.highest, stretch.highest)
            self._stretches[-1] = Stretch(last.start, stretch.end, lowest, highest)
        else:
            self._stretches.append(stretch)


def _extent(body: memoryview, count: int) -> tuple[int, int]:
    """What the events in the body of a frame are about."""
    try:
        values = plain_values(body, count)
        if count == 1:
            return _about(decode_event(values[0]))
        extents = [_about(decode_event(value)) for value in values]
    except (CorruptData, msgspec.MsgspecError):
        return _ANY
    return min(extents)[0], max([highest for _, highest in extents])


def _about(event: Event) -> tuple[int, int]:
    if isinstance(event, _OF_RUNS):
        return min(event.runs, default=FAR), max(event.runs, default=0)
    return (event.offset, event.offset + 1) if isinstance(event, _OF_ONE) else _ANY
