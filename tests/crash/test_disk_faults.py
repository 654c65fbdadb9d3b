"""Every disk call of every operation fails, in every way, once and for good: nobody is told a lie."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import Closed, DiskFailed, DiskFull, HoldfastError, Unavailable
from holdfast.model import Batch
from holdfast.storage.batches import Spool
from holdfast.storage.log import Log
from tests.crash.histories import FOLDER, small_settings

FAULTS = ["EIO", "ENOSPC", "EDQUOT", "short write"]


@dataclass
class Run:
    """One log, what it acknowledged, and the errors it raised."""

    disk: SimulatedDisk
    log: Log | None = None
    acknowledged: dict[int, tuple[bytes, str]] = field(default_factory=dict)
    refused: list[HoldfastError] = field(default_factory=list)
    truncated: bool = False

    def world(self, *, boot: int = 1) -> World:
        return World(clock=ManualClock(), disk=self.disk, ids=SeededIds(boot))

    def open(self) -> None:
        self.log = Log.open(FOLDER, small_settings(), self.world())

    def append(self, values: list[bytes], durability: str) -> None:
        appended = self.log.append(values, durability=durability)
        for i, value in enumerate(values):
            self.acknowledged[appended.offset + i] = (value, durability)

    def attempt(self, step: Callable[[], object]) -> None:
        """Any error but one of ours is a bug: this lets it through."""
        try:
            step()
        except HoldfastError as error:
            self.refused.append(error)


def publish(run: Run) -> None:
    run.attempt(lambda: run.append([b"one"], "os"))
    run.attempt(lambda: run.append([b"two"], "fsync"))
    run.attempt(lambda: run.append([bytes([n]) * 600 for n in range(3)], "fsync"))
    run.attempt(lambda: run.append([b"three" * 100], "os"))


def sync(run: Run) -> None:
    run.attempt(lambda: run.append([b"unsynced"], "os"))
    run.attempt(run.log.sync)
    run.attempt(lambda: run.append([b"later"], "fsync"))


def roll(run: Run) -> None:
    for n in range(6):
        run.attempt(lambda n=n: run.append([bytes([n]) * 1500], "fsync" if n % 2 else "os"))
    run.attempt(run.log.tick)


def apart(run: Run) -> None:
    """Messages that get a segment of their own: out of memory, and out of the file that they came in."""
    run.log._writer.apart_bytes = 1000
    run.attempt(lambda: run.append([b"a" * 1500], "fsync"))
    run.attempt(lambda: run.append([b"small"], "os"))
    run.attempt(lambda: stream(run, b"b" * 6000, "fsync"))
    run.attempt(lambda: stream(run, b"c" * 1200, "os"))


def stream(run: Run, value: bytes, durability: str) -> None:
    with Spool(run.world(), FOLDER, small_settings(), head_bytes=8, file_bytes=500) as spool:
        for at in range(0, len(value), 700):
            if spool.add(value[at : at + 700]):
                spool.write_gathered()
        appended = run.log.append(Batch(values=[spool.value()]), durability=durability)
    run.acknowledged[appended.offset] = (value, durability)


def trim(run: Run) -> None:
    run.attempt(lambda: run.log.trim(run.log.end))
    run.attempt(lambda: run.append([b"after trim"], "fsync"))


def truncate(run: Run) -> None:
    run.truncated = True
    run.attempt(lambda: run.log.truncate(run.log.start))
    run.attempt(lambda: run.append([b"after truncation"], "fsync"))


def close(run: Run) -> None:
    run.attempt(lambda: run.append([b"before the end"], "os"))
    run.attempt(run.log.close)


def recovery(run: Run) -> None:
    run.attempt(run.open)


OPERATIONS = [publish, sync, roll, apart, trim, truncate, close, recovery]


def used_disk(*, maps: bool) -> SimulatedDisk:
    """A disk with a log of three segments that was killed with a torn frame at its end."""
    disk = SimulatedDisk(maps=maps)
    run = Run(disk)
    run.open()
    for n in range(5):
        run.append([bytes([65 + n]) * 1300], "fsync")
    run.append([b"last"], "os")
    path = f"{FOLDER}/{max(name for name in disk.names(FOLDER) if name.endswith('.log'))}"
    end = run.log._writer.active.position
    file = disk.open(path, write=True)
    file.write(end, [b"HFR\x01 half a frame"])
    file.close()
    return disk.kill()


def arm(disk: SimulatedDisk, fault: str, nth: int, *, sticky: bool) -> None:
    if fault == "short write":
        disk.faults.short_write(nth, sticky=sticky)
    else:
        disk.faults.fail(nth, getattr(errno, fault), sticky=sticky)


@pytest.mark.parametrize("maps", [True, False], ids=["mapped", "written"])
@pytest.mark.parametrize("sticky", [False, True], ids=["once", "for-good"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_no_fault_makes_the_log_lie(operation, fault, sticky, maps):
    template = used_disk(maps=maps)
    nth = 0
    while True:
        nth += 1
        run = Run(template.kill())
        if operation is not recovery:
            run.open()
            for record in run.log.records(run.log.start):
                run.acknowledged[record.offset] = (record.value, "fsync")
        arm(run.disk, fault, nth, sticky=sticky)
        operation(run)
        fired = run.disk.faults.fired
        run.disk.faults.clear()
        check_run(run, f"{operation.__name__}, {fault} at call {nth} ({fired[:1]}), sticky={sticky}, maps={maps}")
        if not fired:
            break
    # With a map, syncing and trimming write nothing that could be cut short.
    nothing_to_strike = maps and fault == "short write" and operation in (sync, trim)
    assert nth > 1 or nothing_to_strike, "no call was ever struck"


def check_run(run: Run, what: str) -> None:
    try:
        if run.log is not None and run.log._lock is not None and not run.truncated:
            check_still_reads(run)
        check_after_kill(run)
        for seed in range(3):
            check_after_power_cut(run, seed)
        check_goes_on(run)
    except BaseException as error:
        error.add_note(what)
        raise


def check_still_reads(run: Run) -> None:
    there = {record.offset: record.value for record in run.log.records(run.log.start)}
    for offset, value in there.items():
        assert offset not in run.acknowledged or run.acknowledged[offset][0] == value


def check_after_kill(run: Run) -> None:
    check_all_there(run, Run(run.disk.kill()), {"os", "fsync"}, boot=1)


def check_after_power_cut(run: Run, seed: int) -> None:
    check_all_there(run, Run(run.disk.cut(random.Random(seed))), {"fsync"}, boot=2)


def check_all_there(run: Run, later: Run, promised: set[str], *, boot: int) -> None:
    with Log.open(FOLDER, small_settings(), later.world(boot=boot)) as log:
        assert not log.report.damage
        assert log.report.lost_tail is None
        there = {record.offset: record.value for record in log.records(log.start)}
        assert list(there) == list(range(log.start, log.end))
        if run.truncated:
            return
        for offset, (value, durability) in run.acknowledged.items():
            if durability in promised and offset >= log.start:
                assert there.get(offset) == value, f"acknowledged message {offset} is lost"


def check_goes_on(run: Run) -> None:
    """After a full disk the same object goes on; after a failed disk it refuses, and a new one goes on."""
    log = run.log
    failed = any(isinstance(error, Closed) for error in run.refused)
    if log is not None and not failed and log._lock is not None:
        log.append([b"room again"], durability="fsync")
        assert [record.value for record in log.records(log.end - 1)] == [b"room again"]
        return
    if log is not None and log._lock is not None:
        with pytest.raises(DiskFailed, match=r"open the log again"):
            log.append([b"no"])
        log.close()
    with Log.open(FOLDER, small_settings(), run.world()) as fresh:
        fresh.append([b"on it goes"], durability="fsync")


def test_after_a_failed_sync_writes_are_refused_and_a_fresh_open_recovers():
    run = Run(SimulatedDisk())
    run.open()
    run.append([b"safe"], "fsync")
    run.disk.faults.fail(1, errno.EIO, sticky=False, calls=frozenset({"sync"}))
    with pytest.raises(DiskFailed, match="a sync failed"):
        run.append([b"never acknowledged"], "fsync")
    with pytest.raises(DiskFailed, match="Reading still works"):
        run.append([b"refused"], "os")
    assert [record.value for record in run.log.records(0)] == [b"safe"]
    run.log.close()
    with Log.open(FOLDER, small_settings(), run.world()) as log:
        # It was written, and it may be kept; but now it must be on disk like everything that is readable.
        kept = [record.value for record in log.records(0)]
        assert kept[0] == b"safe"
    for seed in range(50):
        later = Run(run.disk.cut(random.Random(seed)))
        with Log.open(FOLDER, small_settings(), later.world(boot=2)) as log:
            assert [record.value for record in log.records(0)] == kept


def test_a_full_disk_refuses_publishing_and_takes_it_again_when_there_is_room():
    disk = SimulatedDisk(capacity_bytes=200_000)
    run = Run(disk)
    run.open()
    with pytest.raises(DiskFull, match="reading still works"):
        for n in range(1000):
            run.append([bytes([n % 256]) * 2000], "os")
    assert len(list(run.log.records(0))) == len(run.acknowledged) > 10
    with pytest.raises(DiskFull):
        run.append([b"x" * 2000], "fsync")
    assert run.log.trim(run.log.end).segments > 0
    run.append([b"there is room again"], "fsync")
    assert [record.value for record in run.log.records(run.log.end - 1)] == [b"there is room again"]


def test_a_message_that_fits_in_reserved_blocks_needs_no_room_on_the_disk():
    disk = SimulatedDisk(capacity_bytes=200_000)
    run = Run(disk)
    run.log = Log.open(FOLDER, small_settings(segment_bytes=1 << 20), run.world())
    run.append([b"first"], "fsync")
    filler = disk.open("data/other", write=True, create=True)
    while disk.room_bytes():
        filler.write(filler.size(), [bytes(disk.room_bytes())])
    run.append([b"second"], "fsync")
    assert [record.value for record in run.log.records(0)] == [b"first", b"second"]


def test_free_space_is_checked_while_running_not_only_at_opening():
    disk = SimulatedDisk(capacity_bytes=10_000_000)
    run = Run(disk)
    run.log = Log.open(FOLDER, small_settings(min_free_bytes=9_000_000), run.world())
    with pytest.raises(DiskFull, match=r"9,000,000 must stay free \(min_free_bytes\)"):
        for n in range(1000):
            run.append([bytes([n % 256]) * 2000], "os")
    assert disk.room_bytes() >= 9_000_000
    assert len(run.acknowledged) > 10


def test_a_failed_read_is_reported_and_nothing_else_changes():
    run = Run(SimulatedDisk())
    run.open()
    run.append([b"here"], "fsync")
    run.disk.faults.fail(1, errno.EIO, sticky=False, calls=frozenset({"view"}))
    with pytest.raises(Unavailable, match="cannot read"):
        list(run.log.records(0))
    assert [record.value for record in run.log.records(0)] == [b"here"]
