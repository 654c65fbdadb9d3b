"""The audit log over HTTP."""

from __future__ import annotations

import asyncio
from typing import Annotated

from msgspec import Meta

from holdfast.protocol.messages import Told, Wire
from holdfast.server.audit import Act, Audit
from holdfast.server.calls import Call
from holdfast.server.routing import Routes


class AuditQuery(Wire, kw_only=True):
    """How many of the newest acts."""

    limit: Annotated[int, Meta(ge=1, le=1_000)] = 100


class Acts(Told, kw_only=True):
    """Administrative acts, the newest first; one whose outcome is "begun" runs, or was cut short by a crash."""

    acts: list[Act]


def audit_routes(audit: Audit) -> Routes:
    """What administrators did, for administrators."""
    routes = Routes("admin")

    @routes.add("GET", "/v1/admin/audit", action="admin", query=AuditQuery, answers=Acts)
    async def acts(call: Call) -> Acts:
        """The last administrative acts: who did what to which topic, when, and what became of it."""
        query: AuditQuery = call.query
        return Acts(acts=await asyncio.to_thread(audit.last, query.limit))

    return routes
