"""The data source `holdfast`: what Spark asks first, and which class answers."""

from __future__ import annotations

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from holdfast.spark.options import check_options, flag, in_one_sentence, required_path
from holdfast.spark.ranges import DataFolder

# The data source "holdfast": what Spark asks first, and who answers then.


class HoldfastSource(DataSource):
    """Messages, and what else a data folder can tell, for Spark."""

    @classmethod
    def name(cls) -> str:
        return "holdfast"

    @in_one_sentence
    def schema(self) -> StructType:
        from holdfast.spark.readers import message_schema

        DataFolder(required_path(self.options))  # so that a wrong path is an error of load(), not of the first action
        if self._table is None:
            check_options(self.options)
            return message_schema(headers=flag(self.options, "includeHeaders", default=False))
        from holdfast.spark.tables import table_schema

        return table_schema(self._table)

    @in_one_sentence
    def reader(self, schema: StructType) -> DataSourceReader:
        if self._table is None:
            from holdfast.spark.readers import BatchReader

            return BatchReader(self.options, schema)
        from holdfast.spark.tables import table_reader

        return table_reader(self._table, self.options, schema)

    @in_one_sentence
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802  Spark's name
        if self._table is not None:
            from holdfast.spark.tables import NoStream

            return NoStream(self._table)
        from holdfast.spark.readers import StreamReader

        return StreamReader(self.options, schema)

    @in_one_sentence
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:  # noqa: FBT001  Spark's signature
        from holdfast.spark.sink import batch_writer

        return batch_writer(self.options, schema, overwrite)

    @in_one_sentence
    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802, FBT001
        from holdfast.spark.sink import stream_writer

        return stream_writer(self.options, schema, overwrite)

    @property
    def _table(self) -> str | None:
        """The table that was asked for, other than the messages."""
        table = self.options.get("table", "messages").lower()
        return None if table == "messages" else table
