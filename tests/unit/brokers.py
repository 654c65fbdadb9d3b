"""A broker on the simulated world, for tests of its faces: for threads, or for tasks as if it were for threads."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import holdfast
from holdfast.api import AsyncOpening
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.chain.engines import MemoryStore
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.env.tier import TieredDisk
from holdfast.settings import BrokerSettings, TopicSettings

FOLDER = "/data/broker"
# What an object has that is to be awaited.
_AWAITED = ("receive_many", "nack", "poll", "redrive", "send", "keepalive", "update", "run_now")
SETTINGS = BrokerSettings(topic=TopicSettings(min_free_bytes=0, backoff_ms=100, backoff_jitter_percent=0))


class Awaited:
    """An object whose coroutines are run to their end, so that one test serves both faces."""

    def __init__(self, inner: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._inner = inner
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        return self._plain(getattr(self._inner, name))

    def _plain(self, found: Any) -> Any:
        if inspect.iscoroutine(found) or isinstance(found, AsyncOpening):
            return self._plain(self._loop.run_until_complete(_awaited(found)))
        if callable(found) and not isinstance(found, type):
            return lambda *args, **options: self._plain(found(*map(_bare, args), **options))
        if isinstance(found, list):
            return [self._plain(each) for each in found]
        wrapped = any(hasattr(found, name) for name in _AWAITED)
        return Awaited(found, self._loop) if wrapped else found


async def _awaited(found: Any) -> Any:
    return await found


def _bare(value: Any) -> Any:
    if isinstance(value, list):
        return [_bare(each) for each in value]
    return value._inner if isinstance(value, Awaited) else value


class Place:
    """A broker in a folder of a simulated disk, with a clock that stands still until it is moved."""

    def __init__(self, *, tasks: bool = False, settings: BrokerSettings = SETTINGS) -> None:
        self.disk = SimulatedDisk()
        self.cold = MemoryStore("s3://cold/jobs")  # where segments may go
        self.clock = ManualClock()
        self.ids = SeededIds(1)
        self.settings = settings
        self._loop = asyncio.new_event_loop() if tasks else None
        self.broker: Any = self.open()

    @property
    def world(self) -> World:
        tier = TieredDisk(self.disk, lambda _: (self.cold, ""))
        return World(clock=self.clock, disk=tier, ids=self.ids, tier=tier)

    def open(self, **options: Any) -> Any:
        arguments = {"world": self.world, "settings": self.settings, **options}
        if self._loop is None:
            return holdfast.open_broker(FOLDER, **arguments)
        return Awaited(self._loop.run_until_complete(self._opened(arguments)), self._loop)

    async def _opened(self, arguments: dict[str, Any]) -> Any:
        return await holdfast.aio.open_broker(FOLDER, **arguments)

    @property
    def engine(self) -> Any:
        return (self.broker if self._loop is None else self.broker._inner)._port.engine

    def reopen(self) -> Any:
        """Close in order, and open again."""
        self.broker.close()
        self.broker = self.open()
        return self.broker

    def kill(self) -> Any:
        """The process is gone (kill -9); another one opens the folder."""
        self.disk = self.disk.kill()
        self.broker = self.open()
        return self.broker

    def after(self, *, seconds: float = 0) -> None:
        """Time passes, and what falls due is done."""
        self.clock.advance(seconds=seconds)
        self.engine.tick()

    def files(self, folder: str = FOLDER) -> dict[str, bytes]:
        """Every file below the folder, the notes in locks aside."""
        found: dict[str, bytes] = {}
        for name in self.disk.names(folder):
            path = f"{folder}/{name}"
            if self.disk.is_folder(path):
                found |= self.files(path)
            elif name != "lock":
                found[path] = self.disk.contents(path)
        return found

    def close(self) -> None:
        self.broker.close()
        if self._loop is not None:
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()


def taken(group: Any, most: int = 100) -> list[bytes]:
    """Take what is ready, ack it, and answer with the bodies, sorted."""
    found = group.receive_many(most, timeout=0)
    group.ack_many(found)
    return sorted(message.body for message in found)


def polled(consumer: Any) -> list[bytes]:
    """All that a consumer gets, sorted."""
    found: list[bytes] = []
    while some := consumer.poll(0):
        found += [message.body for message in some]
    return sorted(found)
