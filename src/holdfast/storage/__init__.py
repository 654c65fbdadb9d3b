"""The segmented log: appends, syncs, reads, recovers, and never loses what it has acknowledged."""

from holdfast.storage.keeper import open_log
from holdfast.storage.log import Log
from holdfast.storage.reader import FollowSettings, LogReader
from holdfast.storage.recovery import OpenReport

__all__ = ["FollowSettings", "Log", "LogReader", "OpenReport", "open_log"]
