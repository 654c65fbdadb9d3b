# async only: threads call those of `holdfast.client.backups`
"""`backup`, `restore`, `backups` and `verify` for tasks: they run on a thread, and to their end.

A task that is cancelled waits until the call has ended: a backup that is not listed would have been taken in vain, and
a folder that is restored in part would have to be cleared away. `progress` is called on that thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.client import backups as blocking
from holdfast.env.threads import aside

if TYPE_CHECKING:
    from holdfast.api.drafts import Seconds
    from holdfast.broker.backup.restoring import Verified
    from holdfast.broker.backup.taking import Progress
    from holdfast.client.backups import Backup, Moment, Place, Restored


async def backup(
    source: Place, destination: Place, *, keep: int | None = None, keep_for: Seconds | None = None,
    key_file: Place | None = None, progress: Progress | None = None,
) -> Backup:  # fmt: skip
    """Async version of `holdfast.backup`: back up a data folder, as of one moment, while it is in use.

        await holdfast.aio.backup("jobs", "s3://backups/jobs", keep=30)

    Args:
        source: The folder, or its URL if it lives in a store.
        destination: Where backups are: s3://, az://, gs://, postgresql://, or a folder.
        keep: Keep this many backups of this folder, the newest; remove the others.
        keep_for: Remove backups of this folder older than this, in seconds. With `keep`, what either keeps is kept.
        key_file: Encrypt the backup with the key in this file; by default `backup_key_file` of the settings, if set.
        progress: Called, on another thread, with the number of bytes done, and the total.

    Returns:
        The backup.

    Raises:
        NotAQueue: There is no queue in the folder.
        Busy: Another process owns the folder and does not share it.
        Unavailable: The store cannot be reached. The next backup reuses what was stored.
        CorruptData: A file cannot be read; the error names it. No backup is listed.
    """
    return await aside(
        blocking.backup, source, destination, keep=keep, keep_for=keep_for, key_file=key_file, progress=progress
    )


async def backups(destination: Place, *, key_file: Place | None = None) -> list[Backup]:
    """Async version of `holdfast.backups`: all backups in a place, oldest first.

    One that cannot be read has a `problem`.

    Args:
        destination: Where the backups are.
        key_file: The file with the key, if backups are encrypted; by default `backup_key_file` of the settings.

    Returns:
        The backups.

    Raises:
        InvalidRequest: The place or the key file cannot be used.
        Unavailable: The store cannot be reached.
    """
    return await aside(blocking.backups, destination, key_file=key_file)


async def verify(
    destination: Place, *, at: Moment = None, key_file: Place | None = None, progress: Progress | None = None
) -> Verified:
    """Async version of `holdfast.verify`: restore a backup into a temporary folder, check every message, and open it.

    Args:
        destination: Where the backups are.
        at: The number of a backup, or a time: the newest one before it. By default the newest.
        key_file: The file with the key, if the backup is encrypted; by default `backup_key_file` of the settings.
        progress: Called, on another thread, with the number of bytes restored, and of all.

    Returns:
        What was found; `ok` is False if something is wrong, and `damage` says what.

    Raises:
        NotFound: There is no such backup.
        InvalidRequest: The backup is encrypted with another key.
        Unavailable: The store cannot be reached.
    """
    return await aside(blocking.verify, destination, at=at, key_file=key_file, progress=progress)


async def restore(
    source: Place, destination: Place, *, at: Moment = None, dry_run: bool = False, key_file: Place | None = None,
    progress: Progress | None = None,
) -> Restored:  # fmt: skip
    """Async version of `holdfast.restore`: from a backup, or from the store a folder lives in, as of a given time.

        await holdfast.aio.restore("s3://backups/jobs", "jobs-restored")

    Args:
        source: Where the backups are; or the URL of a folder in a store.
        destination: A new or empty folder, or an empty place in a store.
        at: The number of a backup; the number of an object of the chain, to restore everything before it; or a time.
            By default the newest.
        dry_run: Only say what would be restored.
        key_file: The file with the key, if the backup is encrypted; by default `backup_key_file` of the settings.
        progress: Called, on another thread, with the number of bytes done, and the total.

    Returns:
        What was restored, or would be.

    Raises:
        InvalidRequest: The destination is not empty, or the backup is encrypted with another key.
        NotFound: There is no such backup, or the chain does not go back so far.
        CorruptData: The backup is damaged; the error says where.
        DiskFull: There is not enough room on the disk. Nothing is left behind.
    """
    return await aside(
        blocking.restore, source, destination, at=at, dry_run=dry_run, key_file=key_file, progress=progress
    )
