"""What Spark reads of a topic of which one partition is lost."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from pyspark.sql.datasource import CaseInsensitiveDict

import holdfast
from holdfast.errors import CorruptData
from holdfast.spark.options import batch_read_options, stream_read_options
from holdfast.spark.ranges import DataFolder, StreamPlanner, batch_ranges

LOST = r"orders/1/log is missing: its messages are lost.*--part topics/orders/1/log"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    with holdfast.open_broker(tmp_path / "data", durability="os") as broker:
        broker.create_topic("orders", partitions=4)
        for number in range(3):
            broker.publish_many("orders", [b"a", b"b"], partition=number)
    shutil.rmtree(tmp_path / "data/topics/orders/1/log")
    return tmp_path / "data"


def given(data: Path, **options: str) -> CaseInsensitiveDict:
    return CaseInsensitiveDict({"path": str(data), "topic": "orders", "startingOffsets": "earliest", **options})


def test_a_batch_fails_and_says_which_partition_is_lost_and_how_to_read_the_others(data):
    with pytest.raises(CorruptData, match=f'{LOST}.*"failOnDataLoss" to false'):
        batch_ranges(DataFolder(str(data)), batch_read_options(given(data), 0))


def test_a_batch_that_may_lose_messages_reads_the_other_partitions(data, caplog):
    with caplog.at_level(logging.WARNING):
        found = batch_ranges(DataFolder(str(data)), batch_read_options(given(data, failOnDataLoss="false"), 0))
    assert [(each.partition, each.start, each.stop) for each in found] == [(0, 0, 2), (2, 0, 2)]
    assert "orders/1 is lost and was skipped" in caplog.text


@pytest.mark.parametrize("fail", ["true", "false"])
def test_a_stream_waits_for_the_partition_rather_than_pass_over_it(data, fail):
    """Its positions would go on without the partition, and read all of it again when it is restored."""
    options = stream_read_options(given(data, failOnDataLoss=fail), 0)
    with pytest.raises(CorruptData, match=LOST):
        StreamPlanner(DataFolder(str(data)), options).initial()
