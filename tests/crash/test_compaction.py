"""The power is cut, the process killed and the disk fails at every call of a key compaction: nothing is lost."""

from __future__ import annotations

import errno
import random

import pytest

from holdfast.codec.columns import TOMBSTONE
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import Closed, HoldfastError
from holdfast.model import Batch, Record
from holdfast.storage.checks.check import check
from holdfast.storage.log import Log
from tests.crash.histories import FOLDER, small_settings

KEYS = [None, b"a", b"b", b"c", b"d"]


class Run:
    """A log of a few segments with keys, some of it not synced, and what was put into it."""

    def __init__(self, seed: int, *, maps: bool = True) -> None:
        rng = random.Random(seed)
        self.disk = SimulatedDisk(maps=maps)
        self.ids = SeededIds(seed)
        self.clock = ManualClock()
        self.put: list[Record] = []
        self.log = Log.open(FOLDER, small_settings(), self.world(self.disk, self.ids))
        while len(self.log.segments()) < 3:
            self.append(rng, "fsync")
        for _ in range(3):
            self.append(rng, "os")
        self.synced_end = self.log.synced_end

    def world(self, disk: SimulatedDisk, ids: SeededIds) -> World:
        return World(clock=self.clock, disk=disk, ids=ids)

    def append(self, rng: random.Random, durability: str) -> None:
        count = rng.randint(1, 9)
        keys = [rng.choice(KEYS) for _ in range(count)]
        gone = [key is not None and rng.random() < 0.2 for key in keys]
        batch = Batch(
            values=[b"" if is_gone else rng.randbytes(rng.randint(1, 150)) for is_gone in gone],
            keys=keys,
            flags=[TOMBSTONE if is_gone else 0 for is_gone in gone],
        )
        first = self.log.append(batch, durability=durability, codec=rng.choice([None, "zstd"])).offset
        now_ns = self.clock.now_ns()
        self.put += [
            Record(first + i, now_ns, value, keys[i], flags=batch.flags[i], epoch=self.log.epoch)
            for i, value in enumerate(batch.values)
        ]
        self.clock.advance(ms=1)

    def compact(self) -> None:
        """Twice: the second round removes the tombstones that the first one has left alone."""
        for _ in range(2):
            self.log.compact_keys(before=self.log.end, tombstone_ms=0, min_saving_percent=0)

    def check_left(self, disk: SimulatedDisk, ids: SeededIds, *, least_end: int, write_again: bool) -> None:
        """What a cut or a kill left opens, and each key has the last value of all that is still there."""
        with Log.open(FOLDER, small_settings(), self.world(disk, ids)) as log:
            assert not log.report.damage, log.report
            assert log.report.lost_tail is None, log.report
            assert log.end >= least_end, "acknowledged messages are lost"
            self.check_records(log)
            if write_again:
                end = log.end
                assert log.append([b"on it goes"], durability="fsync").offset == end
                log.compact_keys(before=end, tombstone_ms=0, min_saving_percent=0)
                assert [record.value for record in log.records(end)] == [b"on it goes"]
        if write_again:
            assert check(FOLDER, self.world(disk, ids), small_settings()).ok

    def check_records(self, log: Log) -> None:
        there = list(log.records(log.start))
        put = self.put[: log.end]
        assert all(record == put[record.offset] for record in there)
        assert held(there) == held(put)
        kept = {record.offset for record in there}
        assert all(record.offset in kept for record in put if record.key is None)


def held(records: list[Record]) -> dict[bytes, bytes]:
    state: dict[bytes, bytes] = {}
    for record in records:
        if record.key is not None and record.flags & TOMBSTONE:
            state.pop(record.key, None)
        elif record.key is not None:
            state[record.key] = record.value
    return state


@pytest.mark.parametrize("end", ["power cut", "kill"])
def test_wherever_a_compaction_is_stopped_each_key_keeps_its_last_message(end: str, scale):
    stopped = 0
    for seed in range(scale(6, 1_000)):
        run = Run(seed, maps=seed % 2 == 0)
        rng = random.Random(seed)

        def stop(call: str, run: Run = run, rng: random.Random = rng, seed: int = seed) -> None:
            nonlocal stopped
            stopped += 1
            write_again = stopped % 5 == 0
            if end == "kill":
                run.check_left(run.disk.kill(), SeededIds(seed), least_end=len(run.put), write_again=write_again)
            else:
                least_end = run.synced_end
                run.check_left(run.disk.cut(rng), SeededIds(-seed - 1), least_end=least_end, write_again=write_again)

        run.disk.on_call = stop
        run.compact()
        run.disk.on_call = None
        assert len(list(run.log.records(0))) < len(run.put)
        run.check_records(run.log)
    assert stopped > 100


@pytest.mark.parametrize("sticky", [False, True], ids=["once", "for-good"])
@pytest.mark.parametrize("fault", ["EIO", "ENOSPC", "short write"])
def test_no_fault_of_the_disk_costs_a_message(fault: str, sticky: bool):
    nth = 0
    while True:
        nth += 1
        run = Run(nth % 3, maps=nth % 2 == 0)
        if fault == "short write":
            run.disk.faults.short_write(nth, sticky=sticky)
        else:
            run.disk.faults.fail(nth, getattr(errno, fault), sticky=sticky)
        refused: HoldfastError | None = None
        try:
            run.compact()
        except HoldfastError as error:  # any other error is a bug, and comes through
            refused = error
        fired = run.disk.faults.fired
        run.disk.faults.clear()
        run.check_records(run.log)
        again = nth % 4 == 0
        run.check_left(run.disk.kill(), SeededIds(nth % 3), least_end=len(run.put), write_again=again)
        disk = run.disk.cut(random.Random(nth))
        run.check_left(disk, SeededIds(-nth), least_end=run.synced_end, write_again=again)
        if refused is None or not isinstance(refused, Closed):
            run.log.append([b"it goes on"], durability="fsync")
        if not fired:
            assert refused is None
            break
    assert nth > 2, "no call was ever struck"
