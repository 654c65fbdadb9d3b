"""What works on a folder works through a server and on a folder in a store: streams, the sink, tables and pipelines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import holdfast
from holdfast.client.spark_commits import routes
from holdfast.settings import BrokerSettings
from holdfast.spark import read, register_tables, table
from tests.integration.http_gear import serving
from tests.spark.pipelines_kit import Kit


class Place:
    """A place with topics: its name for Spark, and a broker on it, for as long as that is needed."""

    def __init__(self, path: str, broker: Callable[[], AbstractContextManager[Any]]) -> None:
        self.path, self.broker = path, broker
        with broker() as opened:
            opened.create_topic("orders", partitions=2, trace_sample=1.0, segment_messages=20)
            opened.create_topic("copies")
        self.sent = 0

    def send(self, count: int) -> None:
        with self.broker() as opened:
            for start in range(self.sent, self.sent + count, 10):  # a segment ends between two calls
                numbers = range(start, min(start + 10, self.sent + count))
                opened.publish_many("orders", [json.dumps({"id": number}).encode() for number in numbers])
        self.sent += count

    def bury(self) -> None:
        """Make the first message a dead letter."""
        with self.broker() as opened:
            opened.group("orders", "billing").receive(timeout=20).reject("no such customer")

    def copies(self) -> list[int]:
        with self.broker() as opened:
            return sorted(json.loads(each.body)["id"] for each in opened.read("copies", limit=1_000))


@contextmanager
def on_folder(home: Path) -> Iterator[Place]:
    yield Place(str(home / "shop"), lambda: holdfast.open_broker(home / "shop"))


@contextmanager
def on_server(home: Path) -> Iterator[Place]:
    with serving(home / "shop", more=lambda: [routes]) as server:
        yield Place(server.url, lambda: holdfast.connect(server.url))


@contextmanager
def on_store(home: Path) -> Iterator[Place]:
    """The owner's cache is not the one of Spark, as if they were on two machines."""
    url, settings = f"file://{home}/store/shop", BrokerSettings(store_cache_dir=str(home / "owner"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLDFAST_BROKER_STORE_CACHE_DIR", str(home / "reader"))
        yield Place(url, lambda: holdfast.open_broker(url, settings=settings))


PLACES = {"folder": on_folder, "server": on_server, "store": on_store}


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with PLACES[request.param](tmp_path) as found:
        yield found


def test_a_stream_from_a_place_to_it_writes_each_row_once(spark: Any, place: Place, tmp_path: Path) -> None:
    place.send(60)
    checkpoint = tmp_path / "checkpoint"

    def run() -> None:
        rows = spark.readStream.format("holdfast").options(
            path=place.path, topic="orders", startingOffsets="earliest", maxOffsetsPerTrigger="40"
        )
        writer = rows.load().select("key", "value").writeStream.format("holdfast")
        query = writer.options(path=place.path, topic="copies", checkpointLocation=str(checkpoint))
        query.trigger(availableNow=True).start().awaitTermination()

    run()
    last = max((checkpoint / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    assert int(last.name) >= 1
    for left in (checkpoint / "commits").glob(f"*{last.name}*"):
        left.unlink()  # as if the driver had died behind our commit and before Spark's own
    place.send(5)
    run()
    assert place.copies() == [*range(65)]
    for _ in range(2):
        rows = spark.createDataFrame([(b'{"id": 65}',)], "value binary").write.format("holdfast").mode("append")
        rows.options(path=place.path, topic="copies", writeId="nightly", batchId="1").save()
    assert place.copies() == [*range(66)]


def test_topics_and_tables_are_read_in_every_way(spark: Any, place: Place) -> None:
    place.send(30)
    place.bury()
    assert read("orders", place.path, columns=["value"]).count() == 30
    spark.sql(f"CREATE TABLE declared USING holdfast OPTIONS (path '{place.path}', topic 'orders')")
    try:
        assert spark.table("declared").count() == 30
    finally:
        spark.sql("DROP TABLE declared")
    for name in register_tables(spark, place.path, prefix="seen_"):
        assert spark.sql(f"SELECT * FROM {name}").count() >= 0
    assert spark.sql("SELECT error FROM seen_dead_letters").collect()[0][0] == "no such customer"
    assert spark.sql("SELECT count(*) FROM seen_traces").collect()[0][0] > 0


@pytest.fixture(params=["server", "store"])
def far(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """A place that Spark has no folder of."""
    with PLACES[request.param](tmp_path) as found:
        yield found


@pytest.fixture
def kit(spark: Any, far: Place, tmp_path: Path) -> Kit:
    made = Kit(spark, tmp_path / "work")
    made.folder = far.path
    return made


def test_what_was_published_far_away_is_landed_refined_counted_and_proved(kit: Kit, far: Place) -> None:
    far.send(90)
    kit.declare("landed", "land", topics=["orders"], max_rows_per_batch=50)
    kit.declare("silver", "refine", source="landed", schema="id long not null", key="id")
    kit.declare("gold", "aggregate", source="silver", window="1 day", measures={"n": "count(1)"})
    kit.declare("proof", "reconcile", source="landed")
    assert kit.plan("landed").reads[0].rows
    assert kit.run("landed", "silver", "gold", "proof").ok
    assert sorted(pl.read_delta(f"{kit.lake}/silver")["id"].to_list()) == [*range(90)]
    assert pl.read_delta(f"{kit.lake}/gold")["n"].sum() == 90
    far.send(7)
    again = kit.run("landed")
    assert (again.rows_out, again.lag) == (7, 0)
    far.send(3)
    assert table("orders", far.path, kit.lake).count() == 100


def test_every_other_kind_of_pipeline_runs_far_away_too(kit: Kit, far: Place) -> None:
    far.send(90)
    far.bury()
    kit.declare("cold", "compact", topics=["orders"], latest=True)
    kit.declare("triage", "deadletters", redrive="error_kind LIKE 'no such%'")
    kit.declare("lives", "traces")
    kit.declare("again", "replay", topics=["orders"], to="copies", where="offset < 10")
    assert len(kit.plan("cold").reads) == 2
    outcomes = {each.pipeline: each for each in kit.runner().run(["cold", "triage", "lives", "again"])}
    assert {name: str(each.error) for name, each in outcomes.items() if each.error is not None} == {}
    cold = outcomes["cold"].summary
    assert cold is not None
    assert (40 <= len(pl.read_delta(f"{kit.lake}/cold")) < 90, cold.lag) == (True, 0)
    assert len(far.copies()) == 20
    with far.broker() as opened:
        assert opened.group("orders", "billing").dead.list() == []
