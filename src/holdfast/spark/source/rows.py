"""Ranges of offsets, shared out among tasks and read as Arrow batches straight from the segment files."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa

from holdfast.broker.messages import MOVED, ONLY_FOR
from holdfast.codec.arrow import FrameColumns
from holdfast.codec.columns import FLAGS
from holdfast.codec.frame import Frame, Kind
from holdfast.errors import DamagedRange, OffsetOutOfRange, UnknownFormat, UnknownTopic
from holdfast.spark.source.folder import DataFolder
from holdfast.spark.source.options import EARLIEST, LATEST, Places, ReadOptions
from holdfast.spark.source.schema import Maker, Source
from holdfast.storage import LogReader

# Which ranges a read has, and how they are shared out among tasks.


logger = logging.getLogger(__name__)

# What one task reads, at least, where there is so much: about a segment.
_TASK_BYTES: Final = 64 << 20


def batch_ranges(folder: DataFolder, options: ReadOptions) -> list[Range]:
    """What a batch read has to read, partition by partition."""
    places = list(folder.partitions(options.subscription))
    for name, given in (("startingOffsets", options.starting), ("endingOffsets", options.ending)):
        check_places(name, given, places)
    ranges = []
    for topic, number in places:
        reader = folder.reader(topic, number)
        if reader is None:
            check_unwritten(options, topic, number)
            continue
        end = reader.end
        start = starting_offset(reader, options, topic, number, end)
        stop = _ending_offset(reader, options, topic, number, end)
        if start < reader.start:
            if options.fail_on_data_loss:
                raise lost(Range(topic, number, start, max(stop, start + 1)), reader.start)
            logger.warning("%d messages of %s/%d are gone, passed over", reader.start - start, topic, number)
            start = reader.start
        if start < stop:
            ranges.append(Range(topic, number, start, stop))
    return ranges


def check_places(name: str, given: Places, places: Sequence[tuple[str, int]]) -> None:
    """Offsets that were given must be of partitions that are read, and of all of these, as with Kafka."""
    if isinstance(given, str):
        return
    named = {(topic, number) for topic, offsets in given.items() for number in offsets}
    unknown, missing = sorted(named - set(places)), sorted(set(places) - named)
    if unknown:
        raise UnknownTopic(f'option "{name}" names {_shown(unknown)}, not among what is read: {_shown(places)}')
    if missing:
        raise UnknownTopic(
            f'option "{name}" does not say where {_shown(missing)} is to be read; -2 is earliest, -1 latest'
        )


def check_unwritten(options: ReadOptions, topic: str, number: int) -> None:
    """Nothing was ever written to the partition: only its beginning can be meant, which is its end, too."""
    for name, given in (("startingOffsets", options.starting), ("endingOffsets", options.ending)):
        if not isinstance(given, str) and given[topic][number] > 0:
            raise _beyond(name, given[topic][number], topic, number, 0, 0)


def starting_offset(reader: LogReader, options: ReadOptions, topic: str, number: int, end: int) -> int:
    """Where reading a partition begins."""
    if options.starting_ns is not None:
        return min(max(reader.find_time(options.starting_ns), reader.lasting_start), end)
    return _offset_of("startingOffsets", options.starting, reader, topic, number, end)


def _ending_offset(reader: LogReader, options: ReadOptions, topic: str, number: int, end: int) -> int:
    if options.ending_ns is not None:
        return min(reader.find_time(options.ending_ns), end)
    return _offset_of("endingOffsets", options.ending, reader, topic, number, end)


def _offset_of(name: str, given: Places, reader: LogReader, topic: str, number: int, end: int) -> int:
    if isinstance(given, str):
        return reader.lasting_start if given == "earliest" else end
    offset = given[topic][number]
    if offset == EARLIEST:
        return reader.lasting_start
    if offset == LATEST:
        return end
    if offset > end:
        raise _beyond(name, offset, topic, number, reader.start, end)
    return offset


def _beyond(name: str, offset: int, topic: str, number: int, start: int, end: int) -> OffsetOutOfRange:
    what = f'option "{name}" says {offset} for {topic}/{number}, which ends at {end}'
    return OffsetOutOfRange(what, offset=offset, start=start, end=end)


def splits(folder: DataFolder, ranges: Sequence[Range], min_partitions: int) -> list[Range]:
    """The ranges cut for tasks: at segments, and further where more tasks are wanted."""
    found = [part for wanted in ranges for part in _by_segments(folder, wanted)]
    messages = sum(part.stop - part.start for part in found)
    if len(found) >= min_partitions or not messages:
        return found
    # In proportion to what each has, never more pieces than messages.
    pieces = [max(1, round(min_partitions * (part.stop - part.start) / messages)) for part in found]
    return [piece for part, count in zip(found, pieces, strict=True) for piece in _cut(part, count)]


def _by_segments(folder: DataFolder, wanted: Range) -> Iterator[Range]:
    """Whole segments, several where they are small."""
    reader = folder.reader(wanted.topic, wanted.partition)
    start, size = wanted.start, 0
    for first, weight in [] if reader is None else reader.stretches(wanted.start, wanted.stop):
        if size and size + weight > _TASK_BYTES:
            yield Range(wanted.topic, wanted.partition, start, first)
            start, size = first, 0
        size += weight
    if start < wanted.stop:
        yield Range(wanted.topic, wanted.partition, start, wanted.stop)


def _cut(wanted: Range, count: int) -> Iterator[Range]:
    total = wanted.stop - wanted.start
    cuts = [wanted.start + total * i // count for i in range(count + 1)]
    for start, stop in pairwise(cuts):
        if start < stop:
            yield Range(wanted.topic, wanted.partition, start, stop)


def _shown(places: Sequence[tuple[str, int]]) -> str:
    some = ", ".join(f"{topic}/{number}" for topic, number in places[:10])
    return some + (f" and {len(places) - 10} more" if len(places) > 10 else "") if places else "nothing"


# A batch ends at either: enough rows to spread what a batch costs, few enough bytes for any executor.
_MOST_ROWS: Final = 32_768
_MOST_BYTES: Final = 8 << 20


class Range(msgspec.Struct, frozen=True):
    """The messages [start, stop) of one partition."""

    topic: str
    partition: int
    start: int
    stop: int

    def __str__(self) -> str:
        return f"offsets {self.start} to {self.stop - 1} of {self.topic}/{self.partition}"


class Reading(msgspec.Struct, frozen=True):
    """What to do with messages that are damaged, gone, or for one group only."""

    skip_corrupt: bool = False
    fail_on_data_loss: bool = True
    include_redriven: bool = False


def record_batches(folder: DataFolder, wanted: Range, maker: Maker, reading: Reading) -> Iterator[pa.RecordBatch]:
    """The messages of the range, in order. No more than one batch is held at a time, however large the range."""
    gathered: list[Frame] = []
    rows = size = 0
    for frame in _frames(folder, wanted, reading):
        gathered.append(frame)
        rows += frame.count
        size += frame.header.raw_bytes
        if rows >= _MOST_ROWS or size >= _MOST_BYTES:
            yield from _batch(gathered, wanted, maker, reading)
            gathered, rows, size = [], 0, 0
    if gathered:
        yield from _batch(gathered, wanted, maker, reading)


def _frames(folder: DataFolder, wanted: Range, reading: Reading) -> Iterator[Frame]:
    """The frames that hold messages of the range."""
    reader = folder.reader(wanted.topic, wanted.partition)
    at = wanted.start
    while reader is not None and at < wanted.stop:
        try:
            for frame in reader.read(at):
                if frame.base_offset >= wanted.stop:
                    return
                if frame.header.kind == Kind.DATA:
                    yield frame
                at = frame.next_offset
            reach = at
        except DamagedRange as damage:
            if not reading.skip_corrupt:
                raise
            until = min(damage.next_offset, wanted.stop)
            _warn("damaged messages passed over", wanted, until - max(damage.first_offset, at), str(damage))
            at = damage.next_offset
            continue
        except OffsetOutOfRange as gone:
            if at < gone.start:  # retention was faster
                if reading.fail_on_data_loss:
                    raise lost(wanted, gone.start) from None
                _warn("messages are gone, passed over", wanted, min(gone.start, wanted.stop) - at, str(gone))
                at = gone.start
                continue
            reach = gone.end
        except UnknownFormat as error:
            raise UnknownFormat(f"{wanted} cannot be read: {error}") from None
        if reach < wanted.stop:
            _end_too_early(wanted, reach, reader.start, reading)
        return


def _end_too_early(wanted: Range, end: int, start: int, reading: Reading) -> None:
    """The log ends before the range does: its tail went with a power cut after the range was planned."""
    if reading.fail_on_data_loss:
        raise OffsetOutOfRange(
            f"{wanted.topic}/{wanted.partition} ends at {end}, and {wanted} were to be read: messages that were not "
            "synced were lost. Read again what is there now",
            offset=wanted.stop,
            start=start,
            end=end,
        )
    _warn("messages are gone, passed over", wanted, wanted.stop - end, "the log ends before")


def _batch(frames: Sequence[Frame], wanted: Range, maker: Maker, reading: Reading) -> Iterator[pa.RecordBatch]:
    columns = FrameColumns(frames)
    batch = maker.batch(Source(columns, wanted.topic, wanted.partition))
    below = max(wanted.start - frames[0].base_offset, 0)
    above = max(frames[-1].next_offset - wanted.stop, 0)
    kept = columns.kept()
    if not reading.include_redriven:
        kept = _without_redriven(frames, columns, kept)
    if below or above:
        batch = batch.slice(below, columns.rows - below - above)
        kept = None if kept is None else kept[below : columns.rows - above]
    if kept is not None:
        batch = batch.filter(pa.array(kept))
    if batch.num_rows:
        yield batch


def _without_redriven(
    frames: Sequence[Frame], all_columns: FrameColumns, kept: np.ndarray[Any, np.dtype[np.bool_]] | None
) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
    """Leave out what came back for one group: everybody else has had it."""
    if not (all_columns.flags() & MOVED).any():
        return kept
    at = 0
    for frame in frames:
        if frame.header.columns & FLAGS:
            columns = frame.columns()
            moved = [i for i, flags in enumerate(columns.flags() or ()) if flags & MOVED]
            headers = columns.headers() if moved else None
            back = [at + i for i in moved if headers and any(name == ONLY_FOR for name, _ in headers[i])]
            if back:
                kept = np.ones(sum(frame.count for frame in frames), np.bool_) if kept is None else kept
                kept[back] = False
        at += frame.count
    return kept


def lost(wanted: Range, start: int) -> OffsetOutOfRange:
    """Messages that were to be read are no longer there."""
    until = min(start, wanted.stop)
    return OffsetOutOfRange(
        f"{until - wanted.start} messages of {wanted.topic}/{wanted.partition} are gone: retention removed those "
        f"before offset {start}, and reading was to begin at {wanted.start}. To go on without them, set the option "
        '"failOnDataLoss" to false',
        offset=wanted.start,
        start=start,
        end=wanted.stop,
    )


def _warn(what: str, wanted: Range, messages: int, why: str) -> None:
    logger.warning("%s: %d of %s (%s)", what, messages, wanted, why)
