"""What a pipeline is: its options, its project, what a run gets and returns, and the kinds of pipelines."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

import msgspec

from holdfast.api.drafts import parse_duration
from holdfast.broker.folder.layout import check_name, is_store
from holdfast.client.opening import is_address
from holdfast.env import World
from holdfast.env.disk import LakeDisk
from holdfast.errors import BadSettings, InvalidRequest
from holdfast.spark.options import required_path
from holdfast.spark.pipelines.stores import LakeStore, Tables, UploadedFile, lake_url, tables_at

if TYPE_CHECKING:
    from pyspark.sql import DataFrameReader, SparkSession


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
    """A condition for every row, and what to do with a row that does not meet it."""

    name: str
    check: str
    on_fail: OnFail = "warn"


class PipelineOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of every kind of pipeline. Each kind adds its own.

    `source` is the pipeline whose table is read, for kinds that read one.
    """

    source: str | None = None
    expect: tuple[Expectation, ...] = ()

    @property
    def reads(self) -> tuple[str, ...]:
        """The pipelines whose tables are read."""
        return () if self.source is None else (self.source,)


class LakeOptions(PipelineOptions, frozen=True, kw_only=True):
    """Options of the kinds that write a table."""

    format: Literal["delta", "parquet"] = "delta"


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """One named pipeline. `function` is the user's, for a pipeline of the kind `python`."""

    name: str
    kind: str
    options: Any
    function: Callable[..., Any] | None = None


class Project(msgspec.Struct, frozen=True, kw_only=True):
    """Pipelines that share a data folder and a lake. `where` is the file that declares them, for errors.

    If the lake is in a store, `checkpoints` is the folder for what must be on a disk: checkpoints and reports.
    """

    folder: str
    lake: str
    pipelines: dict[str, Spec]
    where: str = "Python"
    checkpoints: str | None = None

    def spec(self, name: str) -> Spec:
        """The pipeline by this name. Raises InvalidRequest if there is none."""
        if name not in self.pipelines:
            raise InvalidRequest(f"there is no pipeline {name!r} in {self.where}{meant(name, self.pipelines)}")
        return self.pipelines[name]

    @property
    def home(self) -> str:
        """The folder for everything but tables."""
        return self.checkpoints or self.lake

    def checkpoint(self, name: str) -> str:
        """The folder of a pipeline's checkpoint."""
        return f"{self.home}/_checkpoints/{name}"

    def table(self, name: str) -> str:
        """The folder of the table that a pipeline writes."""
        return f"{self.lake}/{name}"

    def quarantine(self, name: str) -> str:
        """The folder of the rows that it quarantined."""
        return f"{self.lake}/{name}{QUARANTINE_SUFFIX}"

    def in_order(self, names: Iterable[str]) -> list[Spec]:
        """These pipelines, each after those that it reads from."""
        wanted = {name: self.spec(name) for name in names}
        found: dict[str, Spec] = {}

        def add(spec: Spec) -> None:
            for source in spec.options.reads:
                if source in wanted and source not in found:
                    add(wanted[source])
            found.setdefault(spec.name, spec)

        for spec in wanted.values():
            add(spec)
        return list(found.values())


def read_options(kind: type[PipelineOptions], given: Mapping[str, Any], where: str) -> Any:
    """The options of one pipeline. Raises BadSettings, which names the option that is wrong."""
    known = kind.__struct_encode_fields__
    check_keys(given, known, where, ("kind", *known))
    expect = given.get("expect")
    for number, expectation in enumerate(expect if isinstance(expect, list) else ()):
        if isinstance(expectation, Mapping):
            check_keys(expectation, Expectation.__struct_encode_fields__, f"{where}: expect[{number}]")
    try:
        options = msgspec.convert(dict(given), kind)
    except BadSettings as error:
        raise BadSettings(f"{where}: {error}") from None
    except msgspec.ValidationError as error:
        raise BadSettings(f"{where}: {_plain(str(error))}") from None
    _check_expectations(options.expect, where)
    return options


def check_project(project: Project) -> Project:
    """The project itself. Raises BadSettings if its names or sources are wrong."""
    for spec in project.pipelines.values():
        check_name(spec.name, "pipeline")
        if spec.name.startswith("_") or spec.name.endswith(QUARANTINE_SUFFIX):
            raise BadSettings(f"{project.where}: a pipeline cannot be named {spec.name!r}: choose another name")
        for source in spec.options.reads:
            if source not in project.pipelines:
                near = meant(source, project.pipelines)
                raise BadSettings(
                    f"{project.where}: {spec.name}: its source {source!r} is not one of the pipelines{near}"
                )
    for spec in project.pipelines.values():
        if spec.name in _read_by(project, spec):
            raise BadSettings(
                f"{project.where}: {spec.name} reads from itself through its source: give it another source"
            )
    return project


def _read_by(project: Project, spec: Spec) -> set[str]:
    """The pipelines that it reads from, and those that these read from, and so on."""
    found: set[str] = set()
    waiting = list(spec.options.reads)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += project.pipelines[name].options.reads
    return found


def located(project: Project) -> Project:
    """The project with absolute paths: the JVM may run in another folder than this process."""
    return msgspec.structs.replace(located_lake(project), folder=required_path({"path": project.folder}))


def located_lake(project: Project) -> Project:
    """The project with absolute paths of its lake. Raises BadSettings if tables cannot be there."""
    if is_address(project.lake):
        raise BadSettings(f"lake is {project.lake!r}: tables are in a folder that all machines share, or in a store")
    stored = is_store(project.lake)
    lake = lake_url(project.lake) if stored else _absolute(project.lake)
    if stored and project.checkpoints is None:
        raise BadSettings(
            f"lake is {lake}, and Spark cannot keep its checkpoints in a store: name a folder for them as checkpoints"
        )
    if not stored and project.checkpoints is not None:
        raise BadSettings("checkpoints is for a lake in a store: leave it out, they are in the folder of the lake")
    for spec in project.pipelines.values() if stored else ():
        if getattr(spec.options, "format", "delta") != "delta":
            raise BadSettings(f"{spec.name}: a table in a store must be a Delta table: leave out format")
    checkpoints = None if project.checkpoints is None else _absolute(project.checkpoints)
    return msgspec.structs.replace(project, lake=lake, checkpoints=checkpoints)


def _absolute(path: str) -> str:
    return posixpath.normpath(Path(path).absolute())


def from_home(home: str, path: str) -> str:
    """A path relative to the file that names it. The address of a server, or of a store, is what it is."""
    if is_address(path) or is_store(path):
        return path.rstrip("/")
    return posixpath.normpath(posixpath.join(home, path))


def interval_ms(text: str, what: str) -> int:
    """The milliseconds of a time such as "10 minutes" or "10m". Raises BadSettings if it is none."""
    found = _WORDS.fullmatch(text)
    if found is not None and (unit := _UNITS.get(found[2].lower())):
        return int(found[1]) * unit
    try:
        return max(round(parse_duration(text, what) * 1000), 0)
    except InvalidRequest:
        raise BadSettings(f"{what} is {text!r}: give a time such as '10 minutes' or '1h30m'") from None


def no_expectation_named(name: str, expectations: Iterable[Expectation]) -> None:
    """Raise BadSettings if an expectation has the name under which the kind itself counts rows."""
    if any(each.name == name for each in expectations):
        raise BadSettings(f"an expectation cannot be named {name!r} here: rows are counted under that name already")


def check_keys(given: Iterable[object], known: Sequence[str], where: str, named: Sequence[str] = ()) -> None:
    """Raise BadSettings for the first key that is not known. `named` are the keys to suggest, if they are others."""
    for key in given:
        if key not in known:
            raise BadSettings(f"{where}: {key!r} is not known{meant(str(key), named or known)}")


def meant(given: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: the nearest known one, or all of them."""
    names = list(known)
    near = get_close_matches(given, names, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; known ones: {', '.join(names)}" if names else ""


def _check_expectations(expectations: Iterable[Expectation], where: str) -> None:
    seen: set[str] = set()
    for each in expectations:
        wrong = None
        if not re.fullmatch(r"[\w .:-]{1,100}", each.name):
            wrong = f"an expectation cannot be named {each.name!r}: use letters and digits"
        elif each.name in seen:
            wrong = f"two expectations are named {each.name!r}: rename one"
        elif not each.check.strip():
            wrong = f"the expectation {each.name!r} has no check"
        if wrong is not None:
            raise BadSettings(f"{where}: {wrong}")
        seen.add(each.name)


def _plain(text: str) -> str:
    """An error of msgspec with the field first: "window: expected `str`, got `int`"."""
    words, _, place = text.partition(" - at `$")
    words = words[:1].lower() + words[1:]
    place = place.rstrip("`").removeprefix(".")
    return f"{place}: {words}" if place else words.replace("object missing required field", "it needs")


class Read(msgspec.Struct, frozen=True, kw_only=True):
    """What a run would read from one place: a partition of a topic, or batches of a table."""

    what: str
    start: str
    end: str
    rows: int | None = None
    bytes: int | None = None

    @classmethod
    def of_offsets(cls, topic: str, partition: int, start: int, stop: int, **sizes: int | None) -> Read:
        """The messages [start, stop) of a partition. `sizes` are `rows`, if not all offsets count, and `bytes`."""
        rows = sizes.pop("rows", max(stop - start, 0))
        return cls(what=f"{topic}/{partition}", start=str(start), end=str(stop), rows=rows, **sizes)

    @classmethod
    def of_batches(cls, table: str, after: int, waiting: Sequence[Any]) -> Read:
        """The batches of a table after this one, as its ledger has them."""
        return cls(
            what=f"table {table}",
            start=f"batch {after + 1}",
            end=f"batch {waiting[-1].batch}" if waiting else "nothing new",
            rows=sum(batch.rows_out for batch in waiting),
            bytes=sum(batch.bytes for batch in waiting),
        )


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A dry run: what would be read, and where it would be written."""

    pipeline: str
    kind: str
    reads: tuple[Read, ...] = ()
    rows: int | None = None
    bytes: int | None = None
    writes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a run is. `lag` is the number of rows that its source has beyond that, None if it is not known."""

    pipeline: str
    batch: int
    rows_in: int
    rows_out: int
    lag: int | None = None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run. `ok` is false if it found something a person must look at. `details` belong to the kind."""

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


@dataclass(frozen=True)
class Context:
    """One run of one pipeline: its spec, the session that it shares with others, and the event that stops it.

    `session` starts the session when it is first called, so that a plan made from files does not wait for a JVM.
    With `from_quarantine` it reads the rows that it put aside, not its source. `run` is a name that no other run has.
    `noted` are the parts of a long run that were noted as runs already. `uploads` are files of the batch that is being
    written, by path, if the lake is in a store.
    """

    world: World
    session: Callable[[], SparkSession]
    project: Project
    spec: Spec
    follow: bool = False
    from_quarantine: bool = False
    every_ms: int = 1_000
    stopping: Event = field(default_factory=Event)
    tell: Callable[[Progress], None] = lambda progress: None
    disk: LakeDisk = field(default_factory=LakeDisk)
    run: str = "run"
    noted: list[Summary] = field(default_factory=list)
    uploads: dict[str, UploadedFile] = field(default_factory=dict)

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
    def tables(self) -> Tables:
        """What holds the tables: the disk, or the store that the lake is in."""
        found = tables_at(self.project.lake)
        return found if isinstance(found, LakeStore) else self.disk

    @property
    def report_folder(self) -> str:
        """The folder of the report that it writes."""
        return f"{self.project.home}/{self.name}"

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
        """The folder that rows are written to before they count. It is on the same disk as the tables."""
        return f"{self.project.lake}/_staging/{self.name}"

    def reader(self, **options: str | None) -> DataFrameReader:
        """A reader of the data folder with these options of the source. None leaves an option out."""
        given = {name: value for name, value in options.items() if value is not None}
        return self.spark.read.format("holdfast").options(path=self.folder, **given)

    def plan(
        self, reads: Iterable[Read], *, writes: Sequence[str] = (), notes: Sequence[str] = (), sized: bool = True
    ) -> Plan:
        """A plan of these reads, with the sum of their rows, and of their bytes if they are `sized`.

        Without `writes` it writes to the pipeline's table.
        """
        reads = tuple(reads)
        return Plan(
            pipeline=self.name,
            kind=self.spec.kind,
            reads=reads,
            rows=sum(read.rows or 0 for read in reads),
            bytes=sum(read.bytes or 0 for read in reads) if sized else None,
            writes=tuple(writes) or (self.table,),
            notes=tuple(notes),
        )

    def report(self, batch: int, rows_in: int, rows_out: int, lag: int | None) -> None:
        """Tell the caller how far the run is."""
        self.tell(Progress(pipeline=self.name, batch=batch, rows_in=rows_in, rows_out=rows_out, lag=lag))

    def summary(self, **facts: Any) -> Summary:
        """A summary of this run."""
        return Summary(pipeline=self.name, kind=self.spec.kind, **facts)


# The kinds of pipelines: each is a module by its name with a `KIND`, imported when it is first needed.


_KINDS: Final = ("land", "refine", "aggregate", "replay", "deadletters", "traces", "reconcile", "compact", "python")


@dataclass(frozen=True)
class PipelineKind:
    """One kind of pipeline.

    `plan` writes nothing. `identity` returns the options that a checkpoint depends on: it cannot be used with others.
    `template` is what `holdfast pipeline new` writes, indented as an entry of `pipelines:`.
    `follows` is false for a kind that ends by itself, such as a report.
    """

    options: type[PipelineOptions]
    plan: Callable[[Context], Plan]
    run: Callable[[Context], Summary]
    template: str
    identity: Callable[[Any], dict[str, Any]] = lambda options: {}
    follows: bool = True


def kind_names() -> list[str]:
    """The names of all kinds."""
    return list(_KINDS)


def kind_named(name: object) -> PipelineKind:
    """The kind by this name. Raises BadSettings if there is none."""
    if name not in _KINDS:
        raise BadSettings(f"there is no pipeline kind {name!r}{meant(str(name), _KINDS)}")
    kind = import_module(f"holdfast.spark.pipelines.{name}").KIND
    assert isinstance(kind, PipelineKind)
    return kind


_HEAD: Final = """\
# Pipelines: `holdfast pipeline run {name} --config {file}`, and `holdfast pipeline plan` to see what that would do.
# Paths are relative to this file.
folder: data                    # the data folder with the topics
lake: lake                      # where tables go; checkpoints are in lake/_checkpoints
# checkpoints: work             # the folder for them if the lake is in a store, as s3://bucket/lake
# file: my_pipelines.py         # functions of your own; see `holdfast pipeline new NAME --python`

pipelines:
"""

PYTHON: Final = '''\
"""Your own pipelines: functions from rows to rows. Name this file in the YAML with `file: {file}`."""

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from holdfast.spark import pipeline


# It is called with the new rows of its source, batch by batch; what it returns goes to the table lake/{name}.
# A batch that was cut short is done again from the beginning, so it should do nothing else than return rows.
@pipeline(
    source="orders-silver",  # the pipeline whose table it reads
    name="{name}",
    expect=[{{"name": "has_country", "check": "country IS NOT NULL", "on_fail": "quarantine"}}],
    # partition_by=["country"],  # the folders of the table; by default the day, where there is a column dt
)
def {function}(rows: DataFrame) -> DataFrame:
    return rows.withColumn("country", f.upper("country"))
'''


def yaml_template(name: str, kind: str, file: str) -> str:
    """A YAML file with one pipeline of this kind."""
    return f"{_HEAD.format(name=name, file=file)}{entry(name, kind)}"


def entry(name: str, kind: str) -> str:
    """An entry for `pipelines:` in an existing file."""
    import yaml

    key = name if yaml.safe_load(name) == name else f'"{name}"'  # "on" and "2024" are no names to YAML
    return f"  {key}:\n{kind_named(kind).template}"


def python_template(name: str, file: str) -> str:
    """A Python file with one function."""
    function = "".join(c if c.isalnum() else "_" for c in name)
    return PYTHON.format(name=name, file=file, function=function if not function[:1].isdigit() else f"_{function}")
