"""The doors in one hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from holdfast.env.clock import Clock, SystemClock
from holdfast.env.disk import Disk, RealDisk
from holdfast.env.ids import Ids, SystemIds
from holdfast.env.open_files import OpenFiles
from holdfast.env.watch import FolderWatch, InotifyWatch, no_watch


class MakeSpace(Protocol):
    """Who is asked where fewer bytes of the disk are free than so many; answers whether some have become free.

    So many of them are `urgent_bytes`: not for a new message, but for what must go on when the disk is full.
    """

    def __call__(self, wanted_bytes: int, *, urgent_bytes: int = 0) -> bool: ...


def no_space(wanted_bytes: int, *, urgent_bytes: int = 0) -> bool:
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
    make_space: MakeSpace = no_space


def real_world() -> World:
    """This machine."""
    return World(clock=SystemClock(), disk=RealDisk(), ids=SystemIds(), watch=InotifyWatch)
