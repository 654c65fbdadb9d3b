"""Pipelines exported as a project of Spark Declarative Pipelines, and that project run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.dataset
import pytest

import holdfast
from holdfast.env import real_world
from holdfast.errors import InvalidRequest
from holdfast.spark.pipelines.project import Pipeline
from holdfast.spark.pipelines.sdp import columns_of, export, table_names
from holdfast.spark.session import java_home

SCHEMA = "id long not null, amount double, country string, at timestamp"


def chain(root: Path) -> Pipeline:
    landed = Pipeline.land("orders", folder=root / "shop", lake=root / "lake")
    silver = landed.refine(SCHEMA, key="id").expect("positive", "amount > 0", "quarantine")
    silver = silver.expect("small", "amount < 100", "drop").expect("known", "country IS NOT NULL", "warn")
    return silver.aggregate(time="at", window="1 hour", by=["country"])


def publish(root: Path) -> None:
    orders = [{"id": number, "amount": 10.0, "country": "SE", "at": "2026-11-16T12:30:00Z"} for number in range(8)]
    orders += [
        {**orders[0], "amount": 20.0},
        {**orders[1], "id": 90, "amount": -1},
        {**orders[1], "id": 91, "amount": 500},
    ]
    with holdfast.open_broker(root / "shop", body_type=str) as broker:
        broker.create_topic("orders", partitions=2)
        for order in orders:
            broker.publish("orders", json.dumps(order))
        for body in ("no json", "", '{"amount": 3}'):
            broker.publish("orders", body)


def rows(root: Path, table: str) -> list[dict[str, Any]]:
    found = pyarrow.dataset.dataset(root / "sdp" / "warehouse" / table, format="parquet", partitioning="hive")
    return found.to_table().to_pylist()  # type: ignore[no-any-return]


def test_columns_of_a_schema_are_found_also_where_types_hold_commas():
    assert columns_of(SCHEMA) == [("id", True), ("amount", False), ("country", False), ("at", False)]
    assert columns_of("a: decimal(10,2), `b c` array<struct<x:int,y:int>> NOT NULL") == [("a", False), ("b c", True)]


def test_tables_have_names_that_a_catalog_takes():
    assert table_names(["orders-land", "7days"]) == {"orders-land": "orders_land", "7days": "t_7days"}
    with pytest.raises(InvalidRequest, match="two pipelines would have the table a_b"):
        table_names(["a-b", "a.b"])


def test_what_cannot_be_exported_is_said(tmp_path: Path):
    pipeline = chain(tmp_path).then("reconcile")
    exported = export(real_world(), pipeline.project, str(tmp_path / "sdp"))
    assert exported.notes == (
        "orders-gold-reconcile is left out: the kind reconcile has no counterpart",
        "orders-silver: the expectation 'known' (warn) is left out",
    )
    for path in exported.files:
        if path.endswith(".py"):
            text = Path(path).read_text("utf-8")
            compile(text, path, "exec")
            assert "withColumn" not in text


def test_an_export_leaves_a_folder_of_somebody_else_alone(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InvalidRequest, match="holds something else"):
        export(real_world(), chain(tmp_path).project, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    for _ in range(2):  # its own it makes anew
        export(real_world(), chain(tmp_path).project, str(tmp_path / "sdp"))


def test_a_schema_that_is_inferred_cannot_be_exported(tmp_path: Path):
    pipeline = Pipeline.land("orders", folder=tmp_path / "shop", lake=tmp_path / "lake").refine()
    with pytest.raises(InvalidRequest, match="orders-silver infers its schema"):
        export(real_world(), pipeline.project, str(tmp_path / "sdp"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_exported_project_runs_and_each_table_is_behind_the_one_that_it_reads(tmp_path: Path):
    publish(tmp_path)
    export(real_world(), chain(tmp_path).project, str(tmp_path / "sdp"))
    conf = {
        "spark.sql.catalogImplementation": "hive",
        "spark.sql.warehouse.dir": str(tmp_path / "sdp" / "warehouse"),
        "spark.sql.shuffle.partitions": "2",
        "spark.ui.enabled": "false",
    }
    command = [str(Path(sys.executable).with_name("spark-pipelines")), "run", "--spec", "sdp/spark-pipeline.yml"]
    command += [part for name, value in conf.items() for part in ("--conf", f"{name}={value}")]
    java = str(java_home(os.environ))
    environment = {**os.environ, "JAVA_HOME": java, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    environment["JAVA_TOOL_OPTIONS"] = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"  # a short run: compile little
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(rows(tmp_path, "orders_land")) == 14
    silver = sorted((row["id"], row["amount"]) for row in rows(tmp_path, "orders_silver"))
    assert silver == [(number, 10.0) for number in range(8)]
    reasons = sorted(row["_reasons"][0] for row in rows(tmp_path, "orders_silver_quarantine"))
    assert reasons == ["id is null", "not JSON of the schema", "not JSON of the schema", "positive"]
    (gold,) = rows(tmp_path, "orders_gold")
    assert (gold["country"], gold["count"], gold["window_end"].hour - gold["window_start"].hour) == ("SE", 8, 1)
