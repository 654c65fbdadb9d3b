"""A check after a crash of a healthy system finds nothing lost: whoever followed its advice would lose data."""

from __future__ import annotations

import random

import pytest

from holdfast.broker.check import check_folder
from holdfast.env import Ids, ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from tests.crash.queue_histories import QueueHistory
from tests.crash.queue_promises import FOLDER, small_queue
from tests.crash.queue_stories import OPERATIONS

AFTER_A_RESTART = 1_000_007


def alarms(disk: SimulatedDisk, ids: Ids) -> list[str]:
    """All that a check calls damage."""
    if not disk.exists(f"{FOLDER}/topics"):
        return []
    report = check_folder(FOLDER, World(clock=ManualClock(), disk=disk, ids=ids))
    found = [
        f"{part.part.name}: {finding.what}"
        for part in report.parts
        for finding in part.log.findings
        if finding.severity == "damage"
    ]
    return [*found, *(what for part in report.parts for what in part.wrong), *report.missing, *report.wrong]


def stop_everywhere(history: QueueHistory, rng: random.Random) -> None:
    """Look at what a power cut and what a kill leave."""
    assert alarms(history.disk.cut(rng), SeededIds(AFTER_A_RESTART)) == []
    assert alarms(history.disk.kill(), history.ids) == []


@pytest.mark.parametrize("durability", ["fsync", "os"])
def test_nothing_is_missed_wherever_making_a_queue_is_cut_short(durability):
    rng = random.Random(durability)
    for seed in range(3):

        def stop(history: QueueHistory, _: str) -> None:
            stop_everywhere(history, rng)

        QueueHistory(seed, durability=durability, on_cut_point=stop).do(lambda: None)


@pytest.mark.slow
@pytest.mark.parametrize("durability", ["fsync", "os"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_nothing_is_missed_wherever_an_operation_is_cut_short(name, durability):
    prepare, operate = OPERATIONS[name]
    rng = random.Random(name)
    history = QueueHistory(1, durability=durability)
    prepare(history)
    history.cut_with(lambda history, _: stop_everywhere(history, rng))
    history.do(lambda: operate(history))
    for _ in range(3):
        stop_everywhere(history, rng)


def test_what_retention_took_behind_acks_is_not_missed_though_the_state_file_tells_of_an_older_end():
    disk, clock = SimulatedDisk(), ManualClock()
    clock.advance(seconds=5_000)
    queue = small_queue(
        disk, clock, SeededIds(5), durability="os", segment_messages=2, retention_segments=1, retention_check_ms=1_000
    )
    for n in range(30):
        queue.put(b"%d " % n)
    queue._port.deliveries[0].save()  # a snapshot that knows of no ack
    for message in queue.get_many(20):
        message.ack()
    for _ in range(5):
        clock.advance(seconds=2)
        queue._port.engine.tick()
    assert queue._port.deliveries[0].partition.log.start == 20
    for seed in range(20):
        assert alarms(disk.cut(random.Random(seed)), SeededIds(AFTER_A_RESTART)) == []


@pytest.mark.parametrize("durability", ["fsync", "os"])
def test_nothing_is_missed_after_a_failed_disk_was_mounted_anew_without_a_restart(durability):
    for seed in range(6):
        rng = random.Random(seed)

        def remount(history: QueueHistory, _: str, rng: random.Random = rng) -> None:
            if rng.random() < 0.05:
                disk = history.disk.remount(rng)
                assert alarms(disk, history.ids) == []
                small_queue(disk, ManualClock(history.clock.now_ns()), history.ids, durability=history.durability)
                assert alarms(disk, history.ids) == []

        QueueHistory(seed, durability=durability, maps=seed % 2 == 0, on_cut_point=remount).run(steps=30)
