"""Conditions that rows must meet: a column says which ones a row did not, and one pass over the rows counts them.

A condition that is neither true nor false (a null in it) is not met: what is expected must be so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from holdfast.errors import BadSettings, ExpectationFailed, InvalidRequest
from holdfast.spark.pipelines.checkpoint import Ledger, LedgerBatch, Tally, checkpoint_id
from holdfast.spark.pipelines.lake import BATCH, additions, commit, finish_pending, read_table, rows_in_files, stage
from holdfast.spark.pipelines.spec import Expectation, OnFail, PipelineOptions, Plan, Positive, Read, Spec, Summary

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from holdfast.spark.pipelines.spec import Context


# Why a row is bad by itself, before anything was expected of it; a kind may fill it.
REASONS: Final = "_reasons"
_FAILED: Final = "_failed"
OURS: Final = (REASONS, _FAILED)
_ROWS, _DROPPED, _ASIDE = "rows", "dropped", "quarantined"


def names_that(expectations: Iterable[Expectation], *actions: OnFail) -> list[str]:
    """The expectations that do one of these things to a row."""
    return [each.name for each in expectations if each.on_fail in actions]


def unmet_sql(expectations: Sequence[Expectation]) -> str:
    """SQL for the names of the expectations that a row does not meet, as an array."""
    parts = [f"IF(coalesce(({each.check}), false), NULL, '{each.name}')" for each in expectations]
    return f"array_compact(array({', '.join(parts)}))" if parts else "cast(array() as array<string>)"


def check_columns(rows: DataFrame, expectations: Iterable[Expectation], where: str) -> None:
    """Refuse a condition that cannot be used on these rows, before any of them is read."""
    from pyspark.errors import AnalysisException, ParseException

    for each in expectations:
        try:
            kind = dict(rows.limit(0).selectExpr(f"({each.check}) AS met").dtypes)["met"]
        except (AnalysisException, ParseException) as error:
            words = str(error).partition("\n")[0].partition(" SQLSTATE")[0]
            raise BadSettings(f"{where}: the check of {each.name!r}, {each.check}, cannot be used: {words}") from None
        if kind != "boolean":
            raise BadSettings(f"{where}: the check of {each.name!r}, {each.check}, is {kind}: it must be true or false")


class Sorted:
    """Rows with what was expected of them: those that go on, those that are put aside, and the counts of both.

    Rows that are kept for more than one output (`kept`) are counted by themselves. Others are counted in passing, and
    the counts are there once `good` was written: Spark leaves out what it need not compute, but nothing is joined here.
    Nothing more is expected of a row that does not meet `first`.
    """

    def __init__(
        self, rows: DataFrame, expectations: Sequence[Expectation], *, kept: bool, first: Expectation | None = None
    ) -> None:
        from pyspark.sql import Observation
        from pyspark.sql import functions as f

        self._sums: DataFrame | None = None
        has_reasons = REASONS in rows.columns
        unmet = f.expr(unmet_sql(expectations))
        if first is not None:
            unmet = f.when(f.expr(first.check), unmet).otherwise(f.expr(unmet_sql([first])))
            expectations = [first, *expectations]
        self._expectations = expectations
        if has_reasons:  # nothing more is expected of a row that cannot be used at all
            unmet = f.when(f.size(REASONS) == 0, unmet).otherwise(f.expr(unmet_sql(())))
        marked = rows.withColumn(_FAILED, unmet)
        aside = _any_of(names_that(expectations, "quarantine"))
        if has_reasons:
            aside = aside | (f.size(REASONS) > 0)
        dropped = ~aside & _any_of(names_that(expectations, "drop"))
        counts = [
            f.count(f.lit(1)).alias(_ROWS),
            f.sum(dropped.cast("long")).alias(_DROPPED),
            f.sum(aside.cast("long")).alias(_ASIDE),
        ]
        for number, each in enumerate(expectations):
            counts.append(f.sum(f.array_contains(_FAILED, each.name).cast("long")).alias(f"failed_{number}"))
        counted = marked
        if kept:
            self._sums = marked.agg(*counts)
        else:
            self._observed = Observation()
            counted = marked.observe(self._observed, *counts)
        self.good = counted.where(~aside & ~dropped).drop(_FAILED, REASONS)
        reasons = f.col(_FAILED) if not has_reasons else f.concat(REASONS, _FAILED)
        self.bad = marked.where(aside).withColumn(REASONS, reasons).drop(_FAILED)

    def counts(self, where: str) -> RowCounts:
        """What was counted; raises where something was to fail on."""
        found = self._observed.get if self._sums is None else self._sums.collect()[0].asDict()
        failed = {each.name: found[f"failed_{number}"] or 0 for number, each in enumerate(self._expectations)}
        counts = RowCounts(found[_ROWS], found[_DROPPED] or 0, found[_ASIDE] or 0, failed)
        counts.check(self._expectations, where)
        return counts


class RowCounts:
    """What became of the rows of a batch."""

    def __init__(self, rows_in: int, dropped: int, quarantined: int, failed: Mapping[str, int]) -> None:
        self.rows_in = rows_in
        self.dropped = dropped
        self.quarantined = quarantined
        self.failed = dict(failed)

    @property
    def rows_out(self) -> int:
        return self.rows_in - self.dropped - self.quarantined

    def check(self, expectations: Iterable[Expectation], where: str) -> None:
        for each in expectations:
            count = self.failed.get(each.name, 0)
            if each.on_fail == "fail" and count:
                rows = "1 row does" if count == 1 else f"{count} rows do"
                raise ExpectationFailed(
                    f"{where}: {rows} not meet {each.name!r} ({each.check}); nothing of this batch was written. "
                    "Mend the rows at their source, or let them be put aside with on_fail: quarantine"
                )

    def fields(self) -> dict[str, Any]:
        """For the ledger."""
        return {
            "rows_in": self.rows_in,
            "rows_out": self.rows_out,
            "dropped": self.dropped,
            "quarantined": self.quarantined,
            "expectations": self.failed,
        }


def _any_of(names: list[str]) -> Column:
    from pyspark.sql import functions as f

    if not names:
        return f.lit(False)
    return f.arrays_overlap(f.col(_FAILED), f.array(*map(f.lit, names)))


PIPELINE: Final = "_pipeline"


Change = Callable[["DataFrame"], "DataFrame"]


def _unchanged(rows: DataFrame) -> DataFrame:
    return rows


def write_batch(
    context: Context,
    number: int,
    rows: DataFrame,
    *,
    expectations: Sequence[Expectation],
    partition_by: Sequence[str],
    first: Expectation | None = None,
    good: Change = _unchanged,
    bad: Change = _unchanged,
    **facts: Any,
) -> LedgerBatch:
    """Write the rows that are as expected to the table and those that are not to its quarantine, as one batch.

    Nothing more is expected of rows that do not meet `first`. `good` and `bad` give the two sorts of rows the columns
    that they have there; what `good` leaves out are duplicates.
    `facts` go into the ledger: how far the source was read.
    """
    from pyspark.sql import functions as f

    two_outputs = REASONS in rows.columns or bool(names_that(expectations, "quarantine"))
    kept = rows.persist() if two_outputs else rows
    number_column = f.lit(number).cast("long")
    try:
        found = Sorted(kept, expectations, kept=two_outputs, first=first)
        counts = found.counts(context.name) if two_outputs else None
        staged = stage(context, good(found.good).withColumn(BATCH, number_column), "rows", partition_by)
        if counts is None:
            counts = found.counts(context.name)
        moves = additions(context, staged, context.table, number)
        rows_out = rows_in_files(context.disk, staged)
        if counts.quarantined:
            aside = bad(found.bad).withColumn(PIPELINE, f.lit(context.name)).withColumn(BATCH, number_column)
            moves += additions(context, stage(context, aside, "quarantine", ()), context.quarantine, number)
    finally:
        if two_outputs:
            kept.unpersist()
    batch = LedgerBatch(
        batch=number,
        adds=tuple(moves),
        duplicates=counts.rows_out - rows_out,
        **{**counts.fields(), "rows_out": rows_out},
        **facts,
    )
    return commit(context, batch)


# From one table to the next: the batches that the source has finished and this pipeline has not yet taken.
#
# How far it is stands in its own ledger, in the same file that makes a batch count. So there is no moment at which rows
# are written and not noted, or noted and not written.


_TRIES: Final = 5
# The kinds that only add rows to their tables.
ADDED_TO: Final = ("land", "refine", "python")
GONE: Final = ("FILE_NOT_EXIST", "FileNotFoundException", "PATH_NOT_FOUND")


class StepOptions(PipelineOptions, frozen=True, kw_only=True):
    """Options of the kinds that read another pipeline's table."""

    max_rows_per_batch: Positive = 5_000_000


@dataclass(frozen=True, kw_only=True)
class Slice:
    """What one batch is made of: the rows of some batches of the source; `previous` is the batch before."""

    batch: int
    through: int
    source_id: str | None
    rows: DataFrame
    previous: LedgerBatch | None


Write = Callable[["Context", Slice], LedgerBatch]


def source_of(context: Context) -> Spec:
    """The pipeline whose table is read."""
    source = context.options.source
    if source is None:
        raise InvalidRequest(f"{context.name} has no source: name the pipeline that it reads from, source: NAME")
    return context.project.spec(source)


def check_kind_of_source(context: Context, *kinds: str) -> None:
    """Only tables to which rows are added can be read on from where one was: in others they change."""
    source = source_of(context)
    if source.kind not in kinds:
        raise BadSettings(
            f"{context.name}: its source {source.name} is of the kind {source.kind}: it must be {' or '.join(kinds)}"
        )


def run_steps(context: Context, write: Write) -> Summary:
    """Take what the source has, batch by batch, until there is no more; with `follow` until told to stop."""
    finish_pending(context)
    tally = Tally(context)
    while not context.stopping.is_set():
        if not _one_batch(context, write, tally):
            if not context.follow:
                break
            context.stopping.wait(context.every_ms / 1000)
    tally.lag = _rows_left(context)
    return tally.summary()


def plan_steps(context: Context, *notes: str) -> Plan:
    """What `run_steps` would read."""
    source = source_of(context)
    last = Ledger(context.world, context.checkpoint).last()
    _checked_source_id(context, last)
    position = _position(last)
    waiting = _source_ledger(context).after(position)
    rows = sum(batch.rows_out for batch in waiting)
    size = sum(batch.bytes for batch in waiting)
    first = str(position + 1)
    read = Read(
        what=f"table {source.name}",
        start=f"batch {first}",
        end=f"batch {waiting[-1].batch}" if waiting else "nothing new",
        rows=rows,
        bytes=size,
    )
    return Plan(
        pipeline=context.name,
        kind=context.spec.kind,
        reads=(read,),
        rows=rows,
        bytes=size,
        writes=(context.table,),
        notes=notes,
    )


def _one_batch(context: Context, write: Write, tally: Tally) -> bool:
    """Whether there was anything to take."""
    previous = Ledger(context.world, context.checkpoint).last()
    position = _position(previous)
    for attempt in range(1, _TRIES + 1):
        source_id = _checked_source_id(context, previous)
        waiting = _source_ledger(context).after(position)
        if not waiting:
            return False
        through = _limit(waiting, context.options.max_rows_per_batch)
        try:
            batch = _write(context, write, previous, source_id, through)
        except Exception as error:
            # Files of the source were merged between our listing and our reading them: list them again.
            if attempt == _TRIES or not any(word in str(error) for word in GONE):
                raise
        else:
            tally.add(batch, sum(each.rows_out for each in waiting if each.batch > through))
            return True
    raise AssertionError


def _write(
    context: Context, write: Write, previous: LedgerBatch | None, source_id: str | None, through: int
) -> LedgerBatch:
    number = 0 if previous is None else previous.batch + 1
    source = context.project.table(source_of(context).name)
    rows = read_table(context.spark, context.disk, source, after=_position(previous), through=through)
    if rows is None:  # batches that put every row aside
        state = previous.state if previous else {}
        batch = LedgerBatch(batch=number, through=through, source_id=source_id, state=state)
        ledger = Ledger(context.world, context.checkpoint)
        ledger.decide(batch)
        ledger.finish(batch)
        return batch
    piece = Slice(batch=number, through=through, source_id=source_id, rows=rows, previous=previous)
    return write(context, piece)


def _checked_source_id(context: Context, previous: LedgerBatch | None) -> str | None:
    """Batches are counted from 0 again where the source began anew: what was taken is not what these numbers say."""
    source_id = checkpoint_id(context.world, context.project, source_of(context).name)
    if previous is not None and previous.source_id != source_id:
        raise InvalidRequest(
            f"{context.name}: its source {source_of(context).name} was begun anew since this table was written: "
            f"begin this one anew, too, `holdfast pipeline run {context.name} --full-refresh`"
        )
    return source_id


def _position(last: LedgerBatch | None) -> int:
    return -1 if last is None or last.through is None else last.through


def _limit(waiting: list[LedgerBatch], most_rows: int) -> int:
    """How far to go in one batch: at least one of the source's, and no more rows than these beyond that."""
    through, rows = waiting[0].batch, waiting[0].rows_out
    for batch in waiting[1:]:
        rows += batch.rows_out
        if rows > most_rows:
            break
        through = batch.batch
    return through


def _rows_left(context: Context) -> int:
    position = _position(Ledger(context.world, context.checkpoint).last())
    return sum(batch.rows_out for batch in _source_ledger(context).after(position))


def _source_ledger(context: Context) -> Ledger:
    return Ledger(context.world, context.project.checkpoint(source_of(context).name))
