"""Errors on the wire: the code says which, the facts come along, and a client raises the same error again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from holdfast import errors
from holdfast.errors import HoldfastError, LeaseLost, OffsetOutOfRange, OutOfSequence, Removed, TailLost

# What some errors carry besides their message, by the names of their arguments.
_FACTS: Final[Mapping[type[HoldfastError], tuple[str, ...]]] = {
    OffsetOutOfRange: ("offset", "start", "end"),
    Removed: ("offset", "next_offset", "start", "end"),
    TailLost: ("epoch", "offset", "epoch_end"),
    OutOfSequence: ("expected", "given", "known"),
    LeaseLost: ("offsets", "holder", "since_ms", "why"),
    errors.LockHeld: ("holder", "since_ms", "until_ms"),
    errors.Conflict: ("version",),
    errors.DamagedRange: ("first_offset", "next_offset"),
}
KINDS: Final[Mapping[str, type[HoldfastError]]] = {
    kind.code: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, HoldfastError)
}


class Fault(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What went wrong: a stable code, a sentence, and whether the same call may succeed later."""

    code: str
    message: str
    retryable: bool
    retry_after: float | None = None
    correlation_id: str = ""
    notes: list[str] = []
    facts: dict[str, Any] = {}


class ErrorAnswer(msgspec.Struct, kw_only=True):
    """What every answer that is no success says."""

    error: Fault


def fault_of(error: HoldfastError, *, retry_after: float | None = None, correlation_id: str = "") -> Fault:
    """An error as it is sent."""
    names = next((_FACTS[kind] for kind in type(error).__mro__ if kind in _FACTS), ())
    return Fault(
        code=error.code,
        message=str(error),
        retryable=error.retryable,
        retry_after=retry_after,
        correlation_id=correlation_id,
        notes=list(getattr(error, "__notes__", ())),
        facts={name: getattr(error, name) for name in names}
        | ({"receipts": error.receipts} if isinstance(error, LeaseLost) and error.receipts else {}),
    )


def error_of(fault: Fault) -> HoldfastError:
    """The error that the fault stands for; one that this release does not know is of the nearest kind."""
    kind = KINDS.get(fault.code)
    if kind is None:
        kind = errors.Unavailable if fault.retryable else HoldfastError
    names = next((_FACTS[known] for known in kind.__mro__ if known in _FACTS), ())
    facts = {name: fault.facts[name] for name in names if name in fault.facts}
    try:
        error = kind(fault.message, **facts)
    except TypeError:  # some facts are missing
        error = HoldfastError(fault.message)
    if isinstance(error, LeaseLost):
        error.receipts = tuple(fault.facts.get("receipts", ()))
    for note in fault.notes:
        error.add_note(note)
    return error
