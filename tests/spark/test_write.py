"""The sink on Spark: batches and streams become messages, each once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

import holdfast
from holdfast.broker.messages import partition_for
from tests.spark.scripts import run_script


@pytest.fixture
def shop(tmp_path: Path) -> str:
    """A data folder with two topics."""
    folder = str(tmp_path / "shop")
    with holdfast.open_broker(folder) as broker:
        broker.create_topic("orders", partitions=2)
        broker.create_topic("copies", partitions=3)
    return folder


def messages(folder: str, topic: str) -> list[Any]:
    with holdfast.open_broker(folder) as broker:
        count = len(broker.describe_topic(topic).partitions)
        return [each for number in range(count) for each in broker.read(topic, partition=number, limit=100_000)]


def values(folder: str, topic: str) -> list[int]:
    return sorted(int(message.body) for message in messages(folder, topic))


def save(rows: DataFrame, folder: str, mode: str = "append", **options: str) -> None:
    given = {"path": folder, "topic": "orders", **options}
    rows.write.format("holdfast").options(**given).mode(mode).save()


def numbers(spark: SparkSession, count: int, tasks: int = 3) -> DataFrame:
    return spark.range(0, count, 1, tasks).selectExpr("CAST(id AS STRING) AS value", "CAST(id % 7 AS STRING) AS key")


def test_a_data_frame_becomes_messages(spark: SparkSession, shop: str):
    rows = spark.sql(
        "SELECT 'a' AS value, 'k' AS key, map('n', '1') AS headers, 7 AS priority, INTERVAL '60' MINUTE AS ttl, "
        "'order-1' AS correlation_id, CAST(NULL AS TIMESTAMP) AS due_at, 1 AS partition"
    )
    save(rows, shop)
    (message,) = messages(shop, "orders")
    assert (message.body, message.key, message.headers, message.priority) == (b"a", "k", {"n": "1"}, 7)
    assert (message.correlation_id, message.id) == ("order-1", "orders-1-0")
    assert (message.expires_at - message.timestamp).total_seconds() == pytest.approx(3600, abs=60)


def test_what_spark_writes_it_reads_and_each_key_is_where_the_library_puts_it(spark: SparkSession, shop: str):
    save(numbers(spark, 5_000), shop)
    again = spark.read.format("holdfast").option("path", shop).option("topic", "orders").load()
    assert again.selectExpr("sum(CAST(CAST(value AS STRING) AS INT))", "count(*)").first()[:] == (12_497_500, 5_000)
    for message in messages(shop, "orders"):
        assert int(message.id.split("-")[1]) == partition_for(message.key.encode(), 2)


def test_a_write_with_an_id_is_written_once(spark: SparkSession, shop: str):
    for _ in range(2):
        save(numbers(spark, 10), shop, writeId="nightly", batchId="1")
    save(numbers(spark, 10), shop, writeId="nightly", batchId="2")
    assert values(shop, "orders") == sorted([*range(10)] * 2)


@pytest.mark.parametrize(
    ("select", "options", "why"),
    [
        ("value", {"mode": "overwrite"}, "messages can only be added"),
        ("value, key AS customer", {}, "column 'customer' cannot be written"),
        ("CAST(value AS INT) AS value", {}, "column 'value' is int; it must be binary or string"),
        ("value", {"topic": "nothing"}, "there is no topic nothing"),
        ("value", {"folder": "/nowhere/at/all"}, "/nowhere/at/all holds no topics"),
        ("value", {"partitons": "3"}, 'option "partitons" is not known; did you mean "partitions"?'),
        ("CAST(NULL AS STRING) AS value", {}, "have no value"),
    ],
)
def test_what_cannot_be_written_is_refused_in_a_sentence(spark: SparkSession, shop: str, select, options, why):
    rows = numbers(spark, 2, 1).selectExpr(*select.split(", "))
    with pytest.raises(PySparkException) as refused:
        save(rows, **{"folder": shop, **options})
    assert why in str(refused.value)
    assert "Traceback" not in str(refused.value).partition(why)[0]
    assert values(shop, "orders") == []


def test_a_folder_that_another_process_owns_is_refused_with_its_number(spark: SparkSession, shop: str):
    with (
        holdfast.open_broker(shop, share=False),
        pytest.raises(PySparkException, match=f"owned by process {os.getpid()} "),
    ):
        save(numbers(spark, 2), shop, ownerTimeout="100ms")


def run_stream(spark: SparkSession, shop: str, checkpoint: Path) -> None:
    rows = (
        spark.readStream.format("holdfast")
        .options(path=shop, topic="orders", startingOffsets="earliest", maxOffsetsPerTrigger="40")
        .load()
        .select("key", "value")
    )
    query = (
        rows.writeStream.format("holdfast")
        .options(path=shop, topic="copies", checkpointLocation=str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def test_a_stream_that_stops_between_the_two_commits_doubles_nothing(spark: SparkSession, shop: str, tmp_path: Path):
    checkpoint = tmp_path / "checkpoint"
    save(numbers(spark, 100), shop)
    run_stream(spark, shop, checkpoint)
    assert values(shop, "copies") == [*range(100)]
    last = max((checkpoint / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    for left in (checkpoint / "commits").glob(f"*{last.name}*"):
        left.unlink()  # as if the driver had died behind our commit and before Spark's own
    run_stream(spark, shop, checkpoint)
    assert values(shop, "copies") == [*range(100)]
    save(numbers(spark, 10), shop)
    run_stream(spark, shop, checkpoint)
    assert values(shop, "copies") == sorted([*range(100), *range(10)])


RETRIES = """
import sys
import holdfast.spark
from pyspark import TaskContext

def fail_once(batches):
    for batch in batches:
        yield batch
    context = TaskContext.get()
    if context.attemptNumber() == 0 and context.partitionId() % 2:
        raise RuntimeError("as asked")

java = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
spark = holdfast.spark.session("retries", "local[2,4]", **java)
rows = spark.range(0, 1000, 1, 4).selectExpr("CAST(id AS STRING) AS value").mapInArrow(fail_once, "value string")
rows.write.format("holdfast").options(path=sys.argv[1], topic="orders").mode("append").save()
spark.stop()
"""


@pytest.mark.slow
def test_tasks_that_fail_and_run_again_double_nothing(shop: str, tmp_path: Path):
    script = tmp_path / "retries.py"
    script.write_text(RETRIES.replace("sys.argv[1]", repr(shop)), "utf-8")
    done = run_script(script, 280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert values(shop, "orders") == [*range(1000)]
    assert not list(Path(shop, "staging").iterdir())
