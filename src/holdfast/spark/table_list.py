"""Which tables there are: their columns, how each is cut into tasks, and where its rows come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DoubleType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from holdfast.broker.layout import DEAD_SUFFIX
from holdfast.broker.trace_log import TRACES
from holdfast.spark import table_rows
from holdfast.spark.folder import DataFolder
from holdfast.spark.options import Subscription
from holdfast.spark.schema import HEADERS
from holdfast.spark.table_rows import Piece, Rows, Wanted
from holdfast.storage import LogReader
from holdfast.storage.opening import is_log

# A task for so many bytes of traces, about.
_PIECE_BYTES: Final = 32 << 20

_FAILURES: Final = ArrayType(
    StructType(
        [
            StructField("at", TimestampType()),
            StructField("holder", StringType()),
            StructField("why", StringType()),
            StructField("error", StringType()),
        ]
    )
)


class Table(msgspec.Struct, frozen=True):
    """One table: its columns, how it is cut into tasks, and where its rows come from."""

    name: str
    schema: StructType
    pieces: Callable[[DataFolder, Subscription, Wanted], Iterator[Piece]]
    rows: Rows
    timed: bool = False  # takes startingTimestamp and endingTimestamp


def _schema(**columns: Any) -> StructType:
    return StructType([StructField(name, kind) for name, kind in columns.items()])


def _whole(folder: DataFolder, subscription: Subscription, wanted: Wanted) -> Iterator[Piece]:
    yield Piece()


def _by_partition(folder: DataFolder, subscription: Subscription, wanted: Wanted) -> Iterator[Piece]:
    for topic, number in folder.partitions(subscription):
        yield Piece(topic, number)


def _by_log(folder: DataFolder, subscription: Subscription, wanted: Wanted) -> Iterator[Piece]:
    for topic, number in folder.partitions(subscription):
        yield Piece(topic, number)
        yield Piece(topic + DEAD_SUFFIX, number)
    if wanted.topics is None:
        yield Piece(TRACES)


def _by_segments(folder: DataFolder, subscription: Subscription, wanted: Wanted) -> Iterator[Piece]:
    """The log of traces in pieces; the last is open, so that it is read up to where it ends then."""
    place = table_rows.trace_folder(folder.path)
    if not is_log(folder.world, place):
        return
    reader = LogReader(place, world=folder.world)
    start = reader.find_time(wanted.since_ns) if wanted.since_ns else reader.start
    size = 0
    for segment in reader.segments():
        if size >= _PIECE_BYTES and segment.base_offset > start:
            yield Piece(TRACES, 0, start, segment.base_offset)
            start, size = segment.base_offset, 0
        size += segment.bytes
    yield Piece(TRACES, 0, start)


_TABLES: Final = (
    Table(
        "dead_letters",
        _schema(
            id=StringType(),
            message_id=StringType(),
            topic=StringType(),
            partition=IntegerType(),
            offset=LongType(),
            group=StringType(),
            state=StringType(),
            reason=StringType(),
            error=StringType(),
            attempts=IntegerType(),
            published_at=TimestampType(),
            first_at=TimestampType(),
            last_at=TimestampType(),
            dead_at=TimestampType(),
            holder=StringType(),
            priority=IntegerType(),
            key=BinaryType(),
            value=BinaryType(),
            headers=HEADERS,
            document=StringType(),
            failures=_FAILURES,
            letter_offset=LongType(),
        ),
        _by_partition,
        table_rows.dead_letters,
    ),
    Table(
        "groups",
        _schema(
            group=StringType(),
            topic=StringType(),
            partition=IntegerType(),
            mode=StringType(),
            position=LongType(),
            end=LongType(),
            lag=LongType(),
            lag_seconds=DoubleType(),
            leased=LongType(),
            waiting=LongType(),
            members=ArrayType(StringType()),
            problem=StringType(),
        ),
        _whole,
        table_rows.groups,
    ),
    Table(
        "delayed",
        _schema(
            id=StringType(),
            topic=StringType(),
            partition=IntegerType(),
            due_at=TimestampType(),
            published_at=TimestampType(),
            expires_at=TimestampType(),
            priority=IntegerType(),
            key=BinaryType(),
            value=BinaryType(),
            headers=HEADERS,
        ),
        _by_partition,
        table_rows.delayed,
    ),
    Table(
        "traces",
        _schema(
            id=StringType(),
            trace_id=StringType(),
            step=StringType(),
            at=TimestampType(),
            topic=StringType(),
            partition=IntegerType(),
            offset=LongType(),
            group=StringType(),
            holder=StringType(),
            attempt=IntegerType(),
            why=StringType(),
            error=StringType(),
            due_at=TimestampType(),
            lease_until=TimestampType(),
            related_id=StringType(),
            span_id=StringType(),
            parent_id=StringType(),
            trace_state=StringType(),
        ),
        _by_segments,
        table_rows.traces,
        timed=True,
    ),
    Table(
        "corrupt",
        _schema(
            topic=StringType(),
            partition=IntegerType(),
            first_offset=LongType(),
            next_offset=LongType(),
            reason=StringType(),
        ),
        _by_log,
        table_rows.corrupt,
    ),
    Table(
        "topics",
        _schema(
            name=StringType(),
            id=LongType(),
            created_at=TimestampType(),
            partitions=IntegerType(),
            partition=IntegerType(),
            start=LongType(),
            end=LongType(),
            bytes=LongType(),
            segments=IntegerType(),
        ),
        _whole,
        table_rows.topics,
    ),
)
TABLES: Final = {table.name: table for table in _TABLES}
