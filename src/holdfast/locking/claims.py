"""Is a lease still good? And if not: who has the lock now, since when, and why."""

from __future__ import annotations

from datetime import UTC, datetime

from holdfast.delivery.decide import Moment
from holdfast.errors import LeaseLost, LockHeld
from holdfast.locking.commands import Proof
from holdfast.locking.events import EXPIRED
from holdfast.locking.table import Held, Table


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
