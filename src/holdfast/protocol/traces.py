"""Traces on the wire."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from holdfast.broker.tracing.log import TraceStep
from holdfast.protocol.messages import Instant, Name, Told, Wire
from holdfast.protocol.queues import Limit

Words = Annotated[str, Meta(min_length=1, max_length=1_000)]


class StatsQuery(Wire, kw_only=True):
    """Of which topic, and of which time."""

    topic: Name | None = None
    since: Instant | None = None
    until: Instant | None = None


class TracesQuery(StatsQuery, kw_only=True):
    """Which steps to find: the first ones that fit, from the start or behind a place, or the last."""

    group: Name | None = None
    event: Words | None = None
    holder: Words | None = None
    error: Words | None = None
    limit: Limit = 100
    last: bool = False
    after: Annotated[str, Meta(pattern=r"^[0-9]{1,19}$")] | None = None  # what a page named as `next`


class Steps(Told, kw_only=True):
    """Steps of messages, oldest first; `next` is what `after` goes on from, if there may be more.

    That may be so of a page with few steps, or none: one call looks at so many and no more.
    """

    steps: list[TraceStep]
    next: str = ""
