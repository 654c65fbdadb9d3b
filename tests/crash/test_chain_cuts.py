"""Random histories of a queue and of a broker in a store: whoever comes next finds all that was promised."""

from __future__ import annotations

import random
from typing import Any

import pytest

from holdfast.env.chain.disk import ChainFile
from tests.crash import (
    broker_histories,
    broker_promises,
    histories,
    queue_histories,
    queue_promises,
    test_delayed_crash,
)
from tests.crash.chained_disk import ChainedDisk

# The cache is lost with its process, so here a kill is no less than a power cut.
WITHOUT = "kill"


@pytest.mark.parametrize("faults", [0.0, 0.3], ids=["good network", "bad network"])
@pytest.mark.parametrize("durability", ["fsync", "os"])
def test_a_queue_in_a_store_loses_nothing_promised_with_its_machine(durability, faults, scale):
    states, seed = 0, 0
    while states < scale(60, 50_000):
        states += lose_machines(queue_histories, queue_promises, seed, durability, faults)
        seed += 1


@pytest.mark.parametrize("durability", ["fsync", "os"])
def test_a_broker_in_a_store_loses_nothing_promised_with_its_machine(durability, scale):
    states, seed = 0, 0
    while states < scale(15, 20_000):
        states += lose_machines(broker_histories, broker_promises, seed, durability, 0.1)
        seed += 1


@pytest.mark.parametrize("faults", [0.0, 0.3], ids=["good network", "bad network"])
def test_a_log_in_a_store_loses_nothing_promised_with_its_machine(faults, scale):
    def check(history: Any, disk: ChainedDisk, seed: int) -> None:
        histories.check_after_cut(history, disk, seed, write_again=seed % 2 == 0)

    def start(seed: int, stop: Any) -> Any:
        disk = ChainedDisk(histories.FOLDER, seed=seed, faults=faults)
        return histories.History(seed, maps=False, on_cut_point=stop, disk=disk)

    lose_machines_often(start, check, scale(100, 50_000))


def test_delayed_messages_in_a_store_are_released_once_whatever_machine_is_lost(scale):
    def check(history: Any, disk: ChainedDisk, seed: int) -> None:
        test_delayed_crash.check_left_over(history, disk, set(history.promises.durable), random.Random(seed))

    def start(seed: int, stop: Any) -> Any:
        return test_delayed_crash.History(seed, stop, ChainedDisk("data", seed=seed, faults=0.1))

    lose_machines_often(start, check, scale(60, 20_000))


def lose_machines_often(start: Any, check: Any, wanted: int) -> None:
    """Run one history after the other, and let another machine take over at some of their write points."""
    states = seed = 0
    while states < wanted:
        rng = random.Random(seed)

        def stop(history: Any, call: str, rng: random.Random = rng, seed: int = seed) -> None:
            nonlocal states
            if rng.random() < 0.05:
                states += 1
                check(history, history.disk.cut(rng), seed)

        try:
            start(seed, stop).run(rng.choice([5, 20]))
        except BaseException as error:
            error.add_note(f"history seed {seed}, state {states}")
            raise
        seed += 1


def test_a_sync_that_waits_for_nothing_is_found(monkeypatch):
    """So that we know that these histories can fail."""
    monkeypatch.setattr(ChainFile, "sync", lambda self: None)
    with pytest.raises(AssertionError):
        for seed in range(50):
            lose_machines(queue_histories, queue_promises, seed, "fsync", 0.0)


def lose_machines(stories: Any, promises: Any, seed: int, durability: str, faults: float) -> int:
    """Run one history, and let another machine take over at some of its write points."""
    rng = random.Random(seed)
    states = 0
    weights = {name: weight for name, weight in stories.WEIGHTS.items() if name != WITHOUT}

    def stop(history: Any, call: str) -> None:
        nonlocal states
        if rng.random() < 0.03:
            states += 1
            promises.check_after_cut(history, history.disk.cut(rng))

    try:
        disk = ChainedDisk(promises.FOLDER, seed=seed, faults=faults)
        kind = stories.QueueHistory if stories is queue_histories else stories.BrokerHistory
        history = kind(seed, durability=durability, on_cut_point=stop, disk=disk)
        for _ in range(rng.choice([5, 20, 60])):
            if rng.random() < 0.1:
                history.disk.checkpoint()
            history.step(rng.choices(list(weights), list(weights.values()))[0])
        history.step("close")
    except BaseException as error:
        error.add_note(f"history seed {seed}, {durability}, state {states}")
        raise
    return states
