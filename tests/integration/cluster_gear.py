"""A cluster of `holdfast serve --cluster` processes: begun, looked at, stopped, killed, begun again."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import holdfast
from holdfast.cluster.placement import shard_of_topic
from tests.integration.http_gear import Caller
from tests.integration.process_gear import COMMAND, plain_environment
from tests.integration.store_servers import free_port

NAMES = ("north", "east", "ada")  # by chance, shards spread well over them
PATIENCE_S = 60  # only what hangs takes so long


class Node(Caller):
    """One node, at the same port from one life to the next."""

    def __init__(
        self, folder: Path, place: str, name: str, port: int, environ: Mapping[str, str], *arguments: str
    ) -> None:
        super().__init__(f"http://127.0.0.1:{port}")
        self.place = place
        self.port = port
        self.arguments = ("--node-id", name, *arguments)
        self.name = name
        self.log = folder / f"node-{port}.log"
        self._environ = {**plain_environment(), "XDG_CACHE_HOME": str(folder / "cache"), **environ}
        self.process: subprocess.Popen[str] | None = None

    @property
    def running(self) -> subprocess.Popen[str]:
        assert self.process is not None, "the node was never started"
        return self.process

    def begin(self) -> None:
        command = [*COMMAND, "serve", "--cluster", self.place, "--port", str(self.port), *self.arguments]
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=self._environ, stdin=subprocess.DEVNULL
            )

    def wait_for_start(self) -> None:
        assert self.running.stdout is not None
        said = self.running.stdout.readline()
        assert " at http://" in said, f"the node did not start: {self.log.read_text()}"

    def start(self) -> None:
        self.begin()
        self.wait_for_start()

    def send(self, number: int) -> None:
        self.running.send_signal(number)

    def kill(self) -> None:
        self.running.kill()
        self.running.wait()
        self._close()

    def stop(self) -> int:
        """SIGTERM, and wait for the end; returns the exit code."""
        self.send(signal.SIGTERM)
        code = self.running.wait(PATIENCE_S)
        self._close()
        return code

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._close()

    def _close(self) -> None:
        if self.process is not None and self.process.stdout is not None:
            self.process.stdout.close()

    def shards(self) -> dict[int, str]:
        """Who owns each shard, as this node sees it."""
        told = self.get("/v1/cluster").body
        return {shard["shard"]: shard.get("node", "") for shard in told["shards"]}

    def is_ready(self) -> bool:
        with suppress(OSError):
            return self.get("/readyz", timeout_s=5).status == 200
        return False


class Cluster:
    """Several nodes on one store."""

    def __init__(
        self, folder: Path, place: str, nodes: int, shards: int, environ: Mapping[str, str], lease: str, *arguments: str
    ) -> None:
        self.place, self.shards, self._environ = place, shards, {**plain_environment(), **environ}
        subprocess.run(
            [*COMMAND, "cluster", "init", place, "--shards", str(shards), "--lease", lease],
            check=True, env=self._environ, timeout=PATIENCE_S, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        self.nodes = [
            Node(folder, place, name, port, environ, *arguments)
            for name, port in zip(NAMES, free_port(nodes), strict=False)
        ]

    @property
    def url(self) -> str:
        """The address of all nodes, as clients take it."""
        return ",".join(node.url for node in self.nodes)

    def start(self) -> None:
        for node in self.nodes:
            node.begin()
        for node in self.nodes:
            node.wait_for_start()
        self.wait_until_whole()

    def wait_until_whole(self, *nodes: Node) -> None:
        """Return when each of these nodes, or of all, knows the owner of each shard."""
        until(lambda: all(node.is_ready() for node in nodes or self.nodes), "every shard has an owner")

    def topic_on(self, node: Node, start: str = "topic") -> str:
        """A topic that lives on this node now."""
        until(lambda: node.name in node.shards().values(), f"{node.name} owns a shard")
        owners = node.shards()
        names = (f"{start}-{number}" for number in range(10_000))
        return next(name for name in names if owners[shard_of_topic(name, self.shards)] == node.name)

    def busiest(self) -> Node:
        """The node with the most shards."""
        owners = list(self.nodes[0].shards().values())
        return max(self.nodes, key=lambda node: owners.count(node.name))

    def connect(self, *nodes: Node, timeout: float = 30) -> holdfast.Broker:
        return holdfast.connect([node.url for node in nodes or self.nodes], timeout=timeout)


@contextmanager
def cluster(
    folder: Path, *arguments: str, nodes: int = 3, shards: int = 8, place: str | None = None,
    environ: Mapping[str, str] | None = None, lease: str = "2s",
) -> Iterator[Cluster]:  # fmt: skip
    """A cluster that runs, in a folder of its own unless another place is named."""
    made = Cluster(folder, place or f"file://{folder}/store", nodes, shards, environ or {}, lease, *arguments)
    try:
        made.start()
        yield made
    finally:
        for node in made.nodes:
            node.end()


def until(is_so: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> None:
    """Return as soon as it is so."""
    end = time.monotonic() + patience_s
    while not is_so():
        assert time.monotonic() < end, f"it never came that {what}"
        time.sleep(0.05)
