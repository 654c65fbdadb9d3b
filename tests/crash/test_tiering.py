"""Power cuts, kills, failing disks and stores at every step of moving segments to a store and back: nothing is lost."""

from __future__ import annotations

import errno
import random

import pytest

from holdfast.broker.check.folder import check_folder
from holdfast.env import SeededIds
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import HoldfastError
from tests.unit.tiers import FOLDER, TieredFolder


def left_by(folder: TieredFolder, disk: SimulatedDisk, seed: int, put: list[bytes], *, check: bool) -> None:
    """What was left opens, has every message, is intact, and can be moved to its end."""
    after = folder.after(disk, SeededIds(seed))
    assert not after.log.report.damage
    assert after.read() == put, "messages are lost"
    if check:
        assert check_folder(FOLDER, after.world).ok
    after.move()
    assert len(after.files) == 1
    assert after.read() == put
    after.engine.close()


def used_objects(folder: TieredFolder) -> set[str]:
    return {stub.key for stub in folder.tier.stubs(folder.log.folder).values()}


class Stops:
    """Looks at what a kill or a power cut would leave after each call of some work on the disk."""

    def __init__(self, seed: int, end: str, work: str) -> None:
        self.folder = TieredFolder(seed)
        self.folder.fill(4)
        if work != "move":
            self.folder.move()
        self.cut_at = self.folder.log.segments()[2].base_offset
        self.seed, self.end, self.work = seed, end, work
        self.rng = random.Random(seed)
        self.count = 0

    def run(self) -> int:
        self.folder.disk.on_call = self.look
        getattr(self, self.work)()
        self.folder.disk.on_call = None
        return self.count

    def look(self, call: str) -> None:
        self.count += 1
        folder, put = self.folder, self.folder.put
        disk = folder.disk.kill() if self.end == "kill" else folder.disk.cut(self.rng)
        after = folder.after(disk, SeededIds(self.seed if self.end == "kill" else -self.seed - 1))
        found = after.read()
        # A truncation that was interrupted may have happened or not; everything else changes nothing.
        wanted = [put, put[: self.cut_at]] if self.work == "truncate" else [put]
        assert found in wanted, f"{call}: {len(found)} messages of {len(put)}"
        if self.count % 5 == 0:
            assert check_folder(FOLDER, after.world).ok
            after.move()
            assert after.read() == found
            assert used_objects(after) == set(after.objects.keys("tier/"))
        after.engine.close()

    def move(self) -> None:
        self.folder.move()

    def truncate(self) -> None:
        self.folder.log.truncate(self.cut_at)

    def rewrite(self) -> None:
        """Replace a segment that has left, as key compaction and repair do."""
        disk, path = self.folder.tier, f"{self.folder.log.folder}/{0:020}.log"
        content = disk.open(path).read(0, 1 << 20)
        file = disk.open(f"{path}.tmp", write=True, create=True)
        file.write(0, [content])
        file.sync()
        disk.rename(f"{path}.tmp", path)


@pytest.mark.parametrize("end", ["power cut", "kill"])
@pytest.mark.parametrize("work", ["move", "truncate", "rewrite"])
def test_wherever_it_is_stopped_nothing_is_lost(end: str, work: str, scale):
    assert sum(Stops(seed, end, work).run() for seed in range(scale(3, 300))) >= 15


@pytest.mark.parametrize("sticky", [False, True], ids=["once", "for-good"])
@pytest.mark.parametrize("fault", ["EIO", "ENOSPC", "short write"])
def test_no_fault_of_the_disk_costs_a_message(fault: str, sticky: bool):
    nth = 0
    while True:
        nth += 1
        folder = TieredFolder(nth % 3)
        folder.fill(4)
        if fault == "short write":
            folder.disk.faults.short_write(nth, sticky=sticky)
        else:
            folder.disk.faults.fail(nth, getattr(errno, fault), sticky=sticky)
        folder.move()  # failures are logged, and it is tried again
        fired = folder.disk.faults.fired
        folder.disk.faults.clear()
        assert folder.read() == folder.put
        left_by(folder, folder.disk.kill(), nth % 3, folder.put, check=nth % 4 == 0)
        left_by(folder, folder.disk.cut(random.Random(nth)), -nth, folder.put, check=nth % 4 == 0)
        if not fired:
            break
    assert nth > 2, "no call was ever struck"


def test_a_faulty_store_loses_nothing_and_is_left_clean(scale):
    moved = 0
    for seed in range(scale(20, 2_000)):
        folder = TieredFolder(seed)
        folder.fill(4)
        folder.store.faults = 0.5
        for _ in range(6):
            folder.move()
            try:
                assert folder.read() == folder.put
            except HoldfastError as error:
                assert error.retryable, error
        moved += len(folder.stubs)
        disk = folder.disk.cut(random.Random(seed))
        after = folder.after(disk, SeededIds(-seed - 1))
        assert after.read() == folder.put
        after.move()
        after.clock.advance(seconds=3601)  # creates that arrived late are found by the next listing
        after.move()
        assert after.read() == folder.put
        assert used_objects(after) == set(after.objects.keys("tier/"))
        after.engine.close()
    assert moved > 10
