"""How long a shard is without an owner when one dies, and what a call costs that another node passes on.

    python -m bench.cluster [--rounds N] [--only cost,pauses,restart,topics,work]

Three nodes on this machine share a folder. A client publishes with fsync through a node that is not the owner, one call
after the other; the pause is the longest call after the owner was killed (kill -9), stopped (SIGSTOP) or told to end
(SIGTERM). The cost of a call is measured in turns, with a connection each: at the owner; by a client that knows only
another node, which tells it to go straight to the owner; and by one that does not listen to that.

`loss` counts, for each durability, what was acknowledged before kill -9 and is not stored afterwards;
`restart` restarts all nodes in turn under load and counts failed calls; `topics` has 1,000 topics on 16 shards, and
measures memory and the CPU time of idle nodes; `work` measures the CPU time of a message with one and with three nodes,
all of them called at the owner: if owners do not share work, it is the same, and more machines carry more.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path

import holdfast
from holdfast.api import port_of
from holdfast.model import Durability
from tests.integration.cluster_gear import Cluster, Node, cluster, until

WARM_S = 1.0
PATIENCE_S = 8.0
IDLE_S = 10.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(PARTS))
    options = parser.parse_args()
    for name in options.only.split(","):
        print(f"{name}, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            PARTS[name](Path(folder), options.rounds)


def cost(folder: Path, rounds: int) -> None:
    with cluster(folder, lease="3s") as three:
        compare(three)


def loss(folder: Path, rounds: int) -> None:
    with cluster(folder, lease="3s") as three:
        for durability in ("fsync", "interval", "os"):
            for _ in range(rounds):
                count, age_s = lost_after_kill(three, durability)
                print(f"{durability}: {count} acknowledged messages lost, the oldest {age_s * 1000:.0f} ms old")


def pauses(folder: Path, rounds: int) -> None:
    with cluster(folder, lease="3s") as three:
        for name, number in (("SIGTERM", signal.SIGTERM), ("kill -9", signal.SIGKILL), ("SIGSTOP", signal.SIGSTOP)):
            found = sorted(pause_after(three, number) for _ in range(rounds))
            p99 = found[min(len(found) - 1, round(0.99 * len(found)))]
            print(
                f"{name}: {rounds} rounds, median {statistics.median(found):.2f}, p99 {p99:.2f}, "
                f"longest {found[-1]:.2f} s",
                flush=True,
            )


def restart(folder: Path, rounds: int) -> None:
    """Restart each node in turn, under load."""
    with cluster(folder, lease="3s") as three:
        failed, calls, longest, ending = [], [0], [0.0], threading.Event()

        def work(topic: str) -> None:
            with three.connect() as broker, broker.queue(topic) as queue:
                while not ending.is_set():
                    began = time.monotonic()
                    try:
                        broker.publish(topic, b"x", durability="fsync")
                        queue.get(timeout=10).ack()
                    except holdfast.HoldfastError as error:
                        failed.append(repr(error))
                    calls[0] += 3
                    longest[0] = max(longest[0], time.monotonic() - began)

        topics = [three.topic_on(node, f"restart-{at}") for at, node in enumerate(three.nodes)]
        with three.connect() as broker:
            for topic in topics:
                broker.create_topic(topic)
        working = [threading.Thread(target=work, args=(topic,)) for topic in topics]
        for each in working:
            each.start()
        for _ in range(rounds):
            for node in three.nodes:
                assert node.stop() == 0
                node.start()
                three.wait_until_whole()
        ending.set()
        for each in working:
            each.join()
        print(
            f"{3 * rounds} restarts: {calls[0]} calls, {len(failed)} failed, the longest three took {longest[0]:.2f} s"
        )
        print(*failed[:5], sep="\n")


def topics(folder: Path, rounds: int) -> None:
    """1,000 topics on 16 shards, on one node and on three."""
    for nodes in (1, 3):
        with cluster(folder / str(nodes), nodes=nodes, shards=16, lease="10s") as made:
            empty = [memory_mb(node) for node in made.nodes]
            began = time.monotonic()
            with made.connect(timeout=120) as broker:
                for number in range(1_000):
                    broker.create_topic(f"topic-{number}")
                    broker.publish(f"topic-{number}", b"x" * 100)
            took_s = time.monotonic() - began
            full = [memory_mb(node) for node in made.nodes]
            before = [cpu_s(node) for node in made.nodes]
            time.sleep(IDLE_S)
            idle = [(cpu_s(node) - cpu) / IDLE_S * 100 for node, cpu in zip(made.nodes, before, strict=True)]
            for node in made.nodes:
                node.kill()
            began = time.monotonic()
            for node in made.nodes:
                node.begin()
            for node in made.nodes:
                node.wait_for_start()
            made.wait_until_whole()
            opened_s = time.monotonic() - began
        print(
            f"{nodes} nodes: {_of(empty)} MB empty, {_of(full)} MB with 1,000 topics (created in {took_s:.0f} s), "
            f"{_of(idle)} % of a core when idle, {opened_s:.1f} s to start all of them after kill -9",
            flush=True,
        )


def work(folder: Path, rounds: int) -> None:
    """The CPU time of a message at its owner: put with fsync, taken and acked."""
    for nodes in (1, 3):
        with cluster(folder / str(nodes), nodes=nodes, shards=6, lease="10s") as made:
            names = [made.topic_on(node, "work") for node in made.nodes]
            for name in names:
                made.nodes[0].request("PUT", f"/v1/queues/{name}", {})
            before, count = sum(map(cpu_s, made.nodes)), 3_000 // nodes
            began = time.monotonic()
            idle_s = WARM_S + 4.0
            time.sleep(idle_s)
            idle = (sum(map(cpu_s, made.nodes)) - before) / idle_s
            before, began = sum(map(cpu_s, made.nodes)), time.monotonic()
            working = [
                threading.Thread(target=_put_and_take, args=(f"{node.url}/{name}", count))
                for node, name in zip(made.nodes, names, strict=True)
            ]
            for each in working:
                each.start()
            for each in working:
                each.join()
            took_s = time.monotonic() - began
            spent = sum(map(cpu_s, made.nodes)) - before - idle * took_s
            print(
                f"{nodes} nodes: {spent / (count * nodes) * 1e6:.0f} us of CPU a message, {idle * 100:.1f} % idle",
                flush=True,
            )


def _put_and_take(url: str, count: int) -> None:
    with holdfast.open(url) as queue:
        for _ in range(count):
            queue.put(b"x" * 100, durability="fsync")
            queue.get(timeout=10).ack()


def _of(values: list[float]) -> str:
    return " + ".join(f"{value:.1f}" for value in values)


def memory_mb(node: Node) -> float:
    lines = Path(f"/proc/{node.running.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def cpu_s(node: Node) -> float:
    facts = Path(f"/proc/{node.running.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(facts[11]) + int(facts[12])) / os.sysconf("SC_CLK_TCK")


def compare(three: Cluster) -> None:
    """Publishing and taking at the owner and through another node."""
    owner, other = three.nodes[0], three.nodes[1]
    topic = three.topic_on(owner, "cost")
    for durability in ("os", "fsync"):
        found: dict[str, list[float]] = {"at the owner": [], "straight from another node": [], "passed on": []}
        with (
            holdfast.open(f"{owner.url}/{topic}") as here,
            holdfast.open(f"{other.url}/{topic}") as straight,
            holdfast.open(f"{other.url}/{topic}") as there,
        ):
            stay(there)
            for turn in range(12):
                for queue, times in zip((here, straight, there), found.values(), strict=True):
                    began = time.perf_counter()
                    for _ in range(200):
                        queue.put(b"x" * 100, durability=durability)
                    if turn > 1:
                        times.append((time.perf_counter() - began) / 200 * 1e6)
        direct = statistics.median(found["at the owner"])
        for name, times in found.items():
            each = statistics.median(times)
            print(f"put, {durability}: {each:.0f} us {name}, {each / direct:.2f} times")


def lost_after_kill(three: Cluster, durability: Durability) -> tuple[int, float]:
    """How many acknowledged messages are gone after kill -9 of the owner, and how old the oldest of them was."""
    owner = three.busiest()
    others = [node for node in three.nodes if node is not owner]
    topic = three.topic_on(owner, f"loss-{durability}-{time.monotonic_ns()}")
    answered: dict[int, float] = {}
    ending, failed = threading.Event(), threading.Event()

    def publish() -> None:
        with holdfast.connect(owner.url, timeout=1) as broker:
            broker.create_topic(topic)
            while not ending.is_set():
                try:
                    stored = broker.publish(topic, b"x" * 100, durability=durability)
                except holdfast.errors.HoldfastError:
                    break
                assert stored.offset is not None
                answered[stored.offset] = time.monotonic()
        failed.set()

    publishing = threading.Thread(target=publish)
    publishing.start()
    time.sleep(WARM_S)
    killed = time.monotonic()
    owner.kill()
    failed.wait(PATIENCE_S)
    ending.set()
    publishing.join()
    with three.connect(*others) as broker:
        end = broker.describe_topic(topic).partitions[0].end
    owner.start()
    three.wait_until_whole()
    lost = [at for offset, at in answered.items() if offset >= end]
    return len(lost), max((killed - at for at in lost), default=0.0)


def stay(queue: holdfast.Queue) -> None:
    """Have the client of a queue call only the address that it was given."""
    owners = port_of(queue).client.caller.owners
    owners.places.clear()
    owners.learn = lambda *_: None


def pause_after(three: Cluster, number: signal.Signals) -> float:
    """The longest call while the owner goes, seen by a client of another node."""
    owner = three.busiest()
    other = next(node for node in three.nodes if node is not owner)
    topic = three.topic_on(owner, "pause")
    longest, ending, sent = [0.0], threading.Event(), threading.Event()

    def publish() -> None:
        with three.connect(other) as broker:
            broker.create_topic(topic, exist_ok=True)
            while not ending.is_set():
                began = time.monotonic()
                broker.publish(topic, b"x", durability="fsync")
                if sent.is_set():
                    longest[0] = max(longest[0], time.monotonic() - began)

    publishing = threading.Thread(target=publish)
    publishing.start()
    time.sleep(WARM_S)
    sent.set()
    if number is signal.SIGKILL:
        owner.kill()
    elif number is signal.SIGTERM:
        owner.stop()
    else:
        owner.send(number)
    time.sleep(PATIENCE_S)
    ending.set()
    publishing.join()
    revive(three, owner, number)
    return longest[0]


def revive(three: Cluster, node: Node, number: signal.Signals) -> None:
    if number is signal.SIGSTOP:
        node.send(signal.SIGCONT)
    else:
        node.start()
    three.wait_until_whole()
    until(lambda: node.name in node.shards().values(), "the node owns shards again")
    time.sleep(1)


PARTS = {"cost": cost, "loss": loss, "pauses": pauses, "restart": restart, "topics": topics, "work": work}


if __name__ == "__main__":
    main()
