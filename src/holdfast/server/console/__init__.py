"""The console: pages that the server renders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.server.audit import Audit
    from holdfast.server.routing import Routes


def console_routes(audit: Audit | None = None) -> Sequence[Routes]:
    """The routes of the console."""
    # Each adds its pages when it is imported.
    from holdfast.server.console import groups, log, messages, overview, pipelines, queues, rendering  # noqa: F401

    return rendering.routes, overview.audit_page(audit)
