"""Workers and drivers that are killed, and messages that are gone: what a stream has delivered then."""

from __future__ import annotations

import os
import random
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from crc32c import crc32c
from pyspark.errors import PythonException, StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

import holdfast
from holdfast.codec.frame import HEADER_BYTES, VERSION
from holdfast.settings import BrokerSettings, TopicSettings

HERE = Path(__file__).resolve().parent
SMALL = BrokerSettings(topic=TopicSettings(segment_bytes=4096, min_free_bytes=0))


class Shop:
    """A folder, a checkpoint and what was delivered."""

    def __init__(self, root: Path) -> None:
        self.folder, self.out, self.checkpoint = (str(root / name) for name in ("shop", "out", "checkpoint"))
        self.published = [0, 0]
        with holdfast.open_broker(self.folder, settings=SMALL) as broker:
            broker.create_topic("orders", partitions=2)

    def publish(self, count: int) -> None:
        with holdfast.open_broker(self.folder, settings=SMALL, durability="os") as broker:
            for partition in range(2):
                for _ in range(count // 10):
                    broker.publish_many("orders", [bytes(100)] * 10, partition=partition)
                self.published[partition] += count

    def trim(self) -> list[int]:
        """Retention takes all that it can; answers where the partitions begin then."""
        with holdfast.open_broker(self.folder, settings=SMALL) as broker:
            broker.alter_topic("orders", retention_segments=1)
            logs = [broker._port.engine.topic("orders").partition(number).log for number in range(2)]
            for log in logs:
                log.retain()
            return [log.start for log in logs]

    def program(self, *acts: str) -> subprocess.Popen[str]:
        """The frail program, in a group of its own."""
        paths = os.pathsep.join(filter(None, [str(HERE.parents[1]), os.environ.get("PYTHONPATH")]))
        return subprocess.Popen(
            [sys.executable, str(HERE / "frail_stream.py"), self.folder, self.out, *acts],
            cwd=Path(self.folder).parent,
            env={**os.environ, "PYTHONPATH": paths},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def commits(self) -> int:
        return len([name for name in os.listdir(f"{self.checkpoint}/commits") if name.isdigit()])

    def start(self, spark: SparkSession, **options: str) -> StreamingQuery:
        given = {"path": self.folder, "topic": "orders", "startingOffsets": "earliest", **options}
        rows = spark.readStream.format("holdfast").schema("partition int, offset long").options(**given).load()
        writing = rows.writeStream.format("parquet").option("path", self.out)
        return writing.option("checkpointLocation", self.checkpoint).trigger(availableNow=True).start()

    def delivered(self, spark: SparkSession) -> list[tuple[int, int]]:
        return sorted((row.partition, row.offset) for row in spark.read.parquet(self.out).collect())

    def wanted(self) -> list[tuple[int, int]]:
        return [(partition, offset) for partition in range(2) for offset in range(self.published[partition])]


def end(program: subprocess.Popen[str]) -> tuple[str, str]:
    """Kill it with all that it started; answers what it wrote."""
    os.killpg(program.pid, signal.SIGKILL)
    return program.communicate()


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


def test_workers_that_are_killed_double_nothing_and_what_is_gone_is_counted(spark: SparkSession, shop: Shop) -> None:
    shop.publish(10)
    shop.start(spark, pinTimeout="1s").awaitTermination()
    shop.publish(150)
    first = [0, 0]
    while min(first) <= 10:  # until the pin of the query that has ended does not count any more
        first = shop.trim()
    with pytest.raises(StreamingQueryException) as refused:
        shop.start(spark).awaitTermination()
    assert f"{first[0] - 10} messages of orders/0 are gone: retention removed those before" in str(refused.value)
    assert "Traceback" not in str(refused.value)

    program = shop.program("batch", "all")
    output, errors = program.communicate(timeout=200)
    assert program.returncode == 0, errors[-3000:]
    there = [(partition, offset) for partition in range(2) for offset in range(first[partition], 160)]
    assert output == f"{len(there)} rows, {len(there)} different ones\n"
    assert "aborted" in errors, "no worker was killed"
    for partition in range(2):
        lost = f"{first[partition] - 10} messages of orders/{partition} are gone, offsets 10 to {first[partition] - 1}"
        assert errors.count(lost) == 1
    assert shop.delivered(spark) == sorted({*there, *((partition, n) for partition in range(2) for n in range(10))})


@pytest.mark.timeout(900)
def test_a_driver_that_is_killed_doubles_nothing(spark: SparkSession, shop: Shop, long: bool) -> None:
    rng = random.Random(5)
    shop.publish(600)
    os.makedirs(f"{shop.checkpoint}/commits")
    for _ in range(30 if long else 3):
        program, before = shop.program("stream"), shop.commits()
        try:
            while shop.commits() == before:
                assert program.poll() is None, program.communicate()[1][-3000:]
                time.sleep(0.02)
            time.sleep(rng.uniform(0, 1.5))
        finally:
            end(program)
        shop.publish(50)
    shop.start(spark).awaitTermination()
    assert shop.delivered(spark) == shop.wanted()


def test_a_folder_of_a_newer_format_is_refused_in_one_sentence(spark: SparkSession, shop: Shop) -> None:
    with holdfast.open_broker(shop.folder) as broker:
        broker.publish("orders", b"x", partition=0)
    [segment] = Path(shop.folder, "topics/orders/0/log").glob("*.log")
    content = bytearray(segment.read_bytes())
    content[3] = VERSION + 1
    struct.pack_into("<I", content, HEADER_BYTES - 4, crc32c(bytes(content[: HEADER_BYTES - 4])))
    segment.write_bytes(content)
    rows = spark.read.format("holdfast").schema("offset long").options(path=shop.folder, topic="orders").load()
    with pytest.raises(PythonException) as refused:
        rows.collect()
    assert "orders/0" in str(refused.value)
    assert "written by a newer release; upgrade to read it" in str(refused.value)
    assert "Traceback" not in str(refused.value)
