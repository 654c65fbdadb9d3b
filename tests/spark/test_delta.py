"""Tables of pipelines as Delta tables: read by others, compacted, converted, and whole after every kill."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from deltalake import DeltaTable

import holdfast
from holdfast.cli.main import main
from holdfast.env import real_world
from holdfast.errors import BadSettings, InvalidRequest, PipelineFailed
from holdfast.spark import Pipeline, read_delta
from holdfast.spark.pipelines import lake as lake_module
from holdfast.spark.pipelines.checkpoint import status_of
from holdfast.spark.pipelines.lake import MANY
from holdfast.spark.pipelines.project import Runner
from tests.spark.scripts import ROOT


class Shop:
    """A topic of orders, and the lake beside it."""

    def __init__(self, home: Path, spark: Any) -> None:
        self.folder, self.lake, self.spark = home / "shop", home / "lake", spark
        self.sent = 0
        with holdfast.open_broker(self.folder) as broker:
            broker.create_topic("orders", partitions=2)

    def send(self, *bodies: Any) -> None:
        with holdfast.open_broker(self.folder) as broker:
            for body in bodies:
                raw = body if isinstance(body, bytes) else json.dumps(body).encode()
                broker.publish("orders", raw, key=str(self.sent).encode())
                self.sent += 1

    def orders(self, count: int) -> None:
        self.send(*({"id": number, "amount": 1.5} for number in range(self.sent, self.sent + count)))

    def land(self, **options: Any) -> Pipeline:
        return Pipeline.land("orders", folder=self.folder, lake=self.lake, name="land", **options)

    def run(self, chain: Pipeline) -> list[Any]:
        return chain.run(spark=self.spark)

    def by_others(self, name: str, **options: Any) -> pl.DataFrame:
        """The table as an engine reads it that knows nothing of Holdfast."""
        return pl.read_delta(str(self.lake / name), **options)

    def everything_once(self) -> None:
        found = self.by_others("land").select("partition", "offset")
        assert len(found) == len(found.unique()) == self.sent


@pytest.fixture
def shop(tmp_path: Path, spark: Any) -> Shop:
    return Shop(tmp_path, spark)


def test_other_engines_read_every_batch_and_every_version(shop):
    shop.orders(10)
    chain = shop.land(max_rows_per_batch=4).refine("id long, amount double", name="silver")
    shop.run(chain)
    shop.everything_once()
    assert shop.by_others("silver")["id"].sort().to_list() == list(range(10))
    table = DeltaTable(str(shop.lake / "land"))
    versions = [(each["batch"], each["pipeline"]) for each in table.history() if "batch" in each]
    assert versions == [("2", "land"), ("1", "land"), ("0", "land")]
    first = next(each["version"] for each in table.history() if each.get("batch") == "0")
    assert len(shop.by_others("land", version=first)) == read_delta(shop.spark, str(shop.lake / "land"), first).count()
    assert len(shop.by_others("land", version=first)) <= 4
    # What the files hold is in the log: engines skip files by it, and partitions by their values.
    adds = lake_module._add_actions(table)
    assert sum(each["num_records"] for each in adds) == 10
    assert {each["partition.topic"] for each in adds} == {"orders"}
    assert all(each["min.offset"] <= each["max.offset"] for each in adds)
    assert min(each["min.timestamp"] for each in adds) <= shop.by_others("land")["timestamp"].min()
    assert max(each["max.timestamp"] for each in adds) >= shop.by_others("land")["timestamp"].max()


def test_windows_are_merged_and_a_reader_of_a_version_keeps_what_it_saw(shop):
    chain = shop.land().refine("id long, amount double, by string", name="s")
    chain = chain.aggregate(name="g", window="1 day", by=["by"], measures={"count": "count(1)"})
    shop.send({"id": 1, "by": "a"}, {"id": 2})
    shop.run(chain)
    before = DeltaTable(str(shop.lake / "g")).version()
    shop.send({"id": 3, "by": "a"}, {"id": 4}, {"id": 5, "by": "b"})
    shop.run(chain)
    assert sorted(shop.by_others("g").select("by", "count").rows(), key=str) == [("a", 2), ("b", 1), (None, 2)]
    assert sorted(shop.by_others("g", version=before).select("by", "count").rows(), key=str) == [("a", 1), (None, 1)]


def command(capsys: Any, *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    return str(capsys.readouterr().out)


def test_optimize_and_vacuum_leave_one_file_and_every_row(shop, tmp_path, capsys, monkeypatch):
    shop.orders(2 * MANY)
    shop.run(shop.land(max_rows_per_batch=2, compact_files=False))
    land = shop.lake / "land"
    assert len(list(land.rglob("*.parquet"))) >= MANY
    never_named = next(land.rglob("*.parquet")).parent / "part-of-a-run-that-was-cut-short.parquet"
    never_named.write_bytes(b"rows")
    (tmp_path / "pipelines.yaml").write_text(
        "folder: shop\nlake: lake\npipelines: {land: {kind: land, topics: [orders]}}\n"
    )
    monkeypatch.chdir(tmp_path)
    [done] = json.loads(command(capsys, "pipeline", "optimize", "land", "--json"))["tables"]
    assert done["files_added"] == 1
    shown = command(capsys, "pipeline", "vacuum", "--all", "--older-than", "0s", "--dry-run")
    assert f"{done['files_removed'] + 1} files to delete" in shown
    [gone] = json.loads(command(capsys, "pipeline", "vacuum", "--all", "--older-than", "0s", "--json"))["tables"]
    assert gone["files_deleted"] == done["files_removed"] + 1
    assert len(list(land.rglob("*.parquet"))) == 1
    shop.everything_once()
    shop.orders(2)
    shop.run(shop.land(max_rows_per_batch=2))
    shop.everything_once()


def test_a_table_of_plain_files_is_read_as_it_is_and_becomes_a_delta_table(shop):
    plain = shop.land(format="parquet", max_rows_per_batch=4).refine(
        "id long",
        name="s",
        format="parquet",
        key="id",
        expect=[{"name": "x", "check": "id != 3", "on_fail": "quarantine"}],
    )
    shop.orders(6)
    shop.run(plain)
    assert not list(shop.lake.rglob("_delta_log"))
    assert shop.spark.read.parquet(str(shop.lake / "s")).count() == 5
    shop.orders(2)
    chain = shop.land().refine(
        "id long", name="s", key="id", expect=[{"name": "x", "check": "id != 3", "on_fail": "quarantine"}]
    )
    shop.run(chain)
    shop.everything_once()
    assert shop.by_others("s")["id"].sort().to_list() == [0, 1, 2, 4, 5, 6, 7]
    assert len(shop.by_others("s.quarantine")) == 1
    with pytest.raises(InvalidRequest, match="is a Delta table, and format is parquet"):
        shop.run(plain)
    with pytest.raises(BadSettings, match="leave out format"):
        shop.land().aggregate(format="parquet")


def test_a_failure_between_deltas_commit_and_sparks_doubles_nothing(shop, monkeypatch):
    shop.orders(12)
    sync, calls = lake_module._sync_log, []

    def fails_behind_the_second(disk: Any, table: str) -> None:
        sync(disk, table)
        calls.append(table)
        if len(calls) == 2:
            raise OSError("the power is gone")

    monkeypatch.setattr(lake_module, "_sync_log", fails_behind_the_second)
    with pytest.raises(PipelineFailed, match="land: OSError: the power is gone"):
        shop.run(shop.land(max_rows_per_batch=4))
    assert len(shop.by_others("land")) == 8
    # Spark has not noted the second batch, and will ask for it again.
    assert {path.name for path in (shop.lake / "_checkpoints/land/spark/commits").iterdir() if path.name.isdigit()} == {
        "0"
    }
    [rest] = shop.run(shop.land(max_rows_per_batch=4))
    assert (rest.batches, rest.rows_in) == (1, 4)
    shop.everything_once()


DRIVER = """
import sys
from holdfast.spark.pipelines.project import Pipeline, Runner
from holdfast.spark.session import session
spark = session("killed", "local[2]", **{
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC", "spark.sql.shuffle.partitions": 2})
chain = Pipeline.land("orders", folder=sys.argv[1], lake=sys.argv[2], name="land", max_rows_per_batch=5)
chain = chain.refine("id long not null", name="s", key="id").aggregate(name="g", window="1 day", watermark="1 day")
tell = lambda progress: print(progress.pipeline, flush=True)
Runner(chain.project, spark=spark, tell=tell).run(list(chain.project.pipelines), follow=True, every_ms=100)
"""


@pytest.fixture
def driver(shop: Shop) -> Iterator[Any]:
    """Starts a driver that follows the topic, in a group of its own with its JVM, and kills them all."""
    groups: list[int] = []

    def start() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", DRIVER, str(shop.folder), str(shop.lake)]
        running = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=tempfile.gettempdir(),
        )
        groups.append(running.pid)
        return running

    yield start
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


@pytest.mark.slow
def test_drivers_that_are_killed_at_random_moments_lose_nothing_and_double_nothing(shop, driver):
    moments = random.Random()
    for _ in range(2):
        shop.orders(30)
        running = driver()
        assert running.stdout is not None
        running.stdout.readline()  # the first batch is written
        time.sleep(moments.uniform(0, 3))
        os.killpg(running.pid, signal.SIGKILL)
        assert running.wait() == -signal.SIGKILL
        # Whatever moment it was: what can be seen are whole batches, each row once.
        seen = shop.by_others("land").select("partition", "offset")
        assert len(seen) == len(seen.unique())
    chain = shop.land(max_rows_per_batch=5).refine("id long not null", name="s", key="id")
    shop.run(chain.aggregate(name="g", window="1 day", watermark="1 day"))
    shop.everything_once()
    assert shop.by_others("s")["id"].sort().to_list() == list(range(shop.sent))
    assert shop.by_others("g")["count"].sum() == shop.sent


def test_new_columns_and_wider_types_are_taken_without_starting_over(shop):
    shop.send({"id": 1, "n": 7}, {"id": 2, "n": 8, "colour": "red", "deep": {"x": 1}})
    _, silver = shop.run(shop.land().refine("id long, n int", name="s"))
    assert silver.expectations["rescued"] == 1
    assert shop.by_others("s").sort("id")["_rescued"].to_list() == [None, '{"colour":"red","deep":"{\\"x\\":1}"}']
    shop.send({"id": 3, "n": 1 << 40, "colour": "blue"})
    shop.run(shop.land().refine("id long, n long, colour string", name="s"))
    found = shop.by_others("s").sort("id")
    assert found.select("id", "n", "colour").rows() == [(1, 7, None), (2, 8, None), (3, 1 << 40, "blue")]
    assert found.schema["n"] == pl.Int64
    assert found["_batch"].to_list() == [0, 0, 1]
    # Narrower types fit in; others do not, and say so.
    shop.send({"id": 4, "n": 4})
    shop.run(shop.land().refine("id int, n int, colour string", name="s"))
    assert shop.by_others("s").schema["id"] == pl.Int64
    shop.send({"id": 5})
    with pytest.raises(InvalidRequest, match=r"the column n is bigint in .*, and string in new rows"):
        shop.run(shop.land().refine("id long, n string", name="s"))
    assert len(shop.by_others("s")) == 4


def test_an_inferred_schema_takes_new_fields(shop):
    chain = shop.land().refine(name="s")
    shop.send({"id": 1})
    shop.run(chain)
    shop.send({"id": 2, "price": 1.5}, {"id": 3})
    _, silver = shop.run(chain)
    assert silver.expectations["rescued"] == 0
    assert sorted(shop.by_others("s").select("id", "price").rows()) == [(1, None), (2, 1.5), (3, None)]


def test_quarantined_rows_name_field_and_value_and_are_tried_again_after_a_fix(shop):
    shop.send({"id": 1, "amount": "4,50"}, {"id": 2, "amount": 2.0}, b"no json", {"id": 3, "amount": -1.0})
    strict = shop.land().refine("id long not null, amount double", name="s", key="id")
    strict = strict.expect("positive", "amount > 0", on_fail="quarantine")
    shop.run(strict)
    assert sorted(why for reasons in shop.by_others("s.quarantine")["_reasons"] for why in reasons) == [
        "amount is 4,50, which is not a valid double",
        "not JSON of the schema",
        "positive",
    ]
    lax = shop.land().refine("id long not null, amount double", name="s", key="id")
    [again] = Runner(lax.project, spark=shop.spark).run(["s"], from_quarantine=True)
    assert again.summary is not None, again.error
    assert (again.summary.rows_in, again.summary.rows_out, again.summary.quarantined) == (0, 1, -1)
    assert again.summary.notes == ("1 of 3 rows left the quarantine",)
    assert sorted(shop.by_others("s")["id"].to_list()) == [2, 3]
    assert len(shop.by_others("s.quarantine")) == 2
    status = status_of(real_world(), lax.project, lax.project.spec("s"))
    assert (status.rows_in, status.rows_out, status.quarantined) == (4, 2, 2)
    shop.orders(1)  # the source is read on as if nothing had happened
    _, silver = shop.run(lax)
    assert silver.rows_in == 1
    with pytest.raises(InvalidRequest, match="only a pipeline of the kind refine"):
        Runner(lax.project, spark=shop.spark).run(["land"], from_quarantine=True)


def test_rows_without_a_time_are_counted(shop):
    shop.send({"id": 1, "at": "2026-11-16T10:00:00Z"}, {"id": 2})
    *_, gold = shop.run(shop.land().refine("id long, at timestamp", name="s").aggregate(name="g", time="at"))
    assert (gold.rows_in, gold.expectations) == (2, {"late": 0, "null_time": 1})
    assert shop.by_others("g")["count"].to_list() == [1]


def test_a_table_that_is_not_there_is_named(spark: Any, tmp_path: Path):
    with pytest.raises(InvalidRequest, match=f"there is no Delta table in {tmp_path}/nothing: correct the path"):
        read_delta(spark, str(tmp_path / "nothing"))
