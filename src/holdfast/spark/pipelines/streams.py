"""Pipelines as streaming queries: Spark decides what a batch holds and keeps its state, the ledger says what counts.

Spark notes the offsets of a batch before it begins, and after a crash asks for the same batch with the same offsets.
The ledger tells whether that batch is written already. Together they make it exactly once.

Spark Connect calls the function for each batch in a process of its server, which goes on if this one dies. So the
function holds plain values only, and shares nothing with the run but the checkpoint:

    _checkpoints/NAME/run       the run that may write; it is gone once that run has ended
    _checkpoints/NAME/writing   locked while a batch is written

Whoever begins or ends a run takes that lock first. A batch that was begun is then finished, and a batch of an earlier
run that comes later finds another name in `run` and writes nothing.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from holdfast.env import real_world
from holdfast.errors import Fenced, InvalidRequest
from holdfast.spark.options import in_one_sentence
from holdfast.spark.pipelines.batches import last_within, patiently
from holdfast.spark.pipelines.checkpoint import (
    RUN,
    SPARK,
    Ledger,
    LedgerBatch,
    Tally,
    checkpoint_id,
    end_run,
    ledger_of,
    writing,
)
from holdfast.spark.pipelines.lake import files_with, table_schema
from holdfast.spark.pipelines.parquet import BATCH, rows_of_file
from holdfast.spark.pipelines.spec import Context, Project, Read, Summary
from holdfast.spark.pipelines.stores import StoreAccess, access_to, file_of_store, in_store, tables_at
from holdfast.storage.files import durable_replace, join, read_file

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


_LOOK_S: Final = 0.2

# Writes the rows of one batch, of which Spark has noted these offsets.
StreamWrite = Callable[[Context, "DataFrame", int, str | None], LedgerBatch]


def run_stream(
    context: Context, rows: DataFrame, write: StreamWrite, left: Callable[[], int | None], *, output_mode: str
) -> Summary:
    """Write the rows batch by batch until there are no more; with `follow`, until the run is stopped.

    `write` is a function of a module, since it may be called in another process. `left` is the number of rows that the
    sources have beyond what is written.
    """
    _check_checkpoint(context)
    durable_replace(context.world.disk, context.checkpoint, RUN, context.run.encode())
    # What belongs to this process stays here: functions of the user, the session, what stops the run.
    project = msgspec.structs.replace(
        context.project,
        pipelines={
            name: msgspec.structs.replace(each, function=None) for name, each in context.project.pipelines.items()
        },
    )
    access = access_to(project.lake) if in_store(project.lake) else None
    called = partial(write_batch_of, project, context.name, context.run, write, access=access)
    watch = _Watch(context, left)

    def once() -> None:
        writer = rows.writeStream.queryName(context.name).foreachBatch(called).outputMode(output_mode)
        writer = writer.option("checkpointLocation", join(context.checkpoint, SPARK))
        every = f"{context.every_ms} milliseconds"
        writer = writer.trigger(processingTime=every) if context.follow else writer.trigger(availableNow=True)
        with quick_checkpoints(rows.sparkSession):
            query = writer.start()
        _wait(context, query, watch)

    try:
        patiently(once)
    finally:
        end_run(context.world, context.checkpoint)  # nothing may be written once the caller releases its lock
    watch.look()
    watch.tally.lag = left()
    return watch.tally.summary()


# Spark's usual way to write its checkpoint starts a program for each file on a local disk, which takes half of the time
# of a small batch. The other one does not, and has no guard against a second driver: the lock of the run is one.


_WAY: Final = "spark.sql.streaming.checkpointFileManagerClass"
_QUICK: Final = "FileSystemBasedCheckpointFileManager"
_starting: Final = threading.Lock()


@contextmanager
def quick_checkpoints(spark: SparkSession) -> Iterator[None]:
    """A query that is started in this block writes its checkpoint the quick way, unless the user has chosen one."""
    with _starting:  # the setting is the session's, and other pipelines may start
        java = getattr(spark, "_jvm", None)  # none on Spark Connect
        known = None if java is None else java.org.apache.spark.sql.execution.streaming.checkpointing
        # Py4J takes a name that this release of Spark does not have for a package.
        there = known is not None and type(getattr(known, _QUICK)).__name__ == "JavaClass"
        if not there or spark.conf.get(_WAY, None) is not None:
            yield
            return
        spark.conf.set(_WAY, f"org.apache.spark.sql.execution.streaming.checkpointing.{_QUICK}")
        try:
            yield
        finally:
            spark.conf.unset(_WAY)


def write_batch_of(
    project: Project,
    name: str,
    run: str,
    write: StreamWrite,
    rows: DataFrame,
    batch: int,
    access: StoreAccess | None = None,
) -> None:
    """Called by Spark for each batch, maybe a second time after a crash, maybe in a process of Spark Connect."""
    if access is not None:
        access.tell()
    context = Context(
        world=real_world(), session=lambda: rows.sparkSession, project=project, spec=project.spec(name), run=run
    )
    with writing(context.world, context.checkpoint):
        if read_file(context.disk, join(context.checkpoint, RUN)) != run.encode():
            raise Fenced(f"{name}: this run has ended: batch {batch} is left to the next one")
        offsets = _offsets_file(context, batch)
        last = ledger_of(context).last()
        if last is not None and last.batch >= batch:
            _check_same(context, batch, offsets)
            return
        _sync_checkpoint(context, batch)
        write(context, rows, batch, offsets)


class _Watch:
    """Follows a run in the ledger, since its batches may be written in another process."""

    def __init__(self, context: Context, left: Callable[[], int | None]) -> None:
        self._ledger = ledger_of(context)
        self._left = left
        last = self._ledger.last()
        self._seen = -1 if last is None else last.batch
        self.tally = Tally(context)

    def look(self) -> None:
        """Count the batches that were written since."""
        for batch in self._ledger.after(self._seen):
            self._seen = batch.batch
            self.tally.add(batch, self._left())


def _wait(context: Context, query: StreamingQuery, watch: _Watch) -> None:
    """Wait until the query ends, by itself or because the run is stopped."""
    try:
        while query.isActive:
            watch.look()
            if context.stopping.wait(_LOOK_S):
                end_run(context.world, context.checkpoint)  # a batch that has begun is finished
                return
        query.awaitTermination()  # raises what ended it
    finally:
        if query.isActive:
            query.stop()


def _offsets_file(context: Context, batch: int) -> str | None:
    """The offsets at which a batch ends, as Spark noted them before it began."""
    content = read_file(context.disk, join(context.checkpoint, f"{SPARK}/offsets/{batch}"))
    return None if content is None else content.decode("utf-8")


def watermark_us(offsets: str | None) -> int:
    """The watermark that Spark noted in a file of offsets, beside the time; 0 before there is one."""
    noted = json.loads((offsets or "").splitlines()[1]) if offsets else {}
    return int(noted.get("batchWatermarkMs", 0)) * 1000


def positions_of(offsets: str | None) -> list[dict[str, Any]]:
    """The positions of the sources in a file of offsets. Its first lines are Spark's own."""
    return [json.loads(line) for line in (offsets or "").splitlines()[2:] if line.startswith("{")]


def _last_committed(context: Context) -> int:
    """The last batch that Spark has finished; -1 before the first."""
    folder = join(context.checkpoint, f"{SPARK}/commits")
    names = context.disk.names(folder) if context.disk.exists(folder) else []
    return max((int(name) for name in names if name.isdigit()), default=-1)


def _check_same(context: Context, batch: int, offsets: str | None) -> None:
    """Raise InvalidRequest if the batch of this number that is written is another one than Spark's."""
    ledger = ledger_of(context)
    if batch in ledger.numbers() and _ends(ledger.read(batch).offsets) != _ends(offsets):
        raise InvalidRequest(
            f"{context.name}: Spark's checkpoint and the lake do not agree on batch {batch}: one of them was "
            "restored or changed. Run it with --full-refresh to read everything again"
        )


def _ends(offsets: str | None) -> list[str]:
    """The offsets without Spark's own line, which holds the time."""
    return [] if offsets is None else offsets.splitlines()[2:]


def _sync_checkpoint(context: Context, batch: int) -> None:
    """Sync what Spark noted: after a power cut, its checkpoint and the ledger must agree."""
    disk, folder = context.disk, join(context.checkpoint, SPARK)
    for path in (f"{folder}/metadata", f"{folder}/offsets/{batch}", f"{folder}/offsets/.{batch}.crc"):
        with suppress(FileNotFoundError):
            disk.sync_file(path)
    disk.sync_folder(f"{folder}/offsets")
    disk.sync_folder(folder)


def _check_checkpoint(context: Context) -> None:
    written = ledger_of(context).last()
    if written is not None and not context.disk.exists(join(context.checkpoint, f"{SPARK}/offsets")):
        raise InvalidRequest(
            f"{context.name}: {context.checkpoint}/{SPARK} is gone, and with it how far its sources were read: "
            "restore it from a copy, or read everything again with --full-refresh"
        )
    if _last_committed(context) > (-1 if written is None else written.batch):
        raise InvalidRequest(
            f"{context.name}: Spark's checkpoint is further than {context.checkpoint}/batches, which was lost or "
            "restored from a copy: rows in between are not in the lake. Read everything again with --full-refresh"
        )


# Tables as streams: a batch of the stream consists of batches that the table's pipeline has finished.


def table_stream(context: Context, name: str, most_rows: int) -> DataFrame:
    """The rows of a pipeline's table, which must be there, as a stream from the first on."""
    schema = table_schema(context, name)
    assert schema is not None
    context.spark.dataSource.register(_source_of(context.project.lake))
    without = StructType([each for each in schema.fields if each.name != BATCH])
    reader = context.spark.readStream.format(TableSource.name()).schema(without)
    options = {"lake": context.project.lake, "home": context.project.home, "table": name, "mostRows": str(most_rows)}
    return reader.options(**options).load()


def missing_tables(context: Context, names: Sequence[str]) -> list[str]:
    """The sources that have no table yet, and so no columns. With `follow`, waits until all have one."""
    while (missing := [name for name in names if table_schema(context, name) is None]) and context.follow:
        if context.stopping.wait(context.every_ms / 1000):
            break
    return missing


def batches_read(offsets: str | None) -> dict[str, int]:
    """The last batch of each table that a stream has read. A table that it reads twice is there twice."""
    found: dict[str, int] = {}
    for each in positions_of(offsets):
        if "table" in each:
            found[each["table"]] = min(each["batch"], found.get(each["table"], each["batch"]))
    return found


def reads_of(context: Context, names: tuple[str, ...]) -> list[Read]:
    """What these tables have that the stream has not read yet."""
    last = ledger_of(context).last()
    known = batches_read(None if last is None else last.offsets)
    found = []
    for name in names:
        waiting = ledger_of(context, name).after(known.get(name, -1))
        found.append(Read.of_batches(name, known.get(name, -1), waiting))
    return found


def rows_between(context: Context, before: str | None, after: str | None) -> int:
    """The number of rows that came in between these offsets, by the ledgers of the tables."""
    known, count = batches_read(before), 0
    for name, through in batches_read(after).items():
        waiting = ledger_of(context, name).after(known.get(name, -1))
        count += sum(each.rows_out for each in waiting if each.batch <= through)
    return count


class TableSource(DataSource):
    """A table of the lake as a stream for Spark, without a jar."""

    access: StoreAccess | None = None

    @classmethod
    def name(cls) -> str:
        return "holdfast-lake-table"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802  Spark's name
        return TableStream(self.options, schema, self.access)


def _source_of(lake: str) -> type[TableSource]:
    """The source for the tables of a lake. It knows the keys of a store, since options are shown to people."""
    if not in_store(lake):
        return TableSource
    return type("StoredTableSource", (TableSource,), {"access": access_to(lake)})


class TableStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans on the driver by the ledger of the table. Copies of it read files in the tasks."""

    def __init__(self, options: Mapping[str, str], schema: StructType, access: StoreAccess | None) -> None:
        self._lake, self._home, self._name = options["lake"], options["home"], options["table"]
        # One source serves all tables of a lake.
        self._access = None if access is None else StoreAccess(self._table, access.options)
        self._most_rows = int(options["mostRows"])
        self._schema = schema
        self._until: int | None = None  # with AvailableNow: what was there at the beginning

    @property
    def _project(self) -> Project:
        return Project(folder="", lake=self._lake, pipelines={}, checkpoints=self._home)

    @property
    def _table(self) -> str:
        return self._project.table(self._name)

    def _at(self, batch: int) -> dict[str, Any]:
        return {"table": self._name, "id": checkpoint_id(real_world(), self._project, self._name), "batch": batch}

    def _waiting(self, after: int) -> list[LedgerBatch]:
        found = Ledger(real_world(), self._project.checkpoint(self._name)).after(after)
        return [each for each in found if self._until is None or each.batch <= self._until]

    @in_one_sentence
    def initialOffset(self) -> dict[str, Any]:  # noqa: N802  Spark's name, as all below
        return self._at(-1)

    @in_one_sentence
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        waiting = self._waiting(-1)
        self._until = waiting[-1].batch if waiting else -1

    @in_one_sentence
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        self._check_id(start)
        waiting = self._waiting(start["batch"])
        return self._at(last_within(waiting, self._most_rows)) if waiting else start

    @in_one_sentence
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        self._check_id(start)
        if self._access is not None:
            self._access.tell()
        names = files_with(tables_at(self._table), self._table, start["batch"], end["batch"])
        return [InputPartition((name, start["batch"], end["batch"])) for name in names]

    @in_one_sentence
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if partition.value is None:  # Spark makes one up if there is nothing to read
            return iter(())
        name, after, through = partition.value
        schema = to_arrow_schema(self._schema, timezone="UTC")
        if self._access is not None:
            return file_of_store(self._access, name, schema, after=after, through=through)
        return rows_of_file(f"{self._table}/{name}", name, schema, after=after, through=through)

    def _check_id(self, start: dict[str, Any]) -> None:
        if start["id"] not in (None, self._at(-1)["id"]):
            raise InvalidRequest(
                f"its source {self._name} was started over since this table was written: start this one over too, "
                "with --full-refresh"
            )
