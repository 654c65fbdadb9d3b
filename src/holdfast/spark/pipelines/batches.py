"""One batch of rows into a table: sorted by what was expected of them, staged, counted, committed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from holdfast.spark.pipelines.expectations import REASONS, Sorted, names_that
from holdfast.spark.pipelines.lake import BATCH, rows_in_files
from holdfast.spark.pipelines.ledger import Batch
from holdfast.spark.pipelines.spec import Expectation
from holdfast.spark.pipelines.writing import additions, commit, stage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from holdfast.spark.pipelines.context import Context

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
) -> Batch:
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
    batch = Batch(
        batch=number,
        adds=tuple(moves),
        duplicates=counts.rows_out - rows_out,
        **{**counts.fields(), "rows_out": rows_out},
        **facts,
    )
    return commit(context, batch)
