"""The files of a table: Parquet in folders by column, each named after the batches that it holds.

    lake/orders-land/dt=2026-11-16/topic=orders/b000000000012-000000000012-00000.parquet

Every row also has the number of its batch (`_batch`), so that a reader that goes on after batch 11 finds its rows in
any file with a later batch, merged or not.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.env.disk import LakeDisk
from holdfast.errors import CorruptData
from holdfast.spark.pipelines.checkpoint import FileMove, Ledger, LedgerBatch, ledger_of
from holdfast.spark.pipelines.spec import Context
from holdfast.storage.files import remove_tree

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameReader
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
    """Those files that may hold rows of the batches after `after`, up to `through`."""
    return [path for path in paths if (held := batches_in(path)) and held[1] > after and held[0] <= through]


def staged_files(disk: LakeDisk, folder: str) -> list[str]:
    """The Parquet files that Spark wrote there."""
    return [path for path in disk.files_below(folder) if path.endswith(".parquet") and not _is_hidden(path)]


def rows_in_files(disk: LakeDisk, folder: str) -> int:
    """The number of rows that Spark wrote there, from the footers of the files."""
    from pyarrow.parquet import read_metadata

    return sum(read_metadata(f"{folder}/{path}").num_rows for path in staged_files(disk, folder))


def read_table(context: Context, name: str, *, after: int = -1, through: int) -> DataFrame | None:
    """The rows of a pipeline's table in the batches after `after`, up to `through`; None if no file has any."""
    table = context.project.table(name)
    reader = plainly(context.spark.read).option("basePath", table)
    names = files_between(table_files(context.disk, table), after, through)
    if not names:
        return None
    newest = max(names, key=lambda name: batches_in(name) or (0, 0))
    schema = _with_plain_folders(reader.parquet(f"{table}/{newest}").schema, newest)
    rows = reader.schema(schema).parquet(*[f"{table}/{name}" for name in names])
    return rows.where(f"{BATCH} > {after} AND {BATCH} <= {through}")


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
# 3. Each file is renamed into its table. After a crash the next run goes on with the same list: a file that is no
#    longer staged is in its table already. So no row is ever there twice.
# 4. The ledger notes that the batch is finished.
#
# If a folder replaces another one (a table whose rows change, or small files that were merged), the two are exchanged
# in one step. A reader that listed the old folder and opens a file later gets an error; it never reads a row twice.


def stage(context: Context, rows: DataFrame, what: str, partition_by: Sequence[str]) -> str:
    """Write rows to a staging folder, and return its path."""
    folder = f"{context.staging}/{what}"
    remove_tree(context.disk, folder)  # of an earlier try: some settings let Spark overwrite only a part of it
    rows.write.partitionBy(*partition_by).parquet(folder)
    return folder


def additions(context: Context, staged: str, table: str, batch: int) -> list[FileMove]:
    """The moves that add staged files to a table."""
    moves = []
    for number, path in enumerate(staged_files(context.disk, staged)):
        place = f"{table}/{posixpath.dirname(path)}/{file_name(batch, batch, number)}"
        moves.append(_move(context, f"{staged}/{path}", posixpath.normpath(place)))
    return moves


def replacements(context: Context, staged: str, table: str, batch: int) -> list[FileMove]:
    """The moves that replace whole folders of a table by staged ones."""
    folders: dict[str, list[str]] = {}
    for path in staged_files(context.disk, staged):
        folders.setdefault(posixpath.dirname(path), []).append(path)
    for folder, paths in folders.items():
        for number, path in enumerate(paths):
            context.disk.rename(f"{staged}/{path}", f"{staged}/{folder}/{file_name(batch, batch, number)}")
        for name in context.disk.names(f"{staged}/{folder}"):
            if not name.endswith(".parquet") or name.startswith((".", "_")):
                context.disk.remove(f"{staged}/{folder}/{name}")
    return [_move(context, f"{staged}/{folder}", f"{table}/{folder}") for folder in folders]


def commit(context: Context, batch: LedgerBatch) -> LedgerBatch:
    """Make the batch count, and move its files into their tables. Returns the batch with its size and time."""
    disk, ledger = context.disk, ledger_of(context)
    files = [move.staged for move in batch.adds]
    for move in batch.swaps:
        files += [f"{move.staged}/{name}" for name in disk.names(_path(context, move.staged))]
    size = 0
    for file in files:
        disk.sync_file(_path(context, file))
        size += disk.size(_path(context, file))
    for folder in _folders_of(files):
        disk.sync_folder(_path(context, folder))
    batch = msgspec.structs.replace(batch, bytes=size, at_ms=context.world.clock.now_ns() // 1_000_000)
    ledger.decide(batch)
    _put_in_place(context, ledger, batch)
    return batch


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
    remove_tree(context.disk, context.staging)


def _put_in_place(context: Context, ledger: Ledger, batch: LedgerBatch) -> None:
    disk = context.disk
    folders = set()
    for move in batch.adds:
        staged, place = _path(context, move.staged), _path(context, move.place)
        if disk.exists(staged):
            disk.make_folder(posixpath.dirname(place))
            disk.rename(staged, place)
        elif not disk.exists(place):
            raise CorruptData(
                f"{place} was to hold rows of batch {batch.batch} of {context.name}, and is neither there nor in "
                f"{context.staging}: put the file back, or begin anew with --full-refresh"
            )
        folders.add(posixpath.dirname(place))
    for move in batch.swaps:
        swap(context, _path(context, move.staged), _path(context, move.place), batch.batch)
        folders.add(posixpath.dirname(_path(context, move.place)))
    for folder in folders:
        disk.sync_folder(folder)
    ledger.finish(batch)
    remove_tree(disk, context.staging)


def swap(context: Context, staged: str, place: str, batch: int) -> None:
    """Replace a folder by the staged one, unless that was done already.

    After the exchange the old files have the staged name. The batch in a file's name tells them from the new ones.
    """
    if context.disk.exists(staged) and any(_is_of(name, batch) for name in context.disk.names(staged)):
        _put_at(context.disk, staged, place)


def _put_at(disk: LakeDisk, new: str, place: str) -> None:
    """Move a folder to a place. What was there has the name `new` after that, or `new` with `.old`."""
    if not disk.exists(place):
        disk.make_folder(posixpath.dirname(place))
        disk.rename(new, place)
    elif not disk.exchange(new, place):
        # This disk cannot do it in one step. Rows that are missing for a moment are better than rows there twice.
        remove_tree(disk, f"{new}.old")
        disk.rename(place, f"{new}.old")
        disk.rename(new, place)


def _is_of(name: str, batch: int) -> bool:
    return name.startswith(file_name(batch, batch, 0)[:26])


def _move(context: Context, staged: str, place: str) -> FileMove:
    lake = context.project.lake
    return FileMove(posixpath.relpath(staged, lake), posixpath.relpath(place, lake))


def _path(context: Context, name: str) -> str:
    return f"{context.project.lake}/{name}"


# Merging small files.
#
# In a folder with many small files (`dt=2026-11-16/topic=orders`), the small ones are read and written as one file
# beside the table. Large ones get a second name there, by a link. Then the new folder and the old one are exchanged in
# one step, and the old one is removed. A listing of the folder has either the old files or the new ones. A reader that
# listed the old ones and opens one of them afterwards gets an error, and reads again.
#
# Only the runner that holds the pipeline's lock adds files to its table, and it does not while it merges.


# Fewer small files are not worth a merge.
MANY: Final = 8


def merge_small_files(context: Context, table: str, target_bytes: int) -> list[str]:
    """Merge the small files of a table, folder by folder. Returns notes about what could not be done."""
    remove_tree(context.disk, _workshop(context))
    folders: dict[str, list[str]] = {}
    for path in table_files(context.disk, table):
        folders.setdefault(posixpath.dirname(path), []).append(posixpath.basename(path))
    for folder, names in folders.items():
        small = [name for name in names if context.disk.size(f"{table}/{folder}/{name}") < target_bytes // 2]
        if len(small) >= MANY and not _merge(context, f"{table}/{folder}", names, small, target_bytes):
            return [f"small files stay as they are: {context.disk.kind(table)} cannot exchange two folders"]
    return []


def _merge(context: Context, folder: str, names: list[str], small: list[str], target_bytes: int) -> bool:
    disk, workshop = context.disk, _workshop(context)
    size = sum(disk.size(f"{folder}/{name}") for name in small)
    held = [batches for name in small if (batches := batches_in(name))]
    first, last = min(low for low, _ in held), max(high for _, high in held)
    # Files of an older version may lack a column that newer ones have.
    rows = plainly(context.spark.read).option("mergeSchema", True).parquet(*[f"{folder}/{name}" for name in small])
    rows.coalesce(max(round(size / target_bytes), 1)).write.parquet(f"{workshop}/merged")
    new = f"{workshop}/new"
    disk.make_folder(new)
    free = (name for number in count() if (name := file_name(first, last, number)) not in names)
    for path, name in zip(staged_files(disk, f"{workshop}/merged"), free, strict=False):
        disk.rename(f"{workshop}/merged/{path}", f"{new}/{name}")
        disk.sync_file(f"{new}/{name}")
    for name in set(disk.names(folder)) - set(small):  # also what others may have put there
        if not name.startswith((".", "_")):
            disk.link(f"{folder}/{name}", f"{new}/{name}")
    disk.sync_folder(new)
    done = disk.exchange(new, folder)
    if done:
        disk.sync_folder(posixpath.dirname(folder))
    remove_tree(disk, workshop)
    return done


def _workshop(context: Context) -> str:
    return f"{context.project.lake}/_staging/{context.name}.merging"


@contextmanager
def replaced_as_a_whole(context: Context) -> Iterator[str]:
    """A folder to write into, which becomes the pipeline's table at the end of the block. Errors change nothing."""
    disk, fresh = context.disk, context.staging
    remove_tree(disk, fresh)
    disk.make_folder(fresh)
    yield fresh
    swap_in(disk, fresh, context.table)


def swap_in(disk: LakeDisk, fresh: str, table: str) -> None:
    """Put `fresh` in the place of `table`, and remove what was there."""
    for name in disk.files_below(fresh):
        disk.sync_file(f"{fresh}/{name}")
    _put_at(disk, fresh, table)
    disk.sync_folder(posixpath.dirname(table))
    for old in (f"{fresh}.old", fresh):
        remove_tree(disk, old)
