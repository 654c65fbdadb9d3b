"""The server itself on the wire: how it does, and who waits."""

from __future__ import annotations

from holdfast.protocol.messages import Instant, Told, Wire
from holdfast.protocol.queues import Limit


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
