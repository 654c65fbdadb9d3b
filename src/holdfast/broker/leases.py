"""Messages under lease: what a holder has, what it settled, what it dropped, and the leases that renew themselves."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.delivery.commands import Receipt
from holdfast.delivery.decide import held, lost
from holdfast.delivery.events import Buried, BuriedReady, Event
from holdfast.delivery.group import Group, Lease
from holdfast.errors import LeaseLost
from holdfast.model import Appended, Record

if TYPE_CHECKING:
    from holdfast.broker.delivery import Delivery

logger = logging.getLogger(__name__)

_UNHANDLED: Final = (
    "message %d of %s was dropped without ack or nack, and comes back; use `with message:` (this is said only once)"
)


class Delivered(msgspec.Struct, frozen=True, gc=False):
    """A message in a holder's hands."""

    record: Record
    lease: Lease
    attempt: int
    home: Delivery  # that it was taken from

    @property
    def receipt(self) -> Receipt:
        return Receipt(self.record.offset, self.lease.fence)

    @property
    def holder(self) -> str:
        return self.lease.holder

    @property
    def fence(self) -> int:
        return self.lease.fence


class Pending(msgspec.Struct, frozen=True, gc=False):
    """Something was decided and written; `Delivery.wait` returns when it is as safe as it should be."""

    events: Sequence[Event] = ()
    appended: Appended | None = None
    refused: LeaseLost | None = None  # for some of the messages; the others count

    @property
    def buried(self) -> bool:
        """Whether a message died, and has still to be moved."""
        return any(isinstance(event, Buried | BuriedReady) for event in self.events)


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


def lease_lost(group: Group, receipts: Sequence[Receipt]) -> LeaseLost:
    """The error for receipts that are no longer good."""
    error = lost(group, receipts[0])
    error.offsets = tuple(receipt.offset for receipt in receipts)
    if len(receipts) > 1:
        error.args = (f"{error.args[0]}. So it is with {len(receipts)} messages of this call; the others are done",)
    return error


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
