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

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from enum import Enum
from functools import lru_cache
from math import log
from typing import Final, NamedTuple

import msgspec

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


class NodeTraits(msgspec.Struct, frozen=True, kw_only=True):
    """What decides about a node's share: its weight, its zone (or none), and how many shards it may own (0: all)."""

    weight: float = 1.0
    zone: str = ""
    max_shards: int = 0


_USUAL: Final = NodeTraits()


def ranked(shard: int, nodes: Iterable[str], traits: Mapping[str, NodeTraits] | None = None) -> list[str]:
    """The nodes in the order in which they should own the shard: the first one if it lives, otherwise the next.

    A node of twice the weight is first for twice as many shards.
    """
    known = traits or {}

    def score(node: str) -> tuple[float, int, str]:
        number = _hash(node, shard)
        return -known.get(node, _USUAL).weight / log((number + 0.5) / 2**32), number, node

    return sorted(nodes, key=score, reverse=True)


@lru_cache(maxsize=_KEPT)
def _hash(node: str, shard: int) -> int:
    return murmur3()(f"{node}/{shard}".encode(), _NODE_SEED)


class Role(Enum):
    """What a node should do about a shard."""

    OWN = "own"
    STAND_BY = "stand by"
    NOTHING = "nothing"


class Assignment(NamedTuple):
    """Which node should own a shard, and which should stand by; empty if none can."""

    owner: str
    standby: str

    def role_of(self, node: str) -> Role:
        return Role.OWN if node == self.owner else Role.STAND_BY if node == self.standby else Role.NOTHING


def assignments(shards: int, nodes: Mapping[str, NodeTraits], leaving: Collection[str] = ()) -> list[Assignment]:
    """What each shard should have, given the nodes that live, and those of them that are about to go.

    The first node owns it; if that has as many as it may, the next one. Of the others, the first one in another zone
    stands by, or the first of all if there is no other zone. One that is about to go stands by for nothing, and owns a
    shard only as long as there is nobody else.
    """
    staying = [node for node in nodes if node not in leaving]
    held: Counter[str] = Counter()
    found = []
    for shard in range(shards):
        order = ranked(shard, staying or nodes, nodes)
        owner = next((node for node in order if not 0 < nodes[node].max_shards <= held[node]), "")
        held[owner] += 1
        others = [node for node in order if node != owner] if owner and staying else []
        apart = [node for node in others if nodes[node].zone != nodes[owner].zone]
        found.append(Assignment(owner, (apart or others or [""])[0]))
    return found
