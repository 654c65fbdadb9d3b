"""Which of the oldest segments may go: by age, bytes and count, never below the minimum or a pin.

Only sealed segments go, and a quiet log would never fill its active one. So where messages go by age, the active
segment is sealed by age as well: when its first message is a tenth of that age old. A message is gone at most so much
later than the setting says, and a log has no more than about ten segments for that reason.
"""

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


def seal_after_ms(settings: LogSettings) -> int | None:
    """How old the first message of the active segment may be, so that retention by age finds segments to drop."""
    return None if settings.retention_ms is None else settings.retention_ms // 10


def expired(
    segments: Sequence[SegmentFacts],
    settings: LogSettings,
    *,
    now_ns: int,
    floor: int | None,
    done_before: int | None = None,
) -> int:
    """How many of the sealed segments, oldest first, the settings let go.

    The last one given is the active segment; it always stays. `floor` is the lowest offset that somebody
    still needs: a segment that reaches beyond it stays, unless the settings say otherwise by name. Below `done_before`
    every message is handled: that part alone has a limit of its own, which no setting lets go beyond it.
    """
    keep = max(settings.retention_min_segments, 1)
    most = max(len(segments) - keep, 0)
    total = sum(segment.bytes for segment in segments)
    done = sum(segment.bytes for segment in done_segments(segments, done_before))
    count = 0
    while count < most:
        segment = segments[count]
        if floor is not None and segment.next_offset > floor and not settings.retention_ignores_pins:
            break
        too_old = settings.retention_ms is not None and segment.max_time_ns < now_ns - settings.retention_ms * 1_000_000
        too_big = settings.retention_bytes is not None and total > settings.retention_bytes
        too_many = settings.retention_segments is not None and len(segments) - count > settings.retention_segments
        too_much_done = settings.retention_done_bytes is not None and done > settings.retention_done_bytes
        if not (too_old or too_big or too_many or too_much_done):
            break
        total -= segment.bytes
        done = max(done - segment.bytes, 0)
        count += 1
    return count


def done_segments(segments: Sequence[SegmentFacts], done_before: int | None) -> list[SegmentFacts]:
    """The sealed segments, oldest first, in which every message is handled."""
    if done_before is None:
        return []
    return [segment for segment in segments[:-1] if segment.next_offset <= done_before]
