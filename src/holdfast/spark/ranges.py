"""What is read: the topics of a data folder, ranges of offsets shared out among tasks, and how far a stream may go."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import heapify, heapreplace
from itertools import pairwise
from typing import Any, Final, Literal, TypeAlias

import msgspec

from holdfast.broker.folder.contents import Catalog, lacking, missing_parts, settings_for
from holdfast.broker.folder.layout import TOPICS, partition_folder, topic_folder
from holdfast.broker.streams.queries import NOT_READ, TopicPins
from holdfast.codec.frame import Frame
from holdfast.delivery.where import Expression
from holdfast.env import World, real_world
from holdfast.errors import CorruptData, InvalidRequest, NotAQueue, OffsetOutOfRange, TailLost, UnknownTopic
from holdfast.model import LogPosition
from holdfast.spark.options import (
    EARLIEST,
    LATEST,
    Places,
    ReadOptions,
    Subscription,
    Times,
    batch_read_options,
    stream_read_options,
)
from holdfast.storage import LogReader
from holdfast.storage.files import is_log, join, translated

logger = logging.getLogger(__name__)


class DataFolder:
    """A data folder for a process that does not own it: topics, partitions, and a reader for each log.

    It takes no lock. Readers are kept, and see new messages when they are used again. Topics that `sees` refuses are
    as if they were not there.
    """

    def __init__(self, path: str, world: World | None = None) -> None:
        self.path = path.rstrip("/") or "/"
        self.world = world or real_world()
        self.sees: Callable[[str], bool] = lambda topic: True
        self._catalog = Catalog(self.world, self.path)
        self._readers: dict[tuple[str, int], LogReader] = {}
        disk = self.world.disk
        with translated(self.path):
            if not disk.exists(self.path):
                raise NotAQueue(f'there is no folder {self.path}: option "path" names the data folder to read')
            if not disk.exists(join(self.path, TOPICS)):
                raise NotAQueue(
                    f'{self.path} holds no topics: option "path" names the folder that open_broker was given'
                )

    def topics(self, subscription: Subscription) -> list[str]:
        """The topics of the subscription. Raises UnknownTopic if one that is named does not exist."""
        names = list(filter(self.sees, self._catalog.names()))
        if subscription.pattern is not None:
            pattern = Expression(subscription.pattern)
            return [name for name in names if pattern.matches(name)]
        for name in subscription.names:
            if name not in names and not (self.sees(name) and name in self._catalog):
                there = f"known topics: {', '.join(names[:10])}" if names else "there is none yet"
                raise UnknownTopic(f"there is no topic {name} in {self.path}; {there}")
        return list(subscription.names)

    def topic_id(self, topic: str) -> int:
        """The id of the topic, which differs from that of an earlier topic of the same name."""
        return self._catalog.facts(topic).id

    def partition_count(self, topic: str) -> int:
        """The number of its partitions."""
        return self._catalog.facts(topic).partitions

    def partitions(self, subscription: Subscription) -> Iterator[tuple[str, int]]:
        """Topic and number of each partition of the subscription."""
        for topic in self.topics(subscription):
            count = self.partition_count(topic)
            wanted = subscription.partitions
            for number in wanted[topic] if wanted is not None else range(count):
                if not 0 <= number < count:
                    raise UnknownTopic(f"topic {topic} in {self.path} has no partition {number}: it has {count}")
                yield topic, number

    def reader(self, topic: str, partition: int) -> LogReader | None:
        """The reader of a partition's log; None if nothing was ever written to it. Raises CorruptData if it is lost."""
        known = self._readers.get((topic, partition))
        if known is not None:
            return known
        folder = join(partition_folder(self.path, topic, partition), "log")
        if not is_log(self.world, folder):
            part = f"{partition}/log"
            if part in missing_parts(self.world, self.path, topic):
                raise lacking(self.path, topic, part)
            return None
        settings = settings_for(self.world, topic_folder(self.path, topic), None, {})
        reader = self._readers[topic, partition] = LogReader(folder, settings, self.world)
        return reader

    def frames(self, wanted: Range, at: int) -> Iterator[Frame]:
        """The frames from the one that holds offset `at` on, which may go beyond the range."""
        reader = self.reader(wanted.topic, wanted.partition)
        return iter(()) if reader is None else reader.read(at)


# A task reads at least about this many bytes, a segment, if there are more. Starting one costs Spark some 30 ms of CPU
# time: beyond so many tasks they become larger instead of more, but not so large that a retry hurts.
_TASK_BYTES: Final = 64 << 20
_MOST_TASK_BYTES: Final = 256 << 20
_MANY_TASKS: Final = 16


def batch_ranges(folder: DataFolder, options: ReadOptions, say: Callable[[str], None] = logger.warning) -> list[Range]:
    """The range of each partition that a batch read reads. What is lost, and not an error, is told by `say`."""
    places = list(folder.partitions(options.subscription))
    for name, given in _given_places(options):
        check_places(name, given, places)
    ranges = []
    for topic, number in places:
        try:
            reader = folder.reader(topic, number)
        except CorruptData as error:
            if options.fail_on_data_loss:
                raise CorruptData(
                    f'{error}. To read the other partitions only, set the option "failOnDataLoss" to false'
                ) from error
            say(f"{topic}/{number} is lost and was skipped: {error}")
            continue
        if reader is None:
            check_unwritten(options, topic, number)
            continue
        end = reader.end
        start = starting_offset(reader, options, topic, number, end)
        stop = _ending_offset(reader, options, topic, number, end)
        if start < reader.start:
            if options.fail_on_data_loss:
                raise lost(Range(topic, number, start, max(stop, start + 1)), reader.start)
            say(f"{reader.start - start} messages of {topic}/{number} are gone and were skipped")
            start = reader.start
        if start < stop:
            ranges.append(Range(topic, number, start, stop))
    return ranges


def _given_places(options: ReadOptions) -> Iterator[tuple[str, Places]]:
    """The options that name partitions, each with what it says of them."""
    yield "startingOffsets", options.starting
    yield "endingOffsets", options.ending
    if options.starting_times is not None:
        yield "startingOffsetsByTimestamp", options.starting_times
    if options.ending_times is not None:
        yield "endingOffsetsByTimestamp", options.ending_times


def check_places(name: str, given: Places, places: Sequence[tuple[str, int]]) -> None:
    """Raise UnknownTopic unless offsets are given for exactly the partitions that are read, as Kafka's source does."""
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
    """Raise OffsetOutOfRange if an offset above 0 is given for a partition that was never written to."""
    for name, given in (("startingOffsets", options.starting), ("endingOffsets", options.ending)):
        if not isinstance(given, str) and given[topic][number] > 0:
            raise _beyond(name, given[topic][number], topic, number, 0, 0)


def starting_offset(reader: LogReader, options: ReadOptions, topic: str, number: int, end: int) -> int:
    """The first offset to read in a partition."""
    time_ns = _time_of(options.starting_ns, options.starting_times, topic, number)
    if time_ns is not None:
        found = min(max(reader.find_time(time_ns), reader.lasting_start), end)
        if found == end and not options.none_is_latest:
            raise OffsetOutOfRange(
                f"{topic}/{number} has no message of the time {time_ns // 1_000_000} (ms since 1970) or later: begin "
                'earlier, or at its end with the option "startingOffsetsByTimestampStrategy" set to latest',
                offset=end,
                start=reader.start,
                end=end,
            )
        return found
    return _offset_of("startingOffsets", options.starting, reader, topic, number, end)


def _ending_offset(reader: LogReader, options: ReadOptions, topic: str, number: int, end: int) -> int:
    time_ns = _time_of(options.ending_ns, options.ending_times, topic, number)
    if time_ns is not None:
        return min(reader.find_time(time_ns), end)
    return _offset_of("endingOffsets", options.ending, reader, topic, number, end)


def _time_of(everywhere_ns: int | None, times: Times | None, topic: str, number: int) -> int | None:
    return everywhere_ns if times is None else times[topic][number]


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


def splits(
    folder: DataFolder, ranges: Sequence[Range], min_partitions: int, most_records: int | None = None
) -> list[Range]:
    """The ranges divided among tasks: by segments, and further for `min_partitions` tasks or `most_records` in each."""
    stretches = [(wanted, _stretches(folder, wanted)) for wanted in ranges]
    total = sum(weight for _, found in stretches for _, weight in found)
    most = max(_TASK_BYTES, min(_MOST_TASK_BYTES, total // _MANY_TASKS))
    found = [part for wanted, segments in stretches for part in _by_segments(wanted, segments, most)]
    if most_records is not None:
        found = [piece for part in found for piece in _cut(part, -(-part.messages // most_records))]
    messages = sum(part.messages for part in found)
    pieces = [1] * len(found)
    # The largest pieces are cut again until there are enough; none is empty.
    largest: list[tuple[float, int]] = [(-part.messages, number) for number, part in enumerate(found)]
    heapify(largest)
    for _ in range(min(min_partitions, messages) - len(found)):
        number = largest[0][1]
        pieces[number] += 1
        heapreplace(largest, (-(found[number].messages / pieces[number]), number))
    return [piece for part, count in zip(found, pieces, strict=True) for piece in _cut(part, count)]


def _stretches(folder: DataFolder, wanted: Range) -> list[tuple[int, int]]:
    """The first offset and the bytes of each segment of the range."""
    reader = folder.reader(wanted.topic, wanted.partition)
    return [] if reader is None else list(reader.stretches(wanted.start, wanted.stop))


def _by_segments(wanted: Range, segments: Sequence[tuple[int, int]], most: int) -> Iterator[Range]:
    """The range in whole segments, several small ones together, of at most so many bytes."""
    start, size = wanted.start, 0
    for first, weight in segments:
        if size and size + weight > most:
            yield Range(wanted.topic, wanted.partition, start, first)
            start, size = first, 0
        size += weight
    if start < wanted.stop:
        yield Range(wanted.topic, wanted.partition, start, wanted.stop)


def _cut(wanted: Range, count: int) -> Iterator[Range]:
    total = wanted.messages
    cuts = [wanted.start + total * i // count for i in range(count + 1)]
    for start, stop in pairwise(cuts):
        if start < stop:
            yield Range(wanted.topic, wanted.partition, start, stop)


def _shown(places: Sequence[tuple[str, int]]) -> str:
    some = ", ".join(f"{topic}/{number}" for topic, number in places[:10])
    return some + (f" and {len(places) - 10} more" if len(places) > 10 else "") if places else "nothing"


class Range(msgspec.Struct, frozen=True):
    """The messages [start, stop) of one partition."""

    topic: str
    partition: int
    start: int
    stop: int

    @property
    def messages(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"offsets {self.start} to {self.stop - 1} of {self.topic}/{self.partition}"


def lost(wanted: Range, start: int) -> OffsetOutOfRange:
    """The error for messages that retention removed before they were read."""
    until = min(start, wanted.stop)
    return OffsetOutOfRange(
        f"{until - wanted.start} messages of {wanted.topic}/{wanted.partition} are gone: retention removed those "
        f"before offset {start}, and reading was to begin at {wanted.start}. To continue without them, set the option "
        '"failOnDataLoss" to false',
        offset=wanted.start,
        start=start,
        end=wanted.stop,
    )


# The positions of a stream, as Spark keeps them in its checkpoint:
#
#     {"version": 1, "topics": {"orders": {"id": 4711, "partitions": {"0": {"epoch": 1, "offset": 23}}}}}
#
# The id tells the topic from a later one of the same name. The epoch tells whether the offset still has the same
# message: after a power cut it may have another one.


_VERSION: Final = 1


class TopicPositions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The position in each partition of a topic."""

    id: int
    partitions: dict[int, LogPosition] = {}


class Positions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The positions of a stream, by topic."""

    topics: dict[str, TopicPositions] = {}

    def at(self, topic: str, partition: int) -> LogPosition | None:
        """The position in a partition; None if it did not exist then, and is read from its beginning."""
        known = self.topics.get(topic)
        return None if known is None else known.partitions.get(partition)

    def places(self) -> Iterator[tuple[str, int, LogPosition]]:
        for topic, known in self.topics.items():
            for partition, position in known.partitions.items():
                yield topic, partition, position

    def offsets(self) -> dict[str, tuple[int, dict[int, int]]]:
        """By topic: its id, and the offset in each partition."""
        return {
            topic: (known.id, {number: position.offset for number, position in known.partitions.items()})
            for topic, known in self.topics.items()
        }


def to_json(positions: Positions) -> dict[str, Any]:
    """The document for Spark's checkpoint, always in the same order: Spark compares it as text."""
    topics = {
        topic: {
            "id": known.id,
            "partitions": {
                str(number): {"epoch": position.epoch, "offset": position.offset}
                for number, position in sorted(known.partitions.items())
            },
        }
        for topic, known in sorted(positions.topics.items())
    }
    return {"version": _VERSION, "topics": topics}


def from_json(document: Mapping[str, Any]) -> Positions:
    """The positions in a checkpoint. Raises InvalidRequest if it is not ours, or of a newer release."""
    if document.get("version") != _VERSION:
        raise InvalidRequest(
            f"the checkpoint's offsets {str(dict(document))[:200]} were not written by this source, or by a newer "
            "release: give the query a checkpoint of its own, or upgrade"
        )
    try:
        return msgspec.convert({"topics": document.get("topics", {})}, Positions, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the checkpoint's offsets are invalid: {error}. Start with a new checkpoint") from None


def lag(progress: Any) -> dict[str, float]:
    """How many messages a streaming query is behind, by the names of the metrics that Spark's Kafka source has.

    Args:
        progress: What `query.lastProgress` or a `StreamingQueryListener` tells. Sources of other kinds do not count.

    Returns:
        `minOffsetsBehindLatest`, `maxOffsetsBehindLatest` and `avgOffsetsBehindLatest` over all partitions, and their
        sum as `offsetsBehindLatest`; all 0 if there is no partition.
    """
    behind = []
    for source in progress.sources:
        ends = [json.loads(text) if isinstance(text, str) else text for text in (source.endOffset, source.latestOffset)]
        if all(isinstance(end, dict) and end.get("version") == _VERSION and "topics" in end for end in ends):
            end, latest = map(from_json, ends)
            for topic, number, position in latest.places():
                known = end.at(topic, number)
                behind.append(position.offset - (0 if known is None else known.offset))
    total, count = sum(behind), max(len(behind), 1)
    names = ("minOffsetsBehindLatest", "maxOffsetsBehindLatest", "avgOffsetsBehindLatest", "offsetsBehindLatest")
    return dict(zip(names, (min(behind, default=0), max(behind, default=0), total / count, total), strict=True))


class StreamPlanner:
    """Decides what the next batch of a stream reads, from positions and files alone.

    The only thing it remembers is where a run with AvailableNow ends.
    """

    def __init__(
        self,
        folder: DataFolder,
        options: ReadOptions,
        *,
        last: Positions | None = None,
        say: Callable[[str], None] = logger.warning,
    ) -> None:
        self.folder = folder
        self._options = options
        self._last = last  # with AvailableNow: what was there at the beginning
        self._say = say
        self._reported: set[tuple[str, int, int]] = set()

    def initial(self) -> Positions:
        """The positions of a new query."""
        places = list(self.folder.partitions(self._options.subscription))
        for name, given in _given_places(self._options):
            check_places(name, given, places)
        found: dict[str, dict[int, LogPosition]] = {}
        for topic, number in places:
            reader = self.folder.reader(topic, number)
            offsets = found.setdefault(topic, {})
            if reader is None:
                check_unwritten(self._options, topic, number)
            else:
                offset = starting_offset(reader, self._options, topic, number, reader.end)
                offsets[number] = reader.position(offset)
        return self._positions(found)

    def freeze(self) -> None:
        """Read no further than the messages that are there now."""
        self._last = self.end()

    def end(self) -> Positions:
        """The end of every partition."""
        found: dict[str, dict[int, LogPosition]] = {
            topic: {} for topic in self.folder.topics(self._options.subscription)
        }
        for topic, number, reader in self._logs():
            found[topic][number] = reader.position(reader.end)
        return self._positions(found)

    def latest(self, start: Positions, most: int | None) -> Positions:
        """The positions after the next batch: at most `most` messages, in proportion to what each partition has.

        A topic that is new to the query only gets its position, and is read from the next batch on. Otherwise nothing
        would tell whether messages at its head were dropped before or after.
        """
        self._check_topics(start)
        waiting = {(wanted.topic, wanted.partition): wanted for wanted in self._waiting(start)}
        total = sum(wanted.stop - wanted.start for wanted in waiting.values())
        bytes_left = self._options.max_bytes
        weights = (
            {} if bytes_left is None else {place: self._weigh(wanted, bytes_left) for place, wanted in waiting.items()}
        )
        weight = sum(weights.values())
        found = {topic: dict(known.partitions) for topic, known in start.topics.items()} | self._new_topics(start)
        for place, wanted in waiting.items():
            stop = wanted.stop
            if most is not None and total > most:
                # At least one, or a small partition beside a large one would never be read.
                stop = min(stop, wanted.start + max(1, (wanted.stop - wanted.start) * most // total))
            reader = self._reader(*place)
            if bytes_left is not None and weight > bytes_left:
                stop = min(stop, reader.reach(wanted.start, max(1, weights[place] * bytes_left // weight)))
            known = start.at(*place)
            if stop != (0 if known is None else known.offset):  # also if it skips messages that are gone
                found[place[0]][place[1]] = reader.position(stop)
        return self._positions(found, start)

    def ranges(self, start: Positions, end: Positions) -> list[Range]:
        """The ranges between two positions, which a checkpoint may have planned long ago."""
        self._check_topics(start)
        self._check_topics(end)
        found = []
        for topic, number, position in end.places():
            reader = self.folder.reader(topic, number)
            if reader is None:
                raise InvalidRequest(
                    f"the checkpoint knows {topic}/{number} up to offset {position.offset}, but that partition is not "
                    f"in {self.folder.path}: correct the path, restore the files, or start with a new checkpoint"
                )
            if topic not in start.topics:
                continue  # it was only noted
            stop = self._held(reader, topic, number, position)
            if stop > reader.end:
                stop = self._cut_short(reader, topic, number, stop)
            first = self._first(reader, topic, number, start.at(topic, number), stop)
            if first < stop:
                found.append(Range(topic, number, first, stop))
        return found

    def _cut_short(self, reader: LogReader, topic: str, number: int, stop: int) -> int:
        """The end of a log that lost messages of a planned batch when the machine went down. Raises, or warns."""
        end = reader.end
        if self._options.fail_on_data_loss:
            raise OffsetOutOfRange(
                f"{topic}/{number} ends at {end}, and the checkpoint has planned to read up to {stop}: messages that "
                "were not synced may be lost. Open the folder once, so that it is recovered, and start the query "
                'again; or set the option "failOnDataLoss" to false',
                offset=stop,
                start=reader.start,
                end=end,
            )
        self._tell(topic, number, end, stop)
        return end

    def unread(self, positions: Positions) -> dict[str, tuple[int, dict[int, int]]]:
        """What retention must keep: each topic that is read, from its position on."""
        known, found = positions.offsets(), {}
        for topic in self.folder.topics(self._options.subscription):
            topic_id, offsets = known.get(topic, (self.folder.topic_id(topic), {}))
            others = range(0 if self._options.subscription.partitions is None else self.folder.partition_count(topic))
            unread = {n: NOT_READ for n in others if not self._options.subscription.wants(topic, n)}
            found[topic] = (topic_id, offsets | unread)
        return found

    def _new_topics(self, start: Positions) -> dict[str, dict[int, LogPosition]]:
        """The topics that the query does not know yet, each from its beginning."""
        found: dict[str, dict[int, LogPosition]] = {}
        for topic, number in self.folder.partitions(self._options.subscription):
            if topic in start.topics or (self._last is not None and topic not in self._last.topics):
                continue
            offsets, reader = found.setdefault(topic, {}), self.folder.reader(topic, number)
            if reader is not None:
                offsets[number] = reader.position(reader.lasting_start)
        return found

    def _waiting(self, start: Positions) -> Iterator[Range]:
        """The range of each partition that could be read."""
        for topic, number, reader in self._logs():
            if topic not in start.topics:
                continue
            end = self._stop(topic, number, reader)
            first = self._first(reader, topic, number, start.at(topic, number), end)
            if first <= end:
                yield Range(topic, number, first, end)

    def _stop(self, topic: str, number: int, reader: LogReader) -> int:
        if self._last is None:
            return reader.end
        last = self._last.at(topic, number)
        return 0 if last is None else min(last.offset, reader.end)

    def _first(self, reader: LogReader, topic: str, number: int, position: LogPosition | None, stop: int) -> int:
        """The first offset to read. Raises OffsetOutOfRange or warns if messages there are gone.

        A partition without a position was empty when the topic was noted: it is read from 0 on.
        """
        wanted = 0 if position is None else self._held(reader, topic, number, position)
        start = reader.start
        if wanted < start and wanted < stop:
            if self._options.fail_on_data_loss:
                raise lost(Range(topic, number, wanted, stop), start)
            self._tell(topic, number, wanted, min(start, stop))
        return max(wanted, start)

    def _held(self, reader: LogReader, topic: str, number: int, position: LogPosition) -> int:
        """The offset of a position, or the end of its epoch if that lost its tail. Raises TailLost or warns then."""
        try:
            reader.check_position(position)
        except TailLost as gone:
            if self._options.fail_on_data_loss:
                raise TailLost(
                    f"{position.offset - gone.epoch_end} messages of {topic}/{number} that this query has read, "
                    f"offsets {gone.epoch_end} to {position.offset - 1}, were lost in a power cut or truncated, and "
                    'others may have those offsets now. To read those, set the option "failOnDataLoss" to false',
                    epoch=gone.epoch,
                    offset=gone.offset,
                    epoch_end=gone.epoch_end,
                ) from None
            self._tell(topic, number, gone.epoch_end, position.offset)
            return gone.epoch_end
        return position.offset

    def _tell(self, topic: str, number: int, first: int, stop: int) -> None:
        if (topic, number, stop) not in self._reported:  # once, though Spark plans again and again
            self._reported.add((topic, number, stop))
            self._say(
                f"{stop - first} messages of {topic}/{number} are gone, offsets {first} to {stop - 1}: the stream "
                "continues after them"
            )

    def _check_topics(self, positions: Positions) -> None:
        """Raise InvalidRequest if the checkpoint is of other topics, or of an earlier topic of the same name."""
        topics = self.folder.topics(self._options.subscription)
        for topic, known in positions.topics.items():
            if topic not in topics:
                reads = ", ".join(topics[:10]) or "none"
                raise InvalidRequest(
                    f"the checkpoint is of topic {topic}, and this query reads {reads}: give it a checkpoint of its "
                    "own, or read what the checkpoint is of"
                )
            if known.id != self.folder.topic_id(topic):
                raise InvalidRequest(
                    f"topic {topic} was deleted and recreated since the checkpoint was written: give the query a new "
                    "checkpoint to read the new topic"
                )

    def _logs(self) -> Iterator[tuple[str, int, LogReader]]:
        for topic, number in self.folder.partitions(self._options.subscription):
            reader = self.folder.reader(topic, number)
            if reader is not None:
                yield topic, number, reader

    def _reader(self, topic: str, number: int) -> LogReader:
        reader = self.folder.reader(topic, number)
        assert reader is not None  # it was asked for its end
        return reader

    def _weigh(self, wanted: Range, most: int) -> int:
        """About how many bytes the range has; not counted beyond `most`."""
        reader = self._reader(wanted.topic, wanted.partition)
        return most + 1 if reader.reach(wanted.start, most) < wanted.stop else reader.weigh(wanted.start, wanted.stop)

    def _positions(self, found: dict[str, dict[int, LogPosition]], known: Positions | None = None) -> Positions:
        """The positions of these topics, with the ids of the checkpoint for those that it knows."""
        topics = {}
        for topic, partitions in found.items():
            before = None if known is None else known.topics.get(topic)
            topics[topic] = TopicPositions(self.folder.topic_id(topic) if before is None else before.id, partitions)
        return Positions(topics)


def sealed_ranges(folder: DataFolder, subscription: Subscription) -> Iterator[Range]:
    """What each partition has in front of the segment that is being written."""
    for topic, number in folder.partitions(subscription):
        reader = folder.reader(topic, number)
        if reader is not None and (segments := reader.segments()):
            yield Range(topic, number, reader.start, segments[-1].base_offset)


# What the driver asks of a place: one question and one answer for each call of Spark's, so that a server is asked as
# few times as a folder is.


Step: TypeAlias = Literal["batch", "initial", "latest", "end", "ranges", "sealed", "unread"]


class PlanRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a plan: the options as the user gave them, and positions as in Spark's checkpoint.

    `until` are the positions at which a run ends; `most` is the most messages that the next batch may have.
    """

    step: Step
    options: dict[str, str]
    start: dict[str, Any] | None = None
    end: dict[str, Any] | None = None
    until: dict[str, Any] | None = None
    most: int | None = None


class ReadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan: positions or ranges, what retention must keep for them, and what was found to be lost."""

    positions: dict[str, Any] | None = None
    ranges: list[Range] = []
    pins: dict[str, TopicPins] = {}
    lost: list[str] = []


def plan(folder: DataFolder, asked: PlanRequest, options: ReadOptions) -> ReadPlan:
    """Take one step. Reads files only."""
    lost: list[str] = []
    if asked.step == "batch":
        ranges = batch_ranges(folder, options, lost.append)
        return ReadPlan(ranges=_shared_out(folder, ranges, options), lost=lost)
    if asked.step == "sealed":
        return ReadPlan(ranges=list(sealed_ranges(folder, options.subscription)))
    start = from_json(asked.start) if asked.start else Positions()
    until = None if asked.until is None else from_json(asked.until)
    planner = StreamPlanner(folder, options, last=until, say=lost.append)
    positions, ranges = None, []
    if asked.step == "initial":
        positions = start = planner.initial()
    elif asked.step == "latest":
        positions = planner.latest(start, asked.most)
    elif asked.step == "end":
        positions = planner.end()
    elif asked.step == "ranges":
        ranges = _shared_out(folder, planner.ranges(start, from_json(asked.end or {})), options)
    pins = {topic: TopicPins(topic_id, offsets) for topic, (topic_id, offsets) in planner.unread(start).items()}
    return ReadPlan(positions=None if positions is None else to_json(positions), ranges=ranges, pins=pins, lost=lost)


def options_of(asked: PlanRequest, now_ms: int) -> ReadOptions:
    """The options of a request, checked."""
    return (batch_read_options if asked.step == "batch" else stream_read_options)(asked.options, now_ms)


def _shared_out(folder: DataFolder, ranges: Sequence[Range], options: ReadOptions) -> list[Range]:
    return splits(folder, ranges, options.min_partitions, options.most_records)
