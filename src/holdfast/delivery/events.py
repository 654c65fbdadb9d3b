"""The commands of a group on one partition, the events they lead to, and which event moves a message to which phase.

Events are stored in the journal: a tag, once used, keeps its meaning, and fields are only added at the end.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from struct import Struct
from typing import Final, TypeAlias

import msgspec

# Many offsets in few numbers: (start, stop, start, stop, ...), where `stop` is not part of the run.

Runs: TypeAlias = tuple[int, ...]


def run(offset: int) -> Runs:
    """Return the run of a single offset."""
    return (offset, offset + 1)


def runs_of(offsets: Iterable[int]) -> Runs:
    """Return the runs of offsets given in any order, each at most once."""
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
    """Yield each run as (start, stop)."""
    return zip(runs[::2], runs[1::2], strict=True)


def each(runs: Runs) -> Iterator[int]:
    """Yield each offset, in order."""
    for start, stop in pairs(runs):
        yield from range(start, stop)


def size(runs: Runs) -> int:
    """Return the number of offsets."""
    return sum(runs[1::2]) - sum(runs[::2])


# Why a message was returned.
NACKED: Final = "nacked"
DEFERRED: Final = "deferred"
TAKEN_BACK: Final = "taken back"
DROPPED: Final = "dropped unhandled"
LEASE_ENDED: Final = "lease ended"
HOLDER_GONE: Final = "holder gone"
CLOSED: Final = "queue closed"

# A lease with this session outlives the process that took it.
NO_SESSION: Final = 0


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """Proof of a lease: which message, and which delivery of it."""

    offset: int
    fence: int


class Receive(msgspec.Struct, frozen=True, gc=False):
    """Lease the messages that `choose` has found."""

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
    """Return a message; with `delay_ms` None, after the queue's own backoff."""

    receipt: Receipt
    delay_ms: int | None = None
    error: str = ""
    why: str = NACKED
    counted: bool = True


class Reject(msgspec.Struct, frozen=True, gc=False):
    """A message can never be handled: move it to the dead letters."""

    receipt: Receipt
    error: str = ""


class Extend(msgspec.Struct, frozen=True, gc=False):
    """Extend leases to `lease_ms` from now."""

    receipts: Sequence[Receipt]
    lease_ms: int


class Save(msgspec.Struct, frozen=True, gc=False):
    """Store a document with a leased message, if its version is still the expected one."""

    receipt: Receipt
    expected: int
    document: bytes | None


class Cancel(msgspec.Struct, frozen=True, gc=False):
    """Cancel a message that nobody is working on."""

    offset: int


class Finish(msgspec.Struct, frozen=True, gc=False):
    """Messages are done, whoever may have them: a transaction that acked them is decided."""

    offsets: Sequence[int]


class Bury(msgspec.Struct, frozen=True, gc=False):
    """Move ready messages to the dead letters."""

    runs: Runs
    reason: str
    error: str = ""


class Seek(msgspec.Struct, frozen=True, gc=False):
    """Move the group's position: earlier messages are skipped, later ones are delivered (again)."""

    to: int


class Tick(msgspec.Struct, frozen=True, gc=False):
    """Time has passed: end leases and delays that are over, at most `most`. If that many were, call again at once."""

    most: int = sys.maxsize


class OpenGroup(msgspec.Struct, frozen=True, gc=False):
    """An owner opens the group, and finds the end of the log here."""

    boot_id: int
    end: int


class CloseGroup(msgspec.Struct, frozen=True, gc=False):
    """The owner closes cleanly: messages held in its session go back, without counting an attempt."""


class GiveUp(msgspec.Struct, frozen=True, gc=False):
    """The holders of all earlier sessions are gone: what they held is returned at once.

    Those who received a message at `doubted_ms` or before may still be at work: their leases run on.
    """

    doubted_ms: int = 0


Command: TypeAlias = (
    Receive | Ack | Nack | Reject | Extend | Save | Cancel | Finish | Bury | Seek | Tick
    | OpenGroup | CloseGroup | GiveUp
)  # fmt: skip


# Fencing numbers: each is higher than all before it. The bits from 40 up are the session that issued it. The bit below
# says that the lease has a receipt that cannot be forged; older versions never set it, since for that they would have
# had to lease 2**39 times in one session.

SESSION_BITS: Final = 40
PROVEN: Final = 1 << (SESSION_BITS - 1)


def next_fence(last: int) -> int:
    """Return the fence after `last`."""
    return (last + 1) | PROVEN


class Phase(Enum):
    """The state of a message in one group."""

    READY = "ready"
    LEASED = "leased"
    DELAYED = "delayed"
    DONE = "done"
    DEAD = "dead"

    __hash__ = object.__hash__  # each is there once, and the one of enums is slow


class Leased(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=1):
    """Messages were leased to a holder until `until_ms` on the boot's monotonic clock.

    `cursor` is where the group's cursor is afterwards. `moving_to` is set for a move into another log: the end of that
    log when the move began.
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
    """A message was returned, to be ready again at `due_ms`; `counted` if that was a failed attempt."""

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
    """Leases were extended."""

    runs: Runs
    lease_ms: int
    until_ms: int


class Saved(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=6):
    """A holder stored a document with its message; None removes it."""

    offset: int
    version: int
    document: bytes | None


class Buried(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=7):
    """A message is to become a dead letter; `dead_from` is the end of the dead letters' log at that time."""

    offset: int
    reason: str
    error: str
    at_ms: int
    dead_from: int


class DeadStored(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=8):
    """The dead letters of these messages are safe in their log."""

    runs: Runs


class Expired(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=9):
    """The time to live of messages ended before they were leased."""

    runs: Runs


class Cancelled(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=10):
    """Messages were cancelled before they were leased."""

    runs: Runs


class Lost(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=11):
    """The log no longer has these messages: they are damaged on disk, or were trimmed by force."""

    runs: Runs


class Skipped(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=12):
    """A seek skipped all ready and delayed messages below `to`."""

    to: int


class Replayed(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=13):
    """A seek made everything from `to` on ready again, except what is leased or dead."""

    to: int


class Opened(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=14):
    """An owner opened the group: its clocks, and the end of the log as it found it.

    What the group knows past that end belongs to a lost tail: other messages will get those offsets.
    """

    session: int
    boot_id: int
    mono_ms: int
    end: int


class BuriedReady(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=15):
    """Messages that nobody held are to become dead letters; `dead_from` is as in Buried.

    A million of them may expire together: one event for a whole run costs no more than one for a single message.
    """

    runs: Runs
    reason: str
    error: str
    at_ms: int
    dead_from: int


# Notes: leases and acks of single messages, each in one 64-bit word, which takes a single store to write.
#
#     word      payload * NOTE_PRIME + mark
#     payload   from the lowest bit on:
#         1     acked      1 for an ack, 0 for a lease
#         1     passes     whether the lease moves the cursor past the message; otherwise it stays where it is
#         2     more_ms    of a lease: added to `ahead_ms`, because the two clocks do not tick at the same moment
#         24    offset     from `base` on
#         16    at_ms      from `since_ms` on
#
# The remainder of a word is its check: one or two flipped bits always change it. Every run of notes has a mark of its
# own, so words of another run do not count. No mark is 0, so neither do zeros.

NOTE_PRIME: Final = 1_048_573
PLACES: Final = 1 << 24
SPAN_MS: Final = 1 << 16
_PAYLOADS: Final = 1 << 44
_WORD: Final = Struct("<Q")
assert _PAYLOADS * NOTE_PRIME + NOTE_PRIME <= 1 << 64  # keeps the table above and the code in step


class Noted(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=16):
    """A run of notes that began at event `begun`; the event there has no words: they follow in the scratch file.

    All leases of a run have the same holder, length and session. `fence` is the last one before them; each takes the
    next. A lease ends `ahead_ms` after its time by the wall clock, on the monotonic one.
    """

    begun: int
    base: int
    since_ms: int
    holder: str
    session: int
    lease_ms: int
    ahead_ms: int
    fence: int
    words: bytes = b""

    @property
    def mark(self) -> int:
        """The remainder of all words of this run."""
        return 1 + self.begun % (NOTE_PRIME - 1)

    def with_words(self, words: bytes) -> Noted:
        """The same run with these words."""
        return msgspec.structs.replace(self, words=words)

    def intact(self, words: bytes) -> bytes:
        """Return the words of this run at the beginning, up to the first that is none."""
        count, mark = 0, self.mark
        for (word,) in _WORD.iter_unpack(words[: len(words) & -8]):
            payload, rest = divmod(word, NOTE_PRIME)
            if rest != mark or payload >= _PAYLOADS:
                break
            count += 1
        return words[: count * 8]

    def places(self) -> tuple[int, int]:
        """The range of messages that the words are about."""
        places = [word // NOTE_PRIME >> 4 & PLACES - 1 for (word,) in _WORD.iter_unpack(self.words)]
        return self.base + min(places, default=0), self.base + max(places, default=-1) + 1

    def events(self) -> Iterator[tuple[int, Leased | Acked]]:
        """Yield the time of each note in ms, and the event that it stands for."""
        fence = self.fence
        for (word,) in _WORD.iter_unpack(self.words):
            payload = word // NOTE_PRIME
            offset, at_ms = self.base + (payload >> 4 & PLACES - 1), self.since_ms + (payload >> 28)
            if payload & 1:
                yield at_ms, Acked((offset, offset + 1))
                continue
            fence = next_fence(fence)
            until_ms = at_ms + self.ahead_ms + (payload >> 2 & 3)
            cursor = offset + 1 if payload & 2 else 0  # an event cannot move it back
            runs = (offset, offset + 1)
            yield at_ms, Leased(runs, cursor, fence, self.session, self.lease_ms, until_ms, at_ms, self.holder)


Event: TypeAlias = (
    Leased | Acked | Returned | Released | Extended | Saved | Buried | DeadStored | Expired | Cancelled | Lost
    | Skipped | Replayed | Opened | BuriedReady | Noted
)  # fmt: skip

MOVES: Final[dict[tuple[Phase, type[msgspec.Struct]], Phase]] = {
    (Phase.READY, Leased): Phase.LEASED,
    (Phase.READY, Buried): Phase.DEAD,  # written by versions before BuriedReady
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
    (Phase.DEAD, DeadStored): Phase.DONE,
}

encode_event = msgspec.msgpack.Encoder().encode
decode_event = msgspec.msgpack.Decoder(Event).decode
