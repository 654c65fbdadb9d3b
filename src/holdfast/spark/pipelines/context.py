"""What a pipeline is given to run with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event
from typing import TYPE_CHECKING, Any

from holdfast.env import World
from holdfast.env.lakedisk import LakeDisk
from holdfast.spark.pipelines.results import Progress
from holdfast.spark.pipelines.spec import Project, Spec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


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
