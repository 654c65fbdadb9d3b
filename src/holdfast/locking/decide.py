"""What follows from a command: events, or a refusal. A decision reads the state and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from functools import singledispatch
from typing import TypeAlias

import msgspec

from holdfast.delivery.decide import Moment
from holdfast.errors import Conflict, LeaseLost, LockHeld
from holdfast.locking.events import EXPIRED, RELEASED, Acquired, Begun, Ended, Event, Removed, Renewed, Written
from holdfast.locking.table import PROVEN, SESSION_BITS, Held, Table

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


class Write(msgspec.Struct, frozen=True, gc=False):
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


class Open(msgspec.Struct, frozen=True, gc=False):
    """An owner of the folder begins; so many events of the journal could not be read."""

    boot_id: int
    lost_events: int = 0


Command: TypeAlias = Acquire | Renew | Release | Write | Remove | Tick | Open


# Is a lease still good? And if not: who has the lock now, since when, and why.


def claim(table: Table, proof: Proof, now: Moment) -> Held:
    """The lock as it is held by the proof; LeaseLost where it is not, or no longer."""
    held = table.held.get(proof.name)
    if held is None or held.fence != proof.fence or held.until_ms <= now.mono_ms:
        raise lost(table, proof, now)
    return held


def lost(table: Table, proof: Proof, now: Moment) -> LeaseLost:
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


def lock_held(table: Table, name: str, now: Moment) -> LockHeld:
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
