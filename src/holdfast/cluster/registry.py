"""Which nodes there are, as they say themselves.

Each node keeps a record in the store: who it is, where it can be called, and which shards it owns. It creates a newer
one every now and then, and removes the older ones; when it ends, it removes all. Nodes also send each other a new
record at once.

A record is a hint and nothing more. It says whom to ask, and which nodes to count when a shard is looking for an owner.
If it is wrong, a call goes to a node that answers that it does not own the shard, or two nodes want one shard; which of
them gets it is decided by the shard's chain. So nothing here needs to be exact, and no clocks are compared: a record is
taken for stale when its node has not written a newer one for a while, by the reader's own clock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any, Final

import msgspec

from holdfast.cluster.placement import NodeTraits
from holdfast.env.chain.engines import Store, StoreRefused, StoreUnreachable
from holdfast.env.chain.ownership import CLUSTER
from holdfast.env.process import get_logger
from holdfast.env.world import Clock

logger = get_logger(__name__)

NODES: Final = f"{CLUSTER}/nodes"
_KEPT: Final = 2  # whoever has just listed the newest can still read it after the next
_NS: Final = 1_000_000_000
_JUST_NOW_NS: Final = 2 * _NS
_FORGOTTEN_NS: Final = 600 * _NS


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A node, as it says itself. Later releases may add fields."""

    node: str
    url: str
    instance: str  # drawn at random by each process
    number: int  # counts its records up
    shards: dict[int, int] = {}  # those that it owns, and in which epoch of each
    leaving: bool = False  # it is about to end, and hands its shards over
    traits: NodeTraits = NodeTraits()
    placement: int = 0  # the version of the table of placements that it knows
    version: str = ""
    written_at_ms: int = 0  # by the node's wall clock, for people
    process: dict[str, Any] = {}  # so that others on its machine can see whether it has ended

    def is_newer_than(self, other: NodeRecord) -> bool:
        """Whether this says more than another record of the node. A new process counts on from those before it."""
        return self.number > other.number


class Known(msgspec.Struct):
    """A node as this one knows it."""

    record: NodeRecord
    heard_ns: int  # when its newest record was first seen
    refused: bool = False  # it could not be reached when it was last called


class NodeTable:
    """The other nodes, and which of them live. Pure: what was read and when is passed in."""

    def __init__(self, me: str, *, stale_s: float, has_ended: Callable[[Mapping[str, Any]], bool]) -> None:
        self.me = me
        self._stale_ns = round(stale_s * _NS)
        self._has_ended = has_ended
        self.known: dict[str, Known] = {}

    def hear(self, record: NodeRecord, now_ns: int) -> bool:
        """Take note of a record; returns whether it was news."""
        if record.node == self.me:
            return False
        known = self.known.get(record.node)
        if known is not None and not record.is_newer_than(known.record):
            return False
        self.known[record.node] = Known(record, now_ns)
        return True

    def keep_only(self, nodes: Collection[str], now_ns: int) -> bool:
        """Forget the nodes that have no record any more; returns whether there was one.

        One that was heard of only just now may have written its first record after the others were read.
        """
        gone = [
            node
            for node, known in self.known.items()
            if node not in nodes and (known.record.leaving or now_ns - known.heard_ns > _JUST_NOW_NS)
        ]
        for node in gone:
            del self.known[node]
        return bool(gone)

    def live(self, now_ns: int) -> dict[str, NodeRecord]:
        """The nodes whose records are fresh and whose processes are not known to have ended."""
        return {
            node: known.record
            for node, known in self.known.items()
            if now_ns - known.heard_ns < self._stale_ns and not self._has_ended(known.record.process)
        }

    def long_gone(self, now_ns: int) -> dict[str, NodeRecord]:
        """The nodes that have been silent for so long that nobody needs to know of them any more."""
        return {node: known.record for node, known in self.known.items() if now_ns - known.heard_ns > _FORGOTTEN_NS}

    def owner_of(self, shard: int) -> NodeRecord | None:
        """Who says that it owns the shard; if several do, the one in the latest epoch, stale or not."""
        found = [known.record for known in self.known.values() if shard in known.record.shards]
        return max(found, key=lambda record: record.shards[shard], default=None)


class Registry:
    """The records in the store. All calls wait for the store: they are for threads."""

    def __init__(self, store: Store, root: str, clock: Clock) -> None:
        self._store, self._prefix, self._clock = store, f"{root}{NODES}/", clock
        self._lock = threading.Lock()  # of the records of this node
        self._own: list[str] = []
        self._read: dict[str, NodeRecord] = {}

    def write(self, record: NodeRecord) -> None:
        """Create a record of this node, and remove those before it."""
        key = f"{self._prefix}{record.node}/{record.number:020}"
        with self._lock:
            self._own.append(key)  # first: it may be created although no answer comes
            self._store.create(key, msgspec.json.encode(record))
            while len(self._own) > _KEPT:
                self._store.remove(self._own.pop(0))

    def read(self) -> dict[str, NodeRecord]:
        """The newest record of each node."""
        newest: dict[str, str] = {}
        for key in self._store.keys(self._prefix):
            node, _, digits = key.removeprefix(self._prefix).rpartition("/")
            if node and digits.isdecimal() and digits.isascii():
                newest[node] = key  # in their order
        self._read = {key: record for key, record in self._read.items() if key in newest.values()}
        found = {}
        for node, key in newest.items():
            record = self._read.get(key) or self._decoded(key)
            if record is not None and record.node == node:
                found[node] = self._read[key] = record
        return found

    def adopt(self, node: str) -> int:
        """Take over the records that an earlier process of this node has left; returns the greatest number of them."""
        self._own = sorted({*self._own, *self._store.keys(f"{self._prefix}{node}/")})
        return max((int(key.rpartition("/")[2]) for key in self._own if key[-20:].isdecimal()), default=0)

    def remove_of(self, record: NodeRecord) -> None:
        """Remove the records of a node up to this one. If it comes back, it writes newer ones."""
        for key in list(self._store.keys(f"{self._prefix}{record.node}/")):
            if key[-20:].isdecimal() and int(key[-20:]) <= record.number:
                self._store.remove(key)

    def remove(self) -> None:
        """Remove this node's records."""
        with self._lock, suppress(StoreUnreachable, StoreRefused):  # then they become stale
            while self._own:
                self._store.remove(self._own[0])
                self._own.pop(0)

    def _decoded(self, key: str) -> NodeRecord | None:
        content = self._store.read(key)
        try:
            return None if content is None else msgspec.json.decode(content, type=NodeRecord)
        except msgspec.MsgspecError as error:
            logger.warning("the record of a node cannot be read", extra={"key": key, "why": str(error)})
            return None
