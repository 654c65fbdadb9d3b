"""Spark without a shared disk: it asks a server for frames, and gives it files of frames."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession

import holdfast
from holdfast.client import spark_commits
from holdfast.client.spark_commits import routes
from holdfast.server.tokens import ACTIONS, digest_of
from tests.integration.http_gear import serving


class Shop(NamedTuple):
    """A server, and the folder that only it uses."""

    url: str
    folder: Path


def fill(url: str) -> None:
    with holdfast.connect(url) as broker:
        broker.create_topic("orders", partitions=3, codec="zstd")
        broker.create_topic("copies", partitions=2)
        broker.publish_many("orders", [b"order %d" % number for number in range(3000)])
        broker.publish("orders", b"urgent", partition=0, priority=5, headers={"kind": "gift"}, key="a")


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    folder = tmp_path_factory.mktemp("served") / "shop"
    with serving(folder, more=lambda: [routes]) as server:
        fill(server.url)
        yield Shop(server.url, folder)


def read(spark: SparkSession, url: str, schema: str | None = None, **options: Any) -> DataFrame:
    reader = spark.read.format("holdfast").options(**{"path": url, "topic": "orders", **options})
    return (reader.schema(schema) if schema else reader).load()


def test_every_message_of_a_server_is_a_row(spark: SparkSession, shop: Shop) -> None:
    rows = read(spark, shop.url, "value string, partition int, offset long, timestampType int").collect()
    assert {row.value for row in rows} == {f"order {number}" for number in range(3000)} | {"urgent"}
    assert len({(row.partition, row.offset) for row in rows}) == len(rows) == 3001
    assert {row.timestampType for row in rows} == {1}
    whole = read(spark, shop.url, path="", server=shop.url, includeHeaders="true", includeMetadata="true")
    [urgent] = whole.where("priority = 5").collect()
    assert [(header.key, bytes(header.value)) for header in urgent.headers] == [("kind", b"gift")]
    some = read(
        spark, shop.url, "offset long", minPartitions="9", startingOffsets='{"orders": {"0": 5, "1": -1, "2": -1}}',
        endingOffsets='{"orders": {"0": 25, "1": -1, "2": -1}}',
    )  # fmt: skip
    assert some.rdd.getNumPartitions() == 9
    assert sorted(row.offset for row in some.collect()) == [*range(5, 25)]


def test_a_stream_from_a_server_to_it_writes_each_row_once(spark: SparkSession, shop: Shop, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"

    def run() -> None:
        rows = spark.readStream.format("holdfast").options(
            path=shop.url, topic="orders", startingOffsets="earliest", maxOffsetsPerTrigger="1000", groupId="copier"
        )
        query = (
            rows.load()
            .select("key", "value")
            .writeStream.format("holdfast")
            .options(path=shop.url, topic="copies", checkpointLocation=str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    run()
    assert read(spark, shop.url, "value string", topic="copies").count() == 3001
    last = max((checkpoint / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    for left in (checkpoint / "commits").glob(f"*{last.name}*"):
        left.unlink()  # as if the driver had died behind our commit and before Spark's own
    run()
    values = [row.value for row in read(spark, shop.url, "value string", topic="copies").collect()]
    assert len(values) == len(set(values)) == 3001
    assert list((shop.folder / "queries").glob("copier@*.json"))
    groups = {row.group: row.lag for row in table(spark, shop.url, "groups").where("mode = 'query'").collect()}
    assert groups.keys() == {"copier"}
    assert not list((shop.folder / "staging").rglob("*.frames"))


def table(spark: SparkSession, url: str, name: str) -> DataFrame:
    return spark.read.format("holdfast").options(path=url, table=name).load()


def test_tables_come_from_the_server_page_by_page(
    spark: SparkSession, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark_commits, "_PAGE_ROWS", 300)  # of the server, which is in this process
    with holdfast.connect(shop.url) as broker:
        broker.create_topic("mails")
        broker.publish_many("mails", [b"mail %d" % number for number in range(1_000)])
        group = broker.group("mails", "senders")
        rejected = 0
        while rejected < 1_000:
            for message in group.receive_many(1_000, timeout=5):
                message.reject("no such address")
                rejected += 1
    letters = table(spark, shop.url, "dead_letters").where("topic = 'mails'").collect()
    assert {bytes(row.value) for row in letters} == {b"mail %d" % number for number in range(1_000)}
    assert len(letters) == 1_000
    assert {row.name for row in table(spark, shop.url, "topics").collect()} == {"orders", "copies", "mails"}


def save(spark: SparkSession, url: str, count: int, **options: str) -> None:
    rows = spark.range(0, count, 1, 2).selectExpr("CAST(id AS STRING) AS value", "CAST(id % 7 AS STRING) AS key")
    given = {"path": url, "topic": "numbers", **options}
    rows.write.format("holdfast").options(**given).mode("append").save()


def test_a_data_frame_is_written_to_a_server_and_topics_are_made_there(spark: SparkSession, shop: Shop) -> None:
    for _ in range(2):
        save(spark, shop.url, 100, createTopics="true", partitions="2", writeId="nightly", batchId="1")
    found = read(spark, shop.url, "value string, partition int", topic="numbers").collect()
    assert sorted(int(row.value) for row in found) == [*range(100)]
    assert {row.partition for row in found} == {0, 1}
    with pytest.raises(PySparkException, match=r"there is no topic nothing on http://.*createTopics"):
        save(spark, shop.url, 1, topic="nothing")


ROLES = {"reader": ["read"], "worker": ["read", "consume"], "writer": ["read", "publish"], "boss": list(ACTIONS)}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that asks for tokens; all but one may see one topic only."""
    folder = tmp_path_factory.mktemp("guarded")
    tokens = folder / "tokens.toml"
    entries = []
    for name, actions in ROLES.items():
        topics = ["*"] if name == "boss" else ["orders"]
        digest = digest_of(f"{name}-secret")
        entries.append(
            f'[[tokens]]\nname = "{name}"\nrole = {actions}\nsha256 = "{digest}"\ntopics = {topics}\ngroups = ["*"]\n'
        )
        (folder / name).write_text(f"{name}-secret\n")
    tokens.write_text("\n".join(entries))
    tokens.chmod(0o600)
    with serving(folder / "shop", more=lambda: [routes], tokens_file=str(tokens)) as server:
        with holdfast.connect(server.url, token="boss-secret") as broker:
            for topic in ("orders", "secrets"):
                broker.create_topic(topic)
                broker.publish(topic, b"1")
        yield server.url


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    for name in ROLES:
        (folder / name).write_text(f"{name}-secret\n")
    return folder


def test_tokens_are_read_by_the_driver_and_never_shown(
    spark: SparkSession, guarded: str, tokens: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AnalysisException, match="Bearer"):
        read(spark, guarded).count()
    with pytest.raises(AnalysisException, match='option "token" would show up in plans and logs'):
        read(spark, guarded, token="reader-secret").count()
    frame = read(spark, guarded, tokenFile=str(tokens / "reader"))
    assert [bytes(row.value) for row in frame.collect()] == [b"1"]
    frame.explain(extended=True)
    assert "secret" not in capsys.readouterr().out.replace(str(tokens), "")


def test_a_token_reads_and_writes_no_more_than_it_may(
    spark: SparkSession, guarded: str, tokens: Path, tmp_path: Path
) -> None:
    reader = {"tokenFile": str(tokens / "reader")}
    with pytest.raises(AnalysisException, match="secrets"):
        read(spark, guarded, topic="secrets", **reader).count()
    assert read(spark, guarded, topic="", subscribePattern=".*", **reader).count() == 1
    seen = spark.read.format("holdfast").options(path=guarded, table="topics", **reader).load()
    assert [row.name for row in seen.collect()] == ["orders"]
    for name, topic in (("reader", "orders"), ("writer", "secrets"), ("writer", "new")):
        with pytest.raises(PySparkException, match="does not have the right"):
            save(spark, guarded, 3, topic=topic, tokenFile=str(tokens / name), createTopics="true")
    save(spark, guarded, 3, topic="orders", tokenFile=str(tokens / "writer"))
    assert read(spark, guarded, **reader).count() == 4
    stream = spark.readStream.format("holdfast").options(path=guarded, topic="orders", startingOffsets="earliest")
    for name, count in (("reader", None), ("worker", 4)):
        query = (
            stream.options(tokenFile=str(tokens / name))
            .load()
            .writeStream.format("memory")
            .queryName(f"held_by_{name}")
            .option("checkpointLocation", str(tmp_path / name))
            .trigger(availableNow=True)
            .start()
        )
        if count is None:
            with pytest.raises(PySparkException, match="does not have the right"):
                query.awaitTermination()
        else:
            query.awaitTermination()
            assert spark.table(f"held_by_{name}").count() == count
