"""What every server offers; metrics, pages and the audit log come on top where they are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from holdfast.server.api import (
    admin,
    dead,
    delayed,
    enqueue,
    groups,
    health,
    in_hand,
    locks,
    lookup,
    members,
    payloads,
    producers,
    queues,
    settings,
    standing,
    streams,
    topics,
    traces,
)
from holdfast.server.routing import Routes

API: Final[Sequence[Routes]] = (
    enqueue.routes,
    queues.routes,
    in_hand.routes,
    payloads.routes,
    lookup.routes,
    streams.routes,
    dead.routes,
    topics.routes,
    standing.routes,
    delayed.routes,
    producers.routes,
    groups.routes,
    members.routes,
    locks.routes,
    traces.routes,
    settings.routes,
    admin.routes,
    health.routes,
)
