"""What a pipeline is: its options, its project, what a run gets and returns, and the kinds of pipelines."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

import msgspec

from holdfast.api.times import parse_duration
from holdfast.broker.folder.layout import check_name
from holdfast.env import World
from holdfast.env.disk import LakeDisk
from holdfast.errors import BadSettings, InvalidRequest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


OnFail: TypeAlias = Literal["warn", "drop", "quarantine", "fail"]
Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
QUARANTINE_SUFFIX: Final = ".quarantine"

_UNITS: Final = {
    "millisecond": 1,
    "second": 1_000,
    "minute": 60_000,
    "hour": 3_600_000,
    "day": 86_400_000,
    "week": 604_800_000,
}
_WORDS: Final = re.compile(r"\s*([0-9]+)\s*([a-z]+?)s?\s*", re.IGNORECASE)


class Expectation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A condition that must be true of every row, and what becomes of a row for which it is not."""

    name: str
    check: str
    on_fail: OnFail = "warn"


class PipelineOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every kind of pipeline may be told; each kind adds its own.

    `source` is the pipeline whose table is read, for those that read one.
    """

    source: str | None = None
    expect: tuple[Expectation, ...] = ()


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """One named pipeline. `function` is what a pipeline of somebody's own does with the rows."""

    name: str
    kind: str
    options: Any
    function: Callable[..., Any] | None = None


class Project(msgspec.Struct, frozen=True, kw_only=True):
    """Pipelines that share a data folder and a lake; `where` is the file that they stand in."""

    folder: str
    lake: str
    pipelines: dict[str, Spec]
    where: str = "Python"

    def spec(self, name: str) -> Spec:
        """The pipeline by this name."""
        if name not in self.pipelines:
            raise InvalidRequest(f"there is no pipeline {name!r} in {self.where}{meant(name, self.pipelines)}")
        return self.pipelines[name]

    def checkpoint(self, name: str) -> str:
        """Where a pipeline keeps how far it is."""
        return f"{self.lake}/_checkpoints/{name}"

    def table(self, name: str) -> str:
        """The folder of the table that a pipeline writes."""
        return f"{self.lake}/{name}"

    def quarantine(self, name: str) -> str:
        """The folder of the rows that it put aside."""
        return f"{self.lake}/{name}{QUARANTINE_SUFFIX}"

    def in_order(self, names: Iterable[str]) -> list[Spec]:
        """These pipelines, each behind the one that it reads from."""
        wanted = {name: self.spec(name) for name in names}
        found: dict[str, Spec] = {}

        def add(spec: Spec) -> None:
            source = spec.options.source
            if source in wanted and source not in found:
                add(wanted[source])
            found.setdefault(spec.name, spec)

        for spec in wanted.values():
            add(spec)
        return list(found.values())


def read_options(kind: type[PipelineOptions], given: Mapping[str, Any], where: str) -> Any:
    """The options of one pipeline, or an error that names the one that is wrong."""
    known = kind.__struct_encode_fields__
    for key in given:
        if key not in known:
            raise BadSettings(f"{where}: {key!r} is not known{meant(key, ('kind', *known))}")
    for number, expectation in enumerate(_list_of(given.get("expect"))):
        if isinstance(expectation, Mapping):
            for key in expectation:
                if key not in Expectation.__struct_encode_fields__:
                    near = meant(key, Expectation.__struct_encode_fields__)
                    raise BadSettings(f"{where}: expect[{number}]: {key!r} is not known{near}")
    try:
        options = msgspec.convert(dict(given), kind)
    except BadSettings as error:
        raise BadSettings(f"{where}: {error}") from None
    except msgspec.ValidationError as error:
        raise BadSettings(f"{where}: {_plain(str(error))}") from None
    _check_expectations(options.expect, where)
    return options


def check_project(project: Project) -> Project:
    """The same project, if its pipelines fit each other."""
    for spec in project.pipelines.values():
        check_name(spec.name, "pipeline")
        if spec.name.startswith("_") or spec.name.endswith(QUARANTINE_SUFFIX):
            raise BadSettings(f"{project.where}: a pipeline cannot be named {spec.name!r}: choose another name")
        source = spec.options.source
        if source is not None and source not in project.pipelines:
            near = meant(source, project.pipelines)
            raise BadSettings(f"{project.where}: {spec.name}: its source {source!r} is none of the pipelines{near}")
        seen = {spec.name}
        while source is not None:
            if source in seen:
                raise BadSettings(f"{project.where}: {spec.name} reads, by way of its source, from itself")
            seen.add(source)
            source = project.pipelines[source].options.source
    return project


def located(project: Project) -> Project:
    """The same project with paths that do not depend on where anybody is: the JVM need not be where we are."""
    return msgspec.structs.replace(project, folder=_absolute(project.folder), lake=_absolute(project.lake))


def interval_ms(text: str, what: str) -> int:
    """Milliseconds of "10 minutes" or "10m"."""
    found = _WORDS.fullmatch(text)
    if found is not None and (unit := _UNITS.get(found[2].lower())):
        return int(found[1]) * unit
    try:
        return max(round(parse_duration(text, what) * 1000), 0)
    except InvalidRequest:
        raise BadSettings(f"{what} is {text!r}: give a time such as '10 minutes' or '1h30m'") from None


def no_expectation_named(name: str, expectations: Iterable[Expectation]) -> None:
    """Refuse a name under which the kind itself counts."""
    if any(each.name == name for each in expectations):
        raise BadSettings(f"an expectation cannot be named {name!r} here: rows are counted under that name already")


def meant(given: str, known: Iterable[str]) -> str:
    """What to say behind a name that is not known: the nearest one, or all of them."""
    names = list(known)
    near = get_close_matches(given, names, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; there are {', '.join(names)}" if names else ""


def _absolute(path: str) -> str:
    return posixpath.normpath(Path(path).absolute())


def _list_of(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _check_expectations(expectations: Iterable[Expectation], where: str) -> None:
    seen: set[str] = set()
    for expectation in expectations:
        if not re.fullmatch(r"[\w .:-]{1,100}", expectation.name):
            raise BadSettings(f"{where}: an expectation cannot be named {expectation.name!r}: use letters and digits")
        if expectation.name in seen:
            raise BadSettings(f"{where}: two expectations are named {expectation.name!r}: rename one")
        if not expectation.check.strip():
            raise BadSettings(f"{where}: the expectation {expectation.name!r} has no check")
        seen.add(expectation.name)


def _plain(text: str) -> str:
    """msgspec's words with the place first: "window: expected `str`, got `int`"."""
    words, _, place = text.partition(" - at `$")
    words = words[:1].lower() + words[1:]
    place = place.rstrip("`").removeprefix(".")
    return f"{place}: {words}" if place else words.replace("object missing required field", "it needs")


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
class PipelineKind:
    """One sort of pipeline.

    `plan` writes nothing. `identity` are the options that a checkpoint is made for: with others it does not fit.
    `template` is what `holdfast pipeline new` writes, indented as an entry of `pipelines:`.
    `follows` is false for what has an end by itself, such as a report.
    """

    name: str
    says: str
    options: type[PipelineOptions]
    plan: Callable[[Context], Plan]
    run: Callable[[Context], Summary]
    template: str
    identity: Callable[[Any], dict[str, Any]] = field(default=lambda options: {})
    follows: bool = True


def kind_names() -> list[str]:
    return list(_MODULES)


def kind_named(name: object) -> PipelineKind:
    """The kind by this name."""
    if not isinstance(name, str) or name not in _MODULES:
        raise BadSettings(f"there is no kind {name!r} of pipelines{meant(str(name), _MODULES)}")
    kind = import_module(_MODULES[name]).KIND
    assert isinstance(kind, PipelineKind)
    return kind
