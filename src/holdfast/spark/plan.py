"""Which ranges a read has, and how they are shared out among tasks."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

from holdfast.errors import OffsetOutOfRange, UnknownTopic
from holdfast.spark.folder import DataFolder
from holdfast.spark.options import EARLIEST, LATEST, Places, ReadOptions
from holdfast.spark.rows import Range, lost
from holdfast.storage import LogReader

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
