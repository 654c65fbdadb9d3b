"""Rows that Spark gets equal the messages that the log holds, whatever they are made of."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")

from holdfast.broker.folder.contents import Catalog  # noqa: E402
from holdfast.env import ManualClock, SeededIds, World  # noqa: E402
from holdfast.env.sim.disk import SimulatedDisk  # noqa: E402
from holdfast.model import Batch, Producer, Record  # noqa: E402
from holdfast.settings import TopicSettings  # noqa: E402
from holdfast.spark.options import ReadPolicy  # noqa: E402
from holdfast.spark.ranges import DataFolder, Range  # noqa: E402
from holdfast.spark.readers import COLUMNS, Maker, message_schema, record_batches  # noqa: E402
from holdfast.storage import Log  # noqa: E402

ROOT = "/data"
FOLDER = f"{ROOT}/topics/orders/0/log"
SCHEMA = message_schema(metadata=True, headers=True)

small = st.binary(max_size=20)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@st.composite
def batches(draw: st.DrawFn, counts: tuple[int, ...] = (1, 2, 3, 31, 32, 33, 40)) -> tuple[Batch, str, Producer]:
    count = draw(st.sampled_from(counts))

    def column(items: st.SearchStrategy[Any]) -> Any:
        return draw(st.none() | st.lists(items, min_size=count, max_size=count))

    batch = Batch(
        values=draw(st.lists(small, min_size=count, max_size=count)),
        times_ns=column(st.integers(0, 2**60)),
        keys=column(st.none() | small),
        headers=column(st.lists(st.tuples(names, small), max_size=3).map(tuple)),
        priorities=column(st.integers(0, 9)),
        expires_at_ms=column(st.sampled_from([0, 1, 2**40])),
        due_at_ms=column(st.sampled_from([0, 1, 2**40])),
        flags=column(st.sampled_from([0, 1])),
    )
    producer = draw(st.sampled_from([Producer(), Producer(7, 2, 5), Producer(2**64 - 1, 0, 2**32 - 2)]))
    return batch, draw(st.sampled_from(["none", "zstd", "lz4", "gzip"])), producer


def folder_with(stored: list[tuple[Batch, str, Producer]], **settings: Any) -> tuple[DataFolder, Log]:
    world = World(clock=ManualClock(), disk=SimulatedDisk(), ids=SeededIds(1))
    Catalog(world, ROOT).create("orders", TopicSettings(), TopicSettings())
    log = Log.open(FOLDER, TopicSettings(min_free_bytes=0, codec_min_bytes=1, **settings), world)
    for batch, codec, producer in stored:
        log.append(batch, codec=codec, producer=producer)
    return DataFolder(ROOT, world), log


def rows_of(folder: DataFolder, start: int, stop: int, schema: Any = SCHEMA, **reading: Any) -> list[dict[str, Any]]:
    found = record_batches(folder, Range("orders", 0, start, stop), Maker(schema), ReadPolicy(**reading))
    return [row for batch in found for row in batch.to_pylist()]


def micros(moment: Any) -> int | None:
    return None if moment is None else pa.scalar(moment, pa.timestamp("us", tz="UTC")).value


def expected(record: Record, producer: Producer, place: int) -> dict[str, Any]:
    known = producer.id != 0
    signed = producer.id - 2**64 if producer.id >= 2**63 else producer.id
    return {
        "key": record.key,
        "value": record.value,
        "topic": "orders",
        "partition": 0,
        "offset": record.offset,
        "timestamp": record.timestamp_ns // 1000,
        "priority": record.priority,
        "expires_at": record.expires_at_ms * 1000 or None,
        "due_at": record.due_at_ms * 1000 or None,
        "tombstone": bool(record.flags & 1),
        "producer_id": signed if known else None,
        "producer_epoch": producer.epoch if known else None,
        "sequence": (producer.first_sequence + place) % 2**32 if known else None,
        "epoch": record.epoch,
        "headers": [{"key": name, "value": value} for name, value in record.headers],
    }


def comparable(row: dict[str, Any]) -> dict[str, Any]:
    return {
        name: micros(value) if COLUMNS[name].types[0].typeName() == "timestamp" else value
        for name, value in row.items()
    }


@pytest.mark.slow
@given(st.lists(batches(), min_size=1, max_size=6), st.data())
def test_rows_equal_messages_for_every_mix_of_columns_codecs_and_frames(
    stored: list[tuple[Batch, str, Producer]], data: st.DataObject
) -> None:
    folder, log = folder_with(stored, segment_bytes=4096)
    producers = [(producer, place) for batch, _, producer in stored for place in range(len(batch.values))]
    wanted = [
        expected(record, producer, place) for record, (producer, place) in zip(log.records(0), producers, strict=True)
    ]
    start = data.draw(st.integers(0, log.end), "start")
    stop = data.draw(st.integers(start, log.end), "stop")
    assert [comparable(row) for row in rows_of(folder, start, stop)] == wanted[start:stop]


@pytest.mark.slow
@given(st.lists(batches((1,)), min_size=1, max_size=5), st.integers(4, 9), st.data())
def test_many_messages_that_were_published_one_by_one_are_rows_as_well(
    stored: list[tuple[Batch, str, Producer]], times: int, data: st.DataObject
) -> None:
    folder, log = folder_with([each for each in stored for _ in range(times)] * 4)
    names = data.draw(st.sets(st.sampled_from(sorted(COLUMNS)), min_size=1))
    schema = type(SCHEMA)([field for field in SCHEMA.fields if field.name in names])
    wanted = [
        expected(record, stored[place // times % len(stored)][2], 0) for place, record in enumerate(log.records(0))
    ]
    found = [comparable(row) for row in rows_of(folder, 0, log.end, schema)]
    assert found == [{name: row[name] for name in row if name in names} for row in wanted]


@pytest.mark.slow
@given(st.lists(batches(), min_size=1, max_size=4), st.permutations(list(COLUMNS)), st.integers(1, len(COLUMNS)))
def test_a_schema_of_the_users_gets_those_columns_in_that_order(
    stored: list[tuple[Batch, str, Producer]], order: list[str], count: int
) -> None:
    folder, log = folder_with(stored)
    schema = type(SCHEMA)([field for name in order[:count] for field in SCHEMA.fields if field.name == name])
    found = list(record_batches(folder, Range("orders", 0, 0, log.end), Maker(schema), ReadPolicy()))
    assert found[0].schema.names == order[:count]
    everything = rows_of(folder, 0, log.end)
    assert [row for batch in found for row in batch.to_pylist()] == [
        {name: row[name] for name in order[:count]} for row in everything
    ]


@given(st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c"]), small), min_size=1, max_size=80), st.integers(1, 40))
def test_rows_equal_messages_after_key_compaction(messages: list[tuple[bytes, bytes]], size: int) -> None:
    stored = []
    for i in range(0, len(messages), size):
        part = messages[i : i + size]
        stored.append((Batch(values=[v for _, v in part], keys=[k for k, _ in part]), "none", Producer()))
    folder, log = folder_with(stored)
    log.roll()
    log.append([b"last"])
    log.compact_keys(before=log.end, tombstone_ms=0, min_saving_percent=0)
    assert [(row["offset"], row["value"]) for row in rows_of(folder, 0, log.end)] == [
        (record.offset, record.value) for record in log.records(0)
    ]
