"""How topics and all their groups stand, partition by partition: what `holdfast topic`, `group` and `top` show."""

from __future__ import annotations

import msgspec

from holdfast.broker.delayed.reading import count_beside
from holdfast.broker.layout import partition_folder
from holdfast.broker.standing import Standing, TopicStanding
from holdfast.protocol.groups import OnTopic
from holdfast.protocol.standing import Standings
from holdfast.server.calls import Call
from holdfast.server.routing import Routes
from holdfast.server.scans import Scan

routes = Routes("topics")


@routes.add(
    "GET", "/v1/standing", action="read", scope="any", query=OnTopic, answers=Standings, errors=("unknown_topic",)
)
async def standing(call: Call) -> Standings:
    """Topics with their partitions and groups, each with what it has in hand and how far behind it is."""
    query: OnTopic = call.query
    if query.topic is not None:
        call.principal.check("read", query.topic)
    return await call.scan(_look, call, query.topic)


def _look(_scan: Scan, call: Call, name: str | None) -> Standings:
    """Read from the files, as one beside would: nobody waits for it."""
    service = call.service
    found = Standing(service.world, service.folder)
    chosen = list(found.topics()) if name is None else [found.topic(name)]
    seen = [_shown(call, topic) for topic in chosen if call.principal.sees(topic.name)]
    return Standings(topics=seen, delayed={topic.name: _delayed(call, topic) for topic in seen})


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
