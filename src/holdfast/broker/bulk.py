"""Whole frames into a partition: the way of bulk writes, whose messages were checked and encoded elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.broker.partition import Partition
from holdfast.codec.columns import PRIORITIES
from holdfast.codec.encode import Body
from holdfast.codec.frame import Frame, FrameHeader
from holdfast.codec.rewrite import same_body
from holdfast.model import Appended, Producer


class BulkFrame(msgspec.Struct, frozen=True):
    """A frame from elsewhere: its header, its bytes with their padding, and its priorities where it has any."""

    header: FrameHeader
    stored: memoryview
    priorities: bytes | None = None

    @staticmethod
    def of(frame: Frame, stored: memoryview) -> BulkFrame:
        found = frame.columns().priorities() if frame.header.columns & PRIORITIES else None
        return BulkFrame(frame.header, stored, None if found is None else bytes(found))

    def body(self, now_ns: int) -> Body:
        """For its new place: the messages are as old as their stay there."""
        return msgspec.structs.replace(same_body(self.header, self.stored), max_time_ns=now_ns)


def append_frames(partition: Partition, frames: Sequence[BulkFrame], producer: Producer, now_ns: int) -> Appended:
    """Append the frames' messages as one batch, all or none; nobody sees them before the log is synced."""
    bodies = [frame.body(now_ns) for frame in frames]
    if all(frame.priorities is None for frame in frames):
        return partition.log.write_bodies(bodies, producer)
    priorities = b"".join(frame.priorities or bytes(frame.header.count) for frame in frames)
    with partition.telling_groups() as tell:
        appended = partition.log.write_bodies(bodies, producer)
        tell(appended.offset, priorities)
    return appended
