"""Messages in holders' hands, and those that fell from them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Final

import msgspec

from holdfast.delivery.claims import held
from holdfast.delivery.commands import Receipt
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

    @property
    def receipt(self) -> Receipt:
        return Receipt(self.record.offset, self.lease.fence)


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
