"""Is the receipt still good? And if not: who has the message now, since when, and why."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Protocol

from holdfast.delivery.events import Phase
from holdfast.delivery.group import Group
from holdfast.errors import LeaseLost


class Claim(Protocol):
    """What a receipt says."""

    @property
    def offset(self) -> int: ...
    @property
    def fence(self) -> int: ...


def held(group: Group, receipt: Claim) -> bool:
    """Whether the receipt is of the delivery that holds the message now."""
    lease = group.leases.get(receipt.offset)
    return lease is not None and lease.fence == receipt.fence


def claim(group: Group, receipts: Sequence[Claim]) -> None:
    """Raise LeaseLost unless every receipt is good, each for a message of its own."""
    for receipt in receipts:
        if not held(group, receipt):
            raise lost(group, receipt)
    if len({receipt.offset for receipt in receipts}) < len(receipts):
        raise LeaseLost("the same message is given twice in one call; nothing was changed")


def lost(group: Group, receipt: Claim) -> LeaseLost:
    """The error that tells a holder what became of its message."""
    offset = receipt.offset
    lease = group.leases.get(offset)
    if lease is not None:
        attempt = group.attempts(offset) + 1
        return LeaseLost(
            f"message {offset} is no longer yours: {lease.holder or 'another consumer'} has it since "
            f"{_time(lease.at_ms)} (attempt {attempt}), {_ending(group, offset)}. Nothing was changed by this call; "
            "what you did with the message may be done twice",
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
        why = f"{last.why} at {_time(last.at_ms)} (held by {last.holder or 'you'}); it is {phase.value} now"
        since_ms = last.at_ms
    return LeaseLost(
        f"message {offset} is no longer yours: {why}. Nothing was changed",
        offsets=(offset,),
        since_ms=since_ms,
        why=why,
    )


def _ending(group: Group, offset: int) -> str:
    """How the delivery before the present one ended."""
    history = group.histories.get(offset)
    if history is None or not history.failures:
        return "after it was given back"
    last = history.failures[-1]
    return f"after an earlier delivery ended: {last.why} at {_time(last.at_ms)}"


def _time(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds")
