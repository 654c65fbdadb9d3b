"""RabbitMQ takes many seconds to start: one serves all samples, each with its queue emptied."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from bench.queues.rabbitmq import QUEUE, RabbitMq
from bench.queues.server import on_server_core


class RabbitHost:
    """Runs from its first sample until all are taken."""

    port = 0

    @contextmanager
    def running(self, folder: Path) -> Iterator[RabbitHost]:
        queue = RabbitMq(0)
        place = folder / "rabbitmq"
        place.mkdir()
        with on_server_core():
            queue.start(place, lambda: socket.create_connection(("127.0.0.1", queue.port), 1).close())
        self.port = queue.port
        try:
            yield self
        finally:
            queue.stop()


class RabbitMqRunning(RabbitMq):
    """A client of the one that runs."""

    host: ClassVar[RabbitHost] = RabbitHost()

    def open(self, folder: Path) -> None:
        self.port, self.servers = self.host.port, []
        self._connect()
        self.channel.queue_purge(QUEUE)
