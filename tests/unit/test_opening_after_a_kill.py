"""Opening a queue whose owner was killed: the tail of its log is read once, and all that is in it is known then."""

from __future__ import annotations

import pytest

from holdfast.codec.columns import FLAGS, PRIORITIES
from holdfast.storage import view
from tests.unit.queues import Place


@pytest.fixture
def frames_read(monkeypatch):
    """The positions of frames that were read by way of a view, and not by the walk of the opening."""
    read: list[int] = []
    read_header = view.read_header

    def noting(buffer, at, position, log_id):
        read.append(position)
        return read_header(buffer, at, position, log_id)

    monkeypatch.setattr(view, "read_header", noting)
    return read


def test_the_tail_is_read_once_however_long_it_is(frames_read):
    place = Place()
    for n in range(200):
        place.q.put(b"%d" % n)
    frames_read.clear()
    place.kill()
    assert len(frames_read) < 20
    assert [place.q.get_nowait().raw for _ in range(200)] == [b"%d" % n for n in range(200)]


def test_priorities_in_the_tail_are_known():
    place = Place()
    for n in range(40):
        place.q.put(b"%d" % n, priority=n % 4)
    place.kill()
    assert place.q.stats().ready == 40
    expected = [n for level in (3, 2, 1, 0) for n in range(40) if n % 4 == level]
    assert [int(place.q.get_nowait().raw) for _ in range(40)] == expected


def test_priorities_on_both_sides_of_what_was_walked_through_are_known():
    place = Place(segment_bytes=4_096)
    for n in range(120):
        place.q.put(b"%d" % n + b" " * 90, priority=n % 2)
    place.kill()
    place.q.put(b"120", priority=1)
    expected = [*range(1, 120, 2), 120, *range(0, 120, 2)]
    assert [int(place.q.get_nowait().raw) for _ in range(121)] == expected


def test_a_letter_that_was_redriven_to_one_group_is_not_told_to_another():
    place = Place(max_attempts=1)
    other = place.q._port.queue_group.topic.group("other")
    place.q.put(b"bad")
    place.q.get_nowait().reject("no")
    place.q.dead.redrive()
    place.kill()
    other = place.q._port.queue_group.topic.group("other")
    assert place.q.stats().ready == 1
    assert other.stats().ready == 1  # the one that was put, and not the one that came back


def test_a_spoiled_frame_is_passed_over_by_those_who_look_for_priorities():
    place = Place()
    for n in range(10):
        place.q.put(b"%d" % n, priority=5)
    log = place.q._port.queue_group.deliveries[0].partition.log
    position, path = log._view.locate(4)[0].header.position, log._writer.active.path
    place.disk = place.disk.kill()
    place.disk.flip(path, position + 100)
    place.q = place.open()
    log = place.q._port.queue_group.deliveries[0].partition.log
    found = [frame.base_offset for frame in log.frames_with(PRIORITIES | FLAGS, 0)]
    assert found == [0, 1, 2, 3, 5, 6, 7, 8, 9]
