"""A data folder on a simulated disk whose segments move to a store, for tests of tiering."""

from __future__ import annotations

import random
from typing import Any

from holdfast.broker.engine import BrokerEngine
from holdfast.broker.folder.layout import partition_folder
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.chain.engines import MemoryStore
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.env.tier import TieredDisk
from holdfast.settings import BrokerSettings, TopicSettings
from holdfast.storage.log import Log
from tests.crash.faulty_store import FaultyStore

FOLDER = "/data/jobs"
LOG = f"{partition_folder(FOLDER, 'jobs')}/log"
PLACE = "s3://cold/jobs"
CACHE_BYTES = 20_000


class TieredFolder:
    """An engine with one topic in small segments, all but the last of which are to leave the disk."""

    def __init__(
        self,
        seed: int = 0,
        *,
        disk: SimulatedDisk | None = None,
        objects: MemoryStore | None = None,
        ids: SeededIds | None = None,
        clock: ManualClock | None = None,
        **topic: Any,
    ) -> None:
        self.seed = seed
        self.disk = disk or SimulatedDisk()
        self.objects = objects or MemoryStore(PLACE)
        self.ids = ids or SeededIds(seed)
        self.clock = clock or ManualClock()
        self.store = FaultyStore(self.objects, seed, faults=0.0)
        self.tier = TieredDisk(self.disk, lambda _: (self.store, ""))
        self.world = World(clock=self.clock, disk=self.tier, ids=self.ids, tier=self.tier)
        limits = {"tier_after_bytes": 0} | topic
        self.settings = BrokerSettings(
            tier=PLACE,
            tier_cache_bytes=CACHE_BYTES,
            topic=TopicSettings(
                segment_bytes=4096, frame_bytes=1024, index_bytes=512, min_free_bytes=0, durability="fsync", **limits
            ),
        )
        self.engine = BrokerEngine.open(FOLDER, settings=self.settings, world=self.world)
        if "jobs" not in self.engine.topics():
            self.engine.create_topic("jobs")
        self.put: list[bytes] = []

    @property
    def log(self) -> Log:
        return self.engine.open_topic("jobs").partitions[0].log

    def fill(self, segments: int = 5) -> None:
        rng = random.Random(self.seed)
        while len(self.log.segments()) < segments:
            batch = [b"%06d" % (len(self.put) + i) + rng.randbytes(rng.randint(1, 300)) for i in range(4)]
            self.log.append(batch, durability="fsync")
            self.put += batch

    def move(self) -> None:
        """One round of tiering."""
        self.engine.tiering.tick()

    def read(self, offset: int = 0) -> list[bytes]:
        return [bytes(record.value) for record in self.log.records(offset)]

    @property
    def stubs(self) -> list[str]:
        return [name for name in self.disk.names(LOG) if name.endswith(".stub")]

    @property
    def files(self) -> list[str]:
        return [name for name in self.disk.names(LOG) if name.endswith(".log")]

    def after(self, disk: SimulatedDisk, ids: SeededIds | None = None, **topic: Any) -> TieredFolder:
        """The folder with its next owner, after the process or the machine has died, and a copy of the store."""
        objects = MemoryStore(PLACE)
        for key in self.objects.keys(""):
            objects.create(key, self.objects.read(key) or b"")
        return TieredFolder(self.seed, disk=disk, objects=objects, ids=ids or self.ids, clock=self.clock, **topic)
