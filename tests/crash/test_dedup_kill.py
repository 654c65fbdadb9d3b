"""kill -9 while several threads publish with dedup ids to several partitions: no id is stored twice, none is lost."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path

import holdfast
from holdfast.broker.messages import DEDUP_ID

ROUNDS = 6
PATIENCE_S = 60


def publish(folder: str, acknowledged: Connection, seed: int) -> None:
    """Own the folder until somebody kills us: each id goes to two partitions, and memory is saved all the time."""
    broker = holdfast.open_broker(folder)
    broker.publish("orders", b"", dedup_id="begin")
    topic = broker._port.engine.topic("orders")
    assert topic.duplicates.index is not None
    topic.duplicates.index._max_recent = 5
    telling = threading.Lock()

    def work(number: int) -> None:
        chance = random.Random(seed * 10 + number)
        for n in range(100_000):
            dedup_id = f"{seed}-{n}"
            delay = 1_000 if n % 7 == 0 else None
            stored = broker.publish("orders", b"", dedup_id=dedup_id, partition=chance.randrange(3), delay=delay)
            with telling:
                acknowledged.send((dedup_id, stored.id))

    for number in range(3):
        threading.Thread(target=work, args=[number], daemon=True).start()
    while True:
        broker._port.engine.tick()
        topic.duplicates.save()


def killed(folder: Path, seed: int) -> list[tuple[str, str]]:
    """What a process was answered until it was killed."""
    context = multiprocessing.get_context("spawn")
    reading, writing = context.Pipe(duplex=False)
    process = context.Process(target=publish, args=[str(folder), writing, seed])
    process.start()
    writing.close()
    answers: list[tuple[str, str]] = []
    try:
        assert reading.poll(PATIENCE_S)
        end = time.monotonic() + random.Random(seed).uniform(0.1, 0.6)
        while time.monotonic() < end:
            if reading.poll(0.01):
                answers.append(reading.recv())
    finally:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    try:
        while reading.poll(0):
            answers.append(reading.recv())
    except EOFError:
        pass  # it died in the middle of a note
    return answers


def test_no_id_is_stored_twice_and_none_is_forgotten_however_often_the_process_is_killed(tmp_path: Path):
    with holdfast.open_broker(tmp_path) as broker:
        broker.create_topic("orders", partitions=3)
    acknowledged: dict[str, str] = {}
    for seed in range(ROUNDS):
        for dedup_id, message_id in killed(tmp_path, seed):
            assert acknowledged.setdefault(dedup_id, message_id) == message_id
    assert len(acknowledged) > ROUNDS
    with holdfast.open_broker(tmp_path) as broker:
        for dedup_id, message_id in acknowledged.items():
            again = broker.publish("orders", b"", key="another", dedup_id=dedup_id)
            assert (again.duplicate, again.id) == (True, message_id)
        found: Counter[bytes] = Counter()
        for partition in broker._port.engine.topic("orders").partitions:
            logs = [partition.log] if partition.delayed is None else [partition.log, partition.delayed.intake]
            for log in logs:
                for frame in log.read(log.start):
                    found.update(
                        value for record in frame.records() for name, value in record.headers if name == DEDUP_ID
                    )
        assert found.most_common(1)[0][1] == 1
