"""A broker on the simulated world with topics and consumers, for tests of groups in stream mode."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from holdfast.api.aio.consumer import AsyncConsumer
from holdfast.api.sync.consumer import Consumer
from holdfast.broker.engine import BrokerEngine
from holdfast.broker.streams.group import StreamGroup
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.local.aio.broker import AsyncLocalConsumerPort
from holdfast.local.sync.broker import LocalConsumerPort
from holdfast.settings import BrokerSettings, TopicSettings

FOLDER = "/data/broker"


class Streams:
    """A broker in a folder of a simulated disk, with a clock that stands still until it is moved."""

    def __init__(self, partitions: int = 3, **changes: Any) -> None:
        self.disk = SimulatedDisk()
        self.clock = ManualClock()
        self.ids = SeededIds(1)
        self.settings = BrokerSettings(topic=TopicSettings(min_free_bytes=0))
        self.engine = self.open()
        self.engine.create_topic("orders", changes={"partitions": partitions, **changes})

    def open(self) -> BrokerEngine:
        world = World(clock=self.clock, disk=self.disk, ids=self.ids)
        return BrokerEngine.open(FOLDER, world=world, settings=self.settings)

    def reopen(self) -> BrokerEngine:
        self.engine.close()
        self.engine = self.open()
        return self.engine

    def kill(self) -> BrokerEngine:
        """The process is gone (kill -9); another one opens the folder."""
        self.disk = self.disk.kill()
        self.engine = self.open()
        return self.engine

    def put(self, *values: str, partition: int = 0, topic: str = "orders", **options: Any) -> None:
        part = self.engine.topic(topic).partition(partition)
        appended, _ = part.append([value.encode() for value in values], **options)
        part.log.wait(appended)

    def fill(self, count: int, *, partitions: int = 3, topic: str = "orders") -> None:
        """So many messages for each partition: 0-0, 0-1, ... 1-0, ..."""
        for partition in range(partitions):
            self.put(*[f"{partition}-{i}" for i in range(count)], partition=partition, topic=topic)

    def consumer(
        self, topics: str | Iterable[str] = "orders", group: str = "analytics", **options: Any
    ) -> Consumer[Any]:
        return consumer_of(self.engine, topics, group, **options)

    def group(self, name: str = "analytics") -> StreamGroup:
        return self.engine.streams.group(name)

    def after(self, *, seconds: float = 0) -> None:
        """Time passes, and what falls due is done."""
        self.clock.advance(seconds=seconds)
        self.engine.tick()


def consumer_of(engine: BrokerEngine, topics: Any, group: str, **options: Any) -> Consumer[Any]:
    """A consumer of an engine in this process."""
    return Consumer.open(partial(LocalConsumerPort.open, engine), topics, group, **options)


async def async_consumer_of(engine: BrokerEngine, topics: Any, group: str, **options: Any) -> AsyncConsumer[Any]:
    """The same for tasks."""
    return await AsyncConsumer.open(partial(AsyncLocalConsumerPort.open, engine), topics, group, **options)


def texts(messages: Iterable[Any]) -> list[str]:
    return [message.raw.decode() for message in messages]


def drain(consumer: Consumer[Any], **options: Any) -> list[str]:
    """All that is there, by as many polls as it takes."""
    found: list[str] = []
    while some := consumer.poll(0, **options):
        found += texts(some)
    return found


def settle(*consumers: Consumer[Any]) -> list[str]:
    """Let all of them hear of each other; answers with what they got meanwhile."""
    found: list[str] = []
    for _ in range(3):
        for consumer in consumers:
            found += texts(consumer.poll(0))
    return found
