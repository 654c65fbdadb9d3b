"""A power cut at random disk calls of random queue histories, and at every call of the moves that span two logs."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from holdfast.env import ManualClock, SeededIds
from holdfast.env.sim.disk import SimulatedDisk
from tests.crash.queue_histories import QueueHistory
from tests.crash.queue_promises import check_after_cut, number_of, small_queue
from tests.crash.queue_stories import OPERATIONS, release

SLICES = 4


@pytest.mark.parametrize("durability", ["fsync", "os"])
@pytest.mark.parametrize("part", range(SLICES))
def test_nothing_that_was_promised_is_undone_wherever_the_power_is_cut(durability, part, scale):
    wanted = scale(240, 100_000) // SLICES
    states, seed = 0, part * 1_000_000
    while states < wanted:
        states += stop_here_and_there(seed, durability, lambda history, rng: history.disk.cut(rng))
        seed += 1


def test_nothing_that_was_answered_is_undone_wherever_the_process_is_killed(scale):
    states, seed = 0, 0
    while states < scale(150, 50_000):
        states += stop_here_and_there(seed, "os", lambda history, rng: history.disk.kill(), killed=True)
        seed += 1


def test_a_second_cut_during_recovery_undoes_nothing_either(scale):
    for seed in range(scale(8, 3_000)):
        rng = random.Random(seed)

        def cut(history: QueueHistory, call: str, rng: random.Random = rng, seed: int = seed) -> None:
            if rng.random() < 0.01:
                for disk in cut_while_opening(history, history.disk.cut(rng), rng):
                    check_after_cut(history, disk, go_on=rng.random() < 0.3)

        QueueHistory(seed, durability=["fsync", "os"][seed % 2], on_cut_point=cut).run(steps=30)


def stop_here_and_there(seed: int, durability: str, left_over: Callable, *, killed: bool = False) -> int:
    """Run one history, and look at one possible disk after some of its write points."""
    rng = random.Random(seed)
    states = 0

    def stop(history: QueueHistory, call: str) -> None:
        nonlocal states
        if rng.random() < 0.04:
            states += 1
            check_after_cut(history, left_over(history, rng), killed=killed)

    try:
        history = QueueHistory(seed, durability=durability, maps=seed % 2 == 0, on_cut_point=stop)
        history.run(steps=rng.choice([5, 20, 60]), without="power_cut" if killed else None)
    except BaseException as error:
        error.add_note(f"history seed {seed}, {durability}, state {states}")
        raise
    return states


def cut_while_opening(history: QueueHistory, disk: SimulatedDisk, rng: random.Random) -> list[SimulatedDisk]:
    """Open what a cut left, and cut again, at some of the write points of the recovery."""
    disks: list[SimulatedDisk] = []

    def cut(call: str) -> None:
        if rng.random() < 0.1:
            disks.append(disk.cut(rng))

    disk.on_call = cut
    small_queue(disk, ManualClock(history.clock.now_ns()), SeededIds(-history.seed - 2), durability=history.durability)
    disk.on_call = None
    return disks


# Inside one operation, at every call


@pytest.mark.parametrize("durability", ["fsync", "os"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_cut_inside_an_operation_undoes_nothing(name, durability, scale):
    prepare, operate = OPERATIONS[name]
    for seed in range(scale(1, 200)):
        rng = random.Random(f"{name} {seed}")

        def cut(history: QueueHistory, call: str, rng: random.Random = rng) -> None:
            check_after_cut(history, history.disk.cut(rng))

        maps = (seed + len(name)) % 2 == 0
        history = QueueHistory(seed, durability=durability, maps=maps)
        prepare(history)
        history.cut_with(cut)
        history.do(lambda history=history: operate(history))
        for _ in range(3):
            check_after_cut(history, history.disk.cut(rng))


def test_a_cut_while_a_queue_is_made_leaves_one_that_opens():
    for seed in range(3):
        rng = random.Random(seed)

        def cut(history: QueueHistory, call: str, rng: random.Random = rng) -> None:
            check_after_cut(history, history.disk.cut(rng))

        QueueHistory(seed, durability="os", on_cut_point=cut).do(lambda: None)


# Each of these was broken once


def every_cut(disk: SimulatedDisk) -> list[SimulatedDisk]:
    """What cuts of one moment may leave: all, nothing and much in between."""
    return [disk.cut(random.Random(seed)) for seed in range(40)]


def reopened(disk: SimulatedDisk, durability: str = "fsync"):
    clock = ManualClock()
    clock.step_wall(ns=3_600 * 10**9)
    return small_queue(disk, clock, SeededIds(99), durability=durability)


def everywhere(q) -> list[int]:
    """The numbers of all messages that are not done."""
    phases = ("ready", "leased", "delayed", "dead")
    return sorted(number_of(message.raw) for phase in phases for message in q.messages(phase))


def test_a_message_is_never_both_ready_and_a_dead_letter():
    history = QueueHistory(1, durability="fsync")
    history.q.put(b"0 ", durability="fsync")
    history.q.get(timeout=0).reject("never")
    for disk in every_cut(history.disk):
        assert everywhere(reopened(disk)) == [0]


def test_a_redriven_message_is_never_among_the_dead_letters_too():
    history = QueueHistory(1, durability="fsync")
    history.q.put(b"0 ", durability="fsync")
    history.q.get(timeout=0).reject("never")
    history.q.sync()
    history.q.dead.redrive()
    for disk in every_cut(history.disk):
        assert everywhere(reopened(disk)) == [0]


def test_a_redriven_message_that_is_done_and_compacted_away_does_not_come_back():
    history = QueueHistory(1, durability="fsync")
    history.q.put(b"0 ", durability="fsync")
    history.q.get(timeout=0).reject("never")
    history.q.sync()
    history.q.dead.redrive()
    history.q.get(timeout=0).ack(durability="fsync")
    left: list[SimulatedDisk] = []
    history.disk.on_call = lambda call: left.extend(every_cut(history.disk)[:4])
    history.q.compact()
    for disk in left:
        assert everywhere(reopened(disk)) == []


def test_a_queue_opens_though_the_tail_that_a_redrive_was_to_follow_is_lost():
    history = QueueHistory(1, durability="os")
    history.q.put(b"0 ", durability="fsync")
    history.q.get(timeout=0).reject("never")
    history.q.put_many([b"1 ", b"2 "], durability="os")
    left: list[SimulatedDisk] = []
    history.disk.on_call = lambda call: left.extend(every_cut(history.disk)[:10])
    history.q.dead.redrive()
    for disk in left:
        assert everywhere(reopened(disk, "os")).count(0) == 1


def test_a_synced_delayed_message_is_on_disk():
    history = QueueHistory(1, durability="os")
    history.q.put(b"0 ", delay=60)
    history.q.sync()
    for disk in every_cut(history.disk):
        assert everywhere(reopened(disk, "os")) == [0]


@pytest.mark.parametrize("end", ["ack", "reject"])
def test_a_released_message_that_was_settled_durably_is_not_released_again(end):
    history = QueueHistory(1, durability="os")
    history.q.put(b"0 ", delay=1)
    history.q.sync()
    release(history)
    message = history.q.get(timeout=0)
    message.ack(durability="fsync") if end == "ack" else message.reject("never")
    for disk in every_cut(history.disk):
        assert everywhere(reopened(disk, "os")) == ([] if end == "ack" else [0])
