"""How a batch gets into its tables exactly once, for everybody who lists their folders.

1. Spark writes the rows into a staging folder that no reader looks into. All of it is synced.
2. The ledger decides: one small file, put in place by a rename, names every staged file and its place. Before this
   moment nothing of the batch counts, and a second try begins from nothing; from here on all of it does.
3. Each file is renamed into its table. A crash in between leaves the rest to the next run, which finds the same list:
   a file that is no longer staged is there already. So no row is ever there twice.
4. The ledger notes that the batch is finished.

Where a folder takes the place of another (a table whose rows change, small files that were merged), the two change
places in one step. A reader that has listed the old one and opens a file later is told that it is gone; it never reads
a row twice.
"""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from holdfast.errors import CorruptData
from holdfast.spark.pipelines.lake import file_name, staged_files
from holdfast.spark.pipelines.ledger import Batch, Ledger, Move
from holdfast.storage.files import remove_tree

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from holdfast.spark.pipelines.context import Context


def stage(context: Context, rows: DataFrame, what: str, partition_by: Sequence[str]) -> str:
    """Write rows where they do not count yet; answers with the folder."""
    folder = f"{context.staging}/{what}"
    remove_tree(context.disk, folder)  # of an earlier try; a session can be set so that Spark overwrites only in part
    rows.write.partitionBy(*partition_by).parquet(folder)
    return folder


def additions(context: Context, staged: str, table: str, batch: int) -> list[Move]:
    """The moves that add what was staged to a table."""
    moves = []
    for number, path in enumerate(staged_files(context.disk, staged)):
        place = f"{table}/{posixpath.dirname(path)}/{file_name(batch, batch, number)}"
        moves.append(_move(context, f"{staged}/{path}", posixpath.normpath(place)))
    return moves


def replacements(context: Context, staged: str, table: str, batch: int) -> list[Move]:
    """The moves by which folders of a table are replaced by those that were staged, as wholes."""
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


def commit(context: Context, batch: Batch) -> Batch:
    """Make the batch count and put its files in place."""
    disk, ledger = context.disk, Ledger(context.world, context.checkpoint)
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
    """Their folders and those above, up to the lake's own: Spark made them, and does not sync."""
    found = {""}
    for file in files:
        folder = posixpath.dirname(file)
        while folder and folder not in found:
            found.add(folder)
            folder = posixpath.dirname(folder)
    return found


def finish_pending(context: Context) -> None:
    """Finish what an earlier run had decided, and forget what it had not."""
    ledger = Ledger(context.world, context.checkpoint)
    pending = ledger.pending()
    if pending is not None:
        _put_in_place(context, ledger, pending)
    remove_tree(context.disk, context.staging)


def _put_in_place(context: Context, ledger: Ledger, batch: Batch) -> None:
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
    """Let the staged folder take the place of the one there, unless it has already.

    Behind the swap the staged name leads to the old files. The new ones are told from them by their batch.
    """
    disk = context.disk
    if not disk.exists(staged) or not any(_is_of(name, batch) for name in disk.names(staged)):
        return
    if not disk.exists(place):
        disk.make_folder(posixpath.dirname(place))
        disk.rename(staged, place)
    elif not disk.exchange(staged, place):
        # This disk cannot do it in one step. Rows that are missing for a moment are better than rows there twice.
        remove_tree(disk, f"{staged}.old")
        disk.rename(place, f"{staged}.old")
        disk.rename(staged, place)


def _is_of(name: str, batch: int) -> bool:
    return name.startswith(file_name(batch, batch, 0)[:26])


def _move(context: Context, staged: str, place: str) -> Move:
    lake = context.project.lake
    return Move(posixpath.relpath(staged, lake), posixpath.relpath(place, lake))


def _path(context: Context, name: str) -> str:
    return f"{context.project.lake}/{name}"
