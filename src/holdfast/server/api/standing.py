"""How topics and all their groups stand, partition by partition: what `holdfast topic`, `group` and `top` show."""

from __future__ import annotations

import msgspec

from holdfast.broker.delayed.reading import count_beside
from holdfast.broker.layout import partition_folder
from holdfast.broker.standing import Standing, TopicStanding
from holdfast.protocol.standing import StandingQuery, Standings
from holdfast.server.calls import Call
from holdfast.server.routing import Routes
from holdfast.server.scans import Scan

routes = Routes("topics")


@routes.add(
    "GET", "/v1/standing", action="read", scope="any", query=StandingQuery, answers=Standings, errors=("unknown_topic",)
)
async def standing(call: Call) -> Standings:
    """Topics with their partitions and groups, each with what it has in hand and how far behind it is."""
    query: StandingQuery = call.query
    if query.topic is not None:
        call.principal.check("read", query.topic)
    return await call.scan(_look, call)


def _look(scan: Scan, call: Call) -> Standings:
    """Read from the files, as one beside would: nobody waits for it."""
    query: StandingQuery = call.query
    found = Standing(call.service.world, call.service.folder)
    if query.topic is not None:
        return _told(call, [found.topic(query.topic)])
    names = [name for name in found.names() if name > (query.after or "") and call.principal.sees(name)]
    topics: list[TopicStanding] = []
    for name in names[: query.limit]:
        scan.step()
        topics += found.if_there(name)
    return _told(call, topics, names[query.limit - 1] if len(names) > query.limit > 0 else "")


def _told(call: Call, topics: list[TopicStanding], following: str = "") -> Standings:
    seen = [_shown(call, topic) for topic in topics]
    return Standings(topics=seen, delayed={topic.name: _delayed(call, topic) for topic in seen}, next=following)


def _shown(call: Call, topic: TopicStanding) -> TopicStanding:
    """The topic with those of its groups that the caller may use."""
    groups = [group for group in topic.groups if call.principal.may_use(group.mode, group.name)]
    return msgspec.structs.replace(topic, groups=groups)


def _delayed(call: Call, topic: TopicStanding) -> int:
    service = call.service
    return sum(
        count_beside(service.world, partition_folder(service.folder, topic.name, each.number))
        for each in topic.partitions
    )
