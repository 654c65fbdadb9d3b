"""Reading messages as a table: what Spark sees, and what its users are told when they err."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException, PythonException
from pyspark.sql import DataFrame, SparkSession

import holdfast
import holdfast.spark
from holdfast.errors import InvalidRequest


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A folder whose owner lives: everything here is read beside it."""
    folder = str(tmp_path_factory.mktemp("read") / "shop")
    with holdfast.open_broker(folder, durability="os") as broker:
        broker.create_topic("orders", partitions=3, codec="zstd")
        broker.create_topic("organs")
        with broker.producer() as producer:
            for number in range(3000):
                producer.send("orders", b"order %d" % number, key=f"customer-{number % 7}")
        broker.publish("orders", b"urgent", partition=0, priority=5, headers={"kind": "gift"}, ttl=3600)
        broker.publish("organs", b"heart")
        yield folder


def read(spark: SparkSession, folder: str, schema: str | None = None, **options: Any) -> DataFrame:
    reader = spark.read.format("holdfast").option("path", folder).options(**{"topic": "orders", **options})
    return (reader.schema(schema) if schema else reader).load()


def test_every_message_is_a_row(spark: SparkSession, shop: str) -> None:
    rows = read(spark, shop, "key string, value string, topic string, partition int, offset long").collect()
    assert len(rows) == 3001
    assert {row.value for row in rows} == {f"order {number}" for number in range(3000)} | {"urgent"}
    assert len({(row.partition, row.offset) for row in rows}) == 3001
    by_key = {row.key: row.partition for row in rows if row.key is not None}
    assert len(by_key) == 7
    assert all(row.partition == by_key[row.key] for row in rows if row.key is not None)


def test_columns_are_those_of_kafkas_source_and_on_request_our_own(spark: SparkSession, shop: str) -> None:
    kafkas = ["key", "value", "topic", "partition", "offset", "timestamp"]
    assert read(spark, shop).columns == kafkas
    assert read(spark, shop, includeHeaders="true").columns == [*kafkas, "headers"]
    frame = read(spark, shop, includeHeaders="true", includeMetadata="true")
    assert frame.columns == [
        *kafkas, "priority", "expires_at", "due_at", "tombstone",
        "producer_id", "producer_epoch", "sequence", "epoch", "headers",
    ]  # fmt: skip
    [urgent] = frame.where("priority = 5").collect()
    assert bytes(urgent.value) == b"urgent"
    assert [(header.key, bytes(header.value)) for header in urgent.headers] == [("kind", b"gift")]
    assert (urgent.expires_at - urgent.timestamp).total_seconds() == pytest.approx(3600, abs=1)
    assert urgent.producer_id is None
    assert frame.where("producer_id is not null").count() == 3000


def test_offsets_times_and_patterns_choose_what_is_read(spark: SparkSession, shop: str) -> None:
    def count(**options: Any) -> int:
        return read(spark, shop, "offset long", **options).count()

    first = '{"orders": {"0": 5, "1": -1, "2": -1}}'
    assert count(startingOffsets=first, endingOffsets='{"orders": {"0": 25, "1": -1, "2": -1}}') == 20
    assert count(startingTimestamp="-1h") == 3001
    assert count(endingTimestamp="-1h") == 0
    assert count(startingOffsets="latest") == 0
    assert read(spark, shop, "topic string", topic="", subscribePattern="or.*").distinct().count() == 2
    assert read(spark, shop, "topic string", topic="", subscribe="organs,orders").count() == 3002
    assert read(spark, shop, "partition int", topic="", assign='{"orders": [1]}').distinct().count() == 1


def test_more_tasks_where_asked(spark: SparkSession, shop: str) -> None:
    assert read(spark, shop).rdd.getNumPartitions() == 3
    assert read(spark, shop, minPartitions="9").rdd.getNumPartitions() == 9


def test_the_source_works_in_sql(spark: SparkSession, shop: str) -> None:
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW hearts USING holdfast OPTIONS (path '{shop}', topic 'organs')")
    assert spark.sql("SELECT cast(value AS string) AS text FROM hearts").collect()[0].text == "heart"


def test_a_table_in_sql_keeps_its_options_and_reads_what_is_there_now(spark: SparkSession, tmp_path: Path) -> None:
    with holdfast.open_broker(tmp_path / "shop", durability="os") as broker:
        broker.create_topic("orders")
        broker.publish("orders", b"one")
    try:
        spark.sql(
            f"CREATE TABLE sql_orders USING holdfast "
            f"OPTIONS (path '{tmp_path}/shop', topic 'orders', includeHeaders 'true')"
        )
        assert spark.table("sql_orders").columns[-1] == "headers"
        assert spark.sql("SELECT string(value) AS text FROM sql_orders").collect()[0].text == "one"
        with holdfast.open_broker(tmp_path / "shop", durability="os") as broker:
            broker.publish("orders", b"two")
        assert spark.table("sql_orders").count() == 2
        spark.sql(f"CREATE TABLE sql_topics USING holdfast OPTIONS (path '{tmp_path}/shop', table 'topics')")
        assert spark.table("sql_topics").select("name", "end").collect() == [("orders", 2)]
        with pytest.raises(AnalysisException, match='did you mean "topic"'):
            spark.sql(f"CREATE TABLE wrong USING holdfast OPTIONS (path '{tmp_path}/shop', topicc 'orders')")
    finally:
        for name in ("sql_orders", "sql_topics"):
            spark.sql(f"DROP TABLE IF EXISTS {name}")
    assert read(spark, f"{tmp_path}/shop").count() == 2  # only the table is dropped, not what it read


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"path": "/nowhere"}, "there is no folder /nowhere"),
        ({"topic": "nix"}, "there is no topic nix in"),
        ({"topicc": "x"}, 'option "topicc" is not known; did you mean "topic"?'),
        ({"startingOffsets": '{"orders": {"0": 99999, "1": -1, "2": -1}}'}, "99999 for orders/0, which ends at"),
        ({"schema": "offset int"}, "column 'offset' cannot be int: read it as bigint"),
        ({"schema": "weight long"}, "messages have no column 'weight'"),
        ({"table": "messagess"}, "messagess"),
    ],
)
def test_a_mistake_is_answered_in_one_sentence(
    spark: SparkSession, shop: str, options: dict[str, str], sentence: str
) -> None:
    options = dict(options)
    schema = options.pop("schema", None)
    with pytest.raises(AnalysisException) as refused:
        read(spark, shop, schema, **options).collect()
    text = str(refused.value)
    assert sentence in text
    assert "Traceback" not in text
    assert len(text.splitlines()) <= 2


WRITE = """
import sys, holdfast
with holdfast.open_broker(sys.argv[1], durability="os") as broker:
    for number in range(400):
        broker.publish("orders", bytes(500))
"""


def damaged(tmp_path: Path) -> str:
    folder = tmp_path / "spoiled"
    with holdfast.open_broker(folder) as broker:
        broker.create_topic("orders")
    subprocess.run([sys.executable, "-c", WRITE, str(folder)], check=True)
    [segment] = (folder / "topics/orders/0/log").glob("*.log")
    content = bytearray(segment.read_bytes())
    content[100_000] ^= 0xFF
    segment.write_bytes(content)
    return str(folder)


def test_a_damaged_frame_fails_or_is_passed_over_and_told(spark: SparkSession, tmp_path: Path) -> None:
    folder = damaged(tmp_path)
    with pytest.raises(PythonException, match=r"damaged in .*holdfast check"):
        read(spark, folder, "offset long").collect()
    there = read(spark, folder, "offset long", onCorrupt="skip").count()
    corrupt = spark.read.format("holdfast").options(path=folder, table="corrupt").load().collect()
    lost = sum(row.next_offset - row.first_offset for row in corrupt)
    assert lost > 0
    assert there + lost == 400


def test_large_messages_are_whole_values(spark: SparkSession, tmp_path: Path) -> None:
    values = {size: bytes(range(251)) * (size // 251) for size in (100, 3 << 20, 17 << 20)}
    with holdfast.open_broker(tmp_path, durability="os") as broker:
        broker.create_topic("orders", max_message_bytes=64 << 20)
        for value in values.values():
            broker.publish_stream("orders", [value], key="k")
        broker.publish_stream("orders", [values[3 << 20]], delay=3600)
        rows = read(spark, str(tmp_path), "key string, value binary, offset long").orderBy("offset").collect()
        assert [bytes(row.value) for row in rows] == list(values.values())
        waiting = spark.read.format("holdfast").options(path=str(tmp_path), topic="orders", table="delayed").load()
        [row] = waiting.collect()
        assert bytes(row.value) == values[3 << 20]


def test_the_function_reads_what_load_reads_and_spark_adds_the_topic(spark: SparkSession, shop: str) -> None:
    mine, loaded = holdfast.spark.read("orders", shop, spark=spark), read(spark, shop)
    assert mine.columns == loaded.columns
    assert mine.orderBy("partition", "offset").collect() == loaded.orderBy("partition", "offset").collect()
    plan = mine._jdf.queryExecution().optimizedPlan().toString()  # type: ignore[operator]
    assert "orders AS topic" in plan
    assert "topic" not in plan.rpartition("RelationV2")[2]  # no worker sends it


def test_the_function_reads_only_the_columns_that_are_named(spark: SparkSession, shop: str) -> None:
    some = holdfast.spark.read(
        "orders", shop, columns=["timestampType", "value", "topic"], spark=spark, endingOffsets="latest"
    )
    assert some.where("value = 'urgent'").collect() == [(1, bytearray(b"urgent"), "orders")]
    constant = holdfast.spark.read("orders", shop, columns=["topic"], spark=spark)
    assert constant.groupBy("topic").count().collect() == [("orders", 3001)]
    assert holdfast.spark.read("orders", shop, spark=spark, includeHeaders=True).columns[-1] == "headers"
    with pytest.raises(InvalidRequest, match="no column 'price'"):
        holdfast.spark.read("orders", shop, columns=["price"], spark=spark)


def test_the_function_reads_a_stream(spark: SparkSession, shop: str, tmp_path: Path) -> None:
    rows = holdfast.spark.read_stream(
        "orders", shop, columns=["topic", "offset"], spark=spark, startingOffsets="earliest", groupId="by-function"
    )
    query = (
        rows.writeStream.format("memory")
        .queryName("by_function")
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    assert spark.sql("SELECT topic, count(*) FROM by_function GROUP BY topic").collect() == [("orders", 3001)]
