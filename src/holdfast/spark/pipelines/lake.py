"""The tables of pipelines: Delta tables whose files Spark wrote, or plain Parquet in folders.

    lake/orders-land/dt=2026-11-16/topic=orders/b000000000012-000000000012-00000.parquet
    lake/orders-land/_delta_log/00000000000000000012.json

Every row also has the number of its batch (`_batch`), so that a reader that goes on after batch 11 finds its rows in
any file with a later batch, compacted or not.
"""

from __future__ import annotations

import json
import posixpath
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import msgspec

from holdfast.env.disk import LakeDisk
from holdfast.errors import CorruptData, InvalidRequest
from holdfast.spark.pipelines.checkpoint import (
    UPLOADS,
    FileMove,
    Ledger,
    LedgerBatch,
    TableChange,
    checkpoint_id,
    ledger_of,
    sync_state,
)
from holdfast.spark.pipelines.parquet import BATCH, batches_in, file_name, files_between, folder_values, statistics
from holdfast.spark.pipelines.spec import Context, Project
from holdfast.spark.pipelines.stores import (
    LakeStore,
    Tables,
    in_store,
    lake_url,
    options_of,
    remove_all,
    stored_rows,
    tables_at,
    told,
    uploaded,
)
from holdfast.storage.files import durable_replace, join, read_file, remove_tree

if TYPE_CHECKING:
    from deltalake import CommitProperties, DeltaTable
    from deltalake.transaction import AddAction, RemoveAction
    from pyspark.sql import DataFrame, DataFrameReader, SparkSession
    from pyspark.sql.types import DataType, StructType


DATE: Final = "dt"
LATEST_SUFFIX: Final = ".latest"


def table_files(tables: Tables, table: str) -> list[str]:
    """The files of a table, from its folder.

    A listing that met a folder just as it was merged away and removed could lack files, so it must be seen twice.
    """
    found, again = None, tables.files_below(table)
    while again != found:
        found, again = again, tables.files_below(table)
    return [path for path in again if not _is_hidden(path) and batches_in(path)]


def staged_files(context: Context, folder: str) -> list[str]:
    """The Parquet files that Spark wrote there."""
    if isinstance(context.tables, LakeStore):
        return sorted(posixpath.relpath(path, folder) for path in context.uploads if path.startswith(f"{folder}/"))
    found = context.tables.files_below(folder)
    return [path for path in found if path.endswith(".parquet") and not _is_hidden(path)]


def rows_in_files(context: Context, folder: str) -> int:
    """The number of rows that Spark wrote there, from the footers of the files."""
    from pyarrow.parquet import read_metadata

    paths = [f"{folder}/{path}" for path in staged_files(context, folder)]
    known = context.uploads
    return sum(known[path].rows if path in known else read_metadata(path).num_rows for path in paths)


def read_table(context: Context, name: str, *, after: int = -1, through: int) -> DataFrame | None:
    """The rows of a pipeline's table in the batches after `after`, up to `through`; None if no file has any."""
    table = context.project.table(name)
    names = files_with(context.tables, table, after, through)
    if not names:
        return None
    schema = _schema_of(context, table, names)
    return _rows_of(context.spark, table, names, schema).where(f"{BATCH} > {after} AND {BATCH} <= {through}")


def files_with(tables: Tables, table: str, after: int, through: int) -> list[str]:
    """The files of a table that may hold rows of these batches. Raises CorruptData if one of them is missing.

    Of those in a store, whoever reads them finds out.
    """
    if not is_delta(tables, table):
        return files_between(table_files(tables, table), after, through)
    names = live_files(delta_table(table), after, through)
    for gone in [] if isinstance(tables, LakeStore) else [n for n in names if not tables.exists(f"{table}/{n}")]:
        raise CorruptData(
            f"{table}/{gone} is missing, and the table needs it: restore it from a copy, or start "
            f"{posixpath.basename(table)} over with --full-refresh"
        )
    return names


def table_schema(context: Context, name: str) -> StructType | None:
    """The columns of a pipeline's table; None if there is no table yet."""
    table = context.project.table(name)
    if is_delta(context.tables, table):
        return _spark_schema(delta_table(table))
    names = table_files(context.tables, table)
    return _schema_of_files(context.spark, table, names) if names else None


def _schema_of(context: Context, table: str, names: Sequence[str]) -> StructType:
    """The columns of a table: as its log says, or else as these files do."""
    if is_delta(context.tables, table):
        return _spark_schema(delta_table(table))
    return _schema_of_files(context.spark, table, names)


def read_delta(spark: SparkSession, path: str, version: int | None = None) -> DataFrame:
    """The rows of a Delta table in a folder, or in a store (`s3://bucket/lake/orders`), as of a version, or as of now.

    It needs no jar: the package `deltalake` says which files the table consists of. In a folder, Spark itself reads
    these, with filters pushed down. In a store, Python tasks read all of them.

    Args:
        spark: The session.
        path: The folder of the table, or its URL in a store.
        version: The version; by default the newest.

    Returns:
        A DataFrame of the rows.

    Raises:
        InvalidRequest: There is no Delta table in that folder.
        DiskFailed: The store cannot be used.
    """
    from deltalake.exceptions import TableNotFoundError

    path = lake_url(path) if in_store(path) else posixpath.abspath(path)
    try:
        delta = delta_table(path, version)
    except TableNotFoundError:
        raise InvalidRequest(
            f"there is no Delta table in {path}: correct the path, or run the pipeline that writes it"
        ) from None
    names, schema = live_files(delta), _spark_schema(delta)
    if not names:
        return spark.createDataFrame([], schema)
    return _rows_of(spark, path, names, schema)


def _rows_of(spark: SparkSession, table: str, names: Sequence[str], schema: StructType) -> DataFrame:
    if in_store(table):
        return stored_rows(spark, table, names, schema)
    reader = plainly(spark.read).option("basePath", table).schema(schema)
    # As texts: every column that Python makes takes Spark several messages.
    return reader.parquet(*[f"{table}/{name}" for name in names]).selectExpr(*map(quoted, schema.names))


def _schema_of_files(spark: SparkSession, table: str, names: Sequence[str]) -> StructType:
    """The schema of the newest of these files, and of the folders that it is in."""
    from pyspark.sql.types import StructType

    if not names:
        return StructType([])
    newest = max(names, key=lambda name: batches_in(name) or (0, 0))
    found = plainly(spark.read).option("basePath", table).parquet(f"{table}/{newest}").schema
    return _with_plain_folders(found, newest)


def plainly(reader: DataFrameReader) -> DataFrameReader:
    """The reader without patterns in paths: otherwise it would take a folder named `lake [1]` for a pattern."""
    return reader.option("__globPaths__", False)


def _with_plain_folders(schema: StructType, path: str) -> StructType:
    """The schema with text for columns from folder names: Spark would take a topic named 2024 for a number."""
    from pyspark.sql.types import DateType, StringType, StructField, StructType

    folders = [part.partition("=")[0] for part in path.split("/")[:-1]]
    kinds = {name: DateType() if name == DATE else StringType() for name in folders}
    return StructType([StructField(each.name, kinds.get(each.name, each.dataType)) for each in schema.fields])


def quoted(name: str) -> str:
    """A column name in backticks: Spark would take a bare `a.b` for the field b of a."""
    return f"`{name.replace('`', '``')}`"


def _is_hidden(path: str) -> bool:
    return any(part.startswith(("_", ".")) and "=" not in part for part in path.split("/"))


# How a batch gets into its tables exactly once.
#
# 1. Spark writes the rows into a staging folder that no reader looks into. All of it is synced.
# 2. The ledger decides: one small file, put in place by a rename, names every staged file and its place. Before this
#    moment nothing of the batch counts, and a second try starts from nothing; from here on all of it does.
# 3. Each file is renamed into its table, where a reader of Delta does not see it yet. After a crash the next run goes
#    on with the same list: a file that is no longer staged is in its table already. So no row is ever there twice.
# 4. One Delta transaction for each table names its files, with the number of the batch. A table that has a
#    transaction of this number already is left alone. This is when readers see the batch, whole.
# 5. The ledger notes that the batch is finished.
#
# A table in plain Parquet goes the same way without step 4: readers see a batch file by file.
#
# In a store, tasks upload the files to their places in step 1, and step 3 has nothing to do (see `stores`). Before the
# first of them a note says by which part of their names they can be told. If the next run finds it, it removes those
# that no transaction names. Files of other batches that the table no longer names stay for readers of older versions.


def stage(
    context: Context, rows: DataFrame, what: str, partition_by: Sequence[str], *, table: str | None = None
) -> str:
    """Write rows to a staging folder, and return its path. Rows to add to a `table` in a store go there at once."""
    # Its own folder for each run: tasks of an earlier one may write on after its driver died.
    folder = f"{context.staging}/{context.run}/{what}"
    if isinstance(context.tables, LakeStore):
        return _upload(context, context.tables, rows, folder if table is None else table, partition_by)
    remove_tree(context.tables, folder)  # of an earlier try: some settings let Spark overwrite only a part of it
    rows.write.partitionBy(*partition_by).parquet(folder)
    return folder


def staged_rows(context: Context, staged: str, schema: StructType) -> DataFrame:
    """The rows that were written to a staging folder, with this schema."""
    if in_store(staged):
        return stored_rows(context.spark, staged, staged_files(context, staged), schema)
    return plainly(context.spark.read).parquet(staged)


def _upload(context: Context, store: LakeStore, rows: DataFrame, folder: str, partition_by: Sequence[str]) -> str:
    for path in [path for path in context.uploads if path.startswith(f"{folder}/")]:  # of an earlier batch, or try
        del context.uploads[path]
    upload = f"{context.world.ids.random_u32():08x}"
    if folder in (context.table, context.quarantine):
        noted = read_file(context.disk, join(context.checkpoint, UPLOADS)) or b""
        durable_replace(context.disk, context.checkpoint, UPLOADS, noted + f"{upload}\n".encode())
    for each in uploaded(rows, store.access, folder, upload, partition_by):
        context.uploads[each.path] = each
    return folder


def additions(context: Context, staged: str, table: str, batch: int) -> list[FileMove]:
    """The moves that add staged files to a table."""
    moves = []
    for number, path in enumerate(staged_files(context, staged)):
        if staged == table:  # in a store, where they are in their place
            moves.append(_move(context, f"{table}/{path}", f"{table}/{path}"))
            continue
        name = posixpath.normpath(f"{posixpath.dirname(path)}/{file_name(batch, batch, number)}")
        moves.append(_move(context, f"{staged}/{path}", f"{table}/{name}"))
    return moves


def change(context: Context, table: str, rows: DataFrame, partition_by: Sequence[str], **how: Any) -> TableChange:
    """What a batch does to a Delta table: add files of these columns, or what `how` says."""
    return TableChange(
        table=posixpath.relpath(table, context.project.lake),
        schema=_nullable(rows.schema).json(),
        partition_by=tuple(partition_by),
        **how,
    )


def commit(context: Context, batch: LedgerBatch) -> LedgerBatch:
    """Make the batch count, and move its files into their tables. Returns the batch with its size and time."""
    tables, ledger = context.tables, ledger_of(context)
    files = [_path(context, move.staged) for move in batch.adds]
    for each in batch.changes:
        if each.staged is not None:
            folder = _path(context, each.staged)
            files += [f"{folder}/{name}" for name in staged_files(context, folder)]
    if isinstance(tables, LakeStore):
        size = sum(context.uploads[file].bytes for file in files)
    else:
        size = _synced(tables, context.project.lake, files)
    if batch.offsets is not None:
        sync_state(context.disk, context.checkpoint, batch.batch)
    batch = msgspec.structs.replace(batch, bytes=size, at_ms=context.world.clock.now_ns() // 1_000_000)
    ledger.decide(batch)
    _put_in_place(context, ledger, batch)
    return batch


def _synced(disk: LakeDisk, lake: str, files: Sequence[str]) -> int:
    """Sync the files and their folders; returns their size."""
    for file in files:
        disk.sync_file(file)
    for folder in _folders_of([posixpath.relpath(file, lake) for file in files]):
        disk.sync_folder(f"{lake}/{folder}")
    return sum(map(disk.size, files))


def _folders_of(files: Sequence[str]) -> set[str]:
    """The folders of the files, up to the lake itself: Spark made them and does not sync them."""
    found = {""}
    for file in files:
        folder = posixpath.dirname(file)
        while folder and folder not in found:
            found.add(folder)
            folder = posixpath.dirname(folder)
    return found


def finish_pending(context: Context) -> None:
    """Finish the batch that an earlier run had decided on, and remove what else it had staged."""
    ledger = ledger_of(context)
    pending = ledger.pending()
    if pending is not None:
        _put_in_place(context, ledger, pending)
    remove_all(context.tables, context.staging)
    _remove_uploads(context)
    _check_owner(context)
    _check_format(context)


def _remove_uploads(context: Context) -> None:
    """Remove what a run had uploaded into tables when it was cut short, before a batch named it."""
    noted = read_file(context.disk, join(context.checkpoint, UPLOADS))
    if noted is None:
        return
    uploads = noted.decode().split()
    for table in (context.table, context.quarantine):
        known = set(live_files(delta_table(table))) if is_delta(context.tables, table) else set()
        for name in context.tables.files_below(table):
            if name not in known and any(f"-{upload}-" in posixpath.basename(name) for upload in uploads):
                context.tables.remove(f"{table}/{name}")
    context.disk.remove(join(context.checkpoint, UPLOADS))


def _check_owner(context: Context) -> None:
    """Raise InvalidRequest if a table in a store was written with other checkpoints: its rows would come twice."""
    if not in_store(context.table) or not is_delta(context.tables, context.table):
        return
    delta = delta_table(context.table)
    if delta.transaction_version(_owner(context)) is None and live_files(delta):
        raise InvalidRequest(
            f"{context.table} was written with other checkpoints than those in {context.checkpoint}: name the folder "
            "with the right ones as checkpoints, or start over with --full-refresh"
        )


def _put_in_place(context: Context, ledger: Ledger, batch: LedgerBatch) -> None:
    tables = context.tables
    if batch.swaps:
        raise InvalidRequest(
            f"{context.name}: batch {batch.batch} was decided by a version before Delta tables and cannot be finished: "
            "start over with --full-refresh"
        )
    folders = set()
    for move in batch.adds:
        staged, place = _path(context, move.staged), _path(context, move.place)
        if isinstance(tables, LakeDisk) and tables.exists(staged):
            tables.make_folder(posixpath.dirname(place))
            tables.rename(staged, place)
        elif place not in context.uploads and not tables.exists(place):
            raise CorruptData(
                f"{place} should have rows of batch {batch.batch} of {context.name}, but is neither there nor in "
                f"{context.staging}: restore it from a copy, or start over with --full-refresh"
            )
        folders.add(posixpath.dirname(place))
    for folder in folders if isinstance(tables, LakeDisk) else ():
        context.disk.sync_folder(folder)
    for each in batch.changes:
        _commit_change(context, batch, each)
    ledger.finish(batch)
    if isinstance(tables, LakeDisk) or any(each.staged is not None for each in batch.changes):
        remove_all(tables, context.staging)
    with suppress(FileNotFoundError):
        context.disk.remove(join(context.checkpoint, UPLOADS))


def _move(context: Context, staged: str, place: str) -> FileMove:
    lake = context.project.lake
    return FileMove(posixpath.relpath(staged, lake), posixpath.relpath(place, lake))


def _path(context: Context, name: str) -> str:
    return f"{context.project.lake}/{name}"


# The Delta log. Only the runner that holds the pipeline's lock writes to it, and so do `optimize` and `vacuum`.


# A folder with fewer small files is not worth a compaction.
MANY: Final = 8
_LOG: Final = "_delta_log"
_WIDER: Final = {
    "short": ("byte",),
    "integer": ("byte", "short"),
    "long": ("byte", "short", "integer"),
    "double": ("byte", "short", "integer", "float"),
}


def is_delta(tables: Tables, table: str) -> bool:
    return tables.exists(f"{table}/{_LOG}")


def delta_tables(project: Project, name: str) -> list[str]:
    """The Delta tables of a pipeline: its own, the quarantine, and the latest by key."""
    tables, table = tables_at(project.lake), project.table(name)
    return [each for each in (table, project.quarantine(name), table + LATEST_SUFFIX) if is_delta(tables, each)]


def delta_table(table: str, version: int | None = None) -> DeltaTable:
    from deltalake import DeltaTable

    with told(table):
        return DeltaTable(table, version=version, storage_options=options_of(table))


def live_files(delta: DeltaTable, after: int = -1, through: int | None = None) -> list[str]:
    """The files that the table consists of and that may hold rows of these batches."""
    found = []
    for add in _add_actions(delta):
        low, high = add.get(f"min.{BATCH}"), add.get(f"max.{BATCH}")
        if (high is None or high > after) and (low is None or through is None or low <= through):
            found.append(unquote(add["path"]))
    return sorted(found)


def _add_actions(delta: DeltaTable) -> list[dict[str, Any]]:
    import pyarrow as pa

    found: list[dict[str, Any]] = pa.table(delta.get_add_actions(flatten=True)).to_pylist()
    return found


def _spark_schema(delta: DeltaTable) -> StructType:
    from pyspark.sql.types import StructType

    return StructType.fromJson(json.loads(delta.schema().to_json()))


def _nullable(schema: StructType) -> StructType:
    """The schema with null allowed everywhere: a later batch may lack a column, and files say it for themselves."""
    from pyspark.sql.types import StructField, StructType

    return StructType([StructField(each.name, each.dataType) for each in schema.fields])


def _commit_change(context: Context, batch: LedgerBatch, change: TableChange) -> None:
    """Make the batch visible in one of its tables, unless it is so already."""
    table = _path(context, change.table)
    with told(table):
        delta = _created(context, change)
        owner = _owner(context)
        done = delta.transaction_version(owner)
        if done is not None and done >= batch.batch:
            return
        _add_columns(delta, change)
        note = _commit_note(context, batch.batch)
        if change.staged is not None:
            _merge(context.tables, delta, _path(context, change.staged), change, note)
        else:
            places = [_path(context, move.place) for move in batch.adds]
            names = [posixpath.relpath(place, table) for place in places if place.startswith(f"{table}/")]
            _add_files(context, delta, table, names, change, note)
    _sync_log(context.tables, table)


def _created(context: Context, change: TableChange) -> DeltaTable:
    from deltalake import DeltaTable, Schema

    table = _path(context, change.table)
    if not is_delta(context.tables, table):
        if isinstance(context.tables, LakeDisk):
            context.tables.make_folder(table)
        schema, options = Schema.from_json(change.schema), options_of(table)
        DeltaTable.create(table, schema, partition_by=list(change.partition_by), mode="ignore", storage_options=options)
    return delta_table(table)


def _add_columns(delta: DeltaTable, change: TableChange) -> None:
    from deltalake import Schema

    known = {field.name for field in delta.schema().fields}
    new = [field for field in Schema.from_json(change.schema).fields if field.name not in known]
    if new:
        delta.alter.add_columns(new)


def _add_files(
    context: Context, delta: DeltaTable, table: str, names: Sequence[str], change: TableChange, note: CommitProperties
) -> None:
    """One transaction that adds these files, or puts them in the place of all others."""
    from deltalake import Schema

    actions: list[AddAction | RemoveAction] = [_add_action(context, table, name) for name in names]
    schema = Schema.from_json(change.schema) if change.replaces else delta.schema()
    mode = "overwrite" if change.replaces else "append"
    delta.create_write_transaction(actions, mode, schema, list(change.partition_by), commit_properties=note)


def _merge(tables: Tables, delta: DeltaTable, staged: str, change: TableChange, note: CommitProperties) -> None:
    """One transaction that updates the rows with these keys and adds the others."""
    from pyarrow.dataset import dataset

    same = " AND ".join(f"(t.{quoted(key)} IS NOT DISTINCT FROM s.{quoted(key)})" for key in change.keys)
    files, place = (tables.files, tables.key(staged)) if isinstance(tables, LakeStore) else (None, staged)
    rows = dataset(place, format="parquet", filesystem=files, exclude_invalid_files=False).scanner().to_reader()
    merger = delta.merge(rows, same, source_alias="s", target_alias="t", commit_properties=note)
    if change.deleted is not None:
        merger = merger.when_matched_delete(f"({change.newer or 'true'}) AND ({change.deleted})")
    # By name, since the staged rows may have a column that says whether they delete.
    columns = {quoted(each.name): f"s.{quoted(each.name)}" for each in delta.schema().fields}
    merger = merger.when_matched_update(columns, change.newer)
    merger.when_not_matched_insert(columns, None if change.deleted is None else f"NOT ({change.deleted})").execute()


def _owner(context: Context) -> str:
    """The application id of the transactions. It changes when the pipeline starts over and counts from 0 again."""
    return f"holdfast/{context.name}/{checkpoint_id(context.world, context.project, context.name)}"


def _commit_note(context: Context, batch: int | None) -> CommitProperties:
    """What is noted beside a transaction: whose it is, and of which batch, if it is of one."""
    from deltalake import CommitProperties, Transaction

    if batch is None:
        return CommitProperties(custom_metadata={"pipeline": context.name})
    return CommitProperties(
        custom_metadata={"pipeline": context.name, "batch": str(batch)},
        app_transactions=[Transaction(_owner(context), batch)],
    )


def _sync_log(disk: Tables, table: str) -> None:
    """Sync the newest version and the files that it adds: the library does not, and the ledger depends on them."""
    if isinstance(disk, LakeStore):
        return
    log = f"{table}/{_LOG}"
    newest = f"{log}/{delta_table(table).version():020d}.json"
    actions = [json.loads(line) for line in (read_file(disk, newest) or b"").splitlines()]
    for path in [unquote(action["add"]["path"]) for action in actions if "add" in action]:
        disk.sync_file(f"{table}/{path}")
        disk.sync_folder(posixpath.dirname(f"{table}/{path}"))
    disk.sync_file(newest)
    disk.sync_folder(log)


def _add_action(context: Context, table: str, name: str) -> AddAction:
    from deltalake.transaction import AddAction
    from pyarrow.parquet import read_metadata

    path, tables = f"{table}/{name}", context.tables
    known = context.uploads.get(path)
    if known is not None:
        size, found = known.bytes, known.statistics
    else:
        files, place = (tables.files, tables.key(path)) if isinstance(tables, LakeStore) else (None, path)
        size, found = tables.size(path), json.dumps(statistics(read_metadata(place, filesystem=files)))
    return AddAction(name, size, folder_values(name), 0, True, found)


def _check_format(context: Context) -> None:
    """Make Delta tables of those that were written before as plain Parquet. Raises InvalidRequest for the reverse."""
    for table in (context.table, context.quarantine):
        if context.options.format == "delta":
            convert_plain(context, table)
        elif is_delta(context.tables, table):
            raise InvalidRequest(
                f"{context.name}: {table} is a Delta table, and format is parquet: leave the option out, or start over "
                "with --full-refresh"
            )


def convert_plain(context: Context, table: str) -> None:
    """Make a Delta table of one in plain Parquet, if it is one: the files stay where they are."""
    from deltalake import Schema
    from deltalake.transaction import create_table_with_add_actions

    if in_store(table):  # where all of them are Delta tables
        return
    names = [] if is_delta(context.tables, table) else table_files(context.tables, table)
    if not names:
        return
    schema = _nullable(_schema_of_files(context.spark, table, names))
    last = ledger_of(context).last()
    create_table_with_add_actions(
        table,
        Schema.from_json(schema.json()),
        [_add_action(context, table, name) for name in names],
        partition_by=list(folder_values(names[0])),
        commit_properties=_commit_note(context, None if last is None else last.batch),
    )
    _sync_log(context.tables, table)


def fitted(context: Context, table: str, rows: DataFrame) -> DataFrame:
    """The rows with the types of the table's columns, which are widened first where the rows have wider ones.

    Raises InvalidRequest if a column is of a type that does not go together with the table's.
    """
    if not is_delta(context.tables, table):
        return rows
    known = {field.name: field.dataType for field in _spark_schema(delta_table(table)).fields}
    wider = {}
    for field in rows.schema.fields:
        old, new = known.get(field.name), field.dataType
        if old is None or old.simpleString() == new.simpleString():
            continue
        if is_wider(new, old):
            wider[field.name] = new
        elif is_wider(old, new):
            rows = rows.withColumn(field.name, rows[quoted(field.name)].cast(old))
        else:
            raise InvalidRequest(
                f"{context.name}: the column {field.name} is {old.simpleString()} in {table}, and "
                f"{new.simpleString()} in new rows: give it another name, or start over with --full-refresh"
            )
    if wider:
        _widen(context, table, wider)
    return rows


def with_missing(context: Context, table: str, rows: DataFrame) -> DataFrame:
    """The rows with null in the columns that only the table has: a merge writes whole rows."""
    from pyspark.sql import functions as f

    if not is_delta(context.tables, table):
        return rows
    for each in _spark_schema(delta_table(table)).fields:
        if each.name not in rows.columns:
            rows = rows.withColumn(each.name, f.lit(None).cast(each.dataType))
    return rows


def is_wider(new: DataType, old: DataType) -> bool:
    """Whether every value of the old type has a place in the new one."""
    from pyspark.sql.types import DecimalType

    if isinstance(new, DecimalType) and isinstance(old, DecimalType):
        return new.scale >= old.scale and new.precision - new.scale >= old.precision - old.scale
    return old.typeName() in _WIDER.get(new.typeName(), ())


def _widen(context: Context, table: str, wider: Mapping[str, DataType]) -> None:
    """Write all rows of a table anew, with wider columns, and put them in the place of the old ones at once.

    Readers of other engines expect every file to have the types of the table.
    """
    delta = delta_table(table)
    rows = _rows_of(context.spark, table, live_files(delta), _spark_schema(delta))
    for name, kind in wider.items():
        rows = rows.withColumn(name, rows[quoted(name)].cast(kind))
    partition_by = delta.metadata().partition_columns
    staged = stage(context, rows, "widened", partition_by, table=table)
    names = []
    for number, path in enumerate(staged_files(context, staged)):
        if not isinstance(context.tables, LakeDisk):  # it is in its place
            names.append(path)
            continue
        # Of a version that was not there yet, so that a try that was cut short is in nobody's way.
        name = posixpath.normpath(f"{posixpath.dirname(path)}/v{delta.version() + 1:012d}-{number:05d}.parquet")
        context.tables.make_folder(posixpath.dirname(f"{table}/{name}"))
        context.tables.rename(f"{staged}/{path}", f"{table}/{name}")
        names.append(name)
    whole = change(context, table, rows, partition_by, replaces=True)
    _add_files(context, delta, table, names, whole, _commit_note(context, None))
    _sync_log(context.tables, table)


def optimize(table: str, target_bytes: int | None = None) -> dict[str, Any]:
    """Merge small files of a Delta table. Returns the library's figures."""
    delta = delta_table(table)
    figures: dict[str, Any] = delta.optimize.compact(target_size=target_bytes)
    if figures["numFilesAdded"]:
        _sync_log(tables_at(table), table)
    return figures


def optimize_if_worthwhile(table: str, target_bytes: int) -> None:
    """Merge small files if a folder of the Delta table has many of them."""
    small = Counter(
        posixpath.dirname(add["path"])
        for add in _add_actions(delta_table(table))
        if add["size_bytes"] < target_bytes // 2
    )
    if max(small.values(), default=0) >= MANY:
        optimize(table, target_bytes)


def vacuum(table: str, older_than_hours: int, *, dry_run: bool) -> list[str]:
    """Remove files that no version of the last hours needs, also those that none ever named. Returns their names."""
    return delta_table(table).vacuum(older_than_hours, dry_run, enforce_retention_duration=False, full=True)
