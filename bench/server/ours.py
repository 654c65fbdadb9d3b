"""Our server, and our clients of it: for threads and for tasks."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from bench.harness import OURS
from bench.peers.base import POWER_CUT
from bench.queues.ours import HoldfastQueue
from bench.queues.server import Server, free_port

QUEUE = "jobs"
TASKS = 32


class HoldfastServer(HoldfastQueue):
    """The client for threads, durability "os": an answer means that it is in the page cache."""

    note = 'holdfast.connect(...), durability="os": in the page cache when the answer comes'
    needs = ("holdfast.server", "httptools", "uvloop", "prometheus_client", "jinja2", "multipart")
    settings: ClassVar[str] = ""

    def open(self, folder: Path) -> None:
        port = free_port()
        command = [sys.executable, "-m", "holdfast", "serve", str((folder / "data").resolve()), "--port", str(port)]
        if self.settings:
            file = (folder / "holdfast.toml").resolve()
            file.write_text(f"[server]\n{self.settings}\n")
            command += ["--config", str(file)]
        self.address = "127.0.0.1", port
        self.server: Server | None = Server(command, folder, self._look)
        self._connect()
        self._put_checked()
        self.take_each(1)

    def _look(self) -> None:
        socket.create_connection(self.address, 1).close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.address[1]}"

    def _connect(self) -> None:
        import holdfast

        self.broker: Any = holdfast.connect(self.url, durability=self.durability)
        self.queue: Any = self.broker.queue(QUEUE)

    def other_side(self) -> HoldfastServer:
        side = type(self)(self.body_bytes)
        side.address, side.server = self.address, None
        side._connect()
        return side

    def _put_checked(self) -> None:
        self._check(self.queue.put(b"x"))

    def _check(self, stored: Any) -> None:
        """A figure under the wrong name is worse than none."""
        if stored.durability != self.durability:
            raise ValueError(f"a put was stored with {stored.durability}, not {self.durability}")

    def take_many(self, count: int) -> None:
        left = count
        while left:
            some = self.queue.get_many(left, timeout=0)
            self.queue.ack_many(some)
            left -= len(some)
            if not some:
                raise LookupError("fewer messages than were put")

    def kill_server(self) -> None:
        if self.server is not None:
            self.server.stop(signal.SIGKILL)

    def close(self) -> None:
        self.broker.close()
        if self.server is not None:
            self.server.stop()


class HoldfastServerSynced(HoldfastServer):
    """Durability "fsync": an answer to a put comes after fdatasync."""

    name = f"{OURS}, fsync"
    survives = POWER_CUT
    note = 'holdfast.connect(...), durability="fsync": fdatasync before a put is answered; an ack is synced in a second'
    durability = "fsync"


class HoldfastServerTasks(HoldfastServer):
    """The client for tasks: 32 callers at once, over as many connections."""

    name = f"{OURS}, {TASKS} tasks"
    note = f'holdfast.aio.connect(...), durability="os", {TASKS} callers at once'
    needs = HoldfastServer.needs

    def _connect(self) -> None:
        from holdfast import aio

        self.loop = asyncio.new_event_loop()

        async def connect() -> None:
            self.broker = await aio.connect(self.url, durability=self.durability)
            self.queue = await self.broker.queue(QUEUE)

        self._run(connect())

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    def _put_checked(self) -> None:
        self._check(self._run(self.queue.put(b"x")))

    def put_each(self, bodies: Sequence[bytes]) -> None:
        async def put(some: Iterable[bytes]) -> None:
            for body in some:
                await self.queue.put(body)

        async def put_all() -> None:
            await asyncio.gather(*(put(bodies[i::TASKS]) for i in range(TASKS)))

        self._run(put_all())

    def put_many(self, bodies: list[bytes]) -> None:
        self._run(self.queue.put_many(bodies))

    def take_each(self, count: int) -> None:
        async def take(some: int) -> None:
            for _ in range(some):
                message = await self.queue.get(timeout=5)
                await message.ack()

        async def take_all() -> None:
            await asyncio.gather(*(take(len(range(i, count, TASKS))) for i in range(TASKS)))

        self._run(take_all())

    def close(self) -> None:
        self._run(self.broker.close())
        self.loop.close()
        if self.server is not None:
            self.server.stop()


class HoldfastServerTasksSynced(HoldfastServerTasks):
    """The same with fsync: one sync serves all who wait."""

    name = f"{OURS}, fsync, {TASKS} tasks"
    survives = POWER_CUT
    note = f'holdfast.aio.connect(...), durability="fsync", {TASKS} callers at once'
    durability = "fsync"
