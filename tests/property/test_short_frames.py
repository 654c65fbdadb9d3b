"""A log with short frames says what the same log would say if all its frames were long."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from unittest.mock import patch

from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.codec.frame import FrameHeader, frames_in, stored_frame
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import InvalidRequest
from holdfast.model import Batch
from holdfast.storage import writer as writing
from holdfast.storage.checks.check import check
from holdfast.storage.examine import examine
from holdfast.storage.frames import FrameRules, walk
from holdfast.storage.log import Log
from holdfast.storage.reader import LogReader
from tests.crash.histories import FOLDER, small_settings

_sizes = st.sampled_from([0, 1, 47, 48, 49, 100, 100, 100, 1023, 1024])
_steps = st.lists(
    st.tuples(st.just("one"), _sizes, st.integers(1, 20))
    | st.tuples(st.just("keyed"), _sizes, st.integers(1, 3))
    | st.tuples(st.just("batch"), _sizes, st.integers(1, 5))
    | st.tuples(st.just("synced"), _sizes, st.integers(1, 3))
    | st.tuples(st.just("clock"), st.integers(0, 50), st.just(0))
    | st.tuples(st.just("truncate"), st.integers(0, 60), st.just(0))
    | st.tuples(st.sampled_from(["sync", "roll", "rest", "reopen", "kill", "reboot"]), st.just(0), st.just(0)),
    min_size=1,
    max_size=14,
)


class _Life:
    """A log on a simulated disk, whose short frames are at most so many bytes apart from a long one."""

    def __init__(self, steps: list[tuple[str, int, int]], *, most_short: int, maps: bool) -> None:
        self.disk, self.ids, self.clock = SimulatedDisk(maps=maps), SeededIds(3), ManualClock()
        self.written = 0
        with patch.object(writing, "_MOST_SHORT", most_short):
            self.log = self.open()
            for verb, number, count in steps:
                self.do(verb, number, count)
            self.log.sync()

    @property
    def world(self) -> World:
        return World(clock=self.clock, disk=self.disk, ids=self.ids)

    def open(self) -> Log:
        # Only an end that does not depend on the bytes starts a segment at the same message in both.
        return Log.open(FOLDER, small_settings(segment_bytes=1 << 20), self.world)

    def value(self, size: int) -> bytes:
        self.written += 1
        return bytes([self.written % 256]) * size

    def do(self, verb: str, number: int, count: int) -> None:
        values = [self.value(number) for _ in range(count)]
        match verb:
            case "one":
                for value in values:
                    self.log.append_one(value)
            case "synced":
                for value in values:
                    self.log.append([value], durability="fsync")
            case "keyed":
                for value in values:
                    self.log.append(Batch(values=[value], keys=[b"k"]))
            case "batch":
                self.log.append(values)
            case "clock":
                self.clock.advance(ms=number)
            case "truncate":
                with suppress(InvalidRequest):  # inside a batch
                    self.log.truncate(min(number, self.log.end))
            case "rest":
                self.log._files.rest(wait=True)
            case "sync" | "roll":
                getattr(self.log, verb)()
            case _:
                self.again(verb)

    def again(self, verb: str) -> None:
        if verb == "reopen":
            self.log.close()
        else:
            self.disk = self.disk.kill()
        if verb == "reboot":  # with all that was in the page cache on disk
            self.ids.reboot()
        self.log = self.open()

    def headers(self) -> list[FrameHeader]:
        return [frame.header for frame in self.log.read(self.log.start)]

    def facts(self) -> dict[str, Any]:
        """All that does not depend on where frames are."""
        log, follower = self.log, self.log.follower()
        records = list(log.records(log.start))
        assert [follower.record(at, log.end - at) for at in range(log.start, log.end)] == records
        assert self.log.follower().records(log.start, log.end) == records
        assert list(LogReader(FOLDER, world=self.world).records(log.start)) == records
        bare = examine(self.world, FOLDER, None, index_bytes=512)
        return {
            "records": records,
            "ends": (log.start, log.end, log.synced_end, log.epoch),
            "epochs": log._writer.epochs.entries,
            "segments": [(facts.base_offset, facts.next_offset, facts.max_time_ns) for facts in log.segments()],
            "times": [log.find_time(record.timestamp_ns) for record in records],
            "known without a state file": (bare.known_synced, bare.end, bare.last_epoch, bare.damage, bare.lost_tail),
        }


@example([("one", 100, 20), ("kill", 0, 0), ("one", 100, 5), ("truncate", 22, 0), ("one", 100, 5)], True)
@example([("one", 100, 20), ("sync", 0, 0), ("one", 100, 5), ("reboot", 0, 0), ("one", 48, 5)], False)
@given(_steps, st.booleans())
def test_short_frames_say_what_long_ones_would(steps: list[tuple[str, int, int]], maps: bool):
    lives = [_Life(steps, most_short=most, maps=maps) for most in (64 * 1024, 300, 0)]
    assert not any(header.is_short for header in lives[2].headers())
    expected = lives[2].facts()
    for life in lives[:2]:
        assert life.facts() == expected
        assert not check(FOLDER, life.world, small_settings()).findings


@given(_steps)
def test_the_frames_of_a_log_can_be_sent_and_read_elsewhere(steps: list[tuple[str, int, int]]):
    log = _Life(steps, most_short=64 * 1024, maps=True).log
    sent = [b"".join(stored_frame(frame)) for frame in log.read(log.start)]
    for facts in log.segments():
        file = log._world.disk.contents(f"{FOLDER}/{facts.base_offset:020d}.log")
        walked = walk(memoryview(file), FrameRules(log.log_id, facts.base_offset, epochs=log._writer.epochs))
        for header in (found for found in walked if isinstance(found, FrameHeader)):
            assert file[header.position : header.end] in sent
    read = [
        record for frame in frames_in(memoryview(b"".join(sent)), max_raw_bytes=1 << 20) for record in frame.records()
    ]
    assert read == list(log.records(log.start))


@given(_steps, st.lists(st.tuples(st.integers(0, 2**20), st.integers(0, 7)), min_size=1, max_size=3))
def test_no_flip_changes_a_message(steps: list[tuple[str, int, int]], flips: list[tuple[int, int]]):
    life = _Life(steps, most_short=64 * 1024, maps=True)
    records = {record.offset: record for record in life.log.records(life.log.start)}
    life.log.close()
    for name in [name for name in life.disk.names(FOLDER) if name.endswith(".log")]:
        content = bytearray(life.disk.contents(f"{FOLDER}/{name}"))
        for at, bit in flips:
            if content:
                content[at % len(content)] ^= 1 << bit
        file = life.disk.open(f"{FOLDER}/{name}", write=True)
        file.write(0, [bytes(content)])
    reader = LogReader(FOLDER, world=life.world)
    for record in reader.records(reader.start, on_damage="skip"):
        assert record == records[record.offset]
