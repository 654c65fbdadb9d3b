"""A data folder on the simulated world, written to by the sink as Spark's tasks and driver would."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

import holdfast
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.model import Record
from holdfast.settings import BrokerSettings, TopicSettings
from holdfast.spark.source import HoldfastSink, StagedRows, Task, WriteOptions

ROOT = "/data/shop"
SETTINGS = BrokerSettings(topic=TopicSettings(min_free_bytes=0))


def batch_of(values: list[bytes], **columns: Any) -> pa.RecordBatch:
    given = {name: column if isinstance(column, pa.Array) else pa.array(column) for name, column in columns.items()}
    return pa.record_batch({"value": pa.array(values, pa.binary()), **given})


class Shop:
    """The folder, with a topic `orders`, and a sink into it."""

    def __init__(self, disk: SimulatedDisk | None = None, *, partitions: int = 1, **settings: Any) -> None:
        self.disk = disk or SimulatedDisk()
        self.clock = ManualClock()
        self.ids = SeededIds(1 if disk is None else 2)
        self.world = World(self.clock, self.disk, self.ids)
        if disk is None:
            with self.broker() as broker:
                broker.create_topic("orders", partitions=partitions, **settings)

    def broker(self) -> Any:
        return holdfast.open_broker(ROOT, settings=SETTINGS, world=self.world)

    def sink(self, **changes: Any) -> HoldfastSink:
        options = {"path": ROOT, "topic": "orders", "new_partitions": None, "owner_wait_ms": 100, **changes}
        return HoldfastSink(WriteOptions(**options, settings=SETTINGS), self.world)

    def stage(
        self,
        *batches: pa.RecordBatch,
        task: int = 0,
        attempt: int = 0,
        batch: int = 0,
        write: str = "query",
        **changes: Any,
    ) -> StagedRows:
        return self.sink(**changes).stage(iter(batches), write, batch, Task(task, attempt))

    def commit(self, *messages: StagedRows | None, kept: bool = True, streaming: bool = False, **changes: Any) -> None:
        self.sink(**changes).commit(messages, kept=kept, streaming=streaming)

    def write(self, *batches: pa.RecordBatch, batch: int = 0, write: str = "query", **changes: Any) -> None:
        self.commit(self.stage(*batches, batch=batch, write=write, **changes), **changes)

    def records(self, topic: str = "orders") -> list[list[Record]]:
        """What each partition holds."""
        with self.broker() as broker:
            partitions = broker._port.engine.topic(topic).partitions
            return [list(partition.log.records(partition.log.start)) for partition in partitions]

    def values(self, topic: str = "orders") -> list[bytes]:
        return [record.value for partition in self.records(topic) for record in partition]

    def files(self, path: str = f"{ROOT}/staging") -> Iterator[str]:
        """All that is left in the staging area."""
        if self.disk.exists(path):
            for name in self.disk.names(path):
                if self.disk.is_folder(f"{path}/{name}"):
                    yield from self.files(f"{path}/{name}")
                else:
                    yield f"{path}/{name}".removeprefix(f"{ROOT}/staging/")
