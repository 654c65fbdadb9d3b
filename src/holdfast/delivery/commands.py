"""What may be asked of a group on a partition."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final, TypeAlias

import msgspec

from holdfast.delivery.runs import Runs

# Why a message came back.
NACKED: Final = "nacked"
DEFERRED: Final = "deferred"
DROPPED: Final = "dropped unhandled"
LEASE_ENDED: Final = "lease ended"
HOLDER_GONE: Final = "holder gone"
CLOSED: Final = "queue closed"

# A lease with this session outlives the process that took it.
NO_SESSION: Final = 0


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """The proof of a lease: which message, which delivery."""

    offset: int
    fence: int


class Receive(msgspec.Struct, frozen=True, gc=False):
    """Hand out the messages that `choose` has found."""

    offsets: Sequence[int]
    cursor: int
    lease_ms: int
    holder: str
    session: int = NO_SESSION
    moving_to: int = -1


class Ack(msgspec.Struct, frozen=True, gc=False):
    """Messages were handled."""

    receipts: Sequence[Receipt]


class Nack(msgspec.Struct, frozen=True, gc=False):
    """Give a message back; `delay_ms` None stands for the queue's own backoff."""

    receipt: Receipt
    delay_ms: int | None = None
    error: str = ""
    why: str = NACKED
    counted: bool = True


class Reject(msgspec.Struct, frozen=True, gc=False):
    """A message can never be handled: straight to the dead letters."""

    receipt: Receipt
    error: str = ""


class Extend(msgspec.Struct, frozen=True, gc=False):
    """More time, from now on."""

    receipts: Sequence[Receipt]
    lease_ms: int


class Save(msgspec.Struct, frozen=True, gc=False):
    """Leave a document with a leased message, if its version is still the expected one."""

    receipt: Receipt
    expected: int
    document: bytes | None


class Cancel(msgspec.Struct, frozen=True, gc=False):
    """Take back a message that nobody works on."""

    offset: int


class Bury(msgspec.Struct, frozen=True, gc=False):
    """Messages that are ready go straight to the dead letters."""

    runs: Runs
    reason: str
    error: str = ""


class Seek(msgspec.Struct, frozen=True, gc=False):
    """Go on from there: all before is passed over, all behind comes (again)."""

    to: int


class Tick(msgspec.Struct, frozen=True, gc=False):
    """Time has passed. At most `most` leases and delays end by it; as long as so many do, the next is due at once."""

    most: int = sys.maxsize


class Open(msgspec.Struct, frozen=True, gc=False):
    """An owner begins, and finds the log's end here."""

    boot_id: int
    end: int


class Leave(msgspec.Struct, frozen=True, gc=False):
    """The owner ends in order: what the holders of its session still have goes back, untouched so to speak."""


class GiveUp(msgspec.Struct, frozen=True, gc=False):
    """The holders of all earlier sessions are gone; what they held comes back at once."""


Command: TypeAlias = (
    Receive | Ack | Nack | Reject | Extend | Save | Cancel | Bury | Seek | Tick | Open | Leave | GiveUp
)  # fmt: skip


# Fencing numbers: each is higher than all before it, and tells in whose time it was given.
#
# Their bits from 40 up are the session of whoever gave them. The bit below says that the lease has a receipt which
# nobody can make up: versions before that never set it, for they would have had to lease 2**39 times in one session.


SESSION_BITS: Final = 40
PROVEN: Final = 1 << (SESSION_BITS - 1)


def next_fence(last: int) -> int:
    """The one after `last`."""
    return (last + 1) | PROVEN
