"""Spark on folders whose segments are in a store: a tier, or the store that the folder lives in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.broker.engine import BrokerEngine
from holdfast.env import real_world
from holdfast.settings import BrokerSettings, TopicSettings
from holdfast.spark import register_tables


def filled(place: str, settings: BrokerSettings, count: int = 200) -> tuple[BrokerEngine, list[bytes]]:
    engine = BrokerEngine.open(place, settings=settings)
    engine.create_topic("jobs")
    put = [b"%06d" % i + bytes(1_000) for i in range(count)]
    log = engine.open_topic("jobs").partitions[0].log
    for start in range(0, count, 10):
        log.append(put[start : start + 10], durability="fsync")
    if engine.store is not None:
        engine.store.commit()  # how far readers may read follows the messages, here at once
    return engine, put


def settings(**more: object) -> BrokerSettings:
    topic = TopicSettings(segment_bytes=64 * 1024, min_free_bytes=0, tier_after_bytes=0)
    return BrokerSettings(topic=topic, **more)


def test_a_batch_reads_segments_that_have_moved_to_a_tier(spark, tmp_path: Path):
    engine, put = filled(str(tmp_path / "jobs"), settings(tier=f"file://{tmp_path}/cold/jobs"))
    engine.tiering.tick()
    assert len(list(Path(engine.open_topic("jobs").partitions[0].log.folder).glob("*.log"))) == 1
    rows = (
        spark.read.format("holdfast").option("topic", "jobs").load(str(tmp_path / "jobs")).orderBy("offset").collect()
    )
    assert [bytes(row.value) for row in rows] == put
    engine.close()


@pytest.mark.parametrize("as_url", [True, False], ids=["url", "path"])
def test_a_batch_reads_a_folder_in_a_store_while_its_owner_works(spark, tmp_path: Path, monkeypatch, as_url: bool):
    monkeypatch.setenv("HOLDFAST_BROKER_STORE_CACHE_DIR", str(tmp_path / "reader"))
    store = f"file://{tmp_path}/store/jobs"
    engine, put = filled(store, settings(store_cache_dir=str(tmp_path / "owner")))
    path = store if as_url else store.removeprefix("file://")
    rows = (
        spark.read.format("holdfast")
        .option("topic", "jobs")
        .option("minPartitions", 4)
        .load(path)
        .orderBy("offset")
        .collect()
    )
    assert [bytes(row.value) for row in rows] == put
    engine.close()


@pytest.fixture
def store(tmp_path: Path, monkeypatch):
    """A folder in a store, and its owner."""
    monkeypatch.setenv("HOLDFAST_BROKER_STORE_CACHE_DIR", str(tmp_path / "reader"))
    url = f"file://{tmp_path}/store/jobs"
    engine, put = filled(url, settings(store_cache_dir=str(tmp_path / "owner")))
    yield Store(url, engine, put)
    engine.close()


class Store(msgspec.Struct):
    url: str
    engine: BrokerEngine
    put: list[bytes]

    @property
    def log(self) -> Any:
        return self.engine.open_topic("jobs").partitions[0].log

    def send(self, *values: bytes) -> None:
        self.log.append(list(values), durability="fsync")
        self.engine.store.commit()
        self.put.extend(values)


def stream(spark: Any, store: Store, home: Path, **options: Any) -> Any:
    """A query that writes what it reads into a folder; it goes on from its checkpoint."""
    rows = spark.readStream.format("holdfast").options(topic="jobs", startingOffsets="earliest", **options)
    writer = rows.load(store.url).select("offset", "value").writeStream.format("parquet")
    return writer.option("checkpointLocation", f"{home}/check").option("path", f"{home}/out")


def values(spark: Any, home: Path) -> list[bytes]:
    return [bytes(row.value) for row in spark.read.parquet(f"{home}/out").orderBy("offset").collect()]


def test_a_stream_reads_a_store_batch_by_batch_and_goes_on_from_its_checkpoint(spark, tmp_path: Path, store):
    query = stream(spark, store, tmp_path, maxOffsetsPerTrigger=90).trigger(availableNow=True).start()
    query.awaitTermination()
    assert query.lastProgress.batchId >= 2
    assert values(spark, tmp_path) == store.put
    store.send(b"later", b"and later")
    stream(spark, store, tmp_path).trigger(availableNow=True).start().awaitTermination()
    assert values(spark, tmp_path) == store.put


def test_a_stream_on_a_store_sees_new_messages_and_holds_what_it_has_not_read(spark, tmp_path: Path, store):
    query = stream(spark, store, tmp_path, groupId="readers").start()
    try:
        query.processAllAvailable()
        store.send(b"new")
        deadline = real_world().clock.monotonic_ns() + 60 * 10**9
        while values(spark, tmp_path) != store.put:
            assert real_world().clock.monotonic_ns() < deadline
            query.processAllAvailable()
        topic = store.engine.open_topic("jobs")
        # It has finished one batch, and holds what comes from its start on until the next begins.
        assert [found.group for found, _ in store.engine.queries.on(topic)] == ["readers"]
        held = store.engine.queries.floor("jobs", topic.id, 0)
        assert held is not None
        store.log.trim(store.log.end)
        assert store.log.start <= held
    finally:
        query.stop()


def test_tables_and_views_are_read_from_a_store(spark, tmp_path: Path, store):
    rows = spark.read.format("holdfast").option("table", "topics").load(store.url).collect()
    assert [(row.name, row.end) for row in rows] == [("jobs", len(store.put))]
    for name in register_tables(spark, store.url, prefix="stored_"):
        assert spark.sql(f"SELECT count(*) FROM {name}").collect()[0][0] >= 0
    assert spark.sql("SELECT count(*) FROM stored_messages").collect()[0][0] == len(store.put)


def test_what_a_store_cannot_do_is_said(spark, store):
    rows = spark.createDataFrame([(b"x",)], "value binary").write.format("holdfast").mode("append")
    with pytest.raises(Exception, match="holdfast serve"):  # its owner has another cache, as on another machine
        rows.options(topic="jobs", ownerTimeout="100ms").save(store.url)
    with pytest.raises(Exception, match="password"):
        spark.read.format("holdfast").option("topic", "jobs").load("postgresql://user:sesame@host/db/jobs")
