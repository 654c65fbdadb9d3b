"""`reconcile`: the queue against the lake, message by message: nothing missing, nothing twice, nothing changed.

Both are compared as far as the lake's pipeline has read. The lake must have every message that the queue has, unless
the expectations of its pipeline drop or quarantine it. The lake may also have messages that the queue has no longer,
because of retention or key compaction.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.errors import BadSettings, InvalidRequest
from holdfast.spark.pipelines import f
from holdfast.spark.pipelines.batches import names_that, reading_files, unmet_sql
from holdfast.spark.pipelines.checkpoint import LedgerBatch, ledger_of
from holdfast.spark.pipelines.compact import POSITIONS, offset_options
from holdfast.spark.pipelines.lake import read_table
from holdfast.spark.pipelines.land import positions_in
from holdfast.spark.pipelines.origin import partitions_there
from holdfast.spark.pipelines.report import replaced_as_a_whole
from holdfast.spark.pipelines.spec import (
    QUARANTINE_SUFFIX,
    Context,
    PipelineKind,
    PipelineOptions,
    Plan,
    Read,
    Spec,
    Summary,
)
from holdfast.spark.ranges import Range

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


PLACE: Final = ("topic", "partition", "offset")
_ROW: Final = "topic string, partition int, offset long, timestamp timestamp"
FAULTS: Final = ("missing", "duplicated", "changed", "unknown")

_TRIES: Final = 3
_SHOWN: Final = 10


class ReconcileOptions(PipelineOptions, frozen=True, kw_only=True):
    """Options of `reconcile`. `source` is the pipeline to prove. Without `values` only offsets are compared."""

    values: bool = True

    def __post_init__(self) -> None:
        if self.source is None:
            raise BadSettings("name the pipeline to check: source: NAME, one of the kind land or compact")
        if self.expect:
            raise BadSettings("a pipeline of the kind reconcile has no expect: what it expects is that nothing differs")


class Bounds(Range, frozen=True):
    """What is compared in one partition: from the first message kept (`start`) to where the lake ends (`stop`).

    `end` is the end of the log. If a topic is compacted, the lake may have more messages than the queue.
    """

    end: int = 0
    compacted: bool = False


def differences(queue: DataFrame, lake: DataFrame, bounds: DataFrame) -> DataFrame:
    """One row for each message in the queue or the lake: how often the lake has it, and what is wrong.

    `queue` and `lake` have topic, partition, offset, timestamp and a checksum. `queue` also has `may_lack`, which is
    true if the lake need not have the message.
    """
    once = lake.groupBy(*PLACE).agg(
        f.count("*").alias("copies"),
        f.min("timestamp").alias("lake_timestamp"),
        f.min("checksum").alias("lowest"),
        f.max("checksum").alias("highest"),
    )
    both = queue.join(once, list(PLACE), "full_outer").join(f.broadcast(bounds), ["topic", "partition"], "left")
    in_queue, in_lake = f.col("timestamp").isNotNull(), f.col("copies").isNotNull()
    known = f.col("start").isNotNull() & (f.col("offset") >= f.col("start"))
    other = (f.col("lowest") != f.col("checksum")) | (f.col("highest") != f.col("checksum"))
    fault = (
        f.when(in_queue & ~in_lake & ~f.col("may_lack"), "missing")
        .when(~in_queue & in_lake & known & ~f.col("compacted"), "unknown")
        .when(in_queue & in_lake & other, "changed")
        .when(f.col("copies") > 1, "duplicated")
    )
    return both.select(
        *PLACE,
        f.coalesce("timestamp", "lake_timestamp").alias("timestamp"),
        in_queue.alias("in_queue"),
        f.coalesce("copies", f.lit(0)).alias("copies"),
        fault.alias("fault"),
    )


def by_hour(compared: DataFrame) -> DataFrame:
    """Counts by partition and hour."""
    faults = [f.count_if(f.col("fault") == fault).alias(fault) for fault in FAULTS]
    return compared.groupBy("topic", "partition", f.date_trunc("hour", "timestamp").alias("hour")).agg(
        f.count_if("in_queue").alias("in_queue"), f.sum("copies").alias("in_lake"), *faults
    )


def ranges_of(compared: DataFrame) -> DataFrame:
    """The faults, one row for neighbouring offsets: topic, partition, fault, first and last offset, count."""
    from pyspark.sql import Window

    wrong = compared.where(f.col("fault").isNotNull())
    order = Window.partitionBy("topic", "partition", "fault").orderBy("offset")
    run_of = wrong.withColumn("run", f.col("offset") - f.row_number().over(order))
    return (
        run_of.groupBy("topic", "partition", "fault", "run")
        .agg(f.min("offset").alias("first_offset"), f.max("offset").alias("last_offset"), f.count("*").alias("count"))
        .drop("run")
        .orderBy("topic", "partition", "first_offset")
    )


def plan(context: Context) -> Plan:
    writes = (f"{context.report_folder}/hours", f"{context.report_folder}/differences")
    source = _source(context)
    last = ledger_of(context, source.name).last()
    if last is None:
        return context.plan([], writes=writes, notes=(f"{source.name} has not run yet: run it first",), sized=False)
    bounds = _bounds(context, source, last)
    return context.plan(
        [Read.of_offsets(each.topic, each.partition, each.start, each.stop) for each in bounds],
        writes=writes,
        notes=() if context.options.values else ("only offsets are compared, not what the messages hold",),
        sized=False,
    )


def run(context: Context) -> Summary:
    """Compare queue and lake, again if retention dropped messages meanwhile."""
    source = _source(context)
    last = ledger_of(context, source.name).last()
    if last is None:
        raise InvalidRequest(f"{source.name} has not run yet: run it, then {context.name}")
    bounds = _bounds(context, source, last)
    counts = _counts(context, source, last, bounds)
    for _ in range(_TRIES):
        before, bounds = bounds, _bounds(context, source, last)
        if not counts["unknown"] or [each.start for each in bounds] == [each.start for each in before]:
            break
        counts = _counts(context, source, last, bounds)
    wrong = sum(counts[fault] for fault in FAULTS)
    behind = sum(max(0, each.end - each.stop) for each in bounds)
    notes = [f"{counts[fault]} {fault}" for fault in FAULTS if counts[fault]]
    notes += _examples(context) if wrong else [f"queue and {source.name} agree"]
    return context.summary(
        rows_in=counts["in_queue"],
        rows_out=counts["in_lake"],
        lag=behind,
        files=2,
        ok=wrong == 0,
        notes=tuple(notes),
        details=counts,
    )


def _counts(context: Context, source: Spec, last: LedgerBatch, bounds: list[Bounds]) -> dict[str, int]:
    """Compare, write both tables, and return the sums of their counts."""

    def compare() -> None:
        with replaced_as_a_whole(context) as fresh:
            _compare(context, source, last, bounds, fresh)

    reading_files(compare)
    hours = context.spark.read.parquet(f"{context.report_folder}/hours")
    names = ("in_queue", "in_lake", *FAULTS)
    return hours.agg(*[f.coalesce(f.sum(name), f.lit(0)).alias(name) for name in names]).collect()[0].asDict()


def _compare(context: Context, source: Spec, last: LedgerBatch, bounds: list[Bounds], fresh: str) -> None:
    table = context.spark.createDataFrame(
        [(each.topic, each.partition, each.start, each.compacted) for each in bounds],
        "topic string, partition int, start long, compacted boolean",
    )
    compared = differences(_queue(context, source, bounds), _lake(context, source, last), table).cache()
    try:
        by_hour(compared).coalesce(1).write.parquet(f"{fresh}/hours")
        ranges_of(compared).coalesce(1).write.parquet(f"{fresh}/differences")
    finally:
        compared.unpersist()


def _queue(context: Context, source: Spec, bounds: list[Bounds]) -> DataFrame:
    drops = [each for each in source.options.expect if each.on_fail == "drop"]
    readable = [each for each in bounds if each.start < each.stop]
    if not readable:
        return context.spark.createDataFrame([], f"{_ROW}, checksum long, may_lack boolean")
    # Retention may drop messages meanwhile. They are in the lake, which is no fault.
    reader = context.reader(failOnDataLoss="false", **offset_options(readable))
    if drops:
        reader = reader.options(includeHeaders="true", includeMetadata="true")
    else:
        reader = reader.schema(_ROW + (", key binary, value binary" if context.options.values else ""))
    may_lack = f.size(f.expr(unmet_sql(drops))) > 0 if drops else f.lit(False)
    return reader.load().select(*PLACE, "timestamp", _checksum(context), may_lack.alias("may_lack"))


def _lake(context: Context, source: Spec, last: LedgerBatch) -> DataFrame:
    names = [source.name]
    if names_that(source.options.expect, "quarantine"):
        names.append(f"{source.name}{QUARANTINE_SUFFIX}")
    tables = [read_table(context, name, through=last.batch) for name in names]
    parts = [table.select(*PLACE, "timestamp", _checksum(context)) for table in tables if table is not None]
    if not parts:
        return context.spark.createDataFrame([], f"{_ROW}, checksum long")
    return reduce(lambda one, other: one.unionByName(other), parts)


def _checksum(context: Context) -> Column:
    # The hash skips nulls, and null is not the same as an empty value.
    with_nulls = [f.col("key").isNull(), f.coalesce("key", f.lit(b"")), f.col("value").isNull(), f.col("value")]
    found = f.xxhash64("timestamp", *with_nulls) if context.options.values else f.lit(0).cast("long")
    return found.alias("checksum")


def _source(context: Context) -> Spec:
    """The pipeline to prove. Raises InvalidRequest if it is of another kind."""
    source = context.project.spec(context.options.source)
    if source.kind not in ("land", "compact"):
        raise InvalidRequest(
            f"{context.name} can prove pipelines of the kinds land and compact; {source.name}, its source, is of the "
            f"kind {source.kind}"
        )
    return source


def _bounds(context: Context, source: Spec, last: LedgerBatch) -> list[Bounds]:
    """What to compare: from the first message that is kept, or the first in the lake, to the end of the lake."""
    found, reached = [], _reached(last)
    for each in partitions_there(context, list(reached)):
        topic_id, offsets = reached[each.topic]
        if each.topic_id != topic_id:
            raise InvalidRequest(
                f"topic {each.topic} was deleted and recreated since {source.name} started: the lake holds messages of "
                f"the previous one. Run {source.name} with --full-refresh"
            )
        stop = offsets.get(each.partition)
        if stop is not None:
            found.append(Bounds(each.topic, each.partition, each.start, stop, each.end, each.compacted))
    return _from_where_it_began(context, source, last, found)


def _from_where_it_began(context: Context, source: Spec, last: LedgerBatch, bounds: list[Bounds]) -> list[Bounds]:
    """The bounds from where the pipeline began: it need not have earlier messages."""
    options = source.options
    if source.kind != "land" or (options.since is None and options.starting == "earliest"):
        return bounds
    lake = _lake(context, source, last).groupBy("topic", "partition").agg(f.min("offset").alias("first"))
    firsts = {(row["topic"], row["partition"]): row["first"] for row in lake.collect()}
    return [
        msgspec.structs.replace(each, start=max(each.start, firsts.get((each.topic, each.partition), each.stop)))
        for each in bounds
    ]


def _reached(last: LedgerBatch) -> dict[str, tuple[int, dict[int, int]]]:
    """By topic: its id, and the offset that the lake has reached in each partition."""
    if POSITIONS in last.state:
        return {
            topic: (known["id"], {int(partition): offset for partition, offset in known["offsets"].items()})
            for topic, known in last.state[POSITIONS].items()
        }
    positions = positions_in(last.offsets)
    if positions is None:
        raise InvalidRequest("the ledger does not say how far the topics were read: run the source once more")
    return positions.offsets()


def _examples(context: Context) -> list[str]:
    found = context.spark.read.parquet(f"{context.report_folder}/differences").orderBy(
        "topic", "partition", "first_offset"
    )
    examples = [
        f"{row['fault']}: {row['topic']}/{row['partition']} {row['first_offset']}"
        + (f" to {row['last_offset']}" if row["count"] > 1 else "")
        for row in found.limit(_SHOWN + 1).collect()
    ]
    more = [f"and more, in {context.report_folder}/differences"] if len(examples) > _SHOWN else []
    return examples[:_SHOWN] + more


_TEMPLATE: Final = """\
    kind: reconcile
    source: orders-land         # of the kind land or compact
    # values: false             # compare offsets only: reads far less
"""
KIND: Final = PipelineKind(ReconcileOptions, plan, run, _TEMPLATE, follows=False)
