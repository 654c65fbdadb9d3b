"""The intake: a log that takes delayed messages in order of arrival, and records cancellations.

A message is a data record with its due time. A cancellation is a control record of nine bytes: its type
(1: cancelled) and the id, as an unsigned 64-bit number.
"""

from __future__ import annotations

import logging
from array import array
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from struct import Struct
from typing import Final

import msgspec
from pyroaring import BitMap64

from holdfast.codec.frame import Frame, Kind
from holdfast.env import World
from holdfast.errors import CorruptData, DamagedRange
from holdfast.model import Appended, Record
from holdfast.settings import LogSettings
from holdfast.storage.log import Log

# Timers: which ids are due when. Near ones are kept in order, the rest in buckets that get wider with distance.
#
# An entry takes 16 bytes of an array, due time and id, until its bucket comes near. Then the bucket is split into
# narrower ones, and finally into a list that is sorted to the millisecond.


_TENTH_MS: Final = 100
SECOND_MS: Final = 1000
_MINUTE_MS: Final = 60 * SECOND_MS
HOUR_MS: Final = 60 * _MINUTE_MS
DAY_MS: Final = 24 * HOUR_MS
MONTH_MS: Final = 30 * DAY_MS
SOON_MS: Final = 10 * SECOND_MS  # messages due within this time are not worth a spill

# (minimum distance, width of a bucket): the first that applies is used.
_WIDTHS: Final = (
    (60 * DAY_MS, MONTH_MS),
    (3 * DAY_MS, DAY_MS),
    (2 * HOUR_MS, HOUR_MS),
    (2 * _MINUTE_MS, _MINUTE_MS),
    (SOON_MS, SECOND_MS),
    (0, _TENTH_MS),  # sorted at once: few enough, whatever the rate of arrival
)

_SHED: Final = 1024
_DROP_MOST: Final = 4096  # entries examined in one step


class _Bucket:
    """The entries of a period of time, unsorted, and the earliest of them."""

    __slots__ = ("entries", "first")

    def __init__(self) -> None:
        self.entries = array("q")  # due, id, due, id, ...
        self.first: tuple[int, int] | None = None

    def add(self, due_at_ms: int, message_id: int) -> None:
        self.entries.append(due_at_ms)
        self.entries.append(message_id)
        if self.first is None or due_at_ms < self.first[0]:
            self.first = (due_at_ms, message_id)

    def pairs(self) -> Iterator[tuple[int, int]]:
        return zip(self.entries[::2], self.entries[1::2], strict=True)


class DelayedTimers:
    """Due times and their ids. Everything due before the edge is in the sorted front."""

    def __init__(self) -> None:
        self._edge_ms = 0
        self._front: list[tuple[int, int]] = []
        self._head = 0  # entries of the front before this index are done
        self._buckets: dict[tuple[int, int], _Bucket] = {}
        self._starts: list[tuple[int, int]] = []  # a heap of the buckets' keys: start, width

    def add(self, dues_ms: Sequence[int], first_id: int) -> None:
        """Add messages with consecutive ids."""
        self.add_pairs(zip(dues_ms, range(first_id, first_id + len(dues_ms)), strict=True))

    def add_pairs(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Add due times and ids."""
        edge_ms, buckets = self._edge_ms, self._buckets
        soon_ms = edge_ms + SOON_MS
        for due_at_ms, message_id in pairs:
            if due_at_ms < edge_ms:
                insort(self._front, (due_at_ms, message_id), lo=self._head)
                continue
            if due_at_ms < soon_ms:  # most of them, where many arrive
                key = (due_at_ms - due_at_ms % _TENTH_MS, _TENTH_MS)
            else:
                width_ms = next(width for least, width in _WIDTHS if due_at_ms - edge_ms >= least)
                # Never before the edge, or a bucket that was just split would be split again.
                key = (max(due_at_ms - due_at_ms % width_ms, edge_ms), width_ms)
            bucket = buckets.get(key)
            if bucket is None:
                bucket = buckets[key] = _Bucket()
                heappush(self._starts, key)
            bucket.add(due_at_ms, message_id)

    def advance(self, now_ms: int) -> None:
        """Move everything due by now, and soon after, to the front. A clock that is set back changes nothing."""
        edge_ms = now_ms - now_ms % _TENTH_MS + _TENTH_MS
        if edge_ms <= self._edge_ms:
            return
        self._edge_ms = edge_ms
        near: list[tuple[int, int]] = []
        while self._starts and self._starts[0][0] < edge_ms:
            key = heappop(self._starts)
            bucket = self._buckets.pop(key)
            if sum(key) <= edge_ms:
                near += bucket.pairs()
            else:
                near += [pair for pair in bucket.pairs() if pair[0] < edge_ms]
                self.add_pairs(pair for pair in bucket.pairs() if pair[0] >= edge_ms)
        if near:
            self._front = sorted(self._front[self._head :] + near)
            self._head = 0

    def near(self, until_ms: int) -> Iterator[tuple[int, int]]:
        """Yield what is due by then, in order. Call `advance` for that time first."""
        front = self._front
        for i in range(self._head, len(front)):
            if front[i][0] > until_ms:
                return
            yield front[i]

    def shed(self, done: Callable[[int], bool]) -> None:
        """Drop the leading entries that are done."""
        front, head = self._front, self._head
        while head < len(front) and done(front[head][1]):
            head += 1
        if head > _SHED and head * 2 > len(front):
            del front[:head]
            head = 0
        self._head = head

    def count_near(self, until_ms: int) -> int:
        """Approximate number of entries due by then."""
        near = [bucket for (start_ms, width_ms), bucket in self._buckets.items() if start_ms + width_ms <= until_ms]
        return len(self._front) - self._head + sum(len(bucket.entries) // 2 for bucket in near)

    def first(self, done: Callable[[int], bool]) -> tuple[int, int] | None:
        """Return the first entry that is not done."""
        self.shed(done)
        best = self._front[self._head] if self._head < len(self._front) else None
        for key, bucket in self._buckets.items():
            if best is not None and key[0] > best[0]:
                continue
            if bucket.first is not None and done(bucket.first[1]):
                bucket.first = min((pair for pair in bucket.pairs() if not done(pair[1])), default=None)
            if bucket.first is not None and (best is None or bucket.first < best):
                best = bucket.first
        return best

    def ordered(self, after: tuple[int, int] | None = None) -> list[tuple[int, int]]:
        """Return a copy of all entries after this one, in order."""
        entries = self._front[self._head :]
        for bucket in self._buckets.values():
            entries += bucket.pairs()
        entries.sort()
        return entries if after is None else entries[bisect_right(entries, after) :]

    def dropping_below(self, message_id: int) -> Iterator[None]:
        """Forget all smaller ids, which were spilled, a few at each step. Entries may come and go between two steps."""
        self._front = [entry for entry in self._front[self._head :] if entry[1] >= message_id]
        self._head = 0
        yield
        for key, bucket in list(self._buckets.items()):
            kept = _Bucket()
            seen = 0
            while self._buckets.get(key) is bucket:  # it may have been split in the meantime
                if seen >= len(bucket.entries):
                    self._buckets[key] = kept
                    break
                step = bucket.entries[seen : seen + 2 * _DROP_MOST]
                seen += len(step)
                for due_at_ms, kept_id in zip(step[::2], step[1::2], strict=True):
                    if kept_id >= message_id:
                        kept.add(due_at_ms, kept_id)
                yield


logger = logging.getLogger(__name__)

_NOTE: Final = Struct("<BQ")
_CANCELLED: Final = 1

# Memory for decoded messages that are due soon.
_NEAR_BYTES: Final = 32 << 20
_RECORD_BYTES: Final = 400  # approximate memory per message besides its own bytes

# Due messages are read one by one, not in order of arrival: small frames make that cheap.
_FRAME_BYTES: Final = 16 * 1024


class DelayedIntake:
    """The log, and what is known about its messages. The lock of the store's state guards it."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.present = BitMap64()  # ids of all data records that are not spilled, whether they still wait or not
        self.unreadable = BitMap64()  # ids in `present` that are damaged
        self._near: dict[int, Record] = {}  # decoded messages that are due soon, by id
        self._near_bytes = 0
        self._near_ms = SOON_MS  # how soon: as long as fits in memory

    @staticmethod
    def open(world: World, folder: str, settings: LogSettings) -> DelayedIntake:
        """Open the log without retention or rolling by age: only the store decides what leaves the intake."""
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
        return DelayedIntake(Log.open(folder, changed, world))

    def load(self, floor: int, timers: DelayedTimers, settled: BitMap64) -> BitMap64:
        """Load what arrived since the last spill, and return the ids that were cancelled."""
        cancelled = BitMap64()
        log = self.log
        for frame in log.read(max(floor, log.start), on_damage="skip"):
            if frame.header.kind == Kind.CONTROL:
                cancelled.update(cancelled_ids(frame))
            elif frame.header.kind == Kind.DATA:
                timers.add_pairs(
                    (due_at_ms, message_id)
                    for message_id, due_at_ms in enumerate(frame.columns().due_at_ms() or (), frame.base_offset)
                    if message_id >= floor and message_id not in settled
                )
                self.present.add_range(max(floor, frame.base_offset), frame.next_offset)
        return cancelled

    def write_cancelled(self, message_id: int) -> Appended:
        """Record that the message is cancelled; durable once the caller has waited for it."""
        return self.log.write([_NOTE.pack(_CANCELLED, message_id)], durability="fsync", kind=Kind.CONTROL)

    def data_frames(self, start: int, end: int) -> Iterator[Frame]:
        """Yield the frames with messages of [start, end); damaged ones are noted and skipped."""
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

    def fetch(self, ids: Sequence[int]) -> dict[int, Record]:
        """Return the messages of these ascending ids; damaged ones are noted and left out."""
        near = self._near
        found = {message_id: near[message_id] for message_id in ids if message_id in near}
        if len(found) < len(ids):
            found |= self._read([message_id for message_id in ids if message_id not in found], lambda _: None)
        return found

    def fetch_due(self, ids: Sequence[int], now_ms: int, gone: BitMap64) -> dict[int, Record]:
        """Like `fetch`, and keep the other messages of the same frames in memory if they are due soon and not gone.

        Frames are in order of arrival: otherwise one would be read and decoded again for almost every message in it.
        If those due soon do not fit in memory, only those due sooner are kept: each frame is then read a few times,
        but still not once for every message.
        """
        near = self._near
        found = {message_id: near[message_id] for message_id in ids if message_id in near}
        if len(found) < len(ids):
            if self._near_bytes < _NEAR_BYTES // 4:
                self._near_ms = min(2 * self._near_ms, SOON_MS)
            missing = [message_id for message_id in ids if message_id not in found]
            found |= self._read(missing, lambda frame: self._keep(frame, now_ms, gone))
        return found

    def forget(self, ids: Iterable[int]) -> None:
        """Drop these messages from memory: they no longer wait here."""
        for message_id in ids:
            record = self._near.pop(message_id, None)
            if record is not None:
                self._near_bytes -= len(record.value) + _RECORD_BYTES

    def forget_all(self) -> None:
        """Drop all messages from memory: none of them waits here any more."""
        self._near, self._near_bytes = {}, 0

    def _keep(self, rows: Sequence[Record], now_ms: int, gone: BitMap64) -> None:
        near, until_ms = self._near, now_ms + self._near_ms
        waiting = (BitMap64(range(rows[0].offset, rows[-1].offset + 1)) & self.present) - gone
        for record in rows:
            if self._near_bytes > _NEAR_BYTES:
                break
            if record.due_at_ms <= until_ms and record.offset in waiting and record.offset not in near:
                near[record.offset] = record
                self._near_bytes += len(record.value) + _RECORD_BYTES
        while self._near_bytes > _NEAR_BYTES and self._near_ms > _TENTH_MS:
            self._near_ms //= 2
            until_ms = now_ms + self._near_ms
            self.forget([message_id for message_id, record in near.items() if record.due_at_ms > until_ms])

    def _read(self, ids: Sequence[int], keep: Callable[[list[Record]], None]) -> dict[int, Record]:
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
                if not frame.is_large:
                    keep(rows)
            found[message_id] = rows[message_id - base]
        return found

    def _note_damage(self, first: int, next_offset: int, error: CorruptData) -> None:
        if first not in self.unreadable:
            logger.error(
                "delayed messages cannot be read; their file is kept",
                extra={"folder": self.log.folder, "first_id": first, "next_id": next_offset, "why": str(error)},
            )
        self.unreadable.add_range(first, max(next_offset, first + 1))
        # Do not trim what a person may still want to look at.
        self.log.pin("damaged", self.unreadable.min())


def cancelled_ids(frame: Frame) -> list[int]:
    """Return the ids of the messages that a control frame cancels."""
    notes = [_NOTE.unpack(value) for value in frame.values() if len(value) == _NOTE.size]
    return [message_id for what, message_id in notes if what == _CANCELLED]
