"""Small files of a table become few large ones, and no reader sees a row twice.

In a folder with many small files (`dt=2026-11-16/topic=orders`), the small ones are read and written as one file beside
the table. Large ones get a second name there, by a link. Then the new folder and the old one change places in one step,
and the old one is removed. Whoever lists the folder finds either the old files or the new ones. Whoever had listed the
old ones and opens one of them afterwards gets an error, and reads again.

Only the runner that holds the pipeline's lock adds files to its table, and it does not while it merges.
"""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING, Final

from holdfast.spark.pipelines.lake import batches_in, file_name, plainly, staged_files, table_files
from holdfast.storage.files import remove_tree

if TYPE_CHECKING:
    from holdfast.spark.pipelines.context import Context

# Fewer are no trouble to anybody.
MANY: Final = 8


def merge_small_files(context: Context, table: str, target_bytes: int) -> list[str]:
    """Merge where it pays; answers with what could not be done, in words."""
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
    taken = set(names)
    number = 0
    for path in staged_files(disk, f"{workshop}/merged"):
        while file_name(first, last, number) in taken:
            number += 1
        taken.add(file_name(first, last, number))
        disk.rename(f"{workshop}/merged/{path}", f"{new}/{file_name(first, last, number)}")
        disk.sync_file(f"{new}/{file_name(first, last, number)}")
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
