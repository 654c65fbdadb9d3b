"""A stream over many restarts beside an owner that publishes, adds partitions, compacts and drops what is old."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

from holdfast.spark.ranges import DataFolder
from tests.spark.owner import Owner, make_folder

SLOW = "failed to connect back"
COLUMNS = "topic string, partition int, offset long, key string, value string"


class Lake:
    """Where the query's rows go, and what it may read at a time."""

    def __init__(self, spark: SparkSession, root: Path) -> None:
        self.spark = spark
        self.folder = str(root / "shop")
        self.out = str(root / "out")
        self.checkpoint = str(root / "checkpoint")

    def start(self, most: str = "400", **trigger: Any) -> StreamingQuery:
        options = {"path": self.folder, "subscribe": "orders,state", "startingOffsets": "earliest"}
        # From the end of one run to the first call of the next a busy machine may take half a minute.
        limits = {"maxOffsetsPerTrigger": most, "pinTimeout": "60s", "groupId": "lake", "minPartitions": "3"}
        rows = self.spark.readStream.format("holdfast").schema(COLUMNS).options(**options, **limits).load()
        writing = rows.writeStream.format("parquet").option("path", self.out)
        return writing.option("checkpointLocation", self.checkpoint).trigger(**trigger).start()

    def drain(self, most: str = "400") -> None:
        """Read all that is there. Spark gives its Python ten seconds to come up, and ends the query on a busy machine:
        one more end in the middle of anything, behind which it begins again.
        """
        while True:
            try:
                self.start(most, availableNow=True).awaitTermination()
            except StreamingQueryException as error:
                if SLOW not in str(error):
                    raise
            else:
                return

    def trimmed(self) -> bool:
        """Whether retention has taken something."""
        reader = DataFolder(self.folder).reader("orders", 0)
        return reader is not None and reader.start > 0

    def rows_of_files(self) -> list[list[dict[str, Any]]]:
        """What each task wrote, in the order in which it got it; only files that the sink has committed."""
        files = self.spark.read.parquet(self.out).inputFiles()
        return [pq.read_table(file.removeprefix("file:").replace("///", "/")).to_pylist() for file in files]


def beside(spark: SparkSession, folder: str) -> None:
    """A batch read finds what is there at the moment, in order."""
    rows = spark.read.format("holdfast").schema("partition int, offset long").option("path", folder)
    found = rows.option("topic", "orders").option("failOnDataLoss", "false").load().collect()
    last: dict[int, int] = defaultdict(lambda: -1)
    for row in found:
        assert row.offset > last[row.partition]
        last[row.partition] = row.offset


@pytest.mark.timeout(1800)
def test_each_offset_comes_once_whatever_happens_meanwhile(
    spark: SparkSession, tmp_path: Path, scale: Callable[[int, int], int]
) -> None:
    lake, rng = Lake(spark, tmp_path), random.Random(11)
    make_folder(lake.folder, hasty=True)
    lake.drain()  # from now on nothing goes that it has not read
    with Owner(lake.folder, grow_s=6, pause_s=0.05) as owner:
        until = time.monotonic() + scale(35, 600)
        while time.monotonic() < until or not lake.trimmed():
            if rng.random() < 0.3:
                lake.drain("none")
                beside(spark, lake.folder)
            else:
                query = lake.start(processingTime="0 seconds")
                try:
                    query.awaitTermination(timeout=rng.uniform(0.5, 5))  # it may be in the middle of anything
                except StreamingQueryException as error:
                    assert SLOW in str(error)
                query.stop()
        ends = owner.stop()
    lake.drain("none")
    assert len(ends["orders"]) > 2
    assert any(start for start, _ in ends["orders"])
    check(lake.rows_of_files(), ends)


def check(files: list[list[dict[str, Any]]], ends: dict[str, list[tuple[int, int]]]) -> None:
    found: dict[tuple[str, int], dict[int, dict[str, Any]]] = defaultdict(dict)
    for rows in files:
        last: dict[tuple[str, int], int] = defaultdict(lambda: -1)
        for row in rows:
            place, offset = (row["topic"], row["partition"]), row["offset"]
            assert offset > last[place], "out of order"
            assert offset not in found[place], "came twice"
            found[place][offset], last[place] = row, offset
    for partition, (_, end) in enumerate(ends["orders"]):
        assert sorted(found["orders", partition]) == list(range(end))
    # Of a compacted topic the last of each key must be there, and of those before it what was not compacted yet.
    state = found["state", 0]
    assert max(state) == ends["state"][0][1] - 1
    assert {row["key"] for row in state.values()} == {str(key) for key in range(20)}
