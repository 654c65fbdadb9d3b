"""`land`: topics to a table, every message once, with all that is known of it (bronze)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, Literal

from holdfast.errors import BadSettings, HoldfastError
from holdfast.spark.options import stream_read_options
from holdfast.spark.pipelines import f
from holdfast.spark.pipelines.batches import check_columns, patiently, write_batch
from holdfast.spark.pipelines.checkpoint import LedgerBatch, ledger_of
from holdfast.spark.pipelines.lake import DATE, finish_pending, is_delta, optimize_if_worthwhile
from holdfast.spark.pipelines.origin import folder_of, partitions_there, subscribed_on_server
from holdfast.spark.pipelines.spec import Context, LakeOptions, PipelineKind, Plan, Positive, Read, Summary
from holdfast.spark.ranges import Positions, from_json, starting_offset

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class LandOptions(LakeOptions, frozen=True, kw_only=True):
    """Options of `land`. `starting` and `since` count only for the first run."""

    topics: tuple[str, ...] = ()
    pattern: str | None = None
    starting: Literal["earliest", "latest"] = "earliest"
    since: str | None = None
    max_rows_per_batch: Positive | None = None
    fail_on_data_loss: bool = True
    compact_files: bool = True
    target_file_bytes: Positive = 128 << 20

    def __post_init__(self) -> None:
        if self.source is not None:
            raise BadSettings("a pipeline of the kind land reads topics: write topics: [NAME], not source")
        if bool(self.topics) == bool(self.pattern):
            raise BadSettings("say which topics it lands, with topics: [NAME] or with pattern: REGEX")
        if self.since is not None and self.starting != "earliest":
            raise BadSettings("starting and since both say where the first run begins: give one of them")


def stream_options(folder: str, group: str, options: LandOptions) -> dict[str, str]:
    """The options of the source that a stream of the topics has."""
    by_name, since = options.pattern is None, options.since
    return {
        "path": folder,
        "includeHeaders": "true",
        "includeMetadata": "true",
        "groupId": group,
        "subscribe" if by_name else "subscribePattern": options.pattern or ",".join(options.topics),
        "startingOffsets" if since is None else "startingTimestamp": since or options.starting,
        "failOnDataLoss": str(options.fail_on_data_loss).lower(),
    }


def _stream_options(context: Context) -> dict[str, str]:
    most = context.options.max_rows_per_batch
    limit = {} if most is None else {"maxOffsetsPerTrigger": str(most)}
    return stream_options(context.folder, context.name, context.options) | limit


def positions_in(text: str | None) -> Positions | None:
    """The positions in the source's own line of a file of offsets."""
    documents = [json.loads(line) for line in (text or "").splitlines() if line.startswith("{")]
    return next((from_json(document) for document in documents if "topics" in document), None)


def unread(context: Context) -> list[Read]:
    """What each partition has that was not landed yet."""
    options = stream_read_options(_stream_options(context), context.world.clock.now_ns() // 1_000_000)
    last = ledger_of(context).last()
    known = None if last is None else positions_in(last.offsets)
    folder = folder_of(context)
    if folder is None:
        return _unread_on_server(context, known)
    found = []
    for topic, number in folder.partitions(options.subscription):
        reader = folder.reader(topic, number)
        if reader is None:
            found.append(Read.of_offsets(topic, number, 0, 0, bytes=0))
            continue
        end = reader.end
        at = None if known is None else known.at(topic, number)
        if at is not None:
            start = at.offset
        else:
            start = starting_offset(reader, options, topic, number, end) if known is None else reader.start
        found.append(Read.of_offsets(topic, number, start, end, bytes=_bytes_between(reader, start, end)))
    return found


def _unread_on_server(context: Context, known: Positions | None) -> list[Read]:
    topics, initial = subscribed_on_server(context, _stream_options(context))
    found = []
    for each in partitions_there(context, topics):
        at = (initial if known is None else known).at(each.topic, each.partition)
        start = each.start if at is None else at.offset
        size = each.bytes * (each.end - start) // max(each.end - each.start, 1)
        found.append(Read.of_offsets(each.topic, each.partition, start, each.end, bytes=size))
    return found


def rows_left(context: Context) -> int | None:
    """The number of messages that were not landed yet; None if the folder cannot be read."""
    try:
        return sum(read.rows or 0 for read in unread(context))
    except HoldfastError:
        return None


def _bytes_between(reader: Any, start: int, end: int) -> int:
    """About how many bytes these messages have in the log: whole segments, and a share of those at the ends."""
    total = 0.0
    for segment in reader.segments():
        first, last = max(segment.base_offset, start), min(segment.next_offset, end)
        if first < last:
            total += segment.bytes * (last - first) / max(segment.next_offset - segment.base_offset, 1)
    return round(total)


# A slice of topics, or of a table that was made of them: by time, key, offsets and SQL, as one DataFrame.


def as_json(value: object) -> str:
    """An option of the source that is more than a word."""
    return json.dumps(value)


LANDED_AT: Final = "_landed_at"
_MERGE_EVERY: Final = 50


def bronze(rows: DataFrame) -> DataFrame:
    """Messages as they are stored in the lake: with all columns, the time of landing, and the day."""
    return rows.select("*", f.current_timestamp().alias(LANDED_AT), f.to_date("timestamp").alias(DATE))


def plan(context: Context) -> Plan:
    reads = unread(context)
    return context.plan(reads, notes=("offsets that key compaction removed count as rows",) if reads else ())


def run(context: Context) -> Summary:
    finish_pending(context)
    partitions_there(context, context.options.topics)  # a missing folder or topic is our error, not one of Spark's
    from holdfast.spark.pipelines.streams import run_stream

    def opened() -> DataFrame:
        rows = bronze(context.spark.readStream.format("holdfast").options(**_stream_options(context)).load())
        check_columns(rows, context.options.expect, context.name)
        return rows

    done = run_stream(context, patiently(opened), write, lambda: rows_left(context), output_mode="append")
    _merge_files(context)
    return done


def write(context: Context, rows: DataFrame, batch: int, offsets: str | None) -> LedgerBatch:
    """One batch of the table; small files are merged now and then."""
    written = write_batch(context, batch, rows, partition_by=(DATE, "topic"), offsets=offsets)
    if batch % _MERGE_EVERY == _MERGE_EVERY - 1:
        _merge_files(context)
    return written


def _merge_files(context: Context) -> None:
    if context.options.compact_files and is_delta(context.tables, context.table):
        optimize_if_worthwhile(context.table, context.options.target_file_bytes)


_TEMPLATE: Final = """\
    kind: land
    topics: [orders]            # or pattern: "orders-.*"
    # starting: latest          # earliest by default; counts only for the first run
    # since: "-7d"              # or from a time: ISO 8601, or so long ago
    # max_rows_per_batch: 1000000
    # format: parquet           # plain files instead of a Delta table
    # compact_files: false      # leave small files alone
    # expect:
    #   - {name: has_key, check: "key IS NOT NULL", on_fail: warn}   # warn, drop, quarantine or fail
"""
KIND: Final = PipelineKind(
    LandOptions,
    plan,
    run,
    _TEMPLATE,
    identity=lambda options: {"topics": sorted(options.topics), "pattern": options.pattern},
)
