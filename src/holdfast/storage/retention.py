"""Which of the oldest segments may be removed, and trimming and truncating in steps that a crash may interrupt."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from holdfast.env import World
from holdfast.errors import CorruptData, InvalidRequest, Unavailable
from holdfast.model import Trimmed
from holdfast.settings import LogSettings, QueueSettings
from holdfast.storage.files import advice, durable_replace, index_name, join, ran_out, segment_name, shortage
from holdfast.storage.frames import Damage, FrameRules, SegmentIndex, walk
from holdfast.storage.recovery import SegmentLimits, open_segment
from holdfast.storage.segment import Segment
from holdfast.storage.state import Identity
from holdfast.storage.writer import Writer

MOST_TIERED_BYTES: Final = 512 * 1024 * 1024  # it is sent in one piece, and no store need take more


def remove_head(world: World, writer: Writer, folder: str, bases: Iterable[int]) -> Trimmed:
    """Remove these segments, which are sealed and the oldest of the log.

    One by one, each made durable before the next: after a crash the oldest part is gone, never the middle. They are
    given by base offset, so that two concurrent trims do not remove twice as much. The iterable is advanced only when
    the segments before are gone.
    """
    removed, freed = 0, 0
    for base in bases:
        with writer.lock:
            segment = writer.segments[0]
            if segment is writer.active or segment.base_offset != base:
                continue
            size = segment.size()
            try:
                opened = world.disk.open_folder(folder)
            except OSError as error:
                raise Unavailable(
                    f"{segment.path} could not be removed: {advice(error)}. {removed} segments before it are gone; it "
                    "stays as it was, and is removed by the next attempt"
                ) from error
            # In memory first: readers that look now no longer start in a file that is about to go.
            writer.replace(writer.segments[1:], writer.active)
        try:
            _remove_index(world, folder, base)
            world.disk.remove(segment.path)
            opened.sync()
        except OSError as error:
            raise Unavailable(
                f"{segment.path} could not be removed: {error.strerror or error}. {removed} segments before it "
                "are gone; it is no longer used, and comes back when the log is opened again"
            ) from error
        finally:
            opened.close()
        segment.close_files()
        removed, freed = removed + 1, freed + size
    start = writer.segments[0].base_offset if writer.segments else writer.end
    return Trimmed(removed, freed, start)


def truncate_tail(world: World, writer: Writer, folder: str, limits: SegmentLimits, offset: int) -> None:
    """Remove all messages from `offset` on.

    The new epoch is in the table before any byte is destroyed: after a crash, the next opening finds the rest void and
    finishes the job. The caller has synced; messages appended since must not be taken for synced. A shortage before
    that point refuses the call. Any error after it ends the log, which is then half cut.
    """
    epoch = writer.epoch
    try:
        _truncate_tail(world, writer, folder, limits, offset)
    except OSError as error:
        if ran_out(error) and writer.epoch == epoch:
            raise shortage(f"{folder} could not be truncated", error, "Nothing was changed") from error
        raise writer.fail("truncating failed", error) from error


def _truncate_tail(world: World, writer: Writer, folder: str, limits: SegmentLimits, offset: int) -> None:
    with writer.lock:
        writer.ensure_open()
        if offset > writer.synced_end:
            raise Unavailable(f"others appended while the log was about to be truncated at {offset}; try again")
        kept = [segment for segment in writer.segments if segment.base_offset < offset] or list(writer.segments[:1])
        gone = [segment for segment in writer.segments if segment not in kept]
        if not kept:
            return
        last = kept[-1]
        used_end = last.opened(gone[0].base_offset if gone else writer.end)[2].end
        index = _index_up_to(last, used_end, writer.log_id, offset, limits.index_bytes)
        epoch = writer.epoch + 1
        epochs = writer.epochs.begin(epoch, offset)
        epochs.save(world.disk, folder, writer.log_id)
        writer.begin_epoch(epoch, epochs)
        writer.cut_to(offset)
        # Last segment first, so that a crash on the way never leaves a hole in the middle.
        for segment in reversed(gone):
            _remove_index(world, folder, segment.base_offset)
            world.disk.remove(segment.path)
            segment.close_files()
        _remove_index(world, folder, last.base_offset)
        world.disk.sync_folder(folder)
        if used_end > index.end:
            # A new file: readers may have the old one mapped, and hold frames in it that must not change.
            kept_bytes = last.file.read(0, index.end)
            durable_replace(world.disk, folder, segment_name(last.base_offset), kept_bytes)
        # Only now: while table and state name different epochs, the next opening scans from the cut on.
        writer.state.set_identity(Identity(writer.log_id, epoch, world.ids.boot_id()))
        active = open_segment(world, folder, limits, writer.log_id, index)
        writer.replace((*kept[:-1], active), active)


def _index_up_to(segment: Segment, used_end: int, log_id: int, offset: int, index_bytes: int) -> SegmentIndex:
    """Return the segment's index as if it ended at the offset, which must not be inside a batch."""
    index = SegmentIndex(segment.base_offset, index_bytes)
    batch_start = segment.base_offset
    for found in walk(segment.data()[:used_end], FrameRules(log_id, segment.base_offset), bodies=False):
        if isinstance(found, Damage) or found.base_offset >= offset:
            continue
        if found.next_offset > offset or (found.next_offset == offset and found.batch_remaining):
            raise InvalidRequest(
                f"offset {offset} lies inside a batch, which is kept or dropped as a whole; truncate at {batch_start}"
            )
        if found.batch_remaining == 0:
            batch_start = found.next_offset
        index.add_header(found)
    if index.next_offset < offset:
        raise CorruptData(f"the messages before {offset} are damaged; run `holdfast repair` before truncating there")
    return index


def _remove_index(world: World, folder: str, base_offset: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        world.disk.remove(join(folder, index_name(base_offset)))


class SegmentFacts(msgspec.Struct, frozen=True, gc=False):
    """What retention needs to know about a segment."""

    base_offset: int
    next_offset: int
    bytes: int
    max_time_ns: int
    is_away: bool = False  # only a store has it


def seal_after_ms(settings: LogSettings) -> int | None:
    """Return how old its first message may get before the active segment is sealed, so that retention can remove it."""
    return None if settings.retention_ms is None else settings.retention_ms // 10


def expired(
    segments: Sequence[SegmentFacts],
    settings: LogSettings,
    *,
    now_ns: int,
    floor: int | None,
    done_before: int | None = None,
) -> int:
    """Return how many of the sealed segments, oldest first, the settings allow to remove.

    The last segment given is the active one and always stays. `floor` is the lowest offset that somebody still needs: a
    segment reaching past it stays, unless `retention_ignores_pins`. Below `done_before` every message is handled: that
    part has a limit of its own, which never removes anything beyond it.
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


def to_tier(segments: Sequence[SegmentFacts], settings: QueueSettings, *, now_ns: int) -> list[SegmentFacts]:
    """Return the sealed segments that are to leave the disk, oldest first. The last segment given is the active one."""
    local = [segment for segment in segments if not segment.is_away]
    left = sum(segment.bytes for segment in local)
    found = []
    for segment in local[:-1]:
        age_ns = now_ns - segment.max_time_ns
        too_old = settings.tier_after_ms is not None and age_ns > settings.tier_after_ms * 1_000_000
        too_much = settings.tier_after_bytes is not None and left > settings.tier_after_bytes
        if (too_old or too_much) and segment.bytes <= MOST_TIERED_BYTES:
            found.append(segment)
            left -= segment.bytes
    return found


def tiered_bytes(segments: Iterable[SegmentFacts]) -> int:
    """Return how many bytes of the segments only a store has."""
    return sum(segment.bytes for segment in segments if segment.is_away)


def done_segments(segments: Sequence[SegmentFacts], done_before: int | None) -> list[SegmentFacts]:
    """Return the sealed segments, oldest first, in which every message is handled."""
    if done_before is None:
        return []
    return [segment for segment in segments[:-1] if segment.next_offset <= done_before]
