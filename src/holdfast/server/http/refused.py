"""Requests that are refused for what they are as HTTP, whatever they ask for."""

from __future__ import annotations

from holdfast.errors import InvalidRequest, MessageTooLarge, Unavailable


class Refused(InvalidRequest):
    """The request cannot be answered as HTTP; `status` says how that is told."""

    def __init__(self, message: str, *, status: int, headers: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers


class TooLarge(Refused):
    """The body is larger than any may be."""

    code = MessageTooLarge.code


class TooMany(Refused):
    """There is no room for one more connection now."""

    code = Unavailable.code
    retryable = True
