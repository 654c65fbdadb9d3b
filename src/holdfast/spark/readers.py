"""The readers of messages: they plan on the driver and read in the tasks, as Arrow batches from stored frames."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, Final, Protocol

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
from holdfast.codec.arrow import FrameColumns, from_numpy, repeated
from holdfast.codec.columns import FLAGS
from holdfast.codec.frame import Frame, Kind
from holdfast.env import real_world
from holdfast.env.process import skip_modules_in_collections
from holdfast.errors import CorruptData, DamagedRange, HoldfastError, InvalidRequest, OffsetOutOfRange, UnknownFormat
from holdfast.spark.options import (
    ReadOptions,
    ReadPolicy,
    as_meant,
    batch_read_options,
    in_one_sentence,
    plainly,
    stream_read_options,
)
from holdfast.spark.places import ServerAccess, SparkPlace, access_of, place_at
from holdfast.spark.ranges import PlanRequest, Range, ReadPlan, Step, from_json, lost

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
    SparkColumn("topic", (StringType(),), lambda source: repeated(source.topic, source.frames.rows)),
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
_KAFKA: Final = ("key", "value", "topic", "partition", "offset", "timestamp")
_METADATA: Final = tuple(name for name in COLUMNS if name not in (*_KAFKA, "headers"))
# Kafka's word for whose clock it was: 1, the log's. Always the same here, so it is there only for those who name it.
_TIMESTAMP_TYPE: Final = SparkColumn(
    "timestampType", (IntegerType(),), lambda source: np.ones(source.frames.rows, np.int32)
)
_ON_REQUEST: Final = {**COLUMNS, "timestampType": _TIMESTAMP_TYPE}


def message_schema(*, metadata: bool, headers: bool) -> StructType:
    """Kafka's columns, and on request the others: Spark does not say which ones a query uses, so all are read."""
    names = [*_KAFKA, *(_METADATA if metadata else ()), *(("headers",) if headers else ())]
    return StructType([StructField(name, COLUMNS[name].types[0]) for name in names])


def named_columns(names: Sequence[str]) -> StructType:
    """The columns of these names, each with its default type. Raises InvalidRequest if messages have no such column."""
    for name in names:
        if name not in _ON_REQUEST:
            raise _no_column(name)
    return StructType([StructField(name, _ON_REQUEST[name].types[0]) for name in names])


def _no_column(name: str) -> InvalidRequest:
    return InvalidRequest(f"messages have no column {name!r}: they have {', '.join(_ON_REQUEST)}")


def check_schema(schema: StructType) -> None:
    """Raise InvalidRequest if the user's schema has columns or types that messages do not have."""
    for field in schema.fields:
        column = _ON_REQUEST.get(field.name)
        if column is None:
            raise _no_column(field.name)
        if not any(field.dataType == wanted for wanted in column.types):
            types = " or ".join(wanted.simpleString() for wanted in column.types)
            raise InvalidRequest(f"column {field.name!r} cannot be {field.dataType.simpleString()}: read it as {types}")


class Maker:
    """Makes record batches with exactly the columns of a schema. Other columns are not decoded."""

    def __init__(self, schema: StructType) -> None:
        self._schema = to_arrow_schema(schema, timezone="UTC")
        self._makes = [_ON_REQUEST[name].make for name in schema.fieldNames()]

    def batch(self, source: PartitionFrames) -> pa.RecordBatch:
        arrays = [_as(make(source), field, source) for make, field in zip(self._makes, self._schema, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


def _as(values: Any, field: pa.Field, source: PartitionFrames) -> pa.Array:
    array = values if isinstance(values, pa.Array) else from_numpy(values)
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
    return pa.ListArray.from_arrays(from_numpy(ends), headers.values.filter(from_numpy(kept)))


logger = logging.getLogger(__name__)


# A batch ends at either limit: enough rows to pay for its overhead, few enough to stay in the processor's cache on the
# way to Spark, and few enough bytes for any executor.
_MOST_ROWS: Final = 8_192
_MOST_BYTES: Final = 8 << 20


class FrameSource(Protocol):
    """Where frames come from: a place, or a folder."""

    def frames(self, wanted: Range, at: int) -> Iterator[Frame]: ...


def record_batches(source: FrameSource, wanted: Range, maker: Maker, policy: ReadPolicy) -> Iterator[pa.RecordBatch]:
    """The messages of the range, in order. Only one batch is in memory at a time, however large the range."""
    gathered: list[Frame] = []
    rows = size = 0
    for frame in _frames(source, wanted, policy):
        gathered.append(frame)
        rows += frame.count
        size += frame.header.raw_bytes
        if rows >= _MOST_ROWS or size >= _MOST_BYTES:
            yield from _batch(gathered, wanted, maker, policy)
            gathered, rows, size = [], 0, 0
    if gathered:
        yield from _batch(gathered, wanted, maker, policy)


def _frames(source: FrameSource, wanted: Range, policy: ReadPolicy) -> Iterator[Frame]:
    """The frames that hold messages of the range."""
    at = wanted.start
    while at < wanted.stop:
        try:
            for frame in source.frames(wanted, at):
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
            _warn("damaged messages skipped", wanted, until - max(damage.first_offset, at), str(damage))
            at = damage.next_offset
            continue
        except OffsetOutOfRange as gone:
            if at < gone.start:  # retention was faster
                if policy.fail_on_data_loss:
                    raise lost(wanted, gone.start) from None
                _warn("messages are gone and were skipped", wanted, min(gone.start, wanted.stop) - at, str(gone))
                at = gone.start
                continue
            reach = gone.end
        except UnknownFormat as error:
            raise UnknownFormat(f"{wanted} cannot be read: {error}") from None
        if reach < wanted.stop:
            _end_too_early(wanted, reach, policy)
        return


def _end_too_early(wanted: Range, end: int, policy: ReadPolicy) -> None:
    """Raise OffsetOutOfRange or warn: the log lost its tail in a power cut after the range was planned."""
    if policy.fail_on_data_loss:
        raise OffsetOutOfRange(
            f"{wanted.topic}/{wanted.partition} ends at {end}, and {wanted} were to be read: messages that were not "
            "synced were lost. Read again what is there now",
            offset=wanted.stop,
            start=min(wanted.start, end),
            end=end,
        )
    _warn("messages are gone and were skipped", wanted, wanted.stop - end, "the log ends before")


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
        batch = batch.filter(from_numpy(kept))
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
        self._given = as_meant(options)
        self._options = batch_read_options(self._given, real_world().clock.now_ns() // 1_000_000)
        check_schema(schema)
        self._schema = schema
        self._access = access_of(self._given)

    @in_one_sentence
    def partitions(self) -> list[InputPartition]:
        found = place_at(self._options.path, self._access).plan(PlanRequest(step="batch", options=self._given))
        for each in found.lost:
            logger.warning(each)
        return [InputPartition(wanted) for wanted in found.ranges]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_split(self._options, self._access, self._schema, partition)


def read_split(
    options: ReadOptions, access: ServerAccess | None, schema: StructType, partition: InputPartition
) -> Iterator[pa.RecordBatch]:
    """The rows of one task. Spark makes up a partition without a range if there is nothing to read."""
    if not isinstance(partition.value, Range):
        return
    skip_modules_in_collections()
    with plainly():
        yield from record_batches(place_at(options.path, access), partition.value, Maker(schema), options)


class MicroBatchReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans the whole query on the driver. Copies of it read in the tasks."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        # Checked with the first call only: Spark would replace an error in here by one of its own.
        self._given = as_meant(options)
        self._schema = schema
        self._opened: SparkPlace | None = None
        self._lease: QueryLease | None = None
        self._initial: dict[str, Any] | None = None
        self._until: dict[str, Any] | None = None  # with AvailableNow: what was there at the beginning
        self._told: set[str] = set()
        self._batch_ns = 0  # when the last batch was planned

    @cached_property
    def _options(self) -> ReadOptions:
        options = stream_read_options(self._given, real_world().clock.now_ns() // 1_000_000)
        if options.group is not None:
            check_name(options.group, 'option "groupId":')
        check_name(options.group_prefix, 'option "groupIdPrefix":')
        check_schema(self._schema)
        return options

    @cached_property
    def _access(self) -> ServerAccess | None:
        return access_of(self._given)

    def __getstate__(self) -> dict[str, Any]:
        """The state without the open files of the driver, for the tasks."""
        with suppress(HoldfastError):  # told by the first call
            assert self._access is None or self._access.url  # found here, where the secrets are
        return {**self.__dict__, "_opened": None, "_lease": None}

    @in_one_sentence
    def initialOffset(self) -> dict[str, Any]:  # noqa: N802  Spark's name, as all below
        if self._initial is None:  # Spark asks twice, and must get the same answer
            self._hold(self._plan("unread"))  # first, so that retention does not drop what is about to be found
            found = self._plan("initial")
            self._hold(found)
            self._initial = found.positions
        return self._initial or {}

    @in_one_sentence
    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        most = self._options.max_offsets
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    @in_one_sentence
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._until = self._plan("end").positions

    @in_one_sentence
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        found = self._plan("latest", start=start, most=most)
        self._hold(found)  # the query has finished all messages before these
        latest = found.positions or {}
        if self._is_too_little(start, latest):
            return start
        if latest != start:
            self._batch_ns = real_world().clock.monotonic_ns()
        return latest

    @in_one_sentence
    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        return self._plan("end").positions

    @in_one_sentence
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        found = self._plan("ranges", start=start, end=end)
        self._hold(found)
        return [InputPartition(wanted) for wanted in found.ranges]

    @in_one_sentence
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_split(self._options, self._access, self._schema, partition)

    def _plan(self, step: Step, **more: Any) -> ReadPlan:
        assert self._options.path  # checked
        if self._opened is None:
            self._opened = place_at(self._options.path, self._access)
        found = self._opened.plan(PlanRequest(step=step, options=self._given, until=self._until, **more))
        for each in found.lost:
            if each not in self._told:  # once, though Spark plans again and again
                self._told.add(each)
                logger.warning(each)
        return found

    def _is_too_little(self, start: dict[str, Any], latest: dict[str, Any]) -> bool:
        """Whether to wait for more messages: there are few, and the last batch was not long ago."""
        options = self._options
        if not options.min_offsets or self._until is not None or not self._batch_ns:
            return False
        before, after = from_json(start), from_json(latest)
        count = 0
        for topic, number, position in after.places():
            known = before.at(topic, number)
            count += position.offset - (0 if known is None else known.offset)
        waited_ms = (real_world().clock.monotonic_ns() - self._batch_ns) // 1_000_000
        return count < options.min_offsets and waited_ms < options.max_delay_ms

    def _hold(self, found: ReadPlan) -> None:
        """Report the position of the query, and keep retention from dropping what it has not read."""
        if self._lease is None:
            options = self._options
            group = options.group or f"{options.group_prefix}-{real_world().ids.random_u32():08x}"
            # Lasting: a query that ends may go on later from its checkpoint, and nothing tells whether it will.
            assert self._opened is not None  # it has planned
            self._lease = renewing(self._opened.lease(group, options.pin_ms))  # a batch may take an hour
        self._lease.hold({topic: (pins.id, pins.partitions) for topic, pins in found.pins.items()})
