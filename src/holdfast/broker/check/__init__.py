"""Is a data folder as it should be, and what can be mended of it? An API; `holdfast check` and `repair` print it."""

from holdfast.broker.check.folder import FolderReport, PartReport, check_folder

__all__ = ["FolderReport", "PartReport", "check_folder"]
