"""The files of a table: plain Parquet in folders by column, each named after the batches that it holds.

    lake/orders-land/dt=2026-11-16/topic=orders/b000000000012-000000000012-00000.parquet

Every row also says which batch wrote it (`_batch`), so that who reads on from batch 11 finds its rows in any file that
reaches beyond it, be it merged or not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from holdfast.env.lakedisk import LakeDisk

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameReader, SparkSession
    from pyspark.sql.types import StructType

BATCH: Final = "_batch"
DATE: Final = "dt"
_FILE: Final = re.compile(r"(?:.*/)?b([0-9]{12})-([0-9]{12})-([0-9]{5})\.parquet")


def file_name(first: int, last: int, number: int) -> str:
    return f"b{first:012d}-{last:012d}-{number:05d}.parquet"


def batches_in(path: str) -> tuple[int, int] | None:
    """The first and the last batch that a file of a table holds; None where it is no such file."""
    found = _FILE.fullmatch(path)
    return (int(found[1]), int(found[2])) if found else None


def table_files(disk: LakeDisk, table: str) -> list[str]:
    """The files of a table, from its folder.

    A listing that met a folder just as it was merged away and removed could lack files, so it must be seen twice.
    """
    found, again = None, disk.files_below(table)
    while again != found:
        found, again = again, disk.files_below(table)
    return [path for path in again if not _is_hidden(path) and batches_in(path)]


def files_between(paths: Iterable[str], after: int, through: int) -> list[str]:
    """Those that may hold rows of the batches beyond `after` and up to `through`."""
    found = []
    for path in paths:
        held = batches_in(path)
        if held and held[1] > after and held[0] <= through:
            found.append(path)
    return found


def staged_files(disk: LakeDisk, folder: str) -> list[str]:
    """What Spark wrote there, without its side files."""
    return [path for path in disk.files_below(folder) if path.endswith(".parquet") and not _is_hidden(path)]


def rows_in_files(disk: LakeDisk, folder: str) -> int:
    """How many rows Spark wrote there, as the files themselves say."""
    from pyarrow.parquet import read_metadata

    return sum(read_metadata(f"{folder}/{path}").num_rows for path in staged_files(disk, folder))


def read_table(spark: SparkSession, disk: LakeDisk, table: str, *, after: int, through: int) -> DataFrame | None:
    """The rows of the batches beyond `after` and up to `through`; None where there are no files for them."""
    names = files_between(table_files(disk, table), after, through)
    if not names:
        return None
    reader = plainly(spark.read).option("basePath", table)
    newest = max(names, key=lambda name: batches_in(name) or (0, 0))
    schema = _with_plain_folders(reader.parquet(f"{table}/{newest}").schema, newest)
    rows = reader.schema(schema).parquet(*[f"{table}/{name}" for name in names])
    return rows.where(f"{BATCH} > {after} AND {BATCH} <= {through}")


def plainly(reader: DataFrameReader) -> DataFrameReader:
    """Paths are paths: without this a folder named `lake [1]` would be taken for a pattern."""
    return reader.option("__globPaths__", False)


def _with_plain_folders(schema: StructType, path: str) -> StructType:
    """Spark takes a topic named 2024 for a number, since it stands in a folder's name; it is a text."""
    from pyspark.sql.types import DateType, StringType, StructField, StructType

    columns = {part.partition("=")[0] for part in path.split("/")[:-1]}
    fields = []
    for field in schema.fields:
        kind = field.dataType
        if field.name in columns:
            kind = DateType() if field.name == DATE else StringType()
        fields.append(StructField(field.name, kind, nullable=True))
    return StructType(fields)


def quoted(name: str) -> str:
    """A column by exactly this name, where Spark would take `a.b` for the field b of a."""
    return f"`{name.replace('`', '``')}`"


def _is_hidden(path: str) -> bool:
    return any(part.startswith(("_", ".")) and "=" not in part for part in path.split("/"))
