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
    """Async version of `holdfast.backup`: store a backup of a data folder, as of one moment, while its owner works.

        await holdfast.aio.backup("jobs", "s3://backups/jobs", keep=30)

    Returns:
        The backup.
    """
    return await aside(
        blocking.backup, source, destination, keep=keep, keep_for=keep_for, key_file=key_file, progress=progress
    )


async def backups(destination: Place, *, key_file: Place | None = None) -> list[Backup]:
    """Async version of `holdfast.backups`: all backups in a place, oldest first."""
    return await aside(blocking.backups, destination, key_file=key_file)


async def verify(
    destination: Place, *, at: Moment = None, key_file: Place | None = None, progress: Progress | None = None
) -> Verified:
    """Async version of `holdfast.verify`: restore a backup into a temporary folder, and check every message there.

    Args:
        destination: Where the backups are.
        at: A number, or a time; by default the newest.
        key_file: The file with the key, if the backup is encrypted.
        progress: Called with the number of bytes restored, and of all.

    Returns:
        What was found; `ok` is False if something is wrong, and `damage` says what.
    """
    return await aside(blocking.verify, destination, at=at, key_file=key_file, progress=progress)


async def restore(
    source: Place, destination: Place, *, at: Moment = None, dry_run: bool = False, key_file: Place | None = None,
    progress: Progress | None = None,
) -> Restored:  # fmt: skip
    """Async version of `holdfast.restore`: from a backup, or from the store a folder lives in, as of a given time.

    Returns:
        What was restored, or would be.
    """
    return await aside(
        blocking.restore, source, destination, at=at, dry_run=dry_run, key_file=key_file, progress=progress
    )
