"""The tables of a data folder in Spark, while another process owns the folder and writes to it all the while."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.broker.streams.queries import remove_queries
from holdfast.env import real_world
from holdfast.errors import InvalidRequest, OffsetOutOfRange
from holdfast.spark import Pipeline, register_tables, table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# The owner publishes, handles, buries every third message, drops letters, and never stops by itself.
OWNER = """
import itertools, sys, threading
import holdfast

with holdfast.open_broker(sys.argv[1]) as broker:
    broker.create_topic("orders", partitions=2, trace_sample=1.0, segment_bytes=65536)
    broker.create_topic("events")
    group = broker.group("orders", "billing")
    for number in itertools.count():
        broker.publish("orders", b"%d" % number, key=b"k%d" % (number % 7), partition=number % 2)
        broker.publish("events", b"%d" % number)
        broker.publish("orders", b"later %d" % number, delay=3600, partition=number % 2)
        for message in group.receive_many(10, timeout=0):
            if int(message.body) % 3:
                message.ack()
            else:
                message.reject(f"order {number} is broken")
        if number % 50 == 49:
            group.dead.purge(limit=3)
            group.compact()
        if number == 200:
            print("ready", flush=True)
        if number >= 200:
            threading.Event().wait(0.01)  # the machine is small
"""

NAMES = ["messages", "dead_letters", "groups", "delayed", "traces", "corrupt", "topics"]


@pytest.fixture(scope="module")
def owned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with an owner at work."""
    folder = tmp_path_factory.mktemp("tables") / "shop"
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(folder)], stdout=subprocess.PIPE)
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"ready\n"
        yield folder
        assert owner.poll() is None
    finally:
        owner.kill()
        owner.wait()
        if owner.stdout is not None:
            owner.stdout.close()


def load(spark: SparkSession, folder: Path, table: str, **options: Any) -> DataFrame:
    return spark.read.format("holdfast").options(path=str(folder), table=table, **options).load()


def test_every_table_can_be_asked_in_sql_beside_a_living_owner(spark, owned):
    with pytest.raises(holdfast.Busy):
        holdfast.open_broker(owned, share=False)
    assert register_tables(spark, str(owned), prefix="shop_") == [f"shop_{name}" for name in NAMES]
    counts = {name: spark.table(f"shop_{name}").count() for name in NAMES}
    assert counts["messages"] >= 200
    assert counts["dead_letters"] >= 40
    assert counts["delayed"] >= 200
    assert counts["traces"] >= 1000
    assert (counts["groups"], counts["corrupt"], counts["topics"]) == (2, 0, 3)


def test_dead_letters_join_the_messages_that_they_were(spark, owned):
    letters = load(spark, owned, "dead_letters").where("offset < 20").cache()
    letters.createOrReplaceTempView("letters")
    register_tables(spark, str(owned))
    kinds = spark.sql(
        "SELECT DISTINCT cast(l.value AS string) AS value, l.state, l.reason, t.step FROM letters l "
        "JOIN traces t ON t.id = l.message_id AND t.step = 'buried'"
    ).collect()
    assert kinds
    assert {int(row.value) % 3 for row in kinds} == {0}
    assert {row.reason for row in kinds} == {"REJECTED"}
    assert {row.state for row in kinds} <= {"waiting", "purged", "done"}
    letters.unpersist()


def test_lag_by_group_agrees_with_the_ends_of_the_partitions(spark, owned):
    register_tables(spark, str(owned))
    rows = spark.sql(
        "SELECT g.partition, g.lag, g.position, g.end, t.partitions FROM groups g "
        "JOIN topics t ON t.name = g.topic AND t.partition = g.partition WHERE g.group = 'billing'"
    ).collect()
    assert sorted(row.partition for row in rows) == [0, 1]
    for row in rows:
        assert row.position + row.lag <= row.end
        assert row.partitions == 2


def test_a_table_shows_what_has_come_since(spark, owned):
    before = load(spark, owned, "delayed").count()
    while load(spark, owned, "topics").agg({"end": "sum"}).first()[0] < 300:
        pass
    assert load(spark, owned, "delayed").count() > before


def test_all_rows_are_whole(spark, owned):
    rows = load(spark, owned, "delayed").collect()
    numbers = [int(row.value.removeprefix(b"later ")) for row in rows]
    assert len(set(numbers)) == len(numbers)
    assert set(range(200)) <= set(numbers)
    assert all(row.partition == number % 2 for row, number in zip(rows, numbers, strict=True))


def test_a_schema_picks_columns(spark, owned):
    frame = (
        spark.read.format("holdfast")
        .schema("state string, value string")
        .options(path=str(owned), table="dead_letters")
    )
    assert frame.load().columns == ["state", "value"]
    assert frame.load().where("int(value) % 3 != 0").count() == 0


@pytest.mark.parametrize("table", ["deadletters", "letters"])
def test_an_unknown_table_is_an_error_in_one_sentence(spark, owned, table):
    with pytest.raises(Exception, match="there is no table") as caught:
        load(spark, owned, table).count()
    assert "choose from messages, dead_letters" in str(caught.value)


def test_a_table_as_a_stream_is_refused_in_one_sentence(spark, owned):
    stream = spark.readStream.format("holdfast").options(path=str(owned), table="groups")
    with pytest.raises(Exception, match="table groups cannot be read as a stream"):
        stream.load().writeStream.format("noop").start().processAllAvailable()


class Landed:
    """A topic that is landed in a lake, and read as one table."""

    def __init__(self, home: Path, spark: SparkSession) -> None:
        self.folder, self.lake, self.spark = str(home / "shop"), str(home / "lake"), spark
        self.sent = 0
        with holdfast.open_broker(self.folder) as broker:
            broker.create_topic("orders", partitions=2)
            broker.create_topic("events")
            broker.publish("events", b"another topic of the same table")

    def publish(self, count: int) -> None:
        with holdfast.open_broker(self.folder, durability="os") as broker:
            for number in range(self.sent, self.sent + count):
                broker.publish("orders", b"%d" % number, partition=number % 2, headers={"n": str(number)})
        self.sent += count

    def land(self, **options: Any) -> None:
        chain = Pipeline.land("orders", "events", folder=self.folder, lake=self.lake, name="bronze", **options)
        chain.run(spark=self.spark)

    def table(self, **options: Any) -> DataFrame:
        return table("orders", self.folder, self.lake, spark=self.spark, **options)

    def check(self, frame: DataFrame) -> None:
        """Every message once, whole."""
        rows = frame.selectExpr("int(string(value)) AS n", "string(headers[0].value) AS header", "partition", "offset")
        expected = [(n, str(n), n % 2, n // 2) for n in range(self.sent)]
        assert sorted(tuple(row) for row in rows.collect()) == expected


@pytest.fixture
def landed(tmp_path: Path, spark: SparkSession) -> Landed:
    return Landed(tmp_path, spark)


def python_reads(frame: DataFrame) -> bool:
    return "(Python)" in frame._jdf.queryExecution().toString()


def test_a_table_is_what_was_landed_and_the_log_behind_it_each_message_once(landed: Landed) -> None:
    landed.publish(10)
    landed.land(max_rows_per_batch=4)
    whole = landed.table()
    assert not python_reads(whole)
    landed.check(whole)
    landed.publish(7)
    both = landed.table()
    assert python_reads(both)
    landed.check(both)
    landed.publish(1)
    landed.land()
    assert both.count() == 17  # it stays as it was made
    landed.check(landed.table())


def test_a_batch_that_the_ledger_has_not_finished_comes_from_the_log(landed: Landed) -> None:
    landed.publish(4)
    landed.land()
    landed.publish(3)
    landed.land()
    batches = Path(landed.lake, "_checkpoints/bronze/batches")
    last = max(batches.glob("*.json"))
    last.rename(last.with_suffix(".pending"))  # as a kill between the commit of Delta and the ledger's leaves it
    frame = landed.table()
    assert python_reads(frame)
    landed.check(frame)


def test_a_table_has_messages_that_the_topic_dropped_and_not_those_it_never_landed(landed: Landed) -> None:
    def trim(*numbers: int) -> None:
        with holdfast.open_broker(landed.folder) as broker:
            for number in numbers:
                log = broker._port.engine.topic("orders").partition(number).log
                log.roll()
                log.trim(log.end)
                assert log.start == log.end

    landed.publish(6)
    landed.land()
    trim(0, 1)
    landed.check(landed.table())
    landed.publish(2)
    landed.check(landed.table())
    assert remove_queries(real_world(), landed.folder, "bronze")  # or its pin would keep what is not landed
    trim(0)
    with pytest.raises(OffsetOutOfRange, match="1 messages of orders/0 are gone"):
        landed.table()


def test_a_table_that_is_not_the_whole_topic_is_refused(landed: Landed) -> None:
    with pytest.raises(InvalidRequest, match="run one of the kind land"):
        landed.table()
    landed.publish(4)
    landed.land(expect=[{"name": "even", "check": "offset % 2 = 0", "on_fail": "drop"}])
    with pytest.raises(InvalidRequest, match="dropped 2 rows"):
        landed.table()


def test_a_topic_that_was_made_again_is_not_read_behind_the_old_one(landed: Landed) -> None:
    landed.publish(4)
    landed.land()
    with holdfast.open_broker(landed.folder) as broker:
        broker.delete_topic("orders")
        broker.create_topic("orders", partitions=2)
    with pytest.raises(InvalidRequest, match="deleted and recreated"):
        landed.table()


def test_landed_topics_can_be_asked_in_sql_by_their_names(landed: Landed) -> None:
    landed.publish(4)
    landed.land()
    landed.publish(1)
    views = register_tables(landed.spark, landed.folder, prefix="t_", lake=landed.lake)
    assert views[:2] == ["t_events", "t_orders"]
    assert landed.spark.sql("SELECT max(offset) AS last FROM t_orders").collect() == [(2,)]
