"""What a task holds while it reads: a batch or two, however large the segment is and however it is compressed."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

import pyarrow as pa

import holdfast
from holdfast.model import CodecName
from holdfast.settings import BrokerSettings, TopicSettings
from holdfast.spark.options import ReadPolicy
from holdfast.spark.ranges import DataFolder, Range
from holdfast.spark.readers import _MOST_BYTES, Maker, message_schema, record_batches

MESSAGES, SIZE = 64_000, 1000


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_reading_a_large_segment_holds_about_a_batch(tmp_path: Path, codec: CodecName) -> None:
    folder = str(tmp_path / "shop")
    topic = TopicSettings(min_free_bytes=0, segment_bytes=128 << 20)
    with holdfast.open_broker(folder, settings=BrokerSettings(topic=topic), durability="os") as broker:
        broker.create_topic("orders")
        for _ in range(MESSAGES // 1000):
            broker.publish_many("orders", [bytes(SIZE)] * 1000, codec=codec)
    maker = Maker(message_schema(metadata=True, headers=True))
    list(
        record_batches(DataFolder(folder), Range("orders", 0, 0, 1), maker, ReadPolicy())
    )  # what is loaded at first use
    before, rows, most = pa.total_allocated_bytes(), 0, 0
    tracemalloc.start()
    try:
        for batch in record_batches(DataFolder(folder), Range("orders", 0, 0, MESSAGES), maker, ReadPolicy()):
            rows += batch.num_rows
            most = max(most, pa.total_allocated_bytes() - before)
        python_peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert rows == MESSAGES
    assert most + python_peak < 2.5 * _MOST_BYTES, (most, python_peak)


def test_what_is_loaded_is_taken_out_of_collections_once() -> None:
    script = (
        "import gc\n"
        "from holdfast.env.process import skip_modules_in_collections as skip\n"
        "skip()\n"
        "before = gc.get_freeze_count()\n"
        "kept = [[number] for number in range(1000)]\n"
        "skip()\n"
        "print(before > 1000, gc.get_freeze_count() <= before)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]
