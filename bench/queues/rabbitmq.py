"""RabbitMQ: a quorum queue of one node, with publisher confirms."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.peers.base import NOTHING, POWER_CUT
from bench.programs import Program
from bench.queues.base import Polled, Taken
from bench.queues.server import Server, free_port

# The script behind Debian's wrapper, which would insist on a user and a data folder of its own.
_SERVER = Program("rabbitmq-server", "rabbitmq-server", first="/usr/lib/rabbitmq/bin")
_EPMD = Program("epmd", "rabbitmq-server")
QUEUE = "queue"


class RabbitMq(Polled):
    """The port mapper of Erlang runs in the foreground, for this node alone, and ends with it."""

    name = "RabbitMQ quorum queue"
    survives = POWER_CUT
    ack_survives = NOTHING
    note = "a server, over the loopback; a put waits for its confirm, an ack for nothing; no call for many; polls"
    needs = ("pika",)
    programs = (_SERVER, _EPMD)
    depth = 0

    def open(self, folder: Path) -> None:
        self.start(folder, self._connect)

    def start(self, folder: Path, ready: Callable[[], object]) -> None:
        """The server alone; `ready` raises until it answers."""
        place = folder.resolve()
        self.port, mapper_port, node_port = free_port(), free_port(), free_port()
        env = {
            "HOME": str(place),
            "ERL_EPMD_PORT": str(mapper_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": "bench@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(node_port),
            "RABBITMQ_MNESIA_BASE": str(place / "data"),
            "RABBITMQ_LOG_BASE": str(place / "log"),
            "RABBITMQ_PID_FILE": str(place / "pid"),
            "RABBITMQ_CONFIG_FILE": str(place / "none"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(place / "plugins"),
        }
        self.servers = [Server([str(_EPMD.path())], place, lambda: None, env=env)]
        self.servers.append(Server([str(_SERVER.path())], place, ready, env=env))

    def _connect(self) -> None:
        import pika

        self.connection = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", self.port))
        self.channel: Any = self.connection.channel()
        self.channel.confirm_delivery()
        self.channel.queue_declare(QUEUE, durable=True, arguments={"x-queue-type": "quorum"})
        self.lasting = pika.BasicProperties(delivery_mode=pika.DeliveryMode.Persistent)

    def other_side(self) -> RabbitMq:
        side = RabbitMq(self.body_bytes)
        side.port, side.servers = self.port, []
        side._connect()
        return side

    def put(self, body: bytes) -> None:
        self.channel.basic_publish("", QUEUE, body, self.lasting)

    def try_get(self) -> Taken | None:
        method, _, body = self.channel.basic_get(QUEUE)
        return None if method is None else Taken(body, method.delivery_tag)

    def ack(self, receipt: Any) -> None:
        self.channel.basic_ack(receipt)

    def kill_server(self) -> None:
        for server in reversed(self.servers):
            server.stop(signal.SIGKILL)

    def close(self) -> None:
        self.connection.close()
        self.stop()

    def stop(self) -> None:
        """End the server, if it is ours."""
        for server in reversed(self.servers):
            server.stop()
