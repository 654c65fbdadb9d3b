"""`aggregate`: counts, rates, sizes and latencies by time window, kept up to date as rows come (gold).

A window with new rows is computed again from all rows of its source, so that its numbers never depend on how the rows
were divided into batches. With `incremental`, the numbers of open windows are Spark's own state instead, to which new
rows are added. In both cases the new numbers are merged into the table in one transaction.
Windows that ended longer before the newest row than the watermark are closed: rows for them are counted as late and
left out.
"""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from holdfast.errors import BadSettings
from holdfast.spark.pipelines import f
from holdfast.spark.pipelines.batches import (
    ADDED_TO,
    Slice,
    Sorted,
    StepOptions,
    check_columns,
    check_source,
    patiently,
    plan_steps,
    run_steps,
)
from holdfast.spark.pipelines.checkpoint import LedgerBatch, ledger_of
from holdfast.spark.pipelines.lake import DATE, change, commit, finish_pending, fitted, quoted, read_table, stage
from holdfast.spark.pipelines.parquet import BATCH
from holdfast.spark.pipelines.spec import Context, PipelineKind, Plan, Summary, interval_ms, no_expectation_named

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row


START, END = "window_start", "window_end"
_HIGH: Final = "newest_us"
LATE: Final = "late"
NULL_TIME: Final = "null_time"


class AggregateOptions(StepOptions, frozen=True, kw_only=True):
    """Options of `aggregate`."""

    time: str | None = None
    window: str = "1 hour"
    slide: str | None = None
    watermark: str = "10 minutes"
    by: tuple[str, ...] = ()
    measures: dict[str, str] = msgspec.field(default_factory=dict)
    incremental: bool = False

    def __post_init__(self) -> None:
        if self.source is None:
            raise BadSettings("a pipeline of the kind aggregate needs a source: the name of one that writes a table")
        window_ms, slide_ms, _ = self.window_ms, self.slide_ms, self.watermark_ms
        if not 0 < slide_ms <= window_ms:
            raise BadSettings(f"slide is {self.slide or self.window!r}: give a time up to that of the window")
        for name in (*self.by, *self.measures):
            if name.lower() in (START, END, DATE, BATCH):
                raise BadSettings(f"{name!r} cannot be used in by or measures: the table has a column of that name")
        for name in self.measures:
            if name in self.by:
                raise BadSettings(f"{name!r} is both in by and in measures: give the measure another name")
        if self.format != "delta":
            raise BadSettings("the numbers of a window change, and plain Parquet files cannot: leave out format here")
        for name in (LATE, NULL_TIME):
            no_expectation_named(name, self.expect)
        for each in self.expect:
            if each.on_fail in ("drop", "quarantine"):
                raise BadSettings(
                    f"the expectation {each.name!r} is on numbers, which cannot be dropped or quarantined: "
                    "use warn or fail here, or add it to the source instead"
                )

    @property
    def window_ms(self) -> int:
        return interval_ms(self.window, "window")

    @property
    def slide_ms(self) -> int:
        return interval_ms(self.slide or self.window, "slide")

    @property
    def watermark_ms(self) -> int:
        return interval_ms(self.watermark, "watermark")


def windows_of(rows: DataFrame, time: str, options: AggregateOptions) -> DataFrame:
    """The rows with the window, or the windows, that each belongs to."""
    window = f.window(time, f"{options.window_ms} milliseconds", f"{options.slide_ms} milliseconds")
    return _with_bounds(rows.where(f.col(time).isNotNull()).withColumn("_window", window))


def _with_bounds(rows: DataFrame) -> DataFrame:
    return rows.selectExpr("*", f"_window.start AS {START}", f"_window.end AS {END}").drop("_window")


def measured(rows: DataFrame, time: str, options: AggregateOptions) -> DataFrame:
    """The measures of each window."""
    numbers = _numbers(rows, time, options)
    return rows.groupBy(START, END, *map(quoted, options.by)).agg(*numbers).withColumn(DATE, f.to_date(START))


def kept_by_spark(rows: DataFrame, time: str, options: AggregateOptions) -> DataFrame:
    """The same of a stream: its open windows are in Spark's state, and closed ones are removed from it."""
    window = f.window(time, f"{options.window_ms} milliseconds", f"{options.slide_ms} milliseconds").alias("_window")
    timed = rows.withWatermark(time, f"{options.watermark_ms} milliseconds")
    counted = timed.groupBy(window, *map(quoted, options.by)).agg(*_numbers(rows, time, options))
    return _with_bounds(counted).withColumn(DATE, f.to_date(START))


def _numbers(rows: DataFrame, time: str, options: AggregateOptions) -> list[Column]:
    """The measures of the options, or the usual ones."""
    if options.measures:
        return [f.expr(sql).alias(name) for name, sql in options.measures.items()]
    return [
        f.count(f.lit(1)).alias("count"),
        (f.count(f.lit(1)) / f.lit(options.window_ms / 1000)).alias("per_second"),
        *_sizes(rows),
        *_latencies(rows, time),
    ]


def _sizes(rows: DataFrame) -> list[Column]:
    if "_bytes" in rows.columns:
        size = f.col("_bytes")
    elif "value" in rows.columns:
        size = f.coalesce(f.octet_length("value"), f.lit(0))
    else:
        return []
    return [f.sum(size).alias("bytes"), f.avg(size).alias("mean_bytes"), f.max(size).alias("max_bytes")]


def _latencies(rows: DataFrame, time: str) -> list[Column]:
    """The time from a row's own time until it was stored, or, for a message, until it was landed."""
    until = "_timestamp" if "_timestamp" in rows.columns else "_landed_at"
    if until not in rows.columns or quoted(until) == time:
        return []
    latency = (f.unix_micros(until) - f.unix_micros(time)) / 1000
    shares = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
    measures = {"mean": f.avg(latency)} | {name: f.percentile_approx(latency, each) for name, each in shares.items()}
    return [column.alias(f"latency_ms_{name}") for name, column in (measures | {"max": f.max(latency)}).items()]


def _write(context: Context, piece: Slice) -> LedgerBatch:
    options: AggregateOptions = context.options
    time = _time(context, piece.rows)
    _check_by(context, piece.rows)
    newest = None if piece.previous is None else piece.previous.state.get(_HIGH)
    closed_us = -(2**62) if newest is None else newest - options.watermark_ms * 1000
    found = _left_out(piece.rows, time, options, closed_us)
    batch = LedgerBatch(
        batch=piece.batch,
        rows_in=found.rows,
        expectations={LATE: found[LATE] or 0, NULL_TIME: found[NULL_TIME]},
        **piece.facts,
        state={_HIGH: max((each for each in (newest, found[_HIGH]) if each is not None), default=None)},
    )
    open_still = windows_of(piece.rows, time, options).where(f.unix_micros(END) > closed_us)
    touched = open_still.select(START).distinct().persist()
    try:
        return commit(context, _with_windows(context, piece, batch, touched))
    finally:
        touched.unpersist()


def _left_out(rows: DataFrame, time: str, options: AggregateOptions, closed_us: int) -> Row:
    """How many rows there are, how many of them belong to no open window, and why; and the newest time."""
    late = (last_window_end_us(time, options) <= closed_us).cast("long")
    return rows.agg(
        f.count(f.lit(1)).alias("rows"),
        f.max(f.unix_micros(time)).alias(_HIGH),
        f.sum(late).alias(LATE),
        f.count_if(f.col(time).isNull()).alias(NULL_TIME),
    ).collect()[0]


def last_window_end_us(time: str, options: AggregateOptions) -> Column:
    """The end of the last window that a row belongs to. Windows are counted from 1970, as Spark's are."""
    slide_us = options.slide_ms * 1000
    return f.floor(f.unix_micros(time) / slide_us) * slide_us + options.window_ms * 1000


def _with_windows(context: Context, piece: Slice, batch: LedgerBatch, touched: DataFrame) -> LedgerBatch:
    """The batch with the numbers of these windows, computed from all rows of the source."""
    options: AggregateOptions = context.options
    # Spark skips the parts of files whose times lie outside of these.
    low, high = touched.agg(f.min(f.unix_micros(START)), f.max(f.unix_micros(START))).collect()[0]
    if low is None:
        return batch
    high += options.window_ms * 1000
    rows = read_table(context, context.options.source, through=piece.through)
    assert rows is not None
    time = _time(context, rows)
    rows = rows.where((f.col(time) >= f.timestamp_micros(f.lit(low))) & (f.col(time) < f.timestamp_micros(f.lit(high))))
    placed = windows_of(rows, time, options).join(touched, START, "left_semi")
    new = measured(placed, time, options).persist()
    try:
        return _merged(context, batch, new)
    finally:
        new.unpersist()


def _run_incremental(context: Context) -> Summary:
    from holdfast.spark.pipelines.streams import missing_tables, reads_of, run_stream, table_stream

    options: AggregateOptions = context.options
    finish_pending(context)
    if missing_tables(context, options.reads):
        return context.summary(notes=(f"{options.source} has no rows yet",))

    def opened() -> DataFrame:
        rows = table_stream(context, cast(str, options.source), options.max_rows_per_batch)
        _check_by(context, rows)
        return kept_by_spark(rows, _time(context, rows), options)

    def left() -> int:
        return sum(read.rows or 0 for read in reads_of(context, options.reads))

    return run_stream(context, patiently(opened), write_windows, left, output_mode="update")


def write_windows(context: Context, rows: DataFrame, batch: int, offsets: str | None) -> LedgerBatch:
    """One batch of a stream: the windows that new rows changed."""
    from holdfast.spark.pipelines.streams import batches_read, watermark_us

    options: AggregateOptions = context.options
    previous = ledger_of(context).last()
    before = None if previous is None else previous.offsets
    source = cast(str, options.source)
    known, through = (batches_read(each).get(source, -1) for each in (before, offsets))
    entry = LedgerBatch(batch=batch, offsets=offsets)
    new = read_table(context, source, after=known, through=through) if through > known else None
    if new is not None:
        # Spark leaves out rows that are behind the watermark of the batch before.
        found = _left_out(new, _time(context, new), options, watermark_us(before))
        counts = {LATE: found[LATE] or 0, NULL_TIME: found[NULL_TIME]}
        entry = msgspec.structs.replace(entry, rows_in=found.rows, expectations=counts)
    changed = rows.persist()  # it must not be computed twice: state belongs to it
    try:
        return commit(context, entry if changed.isEmpty() else _merged(context, entry, changed))
    finally:
        changed.unpersist()


def _merged(context: Context, batch: LedgerBatch, new: DataFrame) -> LedgerBatch:
    """The batch with these numbers: windows that the table has are updated, the others are added."""
    options: AggregateOptions = context.options
    check_columns(new, options.expect, context.name)
    sorted_rows = Sorted(new, options.expect, kept=True)
    rows = fitted(context, context.table, sorted_rows.good.withColumn(BATCH, f.lit(batch.batch).cast("long")))
    counts = sorted_rows.counts(context.name)
    staged = stage(context, rows, "rows", ())
    keys = (DATE, START, END, *options.by)
    merged = change(
        context, context.table, rows, (DATE,), staged=posixpath.relpath(staged, context.project.lake), keys=keys
    )
    return msgspec.structs.replace(
        batch, rows_out=counts.rows_in, expectations=batch.expectations | counts.expectations, changes=(merged,)
    )


def _time(context: Context, rows: DataFrame) -> str:
    """The name of the time column, quoted for Spark. Raises BadSettings if there is no such column."""
    time: str = context.options.time or ("_timestamp" if "_timestamp" in rows.columns else "timestamp")
    if time not in rows.columns:
        raise BadSettings(f"{context.name}: time is {time!r}: choose a column of its source, {', '.join(rows.columns)}")
    kind = dict(rows.dtypes)[time]
    if kind != "timestamp":
        raise BadSettings(f"{context.name}: time is {time!r}, which is {kind}: name a column of the type timestamp")
    return quoted(time)


def _check_by(context: Context, rows: DataFrame) -> None:
    for name in context.options.by:
        if name not in rows.columns:
            raise BadSettings(
                f"{context.name}: by names {name!r}: choose columns of its source, {', '.join(rows.columns)}"
            )


def _plan(context: Context) -> Plan:
    check_source(context, context.options.source, ADDED_TO)
    if not context.options.incremental:
        return plan_steps(context, "windows with new rows are recomputed from all rows of the source")
    from holdfast.spark.pipelines.streams import reads_of

    reads = reads_of(context, context.options.reads)
    return context.plan(reads, notes=("new rows are added to the open windows, which are in Spark's state",))


def _run(context: Context) -> Summary:
    check_source(context, context.options.source, ADDED_TO)
    return _run_incremental(context) if context.options.incremental else run_steps(context, _write)


def _identity(options: AggregateOptions) -> dict[str, Any]:
    state = {"incremental": True, "watermark": options.watermark} if options.incremental else {}
    return {name: getattr(options, name) for name in _IDENTITY} | state


_IDENTITY: Final = ("source", "time", "window", "slide", "by", "measures")

_TEMPLATE: Final = """\
    kind: aggregate
    source: orders-silver
    time: at                    # the column that says when; by default, when the message was stored
    window: "1 hour"
    # slide: "15 minutes"       # windows that overlap
    watermark: "10 minutes"     # rows for windows that ended longer ago are late: counted, left out
    by: [country]
    # incremental: true         # add new rows to the open windows instead of recomputing these
    # measures:                 # instead of count, per_second, sizes and latencies
    #   revenue: "sum(amount)"
    #   largest: "max(amount)"
"""
KIND: Final = PipelineKind(AggregateOptions, _plan, _run, _TEMPLATE, _identity)
