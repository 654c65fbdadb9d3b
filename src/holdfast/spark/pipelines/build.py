"""Pipelines from Python: the same specs that a YAML file declares, chained."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.errors import InvalidRequest
from holdfast.spark.pipelines.context import Plan, Summary, kind_named
from holdfast.spark.pipelines.custom import marked
from holdfast.spark.pipelines.project import read_project
from holdfast.spark.pipelines.runner import Runner, raise_first
from holdfast.spark.pipelines.spec import Expectation, OnFail, Project, Spec, check_project, read_options

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LAYERS = {"land": "land", "refine": "silver", "aggregate": "gold"}


class Pipeline:
    """A chain of pipelines, each reading the table of the one before. Every method answers with a new chain."""

    def __init__(self, project: Project, last: str) -> None:
        self.project = project
        self._last = last

    @classmethod
    def of(
        cls, kind: str, name: str, *, folder: str | PathLike[str], lake: str | PathLike[str], **options: Any
    ) -> Pipeline:
        """A pipeline of any kind, with the options that it has in YAML."""
        spec = _spec(name, kind, options)
        project = Project(folder=fspath(folder), lake=fspath(lake), pipelines={name: spec})
        return cls(check_project(project), name)

    @classmethod
    def land(
        cls,
        *topics: str,
        folder: str | PathLike[str],
        lake: str | PathLike[str],
        name: str | None = None,
        **options: Any,
    ) -> Pipeline:
        """Topics to Parquet, every message once."""
        said = name or f"{topics[0] if topics else 'topics'}-land"
        return cls.of("land", said, folder=folder, lake=lake, topics=list(topics), **options)

    def refine(self, schema: str = "infer", *, name: str | None = None, **options: Any) -> Pipeline:
        """Typed, checked, de-duplicated rows of the table before."""
        return self.then("refine", name, schema=schema, **options)

    def aggregate(self, *, name: str | None = None, **options: Any) -> Pipeline:
        """Numbers by time window, of the table before."""
        return self.then("aggregate", name, **options)

    def apply(self, function: Any) -> Pipeline:
        """A function of your own that was made a pipeline by the decorator `pipeline`."""
        spec = marked(function)
        if spec is None:
            raise InvalidRequest("the function is no pipeline: put @pipeline(source=...) above it")
        return self._with(self._new(spec))

    def then(self, kind: str, name: str | None = None, **options: Any) -> Pipeline:
        """A pipeline of any kind that reads the table of the last one."""
        said = name or f"{self._last.removesuffix('-land').removesuffix('-silver')}-{_LAYERS.get(kind, kind)}"
        return self._with(self._new(_spec(said, kind, {"source": self._last, **options})))

    def expect(self, name: str, check: str, on_fail: OnFail = "warn") -> Pipeline:
        """Expect something of every row of the last one."""
        spec = self.project.spec(self._last)
        known = [msgspec.structs.asdict(each) for each in spec.options.expect]
        given = {**_plain(spec.options), "expect": [*known, {"name": name, "check": check, "on_fail": on_fail}]}
        return self._with(_spec(spec.name, spec.kind, given, spec))

    def run(
        self,
        *,
        spark: SparkSession | None = None,
        follow: bool = False,
        every_ms: int = 1_000,
        full_refresh: bool = False,
    ) -> list[Summary]:
        """Run the whole chain; answers with a summary of each."""
        return run(
            self.project,
            *self.project.pipelines,
            spark=spark,
            follow=follow,
            every_ms=every_ms,
            full_refresh=full_refresh,
        )

    def plan(self, *, spark: SparkSession | None = None) -> list[Plan]:
        """What a run would read and write; nothing is written for it."""
        return Runner(self.project, spark=spark).plan(list(self.project.pipelines))

    def _new(self, spec: Spec) -> Spec:
        if spec.name in self.project.pipelines:
            raise InvalidRequest(f"there are two pipelines named {spec.name}: give one another name, name=...")
        return spec

    def _with(self, spec: Spec) -> Pipeline:
        pipelines = {**self.project.pipelines, spec.name: spec}
        return Pipeline(check_project(msgspec.structs.replace(self.project, pipelines=pipelines)), spec.name)


def run(
    project: Project | str | PathLike[str],
    *names: str,
    spark: SparkSession | None = None,
    follow: bool = False,
    every_ms: int = 1_000,
    full_refresh: bool = False,
) -> list[Summary]:
    """Run pipelines of a project, or of the file that declares it: those that are named, or all of them."""
    found = project if isinstance(project, Project) else read_project(project)
    wanted: Sequence[str] = names or list(found.pipelines)
    outcomes = Runner(found, spark=spark).run(wanted, follow=follow, every_ms=every_ms, full_refresh=full_refresh)
    raise_first(outcomes)
    return [outcome.summary for outcome in outcomes if outcome.summary is not None]


def _spec(name: str, kind: str, options: dict[str, Any], former: Spec | None = None) -> Spec:
    given = {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()}
    expect = [
        msgspec.structs.asdict(each) if isinstance(each, Expectation) else each for each in given.pop("expect", ())
    ]
    if expect:
        given["expect"] = expect
    function = None if former is None else former.function
    return Spec(name=name, kind=kind, options=read_options(kind_named(kind).options, given, name), function=function)


def _plain(options: Any) -> dict[str, Any]:
    return {key: value for key, value in msgspec.structs.asdict(options).items() if key != "expect"}
