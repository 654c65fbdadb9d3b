"""The server itself on the wire: how it does, who waits, and the traces it keeps."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from holdfast.broker.tracing.log import TraceStep
from holdfast.protocol.messages import Instant, Limit, Name, Told, Wire


class Status(Told, kw_only=True):
    """How the server does. `tokens_problem` says why a changed tokens file is not used; the old one holds then."""

    version: str
    folder: str
    started_at: Instant
    uptime_seconds: float
    disk_free_bytes: int
    connections: int
    max_connections: int = 0
    descriptors: int = 0
    max_descriptors: int = 0
    waiters: int
    max_waiters: int
    streams: int
    members: int
    topics: int
    leaving: bool = False
    tokens_problem: str = ""


class LimitQuery(Wire, kw_only=True):
    """How many to tell of."""

    limit: Limit = 100


class WaitersAt(Told, kw_only=True):
    """Who stands in line for messages of a group."""

    topic: str
    group: str
    waiters: int
    streams: int


class WaitersTold(Told, kw_only=True):
    """Everybody who waits, and how many may."""

    waiting: int
    max_waiters: int
    lines: list[WaitersAt]


# Traces on the wire.


Place = Annotated[str, Meta(pattern=r"^[0-9]{1,19}$")]  # what a page named as `next`
Words = Annotated[str, Meta(min_length=1, max_length=1_000)]


class StatsQuery(Wire, kw_only=True):
    """Of which topic, and of which time."""

    topic: Name | None = None
    since: Instant | None = None
    until: Instant | None = None


class TracesQuery(StatsQuery, kw_only=True):
    """Which steps to find: the first ones that fit, from the start or behind a place, or the last, before one."""

    group: Name | None = None
    event: Words | None = None
    holder: Words | None = None
    error: Words | None = None
    limit: Limit = 100
    last: bool = False
    after: Place | None = None


class TraceQuery(Wire, kw_only=True):
    """Which steps of a message to tell: all, or behind those of an earlier page."""

    limit: Limit = 10_000
    after: Place | None = None


class Steps(Told, kw_only=True):
    """Steps of messages, oldest first; `next` is what `after` goes on from, if there may be more: of the last steps,
    earlier ones.

    That may be so of a page with few steps, or none: one call looks at so many and no more.
    """

    steps: list[TraceStep]
    next: str = ""
