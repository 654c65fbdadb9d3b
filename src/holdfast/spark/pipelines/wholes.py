"""A folder of tables that is made anew and takes the place of the old one in one step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from holdfast.storage.files import remove_tree

if TYPE_CHECKING:
    from holdfast.env.lakedisk import LakeDisk
    from holdfast.spark.pipelines.context import Context


@contextmanager
def replaced_as_a_whole(context: Context) -> Iterator[str]:
    """A folder to write into; at the end of the block it is the pipeline's table. After an error nothing changed."""
    disk, fresh = context.disk, context.staging
    remove_tree(disk, fresh)
    disk.make_folder(fresh)
    yield fresh
    swap_in(disk, fresh, context.table)


def swap_in(disk: LakeDisk, fresh: str, table: str) -> None:
    """Put `fresh` in the place of `table`, and remove what was there."""
    for name in disk.files_below(fresh):
        disk.sync_file(f"{fresh}/{name}")
    if not disk.exists(table):
        disk.make_folder(table.rpartition("/")[0])
        disk.rename(fresh, table)
    elif not disk.exchange(fresh, table):
        # A disk that cannot do it in one step: for a moment there is nothing.
        old = f"{fresh}.old"
        remove_tree(disk, old)
        disk.rename(table, old)
        disk.rename(fresh, table)
        remove_tree(disk, old)
    disk.sync_folder(table.rpartition("/")[0])
    remove_tree(disk, fresh)
