"""A Spark program of its own whose Python workers are killed, and which may be killed itself.

    python frail_stream.py FOLDER OUT batch|stream|all

`batch` counts the messages, `all` streams them until there are no more; both with workers that kill themselves.
`stream` streams for ever in small bites.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession

from holdfast.spark.session import session


def frail(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Hand on what comes; the first attempt of a task ends in the middle of it."""
    for batch in batches:
        context = TaskContext.get()
        assert context is not None
        if context.attemptNumber() == 0 and context.partitionId() % 2 == 0:
            yield batch.slice(0, batch.num_rows // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        yield batch


def read(reader: Any, folder: str, **options: str) -> DataFrame:
    rows = reader.format("holdfast").schema("partition int, offset long").options(path=folder, topic="orders")
    return rows.options(startingOffsets="earliest", minPartitions="4", **options).load()


def with_frail_workers(rows: DataFrame) -> DataFrame:
    return rows.mapInArrow(frail, rows.schema)


def run(spark: SparkSession, folder: str, out: str, what: str) -> None:
    if what == "batch":
        rows = [(row.partition, row.offset) for row in with_frail_workers(read(spark.read, folder)).collect()]
        sys.stdout.write(f"{len(rows)} rows, {len(set(rows))} different ones\n")
        return
    if what == "all":
        skipping = {"maxOffsetsPerTrigger": "150", "failOnDataLoss": "false"}
        writing = with_frail_workers(read(spark.readStream, folder, **skipping)).writeStream.trigger(availableNow=True)
    else:
        limited = read(spark.readStream, folder, maxOffsetsPerTrigger="60")
        writing = limited.writeStream.trigger(processingTime="0 seconds")
    checkpoint = str(Path(out).with_name("checkpoint"))
    writing.format("parquet").option("path", out).option("checkpointLocation", checkpoint).start().awaitTermination()


if __name__ == "__main__":
    folder, out, *acts = sys.argv[1:]
    java = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
    frail_session = session("frail", "local[2,4]", **java)
    for act in acts:
        run(frail_session, folder, out, act)
