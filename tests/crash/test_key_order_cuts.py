"""A power cut or a kill at random disk calls while keys decide who is next: the order of each key is kept."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

import holdfast
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from tests.crash.chained_disk import ChainedDisk

FOLDER = "/data/orders"
KEYS = "abc"


def open_queue(disk: SimulatedDisk, clock: ManualClock, seed: int, durability: str) -> holdfast.Queue[Any]:
    return holdfast.open(
        FOLDER,
        world=World(clock=clock, disk=disk, ids=SeededIds(seed)),
        durability=durability,
        body_type=int,
        key_order=True,
        min_free_bytes=0,
        backoff_ms=100,
        max_attempts=3,
        snapshot_events=100,
        segment_bytes=4096,
    )


class History:
    """Puts, acks, nacks, rejects and ended leases in any order; and what was promised by then."""

    def __init__(self, seed: int, durability: str, on_call: Callable[[History], None], disk: Any = None) -> None:
        self.random = random.Random(seed)
        self.durability = durability
        self.clock = ManualClock()
        self.disk = disk or SimulatedDisk()
        self.put: dict[int, str] = {}  # number -> key, of all that were begun
        self.safe: set[int] = set()  # stored, as was answered
        self.settled: set[int] = set()  # acked or rejected, at least begun
        self.gone: set[int] = set()  # acked, as was answered, with a sync
        self.held: dict[int, Any] = {}
        self.q = open_queue(self.disk, self.clock, seed, durability)
        self.disk.on_call = lambda _call: on_call(self)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.random.choice([self.publish, self.publish, self.receive, self.ack, self.ack, self.nack, self.reject,
                                self.wait])()  # fmt: skip

    def publish(self) -> None:
        numbers = range(len(self.put), len(self.put) + self.random.randint(1, 3))
        self.put |= {number: self.random.choice(KEYS) for number in numbers}
        self.q.put_many([holdfast.NewMessage(body=number, key=self.put[number]) for number in numbers])
        self.safe.update(numbers)

    def receive(self) -> None:
        for message in self.q.get_many(self.random.randint(1, 4), timeout=0):
            older = [n for n in self.safe - self.settled if n < message.body and self.put[n] == self.put[message.body]]
            assert older == [], "an older one of its key is not settled"
            self.held[message.body] = message

    def pick(self) -> Any:
        return self.held.pop(self.random.choice(sorted(self.held))) if self.held else None

    def ack(self) -> None:
        message = self.pick()
        if message is not None:
            self.settled.add(message.body)
            message.ack(durability="fsync")
            self.gone.add(message.body)

    def nack(self) -> None:
        message = self.pick()
        if message is not None:
            if message.attempt == 3:
                self.settled.add(message.body)
            message.nack(delay=self.random.choice([0, 1]))

    def reject(self) -> None:
        message = self.pick()
        if message is not None and self.random.random() < 0.3:
            self.settled.add(message.body)
            message.reject()
        elif message is not None:
            self.held[message.body] = message

    def wait(self) -> None:
        for message in self.held.values():
            if message.attempt == 3:
                self.settled.add(message.body)
        seconds = self.random.choice([1, 40])
        if seconds == 40:
            self.held.clear()  # nobody comes back to them
        self.clock.advance(seconds=seconds)
        self.q._port.engine.tick()


def check_order(history: History, disk: SimulatedDisk, seed: int, *, lossy: bool) -> None:
    """Whatever is left comes in order, key by key, one at a time, and what should come does."""
    clock = ManualClock(history.clock.now_ns())
    q = open_queue(disk, clock, seed, history.durability)
    seen: dict[str, list[int]] = {key: [] for key in KEYS}
    for _ in range(400):
        taken = q.get_many(5, timeout=0)
        keys = [history.put[message.body] for message in taken]
        assert len(keys) == len(set(keys)), "two of a key at a time"
        for message, key in zip(taken, keys, strict=True):
            seen[key].append(message.body)
        q.ack_many(taken)
        if not taken:
            if not q.stats().delayed:
                break
            clock.advance(seconds=1)
            q._port.engine.tick()
    dead = {message.body for message in q.messages("dead")}  # the holder of a third attempt may be gone
    for key, numbers in seen.items():
        assert numbers == sorted(set(numbers)), f"key {key} came out of order"
        missing = {n for n in history.safe - history.settled if history.put[n] == key} - {*numbers, *dead}
        assert lossy or not missing, f"{missing} of key {key} never came"
        assert not history.gone.intersection(numbers), "acked, and came again"
        assert not dead.intersection(numbers), "handed out, and dead"
    assert q.stats().ready == 0
    q.close()


@pytest.mark.parametrize("durability", ["fsync", "os"])
@pytest.mark.parametrize("how", ["cut", "kill", "another machine"])
def test_each_key_keeps_its_order_wherever_it_stops(how: str, durability: str, scale: Any):
    states, seed = 0, 0
    wanted = scale(40, 20_000)
    while states < wanted:
        rng = random.Random(seed)

        def stop(history: History, rng: random.Random = rng, seed: int = seed) -> None:
            nonlocal states
            if rng.random() < 0.03:
                states += 1
                disk = history.disk.kill() if how == "kill" else history.disk.cut(rng)
                check_order(history, disk, -seed - 1, lossy=how != "kill" and durability == "os")

        try:
            disk = ChainedDisk(FOLDER, seed=seed, faults=0.1) if how == "another machine" else None
            History(seed, durability, stop, disk).run(rng.choice([10, 40]))
        except BaseException as error:
            error.add_note(f"history seed {seed}, {durability}, {how}")
            raise
        seed += 1
