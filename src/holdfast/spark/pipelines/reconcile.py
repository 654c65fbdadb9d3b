"""`reconcile`: the queue against the lake, message by message: nothing missing, nothing twice, nothing changed.

The lake is looked at as far as its pipeline has come, and the queue as far as that. What is no longer in the queue,
dropped by retention or removed by key compaction, the lake may have; what the queue has, the lake must have, unless its
pipeline was told to drop or to put aside such rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.broker.folder.contents import settings_for
from holdfast.broker.folder.layout import topic_folder
from holdfast.errors import BadSettings, InvalidRequest
from holdfast.spark.pipelines.compact import POSITIONS
from holdfast.spark.pipelines.context import Kind, Plan, Read, Summary
from holdfast.spark.pipelines.expectations import names_that, unmet_sql
from holdfast.spark.pipelines.lake import read_table, replaced_as_a_whole
from holdfast.spark.pipelines.ledger import Batch, Ledger
from holdfast.spark.pipelines.spec import Options, Spec
from holdfast.spark.pipelines.steps import GONE
from holdfast.spark.pipelines.topics import as_json, positions_in
from holdfast.spark.source.folder import DataFolder
from holdfast.spark.source.options import Subscription

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from holdfast.spark.pipelines.context import Context

PLACE: Final = ("topic", "partition", "offset")
FAULTS: Final = ("missing", "duplicated", "changed", "unknown")

_TRIES: Final = 3
_SHOWN: Final = 10


class ReconcileOptions(Options, frozen=True, kw_only=True):
    """`source` is the pipeline to prove. Without `values` only offsets are compared, which reads far less."""

    values: bool = True

    def __post_init__(self) -> None:
        if self.source is None:
            raise BadSettings("say which pipeline it is to prove: source: NAME, one of the kind land or compact")
        if self.expect:
            raise BadSettings("a pipeline of the kind reconcile has no expect: what it expects is that nothing differs")


class Bounds(msgspec.Struct, frozen=True):
    """What is compared of one partition: from `start`, the first message kept, up to `stop`, how far the lake is.

    `end` is where the log ends. Of a compacted topic the lake may have more than the queue.
    """

    topic: str
    partition: int
    start: int
    stop: int
    end: int
    compacted: bool


def differences(queue: DataFrame, lake: DataFrame, bounds: DataFrame) -> DataFrame:
    """One row for each message that is on one side at least: how often the lake has it, and what is wrong.

    `queue` and `lake` have topic, partition, offset, timestamp and a checksum; `queue` also `may_lack`, true for what
    the lake need not have.
    """
    from pyspark.sql import functions as f

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
    from pyspark.sql import functions as f

    faults = [f.count_if(f.col("fault") == fault).alias(fault) for fault in FAULTS]
    return compared.groupBy("topic", "partition", f.date_trunc("hour", "timestamp").alias("hour")).agg(
        f.count_if("in_queue").alias("in_queue"), f.sum("copies").alias("in_lake"), *faults
    )


def ranges_of(compared: DataFrame) -> DataFrame:
    """What is wrong, neighbours as one row: topic, partition, fault, first and last offset, count."""
    from pyspark.sql import Window
    from pyspark.sql import functions as f

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
    """How much would be compared."""
    source = context.project.spec(context.options.source)
    bounds = _bounds(context, source, _last_batch(context, source))
    reads = tuple(
        Read(
            what=f"{each.topic}/{each.partition}",
            start=str(each.start),
            end=str(each.stop),
            rows=max(0, each.stop - each.start),
        )
        for each in bounds
    )
    notes = () if context.options.values else ("only offsets are compared, not what the messages hold",)
    rows = sum(read.rows or 0 for read in reads)
    writes = (f"{context.table}/hours", f"{context.table}/differences")
    return Plan(pipeline=context.name, kind=KIND.name, reads=reads, rows=rows, writes=writes, notes=notes)


def run(context: Context) -> Summary:
    """Compare, and look again where retention was at work meanwhile."""
    source = context.project.spec(context.options.source)
    last = _last_batch(context, source)
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
    return Summary(
        pipeline=context.name,
        kind=KIND.name,
        rows_in=counts["in_queue"],
        rows_out=counts["in_lake"],
        lag=behind,
        files=2,
        ok=wrong == 0,
        notes=tuple(notes),
        details=counts,
    )


def _counts(context: Context, source: Spec, last: Batch, bounds: list[Bounds]) -> dict[str, int]:
    for tries_left in reversed(range(_TRIES)):
        try:
            with replaced_as_a_whole(context) as fresh:
                _compare(context, source, last, bounds, fresh)
            break
        except Exception as error:
            # Files of the lake were merged between our listing and our reading them: list them again.
            if not tries_left or not any(word in str(error) for word in GONE):
                raise
    return _sums(context.spark.read.parquet(f"{context.table}/hours"))


def _compare(context: Context, source: Spec, last: Batch, bounds: list[Bounds], fresh: str) -> None:
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
    from pyspark.sql import functions as f

    drops = [each for each in source.options.expect if each.on_fail == "drop"]
    columns = "topic string, partition int, offset long, timestamp timestamp"
    reader = context.spark.read.format("holdfast").option("path", context.folder)
    if drops:
        reader = reader.option("includeHeaders", "true")
    else:
        reader = reader.schema(columns + (", key binary, value binary" if context.options.values else ""))
    readable = [each for each in bounds if each.start < each.stop]
    if not readable:
        empty = f"{columns}, checksum long, may_lack boolean"
        return context.spark.createDataFrame([], empty)
    assign: dict[str, list[int]] = {}
    for each in readable:
        assign.setdefault(each.topic, []).append(each.partition)
    reader = reader.option("assign", as_json(assign))
    for name, offsets in (
        ("startingOffsets", [(each.topic, each.partition, each.start) for each in readable]),
        ("endingOffsets", [(each.topic, each.partition, each.stop) for each in readable]),
    ):
        places: dict[str, dict[str, int]] = {}
        for topic, partition, offset in offsets:
            places.setdefault(topic, {})[str(partition)] = offset
        reader = reader.option(name, as_json(places))
    # Retention may be faster than we are; what it takes is in the lake, and no fault.
    rows = reader.option("failOnDataLoss", "false").load()
    may_lack = f.size(f.expr(unmet_sql(drops))) > 0 if drops else f.lit(False)
    return rows.select(*PLACE, "timestamp", _checksum(context).alias("checksum"), may_lack.alias("may_lack"))


def _lake(context: Context, source: Spec, last: Batch) -> DataFrame:
    columns = [*PLACE, "timestamp"]
    found = read_table(context.spark, context.disk, context.project.table(source.name), after=-1, through=last.batch)
    parts = [] if found is None else [found.select(*columns, _checksum(context).alias("checksum"))]
    if names_that(source.options.expect, "quarantine"):
        aside = context.project.quarantine(source.name)
        put_aside = read_table(context.spark, context.disk, aside, after=-1, through=last.batch)
        if put_aside is not None:
            parts.append(put_aside.select(*columns, _checksum(context).alias("checksum")))
    if not parts:
        schema = "topic string, partition int, offset long, timestamp timestamp, checksum long"
        return context.spark.createDataFrame([], schema)
    return parts[0] if len(parts) == 1 else parts[0].unionByName(parts[1])


def _checksum(context: Context) -> Column:
    from pyspark.sql import functions as f

    # Null and nothing are not the same: the hash passes over nulls.
    with_nulls = [f.col("key").isNull(), f.coalesce("key", f.lit(b"")), f.col("value").isNull(), f.col("value")]
    return f.xxhash64("timestamp", *with_nulls) if context.options.values else f.lit(0).cast("long")


def _last_batch(context: Context, source: Spec) -> Batch:
    if source.kind not in ("land", "compact"):
        raise InvalidRequest(
            f"{context.name} can prove pipelines of the kinds land and compact; {source.name}, its source, is of the "
            f"kind {source.kind}"
        )
    last = Ledger(context.world, context.project.checkpoint(source.name)).last()
    if last is None:
        raise InvalidRequest(f"{source.name} has not run yet: run it, then {context.name}")
    return last


def _bounds(context: Context, source: Spec, last: Batch) -> list[Bounds]:
    """What to compare: from the first message that is kept, or where the lake began, to how far the lake is."""
    folder = DataFolder(context.folder, context.world)
    found = []
    for topic, (topic_id, offsets) in _reached(last).items():
        folder.topics(Subscription(names=(topic,)))
        if folder.topic_id(topic) != topic_id:
            raise InvalidRequest(
                f"topic {topic} was deleted and made again since {source.name} began: the lake holds messages of "
                f"the one before. Run {source.name} with --full-refresh"
            )
        settings = settings_for(context.world, topic_folder(context.folder, topic), None, {})
        for partition, stop in offsets.items():
            reader = folder.reader(topic, partition)
            if reader is not None:
                compacted = "compact" in settings.cleanup
                found.append(Bounds(topic, partition, reader.start, stop, reader.end, compacted))
    return _from_where_it_began(context, source, last, found)


def _from_where_it_began(context: Context, source: Spec, last: Batch, bounds: list[Bounds]) -> list[Bounds]:
    """A pipeline that did not begin with the earliest message need not have what was there before."""
    from pyspark.sql import functions as f

    options = source.options
    if source.kind != "land" or (options.since is None and options.starting == "earliest"):
        return bounds
    lake = _lake(context, source, last).groupBy("topic", "partition").agg(f.min("offset").alias("first"))
    firsts = {(row["topic"], row["partition"]): row["first"] for row in lake.collect()}
    return [
        msgspec.structs.replace(each, start=max(each.start, firsts.get((each.topic, each.partition), each.stop)))
        for each in bounds
    ]


def _reached(last: Batch) -> dict[str, tuple[int, dict[int, int]]]:
    """By topic: its id, and how far each partition is in the lake."""
    if POSITIONS in last.state:
        return {
            topic: (known["id"], {int(partition): offset for partition, offset in known["offsets"].items()})
            for topic, known in last.state[POSITIONS].items()
        }
    positions = None if last.offsets is None else positions_in(last.offsets)
    if positions is None:
        raise InvalidRequest("the ledger does not say how far the topics were read: run the source once more")
    return positions.offsets()


def _sums(hours: DataFrame) -> dict[str, int]:
    from pyspark.sql import functions as f

    names = ("in_queue", "in_lake", *FAULTS)
    row = hours.agg(*[f.coalesce(f.sum(name), f.lit(0)).alias(name) for name in names]).collect()[0]
    return {name: row[name] for name in names}


def _examples(context: Context) -> list[str]:
    found = context.spark.read.parquet(f"{context.table}/differences").orderBy("topic", "partition", "first_offset")
    rows: list[Any] = found.limit(_SHOWN + 1).collect()
    told = [
        f"{row['fault']}: {row['topic']}/{row['partition']} {row['first_offset']}"
        + (f" to {row['last_offset']}" if row["count"] > 1 else "")
        for row in rows[:_SHOWN]
    ]
    return [*told, f"and more, in {context.table}/differences"] if len(rows) > _SHOWN else told


KIND: Final = Kind(
    name="reconcile",
    says="queue against lake: gaps, duplicates, changed messages; by partition and hour, with an exit code",
    options=ReconcileOptions,
    plan=plan,
    run=run,
    follows=False,
    template="""\
    kind: reconcile
    source: orders-land         # of the kind land or compact
    # values: false             # compare offsets only: reads far less
""",
)
