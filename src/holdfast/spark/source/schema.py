"""The columns that messages have in Spark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from holdfast.broker.messages import PREFIX, TOMBSTONE
from holdfast.codec.arrow import FrameColumns
from holdfast.errors import CorruptData, InvalidRequest

HEADERS: Final = ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))


class Source(msgspec.Struct, frozen=True):
    """What a column is made of: the frames, and the partition that they are of."""

    frames: FrameColumns
    topic: str
    partition: int


class Column(msgspec.Struct, frozen=True):
    """One column: its types, the first of which is the usual one, and how it is made."""

    name: str
    types: tuple[DataType, ...]
    make: Callable[[Source], Any]


_COLUMNS: Final = (
    Column("key", (BinaryType(), StringType()), lambda source: source.frames.keys()),
    Column("value", (BinaryType(), StringType()), lambda source: source.frames.values()),
    Column("topic", (StringType(),), lambda source: pa.repeat(source.topic, source.frames.rows)),
    Column("partition", (IntegerType(),), lambda source: np.full(source.frames.rows, source.partition, np.int32)),
    Column("offset", (LongType(),), lambda source: source.frames.offsets()),
    Column("timestamp", (TimestampType(),), lambda source: source.frames.times()),
    Column("priority", (IntegerType(),), lambda source: source.frames.priorities().astype(np.int32)),
    Column("expires_at", (TimestampType(),), lambda source: source.frames.expires_at()),
    Column("due_at", (TimestampType(),), lambda source: source.frames.due_at()),
    Column("tombstone", (BooleanType(),), lambda source: (source.frames.flags() & TOMBSTONE).astype(np.bool_)),
    Column("producer_id", (LongType(),), lambda source: source.frames.producer_ids()),
    Column("producer_epoch", (LongType(),), lambda source: source.frames.producer_epochs()),
    Column("sequence", (LongType(),), lambda source: source.frames.sequences()),
    Column("epoch", (LongType(),), lambda source: source.frames.epochs()),
    Column("headers", (HEADERS,), lambda source: users_headers(source.frames.headers())),
)
COLUMNS: Final = {column.name: column for column in _COLUMNS}


def message_schema(*, headers: bool) -> StructType:
    """All columns; the headers where they are asked for."""
    names = [column.name for column in _COLUMNS if headers or column.name != "headers"]
    return StructType([StructField(name, COLUMNS[name].types[0]) for name in names])


def check_schema(schema: StructType) -> None:
    """Refuse a schema of the user's that asks for what messages do not have."""
    for field in schema.fields:
        column = COLUMNS.get(field.name)
        if column is None:
            raise InvalidRequest(f"messages have no column {field.name!r}: they have {', '.join(COLUMNS)}")
        if not any(field.dataType == wanted for wanted in column.types):
            types = " or ".join(wanted.simpleString() for wanted in column.types)
            raise InvalidRequest(f"column {field.name!r} is {types}, not {field.dataType.simpleString()}")


class Maker:
    """Makes record batches with exactly the columns of a schema: what is not asked for is not touched."""

    def __init__(self, schema: StructType) -> None:
        self._schema = to_arrow_schema(schema, timezone="UTC")
        self._makes = [COLUMNS[name].make for name in schema.fieldNames()]

    def batch(self, source: Source) -> pa.RecordBatch:
        arrays = [_as(make(source), field, source) for make, field in zip(self._makes, self._schema, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


def _as(values: Any, field: pa.Field, source: Source) -> pa.Array:
    array = values if isinstance(values, pa.Array) else pa.array(values)
    if array.type == field.type:
        return array
    try:
        return array.cast(field.type)
    except pa.ArrowInvalid as error:
        raise CorruptData(
            f"column {field.name!r} of {source.topic}/{source.partition} cannot be read as {field.type}: {error}. "
            "Read it as binary"
        ) from None


def users_headers(headers: pa.ListArray) -> pa.ListArray:
    """The headers without our own."""
    names = headers.values.field("key")
    ours = pc.starts_with(names, PREFIX)
    if not pc.any(ours).as_py():
        return headers
    kept = np.logical_not(ours.to_numpy(zero_copy_only=False))
    ends = np.concatenate([[0], np.cumsum(kept)]).astype(np.int32)[headers.offsets.to_numpy()]
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), headers.values.filter(pa.array(kept)))
