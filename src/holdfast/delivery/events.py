"""The events of a message's life, as they stand in the journal, and the moves that they make.

                publish                      Leased                      Acked
                   |                                                       |
                   v                                                       v
    +-----> READY ---------------------------> LEASED ------------------> DONE
    |         |  ^                             | | ^ |                     ^
    |         |  |   Released                  | | +-+ Extended, Saved     |
    |         |  +------------ DELAYED <-------+ |                         |
    |         |                  |      Returned |                         |
    |         |                  |               | Buried                  |
    |         +---------+--------+---------------+-------> DEAD -----------+
    |                   |                                       Interred   |
    |                   +--- Expired, Cancelled, Skipped, Lost ----------->+
    +------------------------------ Replayed ------------------------------+

BuriedReady is Buried for many that nobody held.

A publish is no event of a group: whatever lies in the log and has no other phase is ready.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, TypeAlias

import msgspec

from holdfast.delivery.runs import Runs


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
