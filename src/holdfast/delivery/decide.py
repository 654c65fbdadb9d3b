"""Decides a command: returns the events it leads to, or refuses it. Reads the state and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import singledispatch
from itertools import islice
from typing import Final, Protocol

import msgspec

from holdfast.delivery.events import (
    CLOSED,
    HOLDER_GONE,
    LEASE_ENDED,
    NO_SESSION,
    SESSION_BITS,
    Ack,
    Acked,
    Buried,
    BuriedReady,
    Bury,
    Cancel,
    Cancelled,
    CloseGroup,
    Command,
    Event,
    Extend,
    Extended,
    Finish,
    GiveUp,
    Leased,
    Nack,
    Opened,
    OpenGroup,
    Phase,
    Receive,
    Reject,
    Released,
    Replayed,
    Returned,
    Save,
    Saved,
    Seek,
    Skipped,
    Tick,
    each,
    next_fence,
    pairs,
    run,
    runs_of,
)
from holdfast.delivery.group import Group
from holdfast.errors import Conflict, LeaseLost
from holdfast.settings import QueueSettings


class Claim(Protocol):
    """The contents of a receipt."""

    @property
    def offset(self) -> int: ...
    @property
    def fence(self) -> int: ...


def held(group: Group, receipt: Claim) -> bool:
    """Whether the receipt belongs to the delivery that holds the message now."""
    lease = group.leases.get(receipt.offset)
    return lease is not None and lease.fence == receipt.fence


def claim(group: Group, receipts: Sequence[Claim]) -> None:
    """Raise LeaseLost unless every receipt is valid, each for a different message."""
    for receipt in receipts:
        if not held(group, receipt):
            raise lost(group, receipt)
    if len({receipt.offset for receipt in receipts}) < len(receipts):
        raise LeaseLost("the same message is given twice in one call; nothing was changed. Name each message once")


def lost(group: Group, receipt: Claim) -> LeaseLost:
    """Build the error that tells a holder what became of its message: who has it now, since when, and why."""
    offset = receipt.offset
    lease = group.leases.get(offset)
    if lease is not None:
        attempt = group.attempts(offset) + 1
        return LeaseLost(
            f"message {offset} is no longer yours: {lease.holder or 'another consumer'} has had it since "
            f"{utc(lease.at_ms)} (attempt {attempt}), {_ending(group, offset)}. Nothing was changed by this call; "
            "stop working on it, and expect that what you did may be done twice",
            offsets=(offset,),
            holder=lease.holder,
            since_ms=lease.at_ms,
            why=_ending(group, offset),
        )
    history = group.histories.get(offset)
    phase = group.phase(offset)
    why, since_ms = f"it is {phase.value}", 0
    if phase is Phase.DONE:
        why = "it is done: acked, cancelled, expired or moved to the dead letters"
    elif history is not None and history.failures:
        last = history.failures[-1]
        why = f"{last.why} at {utc(last.at_ms)} (held by {last.holder or 'you'}); it is {phase.value} now"
        since_ms = last.at_ms
    return LeaseLost(
        f"message {offset} is no longer yours: {why}. Nothing was changed; stop working on it",
        offsets=(offset,),
        since_ms=since_ms,
        why=why,
    )


def _ending(group: Group, offset: int) -> str:
    """Say how the delivery before the current one ended."""
    history = group.histories.get(offset)
    if history is None or not history.failures:
        return "after it was returned"
    last = history.failures[-1]
    return f"after an earlier delivery ended: {last.why} at {utc(last.at_ms)}"


def utc(ms: int) -> str:
    """Return the time in UTC, for error messages."""
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds")


# Why a message became a dead letter.
MAX_ATTEMPTS: Final = "MAX_ATTEMPTS"
REJECTED: Final = "REJECTED"
EXPIRED: Final = "EXPIRED"


class Moment(msgspec.Struct, frozen=True, gc=False):
    """What a decision may know of the outside world: both clocks, and where the dead letters' log ends."""

    wall_ms: int
    mono_ms: int
    dead_end: int = -1


def decide(group: Group, command: Command, policy: QueueSettings, now: Moment) -> list[Event]:
    """Return the events that the command leads to; raises LeaseLost or Conflict if it must be refused."""
    return list(_events(command, group, policy, now))


# Registered by class, not by annotation: evaluating one takes a tenth of a millisecond, at every start.
@singledispatch
def _events(command: Command, group: Group, policy: QueueSettings, now: Moment) -> Iterator[Event]:
    raise TypeError(f"{command!r} is not a command")


@_events.register(Receive)
def _(command: Receive, group: Group, policy: QueueSettings, now: Moment) -> Iterator[Event]:
    if command.offsets:
        yield Leased(
            runs_of(command.offsets),
            command.cursor,
            next_fence(group.fence),
            command.session,
            command.lease_ms,
            now.mono_ms + command.lease_ms,
            now.wall_ms,
            command.holder,
            command.moving_to,
        )


@_events.register(Ack)
def _(command: Ack, group: Group, policy: QueueSettings, now: Moment) -> Iterator[Event]:
    claim(group, command.receipts)
    yield Acked(runs_of(receipt.offset for receipt in command.receipts))


@_events.register(Nack)
def _(command: Nack, group: Group, policy: QueueSettings, now: Moment) -> Iterator[Event]:
    claim(group, [command.receipt])
    offset = command.receipt.offset
    delay_ms = command.delay_ms
    if delay_ms is None:
        delay_ms = backoff_ms(policy, offset, group.attempts(offset) + 1) if command.counted else 0
    yield from _give_back(group, offset, policy, now, delay_ms, command.why, command.error, counted=command.counted)


@_events.register(Reject)
def _(command: Reject, group: Group, policy: QueueSettings, now: Moment) -> Iterator[Event]:
    claim(group, [command.receipt])
    yield Buried(command.receipt.offset, REJECTED, command.error, now.wall_ms, now.dead_end)


@_events.register(Extend)
def _(command: Extend, group: Group, policy: QueueSettings, now: Moment) -> Iterator[Event]:
    claim(group, command.receipts)
    offsets = [receipt.offset for receipt in command.receipts]
    yield Extended(runs_of(offsets), command.lease_ms, now.mono_ms + command.lease_ms)


@_events.register(Save)
def _(command: Save, group: Group, policy: QueueSettings, now: Moment) -> Iterator[Event]:
    claim(group, [command.receipt])
    offset = command.receipt.offset
    document = group.documents.get(offset)
    version = 0 if document is None else document.version
    if command.expected != version:
        raise Conflict(
            f"the state of message {offset} has version {version}, not {command.expected}: someone saved it first. "
            "Nothing was changed; load it again",
            version=version,
        )
    yield Saved(offset, version + 1, command.document)


@_events.register(Cancel)
def _(command: Cancel, group: Group, policy: QueueSettings, now: Moment) -> Iterator[Event]:
    if group.phase(command.offset) in (Phase.READY, Phase.DELAYED):
        yield Cancelled(run(command.offset))


@_events.register(Finish)
def _(command: Finish, group: Group, policy: QueueSettings, now: Moment) -> Iterator[Event]:
    phases = {offset: group.phase(offset) for offset in command.offsets}
    leased = [offset for offset, phase in phases.items() if phase is Phase.LEASED]
    waiting = [offset for offset, phase in phases.items() if phase in (Phase.READY, Phase.DELAYED)]
    if leased:
        yield Acked(runs_of(leased))
    if waiting:
        yield Cancelled(runs_of(waiting))


@_events.register(Bury)
def _(command: Bury, group: Group, policy: QueueSettings, now: Moment) -> Iterator[Event]:
    runs = command.runs
    if not all(group.all_ready(start, stop) for start, stop in pairs(runs)):
        runs = runs_of(offset for offset in each(runs) if group.phase(offset) is Phase.READY)
    if runs:
        yield BuriedReady(runs, command.reason, command.error, now.wall_ms, now.dead_end)


@_events.register(Seek)
def _(command: Seek, group: Group, policy: QueueSettings, now: Moment) -> Iterator[Event]:
    # Both, whichever way it goes: the first settles what is before, the second makes the rest ready again.
    yield Skipped(command.to)
    yield Replayed(command.to)


@_events.register(Tick)
def _(command: Tick, group: Group, policy: QueueSettings, now: Moment) -> Iterator[Event]:
    ended = _ended(group, now.mono_ms, command.most)
    for offset in sorted(ended):
        delay_ms = backoff_ms(policy, offset, group.attempts(offset) + 1)
        yield from _give_back(group, offset, policy, now, delay_ms, LEASE_ENDED, "", counted=True)
    entries = group.timers.due(now.wall_ms)
    still = (offset for due_ms, offset in entries if group.waiting.get(offset) == due_ms)
    due = set(islice(still, command.most - len(ended)))  # the rest is left to the next tick
    if due:
        yield Released(runs_of(due))


def _ended(group: Group, mono_ms: int, most: int) -> set[int]:
    """Return the messages whose leases have ended, at most `most`."""
    found: set[int] = set()
    for start, stop in group.deadlines.due(mono_ms):
        for offset in range(start, stop):
            if offset in group.leases and group.leases[offset].until_ms <= mono_ms:
                found.add(offset)
                if len(found) == most:
                    return found
    return found


@_events.register(OpenGroup)
def _(command: OpenGroup, group: Group, policy: QueueSettings, now: Moment) -> Iterator[Event]:
    # The fence also knows earlier sessions, even if a damaged journal has lost their beginning.
    session = max(group.session, group.fence >> SESSION_BITS) + 1
    yield Opened(session, command.boot_id, now.mono_ms, command.end)


@_events.register(CloseGroup)
def _(command: CloseGroup, group: Group, policy: QueueSettings, now: Moment) -> Iterator[Event]:
    for offset, lease in sorted(group.leases.items()):
        if lease.session == group.session and lease.moving_to < 0:
            yield from _give_back(group, offset, policy, now, 0, CLOSED, "", counted=False)


@_events.register(GiveUp)
def _(command: GiveUp, group: Group, policy: QueueSettings, now: Moment) -> Iterator[Event]:
    for offset, lease in sorted(group.leases.items()):
        # A move that did not happen was nobody's attempt.
        counted = lease.moving_to < 0
        doubted = counted and lease.at_ms <= command.doubted_ms
        if lease.session not in (NO_SESSION, group.session) and not doubted:
            yield from _give_back(group, offset, policy, now, 0, HOLDER_GONE, "", counted=counted)


def _give_back(
    group: Group, offset: int, policy: QueueSettings, now: Moment, delay_ms: int, why: str, error: str, *, counted: bool
) -> Iterator[Event]:
    attempts = group.attempts(offset) + 1
    if counted and policy.max_attempts is not None and attempts >= policy.max_attempts:
        yield Buried(offset, MAX_ATTEMPTS, error or why, now.wall_ms, now.dead_end)
        return
    yield Returned(offset, now.wall_ms + delay_ms, counted, why, error, now.wall_ms)
    if not delay_ms:
        yield Released(run(offset))


def backoff_ms(policy: QueueSettings, offset: int, attempts: int) -> int:
    """Return the delay after this many failed attempts: exponential, bounded, spread by jitter."""
    try:
        growth = policy.backoff_factor ** (attempts - 1)
    except OverflowError:
        growth = 1e15
    full = min(policy.backoff_ms * min(growth, 1e15), policy.backoff_max_ms)
    # The jitter is a hash of the message's own numbers: as good as random here, and the same at every replay.
    mixed = (offset * 0x9E3779B97F4A7C15 + attempts * 0xBF58476D1CE4E5B9) % 2**64
    mixed = (mixed ^ mixed >> 31) * 0x94D049BB133111EB % 2**64
    share = (mixed >> 11) / 2**53
    return round(full * (1 - policy.backoff_jitter_percent / 100 * share))
