"""A simulated disk whose folder lives in a store: a power cut here is the loss of the whole machine."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable

from holdfast.env import ManualClock
from holdfast.env.chain.chain import Chain, Position
from holdfast.env.chain.checkpoints import write_checkpoint
from holdfast.env.chain.disk import ChainDisk
from holdfast.env.chain.engines import MemoryStore, StoreUnreachable
from holdfast.env.chain.ownership import ChainFollower
from holdfast.env.sim.disk import FaultPlan, SimulatedDisk
from holdfast.env.world import SeededIds, World
from tests.crash.faulty_store import FaultyStore


class ChainedDisk(ChainDisk):
    """One owner of the folder. `cut` returns what the next owner finds, of a copy of the store."""

    def __init__(self, folder: str, objects: MemoryStore | None = None, *, seed: int = 0, faults: float = 0.0) -> None:
        self.objects = objects or MemoryStore()
        self.folder, self.seed, self.faulty = folder, seed, faults
        self.machine = SimulatedDisk(maps=False)
        store = FaultyStore(self.objects, seed, faults=faults)
        clock = ManualClock()  # its own: waiting for the store must not move the clock of the story
        world = World(clock=clock, disk=self.machine, ids=SeededIds(seed))
        follower = ChainFollower(self.objects, "", world, folder)
        follower.begin()
        follower.catch_up()
        self.began_at: Position = follower.at
        chain = Chain.take_over(store, "", clock, at=follower.at, writer=bytes(15) + bytes([seed % 256]))
        assert chain is not None
        super().__init__(self.machine, folder, chain, unrecorded=frozenset({"lock", "reserve"}))

    @property
    def on_call(self) -> Callable[[str], None] | None:
        return self.machine.on_call

    @on_call.setter
    def on_call(self, call: Callable[[str], None] | None) -> None:
        self.machine.on_call = call

    @property
    def faults(self) -> FaultPlan:
        """How the disk of the cache fails. The store has faults of its own, by `faulty`."""
        return self.machine.faults

    def contents(self, path: str) -> bytes:
        return self.machine.contents(path)

    def cut(self, rng: random.Random) -> ChainedDisk:
        """Return the folder as the next owner has it. What was on its way may have arrived, or not."""
        objects = self._copied()
        if rng.random() < 0.5 and self.chain.batch.count:
            self._arrive(objects)
        return ChainedDisk(self.folder, objects, seed=self.seed + 1, faults=self.faulty)

    def kill(self) -> ChainedDisk:
        """Return the folder as the next owner has it if everything was sent before this one ended."""
        objects = self._copied()
        if self.chain.batch.count:
            self._arrive(objects)
        return ChainedDisk(self.folder, objects, seed=self.seed + 1, faults=self.faulty)

    def checkpoint(self) -> None:
        with contextlib.suppress(StoreUnreachable):  # there is no checkpoint then, or one that nobody was told of
            write_checkpoint(self, now_ns=0)

    def _copied(self) -> MemoryStore:
        objects = MemoryStore()
        for key in self.objects.keys(""):
            objects.create(key, self.objects.read(key) or b"")
        return objects

    def _arrive(self, objects: MemoryStore) -> None:
        """Let the changes that wait arrive in the copy of the store, though nobody was told."""
        chain = self.chain
        at = Position(number=chain.next_number, epoch=chain.epoch, window=chain.window, writer=chain.writer)
        twin = Chain(objects, "", ManualClock(), at=at, writer=chain.writer)
        twin.batch = chain.batch
        number, content = twin._take(1)  # type: ignore[arg-type]
        objects.create(f"chain/{number:020}", content)
