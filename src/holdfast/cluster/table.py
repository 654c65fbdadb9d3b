"""Which topics live elsewhere than the hash of their name says: a small table in the store, with a version.

    <place>/cluster/placement/<20 digits>    the whole table in this version, as JSON

Each version is an object that is created once. The greatest number is the table; the newest ones are kept, so that
whoever has just listed them can read them. A change creates the next number, which only one of several can do: so the
changes have an order, and each was made with all earlier ones known.

The entry of a topic names the move that wrote it. A change gives the move that it expects there, and fails if another
one has come first. That makes it the one place where moves are decided: a move has taken place when its entry is there,
and was undone when another entry has taken the place of the one that it expects. Neither can be taken back, whoever
crashed or was suspended meanwhile.

A number that was removed could be created again by a call that was on its way for long. That changes nothing: it is not
the greatest. So a change counts only if it is found in the table afterwards.
"""

from __future__ import annotations

from typing import Final

import msgspec

from holdfast.broker.folder.layout import DEAD_SUFFIX
from holdfast.cluster.placement import shard_of_topic
from holdfast.env.chain.engines import Store
from holdfast.env.chain.ownership import CLUSTER
from holdfast.errors import CorruptData, UnknownFormat

FORMAT: Final = 1
PLACEMENT: Final = f"{CLUSTER}/placement"
_KEPT: Final = 64


class Placed(msgspec.Struct, frozen=True):
    """Where a topic was put, and by which move."""

    shard: int
    move: str


class PlacementTable(msgspec.Struct, frozen=True, kw_only=True):
    """One version of the table. Later releases may add fields; one with another format is refused."""

    format: int = FORMAT
    version: int = 0
    topics: dict[str, Placed] = {}

    def shard_of(self, topic: str, shards: int) -> int:
        """The shard of a topic, or of a topic's dead letters."""
        placed = self.topics.get(topic.removesuffix(DEAD_SUFFIX)) if self.topics else None
        return shard_of_topic(topic, shards) if placed is None else placed.shard

    def move_of(self, topic: str) -> str:
        """The move that put a topic where it is; empty if it was never put anywhere."""
        placed = self.topics.get(topic)
        return "" if placed is None else placed.move


class PlacedOtherwise(Exception):
    """Another move has come first. `table` is the table as it is now."""

    def __init__(self, table: PlacementTable) -> None:
        super().__init__("another move has come first")
        self.table = table


class PlacementStore:
    """The table in the store. All calls wait for the store: they are for threads."""

    def __init__(self, store: Store, root: str) -> None:
        self._store = store
        self._prefix = f"{root}{PLACEMENT}/"

    def read(self) -> PlacementTable:
        """The table as it is now."""
        while True:
            newest = max(self._numbers(), default=0)
            if not newest:
                return PlacementTable()
            content = self._store.read(self._key(newest))
            if content is not None:  # otherwise there are so many newer ones by now
                return _decode(content, self._key(newest))

    def change(self, topic: str, expected: str, placed: Placed) -> PlacementTable:
        """Put a topic somewhere, if the move `expected` has put it where it is; returns the table with that.

        Raises PlacedOtherwise. May be repeated if the store does not respond.
        """
        while True:
            table = self.read()
            if table.topics.get(topic) == placed:
                self._remove_old(table.version)
                return table
            if table.move_of(topic) != expected:
                raise PlacedOtherwise(table)
            changed = msgspec.structs.replace(table, version=table.version + 1, topics={**table.topics, topic: placed})
            self._store.create(self._key(changed.version), _encode(changed))

    def _numbers(self) -> list[int]:
        found = (key.removeprefix(self._prefix) for key in self._store.keys(self._prefix))
        return [int(digits) for digits in found if len(digits) == 20 and digits.isascii() and digits.isdecimal()]

    def _key(self, number: int) -> str:
        return f"{self._prefix}{number:020}"

    def _remove_old(self, version: int) -> None:
        for number in self._numbers():
            if number <= version - _KEPT:
                self._store.remove(self._key(number))


_encode = msgspec.json.Encoder(order="deterministic").encode


def _decode(content: bytes, key: str) -> PlacementTable:
    try:
        version = msgspec.json.decode(content, type=dict[str, object]).get("format")
        if version != FORMAT:
            raise UnknownFormat(
                f"the placement table of the cluster ({key}) has format {version}, and this release reads {FORMAT}: "
                "use the release that wrote it, or a later one"
            )
        return msgspec.json.decode(content, type=PlacementTable)
    except msgspec.MsgspecError as error:
        raise CorruptData(f"the placement table of the cluster ({key}) cannot be read: {error}") from None
