"""The data source `holdfast`: what Spark asks of it to read and to write."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructField, StructType

from holdfast.api.drafts import parse_duration
from holdfast.broker.engine import BrokerEngine
from holdfast.broker.folder.layout import TOPICS, check_name, folder_path
from holdfast.client.opening import is_address
from holdfast.client.spark_commits import commit_there, is_shared
from holdfast.config.settings_file import read_settings
from holdfast.env import World, real_world
from holdfast.env.process import environment, skip_modules_in_collections
from holdfast.errors import InvalidRequest, NotAQueue, Unavailable
from holdfast.settings import BrokerSettings
from holdfast.spark.commits import CommitRequest, FrameFiles, StagedFile, Staging, commit, owning
from holdfast.spark.incoming import RowRouter, ServerTargets, Targets, check_columns
from holdfast.spark.options import (
    as_meant,
    check_options,
    flag,
    in_one_sentence,
    refuse_unknown,
    required_path,
    whole_number,
)
from holdfast.spark.places import RowFiles, ServerAccess, access_of, check_place, server_place, stored_at
from holdfast.spark.stored_sink import ObjectStage, StoredTargets, StoredTopics, commit_stored, stored_topics
from holdfast.storage.files import join, translated

# The data source "holdfast": what Spark asks first, and who answers then.


class HoldfastSource(DataSource):
    """Messages, and what else a data folder can tell, for Spark."""

    @classmethod
    def name(cls) -> str:
        return "holdfast"

    @in_one_sentence
    def schema(self) -> StructType:
        given = options_declared(self.options)
        if given is None:
            return self._schema(self.options)
        return with_options(self._schema(given), given)

    def _schema(self, options: Mapping[str, str]) -> StructType:
        from holdfast.spark.readers import message_schema

        if not is_address(required_path(options)):
            check_place(required_path(options))  # a wrong path is an error of load(), not of the first action
        table = _table_of(options)
        if table is None:
            asked = check_options(options)
            return message_schema(metadata=asked.include_metadata, headers=asked.include_headers)
        from holdfast.spark.tables import table_schema

        return table_schema(table)

    @in_one_sentence
    def reader(self, schema: StructType) -> DataSourceReader:
        options = options_within(schema) or self.options
        table = _table_of(options)
        if table is None:
            from holdfast.spark.readers import BatchReader

            return BatchReader(options, schema)
        from holdfast.spark.tables import table_reader

        return table_reader(table, options, schema)

    @in_one_sentence
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802  Spark's name
        options = options_within(schema) or self.options
        table = _table_of(options)
        if table is not None:
            from holdfast.spark.tables import NoStream

            return NoStream(table)
        from holdfast.spark.readers import MicroBatchReader

        return MicroBatchReader(options, schema)

    @in_one_sentence
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:  # noqa: FBT001  Spark's signature

        return batch_writer(self.options, schema, overwrite)

    @in_one_sentence
    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802, FBT001

        return stream_writer(self.options, schema, overwrite)


def _table_of(options: Mapping[str, str]) -> str | None:
    """The table that was asked for, other than the messages."""
    table = options.get("table", "messages").lower()
    return None if table == "messages" else table


# `CREATE TABLE orders USING holdfast OPTIONS (...)`. Spark asks for the columns with the options, among properties of
# its own, and keeps the columns. When the table is read, the columns are all it passes on. So the options go with them.


_OPTIONS: Final = "holdfast.options"
_PROPERTY: Final = "option."


def options_declared(properties: Mapping[str, str]) -> dict[str, str] | None:
    """The options of a CREATE TABLE, by the properties that Spark makes of them; None if it is none."""
    given = {name.removeprefix(_PROPERTY): value for name, value in properties.items() if name.startswith(_PROPERTY)}
    if not given:
        return None
    return as_meant(given if "path" in given or "path" not in properties else {**given, "path": properties["path"]})


def with_options(columns: StructType, options: Mapping[str, str]) -> StructType:
    """The columns of a table, with its options in their metadata."""
    first, *others = columns.fields
    metadata = {_OPTIONS: json.dumps(options, sort_keys=True)}
    return StructType([StructField(first.name, first.dataType, metadata=metadata), *others])


def options_within(columns: StructType) -> dict[str, str] | None:
    """The options in the metadata of the columns, if they are of a table."""
    for field in columns.fields:
        if field.metadata and _OPTIONS in field.metadata:
            found: dict[str, str] = json.loads(field.metadata[_OPTIONS])
            return found
    return None


# The sink: `df.write.format("holdfast")` and `df.writeStream.format("holdfast")`.
#
# Spark runs `write` in its tasks, and `commit` or `abort` on the driver, each with another copy of the writer. After a
# commit that raised it calls `abort`, whether or not the commit took effect.


WRITING: Final = frozenset({"path", "server", "tokenFile", "topic", "createTopics", "partitions", "ownerTimeout"})
BATCH_WRITING: Final = WRITING | {"writeId", "batchId"}
_OWNER_WAIT_S: Final = 10.0
_STORE_OWNER_WAIT_S: Final = 30.0  # one that was killed on another machine is owner for some time still
_MOST_BATCH: Final = 2**31 - 2
_SLAB_BYTES: Final = 4 << 20
_MOST_SLAB_BYTES: Final = 64 << 20


class WriteOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a writer. `new_partitions`: make missing topics, with this number of partitions."""

    path: str
    topic: str | None
    new_partitions: int | None
    owner_wait_ms: int
    settings: BrokerSettings
    write_id: str | None = None
    batch: int = 0
    server: ServerAccess | None = None
    stored: StoredTopics | None = None

    def targets(self, world: World) -> Targets:
        """The topics of the place, as they are now."""
        if self.server is not None:
            return ServerTargets(self.path, server_place(self.server).describe, self.new_partitions)
        if self.stored is not None:
            return StoredTargets(self.stored, self.settings, self.new_partitions)
        return Targets(world, self.path, self.settings, self.new_partitions)


@dataclass
class StagedRows(WriterCommitMessage):
    """The files that one task has staged, and for which write."""

    write_id: str
    batch: int
    files: tuple[StagedFile, ...]


class HoldfastSink:
    """What both writers do. Writers are sent between processes, so the world is found only when it is used."""

    def __init__(self, options: WriteOptions, world: World | None = None) -> None:
        self._options = options
        self._world = world

    def stage(self, batches: Iterator[pa.RecordBatch], write_id: str, batch: int, task: Task) -> StagedRows:
        """Stage the rows of one task. They are durable when this returns."""
        skip_modules_in_collections()
        world, options = self._world or real_world(), self._options
        files, where = self._files(world, write_id, batch, f"{task.number}-{task.attempt}")
        targets = options.targets(world)
        router = RowRouter(world, targets, options.topic, task.number)
        try:
            with translated(where):
                for slab in _slabs(batches, options, targets):
                    for lane, body in router.bodies(slab):
                        files.add(lane, body)
                return StagedRows(write_id, batch, files.finish())
        except BaseException:
            files.discard()
            raise

    def _files(self, world: World, write_id: str, batch: int, prefix: str) -> tuple[RowFiles, str]:
        """Where a task puts its rows, and its name in errors."""
        options, folder = self._options, f"{write_id}/{batch}"
        if options.server is not None:
            return server_place(options.server).files(world, write_id, batch, prefix), folder
        if options.stored is not None:
            return FrameFiles(world, folder, prefix, ObjectStage(options.stored.url)), folder
        folder = Staging(world, options.path).batch_folder(write_id, batch)
        return FrameFiles(world, folder, prefix), folder

    def commit(self, messages: Sequence[StagedRows | None], *, kept: bool, streaming: bool = False) -> None:
        """Write what the tasks staged into the log."""
        staged = [message for message in messages if message is not None]
        if not staged:
            return
        world, options = self._world or real_world(), self._options
        write = CommitRequest(
            write_id=staged[0].write_id,
            batch=staged[0].batch,
            files=tuple(file for message in staged for file in message.files),
            kept=kept,
            streaming=streaming,
            new_partitions=options.new_partitions,
        )
        if options.server is not None:
            server_place(options.server).commit(write)
            return
        if options.stored is not None:
            commit_stored(options.stored.url, options.settings, write, options.owner_wait_ms, world)
            return
        while True:
            with self._owning(world) as engine:
                if engine is not None:
                    commit(engine, write)
                    return
            try:
                commit_there(world, options.path, write)
            except Unavailable:
                if not kept or is_shared(options.path):
                    raise
            else:
                return  # otherwise the owner has gone: perhaps the folder is free now

    def abort(self, messages: Sequence[StagedRows | None]) -> None:
        """Remove what was staged, unless a commit took effect."""
        server, stored = self._options.server, self._options.stored
        if stored is not None:
            # A commit that took effect has copied what it needs.
            with closing(ObjectStage(stored.url)) as disk:
                for staged in filter(None, messages):
                    for file in staged.files:
                        disk.remove(f"{staged.write_id}/{staged.batch}/{file.name}")
            return
        staging = Staging(self._world or real_world(), self._options.path)
        for message in messages:
            if message is not None and server is not None:
                with suppress(Unavailable):  # they expire there
                    server_place(server).remove(message.write_id, message.batch, message.files)
            elif message is not None:
                staging.remove(message.write_id, message.batch, [file.name for file in message.files])

    def check_owner(self) -> None:
        """Raise Busy if another process owns the folder and does not share it, before any task works in vain."""
        if self._options.server is not None or self._options.stored is not None:
            return
        with self._owning(self._world or real_world()):
            pass

    def _owning(self, world: World) -> AbstractContextManager[BrokerEngine | None]:
        """Own the folder; None if the owner shares it. A simulated one is never shared."""
        options = self._options
        shared = is_shared if self._world is None else None
        return owning(world, options.path, options.settings, options.owner_wait_ms, shared)


class Task(msgspec.Struct, frozen=True):
    """Which task of a job writes, and which attempt of it."""

    number: int
    attempt: int


class BatchWriter(DataSourceArrowWriter):
    """For `df.write`. A write with a user's id is remembered: the same one again writes nothing."""

    def __init__(self, options: WriteOptions, write_id: str) -> None:
        self._options = options
        self._write_id = write_id

    @in_one_sentence
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return HoldfastSink(self._options).stage(iterator, self._write_id, self._options.batch, _this_task())

    @in_one_sentence
    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        HoldfastSink(self._options).commit(_ours(messages), kept=self._options.write_id is not None)

    @in_one_sentence
    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        nothing = StagedRows(self._write_id, self._options.batch, ())  # so that no empty folder stays
        HoldfastSink(self._options).abort([*_ours(messages), nothing])


class StreamWriter(DataSourceStreamArrowWriter):
    """For `df.writeStream`. The write is the query, which keeps its id over restarts."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    @in_one_sentence
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        assert context is not None, "Spark runs write() in a task"
        query = context.getLocalProperty("sql.streaming.queryId")
        batch = context.getLocalProperty("streaming.sql.batchId")
        assert query is not None, "Spark tells a streaming task which query it is for"
        assert batch is not None, "and which batch"
        return HoldfastSink(self._options).stage(iterator, query, int(batch), _this_task())

    @in_one_sentence
    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  Spark's name
        HoldfastSink(self._options).commit(_ours(messages), kept=True, streaming=True)

    @in_one_sentence
    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        HoldfastSink(self._options).abort(_ours(messages))


@in_one_sentence
def batch_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> BatchWriter:  # noqa: FBT001
    """The writer for `df.write`. Raises if the DataFrame cannot be written, before any task runs."""
    refuse_unknown(options, BATCH_WRITING)
    checked = _checked(options, schema, overwrite=overwrite)
    world = real_world()
    write_id = checked.write_id or f"batch-{world.ids.random_u32():08x}{world.ids.random_u32():08x}"
    HoldfastSink(checked).check_owner()
    return BatchWriter(checked, write_id)


@in_one_sentence
def stream_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: FBT001
    """The writer for `df.writeStream`. Spark makes one for each batch and another for its commit."""
    refuse_unknown(options, WRITING | {"checkpointLocation", "queryName"})
    return StreamWriter(_checked(options, schema, overwrite=overwrite))


def _checked(options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> WriteOptions:
    if overwrite:
        raise InvalidRequest(
            'messages can only be added: write with mode("append"), and a stream with outputMode("append") or "update"'
        )
    world, path, server = real_world(), required_path(options), access_of(options)
    url, settings = None if server is not None else stored_at(path), read_settings(world, environment()).broker
    if url is not None:
        check_place(path)
    elif server is None:
        path = folder_path(path, 'option "path"')
        if not world.disk.exists(join(path, TOPICS)):
            raise NotAQueue(f'{path} holds no topics: option "path" names the folder that open_broker was given')
    elif "ownerTimeout" in options:
        raise InvalidRequest('option "ownerTimeout" is for a folder: a server owns its own; leave it out')
    topic = options.get("topic") or None
    check_columns(schema, has_topic=topic is not None)
    creates = flag(options, "createTopics", default=False)
    if "partitions" in options and not creates:
        raise InvalidRequest('option "partitions" is for topics that the write makes: add option "createTopics"')
    wait, usual_s = options.get("ownerTimeout"), _OWNER_WAIT_S if url is None else _STORE_OWNER_WAIT_S
    write_id = options.get("writeId")
    if write_id is None and "batchId" in options:
        raise InvalidRequest('option "batchId" numbers the batches of one write: name that write with option "writeId"')
    checked = WriteOptions(
        path=path,
        topic=topic,
        new_partitions=whole_number(options, "partitions", 1) if creates else None,
        owner_wait_ms=round((usual_s if wait is None else parse_duration(wait, 'option "ownerTimeout"')) * 1000),
        settings=settings,
        write_id=None if write_id is None else check_name(write_id, "writeId"),
        batch=batch_number(options),
        server=server,
        stored=None if url is None else stored_topics(url, settings, topic),
    )
    if topic is not None:
        checked.targets(world).find(topic)
    return checked


def batch_number(options: Mapping[str, str]) -> int:
    """The number of the batch, for which the log's frames have 31 bits."""
    number = whole_number(options, "batchId", 0, least=0)
    if number > _MOST_BATCH:
        raise InvalidRequest(f'option "batchId" is {number}: give a whole number, at most {_MOST_BATCH}')
    return number


def _slabs(batches: Iterator[pa.RecordBatch], options: WriteOptions, targets: Targets) -> Iterator[pa.RecordBatch]:
    """Spark's batches joined, so that each partition's share fills a frame."""
    enough = _SLAB_BYTES
    if options.topic is not None:
        target = targets.find(options.topic)
        enough = min(max(enough, target.partitions * target.settings.frame_bytes), _MOST_SLAB_BYTES)
    gathered: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        # Arrow joins no more than 2 GiB of values.
        if gathered and (size >= enough or size + batch.nbytes > _MOST_SLAB_BYTES):
            yield _joined(gathered)
            gathered, size = [], 0
        if batch.num_rows:
            gathered.append(batch)
            size += batch.nbytes
    if gathered:
        yield _joined(gathered)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def _this_task() -> Task:
    context = TaskContext.get()
    return Task(0, 0) if context is None else Task(context.partitionId(), context.taskAttemptId())


def _ours(messages: Sequence[Any]) -> list[StagedRows | None]:
    return [message if isinstance(message, StagedRows) else None for message in messages]
