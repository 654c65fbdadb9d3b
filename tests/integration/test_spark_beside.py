"""Reading as Spark's tasks do, beside an owner that writes: no lock, no torn frame, every batch whole or not at all."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.types import StructType

from holdfast.broker.streams.queries import list_queries
from holdfast.env import real_world
from holdfast.spark.readers import BatchReader, MicroBatchReader, message_schema
from tests.spark.owner import Owner, make_folder

SCHEMA = StructType(
    [field for field in message_schema(headers=False) if field.name in ("value", "partition", "offset")]
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
