"""Spark beside a cluster: topics in many shards are read and written as if one server had them, whoever dies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

import holdfast
from holdfast.cluster.placement import shard_of_topic
from holdfast.spark import Pipeline, table
from tests.integration.cluster_gear import Cluster, cluster, until

TOPICS = ("orders", "mails", "visits", "refunds")
EACH = 500


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("cluster")) as made:
        with made.connect() as broker:
            for topic in TOPICS:
                broker.create_topic(topic, partitions=2)
                broker.publish_many(topic, [f"{topic} {number}".encode() for number in range(EACH)])
        yield made


def all_values(topics: tuple[str, ...] = TOPICS) -> set[str]:
    return {f"{topic} {number}" for topic in topics for number in range(EACH)}


def values(spark: SparkSession, url: str, **options: str) -> list[str]:
    reader = spark.read.format("holdfast").schema("value string").options(path=url, **options)
    return [row.value for row in reader.load().collect()]


def test_topics_of_several_shards_are_read_together(spark: SparkSession, three: Cluster) -> None:
    assert len({shard_of_topic(topic, three.shards) for topic in TOPICS}) > 1
    assert set(values(spark, three.url, subscribePattern="[omvr].*s")) == all_values()
    for node in three.nodes:
        assert set(values(spark, node.url, subscribe="orders,mails")) == all_values(("orders", "mails"))
    some = values(
        spark, three.url, assign='{"orders": [0], "mails": [1]}', minPartitions="6",
        startingOffsets='{"orders": {"0": 3}, "mails": {"1": -1}}',
    )  # fmt: skip
    assert len(some) == len(values(spark, three.url, assign='{"orders": [0]}')) - 3
    with pytest.raises(PySparkException, match="invoices"):
        values(spark, three.url, subscribe="orders,invoices")
    with pytest.raises(PySparkException, match='"startingOffsets" names mails'):
        values(spark, three.url, subscribe="orders", startingOffsets='{"orders": {"0": 0, "1": 0}, "mails": {"0": 0}}')


def test_tables_have_the_rows_of_all_shards(spark: SparkSession, three: Cluster) -> None:
    with three.connect() as broker:
        for topic in TOPICS:
            for message in broker.group(topic, "senders").receive_many(2, timeout=20):
                message.reject("no such address")
    reader = spark.read.format("holdfast").options(path=three.url)
    letters = reader.option("table", "dead_letters").load().collect()
    assert Counter(row.topic for row in letters) == dict.fromkeys(TOPICS, 2)
    told = reader.option("table", "topics").load().collect()
    assert {(row.name, row.partition) for row in told} >= {(topic, part) for topic in TOPICS for part in (0, 1)}
    groups = reader.options(table="groups", subscribe="orders,visits").load().where("group = 'senders'").collect()
    assert {row.topic for row in groups} == {"orders", "visits"}


def copying(spark: SparkSession, url: str, checkpoint: Path, names: str, **options: str) -> StreamingQuery:
    """Start copying all topics, each into one of these names with its own behind."""
    rows = spark.readStream.format("holdfast").options(
        path=url, subscribe=",".join(TOPICS), startingOffsets="earliest", groupId="copier", **options
    )
    copies = rows.load().selectExpr("key", "value", f"concat('{names}-', topic) AS topic")
    return (
        copies.writeStream.format("holdfast")
        .options(path=url, createTopics="true", partitions="2", checkpointLocation=str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )


def test_a_batch_of_a_stream_keeps_to_its_limit_over_all_topics(
    spark: SparkSession, three: Cluster, tmp_path: Path
) -> None:
    query = copying(spark, three.url, tmp_path / "checkpoint", "limited", maxOffsetsPerTrigger="400")
    query.awaitTermination()
    read = [progress.numInputRows for progress in query.recentProgress]
    assert sum(read) == EACH * len(TOPICS)
    assert max(read) <= 400
    last = max((tmp_path / "checkpoint/commits").glob("[0-9]*"), key=lambda path: int(path.name))
    for left in (tmp_path / "checkpoint/commits").glob(f"*{last.name}*"):
        left.unlink()  # as if the driver had died behind our commits and before Spark's own
    copying(spark, three.url, tmp_path / "checkpoint", "limited", maxOffsetsPerTrigger="400").awaitTermination()
    copies = Counter(values(spark, three.url, subscribePattern="limited-.*"))
    assert copies == dict.fromkeys(all_values(), 1)


def test_a_stream_outlives_the_node_that_owns_its_topics(spark: SparkSession, three: Cluster, tmp_path: Path) -> None:
    victim = three.busiest()
    others = [node for node in three.nodes if node is not victim]
    query = copying(spark, three.url, tmp_path / "checkpoint", "kept", maxOffsetsPerTrigger="100")
    try:
        until(lambda: len(query.recentProgress) >= 3, "some batches are done")
        victim.kill()
        for _ in range(5):  # where Spark tries no task again, a query may end, and goes on where it was
            try:
                query.awaitTermination()
                break
            except PySparkException:
                query = copying(spark, three.url, tmp_path / "checkpoint", "kept", maxOffsetsPerTrigger="100")
        three.wait_until_whole(*others)
        copies = Counter(values(spark, three.url, subscribePattern="kept-.*"))
        assert copies == dict.fromkeys(all_values(), 1)
    finally:
        query.stop()
        victim.start()
        three.wait_until_whole()


def test_a_batch_with_an_id_is_written_once_to_topics_of_several_shards(spark: SparkSession, three: Cluster) -> None:
    rows = spark.range(200).selectExpr("CAST(id AS STRING) AS value", "concat('ids-', id % 5) AS topic")
    for _ in range(2):
        rows.write.format("holdfast").mode("append").options(
            path=three.url, createTopics="true", partitions="1", writeId="nightly"
        ).save()
    assert sorted(map(int, values(spark, three.url, subscribePattern="ids-.*"))) == list(range(200))


def test_an_older_client_is_told_what_to_do(three: Cluster) -> None:
    answer = three.nodes[0].post("/v1/spark/plan", {"step": "batch", "options": {"subscribe": "orders"}})
    assert answer.body["error"]["code"] == "not_in_cluster"
    assert "upgrade" in answer.body["error"]["message"]
    with holdfast.connect(three.url) as broker:
        assert broker.topics()


def test_a_pipeline_lands_a_topic_of_a_cluster(spark: SparkSession, three: Cluster, tmp_path: Path) -> None:
    with three.connect() as broker:
        broker.create_topic("landed", partitions=2)
        broker.publish_many("landed", [f"landed {number}".encode() for number in range(EACH)])
    lake = tmp_path / "lake"
    [done] = Pipeline.land("landed", folder=three.url, lake=lake, max_rows_per_batch=200).run(spark=spark)
    assert done.rows_out == EACH
    rows = table("landed", three.url, str(lake), spark=spark).selectExpr("CAST(value AS STRING) AS value")
    assert {row.value for row in rows.collect()} == all_values(("landed",))
    with three.connect() as broker:
        broker.publish("landed", b"one more")
    assert table("landed", three.url, str(lake), spark=spark).count() == EACH + 1
