"""Reading a log frame by frame, from an offset or from a time, up to the readable end.

Readers take no lock. They look at segments that only grow, and never past the readable end, so they neither block the
writer nor see half of a batch.
"""

from __future__ import annotations

import contextlib
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from itertools import repeat
from operator import attrgetter
from typing import Concatenate, Literal, ParamSpec, TypeAlias, TypeVar

import msgspec
from pyroaring import BitMap64

from holdfast.codec.frame import (
    SHORT_MAGIC,
    Frame,
    FrameHeader,
    Kind,
    check_body,
    check_known,
    frame_at,
    read_header,
    read_plain,
)
from holdfast.codec.singles import log_prefixes, read_single, read_singles, skip_to
from holdfast.env.world import checkpoint
from holdfast.errors import (
    ChecksumMismatch,
    CorruptData,
    DamagedRange,
    OffsetOutOfRange,
    Removed,
    Unavailable,
    UnknownFormat,
)
from holdfast.large import LargeValue
from holdfast.model import Record, extra_bytes
from holdfast.storage.frames import FrameRules, find_frame
from holdfast.storage.retention import SegmentFacts
from holdfast.storage.segment import KEPT_OPEN, Segment

OnDamage: TypeAlias = Literal["raise", "skip"]

_Args = ParamSpec("_Args")
_Answer = TypeVar("_Answer")


def _past_trims(
    method: Callable[Concatenate[LogView, _Args], _Answer],
) -> Callable[Concatenate[LogView, _Args], _Answer]:
    """Repeat the method if a segment that it was reading has been trimmed meanwhile."""

    @wraps(method)
    def patient(view: LogView, /, *args: _Args.args, **options: _Args.kwargs) -> _Answer:
        while True:
            try:
                return method(view, *args, **options)
            except FileNotFoundError as error:
                view.expect_trimmed_file(error)

    return patient


class LogView:
    """The read side of a log, for its owner and for readers in other processes."""

    def __init__(
        self,
        segments: Callable[[], Sequence[Segment]],
        readable_end: Callable[[], int],
        *,
        look_again: Callable[[], None] = lambda: None,
    ) -> None:
        self._look_again = look_again
        self._segments = segments
        self._readable_end = readable_end
        self._damaged = BitMap64()  # offsets that could not be read
        self._noting = threading.Lock()
        self.opened = 0  # how often the last segment of a resting log had to be opened
        self.on_open: Callable[[], None] = lambda: None

    def start(self) -> int:
        """Return the first offset still kept."""
        segments = self._segments()
        return segments[0].base_offset if segments else self._readable_end()

    def end(self) -> int:
        """Return the readable end."""
        return self._readable_end()

    def note_damage(self, start: int, stop: int) -> None:
        """Record messages that cannot be read, so that they are left out of counts."""
        with self._noting:
            self._damaged.add_range(start, stop)

    def damaged(self) -> BitMap64:
        """Return the offsets still kept that are known to be damaged: those that a read has come across."""
        if not self._damaged:
            return BitMap64()
        with self._noting:
            self._damaged.remove_range(0, self.start())  # trimmed since
            return BitMap64(self._damaged)

    def forget_damage(self, start: int) -> None:
        """Forget what was recorded from this offset on."""
        with self._noting:
            self._damaged.remove_range(start, 2**63)

    def read(self, offset: int, *, on_damage: OnDamage = "raise") -> Iterator[Frame]:
        """Yield frames from the one that holds `offset` to the current readable end.

        The first frame may begin before the offset. Damaged messages raise DamagedRange, which says where to continue;
        with on_damage="skip" they are skipped. After key compaction, a frame may cover offsets without holding a
        message for each, or for any: `Frame.is_sparse`.
        """
        while True:
            # The end first: the segments listed after it then hold everything below it.
            end = self._readable_end()
            segments = self._segments()
            self._check_range(offset, segments, end)
            if offset >= end or not segments:
                return
            i = _segment_at(segments, offset)
            segment_end = _ends(segments, end)[i]
            try:
                for frame, _ in self._read_segment(segments[i], offset, segment_end, on_damage):
                    checkpoint()
                    yield frame
                    offset = frame.next_offset
            except FileNotFoundError:
                self._expect_trimmed(segments[i])
                continue
            offset = max(offset, segment_end)

    def locate(self, offset: int) -> tuple[Frame, memoryview]:
        """Return the frame that holds the offset, and the bytes of its segment."""
        while True:
            end = self._readable_end()
            segments = self._segments()
            self._check_range(offset, segments, end)
            if offset >= end or not segments:
                raise OffsetOutOfRange(
                    f"offset {offset} is beyond the end: read up to the end, then wait",
                    offset=offset,
                    start=self.start(),
                    end=end,
                )
            i = _segment_at(segments, offset)
            try:
                return next(self._read_segment(segments[i], offset, _ends(segments, end)[i], "raise"))
            except FileNotFoundError:
                self._expect_trimmed(segments[i])

    def records(self, offset: int, *, on_damage: OnDamage = "raise", whole: bool = False) -> Iterator[Record]:
        """Yield messages from `offset` on, from all frames except gaps; `whole` loads large values into memory."""
        for frame in self.read(offset, on_damage=on_damage):
            for record in frame.records():
                if record.offset >= offset:
                    if whole and isinstance(record.value, LargeValue):
                        yield msgspec.structs.replace(record, value=bytes(record.value))
                    else:
                        yield record

    @_past_trims
    def facts(self) -> list[SegmentFacts]:
        """Return facts about the segments, oldest first."""
        end = self._readable_end()
        segments = self._segments()
        return [self._facts(s, next_offset) for s, next_offset in zip(segments, _ends(segments, end), strict=True)]

    def _facts(self, segment: Segment, next_offset: int) -> SegmentFacts:
        size, is_away = segment.measured()
        latest_ns = self._latest_ns(segment, next_offset)
        return SegmentFacts(segment.base_offset, next_offset, size, latest_ns, is_away)

    @_past_trims
    def away_latest_ns(self, offset: int) -> int | None:
        """Return the latest time in the segment that holds the offset, if only a store has it; otherwise None."""
        end = self._readable_end()
        for segment, _, last in self._stretches(offset, min(offset + 1, end)):
            next_offset = next((s.base_offset for s in self._segments() if s.base_offset >= last), end)
            facts = self._facts(segment, next_offset)
            return facts.max_time_ns if facts.is_away else None
        return None

    def _latest_ns(self, segment: Segment, next_offset: int) -> int:
        """Return the latest time in the segment. Cached: otherwise counting bytes would open every segment."""
        known = segment.latest
        if known is None or known[0] != next_offset:
            touched = segment if segment.is_active else self._touch(segment)
            latest_ns = touched.index_to(next_offset).max_time_ns
            segment.latest = known = (next_offset, latest_ns)
        return known[1]

    @_past_trims
    def find_time(self, time_ns: int) -> int:
        """Return the offset of the first message of this time or later; the readable end if there is none."""
        end = self._readable_end()
        segments = self._segments()
        for segment, segment_end in zip(segments, _ends(segments, end), strict=True):
            if self._touch(segment).index_to(segment_end).max_time_ns >= time_ns:
                found = self._find_time_in(segment, time_ns, segment_end)
                if found is not None:
                    return found
        return end

    def weigh(self, start: int, stop: int) -> int:
        """Return roughly how many bytes the messages [start, stop) take on disk."""
        return sum(size for _, size in self.stretches(start, stop))

    @_past_trims
    def stretches(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Split [start, stop) by segment: where each part begins and roughly how many bytes it takes."""
        found = []
        for segment, first, last in self._stretches(start, stop):
            index = self._touch(segment).index_to(last)
            i = bisect_left(index.offsets, last)
            above = index.positions[i] if i < len(index.positions) else index.end
            found.append((first, max(above - index.position_before(first), 0)))
        return found

    @_past_trims
    def reach(self, offset: int, max_bytes: int) -> int:
        """Return the offset reached from `offset` within about `max_bytes`: at least one step, if any is left."""
        begin, left = offset, max_bytes
        for segment, first, last in self._stretches(offset, self._readable_end()):
            index = self._touch(segment).index_to(last)
            here = index.position_before(first)
            if index.end - here > left:
                i = bisect_right(index.positions, here + left) - 1
                if i >= 0 and index.offsets[i] > begin:
                    return min(index.offsets[i], last)
                if first > begin:
                    return first
                return min(index.offsets[i + 1], last) if i + 1 < len(index.offsets) else last
            left -= index.end - here
            offset = last
        return offset

    def _stretches(self, start: int, stop: int) -> Iterator[tuple[Segment, int, int]]:
        """Yield the segments that hold [start, stop), each with its part of the range."""
        segments = self._segments()
        for segment, segment_end in zip(segments, _ends(segments, self._readable_end()), strict=True):
            first, last = max(start, segment.base_offset), min(stop, segment_end)
            if first < last:
                yield segment, first, last

    def _find_time_in(self, segment: Segment, time_ns: int, end: int) -> int | None:
        _, data, index = segment.opened(end)
        position = index.position_before_time(time_ns)
        while position < index.end:
            try:
                header = self._header(segment, data, position)
            except UnknownFormat:
                raise
            except CorruptData:
                found = find_frame(data, position, FrameRules(segment.log_id, segment.base_offset))
                if found is None:
                    return None
                header = found
            if header.base_offset >= end:
                return None
            position = header.end
            if header.max_time_ns >= time_ns and header.kind < Kind.GAP:
                with contextlib.suppress(ChecksumMismatch):  # a damaged frame holds no message of any time
                    check_body(data, header.position, header)
                    found_offset = _first_at_time(frame_at(data, header.position, header), time_ns)
                    if found_offset is not None:
                        return found_offset
        return None

    def _header(self, segment: Segment, data: memoryview, position: int) -> FrameHeader:
        header = read_header(data, position, position, segment.log_id)
        if header.log_id != segment.log_id:
            raise CorruptData(f"the frame at position {position} belongs to another log")
        if header.magic != SHORT_MAGIC:
            check_known(header)
        return header

    def _read_segment(
        self, segment: Segment, offset: int, end: int, on_damage: OnDamage
    ) -> Iterator[tuple[Frame, memoryview]]:
        """Yield the frames, each with the bytes that it is in."""
        file, data, index = self._touch(segment).opened(end)
        position = index.position_before(offset)
        while offset < end:
            try:
                header = self._header(segment, data, position)
                if header.next_offset <= offset:
                    position = header.end
                    continue
                if header.kind == Kind.GAP:
                    raise CorruptData("the messages were lost to damage earlier; a gap frame is in their place")
                if header.base_offset > offset:
                    raise CorruptData(f"offset {offset} is not where it should be")
                check_body(data, position, header)
                frame = frame_at(data, header.position, header)
            except UnknownFormat:
                raise
            except CorruptData as error:
                if len(data) < (size := file.size()):
                    data = file.view(0, size)  # the file has grown since
                    continue
                offset, position = self._pass_damage(segment, data, offset, position, end, on_damage, error)
                continue
            yield frame, data
            offset, position = header.next_offset, header.end

    def _pass_damage(
        self,
        segment: Segment,
        data: memoryview,
        offset: int,
        position: int,
        end: int,
        on_damage: OnDamage,
        error: Exception,
    ) -> tuple[int, int]:
        """Return (offset, position) where good frames continue; raises DamagedRange unless damage is to be skipped."""
        wanted = FrameRules(segment.log_id, segment.base_offset)
        found = find_frame(data, position, wanted)
        while found is not None and found.kind == Kind.GAP:
            found = find_frame(data, found.end, wanted)
        if found is not None and found.base_offset <= offset:
            return offset, found.position  # the damage is before what was asked for
        next_offset = min(end, found.base_offset) if found is not None else end
        self.note_damage(offset, next_offset)
        if on_damage == "raise":
            which = (
                f"message {offset} is" if next_offset == offset + 1 else f"messages {offset} to {next_offset - 1} are"
            )
            raise DamagedRange(
                f"{which} damaged in {segment.path}: {error}. The others are intact: continue from {next_offset}, "
                "and run `holdfast check` on the folder",
                first_offset=offset,
                next_offset=next_offset,
            )
        return next_offset, found.position if found is not None else position

    def _expect_trimmed(self, segment: Segment) -> None:
        """Handle a missing segment file: fine if it was trimmed meanwhile, otherwise raise Unavailable."""
        self._look_again()
        if any(s.base_offset == segment.base_offset for s in self._segments()):
            raise Unavailable(f"{segment.path} is gone, and it was not trimmed; run `holdfast check` on the folder")

    def expect_trimmed_file(self, error: FileNotFoundError) -> None:
        """Handle a missing file of an unknown segment: fine if the segments have changed, otherwise raise."""
        before = [segment.base_offset for segment in self._segments()]
        self._look_again()
        if before == [segment.base_offset for segment in self._segments()]:
            raise error

    def _check_range(self, offset: int, segments: Sequence[Segment], end: int) -> None:
        start = segments[0].base_offset if segments else end
        if not start <= offset <= end:
            where, instead = ("was trimmed away", start) if offset < start else ("is beyond the end", end)
            holds = f"the log holds {start} to {end - 1}" if end > start else "the log is empty"
            raise OffsetOutOfRange(
                f"offset {offset} {where}: {holds}; read from {instead}",
                offset=offset,
                start=start,
                end=end,
            )

    def _touch(self, segment: Segment) -> Segment:
        """Note that it is in use. The file of the active one belongs to the writer, unless the log rests."""
        if segment.is_active and segment.is_closed:
            self.opened += 1
            self.on_open()
        return KEPT_OPEN.touch(segment)


def _ends(segments: Sequence[Segment], end: int) -> list[int]:
    """Return the offset after the last readable message of each segment."""
    return [min(segment.base_offset, end) for segment in segments[1:]] + [end] * bool(segments)


def _segment_at(segments: Sequence[Segment], offset: int) -> int:
    return max(bisect_right(segments, offset, key=lambda segment: segment.base_offset) - 1, 0)


def _first_at_time(frame: Frame, time_ns: int) -> int | None:
    columns = frame.columns()
    times = columns.times_ns()
    if times is None:
        return next(iter(frame.offsets()), None)
    kept = columns.kept() or repeat(True)
    found = (i for i, (time, is_kept) in enumerate(zip(times, kept, strict=False)) if time >= time_ns and is_kept)
    return next((frame.base_offset + i for i in found), None)


_OFFSET = attrgetter("offset")
_NEAR = 100  # frames that are skipped by their headers; those further ahead are found through the index
# The most that is read ahead, by one who goes from message to message.
_MOST_AHEAD = 64
_MOST_AHEAD_BYTES = 16_384
_MOST_KEPT = 64


class Follower:
    """Reads message after message, as consumers do: remembers the last frame and finds the next one right after it.

    Any other offset is found through the index. For one thread at a time, and only below the readable end.

    Messages with frames of their own are read ahead, twice as many each time, for as long as they are asked for in
    order.
    """

    def __init__(self, view: LogView) -> None:
        self._view = view
        self._frame: Frame | None = None
        self._records: list[Record] = []
        self._sparse = False
        self.plain = True  # whether none of the last `records` can have expired, or be for some groups only
        self._data = memoryview(b"")
        self._log_id = 0
        self._prefixes = (b"", b"")
        self._next_offset = -1  # the offset of the frame at `_next_position` in the data
        self._next_position = 0
        self._frame_bytes = 0  # the size of the last frame that was skipped to
        self.ahead: list[Record] = []  # messages that were read ahead, the next one last; those before it are taken
        self._stretch = 1  # how many to read the next time
        self.kept: dict[int, Record] = {}  # of `kept_record`: the caller takes them, and clears it
        self._kept_bytes = 0

    @property
    def mapped(self) -> int:
        """Identifies the map it holds; 0 if none."""
        return id(self._data.obj) if len(self._data) else 0

    def unmap(self) -> None:
        """Release what is mapped. From any thread: a read under way finds its place again through the index."""
        self._next_offset = -1
        self.ahead = []  # another list: the old one may be in use
        self.kept = {}
        self._data = memoryview(b"")
        self._frame = None

    def frame(self, offset: int) -> Frame:
        """Return the frame that holds the offset; raises like `Log.read`."""
        frame = self._frame
        if frame is not None and frame.base_offset <= offset < frame.next_offset:
            return frame
        if offset == self._next_offset:
            header = read_plain(self._data, self._next_position, self._log_id)
            if header is not None and header.base_offset == offset and header.kind != Kind.GAP:
                return self._keep(frame_at(self._data, header.position, header))
        frame, self._data = self._view.locate(offset)
        return self._keep(frame)

    def record(self, offset: int, readable: int = 1) -> Record:
        """Return the message at the offset; raises like `Log.read`, or Removed if compaction has removed it.

        So many messages are `readable` from there on, and may be read ahead.
        """
        ahead = self.ahead
        if ahead:
            taken = self._taken_ahead(ahead, offset)
            if taken is not None:
                return taken
        if offset == self._next_offset and readable > 1:
            ahead = self._read_ahead(offset, readable)
            if ahead:
                return ahead.pop()
        elif offset == self._next_offset:
            found = read_single(self._data, self._next_position, self._prefixes)
            if found is not None and found[0].offset == offset:
                record, self._next_position = found
                self._next_offset = offset + 1
                return record
        elif 0 <= self._next_offset < offset:
            self._stretch = 1
            skipped = self._skip_to(offset)
            if skipped is not None:
                return skipped
        frame = self.frame(offset)
        if not self._records:
            self._records = frame.records()
        if self._sparse:
            return self._in_sparse(frame, offset)
        return self._records[offset - frame.base_offset]

    def _skip_to(self, offset: int) -> Record | None:
        """Return the message at an offset further on, if it has a frame of its own and is not far."""
        # Messages with priorities are read at regular distances, and many are of one size.
        guess = self._next_position + (offset - self._next_offset) * self._frame_bytes
        at: int | None = guess
        found = read_single(self._data, guess, self._prefixes)
        if found is None or found[0].offset != offset:
            if offset > self._next_offset + _NEAR:
                return None
            at = skip_to(self._data, self._next_position, self._prefixes, offset)
            found = None if at is None else read_single(self._data, at, self._prefixes)
        if at is None or found is None or found[0].offset != offset:
            return None
        record, self._next_position = found
        self._next_offset, self._frame_bytes = offset + 1, self._next_position - at
        return record

    def kept_record(self, offset: int) -> Record:
        """Like `record`; also keeps the message for a reader that comes back for it soon, if it is small."""
        record, kept = self.record(offset), self.kept
        if not kept:
            self._kept_bytes = 0
        if len(kept) < _MOST_KEPT and type(record.value) is bytes:
            self._kept_bytes += len(record.value) + (extra_bytes(record) if record.headers else len(record.key or b""))
            if self._kept_bytes <= _MOST_AHEAD_BYTES:
                kept[offset] = record
        return record

    def _read_ahead(self, offset: int, readable: int) -> list[Record]:
        """Read the messages from the next position on, the first of which has this offset; [] if that is no single."""
        most = min(self._stretch, readable)
        position = self._next_position
        records, self._next_position = read_singles(self._data, position, self._prefixes, offset, most)
        self._next_offset = offset + len(records)
        room = _MOST_AHEAD_BYTES * len(records) // max(self._next_position - position, 1)
        self._stretch = max(min(2 * self._stretch, _MOST_AHEAD, room), 1)
        records.reverse()
        self.ahead = records
        return records

    def _taken_ahead(self, ahead: list[Record], offset: int) -> Record | None:
        """Return the message if it was read ahead, and forget those before it; None if it was not."""
        at = ahead[0].offset - offset
        if 0 <= at < len(ahead):
            del ahead[at + 1 :]
            return ahead.pop()
        if at < 0:
            self.ahead = []
        return None

    def records(self, start: int, stop: int) -> list[Record]:
        """Return the messages in [start, stop) that still exist."""
        found: list[Record] = []
        self.plain = True
        while start < stop:
            singles = self._singles(start, stop)
            if singles:
                if self.plain and [None for record in singles if record.flags or record.expires_at_ms]:
                    self.plain = False
                found += singles
                start += len(singles)
                continue
            frame = self.frame(start)
            if not self._records:
                self._records = frame.records()
            if frame.header.columns:
                self.plain = False
            if self._sparse:
                found += [record for record in self._records if start <= record.offset < stop]
            else:
                base = frame.base_offset
                found += self._records[start - base : stop - base]
            start = min(frame.next_offset, stop)
        return found

    def _singles(self, start: int, stop: int) -> list[Record]:
        """Return messages from `start` on that were read ahead, or else that have frames of their own."""
        ahead = self.ahead
        if ahead and 0 <= (at := ahead[0].offset - start) < len(ahead):
            below = max(at - (stop - start) + 1, 0)
            singles = ahead[below : at + 1]
            del ahead[below:]
            singles.reverse()
            return singles
        if start != self._next_offset:
            return []
        singles, self._next_position = read_singles(
            self._data, self._next_position, self._prefixes, start, stop - start
        )
        self._next_offset = start + len(singles)
        return singles

    def _in_sparse(self, frame: Frame, offset: int) -> Record:
        records = self._records
        i = bisect_left(records, offset, key=_OFFSET)
        if i < len(records) and records[i].offset == offset:
            return records[i]
        raise Removed(
            f"message {offset} was removed by key compaction; skip it",
            offset=offset,
            next_offset=records[i].offset if i < len(records) else frame.next_offset,
            start=self._view.start(),
            end=self._view.end(),
        )

    def _keep(self, frame: Frame) -> Frame:
        self._frame = frame
        self._records = []
        self._stretch = 1
        self._sparse = frame.is_sparse
        if frame.header.log_id != self._log_id:
            self._log_id = frame.header.log_id
            self._prefixes = log_prefixes(self._log_id)
        self._next_offset, self._next_position = frame.next_offset, frame.header.end
        return frame
