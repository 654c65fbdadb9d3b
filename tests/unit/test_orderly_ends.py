"""A log that was closed in order is opened without a second look at what it holds, however its last segment stands."""

from __future__ import annotations

import pytest

from tests.unit.logs import Logged


def torn_first_frame(logged: Logged) -> str:
    """The owner died while it wrote the first frame of the last segment: some of its bytes are there."""
    name = logged.segments()[-1]
    assert len(logged.frames(name)) == 1
    logged.flip(name, logged.frames(name)[0].end - 1)
    assert logged.frames(name) == []
    return name


@pytest.mark.parametrize("batches", [0, 40])
@pytest.mark.parametrize("damaged_bytes", [0, 3])
def test_a_segment_whose_only_frame_was_torn_and_cut_ends_in_order(batches: int, damaged_bytes: int):
    logged = Logged()
    log = logged.fill(batches, close=False)
    count = len(logged.segments())
    while len(logged.segments()) == count:  # up to the first message of a new segment
        end = log.written_end
        log.append([b"x" * 100], durability="os")
    logged.restart()
    name = torn_first_frame(logged)
    if damaged_bytes:
        logged.write(name, 0, b"\xff" * damaged_bytes)
    log = logged.open()
    assert (log.end, log.report.clean) == (end, False)
    log.close()
    assert not any(logged.disk.contents(logged.path(name)))
    before = logged.contents()

    log = logged.open()
    assert log.report.clean
    assert log.end == end
    log.close()
    assert logged.contents()["epochs"] == before["epochs"]
    with logged.open() as log:
        logged.append(log, [b"goes on"])
        assert [record.value for record in log.records(end)] == [b"goes on"]
    assert logged.check().ok


def test_a_first_frame_that_was_overwritten_with_zeros_is_found_though_the_log_was_closed_in_order():
    logged = Logged()
    logged.fill(40)
    name = logged.segments()[-1]
    first = logged.frames(name)[0]
    logged.zero(name, 0, first.end)
    with logged.open() as log:
        assert not log.report.clean
        assert log.report.damage


def test_a_log_that_was_truncated_to_the_start_of_a_segment_ends_in_order():
    logged = Logged()
    log = logged.fill(40, close=False)
    base = int(logged.segments()[-1][:20])
    log.truncate(base)
    log.close()
    with logged.open() as log:
        assert log.report.clean
        assert log.end == base
