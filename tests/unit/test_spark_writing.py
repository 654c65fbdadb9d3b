"""The sink without Spark: rows of record batches become messages, each once, where they belong."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")

from pyspark.sql import types as t  # noqa: E402  needs pyspark

from holdfast.broker.messages import partition_for  # noqa: E402
from holdfast.env import RealDisk  # noqa: E402
from holdfast.errors import Busy, CorruptData, HoldfastError, InvalidRequest, MessageTooLarge, UnknownTopic  # noqa: E402
from holdfast.spark.commits import CommitRequest, Staging, _manifest  # noqa: E402
from holdfast.spark.incoming import check_columns  # noqa: E402
from tests.unit.sinks import ROOT, Shop, batch_of  # noqa: E402

DAY_MS = 24 * 3_600_000
PAIRS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


def test_rows_of_all_tasks_become_messages_in_the_order_of_the_tasks():
    shop = Shop()
    first = shop.stage(batch_of([b"a", b"b"]), batch_of([b"c"]), task=0)
    second = shop.stage(batch_of([b"d"]), task=1)
    nothing = shop.stage(task=2)
    shop.commit(first, second, nothing)
    assert shop.values() == [b"a", b"b", b"c", b"d"]
    assert list(shop.files()) == ["query/done.json"]


def test_every_column_arrives_as_the_library_would_have_stored_it():
    shop = Shop()
    now = shop.clock.now_ns() // 1_000_000
    later = datetime.fromtimestamp(now / 1000, UTC) + timedelta(hours=1)
    shop.write(
        batch_of(
            [b"a", b"b"],
            key=["k", None],
            headers=pa.array([[("n", b"1")], None], PAIRS),
            priority=pa.array([7, None], pa.int32()),
            expires_at=pa.array([None, later], pa.timestamp("us", tz="Etc/UTC")),
            correlation_id=["order-1", None],
        )
    )
    with shop.broker() as broker:
        plain, other = broker.read("orders")
        assert (plain.body, plain.key, plain.headers, plain.priority) == (b"a", "k", {"n": b"1"}, 7)
        assert (plain.correlation_id, plain.expires_at) == ("order-1", None)
        assert (other.body, other.key, other.headers, other.priority) == (b"b", None, {}, 0)
        assert other.expires_at == later


def test_headers_may_be_a_map_of_texts():
    shop = Shop()
    pairs = pa.array([[("x", "0")], [("n", "1"), ("m", "2")], None, []], pa.map_(pa.string(), pa.string())).slice(1)
    shop.write(batch_of([b"a", b"b", b"c"], headers=pairs))
    with shop.broker() as broker:
        assert [message.headers for message in broker.read("orders")] == [{"n": "1", "m": "2"}, {}, {}]


@pytest.mark.parametrize("kind", [pa.binary(), pa.string(), pa.large_binary()])
def test_a_key_goes_to_the_partition_that_the_library_chooses(kind):
    shop = Shop(partitions=5)
    keys = [f"customer-{number % 40}" for number in range(400)]
    values = [f"{number}".encode() for number in range(400)]
    shop.write(batch_of(values, key=pa.array(keys).cast(kind)))
    for number, records in enumerate(shop.records()):
        assert records
        assert {partition_for(record.key, 5) for record in records} == {number}
        assert [int(record.value) for record in records] == sorted(int(record.value) for record in records)


def test_rows_without_a_key_are_spread_evenly():
    shop = Shop(partitions=4)
    shop.commit(*[shop.stage(batch_of([b"x"] * 10), task=task) for task in range(4)])
    assert [len(records) for records in shop.records()] == [10, 10, 10, 10]


def test_a_row_may_name_its_partition():
    shop = Shop(partitions=3)
    shop.write(batch_of([b"a", b"b", b"c"], key=[b"k"] * 3, partition=pa.array([2, 0, None], pa.int32())))
    found = shop.records()
    assert [record.value for record in found[2] if record.value == b"a"] == [b"a"]
    assert [record.value for record in found[0] if record.value == b"b"] == [b"b"]
    with pytest.raises(UnknownTopic, match="no partition 3"):
        shop.stage(batch_of([b"a"], partition=pa.array([3], pa.int32())))


def test_rows_may_name_their_topics():
    shop = Shop()
    with shop.broker() as broker:
        broker.create_topic("mails")
    rows = batch_of([b"a", b"b", b"c"], topic=["mails", "orders", "mails"])
    shop.write(rows, topic=None)
    assert (shop.values("orders"), shop.values("mails")) == ([b"b"], [b"a", b"c"])


def test_a_topic_that_is_missing_is_made_where_that_is_asked_for():
    shop = Shop()
    with pytest.raises(UnknownTopic, match="createTopics"):
        shop.stage(batch_of([b"a"]), topic="new")
    shop.write(batch_of([b"a", b"b", b"c"]), topic="new", new_partitions=3)
    assert [len(records) for records in shop.records("new")] == [1, 1, 1]


def test_a_batch_that_is_written_again_is_written_once():
    shop = Shop()
    shop.write(batch_of([b"a", b"b"]), batch=3)
    shop.write(batch_of([b"b", b"a"]), batch=3)  # a retry may bring the rows in another order
    shop.write(batch_of([b"old"]), batch=2)
    shop.write(batch_of([b"c"]), batch=4)
    assert shop.values() == [b"a", b"b", b"c"]
    assert list(shop.files()) == ["query/done.json"]


def test_of_a_retried_task_only_the_attempt_that_was_told_of_counts():
    shop = Shop()
    shop.stage(batch_of([b"lost"]), attempt=0)
    shop.commit(shop.stage(batch_of([b"a"]), attempt=1))
    assert shop.values() == [b"a"]
    assert list(shop.files()) == ["query/done.json"]


def test_a_write_without_an_id_of_its_own_leaves_nothing_behind():
    shop = Shop()
    shop.commit(shop.stage(batch_of([b"a"]), write="batch-1"), kept=False)
    assert shop.values() == [b"a"]
    assert list(shop.files()) == []


def test_an_abort_removes_what_was_staged_and_never_what_was_committed():
    shop = Shop()
    staged = shop.stage(batch_of([b"a"]))
    shop.sink().abort([None, staged])
    assert not shop.disk.exists(f"{ROOT}/staging/query")
    staged = shop.stage(batch_of([b"a"]))
    shop.commit(staged)
    shop.sink().abort([staged])
    assert shop.values() == [b"a"]
    shop.write(batch_of([b"again"]))
    assert shop.values() == [b"a"]


def test_what_was_staged_and_never_committed_goes_after_a_week():
    shop = Shop()
    shop.stage(batch_of([b"left"]), write="dead")
    shop.clock.advance(ms=6 * DAY_MS)
    shop.write(batch_of([b"a"]), batch=0)
    assert len(list(shop.files())) == 2
    shop.clock.advance(ms=2 * DAY_MS)
    shop.write(batch_of([b"b"]), batch=1)
    assert list(shop.files()) == ["query/done.json"]


def committed(shop: Shop, write: str, *values: bytes) -> None:
    """A commit that was stopped as soon as it counted."""
    staged = shop.stage(batch_of([*values]), write=write)
    with shop.broker() as broker:
        manifest = _manifest(broker._port.engine, CommitRequest(write_id=write, batch=0, files=staged.files))
        Staging(shop.world, ROOT).note_manifest(manifest)


def test_a_commit_that_was_cut_short_is_finished_by_whoever_commits_next():
    shop = Shop()
    committed(shop, "first", b"a", b"b")
    assert shop.values() == []
    shop.write(batch_of([b"c"]), write="second")
    assert shop.values() == [b"a", b"b", b"c"]
    shop.write(batch_of([b"a", b"b"]), write="first")
    assert shop.values() == [b"a", b"b", b"c"]


def test_a_commit_that_cannot_be_finished_stops_none_but_its_own_write():
    shop = Shop()
    committed(shop, "first", b"a")
    for name in [name for name in shop.files() if name.endswith(".frames")]:
        shop.disk.remove(f"{ROOT}/staging/{name}")
    shop.write(batch_of([b"c"]), write="second")
    assert shop.values() == [b"c"]
    with pytest.raises(HoldfastError, match="first/0/"):
        shop.write(batch_of([b"a"]), write="first")
    assert shop.values() == [b"c"]


def test_delayed_rows_wait_for_their_time():
    shop = Shop()
    delays = pa.array([Decimal("60.0"), None, Decimal(0)])
    shop.write(batch_of([b"later", b"now", b"too"], delay=delays))
    assert shop.values() == [b"now", b"too"]
    shop.clock.advance(ms=61_000)
    with shop.broker() as broker:
        broker._port.engine.topic("orders").tick()
    assert shop.values() == [b"now", b"too", b"later"]


def test_rows_with_a_dedup_id_are_written_once_within_the_window():
    shop = Shop()
    shop.write(batch_of([b"a", b"b", b"again"], dedup_id=["1", None, "1"]), batch=0)
    shop.write(batch_of([b"other"], dedup_id=["1"]), batch=1)
    assert sorted(shop.values()) == [b"a", b"b"]


def test_a_traced_topic_traces_what_spark_writes():
    shop = Shop(trace_sample=1.0)
    shop.write(batch_of([b"a"]))
    with shop.broker() as broker:
        assert [step.step for step in broker.trace("orders-0-0")] == ["published"]


def test_the_groups_of_a_topic_know_how_urgent_the_rows_are():
    shop = Shop()
    with shop.broker() as broker:
        broker.group("orders", "workers")
    shop.write(batch_of([b"low", b"high"], priority=pa.array([0, 9], pa.int32())))
    with shop.broker() as broker:
        group = broker.group("orders", "workers")
        assert [message.body for message in group.receive_many(2)] == [b"high", b"low"]


def test_the_settings_of_the_topic_count():
    shop = Shop(ttl_ms=5_000, codec="zstd", frame_bytes=2_048, max_message_bytes=1_000)
    shop.write(batch_of([b"x" * 500] * 20))
    records = shop.records()[0]
    assert {record.expires_at_ms for record in records} == {records[0].timestamp_ns // 1_000_000 + 5_000}
    with shop.broker() as broker:
        frames = list(broker._port.engine.topic("orders").partitions[0].log.read(0))
        assert len(frames) == 5
        assert {frame.header.codec for frame in frames} == {1}
    with pytest.raises(MessageTooLarge, match="1001 bytes"):
        shop.stage(batch_of([b"x" * 1001]))
    assert not [name for name in shop.files() if name.endswith(".frames")]


def test_a_compacted_topic_takes_rows_without_a_value_as_tombstones():
    shop = Shop(cleanup="compact")
    shop.write(batch_of([None], key=[b"k"]))
    assert [record.flags & 1 for record in shop.records()[0]] == [1]
    with pytest.raises(InvalidRequest, match="tombstone needs a key"):
        shop.stage(batch_of([None, b"a"], key=[None, b"k"]))
    with pytest.raises(InvalidRequest, match="have no value"):
        Shop().stage(batch_of([None], key=[b"k"]))


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({"priority": pa.array([10], pa.int32())}, "priority 10"),
        ({"delay": pa.array([-1.0])}, "a delay cannot be used"),
        ({"delay": pa.array([float("nan")])}, "a delay cannot be used"),
        ({"ttl": pa.array([0.0])}, "a ttl is 0"),
        ({"dedup_id": pa.array([""])}, "a dedup_id is empty"),
        ({"headers": pa.array([[("holdfast.x", b"1")]], PAIRS)}, "are reserved"),
        ({"headers": pa.array([[("x", None)]], PAIRS)}, "no value"),
    ],
)
def test_a_row_that_cannot_be_a_message_fails_its_task(columns, why):
    shop = Shop()
    with pytest.raises(InvalidRequest, match=why):
        shop.stage(batch_of([b"a"], **columns))
    assert list(shop.files()) == []


def test_a_folder_that_is_owned_is_refused_with_its_owner():
    shop = Shop()
    staged = shop.stage(batch_of([b"a"]))
    with shop.broker(), pytest.raises(Busy, match="owned by process 1 on simulation"):
        shop.commit(staged)
    shop.commit(staged)
    assert shop.values() == [b"a"]


def test_a_spoiled_staging_file_is_found():
    shop = Shop()
    staged = shop.stage(batch_of([b"a" * 100]))
    (name,) = shop.files()
    file = shop.disk.open(f"{ROOT}/staging/{name}", write=True)
    file.write(120, [b"?"])
    file.close()
    with pytest.raises(CorruptData, match="does not match its checksum"):
        shop.commit(staged)
    assert shop.values() == []


def test_a_topic_that_was_made_anew_gets_no_rows_that_were_for_the_old_one():
    shop = Shop()
    staged = shop.stage(batch_of([b"a"]))
    with shop.broker() as broker:
        broker.delete_topic("orders")
        broker.create_topic("orders")
    with pytest.raises(UnknownTopic, match="deleted and recreated"):
        shop.commit(staged)
    assert shop.values() == []


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ("value binary, price double", "column 'price' cannot be written"),
        ("value int", "column 'value' is int; it must be binary or string"),
        ("key string", "no column 'value' among key"),
        ("value string, headers array<string>", "column 'headers' is array<string>"),
        ("value string, headers map<int,string>", "column 'headers' is map<int,string>"),
        ("value string, delay double, due_at timestamp", "'delay' and 'due_at'"),
        ("value string, due_at timestamp_ntz", "it must be timestamp"),
    ],
)
def test_a_data_frame_that_cannot_be_written_is_refused_by_column(schema, why):
    with pytest.raises(InvalidRequest, match=why):
        check_columns(_schema(schema), has_topic=True)


def test_a_data_frame_must_say_where_to():
    with pytest.raises(InvalidRequest, match='option "topic"'):
        check_columns(_schema("value binary"), has_topic=False)
    check_columns(_schema("value string, topic string, headers map<string,binary>, ttl bigint"), has_topic=False)


def _schema(text: str) -> t.StructType:
    """A schema from text; Spark's own parser needs a JVM."""
    kinds = {
        "binary": t.BinaryType(),
        "string": t.StringType(),
        "double": t.DoubleType(),
        "int": t.IntegerType(),
        "bigint": t.LongType(),
        "timestamp": t.TimestampType(),
        "timestamp_ntz": t.TimestampNTZType(),
        "array<string>": t.ArrayType(t.StringType()),
        "map<int,string>": t.MapType(t.IntegerType(), t.StringType()),
        "map<string,binary>": t.MapType(t.StringType(), t.BinaryType()),
    }
    fields = [part.split(" ") for part in text.split(", ")]
    return t.StructType([t.StructField(name, kinds[kind]) for name, kind in fields])


def test_many_tasks_may_make_the_same_folder_at_once(tmp_path):
    disk, start = RealDisk(), threading.Barrier(8)
    failures: list[OSError] = []

    def make(folder: str) -> None:
        start.wait()
        try:
            disk.make_folder(folder)
        except OSError as error:
            failures.append(error)

    for attempt in range(20):
        tasks = [threading.Thread(target=make, args=(f"{tmp_path}/{attempt}/a/b/c",)) for _ in range(8)]
        for task in tasks:
            task.start()
        for task in tasks:
            task.join()
    assert failures == []
