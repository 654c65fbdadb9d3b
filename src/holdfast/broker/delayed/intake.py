"""The intake: a log that takes delayed messages in order of arrival, and records cancellations.

A message is a data record with its due time. A cancellation is a control record of nine bytes: its type
(1: cancelled) and the id, as an unsigned 64-bit number.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import accumulate, repeat
from operator import itemgetter
from struct import Struct
from typing import Final, NamedTuple, cast

import msgspec
from pyroaring import BitMap64

from holdfast.codec.frame import Frame, Kind
from holdfast.env import World
from holdfast.env.process import get_logger
from holdfast.errors import CorruptData, DamagedRange
from holdfast.model import Appended, Batch, Record
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

_DUE: Final = itemgetter(0)

_SHED: Final = 1024
_DROP_MOST: Final = 4096  # entries examined in one step


def _far_key(due_at_ms: int, edge_ms: int) -> tuple[int, int]:
    """Return the start and the width of the bucket for a time that is not soon."""
    for least_ms, width_ms in _WIDTHS:
        if due_at_ms - edge_ms >= least_ms:
            # Never before the edge, or a bucket that was just split would be split again.
            return max(due_at_ms - due_at_ms % width_ms, edge_ms), width_ms
    raise AssertionError("due before the edge")


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
                key = _far_key(due_at_ms, edge_ms)
            bucket = buckets.get(key) or self._new_bucket(key)
            bucket.add(due_at_ms, message_id)

    def _new_bucket(self, key: tuple[int, int]) -> _Bucket:
        bucket = self._buckets[key] = _Bucket()
        heappush(self._starts, key)
        return bucket

    @property
    def edge_ms(self) -> int:
        """A time up to a tenth of a second after the last `advance`."""
        return self._edge_ms

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

    def leading(self, until_ms: int, limit: int) -> list[tuple[int, int]]:
        """Return the first entries due by then, done or not. Call `advance` for that time first."""
        front, head = self._front, self._head
        return front[head : bisect_right(front, until_ms, head, min(head + limit, len(front)), key=_DUE)]

    def near(self, until_ms: int) -> Iterator[tuple[int, int]]:
        """Yield what is due by then, in order. Call `advance` for that time first."""
        front = self._front
        for i in range(self._head, len(front)):
            if front[i][0] > until_ms:
                return
            yield front[i]

    def shed(self, done: Callable[[int], bool], known: Sequence[int] = ()) -> None:
        """Drop the leading entries that are done. Those of `known` are: if they lead, none is looked at alone."""
        front, head = self._front, self._head
        if known and [entry[1] for entry in front[head : head + len(known)]] == known:
            head += len(known)
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


# Batches that were just written, kept in memory while their messages wait: a release then reads no file.
#
# Frames hold messages in order of arrival, releases go by due time. So one release of a thousand messages may touch a
# thousand frames, and to read and unpack those costs several times what all the rest of a release does.
#
# A batch is kept as a whole, its values in one piece, in little more memory than its bytes. It goes when the last of
# its messages has come due: messages leave in order of their due times, so none of them waits any more.


_RECENT_BYTES: Final = 64 << 20
# Approximate memory of a batch and of each message in it, besides the values. Keys and headers are objects.
_BATCH_BYTES: Final = 800
_MESSAGE_BYTES: Final = 16
_COLUMNS_BYTES: Final = 400


class _Kept(NamedTuple):
    """A batch: the values joined, and where each of them ends."""

    first_id: int
    next_id: int
    last_ms: int  # messages due after this are not kept
    time_ns: int
    epoch: int
    values: bytes
    ends: array[int]
    dues_ms: array[int]
    columns: Batch | None  # None if the messages have a value and a due time, and nothing else
    total_bytes: int


class RecentBatches:
    """The batches by the ids of their messages. The lock of the store's state guards it."""

    def __init__(self) -> None:
        self.total_bytes = 0
        self._firsts: list[int] = []  # first ids of the batches, ascending
        self._batches: list[_Kept] = []  # in the same order
        self._lasts: list[tuple[int, int]] = []  # a heap: the last due time of a batch, and its first id

    def add(self, batch: Batch, first_id: int, *, time_ns: int, epoch: int, until_ms: int) -> None:
        """Keep the messages of a new batch that are due by `until_ms`, if they fit. Its ids are above all others."""
        values, dues_ms = batch.values, batch.due_at_ms
        if not dues_ms or min(dues_ms) > until_ms or {*map(type, values)} != {bytes}:
            return
        last_ms = max(dues_ms)
        if last_ms > until_ms:  # leave out the others
            values = [value if due <= until_ms else b"" for value, due in zip(values, dues_ms, strict=True)]
            last_ms = max(due for due in dues_ms if due <= until_ms)
        joined = b"".join(cast("Sequence[bytes]", values))
        columns = None if _is_plain(batch) else msgspec.structs.replace(batch, values=(), due_at_ms=None)
        each_bytes = _MESSAGE_BYTES + (0 if columns is None else _COLUMNS_BYTES)
        total_bytes = len(joined) + each_bytes * len(values) + _BATCH_BYTES
        if self.total_bytes + total_bytes > _RECENT_BYTES:
            return
        ends = array("q", accumulate(map(len, values), initial=0))
        next_id = first_id + len(values)
        kept = _Kept(
            first_id, next_id, last_ms, time_ns, epoch, joined, ends, array("q", dues_ms), columns, total_bytes
        )
        self._firsts.append(first_id)
        self._batches.append(kept)
        heappush(self._lasts, (last_ms, first_id))
        self.total_bytes += total_bytes

    def find(self, ids: Sequence[int]) -> dict[int, Record]:
        """Return those of these messages that are kept."""
        firsts, batches = self._firsts, self._batches
        found: dict[int, Record] = {}
        if not firsts:
            return found
        for message_id, above in zip(ids, map(bisect_right, repeat(firsts), ids), strict=True):
            first_id, next_id, last_ms, time_ns, epoch, values, ends, dues_ms, columns, _ = batches[above - 1]
            if not first_id <= message_id < next_id:
                continue
            at = message_id - first_id
            value, due_at_ms = values[ends[at] : ends[at + 1]], dues_ms[at]
            if due_at_ms > last_ms:
                continue
            if columns is None:
                record = Record(message_id, time_ns, value, None, (), 0, 0, due_at_ms, 0, epoch)
            else:
                record = _record(columns, at, Record(message_id, time_ns, value, due_at_ms=due_at_ms, epoch=epoch))
            found[message_id] = record
        return found

    def drop_before(self, due_at_ms: int) -> None:
        """Forget the batches whose messages were all due before this time: the first that waits is due then."""
        while self._lasts and self._lasts[0][0] < due_at_ms:
            _, first_id = heappop(self._lasts)
            at = bisect_left(self._firsts, first_id)
            self.total_bytes -= self._batches[at].total_bytes
            del self._firsts[at], self._batches[at]


def _is_plain(batch: Batch) -> bool:
    others: Iterable[object] = (
        batch.times_ns,
        batch.keys,
        batch.headers,
        batch.priorities,
        batch.expires_at_ms,
        batch.flags,
    )
    return all(column is None for column in others)


def _record(columns: Batch, at: int, plain: Record) -> Record:
    """Return the message with what else its batch says of it."""
    return msgspec.structs.replace(
        plain,
        timestamp_ns=plain.timestamp_ns if columns.times_ns is None else columns.times_ns[at],
        key=None if columns.keys is None else columns.keys[at],
        headers=() if columns.headers is None else tuple(columns.headers[at]),
        priority=0 if columns.priorities is None else columns.priorities[at],
        expires_at_ms=0 if columns.expires_at_ms is None else columns.expires_at_ms[at],
        flags=0 if columns.flags is None else columns.flags[at],
    )


logger = get_logger(__name__)

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
        self._recent = RecentBatches()

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
        found, missing = self._in_memory(ids)
        return found | self._read(missing, lambda _: None) if missing else found

    def fetch_due(self, ids: Sequence[int], now_ms: int, gone: BitMap64) -> dict[int, Record]:
        """Like `fetch`, and keep the other messages of the same frames in memory if they are due soon and not gone.

        Frames are in order of arrival: otherwise one would be read and decoded again for almost every message in it.
        If those due soon do not fit in memory, only those due sooner are kept: each frame is then read a few times,
        but still not once for every message.
        """
        found, missing = self._in_memory(ids)
        if missing:
            if self._near_bytes < _NEAR_BYTES // 4:
                self._near_ms = min(2 * self._near_ms, SOON_MS)
            found |= self._read(missing, lambda frame: self._keep(frame, now_ms, gone))
        return found

    def keep_new(self, batch: Batch, first_id: int, time_ns: int, now_ms: int) -> None:
        """Keep the messages that were just written in memory if they are due soon."""
        self._recent.add(batch, first_id, time_ns=time_ns, epoch=self.log.epoch, until_ms=now_ms + SOON_MS)

    def drop_before(self, due_at_ms: int) -> None:
        """Drop what is kept of messages that were due before this time, when the first that still waits is due."""
        self._recent.drop_before(due_at_ms)

    def forget(self, ids: Iterable[int]) -> None:
        """Drop these messages from memory: they no longer wait here."""
        near = self._near
        if near:
            kept = [record for record in map(near.pop, ids, repeat(None)) if record is not None]
            self._near_bytes -= sum([len(record.value) for record in kept]) + _RECORD_BYTES * len(kept)

    def forget_all(self) -> None:
        """Drop all messages from memory: none of them waits here any more."""
        self._near, self._near_bytes = {}, 0
        self._recent = RecentBatches()

    def _in_memory(self, ids: Sequence[int]) -> tuple[dict[int, Record], list[int]]:
        """Return the messages that are in memory, and the ids of the others."""
        found = self._recent.find(ids)
        missing = [message_id for message_id in ids if message_id not in found] if len(found) < len(ids) else []
        if missing and self._near:
            near = self._near
            found |= {message_id: near[message_id] for message_id in missing if message_id in near}
            missing = [message_id for message_id in missing if message_id not in near]
        return found, missing

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
