"""Reading messages as a stream: batches, restarts from a checkpoint, what the progress tells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

import holdfast
from holdfast.broker.streams.queries import list_queries
from holdfast.env import real_world
from holdfast.spark import lag


class Shop:
    """A folder, a query on it, and where its rows go."""

    def __init__(self, spark: SparkSession, root: Path, partitions: int = 2) -> None:
        self.spark = spark
        self.folder = str(root / "shop")
        self.out = str(root / "out")
        self.checkpoint = str(root / "checkpoint")
        with holdfast.open_broker(self.folder) as broker:
            broker.create_topic("orders", partitions=partitions)

    def publish(self, count: int, partition: int | None = None) -> None:
        with holdfast.open_broker(self.folder, durability="os") as broker:
            for number in range(count):
                broker.publish("orders", b"%d" % number, partition=number % 2 if partition is None else partition)

    def start(self, **options: Any) -> StreamingQuery:
        given = {"path": self.folder, "topic": "orders", "startingOffsets": "earliest", **options}
        rows = self.spark.readStream.format("holdfast").schema("partition int, offset long").options(**given).load()
        return (
            rows.writeStream.format("parquet")
            .option("path", self.out)
            .option("checkpointLocation", self.checkpoint)
            .trigger(availableNow=True)
            .start()
        )

    def run(self, **options: Any) -> list[Any]:
        query = self.start(**options)
        query.awaitTermination()
        return [progress for progress in query.recentProgress if progress.numInputRows]

    def rows(self) -> list[tuple[int, int]]:
        return sorted((row.partition, row.offset) for row in self.spark.read.parquet(self.out).collect())


@pytest.fixture
def shop(spark: SparkSession, tmp_path: Path) -> Shop:
    return Shop(spark, tmp_path)


@pytest.fixture(scope="module")
def used(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Shop:
    """One with a checkpoint, and another topic beside the one that was read."""
    shop = Shop(spark, tmp_path_factory.mktemp("used"))
    shop.publish(2)
    shop.run()
    with holdfast.open_broker(shop.folder) as broker:
        broker.create_topic("other")
    return shop


def test_a_stream_reads_each_offset_once_over_restarts_and_new_partitions(shop: Shop) -> None:
    shop.publish(10)
    batches = shop.run(maxOffsetsPerTrigger=4)
    assert [batch.numInputRows for batch in batches] == [4, 4, 2]
    with holdfast.open_broker(shop.folder) as broker:
        broker.alter_topic("orders", partitions=3)
    shop.publish(3, partition=2)
    shop.publish(2)
    shop.run(maxOffsetsPerTrigger=4)
    assert shop.run() == []
    assert shop.rows() == [(0, n) for n in range(6)] + [(1, n) for n in range(6)] + [(2, n) for n in range(3)]


def test_the_progress_tells_how_far_behind_the_query_is(shop: Shop) -> None:
    shop.publish(10)
    [first, *_] = shop.run(maxOffsetsPerTrigger=4)
    [source] = first.sources
    end, latest = (
        json.loads(text)["topics"]["orders"]["partitions"] for text in (source.endOffset, source.latestOffset)
    )
    assert {number: place["offset"] for number, place in end.items()} == {"0": 2, "1": 2}
    assert {number: place["offset"] for number, place in latest.items()} == {"0": 5, "1": 5}
    assert lag(first) == {
        "minOffsetsBehindLatest": 3,
        "maxOffsetsBehindLatest": 3,
        "avgOffsetsBehindLatest": 3.0,
        "offsetsBehindLatest": 6,
    }


def test_a_query_is_a_group_that_pins_what_it_has_not_read(shop: Shop) -> None:
    shop.publish(10)
    shop.run(groupId="lake", maxOffsetsPerTrigger=8)
    [query] = list_queries(real_world(), shop.folder)
    assert query.group == "lake"
    assert query.topics["orders"].partitions == {0: 5, 1: 5}
    with holdfast.open_broker(shop.folder) as broker:
        assert {group.name: group.mode for group in broker.groups()}["lake"] == "query"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"topic": "other"}, "the checkpoint is of topic orders, and this query reads other"),
        ({"path": "/nowhere"}, "there is no folder /nowhere"),
        ({"endingOffsets": "latest"}, 'option "endingOffsets" is for a batch read'),
        ({"maxOffsetsPerTrigger": "0"}, 'option "maxOffsetsPerTrigger"'),
        ({"groupId": "a/b"}, "groupId"),
    ],
)
def test_a_mistake_is_answered_in_one_sentence(used: Shop, options: dict[str, str], sentence: str) -> None:
    with pytest.raises(StreamingQueryException) as refused:
        used.start(**options).awaitTermination()
    text = str(refused.value)
    assert sentence in text
    assert "Traceback" not in text
