"""Spark reads, writes and streams messages; beside it, what Spark does with Parquet. One JVM for all, on two cores."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from bench.child import Sample
from bench.harness import OURS, Case, Operation, Timed
from bench.peers.base import KILL, POWER_CUT
from bench.scale import Scale
from bench.spark.data import LOADED, TOPIC
from bench.spark.host import SparkHost
from bench.targets import FLOOR, PARQUET, PARQUET_ZSTD, RATE

READ = Operation(
    "Spark read",
    "5,000,000 messages (30,000 with --quick) to `noop`: key, value, partition, offset, timestamp.",
    "spark",
)
LOAD = Operation(
    "Spark read, load()",
    "The same messages with the six columns of a plain `load()`; by the function `read()`; and landed, by `table()`.",
    "spark",
)
VALUE = Operation("Spark read, value only", 'The same messages, `.schema("value binary")`.', "spark")
RANDOM = Operation(
    "Spark read, random values",
    "The same with values of random digits only, which compress to half; those above, to a quarter.",
)
PRUNED = Operation("Spark read, offset only", 'The same messages, `.schema("offset long")`.')
SINGLE = Operation(
    "Spark read, published one by one",
    "200,000 messages (3,000 with --quick), each in a frame of its own; and the same in larger frames.",
)
WRITE = Operation(
    "Spark write",
    "2,000,000 rows (20,000 with --quick), key and value, from Parquet. Ours is synced, and exactly once.",
    "spark",
)
STREAM = Operation(
    "Spark micro-batch", "Batches of 100 rows, one after the other: how long one takes.", "latency", most_rounds=3
)
FIRST = Operation(
    "Spark first query",
    "A new process starts a session and counts 200,000 rows (3,000 with --quick): from its start to the answer.",
    "latency",
    most_rounds=5,
)
BESIDE = Operation(
    "Spark beside a publisher",
    "The owner publishes 1,000 a call while Spark scans the topic in a loop, or Parquet, which takes only the cores.",
    "beside",
)
MEMORY = Operation(
    "Spark worker's memory",
    "The most that a Python worker had for itself while it read all messages: mapped files do not count.",
    "memory",
    most_rounds=3,
)

_MANY = 1_000
_CODECS = {PARQUET: "none", PARQUET_ZSTD: "zstd"}


def cases(scale: Scale) -> list[Case]:
    """All with the same host."""
    host = SparkHost(scale)
    return [*_reads(host), *_writes(host), *_streams(host), *_beside(host), *_memory(host)]


def _case(host: SparkHost, operation: Operation, name: str, job: str, survives: str = KILL, **given: Any) -> Case:
    """A case that is one job."""

    @contextmanager
    def prepare(folder: Path) -> Iterator[Timed]:
        yield lambda: host.measure(job, **given)

    return _hosted(host, operation, name, prepare, survives)


def _hosted(host: SparkHost, operation: Operation, name: str, prepare: Any, survives: str) -> Case:
    return Case(operation, name, prepare, survives, needs=("pyspark", "pyarrow", "numpy"), host=host)


def _reads(host: SparkHost) -> Iterator[Case]:
    rows, single = host.scale.spark_rows, host.scale.spark_single_rows
    yield _case(host, READ, OURS, "read", kind="plain", rows=rows)
    yield _case(host, READ, f"{OURS}, 3 partitions", "read", kind="partitions", rows=rows)
    yield _case(host, READ, f"{OURS}, zstd", "read", kind="zstd", rows=rows)
    for name, codec in _CODECS.items():
        yield _case(host, READ, name, "read_parquet", codec=codec, rows=rows)
    yield _case(host, READ, FLOOR, "read_floor", rows=rows)
    yield _case(host, LOAD, OURS, "read_all", rows=rows, how="load()")
    for how in ("read()", "table()"):
        yield _case(host, LOAD, f"{OURS}, {how}", "read_all", rows=rows, how=how)
    yield _case(host, LOAD, PARQUET, "read_parquet", codec="none", rows=rows, columns=LOADED)
    yield _case(host, LOAD, FLOOR, "read_floor", rows=rows, columns=LOADED)
    yield _case(host, VALUE, OURS, "read", kind="plain", rows=rows, columns="value binary")
    yield _case(host, VALUE, PARQUET, "read_parquet", codec="none", rows=rows, columns="value binary")
    yield _case(host, RANDOM, OURS, "read", kind="random", rows=rows)
    for name, codec in _CODECS.items():
        yield _case(host, RANDOM, name, "read_parquet", kind="random", codec=codec, rows=rows)
    yield _case(host, PRUNED, OURS, "read", kind="plain", rows=rows, columns="offset long")
    for name, codec in _CODECS.items():
        yield _case(host, PRUNED, name, "read_parquet", codec=codec, rows=rows, columns="offset long")
    yield _case(host, SINGLE, OURS, "read", kind="single", rows=single)
    yield _case(host, SINGLE, f"{OURS}, a thousand a frame", "read", kind="plain", rows=single)
    yield _case(host, SINGLE, PARQUET, "read_parquet", codec="none", rows=single)


def _writes(host: SparkHost) -> Iterator[Case]:
    rows = host.scale.spark_written_rows
    for name, kind in ((OURS, "plain"), (f"{OURS}, 3 partitions", "partitions"), (f"{OURS}, zstd", "zstd")):
        yield _case(host, WRITE, name, "write", POWER_CUT, kind=kind, rows=rows)
    for name, codec in _CODECS.items():
        yield _case(host, WRITE, name, "write_parquet", codec=codec, rows=rows)


def _streams(host: SparkHost) -> Iterator[Case]:
    yield _case(host, STREAM, OURS, "stream", source="holdfast")
    yield _case(host, STREAM, f"{OURS}, source and sink", "stream", POWER_CUT, source="holdfast", sink="holdfast")
    yield _case(host, STREAM, RATE, "stream", source="rate")
    yield _case(host, STREAM, FLOOR, "stream", source="floor")
    yield _case(host, FIRST, OURS, "first_query", source="holdfast")
    yield _case(host, FIRST, PARQUET, "first_query", source="parquet")


def _memory(host: SparkHost) -> Iterator[Case]:
    yield _case(host, MEMORY, OURS, "worker_memory", kind="plain")
    yield _case(host, MEMORY, f"{OURS}, 512 MiB segments", "worker_memory", kind="large")
    yield _case(host, MEMORY, f"{OURS}, zstd", "worker_memory", kind="zstd")
    yield _case(host, MEMORY, "Spark mapInArrow of Parquet", "worker_memory", kind="")


def _beside(host: SparkHost) -> Iterator[Case]:
    for name, what in (
        (OURS, ""),
        (f"{OURS}, Spark scans the topic", "topic"),
        (f"{OURS}, Spark scans Parquet", "parquet"),
    ):
        yield _hosted(host, BESIDE, name, partial(_publish, host, what), KILL)


@contextmanager
def _publish(host: SparkHost, what: str, folder: Path) -> Iterator[Timed]:
    import holdfast

    scale, data = host.scale, folder / "data"
    bodies = scale.bodies(_MANY)
    with holdfast.open_broker(data, durability="os") as broker:
        broker.create_topic(TOPIC)
        with broker.producer(acks="leader", linger_ms=0, batch_messages=_MANY) as producer:

            def publish(messages: int, seconds: float) -> Sample:
                done, started, cpu_started = 0, time.perf_counter(), time.process_time()
                while done < messages or time.perf_counter() - started < seconds:
                    producer.send_many(TOPIC, bodies).result()
                    done += _MANY
                return Sample(done, time.perf_counter() - started, time.process_time() - cpu_started)

            publish(scale.spark_single_rows, 0)
            with _scanning(host, what, data):
                yield lambda: publish(0, scale.beside_seconds)


def _scanning(host: SparkHost, what: str, data: Path) -> AbstractContextManager[None]:
    if not what:
        return nullcontext()
    return host.meanwhile("scan_beside", data=str(data.resolve()) if what == "topic" else "")
