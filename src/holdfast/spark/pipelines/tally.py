"""The counts of a run, gathered batch by batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.spark.pipelines.ledger import Batch, Totals
from holdfast.spark.pipelines.results import Progress, Summary

if TYPE_CHECKING:
    from holdfast.spark.pipelines.context import Context


class Tally:
    """Adds up what each batch counted and tells how far the run has come."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._totals = Totals()
        self._files = 0
        self.notes: list[str] = []
        self.lag: int | None = None

    @property
    def batches(self) -> int:
        return self._totals.batches

    def add(self, batch: Batch, lag: int | None = None) -> None:
        """One more batch is written; `lag` is what the source has beyond it."""
        self._totals = self._totals.and_(batch)
        self._files += len(batch.adds) + len(batch.swaps)
        self.lag = lag
        self._context.tell(
            Progress(
                pipeline=self._context.name,
                batch=batch.batch,
                rows_in=self._totals.rows_in,
                rows_out=self._totals.rows_out,
                lag=lag,
            )
        )

    def summary(self, **details: Any) -> Summary:
        totals = self._totals
        return Summary(
            pipeline=self._context.name,
            kind=self._context.spec.kind,
            batches=totals.batches,
            rows_in=totals.rows_in,
            rows_out=totals.rows_out,
            dropped=totals.dropped,
            quarantined=totals.quarantined,
            duplicates=totals.duplicates,
            expectations=totals.expectations,
            files=self._files,
            lag=self.lag,
            notes=tuple(self.notes),
            details=details,
        )
