"""The segmented log: what it acknowledged it never lets go of."""

from holdfast.storage.keeper import open_log
from holdfast.storage.log import Log
from holdfast.storage.reader import FollowSettings, LogReader
from holdfast.storage.recovery import OpenReport

__all__ = ["FollowSettings", "Log", "LogReader", "OpenReport", "open_log"]
