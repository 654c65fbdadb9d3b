"""What Spark is asked to do. Each job warms up once, and is timed where it runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.child import Sample
from bench.operations.latency import quantile
from bench.scale import Scale
from bench.spark.data import LOADED, TOPIC, fill
from bench.spark.processes import cpu_seconds, end_idle_workers, watched_memory, worker_cpu_seconds

COLUMNS = "key binary, value binary, partition int, offset long, timestamp timestamp"

_FIRST_BATCHES = 5
_LOOK_AGAIN_S = 0.02
_ROWS_A_BATCH = 100
_MOST_IDLE = 20


class Lab:
    """The session, and the data that all samples share: made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._session: Any = None
        self._warm: set[str] = set()
        self._scratch = 0

    @property
    def spark(self) -> Any:
        if self._session is None:
            from holdfast.spark import session

            conf = {
                "spark.driver.memory": "2g",
                "spark.local.dir": str(self.folder / "local"),
                "spark.sql.warehouse.dir": str(self.folder / "warehouse"),
                "spark.sql.streaming.numRecentProgressUpdates": 10_000,
            }
            self._session = session("bench", "local[2]", **conf)
        return self._session

    def close(self) -> None:
        """A JVM that Python started ends when its input does."""
        if self._session is not None:
            jvm = self._session.sparkContext._gateway.proc
            jvm.stdin.close()
            jvm.wait()

    def topic(self, kind: str, scale: Scale) -> Path:
        """The folder of a topic of this kind."""
        place = self.folder / f"topic-{kind}"
        if not place.exists():
            unfinished = self.scratch()
            fill(unfinished, kind, scale)
            unfinished.rename(place)
        return place

    def parquet(self, codec: str, rows: int, scale: Scale, kind: str = "plain") -> Path:
        """The first messages of a topic, in the same columns."""
        place = self.folder / f"parquet-{kind}-{codec}-{rows}"
        if not place.exists():
            messages = self.messages(self.topic(kind, scale), LOADED, rows)
            messages.write.option("compression", codec).parquet(str(place))
        return place

    def messages(self, folder: Path, columns: str = COLUMNS, rows: int | None = None) -> Any:
        """A topic as a DataFrame, planned now."""
        reader = self.spark.read.format("holdfast").schema(columns).option("path", str(folder)).option("topic", TOPIC)
        if rows is not None:
            reader = reader.option("endingOffsets", json.dumps({TOPIC: {"0": rows}}))
        return reader.load()

    def lake(self, scale: Scale) -> Path:
        """The lake in which a pipeline has landed the plain topic."""
        place = self.folder / "lake"
        if not place.exists():
            from holdfast.spark import Pipeline

            Pipeline.land(TOPIC, folder=self.topic("plain", scale), lake=place).run()
        return place

    def scratch(self) -> Path:
        """A folder that is not there yet."""
        self._scratch += 1
        return self.folder / f"scratch-{self._scratch}"

    def warmed_up(self, what: str, once: Callable[[], object]) -> None:
        """Java compiles what runs often: the first run of each kind is nobody's figure."""
        if what not in self._warm:
            self._warm.add(what)
            once()

    def timed(self, work: Callable[[], object], messages: int) -> Sample:
        """CPU time is that of the JVM and of all Python workers together; that of the workers is told, too."""
        root = os.getpid()
        cpu_started, workers_started, started = cpu_seconds(root), worker_cpu_seconds(root), time.perf_counter()
        work()
        seconds = time.perf_counter() - started
        workers = worker_cpu_seconds(root) - workers_started
        return Sample(messages, seconds, cpu_seconds(root) - cpu_started, worker_cpu_seconds=workers)


def read(lab: Lab, *, scale: Scale, kind: str, rows: int, columns: str = COLUMNS, **_: Any) -> Sample:
    """Our source: all columns or some, to nowhere."""
    folder = lab.topic(kind, scale)
    limit = rows if kind == "plain" else None

    def load() -> Any:
        return lab.messages(folder, columns, limit)

    return _timed_read(lab, f"read {kind} {columns} {rows}", load, rows)


def read_all(lab: Lab, *, scale: Scale, rows: int, how: str, **_: Any) -> Sample:
    """The columns of a plain `load()`: by it, by our function, or from the landed table and the log behind it."""
    from holdfast.spark import read as read_topic
    from holdfast.spark import table

    folder = str(lab.topic("plain", scale))
    lake = str(lab.lake(scale)) if how == "table()" else ""

    def load() -> Any:
        if how == "load()":
            return lab.spark.read.format("holdfast").options(path=folder, topic=TOPIC).load()
        if how == "read()":
            return read_topic(TOPIC, folder, spark=lab.spark)
        return table(TOPIC, folder, lake, spark=lab.spark).select(
            "key", "value", "topic", "partition", "offset", "timestamp"
        )

    return _timed_read(lab, f"read by {how}", load, rows)


def first_query(lab: Lab, *, scale: Scale, source: str, **_: Any) -> Sample:
    """A new process that starts a session and counts some rows. The first one, which compiles modules, is not timed."""
    lab.warmed_up(f"first query of {source}", lambda: _first_query(lab, scale, source))
    return _first_query(lab, scale, source)


def _first_query(lab: Lab, scale: Scale, source: str) -> Sample:
    rows = scale.spark_single_rows
    parquet = lab.parquet("none", rows, scale)
    folder = parquet if source == "parquet" else lab.topic("plain", scale)
    command = [sys.executable, "-m", "bench.spark.first", source, str(folder), str(rows)]
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        seconds = time.perf_counter() - started
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if said != b"done\n":
        raise RuntimeError(f"the first query of {source} ended with {process.returncode}")
    return Sample(1, seconds, used.ru_utime + used.ru_stime, p50_ns=1e9 * seconds, p99_ns=1e9 * seconds)


def read_parquet(
    lab: Lab, *, scale: Scale, codec: str, rows: int, columns: str = COLUMNS, kind: str = "plain", **_: Any
) -> Sample:
    """Spark's own source, with the same rows."""
    folder = lab.parquet(codec, rows, scale, kind)

    def load() -> Any:
        return lab.spark.read.schema(columns).parquet(str(folder))

    return _timed_read(lab, f"read Parquet {kind} {codec} {columns} {rows}", load, rows)


def read_floor(lab: Lab, *, scale: Scale, rows: int, columns: str = COLUMNS, **_: Any) -> Sample:
    """A Python source that has its rows ready."""

    def load() -> Any:
        return _floor(lab, lab.spark.read).schema(columns).option("rows", rows).load()

    return _timed_read(lab, f"read the floor {columns} {rows}", load, rows)


def write(lab: Lab, *, scale: Scale, kind: str, rows: int, **_: Any) -> Sample:
    """Our sink: rows from uncompressed Parquet into a new topic."""

    def once() -> Sample:
        folder = lab.scratch()
        fill(folder, kind, scale, rows=0)
        writer = _to_write(lab, rows, scale).write.format("holdfast").mode("append").option("path", str(folder))
        return _written(lab, lambda: writer.option("topic", TOPIC).save(), folder, rows)

    lab.warmed_up(f"write {kind}", once)
    return once()


def write_parquet(lab: Lab, *, scale: Scale, codec: str, rows: int, **_: Any) -> Sample:
    """Spark's own sink, with the same rows."""

    def once() -> Sample:
        folder = lab.scratch()
        writer = _to_write(lab, rows, scale).write.option("compression", codec)
        return _written(lab, lambda: writer.parquet(str(folder)), folder, rows)

    lab.warmed_up(f"write Parquet {codec}", once)
    return once()


def stream(lab: Lab, *, scale: Scale, source: str, sink: str = "noop", **_: Any) -> Sample:
    """Small batches one after the other; how long each took is what Spark says in its progress."""
    scratch = lab.scratch()
    frame = _small_batches(lab, source, scale)
    writer = frame.writeStream.format(sink).option("checkpointLocation", str(scratch / "checkpoint"))
    if sink == "holdfast":
        fill(scratch / "data", "plain", scale, rows=0)
        writer = writer.option("path", str(scratch / "data")).option("topic", TOPIC)
    cpu_started = cpu_seconds(os.getpid())
    query = writer.start()
    try:
        wanted = _FIRST_BATCHES + scale.spark_batches
        while len(batches := _batches_ms(query)) < wanted:
            if not query.isActive:
                raise RuntimeError(f"ended after {len(batches)} batches: {query.exception()}")
            time.sleep(_LOOK_AGAIN_S)
    finally:
        query.stop()
    cpu = cpu_seconds(os.getpid()) - cpu_started
    shutil.rmtree(scratch, ignore_errors=True)
    taken = sorted(1e6 * ms for ms in batches[_FIRST_BATCHES:wanted])
    return Sample(len(taken), sum(taken) / 1e9, cpu, p50_ns=quantile(taken, 0.5), p99_ns=quantile(taken, 0.99))


def scan_beside(lab: Lab, *, scale: Scale, connection: Connection, data: str, **_: Any) -> str:
    """Read all there is, again and again, until told that it is enough; no data folder: Parquet."""
    parquet = None if data else lab.parquet("none", scale.spark_rows, scale)

    def once() -> None:
        if parquet is None:
            _to_nowhere(lab.messages(Path(data)))
        else:
            _to_nowhere(lab.spark.read.schema(COLUMNS).parquet(str(parquet)))

    once()
    connection.send("running")
    while not connection.poll():
        once()
    connection.recv()
    return "ended"


def worker_memory(lab: Lab, *, scale: Scale, kind: str, **_: Any) -> Sample:
    """The peak of one Python worker while all messages are read; `kind` "" is Parquet through a Python function."""
    if kind:
        messages = lab.messages(lab.topic(kind, scale))
    else:
        parquet = lab.parquet("none", scale.spark_rows, scale)
        messages = lab.spark.read.schema(COLUMNS).parquet(str(parquet)).mapInArrow(_as_they_are, COLUMNS)
    _with_fresh_workers(lab)
    with watched_memory(os.getpid()) as peak:
        sample = lab.timed(lambda: _to_nowhere(messages), scale.spark_rows)
    return Sample(sample.messages, sample.seconds, sample.cpu_seconds, anon_bytes=peak.anon_bytes)


def _with_fresh_workers(lab: Lab) -> None:
    """Workers without the memory that earlier jobs left them. That an idle one is gone Spark notices by using it."""
    end_idle_workers(os.getpid())
    for _ in range(_MOST_IDLE):
        with suppress(Exception):
            _to_nowhere(lab.spark.range(4).repartition(2).mapInArrow(_as_they_are, "id long"))
            return


JOBS: dict[str, Callable[..., Any]] = {
    job.__name__: job
    for job in (
        read,
        read_all,
        read_parquet,
        read_floor,
        write,
        write_parquet,
        stream,
        first_query,
        scan_beside,
        worker_memory,
    )
}


def _timed_read(lab: Lab, what: str, load: Callable[[], Any], rows: int) -> Sample:
    def once() -> None:
        found = load().count()
        if found != rows:
            raise ValueError(f"{what} found {found} rows of {rows}")
        _to_nowhere(load())

    lab.warmed_up(what, once)
    return lab.timed(lambda: _to_nowhere(load()), rows)


def _to_nowhere(frame: Any) -> None:
    frame.write.format("noop").mode("overwrite").save()


def _to_write(lab: Lab, rows: int, scale: Scale) -> Any:
    return lab.spark.read.schema("key binary, value binary").parquet(str(lab.parquet("none", rows, scale)))


def _written(lab: Lab, save: Callable[[], object], folder: Path, rows: int) -> Sample:
    """Timed, and removed at once: nobody is to pay for another's dirty pages."""
    try:
        return lab.timed(save, rows)
    finally:
        shutil.rmtree(folder)


def _small_batches(lab: Lab, source: str, scale: Scale) -> Any:
    if source == "rate":
        rate = lab.spark.readStream.format("rate-micro-batch").option("rowsPerBatch", _ROWS_A_BATCH).load()
        return rate.selectExpr("CAST(value AS STRING) AS value")
    if source == "floor":
        return _floor(lab, lab.spark.readStream).option("rowsPerBatch", _ROWS_A_BATCH).load()
    reader = lab.spark.readStream.format("holdfast").option("path", str(lab.topic("plain", scale)))
    places = reader.option("topic", TOPIC).option("startingOffsets", "earliest")
    return places.option("maxOffsetsPerTrigger", _ROWS_A_BATCH).load().select("value")


def _floor(lab: Lab, reader: Any) -> Any:
    from bench.spark.floor import FloorSource

    lab.spark.dataSource.register(FloorSource)
    return reader.format(FloorSource.name())


def _batches_ms(query: Any) -> Sequence[float]:
    return [each.durationMs["triggerExecution"] for each in query.recentProgress if each.numInputRows]


def _as_they_are(batches: Any) -> Any:
    return batches
