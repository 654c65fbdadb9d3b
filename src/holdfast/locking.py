"""Who holds which lock, and the documents beside them. Pure: time is an argument, and nothing is read or written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import singledispatch
from typing import Any, ClassVar, Final, TypeAlias

import msgspec

from holdfast.delivery.decide import Moment
from holdfast.delivery.group import IllegalMove
from holdfast.delivery.timers import Deadlines
from holdfast.errors import Conflict, LeaseLost, LockHeld

# The events in the life of locks and documents, as they stand in the journal.
#
#          Acquired                      Ended
# free ---------------> held ------------------------> free
#                       |  ^   released, or its time
#                       +--+   was over
#                      Renewed
#
#           Written                     Removed
# none ---------------> document -----------------> none
#                       |    ^
#                       +----+
#                       Written


# How a lease ended.
RELEASED: Final = "it was released"
EXPIRED: Final = "its time was over"


class Begun(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=1):
    """An owner of the folder began, with its clock; so many events before could not be read."""

    session: int
    boot_id: int
    mono_ms: int
    lost_events: int = 0


class Acquired(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=2):
    """A lock was taken, until `until_ms` of the boot's monotonic clock."""

    name: str
    owner: str
    fence: int
    lease_ms: int
    until_ms: int
    at_ms: int


class Renewed(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=3):
    """The holder got more time."""

    name: str
    lease_ms: int
    until_ms: int


class Ended(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=4):
    """The lock is free again."""

    name: str
    why: str
    at_ms: int


class DocumentWritten(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=5):
    """A document was made or replaced; its content is JSON."""

    name: str
    version: int
    content: bytes
    at_ms: int


class DocumentRemoved(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=6):
    """A document was taken away."""

    name: str


Event: TypeAlias = Begun | Acquired | Renewed | Ended | DocumentWritten | DocumentRemoved

encode_event = msgspec.msgpack.Encoder().encode
decode_event = msgspec.msgpack.Decoder(Event).decode


# What is known of all locks and documents of a data folder.
#
# State changes by `apply` only, live and at replay alike, so the two cannot differ.


# Fencing numbers begin anew with every owner of the folder, above all that earlier ones can have given. They
# stay below 2**53 for half a thousand million openings, so that every language's numbers hold them.
SESSION_BITS: Final = 24

# The lease has an id that nobody can make up: every fence that is given now has this bit, none of the versions before
# had, as long as they took fewer locks than this in one session.
PROVEN: Final = 1 << (SESSION_BITS - 1)

# For how many locks it is remembered how the last lease ended: only for errors that say so.
_MOST_ENDINGS: Final = 1_000

_STALE_DEADLINES: Final = 1_000


class HeldLock(msgspec.Struct, frozen=True, gc=False):
    """A lock that somebody has."""

    owner: str
    fence: int
    lease_ms: int
    until_ms: int
    at_ms: int


class LeaseEnd(msgspec.Struct, frozen=True, gc=False):
    """How the last lease of a lock ended."""

    owner: str
    fence: int
    why: str
    at_ms: int


class Content(msgspec.Struct, frozen=True, gc=False):
    """A document: JSON, and the number of the write that made it."""

    version: int
    content: bytes
    at_ms: int


class LockImage(msgspec.Struct, frozen=True, array_like=True):
    """Everything that `apply` builds up, for snapshots. Deadlines follow from it."""

    session: int
    boot_id: int
    fence: int
    version: int
    held: dict[str, HeldLock]
    endings: dict[str, LeaseEnd]
    documents: dict[str, Content]


class LockTable:
    """All locks that are held, and all documents."""

    def __init__(self) -> None:
        self.session = 0
        self.boot_id = 0
        self.fence = 0  # the last one that was given
        self.version = 0  # the last one that was given, to any document
        self.held: dict[str, HeldLock] = {}
        self.endings: dict[str, LeaseEnd] = {}
        self.documents: dict[str, Content] = {}
        self.document_bytes = 0
        self.deadlines = Deadlines()  # by fences
        self.names: dict[int, str] = {}  # fence -> lock, of those that are held

    def apply(self, event: Event) -> None:
        """Let one event happen. It fits, or IllegalMove is raised and nothing has changed."""
        self._APPLY[type(event)](self, event)

    def due(self, mono_ms: int) -> list[str]:
        """The locks whose time is over, the first one first."""
        fences = {fence for fence, _ in self.deadlines.due(mono_ms)} & self.names.keys()
        over = [name for name in map(self.names.__getitem__, fences) if self.is_over(name, mono_ms)]
        return sorted(over, key=lambda name: (self.held[name].until_ms, self.held[name].fence))

    def is_over(self, name: str, mono_ms: int) -> bool:
        """Whether the lock's time has run out, and nobody has noticed yet."""
        held = self.held.get(name)
        return held is not None and held.until_ms <= mono_ms

    def _begun(self, event: Begun) -> None:
        if event.session <= self.session:
            raise IllegalMove(f"{event!r} does not fit: session {self.session} came before")
        if event.boot_id != self.boot_id or not event.boot_id:
            # Monotonic time means nothing after a reboot: whoever held a lease gets all of it once more.
            self.held = {
                name: msgspec.structs.replace(held, until_ms=event.mono_ms + held.lease_ms)
                for name, held in self.held.items()
            }
        self.session, self.boot_id = event.session, event.boot_id
        self.fence = max(self.fence, event.session << SESSION_BITS)
        self.version += event.lost_events
        self.renew_deadlines()

    def _acquired(self, event: Acquired) -> None:
        if event.name in self.held or event.fence <= self.fence:
            raise IllegalMove(f"{event!r} does not fit: {self.held.get(event.name)}, last fence {self.fence}")
        self.fence = event.fence
        self._hold(event.name, HeldLock(event.owner, event.fence, event.lease_ms, event.until_ms, event.at_ms))

    def _renewed(self, event: Renewed) -> None:
        held = self._held(event, event.name)
        self._hold(event.name, msgspec.structs.replace(held, lease_ms=event.lease_ms, until_ms=event.until_ms))

    def _ended(self, event: Ended) -> None:
        held = self._held(event, event.name)
        del self.held[event.name], self.names[held.fence]
        self.endings.pop(event.name, None)  # so that the order is that of time
        self.endings[event.name] = LeaseEnd(held.owner, held.fence, event.why, event.at_ms)
        if len(self.endings) > _MOST_ENDINGS:
            del self.endings[next(iter(self.endings))]

    def _written(self, event: DocumentWritten) -> None:
        if event.version <= self.version:
            raise IllegalMove(f"{event!r} does not fit: the last version is {self.version}")
        self.version = event.version
        self._forget_document(event.name)
        self.documents[event.name] = Content(event.version, event.content, event.at_ms)
        self.document_bytes += len(event.content)

    def _removed(self, event: DocumentRemoved) -> None:
        if event.name not in self.documents:
            raise IllegalMove(f"{event!r} does not fit: there is no such document")
        self._forget_document(event.name)

    def _forget_document(self, name: str) -> None:
        gone = self.documents.pop(name, None)
        if gone is not None:
            self.document_bytes -= len(gone.content)

    def _hold(self, name: str, held: HeldLock) -> None:
        self.held[name] = held
        self.names[held.fence] = name
        self.deadlines.add(held.until_ms, held.fence, held.fence + 1)
        if len(self.deadlines) > 2 * len(self.held) + _STALE_DEADLINES:
            self.renew_deadlines()

    def renew_deadlines(self) -> None:
        self.names = {held.fence: name for name, held in self.held.items()}
        self.deadlines.renew([(held.until_ms, held.fence, held.fence + 1) for held in self.held.values()])

    def _held(self, event: Event, name: str) -> HeldLock:
        held = self.held.get(name)
        if held is None:
            raise IllegalMove(f"{event!r} does not fit: nobody holds it")
        return held

    _APPLY: ClassVar[dict[type, Callable[[Any, Any], None]]] = {
        Begun: _begun,
        Acquired: _acquired,
        Renewed: _renewed,
        Ended: _ended,
        DocumentWritten: _written,
        DocumentRemoved: _removed,
    }


def image_of(table: LockTable) -> LockImage:
    """A copy of the state."""
    return LockImage(
        table.session,
        table.boot_id,
        table.fence,
        table.version,
        dict(table.held),
        dict(table.endings),
        dict(table.documents),
    )


def table_of(image: LockImage) -> LockTable:
    """The table that the image was made of."""
    table = LockTable()
    table.session, table.boot_id, table.fence, table.version = image.session, image.boot_id, image.fence, image.version
    table.held, table.endings, table.documents = image.held, image.endings, image.documents
    table.document_bytes = sum(len(document.content) for document in table.documents.values())
    table.renew_deadlines()
    return table


def check(table: LockTable) -> list[str]:
    """What is wrong with the state; nothing, if all is well."""
    wrong = [
        f"lock {name} has the fence {held.fence}, which was not given yet"
        for name, held in table.held.items()
        if held.fence > table.fence
    ]
    wrong += [
        f"document {name} has the version {document.version}, which was not given yet"
        for name, document in table.documents.items()
        if document.version > table.version
    ]
    if table.names != {held.fence: name for name, held in table.held.items()}:
        wrong.append("the fences do not lead to the locks that are held")
    deadlines = {(until_ms, fence) for until_ms, fence, _ in table.deadlines.entries()}
    wrong += [
        f"the lease of {name} has no deadline"
        for name, held in table.held.items()
        if (held.until_ms, held.fence) not in deadlines
    ]
    if table.document_bytes != sum(len(document.content) for document in table.documents.values()):
        wrong.append(f"the documents do not have {table.document_bytes} bytes")
    return wrong


# What follows from a command: events, or a refusal. A decision reads the state and changes nothing.


# What may be asked of locks and documents.


class Proof(msgspec.Struct, frozen=True, gc=False):
    """The proof of a lease: which lock, and which of all the times that it was taken."""

    name: str
    fence: int


class Acquire(msgspec.Struct, frozen=True, gc=False):
    """Take a lock for a time; with `if_not_exists` only where neither lock nor document of the name is there."""

    name: str
    owner: str
    lease_ms: int
    if_not_exists: bool = False


class Renew(msgspec.Struct, frozen=True, gc=False):
    """So much time from now on; None for as much as it was given before."""

    proof: Proof
    lease_ms: int | None = None


class Release(msgspec.Struct, frozen=True, gc=False):
    """The holder is through."""

    proof: Proof


class WriteDocument(msgspec.Struct, frozen=True, gc=False):
    """Replace a document: if its version is the expected one (0: there is none), and if the lease is still good."""

    name: str
    content: bytes
    expected: int | None = None
    proof: Proof | None = None


class Remove(msgspec.Struct, frozen=True, gc=False):
    """Take a document away, on the same conditions."""

    name: str
    expected: int | None = None
    proof: Proof | None = None


class Tick(msgspec.Struct, frozen=True, gc=False):
    """Time has passed: for one lock, or for all."""

    name: str | None = None


class OpenLocks(msgspec.Struct, frozen=True, gc=False):
    """An owner of the folder begins; so many events of the journal could not be read."""

    boot_id: int
    lost_events: int = 0


Command: TypeAlias = Acquire | Renew | Release | WriteDocument | Remove | Tick | OpenLocks


# Is a lease still good? And if not: who has the lock now, since when, and why.


def claim(table: LockTable, proof: Proof, now: Moment) -> HeldLock:
    """The lock as it is held by the proof; LeaseLost where it is not, or no longer."""
    held = table.held.get(proof.name)
    if held is None or held.fence != proof.fence or held.until_ms <= now.mono_ms:
        raise lost(table, proof, now)
    return held


def lost(table: LockTable, proof: Proof, now: Moment) -> LeaseLost:
    """The error that tells a holder what became of its lock."""
    name = proof.name
    held = table.held.get(name)
    if held is not None and held.until_ms <= now.mono_ms and held.fence == proof.fence:
        over_ms = now.wall_ms - (now.mono_ms - held.until_ms)
        return LeaseLost(
            f"lock {name} is no longer yours: {EXPIRED} at {_time(over_ms)}, and nobody has it now. {_NOTHING}",
            since_ms=over_ms,
            why=EXPIRED,
        )
    if held is not None and held.until_ms > now.mono_ms:
        return LeaseLost(
            f"lock {name} is no longer yours: {held.owner or 'somebody else'} has it since {_time(held.at_ms)}, with "
            f"the higher fence {held.fence}. {_NOTHING}",
            holder=held.owner,
            since_ms=held.at_ms,
            why="somebody else has it",
        )
    ending = table.endings.get(name)
    if ending is not None and ending.fence == proof.fence:
        return LeaseLost(
            f"lock {name} is no longer yours: {ending.why} at {_time(ending.at_ms)}, and nobody has it now. {_NOTHING}",
            since_ms=ending.at_ms,
            why=ending.why,
        )
    return LeaseLost(f"lock {name} is not yours, and nobody has it now. {_NOTHING}", why="nobody has it")


def lock_held(table: LockTable, name: str, now: Moment) -> LockHeld:
    """What to say to somebody who wants a lock that is taken."""
    held = table.held[name]
    until_ms = now.wall_ms + held.until_ms - now.mono_ms
    return LockHeld(
        f"lock {name} is held by {held.owner or 'somebody'} since {_time(held.at_ms)}, until {_time(until_ms)} unless "
        "it is renewed. Try again later, or wait for it",
        holder=held.owner,
        since_ms=held.at_ms,
        until_ms=until_ms,
    )


_NOTHING = "Nothing was changed by this call; stop what the lock was to protect"


def _time(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds")


def decide(table: LockTable, command: Command, now: Moment) -> list[Event]:
    """The events that the command leads to; LockHeld, LeaseLost or Conflict where it must be refused."""
    return list(_events(command, table, now))


@singledispatch
def _events(command: Command, table: LockTable, now: Moment) -> Iterator[Event]:
    raise TypeError(f"{command!r} is no command")


@_events.register
def _(command: Acquire, table: LockTable, now: Moment) -> Iterator[Event]:
    name = command.name
    free = name not in table.held or table.is_over(name, now.mono_ms)
    if command.if_not_exists and (not free or name in table.documents):
        there = f"a document with version {table.documents[name].version}" if free else "a lock that somebody holds"
        raise Conflict(f"{name} exists already: there is {there}. Nothing was changed; take it without if_not_exists")
    if not free:
        raise lock_held(table, name, now)
    if name in table.held:
        yield Ended(name, EXPIRED, now.wall_ms)
    fence = (table.fence + 1) | PROVEN
    yield Acquired(name, command.owner, fence, command.lease_ms, now.mono_ms + command.lease_ms, now.wall_ms)


@_events.register
def _(command: Renew, table: LockTable, now: Moment) -> Iterator[Event]:
    held = claim(table, command.proof, now)
    lease_ms = held.lease_ms if command.lease_ms is None else command.lease_ms
    yield Renewed(command.proof.name, lease_ms, now.mono_ms + lease_ms)


@_events.register
def _(command: Release, table: LockTable, now: Moment) -> Iterator[Event]:
    claim(table, command.proof, now)
    yield Ended(command.proof.name, RELEASED, now.wall_ms)


@_events.register
def _(command: WriteDocument, table: LockTable, now: Moment) -> Iterator[Event]:
    _allow(table, command.name, command.expected, command.proof, now)
    yield DocumentWritten(command.name, table.version + 1, command.content, now.wall_ms)


@_events.register
def _(command: Remove, table: LockTable, now: Moment) -> Iterator[Event]:
    _allow(table, command.name, command.expected, command.proof, now)
    if command.name in table.documents:
        yield DocumentRemoved(command.name)


@_events.register
def _(command: Tick, table: LockTable, now: Moment) -> Iterator[Event]:
    for name in table.due(now.mono_ms) if command.name is None else [command.name]:
        if table.is_over(name, now.mono_ms):
            yield Ended(name, EXPIRED, now.wall_ms)


@_events.register
def _(command: OpenLocks, table: LockTable, now: Moment) -> Iterator[Event]:
    # Each event that was lost may have been the beginning of a session, or a version of a document.
    session = max(table.session, table.fence >> SESSION_BITS) + 1 + command.lost_events
    yield Begun(session, command.boot_id, now.mono_ms, command.lost_events)


def _allow(table: LockTable, name: str, expected: int | None, proof: Proof | None, now: Moment) -> None:
    """Raise what must be said to a writer who knows an old version, or no longer holds the lock."""
    if proof is not None:
        claim(table, proof, now)
    document = table.documents.get(name)
    version = 0 if document is None else document.version
    if expected is not None and expected != version:
        there = f"has version {version}" if version else "does not exist"
        raise Conflict(
            f"document {name} {there}, and version {expected} was expected: somebody else was faster. Nothing was "
            "changed; get it again, then decide anew",
            version=version,
        )
