"""Messages under lease: what a holder has, what fell from its hands, and the leases that renew themselves."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from holdfast.delivery.commands import Receipt
from holdfast.delivery.decide import held
from holdfast.delivery.group import Group, Lease
from holdfast.model import Record

logger = logging.getLogger(__name__)

_UNHANDLED: Final = (
    "message %d of %s was dropped without ack or nack, and comes back; use `with message:` (this is said only once)"
)


class Delivered(msgspec.Struct, frozen=True, gc=False):
    """A message in a holder's hands."""

    record: Record
    lease: Lease
    attempt: int
    home: Any = None  # the station that it was taken from

    @property
    def receipt(self) -> Receipt:
        return Receipt(self.record.offset, self.lease.fence)

    @property
    def holder(self) -> str:
        return self.lease.holder

    @property
    def fence(self) -> int:
        return self.lease.fence


class Dropped:
    """Receipts of messages that nobody has in hand any more, and nobody settled."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._receipts: list[Receipt] = []  # filled by finalizers, at any point of any thread: append and pop only
        self._warned = False
        self.add = self._receipts.append

    def __bool__(self) -> bool:
        return bool(self._receipts)

    def take(self, group: Group) -> Iterator[Receipt]:
        """Each of them that is still held, once."""
        while self._receipts:
            receipt = self._receipts.pop()
            if held(group, receipt):
                if not self._warned:
                    self._warned = True
                    logger.warning(_UNHANDLED, receipt.offset, self._folder)
                yield receipt


# Leases that renew themselves for as long as their holders have the messages in hand.


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
