"""The keeper: what is due happens by itself, in time, without anybody calling, and nothing else happens."""

from __future__ import annotations

import errno
import gc
import logging
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest

from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import Closed, DiskFailed
from holdfast.storage import Log, open_log
from holdfast.storage.keeper import Keeper
from tests.crash.histories import FOLDER, small_settings

# Far longer than anything here takes on a busy machine.
PATIENCE_S = 30


def until(happened: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline, f"still waiting: {what}"
        time.sleep(0.002)


class Kept:
    """A log on a simulated disk with a clock that stands still, and what its keeper does with it."""

    def __init__(self, **changes: object) -> None:
        self.disk = SimulatedDisk()
        self.clock = ManualClock()
        world = World(clock=self.clock, disk=self.disk, ids=SeededIds(1))
        self.log = Log.open(FOLDER, small_settings(**changes), world)

    def fill(self, segments: int) -> None:
        while len(self.log.segments()) < segments:
            self.log.append_one(b"x" * 500)

    def tick_after(self, ms: int) -> int | None:
        self.clock.advance(ms=ms)
        return self.log.tick()


class Counted:
    """Counts the ticks of a log, and can hold one up."""

    def __init__(self, log: Log) -> None:
        self.ticks = 0
        self.may_end = threading.Event()
        self.may_end.set()
        self._tick = log.tick
        log.tick = self

    def __call__(self) -> int | None:
        self.ticks += 1
        due_ms = self._tick()
        assert self.may_end.wait(PATIENCE_S)
        return due_ms


@pytest.fixture
def keepers() -> Iterator[None]:
    """Whatever a test does, the keepers that it began are gone at its end."""
    before = set(threading.enumerate())
    yield
    until(lambda: not [t for t in set(threading.enumerate()) - before if "keeper" in t.name], "a keeper goes on")


def test_an_interval_message_is_synced_when_the_interval_is_over_and_not_before():
    kept = Kept(sync_interval_ms=1000)
    assert kept.log.tick() is None
    kept.log.append_one(b"x", "interval")
    assert kept.log.tick() == 1000
    assert kept.tick_after(999) == 1
    assert kept.log.synced_end == 0
    assert kept.tick_after(1) is None
    assert kept.log.synced_end == 1


def test_the_interval_begins_with_the_first_message_that_waits():
    kept = Kept(sync_interval_ms=1000)
    kept.log.append_one(b"first", "interval")
    for _ in range(9):
        assert kept.tick_after(100) is not None
        kept.log.append([b"more"], durability="interval")
    assert kept.log.synced_end == 0
    kept.tick_after(100)
    assert kept.log.synced_end == 10
    kept.log.append_one(b"next", "interval")
    assert kept.log.tick() == 1000


def test_a_wall_clock_that_is_set_back_delays_no_sync():
    kept = Kept(sync_interval_ms=1000)
    kept.log.append_one(b"x", "interval")
    kept.clock.step_wall(ns=-3600 * 10**9)
    kept.tick_after(1000)
    assert kept.log.synced_end == 1


def test_messages_that_asked_for_no_sync_make_nothing_due():
    kept = Kept()
    kept.log.append_one(b"x", "os")
    assert kept.tick_after(10_000_000) is None
    assert kept.log.synced_end == 0


def test_a_sealed_segment_is_synced_at_the_next_tick():
    kept = Kept()
    kept.fill(segments=3)
    assert kept.log.synced_end == 0
    kept.log.tick()
    assert kept.log.synced_end == kept.log.written_end


def test_a_segment_is_sealed_by_its_age():
    kept = Kept(segment_ms=1000)
    kept.log.append_one(b"x")
    assert kept.tick_after(999) == 1
    assert len(kept.log.segments()) == 1
    kept.tick_after(1)
    assert len(kept.log.segments()) == 2


def test_retention_runs_at_its_interval():
    kept = Kept(retention_segments=2, retention_check_ms=1000)
    kept.log.tick()
    kept.fill(segments=5)
    kept.tick_after(998)
    assert len(kept.log.segments()) == 5
    kept.tick_after(2)
    assert len(kept.log.segments()) == 2


def test_an_interval_message_is_synced_without_another_append(tmp_path, keepers):
    with open_log(str(tmp_path), small_settings(sync_interval_ms=20)) as log:
        for n in range(3):
            log.append_one(b"x", "interval")
            until(lambda n=n: log.synced_end == n + 1, "the sync")


def test_sealed_segments_are_synced_without_another_append(tmp_path, keepers):
    with open_log(str(tmp_path), small_settings()) as log:
        while len(log.segments()) < 3:
            log.append_one(b"x" * 500)
        sealed_end = log.segments()[-1].base_offset
        until(lambda: log.synced_end >= sealed_end, "the sync")


def test_old_segments_go_by_themselves(tmp_path, keepers):
    settings = small_settings(retention_segments=2, retention_check_ms=20)
    with open_log(str(tmp_path), settings) as log:
        log.append([b"x" * 3000])
        for _ in range(2):
            for _ in range(6):
                log.append([b"x" * 3000])
            until(lambda: len(log.segments()) == 2, "retention")
        assert log.start == log.end - 2


def test_a_segment_ages_by_itself(tmp_path, keepers):
    with open_log(str(tmp_path), small_settings(segment_ms=20)) as log:
        log.append_one(b"x")
        until(lambda: len(log.segments()) == 2, "the roll")


def test_nothing_due_means_no_ticks(tmp_path, keepers):
    log = Log.open(str(tmp_path), small_settings(sync_interval_ms=3_600_000))
    counted = Counted(log)
    Keeper(log).start()
    with log:
        for _ in range(500):
            log.append_one(b"x", "os")
            log.append_one(b"x", "interval")
        log.append_one(b"x", "fsync")
        rolls = len(log.segments())
        # A keeper that does not sleep makes thousands of ticks in this time, however slow the machine.
        threading.Event().wait(0.3)
        assert counted.ticks <= rolls + 5


def test_ticks_keep_to_the_interval(tmp_path, keepers):
    log = Log.open(str(tmp_path), small_settings(sync_interval_ms=50, segment_bytes=1 << 20))
    counted = Counted(log)
    Keeper(log).start()
    with log:
        began = time.monotonic()
        until(lambda: bool(log.append_one(b"x", "interval")) and log.synced_end >= 200, "many intervals")
        passed = time.monotonic() - began
        # Each interval takes one tick that learns of the first message and one that syncs; a timer may be early.
        assert counted.ticks <= 3 * passed / 0.05 + 5


def test_closing_ends_the_keeper(tmp_path):
    before = set(threading.enumerate())
    log = open_log(str(tmp_path))
    assert len(set(threading.enumerate()) - before) == 1
    log.close()
    assert not set(threading.enumerate()) - before


def test_closing_waits_for_the_tick_that_is_under_way(tmp_path, keepers):
    log = Log.open(str(tmp_path), small_settings(sync_interval_ms=1))
    counted = Counted(log)
    counted.may_end.clear()
    Keeper(log).start()
    log.append_one(b"x", "interval")
    until(lambda: counted.ticks == 1, "the first tick")
    closing = threading.Thread(target=log.close)
    closing.start()
    assert log.append_one(b"still open", "os").offset == 1
    counted.may_end.set()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    with Log.open(str(tmp_path)) as log:
        assert log.report.clean
        assert log.end == 2


@pytest.mark.parametrize("turn", range(20))
def test_closing_at_any_moment_is_an_orderly_end(tmp_path, keepers, turn):
    settings = small_settings(sync_interval_ms=1, segment_ms=1, retention_segments=3, retention_check_ms=1)
    log = open_log(str(tmp_path), settings)
    for _ in range(turn * 5):
        log.append_one(b"x" * 300, "interval")
    end = log.written_end
    log.close()
    with Log.open(str(tmp_path), settings) as log:
        assert log.report.clean
        assert log.end == end


def test_closing_from_another_thread_while_somebody_closes_is_fine(tmp_path, keepers):
    log = open_log(str(tmp_path), small_settings(sync_interval_ms=1))
    log.append_one(b"x", "interval")
    closing = [threading.Thread(target=log.close) for _ in range(4)]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    Log.open(str(tmp_path)).close()


def test_a_log_that_nobody_holds_any_more_is_let_go(tmp_path, keepers):
    log = open_log(str(tmp_path), small_settings(sync_interval_ms=5))
    log.append_one(b"x", "interval")
    until(lambda: log.synced_end == 1, "the sync")
    gone = weakref.ref(log)
    del log
    until(lambda: gc.collect() >= 0 and gone() is None, "the log is kept alive")
    with Log.open(str(tmp_path)) as log:
        assert log.end == 1


def test_a_log_without_keeper_that_nobody_holds_any_more_is_let_go(tmp_path):
    log = Log.open(str(tmp_path))
    log.append_one(b"x", "os")
    del log
    gc.collect()
    with Log.open(str(tmp_path)) as log:
        assert log.end == 1


@pytest.mark.slow
def test_a_program_that_ends_without_closing_ends(tmp_path):
    program = (
        "import asyncio, sys; from holdfast.storage import open_log\n"
        "log = open_log(sys.argv[1])\n"
        "log.append_one(b'thread', 'interval'); asyncio.run(log.append_one_async(b'task', 'fsync'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], timeout=PATIENCE_S, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    with Log.open(str(tmp_path)) as log:
        assert [record.value for record in log.records(0)] == [b"thread", b"task"]


def test_a_keeper_outlives_an_error_that_passes(keepers, caplog):
    kept = Kept(retention_segments=2, retention_check_ms=1)
    kept.fill(segments=5)
    kept.clock.advance(ms=10)
    kept.disk.faults.fail(1, errno.EIO, sticky=False, calls=frozenset({"remove"}))
    with caplog.at_level(logging.WARNING):
        Keeper(kept.log).start()
        until(lambda: len(kept.disk.faults.fired) == 1, "the error")
        kept.clock.advance(ms=10)
        until(lambda: len(kept.log.segments()) == 2, "another try")
    assert any("a tick failed" in record.message for record in caplog.records)
    kept.log.close()


def test_a_keeper_ends_when_the_disk_fails(keepers):
    kept = Kept(sync_interval_ms=1)
    before = set(threading.enumerate())
    Keeper(kept.log).start()
    kept.disk.faults.fail(1, errno.EIO, sticky=False, calls=frozenset({"sync"}))
    kept.clock.advance(ms=5)
    kept.log.append_one(b"x", "interval")
    kept.clock.advance(ms=5)
    until(lambda: not set(threading.enumerate()) - before, "the keeper goes on")
    with pytest.raises(DiskFailed):
        kept.log.append_one(b"y", "os")
    kept.log.close()
    with pytest.raises(Closed):
        kept.log.append_one(b"y", "os")
