"""The other tables of a data folder, for Spark: their columns, their reader, and views of all of them for SQL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import pyarrow as pa
from pyspark.sql import SparkSession
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

from holdfast.env import real_world
from holdfast.errors import InvalidRequest
from holdfast.spark.options import as_meant, in_one_sentence, plainly, table_options
from holdfast.spark.places import SparkPlace, access_of, place_at
from holdfast.spark.readers import HEADERS, message_schema
from holdfast.spark.rows import MESSAGES, TABLES, Piece, Row, TableSpec, table_named

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
    return message_schema(headers=True) if name == MESSAGES else schema_of(table_named(name))


def table_reader(name: str, options: Mapping[str, str], schema: StructType) -> DataSourceReader:
    """The reader of a table other than the messages, for the columns of the schema."""
    return TableReader(table_named(name), options, schema)


def register_tables(spark: SparkSession, path: str, prefix: str = "") -> list[str]:
    """Make views of the folder's messages and tables for SQL, and return their names.

    The views have the topics and messages of this moment: register again to see later ones.
    """
    views = []
    for name in (MESSAGES, *TABLES):
        table = spark.read.format("holdfast").options(path=path, table=name)
        if name == MESSAGES:
            # A view is read later: messages that the queue has dropped by then are no error.
            table = table.options(subscribePattern=".*", includeHeaders="true", failOnDataLoss="false")
        table.load().createOrReplaceTempView(f"{prefix}{name}")
        views.append(f"{prefix}{name}")
    return views


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
