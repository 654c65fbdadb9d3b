"""Conditions that rows must meet: a column says which ones a row did not, and one pass over the rows counts them.

A condition that is neither true nor false (a null in it) is not met: what is expected must be so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from holdfast.errors import BadSettings, ExpectationFailed
from holdfast.spark.pipelines.spec import Expectation, OnFail

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

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

    def counts(self, where: str) -> Counts:
        """What was counted; raises where something was to fail on."""
        found = self._observed.get if self._sums is None else self._sums.collect()[0].asDict()
        failed = {each.name: found[f"failed_{number}"] or 0 for number, each in enumerate(self._expectations)}
        counts = Counts(found[_ROWS], found[_DROPPED] or 0, found[_ASIDE] or 0, failed)
        counts.check(self._expectations, where)
        return counts


class Counts:
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
