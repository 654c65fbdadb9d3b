"""A lake for tests without a JVM: disks that stop half-way, and files as if Spark had written them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
from pyarrow import parquet as pq

from holdfast.env import real_world
from holdfast.env.disk import LakeDisk
from holdfast.spark.pipelines.checkpoint import TableChange
from holdfast.spark.pipelines.lake import table_files
from holdfast.spark.pipelines.parquet import BATCH
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

    def sync_folder(self, path: str) -> None:
        self._count()  # such as after a transaction of Delta, before the ledger knows of it
        super().sync_folder(path)


def context_of(tmp_path: Path, disk: LakeDisk, **options: Any) -> Context:
    made = Pipeline.land("orders", folder=tmp_path / "shop", lake=tmp_path / "lake", name="p", **options).project
    world = real_world()
    world = type(world)(clock=world.clock, disk=disk, ids=world.ids)
    return Context(world=world, session=lambda: None, project=made, spec=made.spec("p"), disk=disk)  # type: ignore[arg-type,return-value]


def staged(context: Context, what: str, **contents: str) -> str:
    """As if Spark had written there."""
    folder = Path(context.staging) / what
    for place, text in contents.items():
        leaf = folder / place.replace("__", "=")
        leaf.mkdir(parents=True, exist_ok=True)
        rows = pa.table({"key": [text[0]], "text": [text], BATCH: pa.array([int(text[1:] or 0)], pa.int64())})
        pq.write_table(rows, leaf / f"part-{text}.snappy.parquet")
        (leaf / f".part-{text}.snappy.parquet.crc").write_text("crc", encoding="utf-8")
    return str(folder)


def changed(table: str, **how: Any) -> TableChange:
    """What a batch does to a Delta table with the columns that `staged` writes, in folders by `a`."""
    fields = {"key": "string", "text": "string", BATCH: "long", "a": "string"}
    columns = [{"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in fields.items()]
    schema = json.dumps({"type": "struct", "fields": columns})
    return TableChange(table=table, schema=schema, partition_by=("a",), **how)


def seen(context: Context, table: str | None = None) -> list[str]:
    """What a reader finds: of a Delta table, or else whoever lists the folder."""
    place = Path(table or context.table)
    if (place / "_delta_log").exists():
        found: list[str] = pl.read_delta(str(place))["text"].to_list()
        return sorted(found)
    names = table_files(LakeDisk(), str(place))
    return sorted(text for name in names for text in pq.ParquetFile(place / name).read()["text"].to_pylist())
