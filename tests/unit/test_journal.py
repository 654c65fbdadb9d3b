"""The journal of a group: events in, the same state out, whatever happened to the files meanwhile."""

from __future__ import annotations

import pytest

import holdfast
from holdfast import CorruptData
from holdfast.broker.check import repair_folder
from tests.unit.queues import FOLDER, Place, bodies

JOURNAL = f"{FOLDER}/topics/jobs/0/groups/default"


def used() -> Place:
    """A queue with some history, and both of its snapshots."""
    place = Place()
    for n in range(4):
        place.q.put(b"%d" % n)
        bodies(place.q)
        place.q.compact()
    place.q.put(b"left")
    place.q.close()
    assert {"snapshot", "snapshot.before"} <= set(place.disk.names(JOURNAL))
    return place


@pytest.mark.parametrize("position", [0, 3, 5, 20])
def test_a_damaged_snapshot_costs_nothing_but_time(position):
    place = used()
    place.disk.flip(f"{JOURNAL}/snapshot", position)
    place.q = place.open()
    assert bodies(place.q) == [b"left"]


@pytest.mark.parametrize("name", ["snapshot", "snapshot.before"])
def test_a_missing_snapshot_costs_nothing_but_time(name):
    place = used()
    place.disk.remove(f"{JOURNAL}/{name}")
    place.q = place.open()
    assert bodies(place.q) == [b"left"]


def test_a_damaged_snapshot_never_takes_the_place_of_the_good_one():
    place = used()
    for _ in range(3):
        place.disk.flip(f"{JOURNAL}/snapshot", 20)
        place.q = place.open()
        place.q.put(b"more")
        assert bodies(place.q)[-1] == b"more"
        place.q.close()
    place.q = place.open()
    assert bodies(place.q) == []


def test_two_damaged_snapshots_are_reported_with_what_to_do():
    place = used()
    for name in ("snapshot", "snapshot.before"):
        place.disk.flip(f"{JOURNAL}/{name}", 20)
    with pytest.raises(CorruptData, match="snapshot"):
        place.open()
    for name in place.disk.names(JOURNAL):
        place.disk.remove(f"{JOURNAL}/{name}")
    with pytest.raises(CorruptData, match="holdfast repair"):
        place.open()
    repair_folder(FOLDER, place.world)
    place.q = place.open()
    assert isinstance(place.q, holdfast.Queue)
    assert bodies(place.q)[-1] == b"left"


def test_a_snapshot_cut_short_at_any_call_leaves_the_old_or_the_new_one():
    place = Place()
    for n in range(3):
        place.q.put(b"%d" % n)
    place.q.get(timeout=0).ack()
    place.q.compact()
    held = place.q.get_many(2)
    held[0].ack(durability="fsync")
    stages = []
    place.disk.on_call = lambda call: stages.append(place.disk.kill())
    place.q._port.deliveries[0].save()
    place.disk.on_call = None
    assert len(stages) > 3
    for disk in stages:
        place.disk = disk
        place.q = place.open()
        assert bodies(place.q) == [b"2"]
        place.q.close()
