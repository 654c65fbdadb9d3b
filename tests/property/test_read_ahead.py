"""What is read ahead is what a plain read returns: in any order of reads, of any bytes, and after any change."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.codec.singles import log_prefixes, read_single, read_singles
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import DamagedRange, InvalidRequest, OffsetOutOfRange
from holdfast.model import Batch, Record
from holdfast.storage.log import Log
from tests.crash.histories import FOLDER, small_settings

_sizes = st.sampled_from([0, 1, 7, 8, 100, 100, 100, 700])
_places = st.integers(0, 60)
_steps = st.lists(
    st.tuples(st.just("one"), _sizes, st.integers(1, 20))
    | st.tuples(st.just("keyed"), _sizes, st.integers(1, 3))
    | st.tuples(st.just("batch"), _sizes, st.integers(1, 5))
    | st.tuples(st.just("held"), _sizes)
    | st.tuples(st.just("next"), st.integers(1, 40))
    | st.tuples(st.just("record"), _places)
    | st.tuples(st.just("records"), _places, st.integers(0, 30))
    | st.tuples(st.just("frame"), _places)
    | st.tuples(st.just("truncate"), _places)
    | st.tuples(st.sampled_from(["unmap", "rest", "sync", "roll"])),
    max_size=30,
)


class _Reading:
    """A log, a follower of it, and where that has got to."""

    def __init__(self) -> None:
        world = World(clock=ManualClock(), disk=SimulatedDisk(), ids=SeededIds(3))
        self.log = Log.open(FOLDER, small_settings(), world)
        self.follower = self.log.follower()
        self.at = 0
        self.written = 0

    def value(self, size: int) -> bytes:
        self.written += 1
        return bytes([self.written % 256]) * size

    def do(self, verb: str, *rest: int) -> None:
        getattr(self, verb)(*rest)

    def one(self, size: int, count: int) -> None:
        for _ in range(count):
            self.log.append_one(self.value(size))

    def keyed(self, size: int, count: int) -> None:
        for _ in range(count):
            self.log.append(Batch(values=[self.value(size)], keys=[b"k"]))

    def batch(self, size: int, count: int) -> None:
        self.log.append([self.value(size) for _ in range(count)])

    def held(self, size: int) -> None:
        self.log.write([self.value(size)], durability="fsync")

    def next(self, count: int) -> None:
        for _ in range(count):
            self.record(self.at)
            self.at += 1

    def record(self, at: int) -> None:
        self.at = min(at, self.log.end)
        self.check(self.at)

    def records(self, start: int, count: int) -> None:
        start = min(start, self.log.end)
        stop = min(start + count, self.log.end)
        assert self.follower.records(start, stop) == self.plain(start, stop)

    def frame(self, at: int) -> None:
        if at < self.log.end:
            assert self.follower.frame(at).records() == next(self.log.read(at)).records()

    def truncate(self, at: int) -> None:
        self.log.sync()
        with suppress(InvalidRequest):  # inside a batch
            self.log.truncate(min(at, self.log.end))
        self.at = min(self.at, self.log.end)

    def rest(self) -> None:
        self.log._files.rest(wait=True)

    def unmap(self) -> None:
        self.follower.unmap()

    def sync(self) -> None:
        self.log.sync()

    def roll(self) -> None:
        self.log.roll()

    def check(self, offset: int) -> None:
        if offset < self.log.end:
            readable = 1 if self.at % 7 == 6 else self.log.end - offset
            assert self.follower.record(offset, readable) == self.plain(offset, offset + 1)[0]
        assert all(record.offset < self.log.end for record in self.follower.ahead)

    def plain(self, start: int, stop: int) -> list[Record]:
        return [record for record in self.log.records(start) if record.offset < stop] if start < stop else []


@example([("one", 100, 20), ("next", 10), ("truncate", 10), ("one", 100, 5), ("next", 5)])
@example([("one", 100, 12), ("held", 100), ("next", 14), ("sync",), ("next", 3)])
@given(_steps)
def test_a_follower_returns_what_a_plain_read_does(steps: list[tuple[Any, ...]]):
    reading = _Reading()
    for step in steps:
        reading.do(*step)
    reading.do("next", 100)
    reading.log.close()


@given(
    st.lists(st.tuples(_sizes, st.sampled_from([None, None, b"k", b"l", b"key"])), min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(0, 2**20), st.integers(0, 7)), max_size=3),
    st.integers(1, 20),
)
def test_a_run_ends_where_a_single_message_is_refused(
    messages: list[tuple[int, bytes | None]], flips: list[tuple[int, int]], most: int
):
    disk = SimulatedDisk()
    log = Log.open(FOLDER, small_settings(segment_bytes=2**20), World(ManualClock(), disk, SeededIds(3)))
    for size, key in messages:
        log.append([bytes(size)] if key is None else Batch(values=[bytes(size)], keys=[key]))
    end, prefix = log._writer.active.position, log_prefixes(log.log_id)
    data = bytearray(disk.contents(f"{FOLDER}/{0:020d}.log")[:end])
    for at, bit in flips:
        data[at % end] ^= 1 << bit
    expected: list[Record] = []
    position = 0
    while len(expected) < most and (found := read_single(memoryview(data), position, prefix)) is not None:
        if found[0].offset != len(expected):
            break
        expected.append(found[0])
        position = found[1]
    assert read_singles(memoryview(data), 0, prefix, 0, most) == (expected, position)


def test_reading_ahead_grows_with_each_step_and_is_bounded_by_messages_and_bytes():
    for size, most in ((100, 64), (700, 16_384 // 736)):
        reading = _Reading()
        reading.log.change(small_settings(segment_bytes=2**20))
        for _ in range(400):
            reading.log.append_one(bytes(size))
        seen = set()
        for offset in range(400):
            reading.follower.record(offset, 400 - offset)
            seen.add(len(reading.follower.ahead) + 1)
        assert {1, 2, 4, 8} <= seen
        assert most * 3 // 4 <= max(seen) <= most
        reading.follower.record(10, 390)
        reading.follower.record(11, 389)
        assert len(reading.follower.ahead) < 4  # after a jump, it begins anew


def test_a_damaged_message_ends_what_is_read_ahead_and_the_next_ones_are_read():
    reading = _Reading()
    for _ in range(8):
        reading.log.append_one(bytes(100))
    reading.log.sync()
    segment = reading.log._writer.active
    segment.map[200 + 136 * 4 + 50 : 200 + 136 * 4 + 51] = b"\x01"
    read = []
    for offset in range(8):
        try:
            read.append(reading.follower.record(offset, 8 - offset).offset)
        except (DamagedRange, OffsetOutOfRange) as error:
            assert isinstance(error, DamagedRange)
    assert read == [0, 1, 2, 3, 4, 6, 7]
