"""The only access to the outside world: clock, disk, ids, file watches. Everything else receives these as arguments."""

from holdfast.env.disk import Disk, File, FolderLock, FolderLocked, OpenFolder, RealDisk
from holdfast.env.process import OpenFiles, close_in_children, end_at_exit, refuse_to_pickle
from holdfast.env.world import (
    Clock,
    FolderWatch,
    Ids,
    InotifyWatch,
    ManualClock,
    SeededIds,
    SystemClock,
    SystemIds,
    WatchRefused,
    World,
    is_remote,
    real_world,
)

__all__ = [
    "Clock",
    "Disk",
    "File",
    "FolderLock",
    "FolderLocked",
    "FolderWatch",
    "Ids",
    "InotifyWatch",
    "ManualClock",
    "OpenFiles",
    "OpenFolder",
    "RealDisk",
    "SeededIds",
    "SystemClock",
    "SystemIds",
    "WatchRefused",
    "World",
    "close_in_children",
    "end_at_exit",
    "is_remote",
    "real_world",
    "refuse_to_pickle",
]
