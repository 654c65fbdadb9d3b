"""A cluster in bad times: faults from a seed, clients of every kind, and checks of all that they were told.

    python -m tests.nemesis.run [--store seaweedfs|postgres|file] [--seed N] [--seconds S] [--nodes N] [--faults A,B]

It prints one line of JSON. A run that finds something keeps its folder, in which are the history, a line for each
fault, and what the nodes logged. The seed decides which faults come and when, not how the machine divides its time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import holdfast
from holdfast.errors import Empty, HoldfastError, UnknownTopic
from tests.integration.process_gear import COMMAND, plain_environment
from tests.integration.store_servers import KEYS, StoreServer, postgres_server, weed_server
from tests.nemesis import clients
from tests.nemesis.checks import Left, check_all, tally
from tests.nemesis.faults import FAULTS
from tests.nemesis.history import read_history
from tests.nemesis.network import INSIDE, STORE, Namespaces, Network, Proxies, can_have_namespaces, command_inside
from tests.nemesis.node import CLOCK, MISTAKE, PLANTED, set_clock

LEASE_S = 2
SHARDS = 6
PATIENCE_S = 90
PLACES = 2  # from which clients call
USUAL = (
    "put",
    "take",
    "take",
    "stream",
    "consume",
    "consume",
    "read",
    "produce",
    "lock",
    "lock",
    "look",
    "swap",
    "swap",
)


class NoNode(Exception):
    """There is no node to which the fault could happen now."""


class Program:
    """A process that is started again and again."""

    def __init__(self, name: str, command: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        self.name, self._command, self._environ, self._log = name, list(command), dict(environ), log
        self._process: subprocess.Popen[bytes] | None = None
        self.frozen = False

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        assert not self.is_running
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self._environ
            )
        self.frozen = False

    def send(self, number: int) -> None:
        """Send a signal to the program itself, which may be the child of what gave it a process space."""
        assert self._process is not None
        pid = self._process.pid
        if "unshare" in self._command:
            deadline = time.monotonic() + PATIENCE_S
            while self.is_running and time.monotonic() < deadline:
                children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
                if children:
                    pid = int(children[0])
                    break
                time.sleep(0.01)
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    def kill(self) -> None:
        if self._process is not None:
            self.send(signal.SIGKILL)
            self._process.wait()

    def stop(self) -> None:
        if self._process is not None:
            self.send(signal.SIGTERM)
            try:
                self._process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self.send(signal.SIGABRT)
                raise

    def freeze(self) -> None:
        self.send(signal.SIGSTOP)
        self.frozen = True

    def thaw(self) -> None:
        self.send(signal.SIGCONT)
        self.frozen = False


class Worker(Program):
    """A process of clients. Each of its lives has a name of its own."""

    def __init__(self, kind: str, name: str, before: Sequence[str], urls: str, history: Path, seed: int, log: Path):
        super().__init__(name, [], plain_environment(), log)
        self._words = (kind, urls, str(history), str(seed))
        self._before = before
        self._lives = 0

    def start(self) -> None:
        kind, urls, history, seed = self._words
        name = f"{self.name}.{self._lives}"
        self._lives += 1
        program = [sys.executable, "-m", "tests.nemesis.clients", kind, name, urls, history, seed]
        self._command = [*self._before, *program]
        super().start()


class Scene:
    """All that takes part: the network, the store, nodes, clients. Faults act on it."""

    def __init__(self, folder: Path, options: argparse.Namespace, network: Network, closing: ExitStack) -> None:
        self.folder, self.network = folder, network
        self.rng = random.Random(options.seed)
        names = [f"node{number}" for number in range(options.nodes)]
        self.places = [f"clients{number}" for number in range(PLACES)]
        for member in (STORE, *names, *self.places):
            network.add(member)
        self.store, url, environ = self._store(options.store, closing)
        place = f"{url}/jobs" if options.store == "postgres" else url
        subprocess.run(
            [*COMMAND, "cluster", "init", place, "--shards", str(SHARDS), "--lease", f"{LEASE_S}s"],
            check=True, env={**plain_environment(), **environ}, timeout=PATIENCE_S, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        self._clocks = folder / "clocks"
        self._clocks.mkdir()
        self._cuts: set[tuple[str, str]] = set()
        self.direct: list[str] = []
        ports = {name: network.port() for name in names}
        self.nodes = [self._node(name, ports[name], place, environ, options) for name in names]
        for node in self.nodes:
            closing.callback(node.kill)
        self.workers: list[Worker] = []
        kinds = options.clients.split(",") if options.clients else USUAL
        for number, kind in enumerate(kinds):
            source = self.places[number % PLACES]
            urls = [network.way(source, name, f"http://{network.host(name)}:{ports[name]}") for name in names]
            self.rng.shuffle(urls)
            worker = Worker(
                kind, f"{kind}{number}", network.command(source), ",".join(urls), folder / "history", options.seed,
                folder / "clients.log",
            )  # fmt: skip
            self.workers.append(worker)
            closing.callback(worker.kill)

    def _store(self, kind: str, closing: ExitStack) -> tuple[StoreServer, str, dict[str, str]]:
        host = self.network.host(STORE)
        environ: dict[str, str] = {}
        if kind == "seaweedfs":
            server, url = weed_server(self._made("weed"), host, self.network.command(STORE))
            environ = {"AWS_ENDPOINT_URL": url, **KEYS, "AWS_SKIP_SIGNATURE": "true"}
            url = "s3://holdfast/jobs"
        else:
            home = Path(tempfile.mkdtemp(prefix="holdfast-pg-"))
            closing.callback(shutil.rmtree, home, ignore_errors=True)
            before = self.network.command(STORE, user=(65534, 65534))
            server, url = postgres_server(self.folder, home, host, before)
        server.begin()
        closing.callback(server.end)
        server.crash()
        server.start()
        return server, url, environ

    def _made(self, name: str) -> Path:
        return self.folder / name

    def _node(self, name: str, port: int, place: str, environ: dict[str, str], options: argparse.Namespace) -> Program:
        network = self.network
        here = f"http://{network.host(name)}:{port}"
        self.direct.append(here)
        advertised = network.way("nodes", name, here) if network.name == "proxies" else here
        endpoint = environ.get("AWS_ENDPOINT_URL")
        given = {**plain_environment(), **environ, "XDG_CACHE_HOME": str(self.folder / "cache")}
        if endpoint:
            given["AWS_ENDPOINT_URL"] = network.way(name, STORE, endpoint)
        else:
            place = network.way(name, STORE, place)
        clock = str(self._clocks / name)
        set_clock(clock, 0)
        given |= {CLOCK: clock, MISTAKE: options.planted}
        words = [
            sys.executable, "-m", "tests.nemesis.node", "serve", "--cluster", place, "--host", network.host(name),
            "--port", str(port), "--node-id", name, "--advertise", advertised,
            "--allow-anonymous-network", "--allowed-host", network.host(name),
        ]  # fmt: skip
        log = self.folder / f"{name}.log"
        return Program(name, [*network.command(name, machine=True), *words], given, log)

    # What faults use

    def some_node(self) -> Any:
        """A node that is well; raises NoNode if there is none to spare."""
        well = [node for node in self.nodes if node.is_running and not node.frozen]
        if not well:
            raise NoNode
        return self.rng.choice(well)

    def cut(self, source: str, target: str) -> bool:
        """Lose what the source sends to the target; returns whether that is new."""
        if (source, target) in self._cuts:
            return False
        self._cuts.add((source, target))
        self.network.drop(source, target)
        return True

    def mend(self, source: str, target: str) -> None:
        self._cuts.discard((source, target))
        self.network.heal(source, target)

    def set_clock(self, node: Program, seconds: int) -> None:
        """Let the wall clock of a node differ from the machine's."""
        set_clock(str(self._clocks / node.name), seconds)

    def is_ready(self, node: Program) -> bool:
        from tests.integration.http_gear import Caller

        url = self.direct[self.nodes.index(node)]
        with suppress(OSError):
            return Caller(url).get("/readyz", timeout_s=5).status == 200
        return False

    def wait_until_ready(self, *nodes: Program) -> None:
        """Return when these nodes know the owner of each shard."""
        deadline = time.monotonic() + PATIENCE_S
        for node in nodes:
            while not self.is_ready(node):
                if not node.is_running:
                    node.start()  # it could not start while the store or the network was bad
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{node.name} does not know the owners of all shards")
                time.sleep(0.1)


def torment(scene: Scene, kinds: Sequence[str], seconds: float) -> Counter[str]:
    """Do to the scene what the seed says, one or two things at a time, until the time is over; undo all."""
    counts: Counter[str] = Counter()
    open_: list[tuple[float, Iterator[str]]] = []
    end = time.monotonic() + seconds
    with (scene.folder / "faults.txt").open("w") as notes:
        while time.monotonic() < end:
            kind = scene.rng.choice(kinds)
            lasts, pause, both = scene.rng.uniform(0.5, 6), scene.rng.uniform(0.5, 3), scene.rng.random() < 0.3
            harm = FAULTS[kind](scene)
            try:
                what = next(harm)
            except NoNode:
                continue
            counts[kind] += 1
            notes.write(f"{time.monotonic():.3f} {kind}: {what}, for {lasts:.1f} s\n")
            notes.flush()
            open_.append((time.monotonic() + lasts, harm))
            if both and len(open_) < 2:
                continue
            while open_:
                until, harm = open_.pop(0)
                time.sleep(max(until - time.monotonic(), 0))
                next(harm, None)
                notes.write(f"{time.monotonic():.3f} over\n")
            time.sleep(pause)
        for _, harm in open_:
            next(harm, None)
    return counts


def what_is_left(scene: Scene) -> Left:
    """Take all messages that are left in queues, and read all streams."""
    left = Left()
    with holdfast.connect(scene.direct, timeout=PATIENCE_S) as broker:
        for number in range(clients.TOPICS):
            topic = clients.topic_of("queue", number)
            queue = broker.queue(topic)
            with suppress(Empty):
                while True:  # leases of clients that are gone end, too
                    message = queue.get(timeout=clients.LEASE_S + 2, lease=60)
                    left.queued.append((topic, message.body.decode()))
                    message.ack()
            for kind in ("stream", "produced"):
                topic = clients.topic_of(kind, number)
                for partition in range(clients.PARTITIONS):
                    left.stored[topic, partition] = list(_stored(broker, topic, partition))
    return left


def _stored(broker: holdfast.Broker, topic: str, partition: int) -> Iterator[tuple[int, str]]:
    offset = 0
    with suppress(UnknownTopic):
        while found := broker.read(topic, partition=partition, offset=offset, limit=1_000):
            yield from ((each.offset, each.body.decode()) for each in found)
            offset = found[-1].offset + 1


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One run; returns what it did and found."""
    network: Network = Namespaces() if os.environ.get(INSIDE) else Proxies()
    told: dict[str, Any] = {
        "seed": options.seed,
        "store": options.store,
        "network": network.name,
        "nodes": options.nodes,
    }
    with ExitStack() as closing:
        closing.callback(network.close)
        scene = Scene(folder, options, network, closing)
        for node in scene.nodes:
            node.start()
        scene.wait_until_ready(*scene.nodes)
        with holdfast.connect(scene.direct, timeout=PATIENCE_S) as broker:
            for number in range(clients.TOPICS):
                broker.create_topic(clients.topic_of("queue", number), exist_ok=True, max_attempts=1000)
                for kind in ("stream", "produced"):
                    broker.create_topic(clients.topic_of(kind, number), exist_ok=True, partitions=clients.PARTITIONS)
        for worker in scene.workers:
            worker.start()
        kinds = options.faults.split(",") if options.faults else list(FAULTS)
        time.sleep(2)
        told["faults"] = dict(torment(scene, kinds, options.seconds))
        for node in scene.nodes:
            if not node.is_running:
                node.start()
        scene.wait_until_ready(*scene.nodes)
        time.sleep(2)
        for worker in scene.workers:
            if worker.is_running:
                worker.send(signal.SIGTERM)
        for worker in scene.workers:
            worker.stop()
        left = what_is_left(scene)
    events = read_history(folder / "history")
    told["calls"] = tally(events)
    told["found"] = {name: found[:20] for name, found in check_all(events, left).items()}
    (folder / "left.json").write_text(json.dumps([left.queued, [[*at, each] for at, each in left.stored.items()]]))
    return told


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", choices=["seaweedfs", "postgres"], default="seaweedfs")
    parser.add_argument("--network", choices=["auto", "namespaces", "proxies"], default="auto")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--faults", default="", help=", ".join(FAULTS))
    parser.add_argument("--clients", default="", help=", ".join(clients.KINDS))
    parser.add_argument("--folder", default=None, help="where the folder of the run is made")
    parser.add_argument("--keep", action="store_true", help="keep the folder of a good run, too")
    parser.add_argument("--planted", choices=["", *PLANTED], default="", help="a mistake to plant in each node")
    options = parser.parse_args()
    wants = options.network == "namespaces" or (options.network == "auto" and can_have_namespaces())
    if wants and not os.environ.get(INSIDE):
        command = command_inside()
        os.execvp(command[0], command)
    if options.seed is None:
        options.seed = random.randrange(2**32)
    folder = Path(tempfile.mkdtemp(prefix="nemesis-", dir=options.folder))
    sys.stderr.write(f"seed {options.seed}, in {folder}\n")
    try:
        told = run(options, folder)
    except (HoldfastError, OSError, AssertionError, subprocess.SubprocessError) as error:
        told = {"seed": options.seed, "failed": f"{type(error).__name__}: {error}"}
    is_good = not told.get("found") and "failed" not in told
    if is_good and not options.keep:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        told["folder"] = str(folder)
    sys.stdout.write(json.dumps(told) + "\n")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
