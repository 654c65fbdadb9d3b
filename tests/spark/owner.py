"""A process that owns a folder and publishes all the while: batches of several frames, single messages, with keys.

Each value names its batch, its place in it and how many there are: "7 2/30". On the topic `orders` partitions are added
and retention takes what is old every moment; `state` is compacted by key.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import holdfast
from holdfast import BrokerSettings, NewMessage, TopicSettings

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"segment_bytes": 32_768, "frame_bytes": 1024, "index_bytes": 512, "min_free_bytes": 0}
HASTY = {"retention_ms": 500, "retention_bytes": 65_536, "retention_check_ms": 200}


def make_folder(folder: str, *, hasty: bool) -> None:
    """The topics, before anybody publishes or reads."""
    with _open(folder) as broker:
        broker.create_topic("orders", partitions=2, **(HASTY if hasty else {}))
        broker.create_topic("state", cleanup="compact", compact_min_saving_percent=0, retention_check_ms=200)


def _open(folder: str) -> Any:
    topic = TopicSettings(**SMALL, sync_interval_ms=20, retention_ms=None)
    return holdfast.open_broker(folder, settings=BrokerSettings(topic=topic), durability="interval")


class Owner:
    """The process, as whoever started it sees it: it publishes until it is told to stop, or killed."""

    def __init__(self, folder: str, *, grow_s: float = 1e9, pause_s: float = 0.02) -> None:
        command = [sys.executable, "-m", "tests.spark.owner", folder, str(grow_s), str(pause_s)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "publishing\n"

    def __enter__(self) -> Owner:
        return self

    def __exit__(self, *exc_info: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()

    def stop(self) -> dict[str, list[tuple[int, int]]]:
        """Let it end in order; by topic the start and end of each partition."""
        output, _ = self.process.communicate(timeout=60)
        assert self.process.returncode == 0
        return {topic: [tuple(ends) for ends in partitions] for topic, partitions in json.loads(output).items()}


def publish(broker: Any, grow_s: float, pause_s: float, ended: threading.Event) -> None:
    rng, batch, partitions = random.Random(7), 0, 2
    began = time.monotonic()
    while not ended.wait(pause_s):
        for topic in ("orders", "orders", "state"):
            batch, count = batch + 1, rng.choice([1, 3, 30])
            keyed = topic == "state" or rng.random() < 0.3
            values = [b"%d %d/%d" % (batch, n, count) + bytes(100) for n in range(count)]
            where = rng.randrange(partitions) if topic == "orders" else 0
            if keyed:
                broker.publish_many(
                    topic, [NewMessage(body=value, key=b"%d" % rng.randrange(20)) for value in values], partition=where
                )
            elif count == 1:
                broker.publish(topic, values[0], partition=where)
            else:
                broker.publish_many(topic, values, partition=where)
        if partitions < 4 and time.monotonic() - began > grow_s * (partitions - 1):
            partitions += 1
            broker.alter_topic("orders", partitions=partitions)


def main(folder: str, grow_s: float, pause_s: float) -> None:
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    with _open(folder) as broker:
        _tell("publishing")
        publish(broker, grow_s, pause_s, ended)
        broker.sync()
        found = {name: broker.describe_topic(name).partitions for name in broker.topics()}
        _tell(json.dumps({name: [(part.start, part.end) for part in parts] for name, parts in found.items()}))


def _tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]))
