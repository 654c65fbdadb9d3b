"""What the pipelines beside the medallion do with rows, on rows made for the purpose."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from holdfast.broker.tracing import TraceStep
from holdfast.broker.tracing.log import stats
from holdfast.spark.pipelines import compact, deadletters, reconcile, replay, report, traces
from holdfast.spark.pipelines.deadletters import fingerprint, fingerprint_column
from tests.unit.test_fingerprints import EXAMPLES

NOON = datetime(2026, 11, 16, 12, tzinfo=UTC)

LETTER = (
    "id string, topic string, `group` string, reason string, error string, attempts int, "
    "dead_at timestamp, state string"
)
STEP = "at timestamp, step string, id string, topic string, `group` string, attempt int"
MESSAGE = "topic string, partition int, offset long, timestamp timestamp, key binary, value binary, tombstone boolean"
PLACED = "topic string, partition int, offset long, timestamp timestamp, checksum long"


def at(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def letters(spark: SparkSession, *errors: tuple[str, float, str]) -> DataFrame:
    rows = [
        (f"orders.dlq-0-{number}", "orders", "billing", "MAX_ATTEMPTS", error, 5, at(seconds), state)
        for number, (error, seconds, state) in enumerate(errors)
    ]
    return deadletters.with_kinds(spark.createDataFrame(rows, LETTER))


def test_spark_and_python_agree_on_what_an_error_is(spark: SparkSession):
    rows = spark.createDataFrame([(error,) for error, _ in EXAMPLES], "error string")
    found = rows.select("error", fingerprint_column(f.col("error")).alias("kind")).collect()
    assert [(row["error"], row["kind"]) for row in found] == [(error, fingerprint(error)) for error, _ in EXAMPLES]


def test_errors_of_one_kind_are_one_row(spark: SparkSession):
    found = letters(
        spark,
        ("timed out after 3 s", 0, "waiting"),
        ("timed out after 5 s", 60, "redriven"),
        ("KeyError: 'id'", 30, "waiting"),
        ("timed out after 7 s", 7200, "waiting"),
    )
    first, second = deadletters.by_kind(found).collect()
    assert (first["error_kind"], first["count"], first["waiting"]) == ("timed out after <number> s", 3, 2)
    assert (report.utc(first["first_seen"]), report.utc(first["last_seen"])) == (at(0), at(7200))
    assert (first["topics"], first["groups"]) == (["orders"], ["billing"])
    assert first["topic_groups"] == ["orders / billing"]
    assert first["samples"] == ["orders.dlq-0-3", "orders.dlq-0-1", "orders.dlq-0-0"]
    assert first["sample_error"] == "timed out after 7 s"
    assert (second["error_kind"], second["count"]) == ("KeyError: <text>", 1)


def test_only_the_newest_letters_of_a_kind_are_samples(spark: SparkSession):
    found = letters(spark, *[(f"order {number}", number, "waiting") for number in range(20)])
    samples = deadletters.by_kind(found).collect()[0]["samples"]
    assert samples == [f"orders.dlq-0-{number}" for number in (19, 18, 17, 16, 15)]


def test_letters_are_counted_by_hour(spark: SparkSession):
    found = letters(spark, ("a 1", 0, "waiting"), ("a 2", 3599, "waiting"), ("a 3", 3600, "waiting"))
    rows = deadletters.by_hour(found).orderBy("hour").collect()
    assert [(report.utc(row["hour"]), row["count"]) for row in rows] == [(at(0), 2), (at(3600), 1)]


def steps(spark: SparkSession, *given: TraceStep) -> DataFrame:
    rows = [(step.time, step.step, step.id, step.topic, step.group, step.attempt) for step in given]
    return spark.createDataFrame(rows, STEP)


def step(
    seconds: float, name: str, number: int = 1, attempt: int = 0, group: str = "billing", **more: Any
) -> TraceStep:
    at_ns = int(NOON.timestamp() * 1e9) + round(seconds * 1e6) * 1000
    group = "" if name == "published" else group
    return TraceStep(at_ns, name, f"orders-0-{number}", "orders", group=group, attempt=attempt, **more)


LIFE = (
    step(0, "published", 1),
    step(1, "leased", 1, 1),
    step(3, "returned", 1, 1),
    step(10, "leased", 1, 2),
    step(10, "extended", 1, 2),
    step(14, "acked", 1, 2),
    step(20, "published", 2),
    step(20, "leased", 2, 1),
    step(20, "acked", 2, 1),
    step(30, "leased", 3, 1),  # published before the oldest step that is kept
    step(38, "buried", 3, 1),
    step(40, "published", 4),
    step(40, "delayed", 4),
    step(60, "released", 4, group=""),
    step(61, "leased", 4, 1),
    step(61, "leased", 4, 1, group="mails"),
    step(66, "acked", 4, 1),
    step(70, "published", 2),  # the topic was made again
    step(72, "leased", 2, 1),
)


def test_times_of_deliveries_are_as_the_broker_counts_them(spark: SparkSession):
    rows = steps(spark, *LIFE)
    stats_of_life = stats(LIFE)
    firsts = sorted(row["seconds"] for row in traces.first_deliveries(rows).collect())
    handled = sorted(row["seconds"] for row in traces.deliveries(rows).collect())
    assert firsts == [0, 1, 1, 1, 2]
    assert handled == [0, 2, 4, 5, 8]
    assert (stats_of_life.first_delivery.count, stats_of_life.handling.count) == (len(firsts), len(handled))
    assert stats_of_life.first_delivery.sum == sum(firsts)
    tries = {row["attempt"]: row["acked"] + row["buried"] for row in traces.attempts(rows).collect()}
    assert tries == stats_of_life.attempts


def test_an_hour_has_counts_and_percentiles(spark: SparkSession):
    slow = [step(3600 + number * 10, "published", 100 + number) for number in range(100)]
    slow += [step(3600 + number * 10 + number, "leased", 100 + number, 1) for number in range(100)]
    rows = steps(spark, *LIFE, *slow)
    noon, one = traces.by_hour(rows, traces.first_deliveries(rows), traces.deliveries(rows)).collect()
    assert (noon["topic"], noon["published"], noon["deliveries"], noon["retries"]) == ("orders", 4, 7, 1)
    assert (noon["acked"], noon["buried"], noon["handling_count"]) == (3, 1, 5)
    assert (one["first_delivery_p50"], one["first_delivery_p95"], one["first_delivery_p99"]) == (49, 94, 98)
    assert one["first_delivery_max"] == 99
    assert (one["handling_count"], one["handling_p50"]) == (None, None)


def messages(spark: SparkSession, *given: tuple[int, int, str | None, str | None]) -> DataFrame:
    rows = [
        (
            "orders",
            partition,
            offset,
            at(offset),
            None if key is None else key.encode(),
            b"" if value is None else value.encode(),
            value is None,
        )
        for partition, offset, key, value in given
    ]
    return spark.createDataFrame(rows, MESSAGE)


def test_the_last_message_of_each_key_is_kept_and_a_tombstone_deletes(spark: SparkSession):
    found = messages(spark, (0, 1, "a", "1"), (0, 2, "b", "2"), (0, 3, "a", "3"), (0, 4, "b", None), (0, 5, None, "5"))
    assert [(row["key"], row["value"]) for row in compact.latest_by_key(found).where("NOT tombstone").collect()] == [
        (b"a", b"3")
    ]


def test_a_key_that_moved_to_a_new_partition_is_one_key(spark: SparkSession):
    found = messages(spark, (0, 1, "a", "old"), (0, 50, "a", "last of the old partition"), (1, 99, "a", "new"))
    assert [row["value"] for row in compact.latest_by_key(found).where("NOT tombstone").collect()] == [b"new"]


def test_each_batch_of_a_replay_takes_its_share_of_every_partition_in_order(spark: SparkSession):
    rows = [(partition, offset, "k", "v") for partition, count in ((0, 7), (1, 2)) for offset in range(count)]
    found = replay.in_batches(messages(spark, *rows), 4, 2).orderBy("partition", "offset").collect()
    assert [row["_replay_batch"] for row in found] == [0, 0, 1, 1, 2, 2, 3, 0, 0]


def placed(spark: SparkSession, *given: tuple[int, int]) -> DataFrame:
    return spark.createDataFrame([("orders", 0, offset, at(0), checksum) for offset, checksum in given], PLACED)


def faults(spark: SparkSession, queue: DataFrame, lake: DataFrame, *, start: int = 0, compacted: bool = False) -> Any:
    bounds = spark.createDataFrame(
        [("orders", 0, start, compacted)], "topic string, partition int, start long, compacted boolean"
    )
    compared = reconcile.differences(queue.withColumn("may_lack", f.lit(False)), lake, bounds)
    found = reconcile.ranges_of(compared).collect()
    return {row["fault"]: (row["first_offset"], row["last_offset"], row["count"]) for row in found}


def test_queue_and_lake_are_compared_message_by_message(spark: SparkSession):
    queue = placed(spark, (0, 0), (1, 1), (2, 2), (3, 3), (4, 4))
    assert faults(spark, queue, queue) == {}
    lake = placed(spark, (0, 0), (3, 99), (4, 4), (4, 4), (7, 7))
    assert faults(spark, queue, lake) == {
        "missing": (1, 2, 2),
        "changed": (3, 3, 1),
        "duplicated": (4, 4, 1),
        "unknown": (7, 7, 1),
    }


def test_what_the_queue_let_go_of_the_lake_may_have(spark: SparkSession):
    queue, lake = placed(spark, (3, 3), (5, 5)), placed(spark, (1, 1), (2, 2), (3, 3), (4, 4), (5, 5))
    assert faults(spark, queue, lake, start=3) == {"unknown": (4, 4, 1)}
    assert faults(spark, queue, lake, start=3, compacted=True) == {}


def test_steps_of_time_fit_a_plot():
    assert report.step_for(at(0), at(0)) == 10
    assert report.step_for(at(0), at(3600)) == 60
    assert report.step_for(at(0), at(86_400 * 2)) == 3600
    assert report.step_for(at(0), at(86_400 * 365 * 30)) == 2_592_000
    assert report.steps_between(at(59), at(121), 60) == [at(0), at(60), at(120)]


def test_moments_fall_into_their_steps(spark: SparkSession):
    rows = spark.createDataFrame([(at(59.999),), (at(60),), (at(-0.5),)], "at timestamp")
    found = rows.select(report.in_steps(f.col("at"), 60).alias("step")).collect()
    assert [report.utc(row["step"]) for row in found] == [at(0), at(60), at(-60)]
