"""Spark on folders whose segments are in a store: a tier, or the store that the folder lives in."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.broker.engine import BrokerEngine
from holdfast.settings import BrokerSettings, TopicSettings


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


def test_what_a_store_cannot_do_is_said(spark, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_BROKER_STORE_CACHE_DIR", str(tmp_path / "reader"))
    store = f"file://{tmp_path}/store/jobs"
    engine, _ = filled(store, settings(store_cache_dir=str(tmp_path / "owner")), count=10)
    stream = spark.readStream.format("holdfast").option("topic", "jobs").load(store).writeStream.format("noop")
    query = stream.option("checkpointLocation", str(tmp_path / "check")).start()
    with pytest.raises(Exception, match="holdfast serve"):
        query.processAllAvailable()
    with pytest.raises(Exception, match="holdfast serve"):
        spark.createDataFrame([(b"x",)], "value binary").write.format("holdfast").mode("append").option(
            "topic", "jobs"
        ).save(store)
    with pytest.raises(Exception, match="password"):
        spark.read.format("holdfast").option("topic", "jobs").load("postgresql://user:sesame@host/db/jobs")
    engine.close()
