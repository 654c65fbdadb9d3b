"""How long a shard is without an owner when one dies, and what a call costs that another node passes on.

    python -m bench.cluster [--rounds N]

Three nodes on this machine share a folder. A client publishes with fsync through a node that is not the owner, one call
after the other; the pause is the longest call after the owner was killed (kill -9), stopped (SIGSTOP) or told to end
(SIGTERM). What is lost is counted with each durability: what was acknowledged before kill -9, and is not stored
afterwards. The cost of a call is measured in turns, with a connection each: at the owner; by a client that knows only
another node, which tells it to go straight to the owner; and by one that does not listen to that.
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as folder, cluster(Path(folder), lease="3s") as three:
        compare(three)
        for durability in ("fsync", "interval", "os"):
            for _ in range(rounds):
                count, age_s = lost_after_kill(three, durability)
                print(f"{durability}: {count} acknowledged messages lost, the oldest {age_s * 1000:.0f} ms old")
        for name, number in (("SIGTERM", signal.SIGTERM), ("kill -9", signal.SIGKILL), ("SIGSTOP", signal.SIGSTOP)):
            pauses = [pause_after(three, number) for _ in range(rounds)]
            print(f"{name}: pauses of {', '.join(f'{pause:.2f}' for pause in pauses)} s")


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


if __name__ == "__main__":
    main()
