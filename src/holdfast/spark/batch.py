"""Reading messages in one go: planned once, then read by tasks that open the files themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from holdfast.env import real_world
from holdfast.spark.errors import in_one_sentence, plainly
from holdfast.spark.folder import DataFolder
from holdfast.spark.options import ReadOptions, batch_options
from holdfast.spark.plan import batch_ranges, splits
from holdfast.spark.rows import Range, Reading, record_batches
from holdfast.spark.schema import Maker, check_schema


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
