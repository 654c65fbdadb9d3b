"""What is known of all locks and documents of a data folder.

State changes by `apply` only, live and at replay alike, so the two cannot differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Final

import msgspec

from holdfast.delivery.group import IllegalMove
from holdfast.delivery.timers import Deadlines
from holdfast.locking.events import Acquired, Begun, Ended, Event, Removed, Renewed, Written

# Fencing numbers begin anew with every owner of the folder, above all that earlier ones can have given. They
# stay below 2**53 for half a thousand million openings, so that every language's numbers hold them.
SESSION_BITS: Final = 24

# The lease has an id that nobody can make up: every fence that is given now has this bit, none of the versions before
# had, as long as they took fewer locks than this in one session.
PROVEN: Final = 1 << (SESSION_BITS - 1)

# For how many locks it is remembered how the last lease ended: only for errors that say so.
_MOST_ENDINGS: Final = 1_000

_STALE_DEADLINES: Final = 1_000


class Held(msgspec.Struct, frozen=True, gc=False):
    """A lock that somebody has."""

    owner: str
    fence: int
    lease_ms: int
    until_ms: int
    at_ms: int


class Ending(msgspec.Struct, frozen=True, gc=False):
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


class Image(msgspec.Struct, frozen=True, array_like=True):
    """Everything that `apply` builds up, for snapshots. Deadlines follow from it."""

    session: int
    boot_id: int
    fence: int
    version: int
    held: dict[str, Held]
    endings: dict[str, Ending]
    documents: dict[str, Content]


class Table:
    """All locks that are held, and all documents."""

    def __init__(self) -> None:
        self.session = 0
        self.boot_id = 0
        self.fence = 0  # the last one that was given
        self.version = 0  # the last one that was given, to any document
        self.held: dict[str, Held] = {}
        self.endings: dict[str, Ending] = {}
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
        self._hold(event.name, Held(event.owner, event.fence, event.lease_ms, event.until_ms, event.at_ms))

    def _renewed(self, event: Renewed) -> None:
        held = self._held(event, event.name)
        self._hold(event.name, msgspec.structs.replace(held, lease_ms=event.lease_ms, until_ms=event.until_ms))

    def _ended(self, event: Ended) -> None:
        held = self._held(event, event.name)
        del self.held[event.name], self.names[held.fence]
        self.endings.pop(event.name, None)  # so that the order is that of time
        self.endings[event.name] = Ending(held.owner, held.fence, event.why, event.at_ms)
        if len(self.endings) > _MOST_ENDINGS:
            del self.endings[next(iter(self.endings))]

    def _written(self, event: Written) -> None:
        if event.version <= self.version:
            raise IllegalMove(f"{event!r} does not fit: the last version is {self.version}")
        self.version = event.version
        self._forget_document(event.name)
        self.documents[event.name] = Content(event.version, event.content, event.at_ms)
        self.document_bytes += len(event.content)

    def _removed(self, event: Removed) -> None:
        if event.name not in self.documents:
            raise IllegalMove(f"{event!r} does not fit: there is no such document")
        self._forget_document(event.name)

    def _forget_document(self, name: str) -> None:
        gone = self.documents.pop(name, None)
        if gone is not None:
            self.document_bytes -= len(gone.content)

    def _hold(self, name: str, held: Held) -> None:
        self.held[name] = held
        self.names[held.fence] = name
        self.deadlines.add(held.until_ms, held.fence, held.fence + 1)
        if len(self.deadlines) > 2 * len(self.held) + _STALE_DEADLINES:
            self.renew_deadlines()

    def renew_deadlines(self) -> None:
        self.names = {held.fence: name for name, held in self.held.items()}
        self.deadlines.renew([(held.until_ms, held.fence, held.fence + 1) for held in self.held.values()])

    def _held(self, event: Event, name: str) -> Held:
        held = self.held.get(name)
        if held is None:
            raise IllegalMove(f"{event!r} does not fit: nobody holds it")
        return held

    _APPLY: ClassVar[dict[type, Callable[[Any, Any], None]]] = {
        Begun: _begun,
        Acquired: _acquired,
        Renewed: _renewed,
        Ended: _ended,
        Written: _written,
        Removed: _removed,
    }


def image_of(table: Table) -> Image:
    """A copy of the state."""
    return Image(
        table.session,
        table.boot_id,
        table.fence,
        table.version,
        dict(table.held),
        dict(table.endings),
        dict(table.documents),
    )


def table_of(image: Image) -> Table:
    """The table that the image was made of."""
    table = Table()
    table.session, table.boot_id, table.fence, table.version = image.session, image.boot_id, image.fence, image.version
    table.held, table.endings, table.documents = image.held, image.endings, image.documents
    table.document_bytes = sum(len(document.content) for document in table.documents.values())
    table.renew_deadlines()
    return table


def check(table: Table) -> list[str]:
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
