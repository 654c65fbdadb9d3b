"""The tables of a data folder, read as Spark's tasks read them, without a Spark."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import DataType, LongType, StringType, StructField, StructType

import holdfast
from holdfast.errors import InvalidRequest, NotAQueue, UnknownTopic
from holdfast.spark.tables import TABLES, table_reader, table_schema

NOW = datetime.now(UTC)


def rows(name: str, path: object, schema: StructType | None = None, **options: str) -> list[dict[str, Any]]:
    """All rows of a table, planned here and read by a copy of the reader."""
    schema = schema or table_schema(name)
    reader = table_reader(name, {"path": str(path), "table": name, **options}, schema)
    parts = reader.partitions()
    copy = cloudpickle.loads(cloudpickle.dumps(reader))
    found: list[dict[str, Any]] = []
    for part in cloudpickle.loads(cloudpickle.dumps(parts)):
        for batch in copy.read(part):
            assert isinstance(batch, pa.RecordBatch)
            assert batch.schema.names == schema.fieldNames()
            found += batch.to_pylist()
    return found


def columns(**kinds: DataType) -> StructType:
    return StructType([StructField(name, kind) for name, kind in kinds.items()])


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[holdfast.Broker]:
    """The folder's owner, which stays so during the test."""
    with holdfast.open_broker(tmp_path) as opened:
        opened.create_topic("orders", partitions=2, trace_sample=1.0)
        yield opened


def reject_each(broker: holdfast.Broker, *bodies: bytes, partition: int = 0, group: str = "billing") -> None:
    for body in bodies:
        broker.publish("orders", body, key=b"k", headers={"a": "1"}, priority=3, partition=partition)
    for message in broker.group("orders", group).receive_many(100, timeout=0):
        message.reject("no such customer")


def test_dead_letters_tell_where_they_come_from_why_they_died_and_what_became_of_them(broker, tmp_path):
    reject_each(broker, b"kept", b"back", b"gone")
    reject_each(broker, b"other", partition=1)
    dead = broker.group("orders", "billing").dead
    by_body = {letter.body: letter for letter in dead.list()}
    dead.redrive(by_body[b"back"].id)
    dead.purge(by_body[b"gone"].id)
    found = {row["value"]: row for row in rows("dead_letters", tmp_path)}
    assert {value: row["state"] for value, row in found.items()} == {
        b"kept": "waiting", b"back": "redriven", b"gone": "purged", b"other": "waiting",
    }  # fmt: skip
    row, letter = found[b"other"], by_body[b"other"]
    assert (row["id"], row["message_id"]) == (letter.id, letter.original_id) == ("orders.dlq-1-0", "orders-1-0")
    assert (row["topic"], row["partition"], row["offset"], row["letter_offset"]) == ("orders", 1, 0, 0)
    assert (row["group"], row["reason"], row["error"]) == ("billing", "REJECTED", "no such customer")
    assert (row["attempts"], row["priority"], row["key"], row["document"]) == (1, 3, b"k", None)
    assert row["headers"] == [{"key": "a", "value": b"1"}]
    assert (row["dead_at"], row["published_at"]) == (letter.dead_at, letter.original_timestamp)
    assert row["first_at"] == letter.first_delivery
    assert [(failure["why"], failure["error"]) for failure in row["failures"]] == [("REJECTED", "no such customer")]


def test_groups_tell_how_far_they_are_in_each_partition(broker, tmp_path):
    for number in range(6):
        broker.publish("orders", b"x", partition=number % 2)
    group = broker.group("orders", "billing")
    group.ack_many(group.receive_many(2, timeout=0))
    group.receive_many(1, timeout=0)[0].nack(delay=60)
    with broker.consumer("orders", group="lake") as consumer:
        consumer.poll(0)
        consumer.commit()
    found = {(row["group"], row["partition"]): row for row in rows("groups", tmp_path)}
    assert set(found) == {("billing", 0), ("billing", 1), ("lake", 0), ("lake", 1)}
    assert {row["mode"] for (name, _), row in found.items() if name == "lake"} == {"stream"}
    assert sum(row["lag"] for (name, _), row in found.items() if name == "billing") == 4
    assert sum(row["waiting"] for row in found.values()) == 1
    assert all(row["problem"] is None and row["end"] == 3 for row in found.values())


def test_delayed_messages_are_there_until_they_are_due(broker, tmp_path):
    due = NOW + timedelta(hours=1)
    stored = broker.publish("orders", b"later", key=b"k", at=due, partition=1, priority=2, headers={"a": "1"})
    (row,) = rows("delayed", tmp_path)
    assert (row["id"], row["topic"], row["partition"]) == (stored.id, "orders", 1)
    assert (row["key"], row["value"], row["priority"], row["expires_at"]) == (b"k", b"later", 2, None)
    assert row["headers"] == [{"key": "a", "value": b"1"}]
    assert abs(row["due_at"] - due) < timedelta(milliseconds=1)
    assert row["published_at"] < due


def test_traces_have_a_row_for_each_step(broker, tmp_path):
    stored = broker.publish("orders", b"x", partition=0)
    broker.group("orders", "billing").receive_many(1, timeout=0)[0].ack()
    found = rows("traces", tmp_path)
    assert [row["step"] for row in found] == ["published", "leased", "acked"]
    assert {(row["id"], row["topic"], row["partition"], row["offset"]) for row in found} == {
        (stored.id, "orders", 0, 0)
    }
    assert len({row["trace_id"] for row in found}) == 1
    assert [row["group"] for row in found] == ["", "billing", "billing"]
    assert found[1]["lease_until"] > found[1]["at"]


def test_traces_can_be_asked_for_by_time_and_topic(broker, tmp_path):
    broker.create_topic("other", trace_sample=1.0)
    broker.publish("orders", b"x")
    broker.publish("other", b"x")
    assert [row["topic"] for row in rows("traces", tmp_path)] == ["orders", "other"]
    assert [row["topic"] for row in rows("traces", tmp_path, topic="other")] == ["other"]
    assert rows("traces", tmp_path, endingTimestamp="-1h") == []
    assert len(rows("traces", tmp_path, startingTimestamp="-1h")) == 2
    tomorrow = (NOW + timedelta(days=1)).isoformat()
    assert rows("traces", tmp_path, startingTimestamp=tomorrow) == []


def test_many_traces_are_read_by_several_tasks(broker, tmp_path, monkeypatch):
    from holdfast.spark import rows as table_list

    monkeypatch.setattr(table_list, "_PIECE_BYTES", 1)
    log = broker._port.engine.traces.log.log
    for number in range(10):
        broker.publish("orders", b"%d" % number)
        log.roll()
    reader = table_reader("traces", {"path": str(tmp_path), "table": "traces"}, table_schema("traces"))
    assert len(reader.partitions()) > 5
    assert len(rows("traces", tmp_path)) == 10


def test_topics_have_a_row_for_each_partition(broker, tmp_path):
    broker.publish("orders", b"x", partition=1)
    first, second = rows("topics", tmp_path)
    assert (first["name"], first["partitions"], first["partition"], first["start"], first["end"]) == (
        "orders",
        2,
        0,
        0,
        0,
    )
    assert (second["partition"], second["end"], second["segments"]) == (1, 1, 1)
    assert second["bytes"] > 0
    assert first["id"] == second["id"] == broker.describe_topic("orders").id
    assert abs(first["created_at"] - NOW) < timedelta(hours=2)  # this module may be loaded long before it runs


def test_damage_is_told_with_its_place(broker, tmp_path):
    for number in range(3):
        broker.publish("orders", b"%d" % number * 50, partition=0)
    assert rows("corrupt", tmp_path) == []
    (segment,) = (tmp_path / "topics/orders/0/log").glob("*.log")
    content = bytearray(segment.read_bytes())
    content[150] ^= 0xFF
    segment.write_bytes(content)
    (row,) = rows("corrupt", tmp_path)
    assert (row["topic"], row["partition"], row["first_offset"], row["next_offset"]) == ("orders", 0, 0, 1)
    assert "damaged" in row["reason"]


@pytest.mark.parametrize("name", TABLES)
def test_a_folder_without_a_topic_has_empty_tables(broker, tmp_path, name):
    broker.delete_topic("orders")
    assert rows(name, tmp_path) == []


@pytest.mark.parametrize("name", TABLES)
def test_a_topic_that_nobody_has_used_yet_is_no_trouble(broker, tmp_path, name):
    assert len(rows(name, tmp_path)) == (2 if name == "topics" else 0)


def test_a_schema_picks_columns_in_its_own_order_and_may_ask_for_text(broker, tmp_path):
    reject_each(broker, b"x")
    assert rows("dead_letters", tmp_path, columns(value=StringType(), id=StringType())) == [
        {"value": "x", "id": "orders.dlq-0-0"}
    ]


def test_a_column_that_is_not_there_is_refused_with_those_that_are(broker, tmp_path):
    with pytest.raises(InvalidRequest, match="table groups has no column 'lagg': it has group, topic, "):
        rows("groups", tmp_path, columns(lagg=LongType()))
    with pytest.raises(InvalidRequest, match="column 'lag' of table groups is bigint, not string"):
        rows("groups", tmp_path, columns(lag=StringType()))


def test_a_table_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(InvalidRequest, match=r"did you mean dead_letters\? choose from messages, dead_letters, "):
        table_schema("deadletters")


def test_topics_can_be_chosen(broker, tmp_path):
    broker.create_topic("other")
    assert {row["name"] for row in rows("topics", tmp_path, topic="other")} == {"other"}
    assert {row["name"] for row in rows("topics", tmp_path, subscribePattern="or.*")} == {"orders"}
    with pytest.raises(UnknownTopic, match="nothere"):
        rows("dead_letters", tmp_path, topic="nothere")


def test_an_option_that_means_nothing_to_a_table_is_refused(broker, tmp_path):
    with pytest.raises(InvalidRequest, match='option "startingOffsets" is not for table groups'):
        rows("groups", tmp_path, startingOffsets="earliest")
    with pytest.raises(InvalidRequest, match='option "startingTimestamp" is not for table groups'):
        rows("groups", tmp_path, startingTimestamp="-1h")
    with pytest.raises(InvalidRequest, match='"tpoic" is not known; did you mean "topic"'):
        rows("groups", tmp_path, tpoic="orders")


def test_a_folder_that_is_not_there_is_told(tmp_path):
    with pytest.raises(NotAQueue, match="no folder"):
        rows("groups", tmp_path / "nowhere")


def test_a_topic_deleted_between_planning_and_reading_has_no_rows(broker, tmp_path):
    reject_each(broker, b"x")
    reader = table_reader("dead_letters", {"path": str(tmp_path)}, table_schema("dead_letters"))
    parts = reader.partitions()
    broker.delete_topic("orders")
    assert [batch for part in parts for batch in reader.read(part)] == []


def test_the_partition_that_spark_makes_up_is_empty(broker, tmp_path):
    broker.delete_topic("orders")
    reader = table_reader("dead_letters", {"path": str(tmp_path)}, table_schema("dead_letters"))
    assert reader.partitions() == []
    assert list(reader.read(InputPartition(None))) == []


def test_large_letters_come_in_several_batches(broker, tmp_path):
    reject_each(broker, *[bytes(900_000)] * 20)
    reader = table_reader("dead_letters", {"path": str(tmp_path)}, table_schema("dead_letters"))
    sizes = [batch.num_rows for part in reader.partitions() for batch in reader.read(part)]
    assert sum(sizes) == 20
    assert len(sizes) > 1


PAGE = Path(__file__).parents[2] / "docs/reference/spark-tables.md"


@pytest.mark.parametrize("name", TABLES)
def test_the_reference_names_every_column_of_a_table_and_no_other(name):
    section = PAGE.read_text().split(f"\n## `{name}`\n")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", " ".join(cells))) == sorted(table_schema(name).fieldNames())
