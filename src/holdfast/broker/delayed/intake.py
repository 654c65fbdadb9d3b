"""The intake: a log into which delayed messages go in order of arrival, and the notes of those cancelled.

A message is a data record with its due time; a cancellation is a control record of nine bytes: what it is
(1: cancelled) and the id, as an unsigned 64-bit number.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from struct import Struct
from typing import Final

import msgspec
from pyroaring import BitMap64

from holdfast.broker.delayed.timers import Timers
from holdfast.codec.frame import Frame, Kind
from holdfast.env import World
from holdfast.errors import CorruptData, DamagedRange
from holdfast.model import Appended, Record
from holdfast.settings import LogSettings
from holdfast.storage.log import Log

logger = logging.getLogger(__name__)

_NOTE: Final = Struct("<BQ")
_CANCELLED: Final = 1

# What is kept in memory of messages that are wanted soon.
_NEAR_BYTES: Final = 32 << 20
_RECORD_BYTES: Final = 400  # what a message takes in memory besides its own bytes, about

# A message that is due is read alone, out of the order in which it came: small frames make that cheap.
_FRAME_BYTES: Final = 16 * 1024


class Intake:
    """The log and what is known of its messages, which the lock of the store's state guards."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.present = BitMap64()  # ids that wait here, or did: all data records from the spilled ones on
        self.unreadable = BitMap64()  # those of them that are damaged
        self._near: dict[int, Record] = {}
        self._near_bytes = 0

    @staticmethod
    def open(world: World, folder: str, settings: LogSettings) -> Intake:
        """Only the store decides what leaves the intake: no retention, no rolling by age."""
        changed = msgspec.structs.replace(
            settings,
            frame_bytes=min(settings.frame_bytes, _FRAME_BYTES),
            segment_messages=None,
            segment_ms=None,
            retention_ms=None,
            retention_bytes=None,
            retention_segments=None,
            retention_done_bytes=None,
        )
        return Intake(Log.open(folder, changed, world))

    def load(self, floor: int, timers: Timers, settled: BitMap64) -> BitMap64:
        """Take in what came since the last spill; answers with the ids that were cancelled."""
        cancelled = BitMap64()
        log = self.log
        for frame in log.read(max(floor, log.start), on_damage="skip"):
            if frame.header.kind == Kind.CONTROL:
                cancelled.update(cancelled_ids(frame))
            elif frame.header.kind == Kind.DATA:
                for message_id, due_at_ms in enumerate(frame.columns().due_at_ms() or (), frame.base_offset):
                    if message_id >= floor and message_id not in settled:
                        timers.add_one(due_at_ms, message_id)
                self.present.add_range(max(floor, frame.base_offset), frame.next_offset)
        return cancelled

    def write_cancelled(self, message_id: int) -> Appended:
        """Note that the message is cancelled; durable when the caller has waited for it."""
        return self.log.write([_NOTE.pack(_CANCELLED, message_id)], durability="fsync", kind=Kind.CONTROL)

    def data_frames(self, start: int, end: int) -> Iterator[Frame]:
        """Frames with messages from `start` on, as far as `end`; damaged ones are noted and passed over."""
        start = max(start, self.log.start)
        while start < end:
            try:
                for frame in self.log.read(start):
                    start = frame.next_offset
                    if frame.base_offset >= end:
                        return
                    if frame.header.kind == Kind.DATA:
                        yield frame
                return
            except DamagedRange as damaged:
                self._note_damage(damaged.first_offset, damaged.next_offset, damaged)
                start = damaged.next_offset

    def fetch(self, ids: Sequence[int], wanted_soon: Callable[[Record], bool] | None = None) -> dict[int, Record]:
        """The messages of these ids, which rise; those that are damaged are left out, and noted.

        What else is in their frames and wanted soon is kept in memory: frames hold messages in the order in which
        they came, and each would be read and unpacked again for almost every message in it.
        """
        near = self._near
        found = {message_id: near[message_id] for message_id in ids if message_id in near}
        if len(found) < len(ids):
            found |= self._read([message_id for message_id in ids if message_id not in found], wanted_soon)
        return found

    def let_go(self, ids: Iterable[int]) -> None:
        """These do not wait here any more."""
        for message_id in ids:
            record = self._near.pop(message_id, None)
            if record is not None:
                self._near_bytes -= len(record.value) + _RECORD_BYTES

    def let_go_of_all(self) -> None:
        """Nothing of what was kept in memory waits here any more."""
        self._near, self._near_bytes = {}, 0

    def _keep(self, rows: Sequence[Record], wanted_soon: Callable[[Record], bool]) -> None:
        for record in rows:
            if self._near_bytes > _NEAR_BYTES:
                return
            if record.offset not in self._near and wanted_soon(record):
                self._near[record.offset] = record
                self._near_bytes += len(record.value) + _RECORD_BYTES

    def _read(self, ids: Sequence[int], wanted_soon: Callable[[Record], bool] | None) -> dict[int, Record]:
        found: dict[int, Record] = {}
        frames: Iterator[Frame] | None = None
        rows: list[Record] = []
        base = end = -1
        for message_id in ids:
            if not base <= message_id < end:
                if frames is None or message_id != end:
                    frames = self.log.read(message_id)
                try:
                    frame = next(frames)
                    rows = list(frame.records())
                except CorruptData as error:
                    next_offset = error.next_offset if isinstance(error, DamagedRange) else message_id + 1
                    self._note_damage(message_id, next_offset, error)
                    frames, base, end = None, -1, -1
                    continue
                base, end = frame.base_offset, frame.next_offset
                if wanted_soon is not None and not frame.is_large:
                    self._keep(rows, wanted_soon)
            found[message_id] = rows[message_id - base]
        return found

    def _note_damage(self, first: int, next_offset: int, error: CorruptData) -> None:
        if first not in self.unreadable:
            logger.error(
                "delayed messages cannot be read; their file is kept",
                extra={"folder": self.log.folder, "first_id": first, "next_id": next_offset, "why": str(error)},
            )
        self.unreadable.add_range(first, max(next_offset, first + 1))
        # What a person may still want to look at is not trimmed away.
        self.log.pin("damaged", self.unreadable.min())


def cancelled_ids(frame: Frame) -> list[int]:
    """The messages that a control frame says were cancelled."""
    notes = [_NOTE.unpack(value) for value in frame.values() if len(value) == _NOTE.size]
    return [message_id for what, message_id in notes if what == _CANCELLED]
