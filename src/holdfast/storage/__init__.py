"""The segmented log: appends, syncs, reads, recovers, and never loses what it has acknowledged."""

from typing import TYPE_CHECKING

from holdfast.later import names

if TYPE_CHECKING:
    from holdfast.storage.keeper import open_log
    from holdfast.storage.log import Log
    from holdfast.storage.reader import FollowSettings, LogReader
    from holdfast.storage.recovery import OpenReport

__all__ = ["FollowSettings", "Log", "LogReader", "OpenReport", "open_log"]

# Loaded on first use: a client of a server needs the names of files, and no log.
_LATER = {
    "FollowSettings": "holdfast.storage.reader",
    "Log": "holdfast.storage.log",
    "LogReader": "holdfast.storage.reader",
    "OpenReport": "holdfast.storage.recovery",
    "open_log": "holdfast.storage.keeper",
}

__getattr__ = names(__name__, _LATER)
