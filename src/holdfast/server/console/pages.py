"""All pages of the console, for a server that is to have them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from holdfast.broker.broker import BrokerEngine
from holdfast.server.audit import Audit
from holdfast.server.console import files, groups, health, locks, workers
from holdfast.server.console.dead import dead_routes
from holdfast.server.console.messages import message_routes
from holdfast.server.console.overview import overview_routes
from holdfast.server.console.queues import queue_routes
from holdfast.server.console.rates import Rates
from holdfast.server.routing import Routes


def console_routes(engine: BrokerEngine, audit: Audit | None = None) -> Sequence[Routes]:
    """The pages; from now on samples are taken for their rates. Call it from the loop that serves."""
    rates = Rates(engine)
    rates.begin(asyncio.get_running_loop())
    return (
        files.routes,
        overview_routes(rates),
        queue_routes(rates),
        message_routes(rates),
        dead_routes(rates),
        groups.routes,
        workers.routes,
        health.health_routes,
        health.audit_page_routes(audit),
        locks.routes,
    )
