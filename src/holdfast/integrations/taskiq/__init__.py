"""Taskiq on a folder, a server or a store: `broker = HoldfastBroker("/var/lib/app/jobs")`."""

from typing import TYPE_CHECKING

from holdfast.later import names

if TYPE_CHECKING:
    from holdfast.integrations.taskiq.broker import HoldfastBroker
    from holdfast.integrations.taskiq.results import HoldfastResultBackend, HoldfastScheduleSource

__all__ = ["HoldfastBroker", "HoldfastResultBackend", "HoldfastScheduleSource"]

__getattr__ = names(
    "holdfast.integrations.taskiq",
    {
        "HoldfastBroker": "holdfast.integrations.taskiq.broker",
        "HoldfastResultBackend": "holdfast.integrations.taskiq.results",
        "HoldfastScheduleSource": "holdfast.integrations.taskiq.results",
    },
)
