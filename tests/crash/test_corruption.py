"""Every byte of a log flipped, files cut at every length: no wrong payload, no silent loss, nothing deleted."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from holdfast.codec.frame import HEADER_BYTES, FrameHeader
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import DamagedRange
from holdfast.model import Batch
from holdfast.storage.frames import FrameRules, walk
from holdfast.storage.log import Log
from holdfast.storage.reader import LogReader
from tests.crash.histories import FOLDER, small_settings

SAME_BOOT, OTHER_BOOT = 1, 2


@dataclass(frozen=True)
class Sample:
    """A log that ended in order, and where each of its frames lies."""

    disk: SimulatedDisk
    values: list[bytes]
    frames: dict[str, list[FrameHeader]]

    def hit(self, name: str, start: int, end: int) -> set[int]:
        """Offsets of the messages in frames that bytes [start, end) of a file belong to."""
        touched = [f for f in self.frames.get(name, []) if f.position < end and start < f.end]
        return {offset for f in touched for offset in range(f.base_offset, f.next_offset)}


def world(disk: SimulatedDisk, boot: int) -> World:
    return World(clock=ManualClock(), disk=disk, ids=SeededIds(boot))


@pytest.fixture(scope="module", params=[True, False], ids=["mapped", "written"])
def sample(request) -> Sample:
    disk = SimulatedDisk(maps=request.param)
    values = []
    with Log.open(FOLDER, small_settings(), world(disk, SAME_BOOT)) as log:
        for n in range(14):
            batch = [bytes([65 + n]) * size for size in ([30] if n % 3 else [5, 0, 700, 600])]
            keys = [b"key"] * len(batch) if n % 4 == 0 else None
            log.append(Batch(values=batch, keys=keys), durability="fsync", codec="zstd" if n == 6 else None)
            values += batch
        assert len(log.segments()) >= 3
    frames = {}
    for name in disk.names(FOLDER):
        if name.endswith(".log"):
            data = memoryview(disk.contents(f"{FOLDER}/{name}"))
            frames[name] = list(walk(data, FrameRules(log.log_id, int(name[:20]))))
    return Sample(disk, values, frames)


def read_all(log: Log | LogReader) -> tuple[dict[int, bytes], set[int]]:
    """What can be read, and what is reported as damaged."""
    found: dict[int, bytes] = {}
    damaged: set[int] = set()
    offset = log.start
    while offset < log.end:
        try:
            for record in log.records(offset):
                found[record.offset] = record.value
                offset = record.offset + 1
        except DamagedRange as damage:
            assert damage.next_offset > offset
            damaged |= set(range(damage.first_offset, damage.next_offset))
            offset = damage.next_offset
    return found, damaged


def check_damaged(sample: Sample, disk: SimulatedDisk, boot: int, hit: set[int], what: str) -> None:
    """Open the damaged log and account for every message."""
    before = {name: disk.contents(f"{FOLDER}/{name}") for name in disk.names(FOLDER)}
    with Log.open(FOLDER, small_settings(), world(disk, boot)) as log:
        found, damaged = read_all(log)
        missing = set(range(len(sample.values))) - set(found)
        assert all(sample.values[offset] == value for offset, value in found.items()), f"wrong payload: {what}"
        assert missing <= hit, f"messages lost that were not hit: {what}"
        assert missing <= damaged, f"silent loss: {what}"
        assert log.append([b"new"]).offset >= len(sample.values), f"an offset was given twice: {what}"
    check_nothing_deleted(disk, before, what)


def check_nothing_deleted(disk: SimulatedDisk, before: dict[str, bytes], what: str) -> None:
    kept = b"".join(
        disk.contents(f"{FOLDER}/quarantine/{name}")
        for name in (disk.names(f"{FOLDER}/quarantine") if disk.exists(f"{FOLDER}/quarantine") else [])
        if name.endswith((".bin", ".log"))
    )
    for name, content in before.items():
        if name.endswith(".log"):
            now = disk.contents(f"{FOLDER}/{name}") if disk.exists(f"{FOLDER}/{name}") else b""
            if now == content:
                continue
            used = len(content.rstrip(b"\0"))
            gone = [at for at in range(used) if now[at : at + 1] != content[at : at + 1]]
            if gone:
                assert content[gone[0] : gone[-1] + 1].strip(b"\0") in kept, f"bytes deleted: {what}"


@pytest.mark.parametrize("part", range(4))
def test_a_flipped_byte_costs_at_most_the_frame_it_hits(sample, part, long):
    """Each byte once, in turn with either kind of boot and either mask; in a long run with all of them."""
    ways = [(SAME_BOOT, 0xFF), (OTHER_BOOT, 0x01), (OTHER_BOOT, 0xFF), (SAME_BOOT, 0x01)]
    for name in sample.disk.names(FOLDER):
        size = len(sample.disk.contents(f"{FOLDER}/{name}"))
        used = max((f.end for f in sample.frames.get(name, [])), default=size)
        # Behind the frames all zeros are alike: a few of them stand for the rest.
        places = [*range(used), *range(used, size, max(1, (size - used) // 8))]
        for position in places[part::4]:
            for boot, mask in ways if long else [ways[(position // 4) % 4]]:
                disk = sample.disk.kill()
                disk.flip(f"{FOLDER}/{name}", position, mask)
                check_damaged(sample, disk, boot, sample.hit(name, position, position + 1), f"{name} byte {position}")


@pytest.mark.parametrize("boot", [SAME_BOOT, OTHER_BOOT], ids=["same-boot", "other-boot"])
def test_a_file_cut_at_any_length_loses_only_what_was_cut_off(sample, boot, long):
    for name in sample.disk.names(FOLDER):
        size = len(sample.disk.contents(f"{FOLDER}/{name}"))
        used = max((f.end for f in sample.frames.get(name, [])), default=size)
        for length in range(0, used, 1 if long else 5):
            disk = sample.disk.kill()
            disk.cut_file(f"{FOLDER}/{name}", length)
            check_damaged(sample, disk, boot, sample.hit(name, length, size), f"{name} cut at {length}")


@pytest.mark.parametrize("boot", [SAME_BOOT, OTHER_BOOT], ids=["same-boot", "other-boot"])
def test_a_file_that_is_gone_costs_only_what_was_in_it(sample, boot):
    for name in sample.disk.names(FOLDER):
        disk = sample.disk.kill()
        disk.remove(f"{FOLDER}/{name}")
        hit = sample.hit(name, 0, 1 << 40)
        first = next(iter(sample.frames))
        if name == first:
            # Nothing tells a missing first segment from a trimmed one.
            with Log.open(FOLDER, small_settings(), world(disk, boot)) as log:
                found, _ = read_all(log)
                assert set(found) == set(range(len(sample.values))) - hit
        else:
            check_damaged(sample, disk, boot, hit, f"{name} gone")


def test_a_reader_that_owns_nothing_gets_the_same_from_a_damaged_log(sample):
    for name, frames in sample.frames.items():
        for frame in frames:
            for position in (frame.position, frame.position + 12, frame.position + HEADER_BYTES, frame.end - 1):
                disk = sample.disk.kill()
                disk.flip(f"{FOLDER}/{name}", position)
                found, damaged = read_all(LogReader(FOLDER, small_settings(), world(disk, SAME_BOOT)))
                hit = set(range(frame.base_offset, frame.next_offset))
                assert damaged == hit
                assert found == {o: v for o, v in enumerate(sample.values) if o not in hit}


def test_check_names_the_place_of_every_damaged_frame(sample):
    from holdfast.storage.checks.check import check

    for name, frames in sample.frames.items():
        for frame in frames:
            for position in (frame.position + 12, frame.end - 1):
                disk = sample.disk.kill()
                disk.flip(f"{FOLDER}/{name}", position)
                report = check(FOLDER, world(disk, SAME_BOOT), small_settings())
                assert not report.ok
                places = [
                    (f.file, f.position, f.first_offset, f.next_offset)
                    for f in report.findings
                    if f.severity == "damage"
                ]
                assert (name, frame.position, frame.base_offset, frame.next_offset) in places


@pytest.mark.parametrize("field_at", [12, 16, 20], ids=["body_bytes", "raw_bytes", "count"])
def test_a_spoiled_length_is_never_taken_for_a_torn_tail(sample, field_at):
    for name, frames in sample.frames.items():
        for frame in frames:
            for byte in range(4):
                disk = sample.disk.kill()
                disk.flip(f"{FOLDER}/{name}", frame.position + field_at + byte)
                size = len(disk.contents(f"{FOLDER}/{name}"))
                with Log.open(FOLDER, small_settings(), world(disk, OTHER_BOOT)) as log:
                    found, damaged = read_all(log)
                    hit = set(range(frame.base_offset, frame.next_offset))
                    assert damaged == hit
                    assert set(found) == set(range(len(sample.values))) - hit
                assert len(disk.contents(f"{FOLDER}/{name}")) == size, "the log was truncated on disk"


def test_damage_in_a_log_that_was_never_synced_is_not_taken_for_a_torn_tail_without_a_restart():
    disk = SimulatedDisk()
    log = Log.open(FOLDER, small_settings(segment_bytes=1 << 16), world(disk, SAME_BOOT))
    for n in range(10):
        log.append([bytes([n]) * 100], durability="os")
    disk = disk.kill()
    disk.flip(f"{FOLDER}/{0:020d}.log", 500)
    with Log.open(FOLDER, small_settings(), world(disk, SAME_BOOT)) as log:
        found, damaged = read_all(log)
        assert len(damaged) == 1
        assert len(found) == 9
        assert len(log.report.damage) == 1


def test_what_was_written_since_a_remount_is_kept_by_a_kill_as_on_any_other_mount():
    """Each owner notes the mount that it found the log on: against an older one, a kill counts as a restart."""
    disk = SimulatedDisk()
    Log.open(FOLDER, small_settings(), world(disk, SAME_BOOT)).append([b"synced"], durability="fsync")
    disk = disk.remount(random.Random(1))
    log = Log.open(FOLDER, small_settings(segment_bytes=1 << 16), world(disk, SAME_BOOT))
    for n in range(10):
        log.append([bytes([n]) * 100], durability="os")
    disk = disk.kill()
    disk.flip(f"{FOLDER}/{0:020d}.log", 700)
    with Log.open(FOLDER, small_settings(), world(disk, SAME_BOOT)) as log:
        found, damaged = read_all(log)
        assert len(damaged) == 1
        assert len(found) == 10
