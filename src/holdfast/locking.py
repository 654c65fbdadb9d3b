"""Locks and documents of a data folder: who holds which lock, and what follows from a command.

Pure: time is an argument, and nothing is read or written. As in `delivery`, a command is decided into events, and only
`apply` changes the state, live and at replay alike.

         Acquired                      Ended
    free ---------------> held ------------------------> free
                          |  ^   released or expired
                          +--+
                         Renewed

         DocumentWritten                DocumentRemoved
    none ---------------> document --------------------> none
                          |    ^
                          +----+
                      DocumentWritten
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import singledispatch
from typing import Any, ClassVar, Final, TypeAlias

import msgspec

from holdfast.delivery.decide import Moment, utc
from holdfast.delivery.group import IllegalMove
from holdfast.delivery.timers import Deadlines
from holdfast.errors import Conflict, LeaseLost, LockHeld

# How a lease ended.
RELEASED: Final = "it was released"
EXPIRED: Final = "its lease expired"


class Begun(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=1):
    """An owner opened the folder, with its clock; `lost_events` earlier events could not be read."""

    session: int
    boot_id: int
    mono_ms: int
    lost_events: int = 0


class Acquired(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=2):
    """A lock was taken, until `until_ms` on the boot's monotonic clock."""

    name: str
    owner: str
    fence: int
    lease_ms: int
    until_ms: int
    at_ms: int


class Renewed(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=3):
    """A lease was renewed."""

    name: str
    lease_ms: int
    until_ms: int


class Ended(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=4):
    """The lock is free again."""

    name: str
    why: str
    at_ms: int


class DocumentWritten(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=5):
    """A document was created or replaced; its content is JSON."""

    name: str
    version: int
    content: bytes
    at_ms: int


class RemovedDocument(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=6):
    """A document was removed."""

    name: str


Event: TypeAlias = Begun | Acquired | Renewed | Ended | DocumentWritten | RemovedDocument

encode_event = msgspec.msgpack.Encoder().encode
decode_event = msgspec.msgpack.Decoder(Event).decode


# Fencing numbers start over with every owner of the folder, above all that earlier owners can have issued. They stay
# below 2**53 for 500 million openings, so that the numbers of every language can hold them.
SESSION_BITS: Final = 24

# Marks a lease with an id that cannot be forged. Every fence issued now has this bit; none from older versions has,
# unless they took more locks than this in one session.
PROVEN: Final = 1 << (SESSION_BITS - 1)

# For how many locks the end of the last lease is remembered; only used in error messages.
_MOST_ENDINGS: Final = 1_000

_STALE_DEADLINES: Final = 1_000


class LockHolder(msgspec.Struct, frozen=True, gc=False):
    """A lock that is held."""

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
    """A document: JSON, and the number of the write that created it."""

    version: int
    content: bytes
    at_ms: int


class LockImage(msgspec.Struct, frozen=True, array_like=True):
    """Everything that `apply` builds up, for snapshots. Deadlines are derived from it."""

    session: int
    boot_id: int
    fence: int
    version: int
    held: dict[str, LockHolder]
    endings: dict[str, LeaseEnd]
    documents: dict[str, Content]


class LockTable:
    """All locks that are held, and all documents."""

    def __init__(self) -> None:
        self.session = 0
        self.boot_id = 0
        self.fence = 0  # the last one issued
        self.version = 0  # the last one issued, to any document
        self.held: dict[str, LockHolder] = {}
        self.endings: dict[str, LeaseEnd] = {}
        self.documents: dict[str, Content] = {}
        self.document_bytes = 0
        self.deadlines = Deadlines()  # by fence
        self.names: dict[int, str] = {}  # fence -> lock, for locks that are held

    def apply(self, event: Event) -> None:
        """Apply one event; raises IllegalMove, with nothing changed, if it does not fit."""
        self._APPLY[type(event)](self, event)

    def due(self, mono_ms: int) -> list[str]:
        """Return the locks whose lease has run out, in order of time."""
        fences = {fence for fence, _ in self.deadlines.due(mono_ms)} & self.names.keys()
        over = [name for name in map(self.names.__getitem__, fences) if self.is_over(name, mono_ms)]
        return sorted(over, key=lambda name: (self.held[name].until_ms, self.held[name].fence))

    def is_over(self, name: str, mono_ms: int) -> bool:
        """Whether the lock's lease has run out without an event yet."""
        held = self.held.get(name)
        return held is not None and held.until_ms <= mono_ms

    def _begun(self, event: Begun) -> None:
        if event.session <= self.session:
            raise IllegalMove(f"{event!r} does not fit: session {self.session} came before")
        if event.boot_id != self.boot_id or not event.boot_id:
            # Monotonic time means nothing after a reboot, so every lease starts over with its full length.
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
        self._hold(event.name, LockHolder(event.owner, event.fence, event.lease_ms, event.until_ms, event.at_ms))

    def _renewed(self, event: Renewed) -> None:
        held = self._held(event, event.name)
        self._hold(event.name, msgspec.structs.replace(held, lease_ms=event.lease_ms, until_ms=event.until_ms))

    def _ended(self, event: Ended) -> None:
        held = self._held(event, event.name)
        del self.held[event.name], self.names[held.fence]
        self.endings.pop(event.name, None)  # keeps the dict in order of time
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

    def _removed(self, event: RemovedDocument) -> None:
        if event.name not in self.documents:
            raise IllegalMove(f"{event!r} does not fit: there is no such document")
        self._forget_document(event.name)

    def _forget_document(self, name: str) -> None:
        gone = self.documents.pop(name, None)
        if gone is not None:
            self.document_bytes -= len(gone.content)

    def _hold(self, name: str, held: LockHolder) -> None:
        self.held[name] = held
        self.names[held.fence] = name
        self.deadlines.add(held.until_ms, held.fence, held.fence + 1)
        if len(self.deadlines) > 2 * len(self.held) + _STALE_DEADLINES:
            self.renew_deadlines()

    def renew_deadlines(self) -> None:
        self.names = {held.fence: name for name, held in self.held.items()}
        self.deadlines.renew([(held.until_ms, held.fence, held.fence + 1) for held in self.held.values()])

    def _held(self, event: Event, name: str) -> LockHolder:
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
        RemovedDocument: _removed,
    }


def image_of(table: LockTable) -> LockImage:
    """Return a copy of the state."""
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
    """Rebuild the table that the image was made from."""
    table = LockTable()
    table.session, table.boot_id, table.fence, table.version = image.session, image.boot_id, image.fence, image.version
    table.held, table.endings, table.documents = image.held, image.endings, image.documents
    table.document_bytes = sum(len(document.content) for document in table.documents.values())
    table.renew_deadlines()
    return table


def check(table: LockTable) -> list[str]:
    """Return what is wrong with the state; empty if nothing is."""
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


class Proof(msgspec.Struct, frozen=True, gc=False):
    """Proof of a lease: which lock, and which acquisition of it."""

    name: str
    fence: int


class Acquire(msgspec.Struct, frozen=True, gc=False):
    """Take a lock for a time; with `if_not_exists`, only if there is neither a lock nor a document of that name."""

    name: str
    owner: str
    lease_ms: int
    if_not_exists: bool = False


class Renew(msgspec.Struct, frozen=True, gc=False):
    """Renew a lease from now on; `lease_ms` None means as long as before."""

    proof: Proof
    lease_ms: int | None = None


class Release(msgspec.Struct, frozen=True, gc=False):
    """The holder is finished with the lock."""

    proof: Proof


class ReplaceDocument(msgspec.Struct, frozen=True, gc=False):
    """Replace a document, if its version is the expected one (0: none exists) and the lease is still valid."""

    name: str
    content: bytes
    expected: int | None = None
    proof: Proof | None = None


class Remove(msgspec.Struct, frozen=True, gc=False):
    """Remove a document, under the same conditions as in WriteDocument."""

    name: str
    expected: int | None = None
    proof: Proof | None = None


class Tick(msgspec.Struct, frozen=True, gc=False):
    """Time has passed: end leases that have run out, of one lock or of all."""

    name: str | None = None


class OpenLocks(msgspec.Struct, frozen=True, gc=False):
    """An owner opens the folder; `lost_events` events of the journal could not be read."""

    boot_id: int
    lost_events: int = 0


Command: TypeAlias = Acquire | Renew | Release | ReplaceDocument | Remove | Tick | OpenLocks


def claim(table: LockTable, proof: Proof, now: Moment) -> LockHolder:
    """Return the lock held with this proof; raises LeaseLost if it is not held, or no longer."""
    held = table.held.get(proof.name)
    if held is None or held.fence != proof.fence or held.until_ms <= now.mono_ms:
        raise lost(table, proof, now)
    return held


def lost(table: LockTable, proof: Proof, now: Moment) -> LeaseLost:
    """Build the error that tells a holder what became of its lock."""
    name = proof.name
    held = table.held.get(name)
    if held is not None and held.until_ms <= now.mono_ms and held.fence == proof.fence:
        over_ms = now.wall_ms - (now.mono_ms - held.until_ms)
        return LeaseLost(
            f"lock {name} is no longer yours: {EXPIRED} at {utc(over_ms)}, and nobody has it now. {_NOTHING}",
            since_ms=over_ms,
            why=EXPIRED,
        )
    if held is not None and held.until_ms > now.mono_ms:
        return LeaseLost(
            f"lock {name} is no longer yours: {held.owner or 'somebody else'} has had it since {utc(held.at_ms)}, with "
            f"the higher fence {held.fence}. {_NOTHING}",
            holder=held.owner,
            since_ms=held.at_ms,
            why="somebody else has it",
        )
    ending = table.endings.get(name)
    if ending is not None and ending.fence == proof.fence:
        return LeaseLost(
            f"lock {name} is no longer yours: {ending.why} at {utc(ending.at_ms)}, and nobody has it now. {_NOTHING}",
            since_ms=ending.at_ms,
            why=ending.why,
        )
    return LeaseLost(f"lock {name} is not yours, and nobody has it now. {_NOTHING}", why="nobody has it")


def lock_held(table: LockTable, name: str, now: Moment) -> LockHeld:
    """Build the error for a caller that wants a lock held by someone else."""
    held = table.held[name]
    until_ms = now.wall_ms + held.until_ms - now.mono_ms
    return LockHeld(
        f"lock {name} has been held by {held.owner or 'somebody'} since {utc(held.at_ms)}, until {utc(until_ms)} "
        "unless "
        "it is renewed. Try again later, or wait for it",
        holder=held.owner,
        since_ms=held.at_ms,
        until_ms=until_ms,
    )


_NOTHING = "Nothing was changed by this call; stop the work that the lock protects"


def decide(table: LockTable, command: Command, now: Moment) -> list[Event]:
    """Return the events that the command leads to; raises LockHeld, LeaseLost or Conflict if it must be refused."""
    return list(_events(command, table, now))


# Registered by class, not by annotation: evaluating one takes a tenth of a millisecond, at every start.
@singledispatch
def _events(command: Command, table: LockTable, now: Moment) -> Iterator[Event]:
    raise TypeError(f"{command!r} is not a command")


@_events.register(Acquire)
def _(command: Acquire, table: LockTable, now: Moment) -> Iterator[Event]:
    name = command.name
    free = name not in table.held or table.is_over(name, now.mono_ms)
    if command.if_not_exists and (not free or name in table.documents):
        there = f"a document with version {table.documents[name].version}" if free else "a lock that somebody holds"
        raise Conflict(f"{name} already exists: there is {there}. Nothing was changed; take it without if_not_exists")
    if not free:
        raise lock_held(table, name, now)
    # An expired lease that no tick has noticed yet is ended here, so that the journal has an end for each beginning.
    if name in table.held:
        yield Ended(name, EXPIRED, now.wall_ms)
    fence = (table.fence + 1) | PROVEN
    yield Acquired(name, command.owner, fence, command.lease_ms, now.mono_ms + command.lease_ms, now.wall_ms)


@_events.register(Renew)
def _(command: Renew, table: LockTable, now: Moment) -> Iterator[Event]:
    held = claim(table, command.proof, now)
    lease_ms = held.lease_ms if command.lease_ms is None else command.lease_ms
    yield Renewed(command.proof.name, lease_ms, now.mono_ms + lease_ms)


@_events.register(Release)
def _(command: Release, table: LockTable, now: Moment) -> Iterator[Event]:
    claim(table, command.proof, now)
    yield Ended(command.proof.name, RELEASED, now.wall_ms)


@_events.register(ReplaceDocument)
def _(command: ReplaceDocument, table: LockTable, now: Moment) -> Iterator[Event]:
    _allow(table, command.name, command.expected, command.proof, now)
    yield DocumentWritten(command.name, table.version + 1, command.content, now.wall_ms)


@_events.register(Remove)
def _(command: Remove, table: LockTable, now: Moment) -> Iterator[Event]:
    _allow(table, command.name, command.expected, command.proof, now)
    if command.name in table.documents:
        yield RemovedDocument(command.name)


@_events.register(Tick)
def _(command: Tick, table: LockTable, now: Moment) -> Iterator[Event]:
    for name in table.due(now.mono_ms) if command.name is None else [command.name]:
        if table.is_over(name, now.mono_ms):
            yield Ended(name, EXPIRED, now.wall_ms)


@_events.register(OpenLocks)
def _(command: OpenLocks, table: LockTable, now: Moment) -> Iterator[Event]:
    # Each lost event may have been the beginning of a session, or a version of a document.
    session = max(table.session, table.fence >> SESSION_BITS) + 1 + command.lost_events
    yield Begun(session, command.boot_id, now.mono_ms, command.lost_events)


def _allow(table: LockTable, name: str, expected: int | None, proof: Proof | None, now: Moment) -> None:
    """Raise LeaseLost or Conflict if the writer no longer holds the lock or knows an old version."""
    if proof is not None:
        claim(table, proof, now)
    document = table.documents.get(name)
    version = 0 if document is None else document.version
    if expected is not None and expected != version:
        there = f"has version {version}" if version else "does not exist"
        raise Conflict(
            f"document {name} {there}, but version {expected} was expected: someone else changed it first. Nothing was "
            "changed; get it again and redo your change",
            version=version,
        )
