"""Faults that were reproduced in the systems that Holdfast unites: each one is shown not to be here."""

from __future__ import annotations

import random

import pytest

from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import Busy, DamagedRange, DiskFull
from holdfast.model import Batch
from holdfast.storage import Log, open_log
from holdfast.storage.files import segment_name
from tests.crash.histories import FOLDER, small_settings

FIRST_SEGMENT = f"{FOLDER}/{segment_name(0)}"


def world(disk: SimulatedDisk, *, boot: int = 1) -> World:
    return World(clock=ManualClock(), disk=disk, ids=SeededIds(boot))


def opened(disk: SimulatedDisk, *, boot: int = 1, **settings) -> Log:
    return Log.open(FOLDER, small_settings(**settings), world(disk, boot=boot))


def values(log: Log) -> list[bytes]:
    return [record.value for record in log.records(log.start)]


def test_a_kill_before_the_first_sync_leaves_a_log_that_opens():
    disk = SimulatedDisk()
    stages = []
    disk.on_call = lambda call: stages.append(disk.kill())
    opened(disk).append([b"first"], durability="os")
    assert len(stages) > 10
    for left in stages:
        assert values(opened(left)) in ([], [b"first"])


def test_an_empty_segment_file_is_no_obstacle():
    disk = SimulatedDisk()
    opened(disk).close()
    disk.open(FIRST_SEGMENT, write=True, create=True).close()
    log = opened(disk)
    assert log.append([b"first"]).offset == 0
    assert values(log) == [b"first"]


@pytest.mark.parametrize("boot", [1, 2])
def test_a_torn_tail_never_keeps_a_log_from_opening(boot):
    disk = SimulatedDisk(maps=False)
    log = opened(disk)
    log.append([b"whole"], durability="fsync")
    log.append([b"torn" * 50], durability="os")
    size = len(disk.contents(FIRST_SEGMENT))
    whole = size - 88 - 8 - 200
    for length in range(whole, size):
        left = disk.kill()
        left.cut_file(FIRST_SEGMENT, length)
        with opened(left, boot=boot) as log:
            assert values(log) == [b"whole"]
            log.append([b"goes on"])
        with opened(left, boot=boot) as log:
            assert values(log) == [b"whole", b"goes on"]


def test_an_end_published_ahead_of_lost_data_does_not_make_reading_stick():
    disk = SimulatedDisk()
    log = opened(disk)
    log.append([b"durable"], durability="fsync")
    for _ in range(10):
        log.append([b"only in the page cache"], durability="os")
    for seed in range(100):
        left = disk.cut(random.Random(seed))
        with opened(left, boot=2) as log:
            kept = values(log)
            assert kept[0] == b"durable"
            assert log.append([b"next"], durability="fsync").offset == len(kept)
            assert values(log) == [*kept, b"next"]


def test_one_flipped_bit_hides_one_frame_and_nothing_behind_it():
    disk = SimulatedDisk()
    with opened(disk) as log:
        for n in range(10):
            log.append([b"%d" % n * 50])
    disk.flip(FIRST_SEGMENT, 400, mask=0x10)
    log = opened(disk)
    with pytest.raises(DamagedRange) as caught:
        values(log)
    damage = caught.value
    assert damage.next_offset == damage.first_offset + 1
    assert len(list(log.records(0, on_damage="skip"))) == 9


def test_a_header_value_over_65535_bytes_leaves_the_payload_alone():
    log = opened(SimulatedDisk())
    long_value = bytes(range(256)) * 300
    log.append(Batch(values=[b"payload"], headers=[[("big", long_value), ("small", b"x")]]))
    (record,) = log.records(0)
    assert record.value == b"payload"
    assert record.headers == (("big", long_value), ("small", b"x"))


def test_opening_adds_no_file(tmp_path):
    folder = tmp_path / "log"
    with open_log(str(folder)) as log:
        log.append([b"one"])
    before = sorted(path.name for path in folder.iterdir())
    for _ in range(50):
        open_log(str(folder)).close()
    assert sorted(path.name for path in folder.iterdir()) == before


def test_retention_never_deletes_what_a_group_has_not_read():
    log = opened(SimulatedDisk(), retention_segments=1)
    for n in range(30):
        log.append([bytes([n]) * 1000])
    log.pin("group:slow", 0)
    assert log.retain().segments == 0
    assert len(values(log)) == 30


def test_a_second_owner_is_refused_and_no_id_is_given_twice():
    disk = SimulatedDisk()
    first = opened(disk)
    with pytest.raises(Busy, match="process 1 on simulation"):
        opened(disk)
    assert first.append([b"still mine"]).offset == 0


def test_free_disk_is_watched_while_running():
    disk = SimulatedDisk(capacity_bytes=100_000)
    log = opened(disk, min_free_bytes=50_000)
    with pytest.raises(DiskFull):
        for _ in range(100):
            log.append([bytes(1000)])


@pytest.mark.parametrize("codec", ["zstd", "lz4", "gzip"])
def test_a_compressed_payload_moved_elsewhere_is_still_itself(codec):
    source, target = opened(SimulatedDisk()), opened(SimulatedDisk())
    payload = b"compress me " * 500
    source.append([payload], codec=codec)
    (frame,) = source.read(0)
    assert frame.header.codec != 0
    target.append([record.value for record in source.records(0)])
    assert values(target) == [payload]


def test_a_sync_does_not_wait_for_the_next_append():
    disk, clock = SimulatedDisk(), ManualClock()
    log = Log.open(FOLDER, small_settings(sync_interval_ms=100), World(clock=clock, disk=disk, ids=SeededIds(1)))
    log.append([b"on its own"], durability="interval")
    assert log.tick() == 100
    clock.advance(ms=100)
    log.tick()
    assert log.synced_end == 1


def test_a_clock_that_steps_back_does_not_break_the_search_by_time():
    clock = ManualClock(now_ns=1_000)
    log = Log.open(FOLDER, small_settings(), World(clock=clock, disk=SimulatedDisk(), ids=SeededIds(1)))
    times = []
    rng = random.Random(7)
    for n in range(300):
        clock.step_wall(ns=rng.choice([-90, -5, 1, 3, 20]))
        times.append(clock.now_ns())
        log.append([b"%d" % n + bytes(rng.randint(0, 200))], durability="os")
    assert len(log.segments()) > 3
    for wanted in range(min(times) - 5, max(times) + 5):
        first = next((i for i, time in enumerate(times) if time >= wanted), len(times))
        assert log.find_time(wanted) == first


def test_folders_are_synced_after_creating_and_renaming():
    """The first message of a new log and of each new segment is there after any power cut."""
    disk = SimulatedDisk()
    log = opened(disk)
    for n in range(12):
        log.append([bytes([n]) * 1000], durability="fsync")
        for seed in range(20):
            assert values(opened(disk.cut(random.Random(seed)), boot=2)) == [bytes([m]) * 1000 for m in range(n + 1)]
