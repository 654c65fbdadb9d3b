"""A message that somebody has in hand, by its receipt: for one who goes on where another process left off."""

from __future__ import annotations

from holdfast.protocol.messages import Delivery, Receipt
from holdfast.protocol.queues import InGroup
from holdfast.server.api.queues import existing_group
from holdfast.server.calls import Call
from holdfast.server.routing import Routes

routes = Routes("queues")


class InHandQuery(InGroup, kw_only=True):
    """The message in hand that is meant."""

    receipt: Receipt


@routes.add(
    "GET",
    "/v1/queues/{queue}/inHand",
    action="consume",
    query=InHandQuery,
    answers=Delivery,
    errors=("lease_lost", "unknown_topic", "unknown_group"),
)
async def in_hand(call: Call) -> Delivery:
    """The message that a receipt stands for, as it was delivered; `lease_lost` if it is no longer held."""
    query: InHandQuery = call.query
    group = await existing_group(call, query.group)
    station, delivered = await group._aside(group._group.resume, query.receipt)
    return group.delivery(station, delivered, state=True)
