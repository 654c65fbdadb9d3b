"""Faults to order: which call of a simulated disk fails, how, and whether for good."""

from __future__ import annotations

import errno as errors
import os
from dataclasses import dataclass

from holdfast.env.disk import RAN_OUT


@dataclass(slots=True)
class _Fault:
    """One thing that will go wrong; `seen` counts the calls that it might have struck."""

    nth: int
    errno: int
    sticky: bool
    calls: frozenset[str] | None
    short: bool = False
    seen: int = 0


class FaultPlan:
    """What goes wrong on a disk. Calls count from 1, beginning with the first after the fault was armed."""

    __slots__ = ("_faults", "armed", "fired")

    def __init__(self) -> None:
        self._faults: list[_Fault] = []
        self.armed = False  # read before every call, so that a disk without faults pays next to nothing
        self.fired: list[str] = []  # the calls that were struck, in order; empty: nothing went wrong yet

    def fail(self, nth: int, errno: int, *, sticky: bool, calls: frozenset[str] | None = None) -> None:
        """The nth call (of those named) raises OSError(errno); sticky: so do all such calls after it."""
        self._arm(_Fault(nth, errno, sticky, calls))

    def short_write(self, nth: int, *, sticky: bool) -> None:
        """The nth write takes about half of its bytes; sticky: the disk is full, later ones raise ENOSPC."""
        self._arm(_Fault(nth, errors.ENOSPC, sticky, frozenset({"write"}), short=True))

    def clear(self) -> None:
        """Nothing goes wrong any more; `fired` stays."""
        self._faults.clear()
        self.armed = False

    def strike(self, call: str) -> bool:
        """Raise what was ordered for this call; answers whether it is a write to be cut short."""
        for fault in self._faults:
            if fault.calls is not None and call not in fault.calls:
                continue
            if call == "exists" and fault.errno not in RAN_OUT:
                continue  # the real disk takes any other error for a "no", which is no fault to walk through
            fault.seen += 1
            if fault.seen == fault.nth or (fault.sticky and fault.seen > fault.nth):
                self.fired.append(call)
                if fault.short and fault.seen == fault.nth:
                    return True
                raise OSError(fault.errno, f"{os.strerror(fault.errno)} (ordered for call {call})")
        return False

    def _arm(self, fault: _Fault) -> None:
        if fault.nth < 1:
            raise ValueError("calls count from 1")
        self._faults.append(fault)
        self.armed = True
