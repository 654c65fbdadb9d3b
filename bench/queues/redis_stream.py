"""A Redis stream with a consumer group: XADD, XREADGROUP, XACK, with an append-only file."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from bench.peers.base import KILL, POWER_CUT
from bench.programs import Program
from bench.queues.base import Queue, Taken
from bench.queues.server import Server, free_port

_SERVER = Program("redis-server", "redis-server")
_STREAM, _GROUP, _CONSUMER = "queue", "group", "consumer"


class RedisStream(Queue):
    """appendfsync everysec, what most people run: written before the answer, synced once a second."""

    name = "Redis stream, everysec"
    survives = KILL
    ack_survives = KILL
    note = "a server, over the loopback; appendfsync everysec; XACK leaves the message in the stream until trimmed"
    needs = ("redis",)
    programs = (_SERVER,)
    appendfsync: ClassVar[str] = "everysec"

    def open(self, folder: Path) -> None:
        import redis

        port = free_port()
        self.client: Any = redis.Redis("127.0.0.1", port)
        command = [
            str(_SERVER.path()), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder.resolve()),
            "--save", "", "--appendonly", "yes", "--appendfsync", self.appendfsync,
        ]  # fmt: skip
        self.server = Server(command, folder, self.client.ping)
        with suppress(redis.ResponseError):  # it is there when the folder is opened again
            self.client.xgroup_create(_STREAM, _GROUP, id="0", mkstream=True)

    def put(self, body: bytes) -> None:
        self.client.xadd(_STREAM, {"body": body})

    def put_many(self, bodies: list[bytes]) -> None:
        with self.client.pipeline(transaction=False) as pipeline:
            for body in bodies:
                pipeline.xadd(_STREAM, {"body": body})
            pipeline.execute()

    def get(self, wait_s: float) -> Taken | None:
        found = self._read(1, wait_s)
        return Taken(found[0][1][b"body"], found[0][0]) if found else None

    def get_some(self, most: int, wait_s: float) -> list[Taken]:
        return [Taken(fields[b"body"], number) for number, fields in self._read(most, wait_s)]

    def ack(self, receipt: Any) -> None:
        self.ack_some([receipt])

    def ack_some(self, receipts: list[Any]) -> None:
        self.client.xack(_STREAM, _GROUP, *receipts)

    def take_many(self, count: int) -> None:
        found = self._read(count, 0)
        if len(found) != count:
            raise LookupError("fewer messages than were put")
        self.ack_some([number for number, _ in found])

    def _read(self, count: int, wait_s: float) -> list[tuple[bytes, dict[bytes, bytes]]]:
        block_ms = max(1, int(1000 * wait_s)) if wait_s else None
        found = self.client.xreadgroup(_GROUP, _CONSUMER, {_STREAM: ">"}, count=count, block=block_ms)
        if isinstance(found, dict):  # by stream: newer versions of the client
            return next(iter(found.values()))[0] if found else []
        return found[0][1] if found else []

    def kill_server(self) -> None:
        self.server.stop(signal.SIGKILL)

    def close(self) -> None:
        self.client.close()
        self.server.stop()


class RedisStreamSynced(RedisStream):
    """appendfsync always: synced before the answer."""

    name = "Redis stream, always"
    survives = POWER_CUT
    ack_survives = POWER_CUT
    note = "a server, over the loopback; appendfsync always: put, get and ack each sync"
    appendfsync = "always"
