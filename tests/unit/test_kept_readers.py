"""A reader that is kept for long: owners come and go, segments too, and it sees what there is by then."""

from __future__ import annotations

from typing import Any

from holdfast.storage import LogReader
from tests.unit.logs import FOLDER, SMALL, Logged


def reader_of(logged: Logged) -> LogReader:
    return LogReader(FOLDER, SMALL, logged.world)


def values(log: Any) -> list[bytes]:
    return [record.value for record in log.records(log.start)]


def test_a_reader_from_before_the_owner_came_sees_what_the_owner_writes() -> None:
    logged = Logged()
    logged.fill(3, close=False)
    logged.restart()
    reader = reader_of(logged)
    assert reader.end == 15
    with logged.open() as log:
        log.append([b"new"])
        assert (reader.end, values(reader)) == (16, values(log))


def test_a_reader_on_another_machine_sees_what_is_synced() -> None:
    logged = Logged()
    log = logged.fill(3, close=False)
    logged.ids.reboot()
    reader = reader_of(logged)
    log.append([b"synced"], durability="fsync")
    assert reader.end == 16
    log.append([b"not yet"], durability="os")
    assert reader.end == 16


def test_a_reader_of_a_log_without_a_state_file_sees_the_owner_that_makes_one() -> None:
    logged = Logged()
    logged.fill(3)
    logged.disk.remove(logged.path("state"))
    reader = reader_of(logged)
    assert reader.end == 15
    with logged.open() as log:
        log.append([b"new"])
        assert (reader.end, values(reader)) == (16, values(log))


def test_a_reader_tells_where_the_log_begins_after_a_trim() -> None:
    logged = Logged()
    with logged.fill(100, close=False) as log:
        reader = reader_of(logged)
        assert reader.start == 0
        log.trim(log.end)
        assert reader.start == log.start > 0


def test_a_reader_finds_new_segments_of_a_log_that_was_truncated() -> None:
    logged = Logged()
    with logged.fill(100, close=False) as log:
        reader = reader_of(logged)
        assert reader.end == 500
        log.truncate(5)
        assert reader.end == 5
        for n in range(80):
            log.append([b"another %d" % n] * 5)
        assert log.end < 500
        assert values(reader) == values(log)


def test_the_parts_of_a_range_follow_the_segments() -> None:
    logged = Logged()
    with logged.fill(100, close=False) as log:
        reader = reader_of(logged)
        bases = [segment.base_offset for segment in log.segments()]
        assert [first for first, _ in reader.stretches(0, 500)] == bases
        assert [first for first, _ in reader.stretches(bases[1] + 3, bases[2])] == [bases[1] + 3]
        assert sum(size for _, size in reader.stretches(0, 500)) == reader.weigh(0, 500)
