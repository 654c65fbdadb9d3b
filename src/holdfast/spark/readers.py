"""The readers of messages: they plan on the driver and read in the tasks, as Arrow batches from the segment files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
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

from holdfast.broker.folder.layout import check_name
from holdfast.broker.messages import MOVED, ONLY_FOR, PREFIX, TOMBSTONE
from holdfast.broker.streams.queries import QueryLease, renewing
from holdfast.codec.arrow import FrameColumns
from holdfast.codec.columns import FLAGS
from holdfast.codec.frame import Frame, Kind
from holdfast.env import real_world
from holdfast.errors import CorruptData, DamagedRange, InvalidRequest, OffsetOutOfRange, UnknownFormat
from holdfast.spark.options import (
    ReadOptions,
    ReadPolicy,
    batch_read_options,
    in_one_sentence,
    plainly,
    stream_read_options,
)
from holdfast.spark.ranges import (
    DataFolder,
    Positions,
    Range,
    StreamPlanner,
    batch_ranges,
    from_json,
    lost,
    splits,
    to_json,
)

HEADERS: Final = ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))


class PartitionFrames(msgspec.Struct, frozen=True):
    """What a column is made of: frames, and the partition that they belong to."""

    frames: FrameColumns
    topic: str
    partition: int


class SparkColumn(msgspec.Struct, frozen=True):
    """One column: its types, the default one first, and the function that makes it."""

    name: str
    types: tuple[DataType, ...]
    make: Callable[[PartitionFrames], Any]


_COLUMNS: Final = (
    SparkColumn("key", (BinaryType(), StringType()), lambda source: source.frames.keys()),
    SparkColumn("value", (BinaryType(), StringType()), lambda source: source.frames.values()),
    SparkColumn("topic", (StringType(),), lambda source: pa.repeat(source.topic, source.frames.rows)),
    SparkColumn("partition", (IntegerType(),), lambda source: np.full(source.frames.rows, source.partition, np.int32)),
    SparkColumn("offset", (LongType(),), lambda source: source.frames.offsets()),
    SparkColumn("timestamp", (TimestampType(),), lambda source: source.frames.times()),
    SparkColumn("priority", (IntegerType(),), lambda source: source.frames.priorities().astype(np.int32)),
    SparkColumn("expires_at", (TimestampType(),), lambda source: source.frames.expires_at()),
    SparkColumn("due_at", (TimestampType(),), lambda source: source.frames.due_at()),
    SparkColumn("tombstone", (BooleanType(),), lambda source: (source.frames.flags() & TOMBSTONE).astype(np.bool_)),
    SparkColumn("producer_id", (LongType(),), lambda source: source.frames.producer_ids()),
    SparkColumn("producer_epoch", (LongType(),), lambda source: source.frames.producer_epochs()),
    SparkColumn("sequence", (LongType(),), lambda source: source.frames.sequences()),
    SparkColumn("epoch", (LongType(),), lambda source: source.frames.epochs()),
    SparkColumn("headers", (HEADERS,), lambda source: users_headers(source.frames.headers())),
)
COLUMNS: Final = {column.name: column for column in _COLUMNS}


def message_schema(*, headers: bool) -> StructType:
    """All columns, with or without `headers`."""
    names = [column.name for column in _COLUMNS if headers or column.name != "headers"]
    return StructType([StructField(name, COLUMNS[name].types[0]) for name in names])


def check_schema(schema: StructType) -> None:
    """Raise InvalidRequest if the user's schema has columns or types that messages do not have."""
    for field in schema.fields:
        column = COLUMNS.get(field.name)
        if column is None:
            raise InvalidRequest(f"messages have no column {field.name!r}: they have {', '.join(COLUMNS)}")
        if not any(field.dataType == wanted for wanted in column.types):
            types = " or ".join(wanted.simpleString() for wanted in column.types)
            raise InvalidRequest(f"column {field.name!r} is {types}, not {field.dataType.simpleString()}")


class Maker:
    """Makes record batches with exactly the columns of a schema. Other columns are not decoded."""

    def __init__(self, schema: StructType) -> None:
        self._schema = to_arrow_schema(schema, timezone="UTC")
        self._makes = [COLUMNS[name].make for name in schema.fieldNames()]

    def batch(self, source: PartitionFrames) -> pa.RecordBatch:
        arrays = [_as(make(source), field, source) for make, field in zip(self._makes, self._schema, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


def _as(values: Any, field: pa.Field, source: PartitionFrames) -> pa.Array:
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
    """The headers without those of Holdfast itself."""
    names = headers.values.field("key")
    ours = pc.starts_with(names, PREFIX)
    if not pc.any(ours).as_py():
        return headers
    kept = np.logical_not(ours.to_numpy(zero_copy_only=False))
    ends = np.concatenate([[0], np.cumsum(kept)]).astype(np.int32)[headers.offsets.to_numpy()]
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), headers.values.filter(pa.array(kept)))


logger = logging.getLogger(__name__)


# A batch ends at either limit: enough rows to pay for its overhead, and few enough bytes for any executor.
_MOST_ROWS: Final = 32_768
_MOST_BYTES: Final = 8 << 20


def record_batches(folder: DataFolder, wanted: Range, maker: Maker, policy: ReadPolicy) -> Iterator[pa.RecordBatch]:
    """The messages of the range, in order. Only one batch is in memory at a time, however large the range."""
    gathered: list[Frame] = []
    rows = size = 0
    for frame in _frames(folder, wanted, policy):
        gathered.append(frame)
        rows += frame.count
        size += frame.header.raw_bytes
        if rows >= _MOST_ROWS or size >= _MOST_BYTES:
            yield from _batch(gathered, wanted, maker, policy)
            gathered, rows, size = [], 0, 0
    if gathered:
        yield from _batch(gathered, wanted, maker, policy)


def _frames(folder: DataFolder, wanted: Range, policy: ReadPolicy) -> Iterator[Frame]:
    """The frames that hold messages of the range."""
    reader = folder.reader(wanted.topic, wanted.partition)
    at = wanted.start
    while reader is not None and at < wanted.stop:
        try:
            for frame in reader.read(at):
                if frame.base_offset >= wanted.stop:
                    return
                if frame.header.kind == Kind.DATA:
                    yield frame
                at = frame.next_offset
            reach = at
        except DamagedRange as damage:
            if not policy.skip_corrupt:
                raise
            until = min(damage.next_offset, wanted.stop)
            _warn("damaged messages passed over", wanted, until - max(damage.first_offset, at), str(damage))
            at = damage.next_offset
            continue
        except OffsetOutOfRange as gone:
            if at < gone.start:  # retention was faster
                if policy.fail_on_data_loss:
                    raise lost(wanted, gone.start) from None
                _warn("messages are gone, passed over", wanted, min(gone.start, wanted.stop) - at, str(gone))
                at = gone.start
                continue
            reach = gone.end
        except UnknownFormat as error:
            raise UnknownFormat(f"{wanted} cannot be read: {error}") from None
        if reach < wanted.stop:
            _end_too_early(wanted, reach, reader.start, policy)
        return


def _end_too_early(wanted: Range, end: int, start: int, policy: ReadPolicy) -> None:
    """Raise OffsetOutOfRange or warn: the log lost its tail in a power cut after the range was planned."""
    if policy.fail_on_data_loss:
        raise OffsetOutOfRange(
            f"{wanted.topic}/{wanted.partition} ends at {end}, and {wanted} were to be read: messages that were not "
            "synced were lost. Read again what is there now",
            offset=wanted.stop,
            start=start,
            end=end,
        )
    _warn("messages are gone, passed over", wanted, wanted.stop - end, "the log ends before")


def _batch(frames: Sequence[Frame], wanted: Range, maker: Maker, policy: ReadPolicy) -> Iterator[pa.RecordBatch]:
    columns = FrameColumns(frames)
    batch = maker.batch(PartitionFrames(columns, wanted.topic, wanted.partition))
    below = max(wanted.start - frames[0].base_offset, 0)
    above = max(frames[-1].next_offset - wanted.stop, 0)
    kept = columns.kept()
    if not policy.include_redriven:
        kept = _without_redriven(frames, columns, kept)
    if below or above:
        batch = batch.slice(below, columns.rows - below - above)
        kept = None if kept is None else kept[below : columns.rows - above]
    if kept is not None:
        batch = batch.filter(pa.array(kept))
    if batch.num_rows:
        yield batch


def _without_redriven(
    frames: Sequence[Frame], all_columns: FrameColumns, kept: np.ndarray[Any, np.dtype[np.bool_]] | None
) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
    """Leave out messages that were redriven for one group only: all others have read them."""
    if not (all_columns.flags() & MOVED).any():
        return kept
    at = 0
    for frame in frames:
        if frame.header.columns & FLAGS:
            columns = frame.columns()
            moved = [i for i, flags in enumerate(columns.flags() or ()) if flags & MOVED]
            headers = columns.headers() if moved else None
            back = [at + i for i in moved if headers and any(name == ONLY_FOR for name, _ in headers[i])]
            if back:
                kept = np.ones(sum(frame.count for frame in frames), np.bool_) if kept is None else kept
                kept[back] = False
        at += frame.count
    return kept


def _warn(what: str, wanted: Range, messages: int, why: str) -> None:
    logger.warning("%s: %d of %s (%s)", what, messages, wanted, why)


class BatchReader(DataSourceReader):
    """Plans on the driver, reads in the tasks."""

    @in_one_sentence
    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self._options = batch_read_options(options, real_world().clock.now_ns() // 1_000_000)
        check_schema(schema)
        self._schema = schema

    @in_one_sentence
    def partitions(self) -> list[InputPartition]:
        folder = DataFolder(self._options.path)
        ranges = batch_ranges(folder, self._options)
        return [InputPartition(wanted) for wanted in splits(folder, ranges, self._options.min_partitions)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_split(self._options, self._schema, partition)


def read_split(options: ReadOptions, schema: StructType, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """The rows of one task. Spark makes up a partition without a range if there is nothing to read."""
    if not isinstance(partition.value, Range):
        return
    with plainly():
        yield from record_batches(DataFolder(options.path), partition.value, Maker(schema), options)


class MicroBatchReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans the whole query on the driver. Copies of it read in the tasks."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        # Checked with the first call only: Spark would replace an error in here by one of its own.
        self._given = options
        self._schema = schema
        self._admission: StreamPlanner | None = None
        self._lease: QueryLease | None = None
        self._initial: dict[str, Any] | None = None

    @cached_property
    def _options(self) -> ReadOptions:
        options = stream_read_options(self._given, real_world().clock.now_ns() // 1_000_000)
        if options.group is not None:
            check_name(options.group, 'option "groupId":')
        check_schema(self._schema)
        return options

    def __getstate__(self) -> dict[str, Any]:
        """The state without the open files of the driver, for the tasks."""
        return {**self.__dict__, "_admission": None, "_lease": None}

    @in_one_sentence
    def initialOffset(self) -> dict[str, Any]:  # noqa: N802  Spark's name, as all below
        if self._initial is None:  # Spark asks twice, and must get the same answer
            self._hold(Positions())  # first, so that retention does not drop what is about to be found
            positions = self._planner().initial()
            self._hold(positions)
            self._initial = to_json(positions)
        return self._initial

    @in_one_sentence
    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        most = self._options.max_offsets
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    @in_one_sentence
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._planner().freeze()

    @in_one_sentence
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        positions = from_json(start)
        self._hold(positions)  # the query has finished all messages before these
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        return to_json(self._planner().latest(positions, most))

    @in_one_sentence
    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        return to_json(self._planner().end())

    @in_one_sentence
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        positions = from_json(start)
        self._hold(positions)
        planner = self._planner()
        ranges = planner.ranges(positions, from_json(end))
        return [InputPartition(wanted) for wanted in splits(planner.folder, ranges, self._options.min_partitions)]

    @in_one_sentence
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_split(self._options, self._schema, partition)

    def _planner(self) -> StreamPlanner:
        if self._admission is None:
            self._admission = StreamPlanner(DataFolder(self._options.path), self._options)
        return self._admission

    def _hold(self, positions: Positions) -> None:
        """Report the position of the query, and keep retention from dropping what it has not read."""
        if self._lease is None:
            folder = self._planner().folder
            group = self._options.group or f"spark-{folder.world.ids.random_u32():08x}"
            # Lasting: a query that ends may go on later from its checkpoint, and nothing tells whether it will.
            lease = QueryLease.start(folder.world, folder.path, group, ttl_ms=self._options.pin_ms, lasting=True)
            self._lease = renewing(lease)  # a batch may take an hour without any call from Spark
        self._lease.hold(self._planner().unread(positions))
