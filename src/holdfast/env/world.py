"""The doors in one hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.env.clock import Clock, SystemClock
from holdfast.env.disk import Disk, RealDisk
from holdfast.env.ids import Ids, SystemIds
from holdfast.env.open_files import OpenFiles
from holdfast.env.watch import FolderWatch, InotifyWatch, no_watch


def no_space(wanted_bytes: int) -> bool:
    """For logs that nobody can remove anything from."""
    return False


@dataclass(frozen=True)
class World:
    """All that storage may know of what lies outside the process."""

    clock: Clock
    disk: Disk
    ids: Ids
    watch: Callable[[], FolderWatch] = no_watch  # or WatchRefused: then one looks from time to time
    open_files: OpenFiles = field(default_factory=OpenFiles)  # of all logs that share this world
    # Asked where fewer bytes of the disk are free than so many; answers whether some have become free.
    make_space: Callable[[int], bool] = no_space


def real_world() -> World:
    """This machine."""
    return World(clock=SystemClock(), disk=RealDisk(), ids=SystemIds(), watch=InotifyWatch)
