"""What a pipeline is given to run with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from threading import Event
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.env import World
from holdfast.env.disk import LakeDisk
from holdfast.errors import BadSettings
from holdfast.spark.pipelines.spec import Options, Project, Spec, meant

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# What pipelines answer with: a plan before, progress meanwhile, a summary at the end.


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


def _tell_nobody(progress: Progress) -> None:
    return None


@dataclass(frozen=True)
class Context:
    """One run of one pipeline: its spec, the session it shares with others, and when it is to end.

    `session` makes the session when it is first needed: what only looks at files does not wait for a JVM.
    """

    world: World
    session: Callable[[], SparkSession]
    project: Project
    spec: Spec
    follow: bool = False
    every_ms: int = 1_000
    stopping: Event = field(default_factory=Event)
    tell: Callable[[Progress], None] = _tell_nobody
    disk: LakeDisk = field(default_factory=LakeDisk)

    @property
    def spark(self) -> SparkSession:
        return self.session()

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def options(self) -> Any:
        """Of the kind's own type."""
        return self.spec.options

    @property
    def folder(self) -> str:
        """The data folder with the topics."""
        return self.project.folder

    @property
    def table(self) -> str:
        """The folder of the table that it writes."""
        return self.project.table(self.name)

    @property
    def quarantine(self) -> str:
        return self.project.quarantine(self.name)

    @property
    def checkpoint(self) -> str:
        return self.project.checkpoint(self.name)

    @property
    def staging(self) -> str:
        """Where rows are written before they count; on the same disk as the tables."""
        return f"{self.project.lake}/_staging/{self.name}"


# The kinds of pipelines: each a module of its own with a `KIND`, imported when it is first asked for.


_MODULES: Final = {
    "land": "holdfast.spark.pipelines.land",
    "refine": "holdfast.spark.pipelines.refine",
    "aggregate": "holdfast.spark.pipelines.aggregate",
    "replay": "holdfast.spark.pipelines.replay",
    "deadletters": "holdfast.spark.pipelines.deadletters",
    "traces": "holdfast.spark.pipelines.traces",
    "reconcile": "holdfast.spark.pipelines.reconcile",
    "compact": "holdfast.spark.pipelines.compact",
    "python": "holdfast.spark.pipelines.custom",
}


@dataclass(frozen=True)
class Kind:
    """One sort of pipeline.

    `plan` writes nothing. `identity` are the options that a checkpoint is made for: with others it does not fit.
    `template` is what `holdfast pipeline new` writes, indented as an entry of `pipelines:`.
    `follows` is false for what has an end by itself, such as a report.
    """

    name: str
    says: str
    options: type[Options]
    plan: Callable[[Context], Plan]
    run: Callable[[Context], Summary]
    template: str
    identity: Callable[[Any], dict[str, Any]] = field(default=lambda options: {})
    follows: bool = True


def kind_names() -> list[str]:
    return list(_MODULES)


def kind_named(name: object) -> Kind:
    """The kind by this name."""
    if not isinstance(name, str) or name not in _MODULES:
        raise BadSettings(f"there is no kind {name!r} of pipelines{meant(str(name), _MODULES)}")
    kind = import_module(_MODULES[name]).KIND
    assert isinstance(kind, Kind)
    return kind
