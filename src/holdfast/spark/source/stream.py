"""Reading messages in one go, or as a stream whose memory is all in Spark's checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from holdfast.broker.folder.layout import check_name
from holdfast.broker.streams.queries import QueryLease, renewing
from holdfast.env import real_world
from holdfast.spark.errors import in_one_sentence, plainly
from holdfast.spark.source.admission import Admission, Positions, from_json, to_json
from holdfast.spark.source.folder import DataFolder
from holdfast.spark.source.options import ReadOptions, batch_options, stream_options
from holdfast.spark.source.rows import Range, Reading, batch_ranges, record_batches, splits
from holdfast.spark.source.schema import Maker, check_schema

# Reading messages in one go: planned once, then read by tasks that open the files themselves.


class Split(InputPartition):
    """What one task reads."""

    def __init__(self, wanted: Range) -> None:
        super().__init__(wanted)
        self.wanted = wanted


class BatchReader(DataSourceReader):
    """Plans on the driver, reads in the tasks."""

    @in_one_sentence
    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self._options = batch_options(options, real_world().clock.now_ns() // 1_000_000)
        check_schema(schema)
        self._schema = schema

    @in_one_sentence
    def partitions(self) -> list[InputPartition]:
        folder = DataFolder(self._options.path)
        ranges = batch_ranges(folder, self._options)
        return [Split(wanted) for wanted in splits(folder, ranges, self._options.min_partitions)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_split(self._options, self._schema, partition)


def read_split(options: ReadOptions, schema: StructType, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """The rows of one task; none for the one that Spark makes up where there is nothing to read."""
    if not isinstance(partition, Split):
        return
    reading = Reading(options.skip_corrupt, options.fail_on_data_loss, options.include_redriven)
    with plainly():
        yield from record_batches(DataFolder(options.path), partition.wanted, Maker(schema), reading)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """One for the whole query on the driver, which plans; copies of it in the tasks, which read."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        # Looked at with the first call only: of an error in here Spark would tell another one of its own.
        self._given = options
        self._schema = schema
        self._admission: Admission | None = None
        self._lease: QueryLease | None = None
        self._initial: dict[str, Any] | None = None

    @cached_property
    def _options(self) -> ReadOptions:
        options = stream_options(self._given, real_world().clock.now_ns() // 1_000_000)
        if options.group is not None:
            check_name(options.group, 'option "groupId":')
        check_schema(self._schema)
        return options

    def __getstate__(self) -> dict[str, Any]:
        """What the tasks need: not the driver's open files."""
        return {**self.__dict__, "_admission": None, "_lease": None}

    @in_one_sentence
    def initialOffset(self) -> dict[str, Any]:  # noqa: N802  Spark's name, as all below
        if self._initial is None:  # Spark asks twice, and must get the same answer
            self._hold(Positions())  # before looking: what is found there stays
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
        self._hold(positions)  # all before it is done with
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
        return [Split(wanted) for wanted in splits(planner.folder, ranges, self._options.min_partitions)]

    @in_one_sentence
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_split(self._options, self._schema, partition)

    def _planner(self) -> Admission:
        if self._admission is None:
            self._admission = Admission(DataFolder(self._options.path), self._options)
        return self._admission

    def _hold(self, positions: Positions) -> None:
        """Show where the query is, and keep what it has not read."""
        if self._lease is None:
            folder = self._planner().folder
            group = self._options.group or f"spark-{folder.world.ids.random_u32():08x}"
            # Lasting: what ends here, in whichever way, may go on from its checkpoint, and nobody says whether it will.
            lease = QueryLease.start(folder.world, folder.path, group, ttl_ms=self._options.pin_ms, lasting=True)
            self._lease = renewing(lease)  # a batch may take an hour, in which Spark calls nobody here
        self._lease.hold(self._planner().unread(positions))
