"""The audit log over HTTP."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
from msgspec import Meta

from holdfast.protocol.messages import Told, Wire
from holdfast.server.audit import Act, Audit
from holdfast.server.calls import Call
from holdfast.server.routing import Routes


class AuditQuery(Wire, kw_only=True):
    """How many of the newest acts, and of the newest refusals."""

    limit: Annotated[int, Meta(ge=1, le=1_000)] = 100


class Acts(Told, kw_only=True):
    """Administrative acts, the newest first; one whose outcome is "begun" runs, or was cut short by a crash.

    `refused` are calls that nobody was allowed to make; they stand apart, so that they cannot push out what was done.
    Of each caller some are written down in a minute; a line with a `count` stands for so many more.
    """

    acts: list[Act]
    refused: list[Act] = msgspec.field(default_factory=list)


def audit_routes(audit: Audit) -> Routes:
    """What administrators did, for administrators."""
    routes = Routes("admin")

    @routes.add("GET", "/v1/admin/audit", action="admin", query=AuditQuery, answers=Acts)
    async def acts(call: Call) -> Acts:
        """The last administrative acts: who did what to which topic, when, and what became of it; and refusals."""
        query: AuditQuery = call.query
        return Acts(
            acts=await asyncio.to_thread(audit.last, query.limit),
            refused=await asyncio.to_thread(audit.refusals.last, query.limit),
        )

    return routes
