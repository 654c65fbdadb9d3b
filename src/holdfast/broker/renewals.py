"""Leases that renew themselves for as long as their holders have the messages in hand."""

from __future__ import annotations

from holdfast.delivery.claims import held
from holdfast.delivery.commands import Receipt
from holdfast.delivery.group import Group


class Renewals:
    """Which leases are kept alive, and for how long each time. Whoever uses it holds the group's lock."""

    def __init__(self) -> None:
        self._lease_ms: dict[Receipt, int] = {}

    def add(self, receipt: Receipt, lease_ms: int) -> None:
        self._lease_ms[receipt] = lease_ms

    def remove(self, receipt: Receipt) -> None:
        """Its lease ends by itself from now on. Needs no lock; finalizers call it, at any point of any thread."""
        self._lease_ms.pop(receipt, None)

    def due(self, group: Group, mono_ms: int) -> list[tuple[Receipt, int]]:
        """Those to be extended now, because a third is used up; those that are settled or lost are forgotten."""
        found: list[tuple[Receipt, int]] = []
        for receipt, lease_ms in self._lease_ms.copy().items():
            if not held(group, receipt):
                self.remove(receipt)
            elif group.leases[receipt.offset].until_ms - mono_ms <= lease_ms * 2 // 3 + 1:
                found.append((receipt, lease_ms))
        return found

    def next_ms(self) -> int | None:
        """In how many ms to look again."""
        return min((lease_ms // 3 + 1 for lease_ms in list(self._lease_ms.values())), default=None)
