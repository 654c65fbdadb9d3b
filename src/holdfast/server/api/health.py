"""Whether the server lives, whether it is ready, and what it counts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from holdfast.broker.broker import BrokerEngine
from holdfast.errors import Unavailable
from holdfast.protocol.messages import Told
from holdfast.server.calls import Call
from holdfast.server.http.messages import Response
from holdfast.server.routing import Routes

routes = Routes("health")


class Health(Told, kw_only=True):
    """That the server lives."""

    status: str


class MetricsQuery(msgspec.Struct):
    """What Prometheus may add to its address is nothing to us."""


@routes.add("GET", "/healthz", action="open", answers=Health)
async def healthz(call: Call) -> Health:
    """The process is alive and answers."""
    return Health(status="alive")


@routes.add("GET", "/readyz", action="open", answers=Health, errors=("unavailable",))
async def readyz(call: Call) -> Health:
    """The server takes calls: its folder is open, no disk has failed, and it is not about to go."""
    if call.service.leaving:
        raise Unavailable("the server is about to go; call another one, or try again when it is back")
    if call.service.broker.closed:
        raise Unavailable("the data folder is closed; see the server's log")
    stopped = _stopped(call.service.broker._engine)
    if stopped is not None:
        raise Unavailable(
            f"the disk failed under {stopped}, which takes nothing more; look at the disk, then start the server anew"
        )
    return Health(status="ready")


def _stopped(engine: BrokerEngine) -> str | None:
    """What a failed sync has stopped for good, if anything."""
    for topic in engine.open_topics():
        logs = [partition.log for partition in topic.partitions]
        logs += [station.delivery.journal.log for group in topic.groups.values() for station in group.stations]
        if not all(log.usable for log in logs) and not topic.closed:
            return f"the topic {topic.name}"
    return None


def metrics_routes(render: Callable[[str], tuple[bytes, str]], *, asks: bool) -> Routes:
    """The page for Prometheus; whoever asks for it must be known, or need not."""
    found = Routes("health")

    @found.add(
        "GET",
        "/metrics",
        action="read" if asks else "open",
        query=MetricsQuery,
        gives=("text/plain",),
    )
    async def metrics(call: Call) -> Response:
        """What is counted and timed, for Prometheus."""
        body, media = await asyncio.to_thread(render, call.request.header("accept"))
        return Response(200, body, media, headers=[("cache-control", "no-store")])

    return found
