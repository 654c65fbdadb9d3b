"""What a cluster says about its shards."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from holdfast.protocol.messages import ServerValue, Wire

Shard = Annotated[int, Meta(ge=0, le=1_023)]


class MoveTopic(Wire, kw_only=True):
    """The shard of the cluster to which a topic is to go, and how many seconds to wait for that."""

    to: Shard
    wait: Annotated[float, Meta(ge=0, le=20)] = 0.0


class TopicMoved(ServerValue, kw_only=True):
    """How far a move is: bytes copied, of those known so far; `moved` is true once the topic is in the shard."""

    topic: str
    shard: int
    moved: bool = False
    copied: int = 0
    total: int = 0
