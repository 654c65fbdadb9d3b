"""What a data folder can tell besides its messages, as tables: dead letters, groups, delayed messages, traces and more.

A table is planned when it is loaded and read when it is used, by tasks that open the files themselves. No lock is
taken: another process may own the folder, and write to it all the while.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Final

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import BinaryType, StringType, StructType

from holdfast.broker.folder.contents import Catalog
from holdfast.env import real_world
from holdfast.errors import HoldfastError, InvalidRequest
from holdfast.spark.errors import in_one_sentence, plainly
from holdfast.spark.source.folder import DataFolder
from holdfast.spark.source.options import table_options
from holdfast.spark.source.schema import message_schema
from holdfast.spark.tables.rows import NEVER_NS, TABLES, Piece, Row, Table, Wanted

MESSAGES: Final = "messages"

# A batch ends at either.
_MOST_ROWS: Final = 4_096
_MOST_BYTES: Final = 8 << 20


def table_named(name: str) -> Table:
    """The table; InvalidRequest for what is none."""
    found = TABLES.get(name.lower())
    if found is None:
        known = (MESSAGES, *TABLES)
        near = get_close_matches(name.lower(), known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise InvalidRequest(f"there is no table {name!r}; {hint}choose from {', '.join(known)}")
    return found


def table_schema(name: str) -> StructType:
    """All columns of a table."""
    return message_schema(headers=True) if name == MESSAGES else table_named(name).schema


def table_reader(name: str, options: Mapping[str, str], schema: StructType) -> DataSourceReader:
    """The reader of a table other than the messages, for the columns of the schema."""
    return TableReader(table_named(name), options, schema)


def register_tables(spark: SparkSession, path: str, prefix: str = "") -> list[str]:
    """Make views of the folder's messages and tables for SQL; answers with their names.

    The topics, and the offsets of messages, are those of now: register again to see what came since.
    """
    views = []
    for name in (MESSAGES, *TABLES):
        table = spark.read.format("holdfast").options(path=path, table=name)
        if name == MESSAGES:
            # A view outlives what it was planned for: what a queue has dropped since is not missed.
            table = table.options(subscribePattern=".*", includeHeaders="true", failOnDataLoss="false")
        table.load().createOrReplaceTempView(f"{prefix}{name}")
        views.append(f"{prefix}{name}")
    return views


class TablePart(InputPartition):
    """What one task reads."""

    def __init__(self, piece: Piece) -> None:
        super().__init__(piece)
        self.piece = piece


class TableReader(DataSourceReader):
    """Plans on the driver, reads in the tasks."""

    @in_one_sentence
    def __init__(self, table: Table, options: Mapping[str, str], schema: StructType) -> None:
        self._table = table.name  # a table itself cannot be sent to the tasks
        self._asked = table_options(options, real_world().clock.now_ns() // 1_000_000, timed=table.timed)
        _check_schema(table, schema)
        self._schema = schema

    @in_one_sentence
    def partitions(self) -> list[InputPartition]:
        folder, wanted = self._opened()
        pieces = TABLES[self._table].pieces(folder, self._asked.subscription, wanted)
        return [TablePart(piece) for piece in pieces]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if isinstance(partition, TablePart):
            with plainly():
                folder, wanted = self._opened()
                table = TABLES[self._table]
                rows = _unless_deleted(table.rows(folder.world, wanted, partition.piece), folder, partition.piece)
                yield from _batches(rows, table, self._schema)

    def _opened(self) -> tuple[DataFolder, Wanted]:
        asked = self._asked
        folder = DataFolder(asked.path)
        named = None if asked.all_topics else frozenset(folder.topics(asked.subscription))
        since_ns, until_ns = asked.starting_ns or 0, asked.ending_ns or NEVER_NS
        return folder, Wanted(folder.path, named, since_ns, until_ns)


class NoStream(DataSourceStreamReader):
    """Refuses with its first call: of an error that comes sooner Spark would tell another one of its own."""

    def __init__(self, table: str) -> None:
        self._table = table

    @in_one_sentence
    def initialOffset(self) -> dict[str, int]:  # noqa: N802  Spark's name
        raise InvalidRequest(
            f"table {self._table} cannot be read as a stream, only messages can: read it with spark.read instead"
        )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return iter(())


def _check_schema(table: Table, schema: StructType) -> None:
    """Refuse a schema of the user's that asks for what the table does not have."""
    columns = {field.name: field.dataType for field in table.schema}
    for field in schema:
        kind = columns.get(field.name)
        if kind is None:
            raise InvalidRequest(f"table {table.name} has no column {field.name!r}: it has {', '.join(columns)}")
        if field.dataType != kind and (kind, field.dataType) != (BinaryType(), StringType()):
            raise InvalidRequest(
                f"column {field.name!r} of table {table.name} is {kind.simpleString()}, not "
                f"{field.dataType.simpleString()}"
            )


def _unless_deleted(rows: Iterator[Row], folder: DataFolder, piece: Piece) -> Iterator[Row]:
    """The rows; none from where the topic was deleted on."""
    try:
        yield from rows
    except (OSError, HoldfastError):
        if not piece.topic or piece.topic in Catalog(folder.world, folder.path):
            raise


def _batches(rows: Iterator[Row], table: Table, schema: StructType) -> Iterator[pa.RecordBatch]:
    """Rows as record batches with exactly the columns of the schema."""
    arrow = to_arrow_schema(schema, timezone="UTC")
    stored = to_arrow_schema(table.schema, timezone="UTC")
    places = [table.schema.fieldNames().index(name) for name in schema.fieldNames()]
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
