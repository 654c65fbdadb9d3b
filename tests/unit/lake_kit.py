"""A lake for tests without a JVM: disks that stop half-way, and files as if Spark had written them."""

from __future__ import annotations

from pathlib import Path

from holdfast.env import real_world
from holdfast.env.disk import LakeDisk
from holdfast.spark.pipelines.lake import table_files
from holdfast.spark.pipelines.project import Pipeline
from holdfast.spark.pipelines.spec import Context


class Crash(Exception):
    """The process is gone."""


class FrailDisk(LakeDisk):
    """Stops everything at the n-th change of a name."""

    def __init__(self, calls: int) -> None:
        self.calls = calls

    def _count(self) -> None:
        self.calls -= 1
        if self.calls < 0:
            raise Crash

    def rename(self, old: str, new: str) -> None:
        self._count()
        super().rename(old, new)
        self._count()

    def exchange(self, one: str, other: str) -> bool:
        self._count()
        done = super().exchange(one, other)
        self._count()
        return done

    def remove(self, path: str) -> None:
        self._count()
        super().remove(path)


class ClumsyDisk(FrailDisk):
    """One that cannot exchange folders."""

    def exchange(self, one: str, other: str) -> bool:
        return False


def context_of(tmp_path: Path, disk: LakeDisk) -> Context:
    made = Pipeline.land("orders", folder=tmp_path / "shop", lake=tmp_path / "lake", name="p").project
    world = real_world()
    world = type(world)(clock=world.clock, disk=disk, ids=world.ids)
    return Context(world=world, session=lambda: None, project=made, spec=made.spec("p"), disk=disk)  # type: ignore[arg-type,return-value]


def staged(context: Context, what: str, **contents: str) -> str:
    """As if Spark had written there."""
    folder = Path(context.staging) / what
    for place, text in contents.items():
        leaf = folder / place.replace("__", "=")
        leaf.mkdir(parents=True, exist_ok=True)
        (leaf / f"part-{text}.snappy.parquet").write_text(text, encoding="utf-8")
        (leaf / f".part-{text}.snappy.parquet.crc").write_text("crc", encoding="utf-8")
    return str(folder)


def seen(context: Context) -> list[str]:
    """What a reader finds who lists the table."""
    table = Path(context.table)
    return sorted((table / path).read_text(encoding="utf-8") for path in table_files(LakeDisk(), str(table)))
