"""The three doors in one hand."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.env.clock import Clock, SystemClock
from holdfast.env.disk import Disk, RealDisk
from holdfast.env.ids import Ids, SystemIds


@dataclass(frozen=True)
class World:
    """All that storage may know of what lies outside the process."""

    clock: Clock
    disk: Disk
    ids: Ids


def real_world() -> World:
    """This machine."""
    return World(clock=SystemClock(), disk=RealDisk(), ids=SystemIds())
