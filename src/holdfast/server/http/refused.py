"""Requests that are refused for what they are as HTTP, whatever they ask for."""

from __future__ import annotations

from holdfast.errors import Forbidden, InvalidRequest, MessageTooLarge, Unavailable


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


def no_room() -> TooMany:
    """What to say to a client for which there is no connection."""
    return TooMany(
        "there are too many connections, in all (max_connections) or from one address (max_connections_per_address); "
        "this one is closed. Try again in a second, keep connections and use them again, or close those that you "
        "do not need",
        status=503,
        headers=(("retry-after", "1"),),
    )


class NotTheSameUser(Refused):
    """Somebody else's process has come to a socket that is for one user."""

    code = Forbidden.code
