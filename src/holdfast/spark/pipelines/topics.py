"""The topics that a pipeline reads: as a stream for Spark, and as numbers for a plan."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.api.times import instant_ns, parse_instant
from holdfast.errors import BadSettings, HoldfastError, InvalidRequest
from holdfast.spark.pipelines.context import Read
from holdfast.spark.pipelines.lake import BATCH, read_table
from holdfast.spark.pipelines.ledger import Ledger
from holdfast.spark.pipelines.spec import Options
from holdfast.spark.source.admission import Positions, from_json
from holdfast.spark.source.folder import DataFolder
from holdfast.spark.source.options import Subscription
from holdfast.spark.source.rows import starting_offset
from holdfast.storage.files import join, read_file

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from holdfast.spark.pipelines.context import Context


SPARK: Final = "spark"


def stream_options(context: Context) -> dict[str, str]:
    """The options of the source, from those of the pipeline."""
    options = context.options
    given = {"path": context.folder, "includeHeaders": "true", "groupId": context.name}
    if options.pattern is not None:
        given["subscribePattern"] = options.pattern
    else:
        given["subscribe"] = ",".join(options.topics)
    if options.since is not None:
        given["startingTimestamp"] = options.since
    else:
        given["startingOffsets"] = options.starting
    if options.max_rows_per_batch is not None:
        given["maxOffsetsPerTrigger"] = str(options.max_rows_per_batch)
    given["failOnDataLoss"] = str(options.fail_on_data_loss).lower()
    return given


def messages(context: Context) -> DataFrame:
    """The topics as a stream."""
    return context.spark.readStream.format("holdfast").options(**stream_options(context)).load()


def offsets_file(context: Context, batch: int) -> str | None:
    """What Spark noted about a batch before it began: the offsets that it reaches."""
    content = read_file(context.disk, join(context.checkpoint, f"{SPARK}/offsets/{batch}"))
    return None if content is None else content.decode("utf-8")


def position(context: Context) -> Positions | None:
    """How far the topics were landed; None before the first batch."""
    last = Ledger(context.world, context.checkpoint).last()
    return None if last is None or last.offsets is None else positions_in(last.offsets)


def last_committed(context: Context) -> int:
    """The last batch that Spark is through with; -1 before the first."""
    folder = join(context.checkpoint, f"{SPARK}/commits")
    names = context.disk.names(folder) if context.disk.exists(folder) else []
    return max((int(name) for name in names if name.isdigit()), default=-1)


def positions_in(text: str) -> Positions | None:
    """The source's own line in a file of offsets."""
    for line in text.splitlines():
        if line.startswith("{"):
            document = json.loads(line)
            if "topics" in document:
                return from_json(document)
    return None


def unread(context: Context) -> list[Read]:
    """What each partition has that was not landed yet."""
    from holdfast.spark.source.options import stream_options as checked

    now_ms = context.world.clock.now_ns() // 1_000_000
    options = checked(stream_options(context), now_ms)
    folder = DataFolder(context.folder, context.world)
    known = position(context)
    found = []
    for topic, number in folder.partitions(options.subscription):
        reader = folder.reader(topic, number)
        if reader is None:
            found.append(Read(what=f"{topic}/{number}", start="0", end="0", rows=0, bytes=0))
            continue
        end = reader.end
        at = None if known is None else known.at(topic, number)
        if at is not None:
            start = at.offset
        else:
            start = starting_offset(reader, options, topic, number, end) if known is None else reader.start
        size = _bytes_between(reader, start, end)
        found.append(
            Read(what=f"{topic}/{number}", start=str(start), end=str(end), rows=max(end - start, 0), bytes=size)
        )
    return found


def rows_left(context: Context) -> int | None:
    """How many messages are beyond what was landed; None where the folder cannot be looked at."""
    try:
        return sum(read.rows or 0 for read in unread(context))
    except HoldfastError:
        return None


def check_topics(context: Context) -> None:
    """Refuse a folder or a topic that is not there, before Spark is asked."""
    DataFolder(context.folder, context.world).topics(Subscription(names=tuple(context.options.topics)))


def _bytes_between(reader: Any, start: int, end: int) -> int:
    """About how many bytes the log has for these messages: whole segments, and a share of those at the ends."""
    total = 0.0
    for segment in reader.segments():
        first, last = max(segment.base_offset, start), min(segment.next_offset, end)
        if first < last:
            total += segment.bytes * (last - first) / max(segment.next_offset - segment.base_offset, 1)
    return round(total)


# A slice of topics, or of a table that was made of them: by time, key, offsets and SQL, as one DataFrame.


_FIRST, _LAST = -2, -1

Offsets = dict[str, dict[int, int]]


class SliceOptions(Options, frozen=True, kw_only=True):
    """Which messages: of topics, or of the table of the pipeline `source`.

    `since` is the first moment meant and `until` the first that is not, as ISO 8601 or `-2h` from now; so are
    `starting_offsets` and `ending_offsets`, by topic and partition. Partitions that they leave out are read as wholes.
    """

    topics: tuple[str, ...] = ()
    since: str | None = None
    until: str | None = None
    key: str | None = None
    starting_offsets: Offsets = msgspec.field(default_factory=dict)
    ending_offsets: Offsets = msgspec.field(default_factory=dict)
    where: str | None = None

    def __post_init__(self) -> None:
        if bool(self.topics) == (self.source is not None):
            raise BadSettings(
                "say what to read: topics, or source (a pipeline whose table holds messages); one of them"
            )


def messages_in(context: Context) -> DataFrame:
    """The messages that the options mean, with their headers."""
    from pyspark.sql import functions as f

    options: SliceOptions = context.options
    found = _of_topics(context, options) if options.topics else _of_table(context, options)
    now_ms = context.world.clock.now_ns() // 1_000_000
    for name, text in (("since", options.since), ("until", options.until)):
        if text is not None:
            moment = f.timestamp_micros(f.lit(_instant_ns(name, text, now_ms) // 1000))
            found = found.where(f.col("timestamp") >= moment if name == "since" else f.col("timestamp") < moment)
    if options.key is not None:
        found = found.where(f.col("key") == f.encode(f.lit(options.key), "UTF-8"))
    return found if options.where is None else found.where(options.where)


def _of_topics(context: Context, options: SliceOptions) -> DataFrame:
    from holdfast.spark.source.folder import DataFolder
    from holdfast.spark.source.options import Subscription

    places = list(DataFolder(context.folder, context.world).partitions(Subscription(names=options.topics)))
    reader = context.spark.read.format("holdfast").option("path", context.folder)
    reader = reader.option("subscribe", ",".join(options.topics)).option("includeHeaders", "true")
    # Times are found by the index, offsets are asked for as such: nothing else is read.
    for name, offsets, since, other in (
        ("starting", options.starting_offsets, options.since, _FIRST),
        ("ending", options.ending_offsets, options.until, _LAST),
    ):
        if offsets:
            reader = reader.option(f"{name}Offsets", _all_places(f"{name}_offsets", offsets, places, other))
        elif since is not None:
            reader = reader.option(f"{name}Timestamp", since)
    return reader.load()


def _of_table(context: Context, options: SliceOptions) -> DataFrame:
    from pyspark.sql import functions as f

    assert options.source is not None
    last = Ledger(context.world, context.project.checkpoint(options.source)).last()
    table = context.project.table(options.source)
    found = None if last is None else read_table(context.spark, context.disk, table, after=-1, through=last.batch)
    if found is None:
        raise InvalidRequest(f"the table of {options.source} has no rows yet: run {options.source} first")
    missing = {"topic", "partition", "offset", "timestamp", "key", "value"} - set(found.columns)
    if missing:
        raise InvalidRequest(
            f"the table of {options.source} does not hold messages, it has no {', '.join(sorted(missing))}: "
            "name a pipeline of the kind land or compact"
        )
    for offsets, first in ((options.starting_offsets, True), (options.ending_offsets, False)):
        for topic, places in offsets.items():
            for partition, offset in places.items():
                found = found.where(~_is_outside(f.col("topic") == topic, partition, offset, first=first))
    return found.drop(BATCH)


def _is_outside(of_topic: Column, partition: int, offset: int, *, first: bool) -> Column:
    from pyspark.sql import functions as f

    there = of_topic & (f.col("partition") == partition)
    return there & (f.col("offset") < offset if first else f.col("offset") >= offset)


def _all_places(name: str, given: Offsets, places: list[tuple[str, int]], other: int) -> str:
    """Offsets for all partitions that are read, as the source wants them."""
    wanted: dict[str, dict[str, int]] = {}
    for topic, partition in places:
        wanted.setdefault(topic, {})[str(partition)] = given.get(topic, {}).get(partition, other)
    for topic, offsets in given.items():
        for partition in offsets:
            if (topic, partition) not in places:
                raise InvalidRequest(f"{name} names {topic}/{partition}, which is not among what is read")
    return as_json(wanted)


def as_json(value: object) -> str:
    """An option of the source that is more than a word."""
    return json.dumps(value)


def _instant_ns(name: str, text: str, now_ms: int) -> int:
    if text.isascii() and text.isdigit() and len(text) >= 10:
        return int(text) * 1_000_000
    return instant_ns(parse_instant(text, now_ms, name), name)


def selection_of(options: SliceOptions) -> dict[str, Any]:
    """The options that say which messages are meant, as plain values."""
    return {name: getattr(options, name) for name in SELECTING}


SELECTING: Final = ("source", "topics", "since", "until", "key", "starting_offsets", "ending_offsets", "where")
