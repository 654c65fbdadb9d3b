"""Reading on from message to message: the way of a consumer, who mostly wants the next one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.codec.frame import Frame, Kind, read_plain
from holdfast.model import Record

if TYPE_CHECKING:
    from holdfast.storage.view import LogView


class Follower:
    """Remembers the last frame. The next one is found behind it, any other one by the index.

    For one thread at a time. Only for offsets below the readable end.
    """

    def __init__(self, view: LogView) -> None:
        self._view = view
        self._frame: Frame | None = None
        self._data = memoryview(b"")
        self._records: list[Record] = []

    def frame(self, offset: int) -> Frame:
        """The frame that holds the offset; raises what `Log.read` does."""
        frame = self._frame
        if frame is not None:
            if frame.base_offset <= offset < frame.next_offset:
                return frame
            if offset == frame.next_offset:
                header = read_plain(self._data, frame.header.end, frame.header.log_id)
                if header is not None and header.base_offset == offset and header.kind != Kind.GAP:
                    frame = self._view.body_of(self._data, header)
                    return self._keep(frame)
        frame, self._data = self._view.locate(offset)
        return self._keep(frame)

    def record(self, offset: int) -> Record:
        """The message at the offset."""
        frame = self.frame(offset)
        if not self._records:
            self._records = list(frame.records())
        return self._records[offset - frame.base_offset]

    def _keep(self, frame: Frame) -> Frame:
        self._frame = frame
        self._records = []
        return frame
