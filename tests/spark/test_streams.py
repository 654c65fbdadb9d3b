"""Functions on streams of tables: joins of several sources, windows on Spark's own state, and rows that change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from pyspark.sql import functions as f
from pyspark.sql.streaming import DataStreamWriter

import holdfast
from holdfast.errors import BadSettings, InvalidRequest
from holdfast.spark import Pipeline, pipeline
from holdfast.spark.pipelines.streams import quick_checkpoints

ORDERS = "id long not null, customer string, at timestamp"
PAYMENTS = "order long not null, amount double, paid_at timestamp"


class Shop:
    """Topics of orders and payments, a silver table of each, and functions that read them."""

    def __init__(self, home: Path, spark: Any) -> None:
        self.folder, self.lake, self.spark = home / "shop", home / "lake", spark
        with holdfast.open_broker(self.folder) as broker:
            for topic in ("orders", "payments", "customers"):
                broker.create_topic(topic, partitions=2)

    def send(self, topic: str, *bodies: Any) -> None:
        with holdfast.open_broker(self.folder) as broker:
            broker.publish_many(topic, [json.dumps(body).encode() for body in bodies])

    def silver(self, topic: str, schema: str, **options: Any) -> Pipeline:
        landed = Pipeline.land(topic, folder=self.folder, lake=self.lake, max_rows_per_batch=10)
        return landed.refine(schema, name=topic, **options)

    def run(self, *functions: Any, payments: bool = True) -> dict[str, Any]:
        """Run the silver tables and these functions; the summaries by name."""
        chain: Any = self.silver("orders", ORDERS)
        for spec in self.silver("payments", PAYMENTS).project.pipelines.values() if payments else ():
            chain = chain._with(spec)
        for function in functions:
            chain = chain.apply(function)
        return {each.pipeline: each for each in chain.run(spark=self.spark)}

    def table(self, name: str) -> pl.DataFrame:
        return pl.read_delta(str(self.lake / name))


@pytest.fixture
def shop(tmp_path: Path, spark: Any) -> Shop:
    return Shop(tmp_path, spark)


def order(number: int, at: str, customer: str = "anna") -> dict[str, Any]:
    return {"id": number, "customer": customer, "at": f"2026-11-16T{at}:00Z"}


def payment(number: int, at: str, amount: float = 1.0) -> dict[str, Any]:
    return {"order": number, "amount": amount, "paid_at": f"2026-11-16T{at}:00Z"}


@pipeline(sources=["orders", "payments"], expect=[{"name": "dear", "check": "amount < 100", "on_fail": "quarantine"}])
def paid(orders: Any, payments: Any) -> Any:
    return (
        orders.withWatermark("at", "2 hours")
        .join(
            payments.withWatermark("paid_at", "2 hours"),
            f.expr("id = order AND paid_at >= at AND paid_at <= at + INTERVAL 1 HOUR"),
        )
        .select("id", "customer", "amount", "at", "paid_at")
    )


def test_a_join_of_two_streams_has_every_pair_once_whichever_side_comes_first(shop):
    shop.send("orders", *(order(number, "10:00") for number in range(15)))
    shop.send("payments", *(payment(number, "10:30") for number in range(5, 20)), payment(3, "11:30"))
    first = shop.run(paid)["paid"]
    assert (first.rows_in, first.rows_out, first.lag) == (31, 10, 0)
    shop.send("orders", *(order(number, "10:10") for number in range(15, 25)))
    shop.send("payments", *(payment(number, "10:40") for number in (1, 2)), payment(20, "10:50", 500.0))
    again = shop.run(paid)["paid"]
    assert (again.rows_in, again.rows_out, again.quarantined) == (13, 7, 1)
    assert shop.run(paid)["paid"].rows_in == 0
    assert sorted(shop.table("paid")["id"].to_list()) == [1, 2, *range(5, 20)]
    assert shop.table("paid.quarantine").select("id", "amount").rows() == [(20, 500.0)]


@pipeline(sources=["orders"], output_mode="update", upsert_by=["hour", "customer"])
def hours(orders: Any) -> Any:
    by = orders.withWatermark("at", "30 minutes").groupBy(f.window("at", "1 hour"), "customer")
    return by.agg(f.count("*").alias("orders")).select(f.col("window.start").alias("hour"), "customer", "orders")


def test_windows_on_sparks_state_are_merged_into_the_table(shop):
    shop.send("orders", *(order(number, "10:10") for number in range(15)), order(50, "10:20", "ben"))
    shop.run(hours, payments=False)
    assert sorted(shop.table("hours").select("customer", "orders").rows()) == [("anna", 15), ("ben", 1)]
    shop.send("orders", *(order(number, "10:30") for number in range(15, 20)), order(51, "12:00", "ben"))
    shop.run(hours, payments=False)
    expected = [("anna", 10, 20), ("ben", 10, 1), ("ben", 12, 1)]

    def found() -> list[Any]:
        return sorted(shop.table("hours").select("customer", pl.col("hour").dt.hour(), "orders").rows())

    assert found() == expected
    shop.send("orders", order(52, "10:40"))  # behind the watermark
    shop.run(hours, payments=False)
    assert found() == expected


@pipeline(source="orders", tables=["payments"], upsert_by="customer", latest_by="at", delete_when="id < 0")
def newest(orders: Any, payments: Any) -> Any:
    known = payments.groupBy("order").agg(f.sum("amount").alias("paid"))
    return orders.join(known, orders.id == known.order, "left").select("customer", "id", "at", "paid")


def test_rows_of_one_key_are_replaced_by_newer_ones_and_removed(shop):
    shop.send("payments", payment(1, "10:00", 2.0), payment(1, "10:00", 3.0), payment(3, "10:00"))
    shop.send("orders", order(1, "10:00"), order(3, "10:30"), order(2, "10:10"), order(4, "10:00", "ben"))
    shop.run(newest)
    assert sorted(shop.table("newest").select("customer", "id", "paid").rows()) == [("anna", 3, 1.0), ("ben", 4, None)]
    shop.send("orders", order(5, "10:20"), order(-1, "10:40", "ben"), order(6, "10:00", "carl"))
    shop.run(newest)
    assert sorted(shop.table("newest").select("customer", "id").rows()) == [("anna", 3), ("carl", 6)]
    assert "_deleted" not in shop.table("newest").columns


@pipeline(source="orders", upsert_by="customer")
def either(orders: Any) -> Any:
    return orders.select("customer", "id")


@pipeline(source="either", name="beyond")
def beyond(rows: Any) -> Any:
    return rows


def test_rows_that_change_are_refused_where_it_would_be_left_to_chance(shop):
    shop.send("orders", order(1, "10:00"), order(2, "10:00"))
    with pytest.raises(InvalidRequest, match=r"several rows with customer anna.*latest_by"):
        shop.run(either, payments=False)
    with pytest.raises(BadSettings, match="either has upsert_by: rows that change cannot be read incrementally"):
        shop.silver("orders", ORDERS).apply(either).apply(beyond).plan()


def test_windows_in_sparks_state_have_the_numbers_of_windows_that_are_recomputed(shop):
    def run() -> dict[str, Any]:
        windows = {"time": "at", "window": "1 hour", "watermark": "30 minutes", "by": ["customer"]}
        numbers = {"n": "count(1)", "newest": "max(id)", "middle": "percentile_approx(id, 0.5)"}
        chain = shop.silver("orders", ORDERS).aggregate(name="again", measures=numbers, **windows)
        chain = chain.then("aggregate", "live", source="orders", measures=numbers, incremental=True, **windows)
        return {each.pipeline: each for each in chain.run(spark=shop.spark)}

    def found(name: str) -> list[Any]:
        return sorted(shop.table(name).select("window_start", "window_end", "customer", "n", "newest", "middle").rows())

    for sent in (
        [order(number, "10:10") for number in range(25)],
        [order(number, "10:20", "ben") for number in range(25, 30)] + [order(99, "12:00")],
        [order(30, "12:10"), {"id": 31, "customer": "anna"}],
    ):
        shop.send("orders", *sent)
        done = run()
        assert found("live") == found("again")
        assert (done["live"].lag, done["live"].rows_in) == (0, len(sent))
    assert done["live"].expectations == done["again"].expectations == {"late": 0, "null_time": 1}
    kept = found("live")
    shop.send("orders", order(40, "09:00"), order(41, "10:59"))
    done = run()
    assert done["live"].expectations == done["again"].expectations == {"late": 2, "null_time": 0}
    assert found("live") == found("again") == kept


def test_a_pipeline_writes_its_checkpoint_the_quick_way_and_leaves_the_session_as_it_was(shop, monkeypatch):
    conf, way = shop.spark.conf, "spark.sql.streaming.checkpointFileManagerClass"
    ways, start = [], DataStreamWriter.start

    def noted(writer: Any, *arguments: Any) -> Any:
        ways.append(conf.get(way, None))
        return start(writer, *arguments)

    monkeypatch.setattr(DataStreamWriter, "start", noted)
    shop.send("orders", order(1, "10:10"))
    shop.run(hours, payments=False)
    assert {str(used).rpartition(".")[2] for used in ways} == {"FileSystemBasedCheckpointFileManager"}
    assert conf.get(way, None) is None
    conf.set(way, "a.class.of.the.user")
    try:
        with quick_checkpoints(shop.spark):
            assert conf.get(way) == "a.class.of.the.user"
        assert conf.get(way) == "a.class.of.the.user"
    finally:
        conf.unset(way)
