"""Lakes in object stores: Spark's tasks upload the files of a batch, and read those of a table, by themselves.

Spark from pip has no file system for a store. The library that commits to Delta tables, `deltalake`, has one for
Python, so tasks do in Python what Spark's own reader and writer do in a folder.

    s3://bucket/lake/orders-land/dt=2026-11-16/topic=orders/00000-3c221735-1f0a9b44.parquet
    s3://bucket/lake/orders-land/_delta_log/00000000000000000012.json

An object cannot be renamed, so files are uploaded to where they belong, under names that no other attempt of a task
has. They count once a transaction names them. Files of a run that was cut short are removed by the next run, and files
of an attempt that failed by `vacuum`.

The process that has the session reads the settings and keys of the store from its environment, and hands them to the
tasks inside of the function that these run: they are in no plan, no option and no file.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import msgspec

from holdfast.env import real_world
from holdfast.env.chain.engines import parse_place, store_advice
from holdfast.env.chain.keys import makers_variables
from holdfast.env.disk import LakeDisk
from holdfast.errors import BadSettings, CorruptData, DiskFailed, InvalidRequest
from holdfast.spark.pipelines import f
from holdfast.spark.pipelines.parquet import NULL_FOLDER, rows_of_file, statistics
from holdfast.storage.files import remove_tree

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.fs import PyFileSystem
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType


# By scheme, how the names of its settings begin in the environment.
_SETTINGS: Final = {"s3": "AWS_", "az": "AZURE_", "gs": "GOOGLE_"}
_ENDPOINT: Final = re.compile(r"AWS_ENDPOINT(_URL)?(_S3)?|AZURE_(STORAGE_)?ENDPOINT")
_PLACE: Final = "_holdfast_place"
_UPLOADED: Final = "path string, bytes long, rows long, statistics string"
# What a task has in memory of a file before it writes that as a row group.
_GROUP_BYTES: Final = 32 << 20
_MOST_TASKS: Final = 256
_CODECS: Final = {"none": "none", "uncompressed": "none", "lz4raw": "lz4", "lz4_raw": "lz4"}
_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")


def in_store(path: str) -> bool:
    """Whether the path is a place in an object store that can hold tables."""
    scheme, separator, _ = path.partition("://")
    return bool(separator) and scheme in _SETTINGS


def lake_url(text: str) -> str:
    """The URL of a lake in a store. Raises BadSettings if the store cannot hold tables, or the URL has secrets."""
    scheme = text.partition("://")[0]
    if scheme not in _SETTINGS:
        raise BadSettings(
            f"lake is {scheme}://...: tables can be in a folder, or in a store by {', '.join(_SETTINGS)}://BUCKET/PATH"
        )
    try:
        return parse_place(text).url
    except InvalidRequest as error:
        raise BadSettings(f"lake: {error}") from None


# Of a process that the JVM started, whose environment may lack them.
_told: Final[dict[str, str]] = {}


def store_options(url: str) -> dict[str, str]:
    """The settings and keys of a store, by the names that their makers give them."""
    begin = _SETTINGS[url.partition("://")[0]]
    found = {name: value for name, value in makers_variables(secrets=True).items() if name.startswith(begin) and value}
    if any(_ENDPOINT.fullmatch(name) and value.startswith("http://") for name, value in found.items()):
        found["allow_http"] = "true"  # whoever names such an endpoint means it
    return _told | found


def options_of(path: str) -> dict[str, str] | None:
    """What `deltalake` must be told of a table's place; None for a folder."""
    return store_options(path) if in_store(path) else None


class StoreAccess(msgspec.Struct, frozen=True):
    """How a task reaches a place in a store."""

    url: str
    options: tuple[tuple[str, str], ...]

    def __repr__(self) -> str:
        return f"StoreAccess({self.url!r})"  # the options have keys

    @property
    def files(self) -> PyFileSystem:
        """What is in that place, as a file system."""
        return _files(self)

    def tell(self) -> None:
        """Let this process know the settings of the store."""
        _told.update(self.options)


def access_to(url: str) -> StoreAccess:
    return StoreAccess(url, tuple(sorted(store_options(url).items())))


@lru_cache(maxsize=16)
def _files(access: StoreAccess) -> PyFileSystem:
    from deltalake.fs import DeltaStorageHandler
    from pyarrow.fs import PyFileSystem

    return PyFileSystem(DeltaStorageHandler(access.url, dict(access.options)))


class LakeStore:
    """What pipelines ask of the tables' disk, on a store. An object that is there is durable: nothing needs a sync."""

    def __init__(self, access: StoreAccess) -> None:
        self.access = access

    @property
    def files(self) -> PyFileSystem:
        return self.access.files

    def key(self, path: str) -> str:
        """The path inside of the lake."""
        return path.removeprefix(self.access.url).strip("/")

    def exists(self, path: str) -> bool:
        """Whether there is an object of that name, or one below it."""
        from pyarrow.fs import FileType

        with told(path):
            return bool(self.files.get_file_info(self.key(path)).type != FileType.NotFound)

    def size(self, path: str) -> int:
        with told(path):
            return int(self.files.get_file_info(self.key(path)).size)

    def files_below(self, folder: str) -> list[str]:
        """Every object below the folder by its relative path, sorted."""
        from pyarrow.fs import FileSelector, FileType

        top = self.key(folder)
        with told(folder):
            found = self.files.get_file_info(FileSelector(top, recursive=True, allow_not_found=True))
        # Some stores list a folder that was emptied as an object without content.
        return sorted(posixpath.relpath(each.path, top) for each in found if each.type == FileType.File and each.size)

    def remove(self, path: str) -> None:
        with told(path):
            self.files.delete_file(self.key(path))


Tables = LakeDisk | LakeStore


def tables_at(path: str) -> Tables:
    """What holds the tables below a path: a lake, or one table."""
    return LakeStore(access_to(path)) if in_store(path) else LakeDisk()


def remove_all(tables: Tables, path: str) -> None:
    """Remove everything below a path. May be repeated."""
    if isinstance(tables, LakeDisk):
        remove_tree(tables, path)
        return
    for name in tables.files_below(path):
        tables.remove(f"{path}/{name}")


def check_reachable(tables: Tables) -> None:
    """Raise DiskFailed if a lake in a store cannot be listed."""
    if isinstance(tables, LakeStore):
        tables.exists(f"{tables.access.url}/_delta_log")


@contextmanager
def told(path: str) -> Iterator[None]:
    """Raise an error of a store, or of the library, as one of ours, in one sentence. Errors of a folder stay."""
    if not in_store(path):
        yield
        return
    try:
        yield
    except Exception as error:
        from deltalake.exceptions import DeltaError, TableNotFoundError

        if not isinstance(error, OSError | DeltaError) or isinstance(error, TableNotFoundError):
            raise
        bucket = parse_place("/".join(path.split("/")[:3]))
        raise DiskFailed(f"{path} cannot be used: {in_one_line(error)}{store_advice(bucket)}") from error


def in_one_line(error: BaseException) -> str:
    """What the library says, which is several lines with colours: what failed, and the innermost cause."""
    lines = [line.strip(" ↳-") for line in _COLOURS.sub("", str(error)).splitlines()]
    lines = [line for line in lines if line] or [type(error).__name__]
    return lines[0] if len(lines) == 1 else f"{lines[0]}: {lines[-1]}"


# Uploading. Spark sorts the rows by their folder, so that a task has one file open at a time.


class UploadedFile(msgspec.Struct, frozen=True):
    """A file that a task has uploaded, by its path in the store, and what the Delta log says of it, as JSON."""

    path: str
    bytes: int
    rows: int
    statistics: str


def uploaded(
    rows: DataFrame, access: StoreAccess, folder: str, run: str, partition_by: Sequence[str]
) -> list[UploadedFile]:
    """Let tasks write the rows into files below a folder, and return these."""
    placed = rows.withColumn(_PLACE, _place(rows, partition_by)).drop(*partition_by)
    if partition_by:
        placed = placed.sortWithinPartitions(_PLACE)
    codec = rows.sparkSession.conf.get("spark.sql.parquet.compression.codec", "snappy") or "snappy"
    write = partial(_upload, access, folder, run, _CODECS.get(codec, codec))
    found = placed.mapInArrow(write, _UPLOADED).collect()
    return [UploadedFile(row["path"], row["bytes"], row["rows"], row["statistics"]) for row in found]


def _place(rows: DataFrame, partition_by: Sequence[str]) -> Column:
    """The folder of a row, as Spark names it: by the columns that are not in the file."""
    parts = []
    for name in partition_by:
        text = f.nullif(rows[f"`{name.replace('`', '``')}`"].cast("string"), f.lit(""))
        value = f.regexp_replace(f.url_encode(text), r"\+", "%20")
        parts.append(f.concat(f.lit(f"{quote(name, safe='')}="), f.coalesce(value, f.lit(NULL_FOLDER))))
    return f.concat_ws("/", *parts) if parts else f.lit("")


def _upload(
    access: StoreAccess, folder: str, run: str, codec: str, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """In a task: write its rows, a file for each folder, and say what was written."""
    import pyarrow.compute as pc
    from pyspark import TaskContext

    context, ids = TaskContext.get(), real_world().ids
    begin = f"{0 if context is None else context.partitionId():05d}-{run}"
    writer = None
    for batch in batches:
        places = pc.run_end_encode(batch.column(_PLACE))
        rows, start = batch.drop_columns([_PLACE]), 0
        for end, place in zip(places.run_ends.to_pylist(), places.values.to_pylist(), strict=True):
            if writer is None or writer.place != place:
                if writer is not None:
                    yield _said(writer.close())
                name = f"{begin}-{ids.random_u32():08x}.parquet"  # a second attempt must not meet the first one
                writer = _OpenFile(access, place, posixpath.join(folder, place, name), rows.schema, codec)
            writer.write(rows.slice(start, end - start))
            start = end
    if writer is not None:
        yield _said(writer.close())


def _said(upload: UploadedFile) -> pa.RecordBatch:
    import pyarrow as pa

    kinds = {"path": pa.string(), "bytes": pa.int64(), "rows": pa.int64(), "statistics": pa.string()}
    return pa.RecordBatch.from_pylist([msgspec.structs.asdict(upload)], schema=pa.schema(kinds.items()))


class _OpenFile:
    """One file that is being uploaded."""

    def __init__(self, access: StoreAccess, place: str, path: str, schema: pa.Schema, codec: str) -> None:
        from pyarrow.parquet import ParquetWriter

        self.place = place
        self._path = path
        self._schema = schema
        self._waiting: list[pa.RecordBatch] = []
        self._footers: list[Any] = []
        key = path.removeprefix(access.url).strip("/")
        with told(path):
            self._sink = access.files.open_output_stream(key)
        self._writer = ParquetWriter(
            self._sink, schema, compression=codec, store_schema=False, metadata_collector=self._footers
        )

    def write(self, rows: pa.RecordBatch) -> None:
        self._waiting.append(rows)
        if sum(each.nbytes for each in self._waiting) >= _GROUP_BYTES:
            self._write_group()

    def close(self) -> UploadedFile:
        """Finish the file: it is in the store after that."""
        self._write_group()
        with told(self._path):
            self._writer.close()
            size = self._sink.tell()
            self._sink.close()
        [footer] = self._footers
        return UploadedFile(self._path, size, footer.num_rows, msgspec.json.encode(statistics(footer)).decode())

    def _write_group(self) -> None:
        import pyarrow as pa

        if self._waiting:
            with told(self._path):
                self._writer.write_table(pa.Table.from_batches(self._waiting, self._schema))
            self._waiting.clear()


# Reading.


def stored_rows(spark: SparkSession, table: str, names: Sequence[str], schema: StructType) -> DataFrame:
    """The rows of these files of a table, read by tasks."""
    from pyspark.sql.pandas.types import to_arrow_schema

    arrow = to_arrow_schema(schema, timezone="UTC")
    read = partial(_read, access_to(table), tuple(names), arrow)
    tasks = max(1, min(len(names), _MOST_TASKS))
    return spark.range(0, len(names), 1, tasks).mapInArrow(read, schema)


def _read(
    access: StoreAccess, names: Sequence[str], schema: pa.Schema, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for number in batch.column(0).to_pylist():
            yield from file_of_store(access, names[number], schema)


def file_of_store(
    access: StoreAccess, name: str, schema: pa.Schema, *, after: int | None = None, through: int | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows of one file of a table in a store. Raises CorruptData if it is not there."""
    try:
        with told(f"{access.url}/{name}"):
            yield from rows_of_file(name, name, schema, after=after, through=through, files=access.files)
    except DiskFailed as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise CorruptData(
                f"{access.url}/{name} is missing, and the table needs it: restore it from a copy, or start "
                f"{posixpath.basename(access.url)} over with --full-refresh"
            ) from None
        raise
