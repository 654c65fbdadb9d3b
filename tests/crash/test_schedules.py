"""Schedules after kills and power cuts: every due is fired exactly once, wherever their owner is stopped."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest

import holdfast
from holdfast.broker.messages import DEDUP_ID, mark
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from tests.unit.brokers import FOLDER, SETTINGS, Place

MINUTE = 60
CUTS = 3  # possible disks for each call
DAY = 86_400


def ids_in(broker: holdfast.Broker, topic: str = "jobs") -> list[str]:
    with broker._port.engine.using(topic) as found:
        records = [each for part in found.partitions for each in part.log.records(part.log.start)]
    return [mark(record, DEDUP_ID).decode() for record in records]


def clock_at(seconds: float) -> ManualClock:
    clock = ManualClock()
    clock.advance(seconds=seconds)
    return clock


def reopened(disk: SimulatedDisk, clock: ManualClock) -> holdfast.Broker:
    return holdfast.open_broker(FOLDER, world=World(clock=clock, disk=disk, ids=SeededIds(9)), settings=SETTINGS)


def check_left(disk: SimulatedDisk, stopped_s: float, down_s: float) -> None:
    """The next owner opens what was left, and time goes on: each due is there once, and none is forgotten."""
    clock = clock_at(stopped_s + down_s)
    with reopened(disk, clock) as broker:
        engine = broker._port.engine
        if broker.schedules.get("job") is None:  # stopped before it was stored
            return
        for _ in range(3):
            engine.tick()
            clock.advance(seconds=MINUTE)
        engine.tick()
        counts = Counter(ids_in(broker))
        assert set(counts.values()) <= {1}, counts
        found = broker.schedules.get("job")
        assert found.fired == len(counts)
        first = clock_at(0).now_ns() // 10**9 + MINUTE
        dues = {f"job@{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime(first + MINUTE * i))}" for i in range(200)}
        passed = (clock.now_ns() // 10**9 - first) // MINUTE + 1
        assert found.fired + found.missed == passed
        assert down_s > MINUTE or set(counts) <= dues


@pytest.mark.parametrize("stop", ["kill", "cut"])
@pytest.mark.parametrize("down_s", [0.0, 30.0, 900.0], ids=["at once", "soon", "late"])
def test_every_due_fires_once_wherever_the_owner_is_stopped(stop, down_s, scale):
    place, rng, left = Place(), random.Random(stop), []
    place.broker.create_topic("jobs")
    place.broker.sync()

    def look(call: str) -> None:
        stopped_s = place.clock.monotonic_ns() / 1e9
        for _ in range(scale(CUTS, 30) if stop == "cut" else 1):
            left.append((place.disk.cut(rng) if stop == "cut" else place.disk.kill(), stopped_s))

    place.disk.on_call = look
    place.broker.schedules.put("job", "jobs", b"go", every=MINUTE)
    for _ in range(3):
        place.after(seconds=MINUTE)
    place.disk.on_call = None
    place.close()
    assert len(left) > 20
    for disk, stopped_s in left:
        check_left(disk, stopped_s, down_s)


def test_a_second_stop_while_catching_up_fires_nothing_twice_either(scale):
    place, rng, left = Place(), random.Random(1), []
    place.broker.create_topic("jobs")
    place.broker.schedules.put("job", "jobs", b"go", every=MINUTE, misfire="all")
    place.disk.on_call = lambda call: left.append(place.disk.cut(rng)) if rng.random() < 0.5 else None
    place.after(seconds=MINUTE)
    place.disk.on_call = None
    place.close()
    seen = 0
    for disk in left[:: scale(2, 1)]:
        again: list[SimulatedDisk] = []
        disk.on_call = lambda call, disk=disk, again=again: again.append(disk.cut(rng))
        with reopened(disk, clock_at(3 * MINUTE)) as broker:
            broker._port.engine.tick()
            disk.on_call = None
        for other in again[:: scale(3, 1)]:
            seen += 1
            with reopened(other, clock_at(4 * MINUTE)) as broker:
                broker._port.engine.tick()
                assert Counter(Counter(ids_in(broker)).values()) == {1: 4}
    assert seen > 20


@pytest.mark.parametrize("window_ms", [1_000, 3_600_000])
def test_a_firing_that_was_not_noted_is_found_after_the_window_of_its_topic(window_ms):
    place = Place()
    place.broker.create_topic("jobs", dedup_window_ms=window_ms)
    place.broker.schedules.put("job", "jobs", b"go", every=DAY)
    place.broker.sync()
    left: list[SimulatedDisk] = []
    place.disk.on_call = lambda call: left.append(place.disk.kill())
    place.after(seconds=DAY)
    place.disk.on_call = None
    place.close()
    fired = 0
    for disk in left:
        with reopened(disk, clock_at(DAY + 2 * 3600)) as broker:
            before = len(ids_in(broker))
            broker._port.engine.tick()
            assert len(ids_in(broker)) == 1
            assert broker.schedules.get("job").fired == 1
            fired += before
    assert 0 < fired < len(left)


# Real processes


_OWNER = """
import sys, time, holdfast
with holdfast.open_broker(sys.argv[1], create=True) as broker:
    broker.create_topic("jobs", exist_ok=True)
    broker.schedules.put("job", "jobs", b"go", every=1, misfire="all")
    print("owner", flush=True)
    time.sleep(600)
"""

_SHARED = """
import sys, time, holdfast
with holdfast.open_broker(sys.argv[1]) as broker:
    broker.create_topic("jobs", exist_ok=True)
    broker.schedules.put("job", "jobs", b"go", every=1, misfire="all")
    print("open", flush=True)
    while True:
        broker.topics()
        time.sleep(0.05)
"""


def begun(script: str, folder: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", script, folder], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip() in ("owner", "open")
    return process


def ended(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def check_real(folder: str, least: int) -> None:
    with holdfast.open_broker(folder) as broker:
        broker.schedules.pause("job")
        ids = ids_in(broker)
        found = broker.schedules.get("job")
    assert len(ids) >= least
    assert len(set(ids)) == len(ids)
    seconds = sorted(holdfast_moment(each) for each in ids)
    assert seconds == [seconds[0] + i for i in range(len(seconds))], "a due is missing"
    assert (found.fired, found.missed) == (len(ids), 0)


def holdfast_moment(dedup_id: str) -> float:
    from datetime import datetime

    return datetime.fromisoformat(dedup_id.partition("@")[2]).timestamp()


@pytest.mark.serial
@pytest.mark.slow
def test_owners_that_are_killed_fire_every_second_once(tmp_path, scale):
    folder, rng = str(tmp_path / "data"), random.Random(5)
    for _ in range(scale(4, 60)):
        owner = begun(_OWNER, folder)
        time.sleep(rng.uniform(0.5, 2.0))
        ended(owner)
    check_real(folder, 3)


@pytest.mark.serial
@pytest.mark.slow
def test_two_processes_on_one_folder_fire_every_second_once_when_the_owner_is_killed(tmp_path):
    folder = str(tmp_path / "data")
    first = begun(_SHARED, folder)
    second = begun(_SHARED, folder)
    time.sleep(1.5)
    ended(first)  # it was there first, so it owned the folder
    time.sleep(3)
    third = begun(_SHARED, folder)
    ended(second)
    time.sleep(3)
    ended(third)
    check_real(folder, 5)


@pytest.mark.serial
@pytest.mark.slow
def test_a_folder_in_a_store_fires_every_second_once_when_another_machine_takes_over(tmp_path):
    url = f"file://{tmp_path}/store"
    (tmp_path / "store").mkdir()
    for _ in range(2):
        owner = begun(_OWNER, url)
        time.sleep(1.5)
        ended(owner)  # the next owner has to wait until this one counts as silent
    check_real(url, 3)
