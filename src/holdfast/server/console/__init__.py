"""The console: pages that the server renders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.broker.engine import BrokerEngine
    from holdfast.server.audit import Audit
    from holdfast.server.routing import Routes


def console_routes(engine: BrokerEngine, audit: Audit | None = None) -> Sequence[Routes]:
    """The routes of the console."""
    from holdfast.server.console import charts, groups, messages, overview, queues, rendering

    rates = charts.QueueRates(engine)
    return (
        rendering.routes,
        overview.overview_routes(rates),
        queues.queue_routes(rates),
        queues.chart_routes(rates),
        queues.dead_routes(rates),
        messages.message_routes(rates),
        messages.search_routes,
        groups.routes,
        overview.health_routes,
        overview.audit_page_routes(audit),
    )
