"""How topics stand, on the wire."""

from __future__ import annotations

import msgspec

from holdfast.broker.standing import TopicStanding
from holdfast.protocol.messages import Told


class Standings(Told, kw_only=True):
    """Topics with their partitions and groups; `delayed` are the messages that no group has got yet, by topic."""

    topics: list[TopicStanding]
    delayed: dict[str, int] = msgspec.field(default_factory=dict)
