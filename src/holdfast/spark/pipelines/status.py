"""Where pipelines are: from their checkpoints alone, without a session and without a lock."""

from __future__ import annotations

from typing import Never

import msgspec

from holdfast.env import World
from holdfast.errors import HoldfastError
from holdfast.spark.pipelines.context import Context
from holdfast.spark.pipelines.kinds import kind_named
from holdfast.spark.pipelines.ledger import Ledger
from holdfast.spark.pipelines.spec import Project, Spec


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """How far one pipeline is, over all of its runs; `lag` is what its source has beyond that, where that is known."""

    pipeline: str
    kind: str
    batches: int
    last_batch: int | None
    last_batch_at_ms: int | None
    rows_in: int
    rows_out: int
    dropped: int
    quarantined: int
    duplicates: int
    expectations: dict[str, int]
    pending: bool
    lag: int | None


def standing_of(world: World, project: Project, spec: Spec) -> Standing:
    """Where this pipeline is."""
    ledger = Ledger(world, project.checkpoint(spec.name))
    totals, last = ledger.totals(), ledger.last()
    return Standing(
        pipeline=spec.name,
        kind=spec.kind,
        batches=totals.batches,
        last_batch=None if last is None else last.batch,
        last_batch_at_ms=None if last is None else last.at_ms,
        rows_in=totals.rows_in,
        rows_out=totals.rows_out,
        dropped=totals.dropped,
        quarantined=totals.quarantined,
        duplicates=totals.duplicates,
        expectations=totals.expectations,
        pending=ledger.pending() is not None,
        lag=_lag(world, project, spec),
    )


class _NeedsSession(Exception):
    """This cannot be told without Spark."""


def _no_session() -> Never:
    raise _NeedsSession


def _lag(world: World, project: Project, spec: Spec) -> int | None:
    try:
        return kind_named(spec.kind).plan(Context(world=world, session=_no_session, project=project, spec=spec)).rows
    except (HoldfastError, _NeedsSession, OSError):
        return None
