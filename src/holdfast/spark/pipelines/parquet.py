"""The Parquet files of tables: their names, and their statistics and rows, as pyarrow sees them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, datetime, timedelta
from math import isfinite
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.fs import FileSystem
    from pyarrow.parquet import FileMetaData


BATCH: Final = "_batch"
_FILE: Final = re.compile(r"(?:.*/)?b([0-9]{12})-([0-9]{12})-([0-9]{5})\.parquet")
# The folder of rows whose column is null.
NULL_FOLDER: Final = "__HIVE_DEFAULT_PARTITION__"
_MOST_ROWS: Final = 16_384
# Longer texts are left out of the statistics: a prefix is no upper bound.
_MOST_CHARACTERS: Final = 32


def file_name(first: int, last: int, number: int) -> str:
    return f"b{first:012d}-{last:012d}-{number:05d}.parquet"


def batches_in(path: str) -> tuple[int, int] | None:
    """The first and the last batch that a file of a table holds; None where it is no such file."""
    found = _FILE.fullmatch(path)
    return (int(found[1]), int(found[2])) if found else None


def files_between(paths: Iterable[str], after: int, through: int) -> list[str]:
    """Those files that may hold rows of the batches after `after`, up to `through`."""
    return [path for path in paths if (held := batches_in(path)) and held[1] > after and held[0] <= through]


def folder_values(name: str) -> dict[str, str | None]:
    """The columns that a file has by the folders it is in."""
    pairs = [part.partition("=") for part in name.split("/")[:-1]]
    return {unquote(column): None if value == NULL_FOLDER else unquote(value) for column, _, value in pairs}


def statistics(footer: FileMetaData) -> dict[str, Any]:
    """What the footer of a Parquet file says of its columns, as Delta wants it."""
    lows: dict[str, Any] = {}
    highs: dict[str, Any] = {}
    nulls: Counter[str] = Counter()
    known: Counter[str] = Counter()
    for group in range(footer.num_row_groups):
        for number in range(footer.num_columns):
            column = footer.row_group(group).column(number)
            found, name = column.statistics, footer.schema.column(number).name
            if found is None or footer.schema.column(number).path != name:  # a field of a column
                continue
            if found.has_null_count:
                nulls[name] += found.null_count
            low, high = (_bound(value) for value in ((found.min, found.max) if found.has_min_max else (None, None)))
            if low is not None and high is not None:
                known[name] += 1
                lows[name], highs[name] = min(lows.get(name, low), low), max(highs.get(name, high), high)
            elif found.has_null_count and found.null_count == column.num_values:
                known[name] += 1  # there is nothing but null in it
    whole = [name for name in lows if known[name] == footer.num_row_groups]
    return {
        "numRecords": footer.num_rows,
        "minValues": {name: _said(lows[name]) for name in whole},
        "maxValues": {name: _said(highs[name], upwards=True) for name in whole},
        "nullCount": dict(nulls),
    }


def _bound(value: Any) -> Any:
    """The value, if it can be told in statistics; None otherwise."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, str):
        return value if len(value) <= _MOST_CHARACTERS else None
    return value if isinstance(value, int | date) and not isinstance(value, bool) else None


def _said(value: Any, *, upwards: bool = False) -> Any:
    """The value as JSON. Delta's times have milliseconds."""
    if not isinstance(value, date):
        return value
    if not isinstance(value, datetime):
        return value.isoformat()
    value += timedelta(microseconds=-(value.microsecond % 1000) % 1000 if upwards else -(value.microsecond % 1000))
    return value.replace(tzinfo=None).isoformat(timespec="milliseconds") + ("Z" if value.tzinfo else "")


def rows_of_file(
    path: str,
    name: str,
    schema: pa.Schema,
    *,
    after: int | None = None,
    through: int | None = None,
    files: FileSystem | None = None,
) -> Iterator[pa.RecordBatch]:
    """The rows of one file with exactly these columns, or only those of the batches after `after`, up to `through`.

    `name` is its name in the table, whose folders are columns, too.
    """
    import pyarrow as pa
    from pyarrow import dataset

    file = dataset.dataset(path, format="parquet", filesystem=files)
    wanted = None
    if after is not None and through is not None:
        wanted = (dataset.field(BATCH) > after) & (dataset.field(BATCH) <= through)
    columns = [each.name for each in schema if each.name in file.schema.names]
    folders = folder_values(name)
    for fragment in file.get_fragments():
        # One row group after the other: a worker of Spark has no memory for what would be read ahead.
        for group in fragment.split_by_row_group(wanted, file.schema):
            for batch in group.to_batches(file.schema, columns, wanted, batch_size=_MOST_ROWS):
                if batch.num_rows:
                    yield pa.RecordBatch.from_arrays([_column(batch, each, folders) for each in schema], schema=schema)


def _column(batch: pa.RecordBatch, field: pa.Field, folders: Mapping[str, str | None]) -> pa.Array:
    import pyarrow as pa

    if field.name in batch.schema.names:
        return batch.column(field.name).cast(field.type)
    value = folders.get(field.name)
    if value is None:
        return pa.nulls(batch.num_rows, field.type)
    return pa.repeat(pa.scalar(value).cast(field.type), batch.num_rows)
