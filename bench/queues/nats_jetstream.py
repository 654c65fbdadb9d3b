"""NATS JetStream: a work queue stream on files and a durable pull consumer."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from bench.peers.base import KILL, NOTHING
from bench.programs import Program
from bench.queues.base import Queue, Taken
from bench.queues.server import Server, free_port

_SERVER = Program("nats-server", "nats-server")
_STREAM, _SUBJECT, _CONSUMER = "queue", "queue.messages", "consumer"

# fetch() wants a time even where the messages are there.
_SOON_S = 1.0


async def _say_nothing(problem: Exception) -> None:
    """While the server starts, each attempt fails; the client would print that."""


class NatsJetStream(Queue):
    """The client knows asyncio only: each side has a loop of its own, and loops of calls run inside it."""

    name = "NATS JetStream"
    survives = KILL
    ack_survives = NOTHING
    note = (
        "a server, over the loopback; messages written at once, synced every two minutes; "
        "what was acked is written later, though the ack waits for its answer"
    )
    needs = ("nats",)
    programs = (_SERVER,)
    depth = 20_000

    def open(self, folder: Path) -> None:
        self.port = free_port()
        command = [
            str(_SERVER.path()), "--jetstream", "--store_dir", str(folder.resolve()), "--addr", "127.0.0.1",
            "--port", str(self.port),
        ]  # fmt: skip
        self.loop = asyncio.new_event_loop()
        self.server: Server | None = Server(command, folder, lambda: self._run(self._connect()))

    def other_side(self) -> NatsJetStream:
        side = NatsJetStream(self.body_bytes)
        side.port, side.server, side.loop = self.port, None, asyncio.new_event_loop()
        side._run(side._connect())
        return side

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    async def _connect(self) -> None:
        import nats
        from nats.js.api import RetentionPolicy, StorageType

        self.client = await nats.connect(
            f"nats://127.0.0.1:{self.port}", allow_reconnect=False, connect_timeout=1, error_cb=_say_nothing
        )
        self.stream: Any = self.client.jetstream()
        await self.stream.add_stream(
            name=_STREAM, subjects=[_SUBJECT], retention=RetentionPolicy.WORK_QUEUE, storage=StorageType.FILE
        )
        self.consumer: Any = await self.stream.pull_subscribe(_SUBJECT, durable=_CONSUMER)

    def put(self, body: bytes) -> None:
        self._run(self.stream.publish(_SUBJECT, body))

    def put_each(self, bodies: Sequence[bytes]) -> None:
        async def put_each() -> None:
            for body in bodies:
                await self.stream.publish(_SUBJECT, body)

        self._run(put_each())

    def put_many(self, bodies: list[bytes]) -> None:
        async def put_many() -> None:
            await asyncio.gather(*(self.stream.publish(_SUBJECT, body) for body in bodies))

        self._run(put_many())

    def get(self, wait_s: float) -> Taken | None:
        found = self._run(self._fetch(1, wait_s or 0.2))
        return Taken(found[0].data, found[0]) if found else None

    def get_some(self, most: int, wait_s: float) -> list[Taken]:
        return [Taken(message.data, message) for message in self._run(self._fetch(most, wait_s))]

    def ack(self, receipt: Any) -> None:
        self._run(receipt.ack_sync())

    def ack_some(self, receipts: list[Any]) -> None:
        async def ack_all() -> None:
            await asyncio.gather(*(message.ack_sync() for message in receipts))

        self._run(ack_all())

    def take_each(self, count: int) -> None:
        async def take_each() -> None:
            for _ in range(count):
                (message,) = await self._fetch(1, _SOON_S)
                await message.ack_sync()

        self._run(take_each())

    def take_many(self, count: int) -> None:
        async def take_many() -> None:
            left = count
            while left:
                found = await self._fetch(left, _SOON_S)
                await asyncio.gather(*(message.ack_sync() for message in found))
                left -= len(found)

        self._run(take_many())

    async def _fetch(self, count: int, wait_s: float) -> list[Any]:
        try:
            found: list[Any] = await self.consumer.fetch(count, timeout=wait_s)
        except TimeoutError:
            return []
        return found

    def kill_server(self) -> None:
        if self.server is not None:
            self.server.stop(signal.SIGKILL)

    def close(self) -> None:
        self._run(self.client.close())
        self.loop.close()
        if self.server is not None:
            self.server.stop()
