"""What may be asked of a group on a partition, and the events that follow, as they stand in the journal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from typing import Final, TypeAlias

import msgspec

# Many offsets in few numbers: (start, stop, start, stop, ...), each run without its stop.


Runs: TypeAlias = tuple[int, ...]


def run(offset: int) -> Runs:
    """The run of a single offset."""
    return (offset, offset + 1)


def runs_of(offsets: Iterable[int]) -> Runs:
    """The runs of offsets in any order, each at most once."""
    if isinstance(offsets, range) and offsets.step == 1:
        return (offsets.start, offsets.stop) if offsets else ()
    in_order = sorted(offsets)
    if in_order and in_order[-1] - in_order[0] == len(in_order) - 1:
        return (in_order[0], in_order[-1] + 1)
    runs: list[int] = []
    for offset in in_order:
        if runs and runs[-1] == offset:
            runs[-1] = offset + 1
        else:
            runs += (offset, offset + 1)
    return tuple(runs)


def pairs(runs: Runs) -> Iterator[tuple[int, int]]:
    """Each run as (start, stop)."""
    return zip(runs[::2], runs[1::2], strict=True)


def each(runs: Runs) -> Iterator[int]:
    """Each offset, in order."""
    for start, stop in pairs(runs):
        yield from range(start, stop)


def size(runs: Runs) -> int:
    """How many offsets there are."""
    return sum(runs[1::2]) - sum(runs[::2])


# What may be asked of a group on a partition.


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


class OpenGroup(msgspec.Struct, frozen=True, gc=False):
    """An owner begins, and finds the log's end here."""

    boot_id: int
    end: int


class CloseGroup(msgspec.Struct, frozen=True, gc=False):
    """The owner ends in order: what the holders of its session still have goes back, untouched so to speak."""


class GiveUp(msgspec.Struct, frozen=True, gc=False):
    """The holders of all earlier sessions are gone; what they held comes back at once."""


Command: TypeAlias = (
    Receive | Ack | Nack | Reject | Extend | Save | Cancel | Bury | Seek | Tick | OpenGroup | CloseGroup | GiveUp
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


class Phase(Enum):
    """Where a message stands in one group."""

    READY = "ready"
    LEASED = "leased"
    DELAYED = "delayed"
    DONE = "done"
    DEAD = "dead"


class Leased(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=1):
    """Messages were handed to a holder, who has until `until_ms` of the boot's monotonic clock.

    `cursor` is where the group's cursor stands afterwards. `moving_to` is set for a move into another log,
    which has an end of its own: it was there when the move began.
    """

    runs: Runs
    cursor: int
    fence: int
    session: int
    lease_ms: int
    until_ms: int
    at_ms: int
    holder: str
    moving_to: int = -1


class Acked(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=2):
    """Messages were handled."""

    runs: Runs


class Returned(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=3):
    """A message came back, to be ready again at `due_ms`; `counted` if that was a failed attempt."""

    offset: int
    due_ms: int
    counted: bool
    why: str
    error: str
    at_ms: int


class Released(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=4):
    """The delay of messages is over."""

    runs: Runs


class Extended(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=5):
    """Holders got more time."""

    runs: Runs
    lease_ms: int
    until_ms: int


class Saved(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=6):
    """A holder left a document with its message; None takes it away."""

    offset: int
    version: int
    document: bytes | None


class Buried(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=7):
    """A message is to become a dead letter; `dead_from` is where the dead letters' log ended then."""

    offset: int
    reason: str
    error: str
    at_ms: int
    dead_from: int


class Interred(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=8):
    """The dead letters of these messages are safe in their log."""

    runs: Runs


class Expired(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=9):
    """The time to live of messages was over before anybody took them."""

    runs: Runs


class Cancelled(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=10):
    """Messages were taken back before anybody took them."""

    runs: Runs


class Lost(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=11):
    """The log has no whole messages there any more: damaged on disk, or trimmed away by force."""

    runs: Runs


class Skipped(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=12):
    """A seek passed over all ready and delayed messages below `to`."""

    to: int


class Replayed(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=13):
    """A seek made everything from `to` on ready again that is not leased or dead."""

    to: int


class Opened(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=14):
    """An owner began: with the log's end as it found it, and its clocks.

    What the group knows beyond that end belongs to a tail that is gone: other messages will stand there.
    """

    session: int
    boot_id: int
    mono_ms: int
    end: int


class BuriedReady(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=15):
    """Messages that nobody held are to become dead letters; `dead_from` is as in Buried.

    A million of them may expire together: one event for a run of them costs no more than one for a message.
    """

    runs: Runs
    reason: str
    error: str
    at_ms: int
    dead_from: int


Event: TypeAlias = (
    Leased | Acked | Returned | Released | Extended | Saved | Buried | Interred | Expired | Cancelled | Lost
    | Skipped | Replayed | Opened | BuriedReady
)  # fmt: skip

MOVES: Final[dict[tuple[Phase, type[msgspec.Struct]], Phase]] = {
    (Phase.READY, Leased): Phase.LEASED,
    (Phase.READY, Buried): Phase.DEAD,  # as versions before BuriedReady wrote it
    (Phase.READY, BuriedReady): Phase.DEAD,
    (Phase.READY, Expired): Phase.DONE,
    (Phase.READY, Cancelled): Phase.DONE,
    (Phase.READY, Lost): Phase.DONE,
    (Phase.READY, Skipped): Phase.DONE,
    (Phase.LEASED, Acked): Phase.DONE,
    (Phase.LEASED, Returned): Phase.DELAYED,
    (Phase.LEASED, Extended): Phase.LEASED,
    (Phase.LEASED, Saved): Phase.LEASED,
    (Phase.LEASED, Buried): Phase.DEAD,
    (Phase.DELAYED, Released): Phase.READY,
    (Phase.DELAYED, Cancelled): Phase.DONE,
    (Phase.DELAYED, Skipped): Phase.DONE,
    (Phase.DELAYED, Replayed): Phase.READY,
    (Phase.DONE, Replayed): Phase.READY,
    (Phase.DEAD, Interred): Phase.DONE,
}

encode_event = msgspec.msgpack.Encoder().encode
decode_event = msgspec.msgpack.Decoder(Event).decode
