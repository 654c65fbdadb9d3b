"""Reading as Spark's tasks do, beside an owner that writes: no lock, no torn frame, every batch whole or not at all."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import StructType

import holdfast
from holdfast.broker.streams.queries import list_queries
from holdfast.env import real_world
from holdfast.spark.readers import BatchReader, MicroBatchReader, message_schema
from tests.spark.owner import Owner, make_folder

SCHEMA = StructType(
    [field for field in message_schema(metadata=False, headers=False) if field.name in ("value", "partition", "offset")]
)


def rows_of(folder: str, **options: str) -> list[tuple[int, int, bytes]]:
    """What a batch read finds, from several tasks."""
    given = CaseInsensitiveDict({"path": folder, "topic": "orders", "minPartitions": "5", **options})
    reader = BatchReader(given, SCHEMA)
    return [
        (row["partition"], row["offset"], row["value"])
        for split in reader.partitions()
        for batch in reader.read(split)
        for row in batch.to_pylist()
    ]


@pytest.mark.slow
def test_every_batch_is_seen_whole_or_not_at_all(tmp_path: Path, scale: Callable[[int, int], int]) -> None:
    folder = str(tmp_path / "shop")
    make_folder(folder, hasty=False)
    seen, reads = 0, 0
    with Owner(folder, pause_s=0.001) as owner:
        until = time.monotonic() + scale(4, 120)
        while time.monotonic() < until:
            rows = rows_of(folder)
            check(rows)
            assert len(rows) >= seen
            seen, reads = len(rows), reads + 1
        ends = owner.stop()
    rows = rows_of(folder)
    check(rows)
    assert len(rows) == sum(end for _, end in ends["orders"])
    assert reads > 1


def check(rows: list[tuple[int, int, bytes]]) -> None:
    next_offset: dict[int, int] = defaultdict(int)
    parts: dict[int, list[int]] = defaultdict(list)
    wanted: dict[int, int] = {}
    for partition, offset, value in rows:
        assert offset == next_offset[partition]
        next_offset[partition] += 1
        batch, place, count = map(int, value.rstrip(b"\0").replace(b"/", b" ").split())
        parts[batch].append(place)
        wanted[batch] = count
    for batch, places in parts.items():
        assert places == list(range(wanted[batch])), f"batch {batch} was seen in part"


def test_what_a_stream_has_not_read_stays_pinned_however_it_ends(tmp_path: Path) -> None:
    folder = str(tmp_path / "shop")
    make_folder(folder, hasty=False)
    given = CaseInsensitiveDict({"path": folder, "topic": "orders", "pinTimeout": "2d", "groupId": "lake"})
    reader = MicroBatchReader(given, SCHEMA)
    reader.initialOffset()
    reader.stop()
    del reader
    [query] = list_queries(real_world(), folder)
    assert (query.group, query.ttl_ms, query.stale) == ("lake", 2 * 24 * 3_600_000, False)


def test_a_query_without_a_group_of_its_own_is_named_by_its_prefix(tmp_path: Path) -> None:
    folder = str(tmp_path / "shop")
    make_folder(folder, hasty=False)
    for given in ({}, {"groupIdPrefix": "nightly"}, {"groupIdPrefix": "nightly"}):
        MicroBatchReader(CaseInsensitiveDict({"path": folder, "topic": "orders", **given}), SCHEMA).initialOffset()
    names = [query.group for query in list_queries(real_world(), folder)]
    assert len(set(names)) == 3
    assert sorted(name.rpartition("-")[0] for name in names) == ["nightly", "nightly", "spark"]
    wrong = CaseInsensitiveDict({"path": folder, "topic": "orders", "groupIdPrefix": "a/b"})
    with pytest.raises(holdfast.InvalidRequest, match="groupIdPrefix"):
        MicroBatchReader(wrong, SCHEMA).initialOffset()


def test_a_small_batch_waits_for_more_messages_or_for_the_time_that_was_given(tmp_path: Path) -> None:
    with holdfast.open_broker(tmp_path) as broker:
        broker.create_topic("orders")
        given = {"path": str(tmp_path), "topic": "orders", "startingOffsets": "earliest", "minOffsetsPerTrigger": "10"}

        def offset(of: dict[str, Any]) -> int:
            return int(of["topics"]["orders"]["partitions"]["0"]["offset"])

        def grown(reader: MicroBatchReader, start: dict[str, Any], more: int) -> dict[str, Any]:
            broker.publish_many("orders", [b"x"] * more)
            return reader.latestOffset(start, ReadAllAvailable())

        patient = MicroBatchReader(CaseInsensitiveDict({**given, "maxTriggerDelay": "1h"}), SCHEMA)
        first = grown(patient, patient.initialOffset(), 1)
        assert offset(first) == 1  # the first batch does not wait
        assert grown(patient, first, 9) == first
        assert offset(grown(patient, first, 1)) == 11
        hasty = MicroBatchReader(CaseInsensitiveDict({**given, "maxTriggerDelay": "0s"}), SCHEMA)
        second = grown(hasty, hasty.initialOffset(), 1)
        assert offset(grown(hasty, second, 1)) == offset(second) + 1
        ends = MicroBatchReader(CaseInsensitiveDict({**given, "maxTriggerDelay": "1h"}), SCHEMA)
        ends.prepareForTriggerAvailableNow()  # a run that ends takes what is there
        third = ends.latestOffset(second, ReadAllAvailable())
        assert offset(third) == offset(second) + 1


WITHOUT_PANDAS = """
import sys
from holdfast.spark.readers import BatchReader, message_schema
reader = BatchReader({"path": sys.argv[1], "topic": "orders"}, message_schema(metadata=False, headers=False))
print(sum(batch.num_rows for part in reader.partitions() for batch in reader.read(part)), "pandas" in sys.modules)
"""


def test_a_fresh_worker_reads_without_waiting_for_pandas(tmp_path: Path) -> None:
    with holdfast.open_broker(tmp_path) as broker:
        broker.create_topic("orders")
        broker.publish_many("orders", [holdfast.NewMessage(body=b"x", key="a", ttl=3600, priority=3)] * 2000)
        command = [sys.executable, "-c", WITHOUT_PANDAS, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "2000 False\n", done.stderr
