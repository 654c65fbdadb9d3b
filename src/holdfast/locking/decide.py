"""What follows from a command: events, or a refusal. A decision reads the state and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from functools import singledispatch

from holdfast.delivery.decide import Moment
from holdfast.errors import Conflict
from holdfast.locking.claims import claim, lock_held
from holdfast.locking.commands import Acquire, Command, Open, Proof, Release, Remove, Renew, Tick, Write
from holdfast.locking.events import EXPIRED, RELEASED, Acquired, Begun, Ended, Event, Removed, Renewed, Written
from holdfast.locking.table import PROVEN, SESSION_BITS, Table


def decide(table: Table, command: Command, now: Moment) -> list[Event]:
    """The events that the command leads to; LockHeld, LeaseLost or Conflict where it must be refused."""
    return list(_events(command, table, now))


@singledispatch
def _events(command: Command, table: Table, now: Moment) -> Iterator[Event]:
    raise TypeError(f"{command!r} is no command")


@_events.register
def _(command: Acquire, table: Table, now: Moment) -> Iterator[Event]:
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
def _(command: Renew, table: Table, now: Moment) -> Iterator[Event]:
    held = claim(table, command.proof, now)
    lease_ms = held.lease_ms if command.lease_ms is None else command.lease_ms
    yield Renewed(command.proof.name, lease_ms, now.mono_ms + lease_ms)


@_events.register
def _(command: Release, table: Table, now: Moment) -> Iterator[Event]:
    claim(table, command.proof, now)
    yield Ended(command.proof.name, RELEASED, now.wall_ms)


@_events.register
def _(command: Write, table: Table, now: Moment) -> Iterator[Event]:
    _allow(table, command.name, command.expected, command.proof, now)
    yield Written(command.name, table.version + 1, command.content, now.wall_ms)


@_events.register
def _(command: Remove, table: Table, now: Moment) -> Iterator[Event]:
    _allow(table, command.name, command.expected, command.proof, now)
    if command.name in table.documents:
        yield Removed(command.name)


@_events.register
def _(command: Tick, table: Table, now: Moment) -> Iterator[Event]:
    for name in table.due(now.mono_ms) if command.name is None else [command.name]:
        if table.is_over(name, now.mono_ms):
            yield Ended(name, EXPIRED, now.wall_ms)


@_events.register
def _(command: Open, table: Table, now: Moment) -> Iterator[Event]:
    # Each event that was lost may have been the beginning of a session, or a version of a document.
    session = max(table.session, table.fence >> SESSION_BITS) + 1 + command.lost_events
    yield Begun(session, command.boot_id, now.mono_ms, command.lost_events)


def _allow(table: Table, name: str, expected: int | None, proof: Proof | None, now: Moment) -> None:
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
