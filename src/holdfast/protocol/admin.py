"""The server itself on the wire: how it does, who waits, what administrators did."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from holdfast.protocol.messages import Told, Wire
from holdfast.protocol.queues import Limit


class Status(Told, kw_only=True):
    """How the server does."""

    version: str
    folder: str
    started_at: datetime
    uptime_seconds: float
    disk_free_bytes: int
    connections: int
    waiters: int
    max_waiters: int
    streams: int
    members: int
    topics: int
    leaving: bool = False


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


class ActTold(Told, kw_only=True):
    """One act of an administrator. `outcome` is "begun", "done" or the code of an error."""

    time: datetime
    id: str
    principal: str
    peer: str
    action: str
    route: str
    target: str
    parameters: dict[str, Any]
    correlation_id: str
    outcome: str
    count: int | None = None


class Acts(Told, kw_only=True):
    """What administrators did, the newest first."""

    acts: list[ActTold]
