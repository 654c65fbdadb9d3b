"""Checks whether a data folder is intact and repairs what can be repaired. `holdfast check` and `repair` use this."""

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
