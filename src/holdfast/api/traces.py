"""What users ask of traces, with their times and limits."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final, TypeAlias

import msgspec

from holdfast.api.arguments import switch
from holdfast.api.times import duration_ms, instant_ns
from holdfast.errors import InvalidRequest

When: TypeAlias = datetime | timedelta

_MOST_STEPS: Final = 1_000_000


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A search as it was asked."""

    topic: str | None = None
    group: str | None = None
    event: str | None = None
    holder: str | None = None
    error: str | None = None
    since: When | None = None
    until: When | None = None


def check_search(limit: object, last: object) -> None:
    """Refuse a number of steps that cannot be asked for."""
    if type(limit) is not int or not 1 <= limit <= _MOST_STEPS:
        raise InvalidRequest(f"limit={limit!r} cannot be used: give a whole number from 1 to {_MOST_STEPS}")
    switch(last, "last")


def moment_ns(value: When, name: str, now_ns: int) -> int:
    """A moment; a length of time is so long ago."""
    if isinstance(value, timedelta):
        return now_ns - duration_ms(value, name) * 1_000_000
    return instant_ns(value, name)
