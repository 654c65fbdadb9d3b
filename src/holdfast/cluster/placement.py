"""Where things live. A topic, a lock and a document live in one shard, a shard on one node at a time.

The shard follows from the name alone, and can never change: everybody who ever asks must get the same answer, or a
message would be looked for where it was not stored. So these functions are part of the stored format, and
`tests/golden/test_placement.py` has their values.

Which node should own a shard is decided anew all the time, by rendezvous hashing: each node has a weight for each
shard, and the highest one wins. If a node goes, only its shards move, each to the node that was second; if one comes,
only those move that it wins. No node needs to ask another one. Two nodes that see different nodes may for a while both
want a shard; the shard's chain decides who owns it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import Enum
from functools import lru_cache
from typing import Final

from holdfast.broker.folder.layout import DEAD_SUFFIX
from holdfast.broker.messages import murmur3

MOST_SHARDS: Final = 1024
_KEPT: Final = 65_536
_TOPIC_SEED: Final = 0x746F7069  # "topi": names of topics, locks and producers do not share their places
_KEY_SEED: Final = 0x6B657973  # "keys"
_NODE_SEED: Final = 0x6E6F6465  # "node"


@lru_cache(maxsize=_KEPT)
def shard_of_topic(name: str, shards: int) -> int:
    """The shard of a topic. Its dead letters live with it."""
    return murmur3()(name.removesuffix(DEAD_SUFFIX).encode(), _TOPIC_SEED) % shards


@lru_cache(maxsize=_KEPT)
def shard_of_key(name: str, shards: int) -> int:
    """The shard of a lock and of the document of the same name; and where a producer's name is registered."""
    return murmur3()(name.encode(), _KEY_SEED) % shards


def ranked(shard: int, nodes: Iterable[str]) -> list[str]:
    """The nodes in the order in which they should own the shard: the first one if it lives, otherwise the next."""
    return sorted(nodes, key=lambda node: (_weight(node, shard), node), reverse=True)


@lru_cache(maxsize=_KEPT)
def _weight(node: str, shard: int) -> int:
    return murmur3()(f"{node}/{shard}".encode(), _NODE_SEED)


class Role(Enum):
    """What a node should do about a shard."""

    OWN = "own"
    STAND_BY = "stand by"
    NOTHING = "nothing"


def role_of(node: str, shard: int, live: Collection[str], leaving: Collection[str] = ()) -> Role:
    """What a node should do about a shard, given the nodes that live, and those of them that are about to go.

    The first one owns it, the second one stands by. One that is about to go stands by for nothing, and owns a shard
    only as long as there is nobody else.
    """
    staying = [each for each in live if each not in leaving]
    order = ranked(shard, staying or live)
    if node not in order[:2]:
        return Role.NOTHING
    if order[0] == node:
        return Role.OWN
    return Role.STAND_BY if staying else Role.NOTHING
