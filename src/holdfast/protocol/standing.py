"""How topics stand, on the wire."""

from __future__ import annotations

import msgspec

from holdfast.broker.standing import TopicStanding
from holdfast.protocol.groups import OnTopic
from holdfast.protocol.messages import Name, Told
from holdfast.protocol.queues import Limit


class StandingQuery(OnTopic, kw_only=True):
    """Which topic is meant; or so many of all, behind that name."""

    limit: Limit = 1_000
    after: Name | None = None


class Standings(Told, kw_only=True):
    """Topics with their partitions and groups; `delayed` are the messages that no group has got yet, by topic.

    `next` is what `after` goes on from, if there are more topics.
    """

    topics: list[TopicStanding]
    delayed: dict[str, int] = msgspec.field(default_factory=dict)
    next: str = ""
