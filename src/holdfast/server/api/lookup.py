"""Everything that is known of one message, for one who asks by its id."""

from __future__ import annotations

import msgspec

from holdfast.embedded.lookup import look_up, no_message
from holdfast.protocol.queues import LookupQuery, Whole
from holdfast.server.api.queues import existing_group, told
from holdfast.server.calls import Call
from holdfast.server.routing import Routes
from holdfast.server.scans import Scan
from holdfast.server.served import ServedGroup

routes = Routes("queues")


@routes.add(
    "GET",
    "/v1/queues/{queue}/lookup",
    action="read",
    query=LookupQuery,
    answers=Whole,
    errors=("not_found", "unknown_topic", "unknown_group"),
)
async def lookup(call: Call) -> Whole:
    """One message, living, done or dead, with its lease, its document, and all that became of it step by step."""
    query: LookupQuery = call.query
    group = await existing_group(call, query.group)
    found = await call.scan(_whole, group, query.id)
    if found is None:
        raise no_message(query.id, group.topic)
    return found


def _whole(_scan: Scan, group: ServedGroup, message_id: str) -> Whole | None:
    found = look_up(group, message_id)
    if found is None:
        return None
    message, phase, *_ = found
    facts = msgspec.structs.asdict(told(message)) | {"phase": phase}
    return Whole(
        **{**facts, "lease_until_ms": found.lease_until_ms},
        leased_at_ms=found.leased_at_ms,
        first_delivery_ms=found.first_delivery_ms,
        last_delivery_ms=found.last_delivery_ms,
        failures=list(found.failures),
        state=found.state,
        history=list(found.history),
    )
