"""All pages of the console."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.broker.engine import BrokerEngine
from holdfast.server.audit import Audit
from holdfast.server.console import groups, overview, rendering
from holdfast.server.console.messages import dead_routes, message_routes
from holdfast.server.console.overview import QueueRates, overview_routes
from holdfast.server.console.queues import queue_routes
from holdfast.server.routing import Routes


def console_routes(engine: BrokerEngine, audit: Audit | None = None, *, at_once: bool = True) -> Sequence[Routes]:
    """The routes of the console. Rates are sampled from now on, or from the first visit unless `at_once`."""
    rates = QueueRates(engine)
    if at_once:
        rates.begin()
    return (
        rendering.routes,
        overview_routes(rates),
        queue_routes(rates),
        message_routes(rates),
        dead_routes(rates),
        groups.routes,
        overview.health_routes,
        overview.audit_page_routes(audit),
    )
