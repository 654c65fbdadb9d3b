"""Locks and state documents of a data folder: decide, journal, apply, always in this order (see `delivery`).

A lock that becomes free is granted to the first waiter in the same step. Later callers cannot overtake it, and waiters
need not try again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import msgspec

from holdfast.broker.folder.layout import LOCKS, SCHEDULE_PREFIX, TRANSACTION_PREFIX, parse_lease
from holdfast.broker.inspect.status import TRIES, holds_log, replay_beside
from holdfast.broker.journal import SnapshotFiles, StateJournal, StateSnapshot
from holdfast.broker.leases import FolderKey, Prover
from holdfast.broker.waiters import Waiter
from holdfast.delivery.decide import Moment
from holdfast.delivery.group import FAR
from holdfast.env import World
from holdfast.env.process import get_logger
from holdfast.errors import (
    Closed,
    Conflict,
    HoldfastError,
    InvalidRequest,
    LeaseLost,
    LockHeld,
    TooManyWaiters,
    Unavailable,
)
from holdfast.locking import (
    PROVEN,
    Acquire,
    Content,
    DocumentWritten,
    Ended,
    Event,
    LockHolder,
    LockImage,
    LockTable,
    OpenLocks,
    Proof,
    Release,
    Remove,
    Renew,
    ReplaceDocument,
    Tick,
    check,
    decide,
    decode_event,
    encode_event,
    image_of,
    lock_held,
    table_of,
)
from holdfast.model import Appended, Durability
from holdfast.settings import LogSettings
from holdfast.storage.files import join, translated
from holdfast.storage.keeper import soonest

# The journal. A snapshot is due after this much growth, or after as much as the state is large, so that a large state
# is written less often.
_SNAPSHOT_BYTES: Final = 4 * 1024 * 1024
_SNAPSHOT_EVENTS: Final = 20_000


class LocksSnapshot(StateSnapshot[LockImage], frozen=True, array_like=True):
    """The locks and documents after all events below `position` of the journal."""


_decode = msgspec.msgpack.Decoder(LocksSnapshot).decode


class LocksJournal(StateJournal[LockTable, LockImage]):
    """The journal of the locks and documents of a data folder."""

    damage_means = "some locks may no longer be held, and some documents may be older versions"
    without_it = "no lock is held, there are no documents, and fencing numbers start again"

    def __init__(self, world: World, folder: str, settings: LogSettings) -> None:
        super().__init__(world, folder, settings)
        self._grown_bytes = 0

    def append(self, events: Sequence[Event], durability: Durability) -> Appended:
        """Write the events as one batch; pass the result to `log.wait`."""
        values = [encode_event(event) for event in events]
        appended = self.log.write(values, durability=durability)
        self._grown_bytes += sum(map(len, values))
        return appended

    def snapshot_if_due(self, table: LockTable) -> LocksSnapshot | None:
        """A snapshot if it is time to `keep` one, else None."""
        many = self.events_since_snapshot >= max(_SNAPSHOT_EVENTS, len(table.held))
        if not many and self._grown_bytes < max(_SNAPSHOT_BYTES, table.document_bytes):
            return None
        self._grown_bytes = 0
        return LocksSnapshot(self.log.written_end, image_of(table))

    def _new(self) -> LockTable:
        return LockTable()

    def _restored(self, image: LockImage) -> LockTable:
        return table_of(image)

    def _image(self, state: LockTable) -> LockImage:
        return image_of(state)

    def _decoded(self, payload: bytes) -> LocksSnapshot:
        return _decode(payload)

    def _apply_value(self, state: LockTable, value: bytes) -> None:
        self._grown_bytes += len(value)
        state.apply(decode_event(value))


def newest_locks(world: World, folder: str) -> tuple[LocksSnapshot | None, str]:
    """Return the newest intact snapshot of the locks and its file name, or (None, "")."""
    return SnapshotFiles(world, folder).newest(_decode)


logger = get_logger(__name__)

_OWN: Final = (SCHEDULE_PREFIX, TRANSACTION_PREFIX)
_MOST_BYTES: Final = 256 * 1024 * 1024  # of all documents, which are kept in memory
_MOST_WAITERS: Final = 10_000
_AFTER_ERROR_MS: Final = 1_000


class Ticket:
    """A request for a lock, and its outcome."""

    def __init__(self, wanted: Acquire, waiter: Waiter | None) -> None:
        self.wanted = wanted
        self.waiter = waiter
        self.granted: LockHolder | None = None
        self.appended: Appended | None = None
        self.error: HoldfastError | None = None

    @property
    def over(self) -> bool:
        """Whether it is decided; only the sync may be left to wait for."""
        return self.granted is not None or self.error is not None

    @property
    def proof(self) -> Proof:
        assert self.granted is not None
        return Proof(self.wanted.name, self.granted.fence)


class LockStatus(msgspec.Struct, frozen=True, gc=False):
    """A lock's holder, number of waiters, and version of the document of its name (0: none)."""

    name: str
    held: LockHolder | None
    waiting: int
    version: int


class Decided(msgspec.Struct, frozen=True, gc=False):
    """The outcome of a command. Wait for `appended` before reporting it, even if it is a refusal."""

    appended: Appended | None
    refused: Conflict | None = None
    content: Content | None = None
    held: LockHolder | None = None


class FolderLocks:
    """The locks and documents of a data folder. Thread-safe; callers wait for syncs outside its lock."""

    def __init__(
        self, world: World, folder: str, check_open: Callable[[], None], began_ms: int, prover: Prover
    ) -> None:
        self._clock = world.clock
        self._check_open = check_open
        self._prover = prover
        self._lock = threading.Lock()
        self._lines: dict[str, deque[Ticket]] = {}
        self._waiting = 0
        self._renewing: dict[Proof, int] = {}
        self._written: Appended | None = None  # the last change of a document
        self._due_mono_ms = FAR
        self._logged_error = ""
        self._closed = False
        self.on_attention: Callable[[], None] = lambda: None
        self.journal = LocksJournal(world, folder, LogSettings())
        self.table = self.journal.load()
        try:
            # Not synced: the first grant or document write syncs this event along with its own.
            began = Moment(self.moment().wall_ms, began_ms)
            self._commit(decide(self.table, OpenLocks(world.ids.boot_id(), self.journal.lost_events), began))
        except BaseException:
            self.journal.close()
            raise

    @staticmethod
    def open(world: World, root: str, check_open: Callable[[], None], began_ms: int, key: FolderKey) -> FolderLocks:
        """Open the locks of a data folder; their journal is created if there is none.

        `began_ms` is the monotonic time at which the owner opened the folder. After a reboot, leases run from then on.
        """
        folder = join(root, LOCKS)
        with translated(folder):
            return FolderLocks(world, folder, check_open, began_ms, Prover(key.get(), "lock", mark=PROVEN))

    def lease_id(self, name: str, held: LockHolder) -> str:
        """The lease id, which proves the lease. Only its holder may see it."""
        return self._prover.text(name, held.fence, held.at_ms)

    def proof(self, lease_id: object) -> Proof:
        """Verify a lease id, whether or not the lease is still valid. Raises LeaseLost if it was not issued here."""
        name, token = parse_lease(lease_id)
        proven, held = self._prover.read(name, token), self.table.held.get(name)
        if proven is None or (held is not None and held.fence == proven.fence and not proven.is_of(held.at_ms)):
            raise LeaseLost(
                f"this lease id is not valid for lock {name}: it was not issued here. Nothing was changed "
                "by this call; stop the work that the lock protects",
                why="the lease id was not issued here",
            )
        return Proof(name, proven.fence)

    def moment(self) -> Moment:
        return Moment(self._clock.now_ns() // 1_000_000, self._clock.monotonic_ns() // 1_000_000)

    def ask(self, wanted: Acquire, waiter: Waiter | None) -> Ticket:
        """Take the lock, or join its line. Raises LockHeld if it is taken and there is no waiter, or TooManyWaiters.

        When the ticket is over or the waiter times out, call `settle`; to give up, call `leave`.
        """
        ticket = Ticket(wanted, waiter)
        with self._lock:
            self._check_open()
            now = self.moment()
            self._look(wanted.name, now)
            try:
                self._grant(ticket, now)
            except LockHeld:
                if waiter is None:
                    raise
                if self._waiting >= _MOST_WAITERS:
                    raise TooManyWaiters(
                        f"{self._waiting} other calls are already waiting for locks; try again later, without waiting"
                    ) from None
                self._lines.setdefault(wanted.name, deque()).append(ticket)
                self._waiting += 1
        return ticket

    def settle(self, ticket: Ticket) -> Appended:
        """What to wait for before telling the holder. Raises the ticket's error, or LockHeld if it was not granted."""
        if ticket.error is not None:
            raise ticket.error
        if ticket.appended is None:
            raise self.refusal(ticket.wanted.name)
        return ticket.appended

    def refusal(self, name: str) -> HoldfastError:
        """The error for a waiter that timed out."""
        with self._lock:
            if name in self.table.held:
                return lock_held(self.table, name, self.moment())
        return LockHeld(f"lock {name} was held the whole time; try again")

    def leave(self, ticket: Ticket) -> None:
        """Give up: leave the line, or release the lock if it was granted meanwhile."""
        with self._lock:
            line = self._lines.get(ticket.wanted.name)
            if line is not None and ticket in line:
                line.remove(ticket)
                self._waiting -= 1
                self._drop_line(ticket.wanted.name)
            elif ticket.granted is not None and not self._closed:
                with suppress(HoldfastError):  # otherwise the lease expires
                    self._release(ticket.proof)

    def look(self, ticket: Ticket) -> float | None:
        """End an expired lease; returns the seconds left of the current one if the ticket is first in line."""
        name = ticket.wanted.name
        with self._lock:
            self._check_open()
            now = self.moment()
            self._look(name, now)
            line = self._lines.get(name)
            if not line or line[0] is not ticket:
                return None
            return (self.table.held[name].until_ms - now.mono_ms) / 1000

    def renew(self, command: Renew) -> Decided:
        """Extend a lease. Raises LeaseLost.

        Synced only if the lease becomes longer: after a power cut its full time is granted again anyway.
        """
        with self._lock:
            self._check_open()
            now = self.moment()
            events = decide(self.table, command, now)
            longer = self.table.held[command.proof.name].lease_ms < (command.lease_ms or 0)
            appended = self._commit(events, "fsync" if longer else "interval")
            held = self.table.held[command.proof.name]
            self._expect_tick(held.until_ms)
            return Decided(appended, held=held)

    def release(self, proof: Proof) -> None:
        """Release the lock; the first waiter gets it. Raises LeaseLost."""
        with self._lock:
            self._check_open()
            self._release(proof)

    def force_release(self, name: str) -> bool:
        """Take the lock from its holder; the first waiter gets it. False if it is not held."""
        with self._lock:
            self._check_open()
            self._look(name, self.moment())
            held = self.table.held.get(name)
            if held is None:
                return False
            self._release(Proof(name, held.fence))
            return True

    def keep_alive(self, proof: Proof, lease_ms: int) -> None:
        """Renew the lease automatically until `let_expire` is called."""
        with self._lock:
            self._renewing[proof] = lease_ms
            self._expect_tick(self.moment().mono_ms + lease_ms // 3)

    def let_expire(self, proof: Proof) -> None:
        """Stop renewing. Needs no lock: finalizers call it at any point of any thread."""
        self._renewing.pop(proof, None)

    def holds(self, proof: Proof) -> bool:
        """Whether the lease is still valid."""
        held = self.table.held.get(proof.name)
        return held is not None and held.fence == proof.fence and held.until_ms > self.moment().mono_ms

    def change(self, command: ReplaceDocument | Remove, *, bounded: bool = True) -> Decided:
        """Write or remove a document. Do not report the outcome, not even a refusal, before it is on disk.

        Unless it is `bounded`, it is written even if there is no room: what grows a little must not be stopped by
        those who have used up the room.
        """
        with self._lock:
            self._check_open()
            try:
                events = decide(self.table, command, self.moment())
            except Conflict as error:
                return Decided(self._written, refused=error)
            if bounded and isinstance(command, ReplaceDocument):
                self._check_room(command)
            before = self.table.documents.get(command.name)
            if events:
                self._written = self._commit(events, "fsync")
            return Decided(self._written, content=self.table.documents.get(command.name, before))

    def change_all(self, commands: Sequence[ReplaceDocument | Remove]) -> Decided:
        """Write or remove documents of different names in one step: all of them, or none if one is refused.

        As with `change`, wait for `appended` first. Raises LeaseLost.
        """
        with self._lock:
            self._check_open()
            now, version, events = self.moment(), self.table.version, list[Event]()
            for command in commands:
                try:
                    decided = decide(self.table, command, now)
                except Conflict as error:
                    return Decided(self._written, refused=error)
                if isinstance(command, ReplaceDocument) and not command.name.startswith(_OWN):
                    self._check_room(command)
                for event in decided:
                    if isinstance(event, DocumentWritten):  # each was decided as if it were the only one
                        version += 1
                        events.append(msgspec.structs.replace(event, version=version))
                    else:
                        events.append(event)
            if events:
                self._written = self._commit(events, "fsync")
            return Decided(self._written)

    def document(self, name: str) -> Decided:
        """Read a document. Wait for its write before reporting it, or after a crash another could have its version."""
        self._check_open()
        with self._lock:
            return Decided(self._written, content=self.table.documents.get(name))

    def documents(self) -> dict[str, Content]:
        """All documents of users by name."""
        self._check_open()
        with self._lock:
            return users_documents(self.table)

    def schedules(self) -> dict[str, bytes]:
        """The content of all schedules by name."""
        self._check_open()
        with self._lock:
            return schedules_in(self.table)

    def transactions(self) -> dict[str, bytes]:
        """The state of all transactions by name."""
        self._check_open()
        with self._lock:
            return transactions_in(self.table)

    def describe(self, name: str) -> LockStatus:
        """The status of a lock."""
        self._check_open()
        with self._lock:
            self._look(name, self.moment())
            return self._standing(name)

    def standings(self) -> list[LockStatus]:
        """The status of all locks that are held."""
        self._check_open()
        with self._lock:
            now = self.moment()
            for name in self.table.due(now.mono_ms):
                self._look(name, now)
            return [self._standing(name) for name in sorted(self.table.held)]

    def tick(self) -> int | None:
        """Do what is due; returns in how many ms to call again."""
        try:
            return self._tick()
        except Closed:
            return None
        except HoldfastError as error:  # the topics must still get their ticks
            if str(error) != self._logged_error:  # log it once, not at every tick
                self._logged_error = str(error)
                logger.error("upkeep of locks failed", extra={"error": str(error)})
            return _AFTER_ERROR_MS

    def _tick(self) -> int | None:
        with self._lock:
            if self._closed:
                return None
            now = self.moment()
            self._renew_due(now)
            events = decide(self.table, Tick(), now)
            if events:
                self._end(events, now)
            self.table.deadlines.forget(now.mono_ms)
            due_ms = self._next_due_ms(now)
            self._due_mono_ms = FAR if due_ms is None else now.mono_ms + due_ms
            snapshot = self.journal.snapshot_if_due(self.table)
        if snapshot is not None:
            self.journal.keep(snapshot)
        return soonest(due_ms, self.journal.log.tick())

    def due_ms(self) -> int | None:
        """Ms until a lease ends or is renewed; None if there is none."""
        with self._lock:
            return self._next_due_ms(self.moment())

    def sync(self) -> None:
        self.journal.log.sync()

    def close(self) -> None:
        """Close the journal and wake all waiters. Locks stay held until their leases end."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for line in self._lines.values():
                for ticket in line:
                    self._wake(ticket)
            snapshot = self.journal.snapshot_if_due(self.table) if self.journal.log.usable else None
        try:
            if snapshot is not None:
                self.journal.keep(snapshot)
        except Unavailable as error:  # the only cost is a longer replay at the next start
            logger.warning("no snapshot", extra={"error": str(error)})
        finally:
            self.journal.close()

    def _standing(self, name: str) -> LockStatus:
        document = self.table.documents.get(name)
        return LockStatus(
            name,
            self.table.held.get(name),
            len(self._lines.get(name, ())),
            0 if document is None else document.version,
        )

    def _check_room(self, command: ReplaceDocument) -> None:
        known = self.table.documents.get(command.name)
        total = self.table.document_bytes + len(command.content) - (0 if known is None else len(known.content))
        if total > _MOST_BYTES:
            raise InvalidRequest(
                f"{_what(command.name)} was not written: all documents together have {self.table.document_bytes} "
                f"bytes, and there is room for {_MOST_BYTES}. Remove some, or publish large ones as messages"
            )

    def _look(self, name: str, now: Moment) -> None:
        """Pass on a lock whose lease has expired, without waiting for a tick."""
        if self.table.is_over(name, now.mono_ms):
            self._end(decide(self.table, Tick(name), now), now)
        elif name in self._lines:
            self._hand_on(name, now)  # a signal may have interrupted after the end of a lease

    def _release(self, proof: Proof) -> None:
        now = self.moment()
        self._look(proof.name, now)
        self._renewing.pop(proof, None)
        self._end(decide(self.table, Release(proof), now), now)

    def _end(self, events: Sequence[Event], now: Moment) -> None:
        """Commit the end of leases and grant their locks to the next waiters."""
        self._commit(events)
        for event in events:
            if isinstance(event, Ended):
                self._hand_on(event.name, now)

    def _hand_on(self, name: str, now: Moment) -> None:
        line = self._lines.get(name)
        while line and name not in self.table.held:
            ticket = line[0]
            try:
                self._grant(ticket, now)
            except HoldfastError as error:
                ticket.error = error
            line.popleft()
            self._waiting -= 1
            self._wake(ticket)
        self._drop_line(name)

    def _grant(self, ticket: Ticket, now: Moment) -> None:
        wanted = ticket.wanted
        ticket.appended = self._commit(decide(self.table, wanted, now), "fsync")
        ticket.granted = self.table.held[wanted.name]
        self._expect_tick(ticket.granted.until_ms)

    def _renew_due(self, now: Moment) -> None:
        """Renew leases of which a third has passed; forget those that are lost."""
        for proof, lease_ms in list(self._renewing.items()):
            held = self.table.held.get(proof.name)
            if held is None or held.fence != proof.fence or held.until_ms <= now.mono_ms:
                self.let_expire(proof)
            elif held.until_ms - now.mono_ms <= lease_ms * 2 // 3 + 1:
                self._commit(decide(self.table, Renew(proof, lease_ms), now))

    def _next_due_ms(self, now: Moment) -> int | None:
        deadline = self.table.deadlines.next_ms()
        return soonest(
            None if deadline is None else max(deadline - now.mono_ms, 0),
            min((lease_ms // 3 + 1 for lease_ms in list(self._renewing.values())), default=None),
        )

    def _commit(self, events: Sequence[Event], durability: Durability = "interval") -> Appended:
        """Journal the events, then apply them. The caller holds the lock."""
        try:
            appended = self.journal.append(events, durability)
            for event in events:
                self.table.apply(event)
        except BaseException as error:
            # A signal such as Ctrl-C may have come between the two.
            if not isinstance(error, HoldfastError):
                self.journal.restore(self.table)
            raise
        return appended

    def _expect_tick(self, mono_ms: int) -> None:
        if mono_ms < self._due_mono_ms:
            self._due_mono_ms = mono_ms
            self.on_attention()

    def _drop_line(self, name: str) -> None:
        if not self._lines.get(name, True):
            del self._lines[name]

    def _wake(self, ticket: Ticket) -> None:
        if ticket.waiter is not None:
            ticket.waiter.wake()


# Reading locks and documents without owning the folder, while its owner may be running.


class ReplayedLocks(NamedTuple):
    """The state after replaying the journal, and what is wrong with it."""

    table: LockTable
    wrong: list[str]

    @property
    def documents(self) -> dict[str, Content]:
        """The documents of users by name."""
        return users_documents(self.table)

    @property
    def schedules(self) -> dict[str, bytes]:
        """The content of the schedules by name."""
        return schedules_in(self.table)

    @property
    def transactions(self) -> dict[str, bytes]:
        """The state of the transactions by name."""
        return transactions_in(self.table)


def users_documents(table: LockTable) -> dict[str, Content]:
    """The documents without the schedules and transactions, which are stored among them."""
    return {name: each for name, each in sorted(table.documents.items()) if not name.startswith(_OWN)}


def _what(document: str) -> str:
    kind, separator, name = document.partition(":")
    return f"{kind} {name}" if separator else f"document {document}"


def schedules_in(table: LockTable) -> dict[str, bytes]:
    """The content of the schedules by name."""
    return _contents(table, SCHEDULE_PREFIX)


def transactions_in(table: LockTable) -> dict[str, bytes]:
    """The state of the transactions by name."""
    return _contents(table, TRANSACTION_PREFIX)


def _contents(table: LockTable, prefix: str) -> dict[str, bytes]:
    found = {name: each for name, each in sorted(table.documents.items()) if name.startswith(prefix)}
    return {name.removeprefix(prefix): each.content for name, each in found.items()}


def replayed_locks(world: World, root: str, end: int | None = None) -> ReplayedLocks:
    """The locks and documents of a data folder, empty if it has none. `end` is as for `replayed_group`."""
    folder = join(root, LOCKS)
    for _ in range(TRIES - 1):
        try:
            return _replayed(world, folder, end)
        except (OSError, HoldfastError):
            continue  # changed by the owner meanwhile, or damaged: then the last attempt raises
    return _replayed(world, folder, end)


def _replayed(world: World, folder: str, end: int | None) -> ReplayedLocks:
    if not holds_log(world, folder):
        return ReplayedLocks(LockTable(), [])
    snapshot, name = newest_locks(world, folder)
    table = LockTable() if snapshot is None else table_of(snapshot.image)
    at = 0 if snapshot is None else snapshot.position
    means = LocksJournal.damage_means
    wrong = replay_beside(world, folder, at, name, lambda value: table.apply(decode_event(value)), means, end)
    return ReplayedLocks(table, wrong or check(table))


def held_now(world: World, table: LockTable, now: Moment) -> dict[str, LockHolder]:
    """The locks that are held, as an owner starting now would find them."""
    if table.boot_id != world.ids.boot_id():  # after a reboot, each lease gets its full time again
        return {
            name: msgspec.structs.replace(held, until_ms=now.mono_ms + held.lease_ms)
            for name, held in sorted(table.held.items())
        }
    return {name: held for name, held in sorted(table.held.items()) if held.until_ms > now.mono_ms}
