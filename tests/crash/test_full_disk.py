"""Somebody else has filled the disk to its last byte: opening, acking and freeing go on, and nothing is lost."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.broker.check import check_folder
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import DiskFull

FOLDER = "/data/jobs"
FILLER = "/data/filler"
KIB = 1024
MIB = 1024 * KIB
STORED = 2_000
SETTINGS: dict[str, Any] = {"segment_bytes": 256 * KIB, "min_free_bytes": MIB}


class Machine:
    """A queue with messages of which none is handled, on a disk that has not a byte left."""

    def __init__(self, *, maps: bool, **changes: Any) -> None:
        self.disk = SimulatedDisk(capacity_bytes=16 * MIB, maps=maps)
        self.clock = ManualClock()
        self.open(**{**SETTINGS, **changes})
        self.tick()
        for _ in range(STORED):
            self.q.put(b"x" * KIB)
        self.fill()

    def open(self, **changes: Any) -> None:
        world = World(clock=self.clock, disk=self.disk, ids=SeededIds(1))
        self.q: holdfast.Queue[bytes] = holdfast.open(FOLDER, world=world, **changes)

    def restart(self, how: str) -> None:
        if how == "closed":
            self.q.close()
            self.fill()
        elif how == "killed":
            self.disk = self.disk.kill()
        if how != "open":
            self.open()

    def fill(self) -> None:
        file = self.disk.open(FILLER, write=True, create=True)
        while room := self.disk.room_bytes():
            file.write(file.size(), [bytes(room)])
        file.close()

    def free(self) -> None:
        self.disk.remove(FILLER)

    def tick(self) -> None:
        self.clock.advance(seconds=61)
        self.q._port.engine.tick()

    @property
    def reserve_bytes(self) -> int:
        return len(self.disk.contents(f"{FOLDER}/reserve"))


@pytest.fixture(params=["open", "closed", "killed"])
def machine(request: pytest.FixtureRequest, maps: bool) -> Machine:
    machine = Machine(maps=maps)
    machine.restart(request.param)
    return machine


@pytest.fixture(params=[True, False], ids=["maps", "writes"])
def maps(request: pytest.FixtureRequest) -> bool:
    wanted: bool = request.param
    return wanted


def handled(queue: holdfast.Queue[bytes], most: int = STORED) -> int:
    count = 0
    while count < most and (messages := queue.get_many(1, timeout=0)):
        messages[0].ack()
        count += 1
    return count


def test_messages_are_handled_and_what_that_frees_takes_new_ones(machine: Machine):
    with pytest.raises(DiskFull):
        machine.q.put(bytes(300 * KIB))
    done = 0
    while done < STORED:
        done += handled(machine.q, 100)
        machine.tick()
        machine.fill()  # whatever becomes free is taken at once
    assert done == STORED
    machine.free()
    machine.tick()
    assert machine.reserve_bytes == MIB
    machine.q.put(b"there is room again")
    assert handled(machine.q) == 1


def test_compacting_frees_what_is_done(machine: Machine):
    assert handled(machine.q, 1_000) == 1_000
    freed = machine.q.compact()
    assert freed.segments > 0
    assert machine.disk.room_bytes() > MIB // 2
    assert machine.q.stats().ready == STORED - 1_000


def test_retention_is_applied(machine: Machine):
    handled(machine.q, 1_000)
    machine.clock.advance(seconds=8 * 24 * 3600)
    machine.q.apply_retention()  # some went before, since the disk is full
    assert machine.q.stats().start > 800


def test_an_owner_that_comes_again_and_again_is_let_in(maps: bool):
    machine = Machine(maps=maps)
    for _ in range(20):
        machine.restart("killed")
        assert machine.q.stats().ready == STORED
    assert handled(machine.q, 10) == 10


def test_new_messages_get_nothing_of_the_reserve(maps: bool):
    machine = Machine(maps=maps, min_free_bytes=0)
    with pytest.raises(DiskFull):
        for _ in range(1_000):
            machine.q.put(b"x" * KIB)
    assert machine.reserve_bytes == MIB


def test_the_reserve_is_filled_up_when_there_is_room(maps: bool):
    machine = Machine(maps=maps)
    assert machine.q._port.engine.world.make_space(1, urgent_bytes=1_000)
    assert machine.reserve_bytes == MIB - 4 * KIB
    assert machine.q._port.engine.world.make_space(1, urgent_bytes=MIB - 4 * KIB)
    while machine.q._port.engine.world.make_space(1, urgent_bytes=1):
        pass  # as long as there are indexes
    machine.fill()
    machine.tick()
    assert machine.reserve_bytes == 0, "it would take what is there to be used now"
    machine.free()
    machine.tick()
    assert machine.reserve_bytes == MIB


@pytest.mark.parametrize("how", ["closed", "killed"])
def test_a_folder_without_a_reserve_is_opened_and_drained_too(maps: bool, how: str):
    """Such as one of an older release: indexes give the room for that, and are made anew."""
    machine = Machine(maps=maps)
    if how == "closed":
        machine.q.close()
    else:
        machine.disk = machine.disk.kill()
    machine.disk.remove(f"{FOLDER}/reserve")
    machine.fill()
    machine.open()
    assert handled(machine.q, 10) == 10
    machine.fill()  # whatever became free is taken at once
    done = 10
    while done < STORED:
        messages = machine.q.get_many(500, timeout=0)
        machine.q.ack_many(messages)
        assert machine.q.compact().segments > 0
        done += len(messages)
    machine.free()
    machine.tick()
    assert machine.reserve_bytes == MIB
    machine.q.put(b"there is room again")
    assert handled(machine.q) == 1
    machine.q.close()
    assert check_folder(FOLDER, World(clock=machine.clock, disk=machine.disk, ids=SeededIds(1))).ok


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(small)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("only root may mount a small disk")
    yield small
    subprocess.run(["umount", "--lazy", str(small)], check=True)  # a failed test may hold a file


@pytest.mark.slow
def test_a_real_disk_without_a_free_byte_is_drained_by_a_new_owner(small_disk: Path):
    with holdfast.open(small_disk / "jobs", **SETTINGS) as queue:
        for _ in range(STORED):
            queue.put(b"x" * KIB)
    with holdfast.open(small_disk / "jobs"):
        pass  # whoever comes next finds a reserve
    filler = small_disk / "filler"
    with pytest.raises(OSError, match="No space left"), filler.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
    with holdfast.open(small_disk / "jobs") as queue:
        assert handled(queue, 500) == 500
        queue.compact()
        assert queue.stats().start > 0
        assert handled(queue) == STORED - 500
        queue.compact()
        queue.put(b"there is room again")


KILLED = """
import os, sys
import holdfast
queue = holdfast.open(sys.argv[1], segment_bytes=256 * 1024, min_free_bytes=1024 * 1024)
for _ in range(int(sys.argv[2])):
    queue.put(b"x" * 1024, durability="os")
queue.sync()
os._exit(1)
"""


@pytest.mark.slow
def test_a_real_disk_without_a_free_byte_or_a_reserve_is_drained_after_a_kill(small_disk: Path):
    subprocess.run([sys.executable, "-c", KILLED, small_disk / "jobs", str(STORED)], check=False, timeout=120)
    (small_disk / "jobs/reserve").unlink(missing_ok=True)
    filler = small_disk / "filler"
    with pytest.raises(OSError, match="No space left"), filler.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
    with holdfast.open(small_disk / "jobs") as queue:
        done = 0
        while done < STORED:
            messages = queue.get_many(500, timeout=0)
            queue.ack_many(messages)
            queue.compact()
            done += len(messages)
        assert done == STORED
        queue.put(b"there is room again")
    assert check_folder(small_disk / "jobs").ok


@pytest.mark.parametrize("how", ["closed", "killed"])
def test_a_queue_opens_though_there_is_no_room_to_note_what_its_bodies_are(how: str):
    machine = Machine(maps=True)
    machine.restart(how)
    machine.q.close()
    machine.fill()
    machine.open(body_type=str)
    assert handled(machine.q, 1) == 1
    machine.q.close()
    machine.free()
    machine.open(body_type=str)
    assert machine.q._port.kept_bodies == "text"
