"""Requests that are refused for what they are as HTTP, whatever they ask for."""

from __future__ import annotations

from holdfast.errors import InvalidRequest


class Refused(InvalidRequest):
    """The request cannot be answered as HTTP; `status` says how that is told."""

    def __init__(self, message: str, *, status: int, headers: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers
