"""Where this node knows topics to be, and what the owner of a shard does about moves that were begun before it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

from holdfast.broker.engine import BrokerEngine
from holdfast.broker.moving import MoveNote, TopicMoves
from holdfast.cluster.table import Placed, PlacedOtherwise, PlacementStore, PlacementTable
from holdfast.env.chain.engines import Store, StoreRefused, StoreUnreachable
from holdfast.env.world import Ids
from holdfast.errors import Unavailable

_Value = TypeVar("_Value")


class Places:
    """The newest table of placements that this node has seen. An older one sends calls to a wrong node, and no more.

    The owner of a shard never has a table that is wrong about its own topics: it reads the table when it takes the
    shard, and no topic leaves or comes without a note in the shard's own chain, which ends only once the owner has read
    the version that decides. Thread-safe; what reads the store is for threads.
    """

    def __init__(self, store: Store, root: str, shards: int, ids: Ids) -> None:
        self._store = PlacementStore(store, root)
        self._shards = shards
        self._ids = ids
        self._lock = threading.Lock()
        self.table = PlacementTable()

    def shard_of(self, topic: str) -> int:
        """The shard of a topic, as far as this node knows."""
        return self.table.shard_of(topic, self._shards)

    def read(self) -> PlacementTable:
        """The table as the store has it."""
        return self._learned(self._store.read)

    async def refresh(self, version: int) -> None:
        """Read the table unless this version of it is known."""
        if self.table.version < version:
            await asyncio.to_thread(self.read)

    def put(self, topic: str, expected: str, placed: Placed) -> PlacementTable:
        """Put a topic somewhere. Raises PlacedOtherwise if another move has come first."""
        return self._learned(lambda: self._store.change(topic, expected, placed))

    def decide(self, note: MoveNote) -> PlacementTable:
        """Return the table that says what became of a move: it was undone, unless it had taken place."""
        table = self.read()
        if table.move_of(note.topic) != note.before:
            return table
        try:
            return self.put(note.topic, note.before, Placed(note.source, self.new_move()))
        except PlacedOtherwise as error:
            return error.table

    def new_move(self) -> str:
        """An id for a move."""
        return self._ids.random_bytes(8).hex()

    def _learned(self, read: Callable[[], PlacementTable]) -> PlacementTable:
        try:
            table = read()
        except PlacedOtherwise as error:
            self._learn(error.table)
            raise
        except (StoreUnreachable, StoreRefused) as error:
            raise Unavailable(f"the cluster's table of placements cannot be reached: {error}. Try again") from error
        self._learn(table)
        return table

    def _learn(self, table: PlacementTable) -> None:
        with self._lock:
            if table.version > self.table.version:
                self.table = table


def settle_moves(engine: BrokerEngine, shard: int, places: Places) -> TopicMoves:
    """Finish the moves from and to a shard that its earlier owners began, or undo them. For the new owner."""
    places.read()
    moves = TopicMoves(engine, lambda topic: places.shard_of(topic) != shard)
    for note in list(moves.coming.values()):
        settle_coming(moves, note, places.decide(note))
    for note in list(moves.leaving.values()):
        settle_leaving(moves, note, places.decide(note))
    return moves


def settle_coming(moves: TopicMoves, note: MoveNote, table: PlacementTable) -> bool:
    """Take the topic, or remove what has come of it, as a table says that decides; returns which."""
    if table.move_of(note.topic) == note.move:
        moves.arrive(note.topic)
        return True
    moves.give_up(note.topic)
    return False


def settle_leaving(moves: TopicMoves, note: MoveNote, table: PlacementTable) -> None:
    """Delete the topic, or let it be used again, as a table says that decides.

    While it is about to leave, no other move can take it from here: if it is elsewhere, this one has taken place.
    """
    if table.topics[note.topic].shard == note.source:
        moves.stay(note.topic)
    else:
        moves.gone(note.topic)
