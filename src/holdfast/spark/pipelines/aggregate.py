"""`aggregate`: counts, rates, sizes and latencies by time window, kept up to date as rows come (gold).

A window into which new rows fall is computed anew from all rows of its source, so that its numbers never depend on how
the rows came in batches. The days that hold such windows are written anew and change places with the old ones.
Windows that ended longer ago than the watermark, as seen from the newest row, are closed: rows for them are counted as
late and left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.errors import BadSettings
from holdfast.spark.pipelines.batches import (
    ADDED_TO,
    Slice,
    Sorted,
    StepOptions,
    check_columns,
    check_kind_of_source,
    plan_steps,
    run_steps,
    source_of,
)
from holdfast.spark.pipelines.checkpoint import LedgerBatch
from holdfast.spark.pipelines.lake import BATCH, DATE, commit, quoted, read_table, replacements, stage
from holdfast.spark.pipelines.spec import PipelineKind, Plan, Summary, interval_ms, no_expectation_named

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from holdfast.spark.pipelines.spec import Context

START, END = "window_start", "window_end"
_HIGH: Final = "newest_us"
LATE: Final = "late"


class AggregateOptions(StepOptions, frozen=True, kw_only=True):
    """What `aggregate` may be told."""

    time: str | None = None
    window: str = "1 hour"
    slide: str | None = None
    watermark: str = "10 minutes"
    by: tuple[str, ...] = ()
    measures: dict[str, str] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.source is None:
            raise BadSettings("a pipeline of the kind aggregate needs a source: the name of one that writes a table")
        window_ms, slide_ms = interval_ms(self.window, "window"), interval_ms(self.slide or self.window, "slide")
        interval_ms(self.watermark, "watermark")
        if not 0 < slide_ms <= window_ms:
            raise BadSettings(f"slide is {self.slide or self.window!r}: give a time up to that of the window")
        for name in (*self.by, *self.measures):
            if name.lower() in (START, END, DATE, BATCH):
                raise BadSettings(f"{name!r} cannot be used in by or measures: the table has a column of that name")
        for name in self.measures:
            if name in self.by:
                raise BadSettings(f"{name!r} is both in by and in measures: give the measure another name")
        no_expectation_named(LATE, self.expect)
        for each in self.expect:
            if each.on_fail in ("drop", "quarantine"):
                raise BadSettings(
                    f"the expectation {each.name!r} is on numbers, which are neither dropped nor put aside: "
                    "use warn or fail here, or expect it of the rows of the source"
                )


def windows_of(rows: DataFrame, time: str, options: AggregateOptions) -> DataFrame:
    """The rows with the window, or the windows, that each belongs to."""
    from pyspark.sql import functions as f

    length = f"{interval_ms(options.window, 'window')} milliseconds"
    slide = f"{interval_ms(options.slide or options.window, 'slide')} milliseconds"
    found = rows.where(f.col(time).isNotNull()).withColumn("_window", f.window(f.col(time), length, slide))
    return found.select(
        "*", f.col("_window.start").alias(START), f.col("_window.end").alias(END)
    ).drop("_window")  # fmt: skip


def measured(rows: DataFrame, time: str, options: AggregateOptions) -> DataFrame:
    """The numbers of each window: those that were asked for, or those that always make sense."""
    from pyspark.sql import functions as f

    seconds = interval_ms(options.window, "window") / 1000
    if options.measures:
        numbers = [f.expr(sql).alias(name) for name, sql in options.measures.items()]
    else:
        numbers = [
            f.count(f.lit(1)).alias("count"),
            (f.count(f.lit(1)) / f.lit(seconds)).alias("per_second"),
            *_sizes(rows),
            *_latencies(rows, time),
        ]
    return rows.groupBy(START, END, *map(quoted, options.by)).agg(*numbers).withColumn(DATE, f.to_date(START))


def _sizes(rows: DataFrame) -> list[Column]:
    from pyspark.sql import functions as f

    if "_bytes" in rows.columns:
        size = f.col("_bytes")
    elif "value" in rows.columns:
        size = f.coalesce(f.octet_length("value"), f.lit(0))
    else:
        return []
    return [f.sum(size).alias("bytes"), f.avg(size).alias("mean_bytes"), f.max(size).alias("max_bytes")]


def _latencies(rows: DataFrame, time: str) -> list[Column]:
    """From the moment that a row speaks of until it was stored; of a message itself, until it was landed."""
    from pyspark.sql import functions as f

    until = "_timestamp" if "_timestamp" in rows.columns else "_landed_at"
    if until not in rows.columns or quoted(until) == time:
        return []
    latency = (f.unix_micros(until) - f.unix_micros(time)) / 1000
    return [
        f.avg(latency).alias("latency_ms_mean"),
        f.percentile_approx(latency, 0.5).alias("latency_ms_p50"),
        f.percentile_approx(latency, 0.95).alias("latency_ms_p95"),
        f.percentile_approx(latency, 0.99).alias("latency_ms_p99"),
        f.max(latency).alias("latency_ms_max"),
    ]


def plan(context: Context) -> Plan:
    check_kind_of_source(context, *ADDED_TO)
    return plan_steps(context, "windows with new rows are computed anew from all rows of the source")


def run(context: Context) -> Summary:
    check_kind_of_source(context, *ADDED_TO)
    return run_steps(context, _write)


def _write(context: Context, piece: Slice) -> LedgerBatch:
    from pyspark.sql import functions as f

    options: AggregateOptions = context.options
    time = _time(context, piece.rows)
    _check_by(context, piece.rows)
    newest = None if piece.previous is None else piece.previous.state.get(_HIGH)
    closed_us = -(2**62) if newest is None else newest - interval_ms(options.watermark, "watermark") * 1000
    late = (last_window_end_us(time, options) <= closed_us).cast("long")
    found = piece.rows.agg(
        f.count(f.lit(1)).alias("rows"), f.max(f.unix_micros(time)).alias(_HIGH), f.sum(late).alias(LATE)
    ).collect()[0]
    batch = LedgerBatch(
        batch=piece.batch,
        rows_in=found.rows,
        expectations={LATE: found[LATE] or 0},
        through=piece.through,
        source_id=piece.source_id,
        state={_HIGH: max((each for each in (newest, found[_HIGH]) if each is not None), default=None)},
    )
    open_still = windows_of(piece.rows, time, options).where(f.unix_micros(END) > closed_us)
    touched = open_still.select(START, f.to_date(START).alias(DATE)).distinct().persist()
    try:
        days = [row[0] for row in touched.select(DATE).distinct().collect()]
        return commit(context, _with_windows(context, piece, batch, touched, days) if days else batch)
    finally:
        touched.unpersist()


def last_window_end_us(time: str, options: AggregateOptions) -> Column:
    """When the last of the windows that a row belongs to ends; windows begin at 1970, as Spark's do."""
    from pyspark.sql import functions as f

    slide_us = interval_ms(options.slide or options.window, "slide") * 1000
    begins = f.floor(f.unix_micros(time) / f.lit(slide_us)) * f.lit(slide_us)
    return begins + f.lit(interval_ms(options.window, "window") * 1000)


def _with_windows(
    context: Context, piece: Slice, batch: LedgerBatch, touched: DataFrame, days: list[Any]
) -> LedgerBatch:
    """The batch with the days that its windows are in, written anew."""
    from pyspark.sql import functions as f

    options: AggregateOptions = context.options
    table = context.project.table(source_of(context).name)
    rows = read_table(context.spark, context.disk, table, after=-1, through=piece.through)
    assert rows is not None
    time = _time(context, rows)
    # Spark skips the parts of files whose times lie outside of these.
    low, high = touched.agg(f.min(f.unix_micros(START)), f.max(f.unix_micros(START))).collect()[0]
    end = high + interval_ms(options.window, "window") * 1000
    rows = rows.where((f.col(time) >= f.timestamp_micros(f.lit(low))) & (f.col(time) < f.timestamp_micros(f.lit(end))))
    placed = windows_of(rows, time, options).join(touched.select(START), START, "left_semi")
    new = measured(placed, time, options).persist()
    try:
        return _replaced(context, batch, new, touched, days)
    finally:
        new.unpersist()


def _replaced(context: Context, batch: LedgerBatch, new: DataFrame, touched: DataFrame, days: list[Any]) -> LedgerBatch:
    """The batch with the folders of these days: the new numbers, and those of the windows that stay as they are."""
    from pyspark.sql import functions as f

    options: AggregateOptions = context.options
    check_columns(new, options.expect, context.name)
    sorted_rows = Sorted(new, options.expect, kept=True)
    changed = sorted_rows.good.withColumn(BATCH, f.lit(batch.batch).cast("long"))
    old = read_table(context.spark, context.disk, context.table, after=-1, through=batch.batch)
    if old is not None:
        kept = old.where(f.col(DATE).isin(days)).join(touched.select(START), START, "left_anti")
        changed = changed.unionByName(kept, allowMissingColumns=True)
    counts = sorted_rows.counts(context.name)
    staged = stage(context, changed.repartition(DATE).sortWithinPartitions(START), "rows", (DATE,))
    return msgspec.structs.replace(
        batch,
        rows_out=counts.rows_in,
        expectations={**batch.expectations, **counts.failed},
        swaps=tuple(replacements(context, staged, context.table, batch.batch)),
    )


def _time(context: Context, rows: DataFrame) -> str:
    """The column that says when, as Spark is to be told its name."""
    time: str = context.options.time or ("_timestamp" if "_timestamp" in rows.columns else "timestamp")
    if time not in rows.columns:
        raise BadSettings(f"{context.name}: time is {time!r}, and its source has {', '.join(rows.columns)}")
    kind = dict(rows.dtypes)[time]
    if kind != "timestamp":
        raise BadSettings(f"{context.name}: time is {time!r}, which is {kind}: name a column of the type timestamp")
    return quoted(time)


def _check_by(context: Context, rows: DataFrame) -> None:
    for name in context.options.by:
        if name not in rows.columns:
            raise BadSettings(f"{context.name}: by names {name!r}, and its source has {', '.join(rows.columns)}")


def _identity(options: AggregateOptions) -> dict[str, Any]:
    return {
        "source": options.source,
        "time": options.time,
        "window": options.window,
        "slide": options.slide,
        "by": list(options.by),
        "measures": options.measures,
    }


TEMPLATE: Final = """\
    kind: aggregate
    source: orders-silver
    time: at                    # the column that says when; by default, when the message was stored
    window: "1 hour"
    # slide: "15 minutes"       # windows that overlap
    watermark: "10 minutes"     # rows for windows that ended longer ago are late: counted, left out
    by: [country]
    # measures:                 # instead of count, per_second, sizes and latencies
    #   revenue: "sum(amount)"
    #   largest: "max(amount)"
"""

KIND: Final = PipelineKind(
    name="aggregate",
    says="counts, rates, sizes and latencies by time window (gold)",
    options=AggregateOptions,
    plan=plan,
    run=run,
    template=TEMPLATE,
    identity=_identity,
)
