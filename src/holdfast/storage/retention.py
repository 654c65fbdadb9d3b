"""Which of the oldest segments may go: by age, bytes and count, never below the minimum or a pin."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.settings import LogSettings


class SegmentFacts(msgspec.Struct, frozen=True, gc=False):
    """What retention must know of a segment."""

    base_offset: int
    next_offset: int
    bytes: int
    max_time_ns: int


def expired(segments: Sequence[SegmentFacts], settings: LogSettings, *, now_ns: int, floor: int | None) -> int:
    """How many of the sealed segments, oldest first, the settings let go.

    The last one given is the active segment; it always stays. `floor` is the lowest offset that somebody
    still needs: a segment that reaches beyond it stays, unless the settings say otherwise by name.
    """
    keep = max(settings.retention_min_segments, 1)
    most = max(len(segments) - keep, 0)
    total = sum(segment.bytes for segment in segments)
    count = 0
    while count < most:
        segment = segments[count]
        if floor is not None and segment.next_offset > floor and not settings.retention_ignores_pins:
            break
        too_old = settings.retention_ms is not None and segment.max_time_ns < now_ns - settings.retention_ms * 1_000_000
        too_big = settings.retention_bytes is not None and total > settings.retention_bytes
        too_many = settings.retention_segments is not None and len(segments) - count > settings.retention_segments
        if not (too_old or too_big or too_many):
            break
        total -= segment.bytes
        count += 1
    return count
