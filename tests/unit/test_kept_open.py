"""What stays mapped for reading: bounded by bytes, and what to do where there is no room for a map at all."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import Unavailable
from holdfast.settings import LogSettings
from holdfast.storage import segment, view
from holdfast.storage.log import Log
from holdfast.storage.reader import LogReader
from holdfast.storage.segment import KeptOpen
from tests.unit.logs import FOLDER, SMALL, Logged

MIB = 1 << 20


class Opened:
    """A segment as far as those who count it see."""

    is_active = False

    def __init__(self, size: int) -> None:
        self.size = size
        self.held_bytes = 0

    def read(self, kept: KeptOpen) -> None:
        kept.touch(self)
        self.held_bytes = self.size

    def close_files(self) -> None:
        self.held_bytes = 0


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> KeptOpen:
    """In the place of the one of this process."""
    kept = KeptOpen()
    for module in (segment, view):
        monkeypatch.setattr(module, "KEPT_OPEN", kept)
    return kept


def mapped_segments(folder: Path) -> set[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[-1] for line in lines if f"{folder}/" in line and line.endswith(".log")}


def test_those_that_were_not_used_for_longest_are_let_go_beyond_the_bytes():
    kept = KeptOpen(most_bytes=10 * MIB)
    segments = [Opened(4 * MIB) for _ in range(4)]
    for i in (0, 1, 0, 2):
        segments[i].read(kept)
    assert [each.held_bytes // MIB for each in segments] == [4, 0, 4, 0]
    segments[3].read(kept)
    assert [each.held_bytes // MIB for each in segments] == [0, 0, 4, 4]


def test_one_that_is_larger_than_all_that_may_be_kept_is_opened_all_the_same():
    kept = KeptOpen(most_bytes=MIB)
    small, large = Opened(1), Opened(64 * MIB)
    small.read(kept)
    large.read(kept)
    assert (small.held_bytes, large.held_bytes) == (1, 64 * MIB)
    Opened(1).read(kept)
    assert large.held_bytes == 0


def test_reading_a_backlog_through_keeps_no_more_mapped_than_the_budget(tmp_path: Path, kept: KeptOpen):
    kept.most_bytes = 4 * MIB
    settings = LogSettings(segment_bytes=MIB, min_free_bytes=0, durability="os")
    with Log.open(tmp_path / "log", settings) as log:
        for _ in range(160):
            log.append([bytes(100_000)])
        log.sync()
        assert len(log.segments()) > 12
        for _ in range(2):
            assert sum(1 for _ in log.records(log.start)) == 160
            assert 1 < len(mapped_segments(tmp_path)) <= 4 + 1  # and the active one


def test_a_segment_is_read_where_there_is_no_room_to_map_it(kept: KeptOpen):
    logged = Logged()
    with logged.fill(close=False) as log:
        list(log.records(0))
        first, second = log._writer.segments[:2]
        assert first.held_bytes
        logged.disk.faults.fail(1, errno.ENOMEM, sticky=True, calls=frozenset({"view"}))
        second.close_files()
        values = {
            record.offset: record.value
            for record in log.records(second.base_offset, on_damage="raise")
            if record.offset < log._writer.segments[2].base_offset
        }
        assert values.items() <= logged.values.items()
        assert values
        assert first.held_bytes == 0  # it made room for it
        second.opened(second.base_offset + 1)
        reads = logged.disk.calls["read"]
        second.opened(second.base_offset + 1)
        assert logged.disk.calls["read"] == reads  # once is enough


def test_memory_that_is_missing_is_told_as_that(kept: KeptOpen, monkeypatch: pytest.MonkeyPatch):
    logged = Logged(SimulatedDisk())
    with logged.fill(close=False) as log:
        log._writer.segments[0].close_files()
        logged.disk.faults.fail(1, errno.ENOMEM, sticky=True, calls=frozenset({"view", "read"}))
        with pytest.raises(Unavailable, match="there is no memory left") as caught:
            next(log.records(0))
        assert "check the disk" not in str(caught.value)
        logged.disk.faults.clear()
        assert next(log.records(0)).value == logged.values[0]


def test_what_was_read_instead_of_mapped_grows_with_the_log(kept: KeptOpen):
    logged = Logged()
    with logged.open() as log:
        logged.append(log, [b"one"])
        logged.disk.faults.fail(1, errno.ENOMEM, sticky=True, calls=frozenset({"view"}))
        reader, follower = LogReader(FOLDER, SMALL, logged.world), log.follower()
        for n in range(20):
            logged.append(log, [b"more %d" % n])
            assert {each.offset: each.value for each in log.records(0)} == logged.values
            assert {each.offset: each.value for each in reader.records(0)} == logged.values
            assert follower.record(n + 1).value == b"more %d" % n
