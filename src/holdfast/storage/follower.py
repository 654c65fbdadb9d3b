"""Reading on from message to message: the way of a consumer, who mostly wants the next one."""

from __future__ import annotations

from bisect import bisect_left
from operator import attrgetter
from typing import TYPE_CHECKING

from holdfast.codec.frame import Frame, Kind, read_plain, read_single
from holdfast.errors import Removed
from holdfast.model import Record

if TYPE_CHECKING:
    from holdfast.storage.view import LogView

_OFFSET = attrgetter("offset")


class Follower:
    """Remembers the last frame. The next one is found behind it, any other one by the index.

    For one thread at a time. Only for offsets below the readable end.
    """

    def __init__(self, view: LogView) -> None:
        self._view = view
        self._frame: Frame | None = None
        self._records: list[Record] = []
        self._sparse = False
        self.plain = True  # whether the last `records` found nothing but values
        self._data = memoryview(b"")
        self._log_id = 0
        self._next_offset = -1  # what stands at `_next_position` of the data
        self._next_position = 0

    @property
    def mapped(self) -> int:
        """Which map it holds, as a number; 0: none."""
        return id(self._data.obj) if len(self._data) else 0

    def let_go(self) -> None:
        """Let go of what is mapped. From any thread: whoever reads at this moment finds it again by the index."""
        self._next_offset = -1
        self._data = memoryview(b"")
        self._frame = None

    def frame(self, offset: int) -> Frame:
        """The frame that holds the offset; raises what `Log.read` does."""
        frame = self._frame
        if frame is not None and frame.base_offset <= offset < frame.next_offset:
            return frame
        if offset == self._next_offset:
            header = read_plain(self._data, self._next_position, self._log_id)
            if header is not None and header.base_offset == offset and header.kind != Kind.GAP:
                return self._keep(self._view.body_of(self._data, header))
        frame, self._data = self._view.locate(offset)
        return self._keep(frame)

    def record(self, offset: int) -> Record:
        """The message at the offset; raises what `Log.read` does, and Removed where there is none any more."""
        if offset == self._next_offset:
            found = read_single(self._data, self._next_position, self._log_id)
            if found is not None and found[0].offset == offset:
                record, self._next_position = found
                self._next_offset = offset + 1
                return record
        frame = self.frame(offset)
        if not self._records:
            self._records = frame.records()
        if self._sparse:
            return self._in_sparse(frame, offset)
        return self._records[offset - frame.base_offset]

    def records(self, start: int, stop: int) -> list[Record]:
        """The messages from start to stop that are there, frame by frame."""
        found: list[Record] = []
        self.plain = True
        while start < stop:
            if start == self._next_offset:
                single = read_single(self._data, self._next_position, self._log_id)
                if single is not None and single[0].offset == start:
                    record, self._next_position = single
                    found.append(record)
                    start = self._next_offset = start + 1
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

    def _in_sparse(self, frame: Frame, offset: int) -> Record:
        records = self._records
        i = bisect_left(records, offset, key=_OFFSET)
        if i < len(records) and records[i].offset == offset:
            return records[i]
        raise Removed(
            f"message {offset} was removed by key compaction; pass over it",
            offset=offset,
            next_offset=records[i].offset if i < len(records) else frame.next_offset,
            start=self._view.start(),
            end=self._view.end(),
        )

    def _keep(self, frame: Frame) -> Frame:
        self._frame = frame
        self._records = []
        self._sparse = frame.is_sparse
        self._log_id = frame.header.log_id
        self._next_offset, self._next_position = frame.next_offset, frame.header.end
        return frame
