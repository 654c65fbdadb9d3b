"""The other tables of a data folder, for Spark: their columns, their reader, and views of all of them for SQL."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DoubleType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from holdfast.delivery.where import Expression
from holdfast.env import World, real_world
from holdfast.errors import InvalidRequest, Unavailable
from holdfast.spark.options import as_meant, flag, in_one_sentence, plainly, required_path, table_options
from holdfast.spark.places import SparkPlace, access_of, place_at
from holdfast.spark.ranges import PlanRequest, Positions, from_json, to_json
from holdfast.spark.readers import HEADERS, message_schema, named_columns
from holdfast.spark.rows import MESSAGES, TABLES, Piece, Row, TableSpec, table_named
from holdfast.spark.session import session
from holdfast.storage.files import join, read_file

if TYPE_CHECKING:
    from holdfast.spark.pipelines.spec import Project

_TYPES: Final[dict[str, DataType]] = {
    "string": StringType(),
    "strings": ArrayType(StringType()),
    "binary": BinaryType(),
    "int": IntegerType(),
    "long": LongType(),
    "double": DoubleType(),
    "timestamp": TimestampType(),
    "headers": HEADERS,
}

# A batch of a table ends at either.
_MOST_ROWS: Final = 4_096
_MOST_BYTES: Final = 8 << 20


def _schema(columns: str) -> StructType:
    """The columns of a text such as "id string, partition int". Spark's own parser of such texts needs a JVM."""
    pairs = (column.split() for column in columns.split(","))
    return StructType([StructField(name, _TYPES[kind]) for name, kind in pairs])


_TYPES["failures"] = ArrayType(_schema("at timestamp, holder string, why string, error string"))


def schema_of(table: TableSpec) -> StructType:
    """All columns of a table."""
    return _schema(table.columns)


def table_schema(name: str) -> StructType:
    """All columns of a table."""
    return message_schema(metadata=True, headers=True) if name == MESSAGES else schema_of(table_named(name))


def table_reader(name: str, options: Mapping[str, str], schema: StructType) -> DataSourceReader:
    """The reader of a table other than the messages, for the columns of the schema."""
    return TableReader(table_named(name), options, schema)


# Messages of a topic by a function. It knows the topic, so Spark adds that column by itself, and no Python worker sends
# the same text for every row; and it is told the columns, which no `select` behind `load()` tells a Python source.


def read(
    topic: str, path: str, *, columns: Sequence[str] | None = None, spark: SparkSession | None = None, **options: Any
) -> DataFrame:
    """The messages of a topic, faster than by `spark.read.format("holdfast").load()`: only these columns are read.

    Args:
        topic: The topic.
        path: Its data folder, or the address of a server.
        columns: The names of the columns; by default those of `load()`.
        spark: The session; by default the running one, or a new one.
        **options: Other options of the source, such as `startingOffsets`.

    Returns:
        A DataFrame. It is read when you use it, and errors of the data folder or the server are raised then.

    Raises:
        InvalidRequest: An option or a column is unknown, or has a value that cannot be used.
        NotInstalled: Spark or Java is missing.
    """
    spark = session() if spark is None else spark
    return _messages(spark.read, topic, path, columns, options)


def read_stream(
    topic: str, path: str, *, columns: Sequence[str] | None = None, spark: SparkSession | None = None, **options: Any
) -> DataFrame:
    """The messages of a topic as a stream, faster than by `spark.readStream.format("holdfast").load()`.

    Args:
        topic: The topic.
        path: Its data folder, or the address of a server.
        columns: The names of the columns; by default those of `load()`.
        spark: The session; by default the running one, or a new one.
        **options: Other options of the source, such as `maxOffsetsPerTrigger`.

    Returns:
        A streaming DataFrame. Errors of the data folder or the server end the query that uses it.

    Raises:
        InvalidRequest: An option or a column is unknown, or has a value that cannot be used.
        NotInstalled: Spark or Java is missing.
    """
    spark = session() if spark is None else spark
    return _messages(spark.readStream, topic, path, columns, options)


def _messages(
    reader: Any, topic: str, path: str, columns: Sequence[str] | None, options: Mapping[str, Any]
) -> DataFrame:
    if columns is None:
        asked = as_meant({name: str(value) for name, value in options.items()})
        wanted = message_schema(
            metadata=flag(asked, "includeMetadata", default=False), headers=flag(asked, "includeHeaders", default=False)
        )
    else:
        wanted = named_columns(columns)
    constants = {"topic": f.lit(topic), "timestampType": f.lit(1)}
    others = [field for field in wanted if field.name not in constants]
    read = StructType(others or named_columns(["offset"]).fields)  # the rows, if nothing else, must come
    found = reader.format("holdfast").schema(read).options(**{**options, "path": path, "topic": topic}).load()
    made: DataFrame = found.select(
        *(constants[name].alias(name) if name in constants else f.col(name) for name in wanted.names)
    )
    return made


# Messages of a topic: what was landed, from the files of the lake, which Spark reads by itself; the rest, from the log.
#
# The ledger of the landing pipeline says which batch was finished last, and at which offsets it ends. A later batch may
# be in the table already, so rows are taken by the number of their batch. Both parts are settled when the DataFrame is
# made: the version of the Delta table and the offsets of the log.


def table(
    topic: str,
    path: str,
    lake: str,
    *,
    pipeline: str | None = None,
    checkpoints: str | None = None,
    spark: SparkSession | None = None,
) -> DataFrame:
    """The messages of a topic as of now: what was landed in a lake is read from there, and only the rest from the log.

    Spark reads the files of the lake by itself, with filters and columns pushed down. That is faster than reading the
    log, and the lake also has messages that the topic no longer has.

    Args:
        topic: The topic.
        path: Its data folder, or the address of a server.
        lake: The folder of the lake, or its URL in a store, with the table of a pipeline of the kind `land`.
        pipeline: The name of that pipeline, if several land the topic.
        checkpoints: The folder that the pipelines name as checkpoints, if the lake is in a store.
        spark: The session; by default the running one, or a new one.

    Returns:
        A DataFrame with all columns of a message.

    Raises:
        InvalidRequest: No pipeline, or more than one, lands the topic; or its table does not hold every message.
        Unavailable: The pipeline is starting over. Read the table again when it has run.
        NotInstalled: Spark or Java is missing.
    """
    from holdfast.spark.pipelines.lake import quoted

    spark = session() if spark is None else spark
    world, project = real_world(), _lake_at(lake, checkpoints)
    name = _landed_by(world, project, topic) if pipeline is None else pipeline
    landed = _landed(world, project, name, topic)
    columns = table_schema(MESSAGES)
    history = landed.rows(spark).where(f.col("topic") == topic).selectExpr(*map(quoted, columns.names))
    given = {"path": path, "topic": topic, "startingOffsets": "earliest"}
    place = place_at(required_path(given), access_of(given))
    end = place.plan(PlanRequest(step="end", options=given)).positions
    rest = place.plan(PlanRequest(step="ranges", options=given, start=to_json(landed.positions), end=end)).ranges
    if not rest:
        return history
    starts: dict[int, int] = {}
    stops: dict[int, int] = {}
    for part in sorted(rest, key=attrgetter("start"), reverse=True):
        starts[part.partition] = part.start
        stops.setdefault(part.partition, part.stop)
    tail = spark.read.format("holdfast").schema(columns).option("path", path)
    tail = tail.option("assign", json.dumps({topic: sorted(starts)}))
    tail = tail.options(startingOffsets=json.dumps({topic: starts}), endingOffsets=json.dumps({topic: stops}))
    return history.unionByName(tail.load())


class LandedTable(msgspec.Struct, frozen=True):
    """A table of landed messages, as of one of its versions: up to which batch it counts, and where that one ends."""

    path: str
    version: int
    through: int
    newer: bool  # whether it has rows of later batches
    positions: Positions

    def rows(self, spark: SparkSession) -> DataFrame:
        from holdfast.spark.pipelines.lake import read_delta
        from holdfast.spark.pipelines.parquet import BATCH

        found = read_delta(spark, self.path, self.version)
        return found.where(f"{BATCH} <= {self.through}") if self.newer else found


def _lake_at(lake: str, checkpoints: str | None) -> Project:
    """A lake, and where its checkpoints are. Raises BadSettings."""
    from holdfast.spark.pipelines.spec import Project, located_lake

    return located_lake(Project(folder="", lake=lake, checkpoints=checkpoints, pipelines={}))


def _landed_by(world: World, project: Project, topic: str) -> str:
    """The name of the pipeline that lands a topic."""
    found = [name for name, topics in _landing(world, project) if topics(topic)]
    if len(found) != 1:
        how = f"{', '.join(found)} do: name one with pipeline=..." if found else "run one of the kind land"
        raise InvalidRequest(f"which pipeline of {project.lake} lands topic {topic} is not clear: {how}")
    return found[0]


def _landing(world: World, project: Project) -> Iterator[tuple[str, Callable[[str], bool]]]:
    """The landing pipelines of a lake: the name of each, and which topics it lands."""
    folder = join(project.home, "_checkpoints")
    for name in sorted(world.disk.names(folder)) if world.disk.exists(folder) else ():
        made_for = json.loads(read_file(world.disk, join(folder, f"{name}/spec.json")) or b"{}")
        if made_for.get("kind") == "land":
            pattern = made_for.get("pattern")
            yield name, Expression(pattern).matches if pattern else set(made_for["topics"]).__contains__


def _landed(world: World, project: Project, name: str, topic: str) -> LandedTable:
    """The table of a landing pipeline. Raises InvalidRequest if it does not hold all messages of the topic."""
    from holdfast.spark.pipelines.checkpoint import ID, Ledger
    from holdfast.spark.pipelines.lake import delta_table, is_delta, live_files
    from holdfast.spark.pipelines.land import positions_in
    from holdfast.spark.pipelines.stores import tables_at

    checkpoint = project.checkpoint(name)
    began = read_file(world.disk, join(checkpoint, ID))
    ledger = Ledger(world, checkpoint)
    last, totals = ledger.last(), ledger.totals()
    positions = None if last is None else positions_in(last.offsets)
    if last is None or positions is None or topic not in positions.topics:
        raise InvalidRequest(f"{name} has landed nothing of topic {topic} yet: run it once, then read the table")
    if totals.dropped or totals.quarantined:
        raise InvalidRequest(
            f"{name} dropped {totals.dropped:,} rows and quarantined {totals.quarantined:,}, so its table is not the "
            "whole topic: read it with read_delta, or land the topic without such expectations"
        )
    path = project.table(name)
    if not is_delta(tables_at(path), path):
        raise InvalidRequest(f"{path} is not a Delta table: land the topic without the option format: parquet")
    delta = delta_table(path)
    if read_file(world.disk, join(checkpoint, ID)) != began:
        raise Unavailable(f"{name} is starting over: read the table again when it has run")
    only = Positions({topic: positions.topics[topic]})
    return LandedTable(path, delta.version(), last.batch, bool(live_files(delta, after=last.batch)), only)


def register_tables(
    spark: SparkSession, path: str, prefix: str = "", lake: str | None = None, checkpoints: str | None = None
) -> list[str]:
    """Make views of the folder's messages and tables for SQL.

    The views have the topics and messages of this moment: register again to see later ones.

    Args:
        spark: The session.
        path: The data folder, or the address of a server.
        prefix: What the names of the views begin with.
        lake: The folder of a lake, or its URL in a store: there is also a view for each topic that is landed there,
            named after the topic; see `table`.
        checkpoints: The folder that the pipelines name as checkpoints, if the lake is in a store.

    Returns:
        The names of the views.

    Raises:
        InvalidRequest: The folder cannot be read, or a topic of the lake not by `table`.
    """
    views = []
    for topic in [] if lake is None else _landed_topics(path, _lake_at(lake, checkpoints)):
        table(topic, path, lake or "", checkpoints=checkpoints, spark=spark).createOrReplaceTempView(
            f"`{prefix}{topic}`"
        )
        views.append(f"{prefix}{topic}")
    for name in (MESSAGES, *TABLES):
        reader = spark.read.format("holdfast").options(path=path, table=name)
        if name == MESSAGES:
            # A view is read later: messages that the queue has dropped by then are no error.
            reader = reader.options(subscribePattern=".*", failOnDataLoss="false").schema(table_schema(name))
        reader.load().createOrReplaceTempView(f"{prefix}{name}")
        views.append(f"{prefix}{name}")
    return views


def _landed_topics(path: str, project: Project) -> list[str]:
    """The topics of a folder that a pipeline lands."""
    given = {"path": path, "subscribePattern": ".*", "startingOffsets": "earliest"}
    place = place_at(required_path(given), access_of(given))
    there = place.plan(PlanRequest(step="end", options=given)).positions or {}
    landing = list(_landing(real_world(), project))
    others = {MESSAGES, *TABLES}  # those have views of the same names
    return [t for t in from_json(there).topics if t not in others and any(topics(t) for _, topics in landing)]


class TableReader(DataSourceReader):
    """Plans on the driver, reads in the tasks."""

    @in_one_sentence
    def __init__(self, table: TableSpec, options: Mapping[str, str], schema: StructType) -> None:
        self._table = table.name  # a table itself cannot be sent to the tasks
        self._given = as_meant(options)
        table_options(self._given, real_world().clock.now_ns() // 1_000_000, timed=table.timed)
        _check_schema(table, schema)
        self._schema = schema
        self._access = access_of(self._given)

    @in_one_sentence
    def partitions(self) -> list[InputPartition]:
        return [InputPartition(piece) for piece in self._place().pieces(self._table, self._given)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        piece = partition.value
        if isinstance(piece, Piece):
            with plainly():
                rows = self._place().rows(self._table, self._given, piece)
                yield from _batches(rows, table_named(self._table), self._schema)

    def _place(self) -> SparkPlace:
        return place_at(self._given["path"], self._access)


class NoStream(DataSourceStreamReader):
    """Raises with its first call: Spark would replace an earlier error by one of its own."""

    def __init__(self, table: str) -> None:
        self._table = table

    @in_one_sentence
    def initialOffset(self) -> dict[str, int]:  # noqa: N802  Spark's name
        raise InvalidRequest(
            f"table {self._table} cannot be read as a stream, only messages can: read it with spark.read instead"
        )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return iter(())


def _check_schema(table: TableSpec, schema: StructType) -> None:
    """Raise InvalidRequest if the user's schema has columns or types that the table does not have."""
    columns = {field.name: field.dataType for field in schema_of(table)}
    for field in schema:
        kind = columns.get(field.name)
        if kind is None:
            raise InvalidRequest(f"table {table.name} has no column {field.name!r}: it has {', '.join(columns)}")
        if field.dataType != kind and (kind, field.dataType) != (BinaryType(), StringType()):
            raise InvalidRequest(
                f"column {field.name!r} of table {table.name} is {kind.simpleString()}, not "
                f"{field.dataType.simpleString()}"
            )


def _batches(rows: Iterator[Row], table: TableSpec, schema: StructType) -> Iterator[pa.RecordBatch]:
    """Rows as record batches with exactly the columns of the schema."""
    arrow = to_arrow_schema(schema, timezone="UTC")
    every = schema_of(table)
    stored = to_arrow_schema(every, timezone="UTC")
    places = [every.fieldNames().index(name) for name in schema.fieldNames()]
    gathered: list[Row] = []
    size = 0

    def batch() -> pa.RecordBatch:
        columns = list(zip(*gathered, strict=True))
        arrays = [pa.array(columns[place], stored.field(place).type) for place in places]
        cast = [array.cast(field.type) for array, field in zip(arrays, arrow, strict=True)]
        return pa.RecordBatch.from_arrays(cast, schema=arrow)

    for row in rows:
        gathered.append(row)
        size += sum(len(item) for item in row if isinstance(item, bytes))
        if len(gathered) >= _MOST_ROWS or size >= _MOST_BYTES:
            yield batch()
            gathered, size = [], 0
    if gathered:
        yield batch()
