"""What pipelines answer with: a plan before, progress meanwhile, a summary at the end."""

from __future__ import annotations

from typing import Any

import msgspec


class Read(msgspec.Struct, frozen=True, kw_only=True):
    """What a run would read of one place: a partition of a topic, or batches of a table."""

    what: str
    start: str
    end: str
    rows: int | None = None
    bytes: int | None = None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A dry run: what would be read and where it would go. Nothing was written for it."""

    pipeline: str
    kind: str
    reads: tuple[Read, ...] = ()
    rows: int | None = None
    bytes: int | None = None
    writes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a run has come; `lag` is how many rows its source has beyond that, None where nobody knows."""

    pipeline: str
    batch: int
    rows_in: int
    rows_out: int
    lag: int | None = None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What a run did. `ok` is false where it found what a person must look at; `details` are the kind's own."""

    pipeline: str
    kind: str
    batches: int = 0
    rows_in: int = 0
    rows_out: int = 0
    dropped: int = 0
    quarantined: int = 0
    duplicates: int = 0
    expectations: dict[str, int] = {}
    files: int = 0
    lag: int | None = None
    seconds: float = 0.0
    ok: bool = True
    notes: tuple[str, ...] = ()
    details: dict[str, Any] = {}


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How one of several pipelines ended: with a summary, or with an error."""

    pipeline: str
    summary: Summary | None = None
    error: Exception | None = None
