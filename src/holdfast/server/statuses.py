"""Which HTTP status stands for which error: the one place where such numbers are."""

from __future__ import annotations

from typing import Final

from holdfast import errors
from holdfast.errors import HoldfastError
from holdfast.protocol.errors import KINDS
from holdfast.server.http.refused import Refused

_STATUSES: Final[dict[type[HoldfastError], int]] = {
    HoldfastError: 500,
    errors.InvalidRequest: 400,
    errors.MessageTooLarge: 413,
    errors.NotFound: 404,
    errors.UnknownTopic: 404,
    errors.UnknownGroup: 404,
    errors.NotAQueue: 404,
    errors.TopicExists: 409,
    errors.Conflict: 409,
    errors.OutOfSequence: 409,
    errors.OffsetOutOfRange: 416,
    errors.TailLost: 409,
    errors.Unauthenticated: 401,
    errors.Forbidden: 403,
    errors.NotInstalled: 501,
    errors.LeaseLost: 409,
    errors.Empty: 404,
    errors.Unavailable: 503,
    errors.LockHeld: 409,
    errors.QueueFull: 429,
    errors.TooManyWaiters: 429,
    errors.DiskFull: 507,
    errors.Closed: 503,
    errors.Fenced: 409,
    errors.CorruptData: 500,
}
_RETRY_AFTER_S: Final[dict[int, float]] = {429: 1.0, 503: 1.0, 507: 5.0}


def status_of(error: HoldfastError) -> int:
    """The status for an error: its own, or that of the nearest kind above it."""
    if isinstance(error, Refused):
        return error.status
    return _nearest(type(error))


def retry_after_of(status: int) -> float | None:
    """In how many seconds it is worth another try; None where it never is."""
    return _RETRY_AFTER_S.get(status)


def status_of_code(code: str) -> int:
    """The status for an error's code, for the documentation."""
    return _nearest(KINDS[code])


def _nearest(kind: type[HoldfastError]) -> int:
    """The status of a kind of error, or that of the nearest kind above it."""
    return next(_STATUSES[known] for known in kind.__mro__ if known in _STATUSES)
