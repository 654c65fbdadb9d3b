"""Projects for tests of pipelines: declared in Python, run with the session of the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from holdfast.env import World
from holdfast.spark import read_delta
from holdfast.spark.pipelines.project import Runner, raise_first
from holdfast.spark.pipelines.spec import Plan, Project, Spec, Summary, check_project, kind_named, read_options


class Kit:
    """A data folder and a lake below one folder; pipelines are given as in YAML."""

    def __init__(self, spark: SparkSession, root: Path, world: World | None = None) -> None:
        self.spark = spark
        self.world = world
        self.folder = str(root / "shop")
        self.lake = str(root / "lake")
        self.pipelines: dict[str, Spec] = {}

    def declare(self, name: str, kind: str, **options: Any) -> None:
        self.pipelines[name] = Spec(name=name, kind=kind, options=read_options(kind_named(kind).options, options, name))

    @property
    def project(self) -> Project:
        return check_project(Project(folder=self.folder, lake=self.lake, pipelines=self.pipelines))

    def runner(self) -> Runner:
        return Runner(self.project, spark=self.spark, world=self.world)

    def run(self, *names: str, full_refresh: bool = False) -> Summary:
        """Run them; answers with the summary of the last."""
        outcomes = self.runner().run(names, full_refresh=full_refresh)
        raise_first(outcomes)
        summary = outcomes[-1].summary
        assert summary is not None
        return summary

    def plan(self, name: str) -> Plan:
        return self.runner().plan([name])[0]

    def rows(self, table: str, *columns: str) -> list[tuple[Any, ...]]:
        """The rows of a table, below the lake, in order."""
        place = f"{self.lake}/{table}"
        is_delta = Path(place, "_delta_log").exists()
        found = read_delta(self.spark, place) if is_delta else self.spark.read.parquet(place)
        return sorted(tuple(row) for row in found.select(*columns).collect())
