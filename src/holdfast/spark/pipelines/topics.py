"""The topics that a pipeline reads: as a stream for Spark, and as numbers for a plan."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from holdfast.errors import HoldfastError
from holdfast.spark.folder import DataFolder
from holdfast.spark.options import Subscription
from holdfast.spark.pipelines.ledger import Ledger
from holdfast.spark.pipelines.results import Read
from holdfast.spark.plan import starting_offset
from holdfast.spark.positions import Positions, from_json
from holdfast.storage.files import join, read_file

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

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
    from holdfast.spark.options import stream_options as checked

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
