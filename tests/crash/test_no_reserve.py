"""A disk without a free byte, and no reserve in the folder: it is opened, drained one message at a time, and recovers.

The simulated disk counts whole blocks, as real ones do, and another program takes every block that becomes free. Only
where files are not mapped it takes none after the start: there a journal finds its room when it writes, not before.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

import holdfast
from holdfast.broker.check import check_folder
from holdfast.cli.operate.measure import diagnose
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import DiskFull

FOLDER = "/data/jobs"
FILLER = "/data/filler"
RESERVE = f"{FOLDER}/reserve"
KIB = 1024
MIB = 1024 * KIB
ONE_SEGMENT, SEVERAL = 64 * MIB, 16 * KIB


class Machine:
    """A queue with messages of which none is handled, on a disk without a free byte, and without a reserve."""

    def __init__(self, *, maps: bool, segment_bytes: int, stored: int = 1_000, **changes: Any) -> None:
        self.disk = SimulatedDisk(capacity_bytes=16 * MIB, maps=maps, block_bytes=4 * KIB)
        self.clock = ManualClock()
        self.stored = stored
        self.open(segment_bytes=segment_bytes, min_free_bytes=64 * KIB, **changes)
        for n in range(stored):
            self.q.put(b"%d" % n)
        self.q.sync()

    def open(self, **changes: Any) -> None:
        world = World(clock=self.clock, disk=self.disk, ids=SeededIds(1))
        self.q: holdfast.Queue[bytes] = holdfast.open(FOLDER, world=world, **changes)

    def end(self, how: str, seed: int = 0) -> None:
        """End the owner, and take what is free and the reserve."""
        if how == "closed":
            self.q.close()
        elif how == "killed":
            self.disk = self.disk.kill()
        else:
            self.disk = self.disk.cut(random.Random(seed))
        self.exhaust()

    def exhaust(self) -> None:
        self.fill()
        if self.disk.exists(RESERVE):
            self.disk.remove(RESERVE)
        self.fill()

    def fill(self) -> None:
        file = self.disk.open(FILLER, write=True, create=True)
        while room := self.disk.room_bytes():
            file.write(file.size(), [bytes(room)])
        file.close()

    def tick(self) -> None:
        self.clock.advance(seconds=61)
        self.q._port.engine.tick()

    def drain(self, most: int = 1 << 30) -> list[int]:
        """Handle messages one at a time, while another program takes whatever becomes free."""
        bodies: list[int] = []
        while len(bodies) < most and (message := next(iter(self.q.get_many(1, timeout=0)), None)) is not None:
            message.ack()
            bodies.append(int(message.body))
            if self.disk.maps and len(bodies) % 10 == 0:
                self.fill()
        return bodies

    def recover(self) -> None:
        """Free the disk: everything is as before, the reserve included."""
        self.disk.remove(FILLER)
        self.tick()
        assert len(self.disk.contents(RESERVE)) == MIB
        self.q.put(b"-1")
        assert self.drain() == [-1]
        self.q.close()
        assert check_folder(FOLDER, World(clock=self.clock, disk=self.disk, ids=SeededIds(1))).ok


@pytest.fixture(params=[True, False], ids=["maps", "writes"])
def maps(request: pytest.FixtureRequest) -> bool:
    wanted: bool = request.param
    return wanted


@pytest.fixture(params=[ONE_SEGMENT, SEVERAL], ids=["one", "several"])
def segment_bytes(request: pytest.FixtureRequest) -> int:
    wanted: int = request.param
    return wanted


@pytest.mark.parametrize("how", ["closed", "killed", "cut"])
def test_a_full_folder_is_opened_and_drained_one_by_one(maps: bool, segment_bytes: int, how: str):
    machine = Machine(maps=maps, segment_bytes=segment_bytes)
    machine.end(how)
    machine.open()
    machine.fill()
    with pytest.raises(DiskFull):
        for _ in range(100):
            machine.q.put(bytes(20 * KIB))
    assert machine.drain() == list(range(machine.stored))
    machine.recover()


def test_an_owner_that_was_there_all_the_time_drains_it_too(maps: bool, segment_bytes: int):
    machine = Machine(maps=maps, segment_bytes=segment_bytes)
    machine.exhaust()
    assert machine.drain() == list(range(machine.stored))
    machine.recover()


def test_compacting_and_retention_work_and_keep_what_they_free(maps: bool):
    machine = Machine(maps=maps, segment_bytes=SEVERAL)
    machine.end("killed")
    machine.open()
    assert machine.drain(500) == list(range(500))
    machine.q.compact()
    assert machine.q.stats().start > 400
    machine.clock.advance(seconds=8 * 24 * 3600)
    machine.q.apply_retention()
    machine.fill()
    assert len(machine.disk.contents(RESERVE)) > 0, "another program has taken all of it"
    assert machine.drain() == list(range(500, machine.stored))
    machine.recover()


def test_messages_are_settled_in_any_order_and_manner():
    """Snapshots of this are large, and written with the blocks that the log had reserved for messages."""
    machine = Machine(maps=True, segment_bytes=ONE_SEGMENT, max_attempts=3)
    machine.end("killed")
    machine.open()
    messages = machine.q.get_many(machine.stored, timeout=0)
    random.Random(1).shuffle(messages)
    for n, message in enumerate(messages):
        if n % 3:
            message.ack()
        else:
            message.nack(delay=0)
    assert len(machine.drain()) == sum(n % 3 == 0 for n in range(machine.stored))
    machine.recover()


def test_a_long_queue_of_small_messages_is_drained_with_what_its_segment_had_reserved():
    machine = Machine(maps=True, segment_bytes=ONE_SEGMENT, stored=20_000)
    machine.end("closed")
    machine.open()
    assert machine.drain() == list(range(machine.stored))
    machine.recover()


def test_check_and_doctor_name_the_state_until_it_is_over():
    machine = Machine(maps=True, segment_bytes=ONE_SEGMENT)
    machine.end("killed")
    machine.open()
    machine.drain(300)
    world = World(clock=machine.clock, disk=machine.disk, ids=SeededIds(1))
    checked = check_folder(FOLDER, world)
    assert checked.ok
    assert [note for note in checked.notes if "reserve has" in note and "because the disk is or was full" in note]
    assert "reserve_used" in [warning.code for warning in diagnose(world, FOLDER, seconds=0.1).warnings]
    machine.disk.remove(FILLER)
    machine.tick()
    assert check_folder(FOLDER, world).notes == ()
    assert "reserve_used" not in [warning.code for warning in diagnose(world, FOLDER, seconds=0.1).warnings]


def test_locks_and_streams_go_on_too():
    machine = Machine(maps=True, segment_bytes=ONE_SEGMENT, stored=1_500)
    machine.q.close()
    world = World(clock=machine.clock, disk=machine.disk, ids=SeededIds(1))
    with holdfast.open_broker(FOLDER, world=world, share=False) as broker:
        broker.locks.acquire("first")
        with broker.consumer("jobs", group="readers", auto_commit=False) as consumer:
            assert consumer.poll(0, max_records=1)
            consumer.commit()
            machine.exhaust()
            for n in range(1_200):
                with broker.locks.hold(f"lock-{n}"):
                    assert consumer.poll(0, max_records=1)
                    consumer.commit()
                if n % 10 == 0:
                    machine.fill()
            assert consumer.committed("jobs", 0) == 1_201
        assert [lock.name for lock in broker.locks.list()] == ["first"]


class CutDuring:
    """Takes a copy of the disk, as a crash would leave it, after a certain call; and of the acks that had returned."""

    def __init__(self, machine: Machine, at_call: int, how: str, seed: int) -> None:
        self._disk, self._at_call, self._how, self._rng = machine.disk, at_call, how, random.Random(seed)
        self.calls = 0
        self.acked: list[int] = []
        self.acking: set[int] = set()
        self.left: SimulatedDisk | None = None
        self.acked_before: set[int] = set()
        self.acking_then: set[int] = set()
        machine.disk.on_call = self.after

    def after(self, call: str) -> None:
        self.calls += 1
        if self.calls == self._at_call:
            self.left = self._disk.kill() if self._how == "killed" else self._disk.cut(self._rng)
            self.acked_before, self.acking_then = set(self.acked), self.acking


def drained_until(machine: Machine, at_call: int, how: str, seed: int) -> CutDuring:
    machine.end("closed")
    crash = CutDuring(machine, at_call, how, seed)
    machine.open(ack_durability="fsync" if how == "cut" else "os")
    while (message := next(iter(machine.q.get_many(1, timeout=0)), None)) is not None:
        crash.acking = {int(message.body)}
        message.ack()
        crash.acked.append(int(message.body))
        crash.acking = set()
    machine.disk.on_call = None
    return crash


@pytest.mark.parametrize("how", ["killed", "cut"])
def test_a_crash_while_a_full_disk_is_drained_loses_neither_messages_nor_acks(
    maps: bool, segment_bytes: int, how: str, scale: Callable[[int, int], int]
):
    stored = 600
    calls = drained_until(Machine(maps=maps, segment_bytes=segment_bytes, stored=stored), 0, how, 0).calls
    rng = random.Random(f"{maps}{segment_bytes}{how}")
    for seed in range(scale(4, 400)):
        machine = Machine(maps=maps, segment_bytes=segment_bytes, stored=stored)
        crash = drained_until(machine, rng.randint(1, calls), how, seed)
        assert crash.left is not None
        machine.disk = crash.left
        if maps:
            machine.fill()
        machine.open()
        again = machine.drain()
        assert not crash.acked_before.intersection(again), "acked, and delivered again"
        assert set(range(stored)) - crash.acked_before.union(again) <= crash.acking_then, "lost"
        machine.recover()
