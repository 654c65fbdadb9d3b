"""The pipelines land, refine and aggregate, from a queue to tables: every message once, whatever happens in between."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from pyarrow import parquet

import holdfast
from holdfast.api.sync.broker import Broker
from holdfast.env import real_world
from holdfast.errors import BadSettings, ExpectationFailed, InvalidRequest, UnknownTopic
from holdfast.spark import read_delta
from holdfast.spark.pipelines.batches import Slice, run_steps
from holdfast.spark.pipelines.checkpoint import LedgerBatch
from holdfast.spark.pipelines.lake import MANY, delta_table, live_files, read_table
from holdfast.spark.pipelines.project import Pipeline, Runner, run
from holdfast.spark.pipelines.python import pipeline
from holdfast.spark.pipelines.refine import write as kind_write
from holdfast.spark.pipelines.spec import Context, Progress, located
from tests.spark.scripts import run_script

SCHEMA = "id long not null, amount double, country string, at timestamp"


class Shop:
    """A broker with a topic of orders, and the lake beside it."""

    def __init__(self, home: Path, spark: Any) -> None:
        self.folder, self.lake, self.spark = home / "shop", home / "lake", spark
        self.broker: Broker = holdfast.open_broker(self.folder)
        self.broker.create_topic("orders", partitions=2, cleanup="compact")  # which allows tombstones
        self.sent = 0

    def send(self, *bodies: Any) -> None:
        """JSON of each; bytes as they are."""
        for body in bodies:
            raw = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.broker.publish("orders", raw, key=str(self.sent).encode(), headers={"n": str(self.sent).encode()})
            self.sent += 1

    def orders(self, count: int) -> None:
        self.send(*({"id": number, "amount": 1.5} for number in range(self.sent, self.sent + count)))

    def land(self, **options: Any) -> Pipeline:
        return Pipeline.land("orders", folder=self.folder, lake=self.lake, **options)

    def run(self, chain: Pipeline) -> list[Any]:
        return chain.run(spark=self.spark)

    def table(self, name: str) -> Any:
        """As anybody reads it."""
        return read_delta(self.spark, str(self.lake / name))

    def rows(self, name: str, *columns: str) -> list[tuple[Any, ...]]:
        return sorted(tuple(row) for row in self.table(name).select(*columns).collect())

    def everything_once(self) -> None:
        """Each message is in the lake, once."""
        found = self.rows("orders-land", "partition", "offset", "value")
        assert len(found) == len({row[:2] for row in found}) == self.sent


@pytest.fixture
def shop(tmp_path: Path, spark: Any) -> Iterator[Shop]:
    made = Shop(tmp_path, spark)
    yield made
    made.broker.close()


def test_land_takes_every_message_once_with_all_that_is_known_of_it(shop):
    shop.orders(25)
    [first] = shop.run(shop.land(max_rows_per_batch=10))
    assert (first.batches, first.rows_in, first.rows_out, first.lag) == (3, 25, 25, 0)
    [again] = shop.run(shop.land(max_rows_per_batch=10))
    assert (again.batches, again.rows_in) == (0, 0)
    row = shop.table("orders-land").where("key = cast('7' AS binary)").collect()[0]
    assert json.loads(bytes(row.value)) == {"id": 7, "amount": 1.5}
    assert [(header.key, bytes(header.value)) for header in row.headers] == [("n", b"7")]
    assert (row.topic, row.dt) == ("orders", datetime.now(UTC).date())
    shop.everything_once()
    assert not (shop.lake / "_staging" / "orders-land").exists()
    written = next((shop.lake / "orders-land").rglob("*.parquet"))
    assert "timestamp[us" in str(parquet.read_schema(written).field("timestamp").type)


def test_land_goes_on_where_it_was_stopped_and_where_spark_forgot(shop):
    shop.orders(40)
    chain = shop.land(max_rows_per_batch=1)

    def stop(progress: Progress) -> None:
        runner.stop()

    runner = Runner(chain.project, spark=shop.spark, tell=stop)
    [outcome] = runner.run(["orders-land"])
    assert outcome.error is None
    assert outcome.summary is not None
    stopped = outcome.summary
    assert 1 <= stopped.rows_in == 40 - stopped.lag
    # As if the driver had died between our commit and Spark's.
    for path in (shop.lake / "_checkpoints/orders-land/spark/commits").iterdir():
        path.unlink()
    [rest] = shop.run(shop.land())
    assert (rest.rows_in, rest.lag) == (stopped.lag, 0)
    shop.everything_once()


KILLED = """
import os, signal, sys
from holdfast.env.disk import LakeDisk
from holdfast.spark.pipelines.project import Pipeline
from holdfast.spark.session import session

moved = 0

class Killed(LakeDisk):
    def rename(self, old, new):
        global moved
        super().rename(old, new)
        moved += new.endswith(".parquet")
        if moved == 3:
            os.kill(os.getpid(), signal.SIGKILL)

from holdfast.spark.pipelines import streams
made = streams.Context
streams.Context = lambda **given: made(disk=Killed(), **given)
java = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
spark = session("killed", "local[2]", **java)
Pipeline.land("orders", folder=FOLDER, lake=LAKE, max_rows_per_batch=8).run(spark=spark)
"""


@pytest.mark.slow
def test_a_driver_that_is_killed_between_two_files_of_a_batch_doubles_nothing_and_loses_nothing(shop):
    shop.orders(20)
    script = f"FOLDER, LAKE = {str(shop.folder)!r}, {str(shop.lake)!r}\n{KILLED}"
    done = run_script(script, 180)
    assert done.returncode == -signal.SIGKILL, done.stderr
    half = shop.rows("orders-land", "partition", "offset")
    assert 0 < len(half) == len(set(half)) < 16
    shop.orders(5)
    shop.run(shop.land(max_rows_per_batch=8))
    shop.everything_once()


def test_small_files_are_merged_and_whoever_reads_on_misses_nothing(shop):
    chain = shop.land(max_rows_per_batch=2, name="l").refine("id long", name="s", max_rows_per_batch=5)
    shop.orders(4)
    shop.run(chain)
    shop.orders(2 * MANY - 4)
    shop.run(shop.land(max_rows_per_batch=2, name="l"))
    assert len(live_files(delta_table(str(shop.lake / "l")))) == 1
    assert shop.table("l").count() == shop.sent
    [silver] = Runner(chain.project, spark=shop.spark).run(["s"])
    assert silver.summary is not None
    assert silver.summary.rows_in == 2 * MANY - 4
    assert shop.table("s").count() == shop.table("s").select("_partition", "_offset").distinct().count() == shop.sent


def test_refine_types_rows_puts_bad_ones_aside_and_takes_the_first_of_each_key(shop):
    order = {"id": 1, "amount": 5.0, "country": "de", "at": "2026-11-16T10:00:00Z"}
    shop.send(order, {**order, "amount": 6.0}, b"no json", {"id": "one"}, {"amount": 2.0}, {**order, "id": 2}, b"")
    shop.broker.publish("orders", None, key=b"gone")
    chain = (
        shop.land()
        .refine(SCHEMA, key="id")
        .expect("positive", "amount > 0", on_fail="quarantine")  # a tombstone has no amount: it is dropped all the same
        .expect("dated", "at IS NOT NULL", on_fail="fail")
    )
    _, silver = shop.run(chain)
    assert (silver.rows_in, silver.rows_out, silver.duplicates) == (8, 2, 1)
    assert (silver.dropped, silver.quarantined) == (1, 4)
    assert shop.rows("orders-silver", "id", "country") == [(1, "de"), (2, "de")]
    aside = {bytes(row.value): list(row._reasons) for row in shop.table("orders-silver.quarantine").collect()}
    assert aside == {
        b"no json": ["not JSON of the schema"],
        b"": ["not JSON of the schema"],
        b'{"id": "one"}': ["id is one, which is not a valid bigint"],
        b'{"amount": 2.0}': ["id is null"],
    }
    shop.send({**order, "id": 2}, {**order, "id": 3})
    _, silver = shop.run(chain)
    assert (silver.rows_in, silver.rows_out, silver.duplicates) == (2, 1, 1)
    assert [row[0] for row in shop.rows("orders-silver", "id")] == [1, 2, 3]


def test_names_and_values_that_look_like_something_else_stay_what_they_are(shop, tmp_path):
    def send(number: int) -> None:
        body = {"user.id": number, "zip": "10115", "time of day": "12:30", "at": f"2026-11-16T20:0{number}:00.5Z"}
        shop.broker.publish("2024", json.dumps(body).encode())

    shop.broker.create_topic("2024")
    shop.lake = tmp_path / "lake [1]"
    chain = (
        Pipeline.land("2024", folder=shop.folder, lake=shop.lake, name="l")
        .refine(key="user.id", name="s")
        .aggregate(time="at", by=["zip", "user.id"], measures={"how.many": "count(1)"}, name="g", window="1 minute")
    )
    zone = shop.spark.conf.get("spark.sql.session.timeZone")
    shop.spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")  # where it is the 17th already
    try:
        send(1)
        shop.run(chain)
        send(1)
        send(2)
        _, silver, _ = shop.run(chain)
        assert shop.spark.conf.get("spark.sql.session.timeZone") == "Asia/Tokyo"
    finally:
        shop.spark.conf.set("spark.sql.session.timeZone", zone)
    assert (silver.rows_in, silver.rows_out, silver.duplicates) == (2, 1, 1)
    project = located(chain.project)
    context = Context(world=real_world(), session=lambda: shop.spark, project=project, spec=project.spec("s"))
    kinds = dict(read_table(context, "s", through=9).dtypes)
    assert [kinds[name] for name in ("user.id", "zip", "time of day", "at", "_topic", "dt")] == [
        "bigint",
        "string",
        "string",
        "timestamp",
        "string",
        "date",
    ]
    gold = read_table(context, "g", through=9).collect()
    assert sorted((row["user.id"], row.zip, row["how.many"], str(row.dt)) for row in gold) == [
        (1, "10115", 1, "2026-11-16"),
        (2, "10115", 1, "2026-11-16"),
    ]


def test_a_row_that_is_not_as_expected_is_counted_dropped_put_aside_or_stops_the_batch(shop):
    shop.send(*({"id": number, "amount": number} for number in range(6)))
    chain = (
        shop.land()
        .refine("id long, amount double")
        .expect("small", "amount < 4", on_fail="warn")
        .expect("not_two", "amount != 2", on_fail="drop")
        .expect("not_three", "amount != 3", on_fail="quarantine")
    )
    _, silver = shop.run(chain)
    assert silver.expectations == {"tombstone": 0, "rescued": 0, "small": 2, "not_two": 1, "not_three": 1}
    assert (silver.rows_in, silver.rows_out, silver.dropped, silver.quarantined) == (6, 4, 1, 1)
    assert shop.rows("orders-silver", "id") == [(0,), (1,), (4,), (5,)]
    [aside] = shop.table("orders-silver.quarantine").collect()
    assert (aside._reasons, aside._pipeline, aside._batch) == (["not_three"], "orders-silver", 0)
    strict = chain.expect("positive", "amount >= 0", on_fail="fail")
    shop.send({"id": 7, "amount": 7}, {"id": 8, "amount": -1})
    with pytest.raises(ExpectationFailed, match="1 row does not meet 'positive'"):
        shop.run(strict)
    assert shop.rows("orders-silver", "id") == [(0,), (1,), (4,), (5,)]
    _, silver = shop.run(chain)
    assert shop.rows("orders-silver", "id")[-2:] == [(7,), (8,)]


def test_a_batch_of_land_that_must_fail_leaves_nothing_behind(shop):
    shop.orders(3)
    with pytest.raises(ExpectationFailed):
        shop.run(shop.land().expect("never", "offset < 0", on_fail="fail"))
    assert not (shop.lake / "orders-land").exists()
    [landed] = shop.run(shop.land())
    assert landed.rows_out == 3


def test_aggregate_keeps_windows_up_to_date_and_counts_what_comes_too_late(shop):
    def order(number: int, country: str, at: str) -> dict[str, Any]:
        return {"id": number, "amount": number, "country": country, "at": f"2026-11-16T{at}:00Z"}

    chain = (
        shop.land()
        .refine(SCHEMA, max_rows_per_batch=1)
        .aggregate(time="at", by=["country"], measures={"count": "count(1)", "amount": "sum(amount)"})
    )
    shop.send(order(1, "de", "10:10"), order(2, "de", "10:50"), order(3, "fr", "10:20"), order(4, "de", "12:00"))
    *_, gold = shop.run(chain)
    assert (gold.rows_in, gold.rows_out, gold.expectations["late"]) == (4, 3, 0)
    shown = ("date_format(window_start, 'HH:mm')", "country", "count", "amount")

    def numbers() -> list[tuple[Any, ...]]:
        return sorted(tuple(row) for row in shop.table("orders-gold").selectExpr(*shown).collect())

    assert numbers() == [("10:00", "de", 2, 3.0), ("10:00", "fr", 1, 3.0), ("12:00", "de", 1, 4.0)]
    # 11:55 is late but its window ends at 12:00, the watermark is at 11:50; the window of 10:00 is closed.
    shop.send(order(5, "de", "12:30"), order(6, "de", "11:55"), order(7, "de", "10:30"))
    *_, gold = shop.run(chain)
    assert gold.expectations["late"] == 1
    expected = [("10:00", "de", 2, 3.0), ("10:00", "fr", 1, 3.0), ("11:00", "de", 1, 6.0), ("12:00", "de", 2, 9.0)]
    assert numbers() == expected
    *_, again = shop.run(chain)
    assert again.batches == 0
    assert numbers() == expected


def test_tables_go_on_where_they_were_stopped_and_read_again_what_was_merged_meanwhile(shop):
    shop.orders(4)
    chain = shop.land(max_rows_per_batch=2).refine("id long", name="s", max_rows_per_batch=1)

    def stop(progress: Progress) -> None:
        if progress.pipeline == "s":
            runner.stop()

    runner = Runner(chain.project, spark=shop.spark, tell=stop)
    _, silver = runner.run(["orders-land", "s"])
    assert silver.summary is not None
    assert (silver.summary.batches, silver.summary.lag) == (1, 2)
    project = located(chain.project)
    context = Context(world=real_world(), session=lambda: shop.spark, project=project, spec=project.spec("s"))
    calls = []

    def write(context: Context, piece: Slice) -> LedgerBatch:
        calls.append(piece.batch)
        if len(calls) == 1:
            for path in (shop.lake / "orders-land").rglob("*.parquet"):
                path.rename(path.with_name(path.name.replace(".parquet", "")))
            try:
                piece.rows.collect()
            finally:
                for path in (shop.lake / "orders-land").rglob("b0*"):
                    if path.is_file():
                        path.rename(path.with_name(f"{path.name}.parquet"))
        return kind_write(context, piece)

    assert run_steps(context, write).rows_out == 2
    assert calls == [1, 1]
    assert [row[0] for row in shop.rows("s", "id")] == [0, 1, 2, 3]
    # Batches of a source that began anew are other batches.
    shop.land(max_rows_per_batch=2).run(spark=shop.spark, full_refresh=True)
    with pytest.raises(InvalidRequest, match="its source orders-land was started over"):
        run_steps(context, write)
    assert shop.table("orders-land").count() == 4


def test_aggregate_of_messages_counts_sizes_and_latencies(shop):
    shop.send(b"12345", b"123")
    chain = shop.land().then("aggregate", window="1 day", watermark="0 seconds")
    _, gold = shop.run(chain)
    assert gold.rows_in == 2
    [row] = shop.table("orders-gold").collect()
    assert (row["count"], row.bytes, row.max_bytes) == (2, 8, 5)
    assert 0 <= row.latency_ms_p50 <= row.latency_ms_p99 <= row.latency_ms_max < 600_000


@pipeline(source="orders-land")
def digits(rows: Any) -> Any:
    return rows.where("length(value) > 1").selectExpr("offset", "explode(split(cast(value AS string), '')) AS digit")


@pipeline(source="orders-land", expect=[{"name": "even", "check": "length % 2 = 0", "on_fail": "drop"}])
def lengths(rows: Any) -> Any:
    return rows.selectExpr("offset", "length(value) AS length", "dt")


def test_a_function_of_ones_own_is_a_pipeline(shop):
    shop.send(b"1", b"12", b"1234")
    _, own = shop.run(shop.land().apply(lengths))
    assert (own.rows_in, own.rows_out, own.dropped) == (3, 2, 1)
    assert [row[0] for row in shop.rows("lengths", "length")] == [2, 4]
    # What comes in is what the source has, however many rows the function makes of it.
    _, own = shop.run(shop.land().apply(digits))
    assert (own.rows_in, own.rows_out, own.duplicates) == (3, 6, 0)


def test_following_pipelines_run_side_by_side_until_they_are_told_to_stop(shop):
    shop.orders(3)
    chain = shop.land().refine("id long", name="silver")
    waited = []

    def tell(progress: Progress) -> None:
        waited.append(progress)
        if progress.pipeline == "silver":
            if progress.rows_out == 3:
                shop.orders(2)
            elif progress.rows_out == 5:
                runner.stop()

    runner = Runner(chain.project, spark=shop.spark, tell=tell)
    outcomes: list[Any] = []
    thread = Thread(target=lambda: outcomes.extend(runner.run(["silver", "orders-land"], follow=True, every_ms=200)))
    thread.start()
    thread.join(120)
    runner.stop()
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert [outcome.summary.rows_out for outcome in outcomes] == [5, 5]
    assert shop.table("silver").count() == 5


def test_mistakes_are_told_in_one_sentence(shop):
    shop.orders(1)
    shop.run(shop.land())
    other = Pipeline.land("ordres", folder=shop.folder, lake=shop.lake, name="l")
    mistakes = [
        (other, UnknownTopic, "there is no topic ordres"),
        (shop.land(name="l").expect("x", "amont > 0"), BadSettings, "the check of 'x', amont > 0, cannot be used"),
        (shop.land().refine("id lng", name="s1"), BadSettings, "the schema 'id lng' cannot be used"),
        (shop.land().refine("id long", key="no", name="s2"), BadSettings, "its key 'no' is not one of its columns"),
        (shop.land().aggregate(by=["no"], name="g"), BadSettings, "by names 'no'"),
    ]
    for chain, kind, words in mistakes:
        with pytest.raises(kind) as raised:
            run(chain.project, list(chain.project.pipelines)[-1], spark=shop.spark)
        assert words in str(raised.value)
        assert "\n" not in str(raised.value)
    with pytest.raises(InvalidRequest, match="--full-refresh"):
        shop.run(Pipeline.land("other", folder=shop.folder, lake=shop.lake, name="orders-land"))
