"""Is a data folder as it should be, and what can be mended of it? An API; `holdfast check` and `repair` print it."""

from holdfast.broker.check.folder import FolderReport, PartReport, check_folder
from holdfast.broker.check.repair import FolderPlan, FolderRepair, FolderStep, plan_folder_repair, repair_folder

__all__ = [
    "FolderPlan",
    "FolderRepair",
    "FolderReport",
    "FolderStep",
    "PartReport",
    "check_folder",
    "plan_folder_repair",
    "repair_folder",
]
