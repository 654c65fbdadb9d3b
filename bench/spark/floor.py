"""A Python data source that does nothing: what Spark takes for any of them, whatever stands behind it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows

_NAME = "floor"
_BATCH = 8_192
_TASKS = 4
_VALUES = {
    "key": b"00000000",
    "value": bytes(100),
    "topic": "orders",
    "partition": 0,
    "offset": 1,
    "timestamp": datetime(2026, 1, 1, tzinfo=UTC),
}


class FloorSource(DataSource):
    """Rows that were made before; options `rows`, and `rowsPerBatch` of a stream."""

    @classmethod
    def name(cls) -> str:
        return _NAME

    def schema(self) -> str:
        return "value binary"

    def reader(self, schema: Any) -> DataSourceReader:
        return _Reader(schema, int(self.options["rows"]))

    def streamReader(self, schema: Any) -> DataSourceStreamReader:  # noqa: N802  Spark's name
        return _StreamReader(schema, int(self.options["rowsPerBatch"]))


class _Reader(DataSourceReader):
    def __init__(self, schema: Any, rows: int) -> None:
        self._schema = schema
        self._rows = rows

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(self._rows // _TASKS + (number < self._rows % _TASKS)) for number in range(_TASKS)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return _ready(self._schema, partition.value)


class _StreamReader(DataSourceStreamReader):
    def __init__(self, schema: Any, rows: int) -> None:
        self._schema = schema
        self._rows = rows

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        return {"offset": 0}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(self._rows)

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802
        return {"offset": start["offset"] + self._rows}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return [InputPartition(end["offset"] - start["offset"])]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return _ready(self._schema, partition.value)


def _ready(schema: Any, rows: int) -> Iterator[Any]:
    """The same batch again and again."""
    import pyarrow as pa
    from pyspark.sql.pandas.types import to_arrow_schema

    arrow = to_arrow_schema(schema, timezone="UTC")
    arrays = [pa.array([_VALUES[field.name]] * min(rows, _BATCH), field.type) for field in arrow]
    batch = pa.RecordBatch.from_arrays(arrays, schema=arrow)
    while rows > 0:
        yield batch.slice(0, min(rows, _BATCH))
        rows -= _BATCH
