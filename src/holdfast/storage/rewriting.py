"""A segment's file written anew: frames put one behind the other, each with its offsets, its epoch and its producer."""

from __future__ import annotations

from typing import Final

import msgspec

from holdfast.codec.encode import Body, Place, header_for
from holdfast.codec.frame import Frame, FrameHeader, Kind
from holdfast.codec.rewrite import hole_body
from holdfast.env import File
from holdfast.errors import Unavailable
from holdfast.model import Producer
from holdfast.storage.files import write_fully

_CHUNK: Final = 1 << 20
_MOST_U32: Final = 2**32 - 1
_MOST_TIMES: Final = 255  # what the first frame of a segment can say; then it begins again with 1


def messages_in(frame: Frame) -> int:
    """How many messages a frame holds."""
    return 0 if frame.header.kind == Kind.GAP else len(frame.offsets())


class _Placed(msgspec.Struct, frozen=True, gc=False):
    """A body and what its header says, but for its position."""

    body: Body
    offset: int
    epoch: int
    synced_offset: int
    producer: Producer

    def joined(self, other: _Placed) -> _Placed | None:
        """One hole for two that touch, if nothing is lost by it of who wrote the messages; else None."""
        body, behind = self.body, other.body
        count = body.count + behind.count
        if (
            body.kind != Kind.HOLE
            or behind.kind != Kind.HOLE
            or self.epoch != other.epoch
            or self.producer.after(body.count) != other.producer
            or count > _MOST_U32
        ):
            return None
        hole = hole_body(count, max(body.max_time_ns, behind.max_time_ns))
        return _Placed(hole, self.offset, self.epoch, self.synced_offset, self.producer)


class Output:
    """Frames put one behind the other into a new file; holes that touch become one. Every frame is its own batch."""

    def __init__(self, file: File, log_id: int) -> None:
        self._file = file
        self._log_id = log_id
        self._rewritten: int | None = None
        self._last: _Placed | None = None
        self._parts: list[bytes | memoryview] = []
        self._parts_bytes = 0
        self._position = 0
        self.messages = 0

    def put(self, body: Body, origin: FrameHeader, row: int = 0) -> None:
        """The next body, made of a frame from this row on."""
        if self._rewritten is None:
            self._rewritten = origin.flags % _MOST_TIMES + 1
        producer = Producer(origin.producer_id, origin.producer_epoch, origin.first_sequence).after(row)
        placed = _Placed(body, origin.base_offset + row, origin.epoch, origin.synced_offset, producer)
        if self._last is not None:
            joined = self._last.joined(placed)
            if joined is not None:
                self._last = joined
                return
            self._seal(self._last)
        self._last = placed

    def finish(self) -> None:
        if self._last is not None:
            self._seal(self._last)
        self._store()

    def _seal(self, placed: _Placed) -> None:
        at = self._position + self._parts_bytes
        if at > _MOST_U32:
            raise Unavailable("the new file would be larger than a segment may be; it stays as it was")
        place = Place(self._log_id, placed.epoch, at, placed.offset, placed.synced_offset)
        flags = 0 if at else self._rewritten or 0
        header = header_for(placed.body, place, batch_remaining=0, producer=placed.producer, flags=flags)
        if placed.body.frame_bytes >= _CHUNK:  # not copied into memory
            self._store()
            write_fully(self._file, self._position, [header, *placed.body.parts])
            self._position += placed.body.frame_bytes
            return
        self._parts += [header, *placed.body.parts]
        self._parts_bytes += placed.body.frame_bytes
        if self._parts_bytes >= _CHUNK:
            self._store()

    def _store(self) -> None:
        write_fully(self._file, self._position, [b"".join(self._parts)])
        self._position += self._parts_bytes
        self._parts, self._parts_bytes = [], 0
