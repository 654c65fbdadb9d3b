"""A lake in an object store: what pipelines write there, and what is left of it after failures and kills."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
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
from holdfast.errors import DiskFailed, InvalidRequest, PipelineFailed
from holdfast.spark import Pipeline, read_delta, run, table
from holdfast.spark.pipelines import lake as lake_module
from holdfast.spark.pipelines import stores
from holdfast.spark.pipelines.checkpoint import Ledger, status_of
from holdfast.spark.pipelines.project import read_project
from tests.integration.store_servers import moto, seaweedfs
from tests.spark.scripts import ROOT

FUNCTIONS = """
from pyspark.sql import functions as f
from holdfast.spark import pipeline

@pipeline(source="silver", upsert_by="by", latest_by="id", delete_when="amount < 0")
def newest(rows):
    return rows.select("by", "id", "amount")

@pipeline(sources=["silver", "land"], upsert_by="offset2")
def pairs(silver, land):
    same = [silver["_partition"] == land["partition"], silver["_offset"] == land["offset"]]
    return silver.join(land, same).select(f.expr("offset * 2 + partition").alias("offset2"), "id", "by")
"""
PIPELINES = """
folder: shop
lake: {lake}
checkpoints: work
file: functions.py
pipelines:
  land: {{kind: land, topics: [orders], max_rows_per_batch: 8}}
  silver:
    kind: refine
    source: land
    schema: id long, amount double, by string
    key: id
    expect: [{{name: known, check: "by IS NOT NULL", on_fail: quarantine}}]
  gold: {{kind: aggregate, source: silver, window: 1 day, by: [by], measures: {{count: count(1)}}}}
  kept: {{kind: aggregate, source: silver, window: 1 day, by: [by], measures: {{count: count(1)}}, incremental: true}}
  proof: {{kind: reconcile, source: land}}
  cold: {{kind: compact, topics: [orders], latest: true}}
  letters: {{kind: deadletters, topics: [orders]}}
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, scale: Any) -> Iterator[tuple[str, dict[str, str]]]:
    server = scale(moto, seaweedfs)  # which takes half a minute to stop
    with server(tmp_path_factory.mktemp("store")) as (url, variables):
        yield url.rpartition("/")[0], variables


class Shop:
    """A topic of orders, a lake in a store, and the folder with its checkpoints."""

    def __init__(self, home: Path, lake: str, spark: Any) -> None:
        self.home, self.folder, self.work, self.lake, self.spark = home, home / "shop", home / "work", lake, spark
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
        self.send(*({"id": n, "amount": 1.5, "by": "ab"[n % 2]} for n in range(self.sent, self.sent + count)))

    def land(self, **options: Any) -> Pipeline:
        return Pipeline.land(
            "orders", folder=self.folder, lake=self.lake, checkpoints=self.work, name="land", **options
        )

    def run(self, chain: Pipeline, **how: Any) -> list[Any]:
        return chain.run(spark=self.spark, **how)

    def by_others(self, name: str, **options: Any) -> pl.DataFrame:
        """The table as an engine reads it that knows nothing of Holdfast."""
        return pl.read_delta(f"{self.lake}/{name}", storage_options=stores.store_options(self.lake), **options)

    def delta(self, name: str) -> DeltaTable:
        return DeltaTable(f"{self.lake}/{name}", storage_options=stores.store_options(self.lake))

    def objects(self, name: str) -> list[str]:
        """The Parquet files below a table, whether it needs them or not."""
        found = stores.tables_at(self.lake).files_below(f"{self.lake}/{name}")
        return [each for each in found if each.endswith(".parquet")]

    def everything_once(self) -> None:
        found = self.by_others("land").select("partition", "offset")
        assert len(found) == len(found.unique()) == self.sent


@pytest.fixture
def shop(tmp_path: Path, spark: Any, store: Any, monkeypatch: pytest.MonkeyPatch) -> Shop:
    bucket, variables = store
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return Shop(tmp_path, f"{bucket}/{tmp_path.name}", spark)


def test_every_kind_of_pipeline_writes_to_a_store_and_reads_from_it(shop):
    (shop.home / "functions.py").write_text(FUNCTIONS)
    (shop.home / "pipelines.yaml").write_text(PIPELINES.format(lake=shop.lake))
    project = read_project(shop.home / "pipelines.yaml")

    def done() -> dict[str, Any]:
        return {each.pipeline: each for each in run(project, spark=shop.spark)}

    shop.orders(20)
    shop.send(b"no json", {"id": 100})
    first = done()
    shop.everything_once()
    assert (first["land"].rows_in, first["silver"].rows_out, first["silver"].quarantined) == (22, 20, 2)
    assert (first["newest"].rows_out, first["pairs"].rows_out, first["proof"].ok) == (2, 20, True)
    shop.orders(4)
    shop.send({"id": 3, "amount": 9.0, "by": "a"}, {"id": 200, "amount": -1.0, "by": "a"})
    again = done()
    shop.everything_once()
    assert (again["silver"].rows_out, again["silver"].duplicates) == (5, 1)
    assert (again["proof"].ok, again["proof"].rows_out) == (True, shop.sent)
    assert shop.by_others("silver")["id"].sort().to_list() == [*range(20), *range(22, 26), 200]
    assert len(shop.by_others("silver.quarantine")) == 2
    for name in ("gold", "kept"):
        assert sorted(shop.by_others(name).select("by", "count").rows()) == [("a", 13), ("b", 12)]
    assert shop.by_others("newest").select("by", "id").rows() == [("b", 25)]
    assert sorted(shop.by_others("pairs")["id"].to_list()) == sorted(shop.by_others("silver")["id"].to_list())
    standing = {name: status_of(real_world(), project, spec) for name, spec in project.pipelines.items()}
    assert (standing["land"].rows_in, standing["land"].lag, standing["silver"].lag) == (shop.sent, 0, 0)
    assert all(each.ok for each in standing.values())
    # Reports are on the disk, tables in the store.
    assert (shop.work / "letters/report/report.html").exists()
    assert not list(shop.work.rglob("_delta_log"))
    # What the files hold is in the log: engines skip files by it.
    adds = lake_module._add_actions(shop.delta("land"))
    assert sum(each["num_records"] for each in adds) == shop.sent
    assert {each["partition.topic"] for each in adds} == {"orders"}
    assert all(each["min.offset"] <= each["max.offset"] for each in adds)


def test_history_is_read_by_version_and_with_the_tail_of_the_log(shop):
    shop.orders(10)
    shop.run(shop.land(max_rows_per_batch=4))
    place = f"{shop.lake}/land"
    first = next(each["version"] for each in shop.delta("land").history() if each.get("batch") == "0")
    assert read_delta(shop.spark, place, first).count() == len(shop.by_others("land", version=first)) <= 4
    shop.orders(5)
    rows = table("orders", str(shop.folder), shop.lake, checkpoints=str(shop.work), spark=shop.spark)
    places = [(row.partition, row.offset) for row in rows.collect()]
    assert len(places) == len(set(places)) == shop.sent
    assert sorted(json.loads(bytes(row.value))["id"] for row in rows.collect()) == list(range(shop.sent))


def command(capsys: pytest.CaptureFixture[str], shop: Shop, *arguments: str) -> Any:
    with pytest.raises(SystemExit) as ended:
        main(["pipeline", *arguments, "--config", str(shop.home / "pipelines.yaml"), "--json"])
    assert ended.value.code == 0
    return json.loads(capsys.readouterr().out)


def test_small_files_are_merged_and_no_file_is_left_that_no_table_needs(shop, capsys):
    shop.orders(16)
    land = shop.land(max_rows_per_batch=2, compact_files=False)
    shop.run(land)
    before = len(shop.objects("land"))
    assert before >= lake_module.MANY
    (shop.home / "functions.py").write_text(FUNCTIONS)
    (shop.home / "pipelines.yaml").write_text(PIPELINES.format(lake=shop.lake))
    [done] = command(capsys, shop, "optimize", "land")["tables"]
    assert (done["table"], done["files_removed"], done["files_added"]) == (f"{shop.lake}/land", before, 1)
    [gone] = command(capsys, shop, "vacuum", "land", "--older-than", "0s")["tables"]
    assert gone["files_deleted"] == before
    assert len(shop.objects("land")) == 1
    [plan] = command(capsys, shop, "plan", "land")["plans"]
    assert (plan["rows"], plan["writes"]) == (0, [f"{shop.lake}/land"])
    [standing] = command(capsys, shop, "status", "land")["pipelines"]
    assert (standing["rows_in"], standing["lag"]) == (16, 0)
    shop.orders(2)
    shop.run(land)
    shop.everything_once()


def test_new_columns_and_wider_types_are_taken_without_starting_over(shop):
    shop.send({"id": 1, "n": 7})
    shop.run(shop.land().refine("id long, n int", name="s"))
    shop.send({"id": 2, "n": 1 << 40, "colour": "blue"})
    shop.run(shop.land().refine("id long, n long, colour string", name="s"))
    found = shop.by_others("s").sort("id")
    assert found.select("id", "n", "colour").rows() == [(1, 7, None), (2, 1 << 40, "blue")]
    assert found.schema["n"] == pl.Int64
    assert [row.n for row in read_delta(shop.spark, f"{shop.lake}/s").orderBy("id").collect()] == [7, 1 << 40]


def test_values_of_partition_columns_stay_what_they_are(shop):
    values = ["a b", "x/y", "ä+%20", "", None, "c:d=e", "2024"]
    rows = shop.spark.createDataFrame(
        [(n, value, n % 2 == 0) for n, value in enumerate(values)], "n long, part string, even boolean"
    )
    access = stores.access_to(f"{shop.lake}/odd")
    files = stores.uploaded(rows, access, access.url, "run", ("part", "even"))
    assert sum(each.rows for each in files) == len(values)
    names = [each.path.removeprefix(f"{access.url}/") for each in files]
    found = stores.stored_rows(shop.spark, access.url, names, rows.schema.add("missing", "long")).collect()
    expected = [(n, value or None, n % 2 == 0, None) for n, value in enumerate(values)]
    assert sorted(tuple(row) for row in found) == expected


@pytest.mark.parametrize("moment", ["before it is decided", "before it is committed", "behind the commit"])
def test_a_failure_behind_the_upload_loses_nothing_and_doubles_nothing(shop, monkeypatch, moment):
    shop.orders(12)
    owner: Any = Ledger if moment == "before it is decided" else lake_module
    name = {"before it is decided": "decide", "before it is committed": "_commit_change"}.get(moment, "_sync_log")
    works, calls = getattr(owner, name), []

    def fails_the_second_time(*arguments: Any) -> None:
        calls.append(name)
        if len(calls) == 2:
            if moment == "behind the commit":
                works(*arguments)
            raise OSError("the power is gone")
        works(*arguments)

    with monkeypatch.context() as patch, pytest.raises(PipelineFailed, match="land: OSError: the power is gone"):
        patch.setattr(owner, name, fails_the_second_time)
        shop.run(shop.land(max_rows_per_batch=4))
    assert len(shop.by_others("land")) == (8 if moment == "behind the commit" else 4)
    uploaded = shop.objects("land")
    replaced = sorted(lake_module.live_files(lake_module.delta_table(f"{shop.lake}/land")))
    if moment == "before it is decided":  # files that were merged meanwhile stay, for readers of the versions before
        lake_module.optimize(f"{shop.lake}/land")
    assert (shop.work / "_checkpoints/land/uploads").exists()
    shop.run(shop.land(max_rows_per_batch=4))
    shop.everything_once()
    assert not (shop.work / "_checkpoints/land/uploads").exists()
    # What the batch had uploaded before it counted is gone; what counted stays.
    needed = {*lake_module.live_files(lake_module.delta_table(f"{shop.lake}/land")), *replaced}
    assert sorted(shop.objects("land")) == sorted(needed)
    assert (set(uploaded) <= set(shop.objects("land"))) is (moment != "before it is decided")


def test_rows_that_wait_to_be_merged_are_merged_once_after_a_failure(shop, monkeypatch):
    shop.orders(6)
    chain = shop.land().refine("id long, by string", name="s").aggregate(name="g", window="1 day", by=["by"])
    with monkeypatch.context() as patch, pytest.raises(DiskFailed, match="g cannot be used: the power is gone"):
        patch.setattr(lake_module, "_merge", lambda *_: (_ for _ in ()).throw(OSError("the power is gone")))
        shop.run(chain)
    shop.run(chain)
    assert sorted(shop.by_others("g").select("by", "count").rows()) == [("a", 3), ("b", 3)]
    assert not stores.tables_at(shop.lake).files_below(f"{shop.lake}/_staging")


def test_a_table_with_the_checkpoints_of_another_folder_is_refused_until_it_starts_over(shop):
    shop.orders(3)
    shop.run(shop.land())
    other = Pipeline.land("orders", folder=shop.folder, lake=shop.lake, checkpoints=shop.home / "other", name="land")
    with pytest.raises(InvalidRequest, match=r"was written with other checkpoints than those in .*/other"):
        shop.run(other)
    shop.everything_once()
    shop.run(other, full_refresh=True)
    shop.everything_once()
    assert len(shop.objects("land")) == len(lake_module.live_files(lake_module.delta_table(f"{shop.lake}/land")))


def test_keys_are_in_no_plan_and_no_file_and_an_error_is_one_sentence(shop, store, monkeypatch):
    _, variables = store
    secret = variables["AWS_SECRET_ACCESS_KEY"]
    shop.orders(3)
    chain = shop.land().then("python", "copy")
    shop.run(shop.land())
    plan = read_delta(shop.spark, f"{shop.lake}/land")._jdf.queryExecution().toString()
    assert "MapInArrow" in plan
    assert secret not in plan
    assert secret not in repr(stores.access_to(shop.lake))
    assert not [path for path in shop.work.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    log = shop.delta("land").history()
    assert secret not in json.dumps(log, default=str)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(DiskFailed) as refused:
        shop.run(chain)
    words = str(refused.value)
    assert "cannot be used" in words
    assert "AWS_ACCESS_KEY_ID" in words
    assert "\n" not in words
    assert secret not in words


DRIVER = """
import sys
from holdfast.spark.pipelines.project import Pipeline, Runner
from holdfast.spark.session import session
spark = session("killed", "local[2,8]", **{
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC", "spark.sql.shuffle.partitions": 2})
folder, lake, work = sys.argv[1:]
chain = Pipeline.land("orders", folder=folder, lake=lake, checkpoints=work, name="land", max_rows_per_batch=5)
chain = chain.refine("id long not null", name="s", key="id").aggregate(name="g", window="1 day", watermark="1 day")
tell = lambda progress: print(progress.pipeline, flush=True)
Runner(chain.project, spark=spark, tell=tell).run(list(chain.project.pipelines), follow=True, every_ms=100)
"""


@contextlib.contextmanager
def following(shop: Shop) -> Iterator[subprocess.Popen[bytes]]:
    """A driver that follows the topic, in a group of its own with its JVM. It is killed at the end of the block."""
    command = [sys.executable, "-c", DRIVER, str(shop.folder), shop.lake, str(shop.work)]
    with (shop.home / "driver.log").open("ab") as log:
        driver = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=shop.home,
        )
    try:
        yield driver
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()


def workers_of(driver: subprocess.Popen[bytes]) -> list[int]:
    """The processes in which Spark runs Python: children of daemons, which have the same command line."""
    parents = {}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            number = int(place.name)
            if b"pyspark.daemon" in (place / "cmdline").read_bytes() and os.getsid(number) == driver.pid:
                parents[number] = int((place / "stat").read_text().rpartition(")")[2].split()[1])
    return [number for number, parent in parents.items() if parent in parents]


@pytest.mark.slow
def test_workers_and_drivers_that_are_killed_lose_nothing_and_double_nothing(shop, scale):
    moments, killed = random.Random(), 0
    for _ in range(scale(1, 8)):
        shop.orders(30)
        with following(shop) as driver:
            assert driver.stdout is not None
            assert driver.stdout.readline(), (shop.home / "driver.log").read_text()[-4000:]  # a batch is written
            for _ in range(3):
                time.sleep(moments.uniform(0, 1))
                for worker in workers_of(driver):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(worker, signal.SIGKILL)
                        killed += 1
            time.sleep(moments.uniform(0, 2))
        # Whatever moment it was: what can be seen are whole batches, each row once.
        seen = shop.by_others("land").select("partition", "offset")
        assert len(seen) == len(seen.unique())
    assert killed
    chain = shop.land(max_rows_per_batch=5).refine("id long not null", name="s", key="id")
    shop.run(chain.aggregate(name="g", window="1 day", watermark="1 day"))
    shop.everything_once()
    assert shop.by_others("s")["id"].sort().to_list() == list(range(shop.sent))
    assert shop.by_others("g")["count"].sum() == shop.sent
    secret = os.environ["AWS_SECRET_ACCESS_KEY"]
    assert secret not in (shop.home / "driver.log").read_text()
