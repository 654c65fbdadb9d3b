"""beanstalkd: put, reserve, delete, with a log of what happens."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, ClassVar

from bench.peers.base import KILL, POWER_CUT
from bench.programs import Program
from bench.queues.base import Queue, Taken
from bench.queues.server import Server, free_port

_SERVER = Program("beanstalkd", "beanstalkd")


class Beanstalkd(Queue):
    """Synced every 50 ms, its default: written before the answer."""

    name = "beanstalkd, every 50 ms"
    survives = KILL
    ack_survives = KILL
    note = "synced every 50 ms, its default; no call for many"
    needs = ("greenstalk",)
    programs = (_SERVER,)
    sync: ClassVar[tuple[str, ...]] = ()

    def open(self, folder: Path) -> None:
        port = free_port()
        self.address = "127.0.0.1", port
        log = (folder / "log").resolve()
        log.mkdir(exist_ok=True)
        command = [str(_SERVER.path()), "-l", "127.0.0.1", "-p", str(port), "-b", str(log), *self.sync]
        self.server: Server | None = Server(command, folder, self._connect)

    def _connect(self) -> None:
        import greenstalk

        self.client: Any = greenstalk.Client(self.address, encoding=None)

    def other_side(self) -> Beanstalkd:
        side = type(self)(self.body_bytes)
        side.address, side.server = self.address, None
        side._connect()
        return side

    def put(self, body: bytes) -> None:
        self.client.put(body)

    def get(self, wait_s: float) -> Taken | None:
        import greenstalk

        try:
            job = self.client.reserve(timeout=round(wait_s))
        except greenstalk.TimedOutError:
            return None
        return Taken(job.body, job)

    def ack(self, receipt: Any) -> None:
        self.client.delete(receipt)

    def kill_server(self) -> None:
        if self.server is not None:
            self.server.stop(signal.SIGKILL)

    def close(self) -> None:
        self.client.close()
        if self.server is not None:
            self.server.stop()


class BeanstalkdSynced(Beanstalkd):
    """Synced before each answer."""

    name = "beanstalkd, always"
    survives = POWER_CUT
    ack_survives = POWER_CUT
    note = "-f0: put and delete each sync; no call for many"
    sync = ("-f0",)
