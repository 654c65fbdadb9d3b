"""Committed offsets: atomic, durable, short to replay, and safe from damage."""

from __future__ import annotations

from random import Random

import pytest

from holdfast.broker.journal import BEFORE, SNAPSHOT
from holdfast.broker.streams import offsets as module
from holdfast.broker.streams.offsets import CommittedOffset, Offsets, Remembered
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import CorruptData
from holdfast.membership.members import StaticMember

FOLDER = "/data/groups/analytics"


class Book:
    """The offsets of one group on a simulated disk."""

    def __init__(self) -> None:
        self.disk = SimulatedDisk()
        self.clock = ManualClock()
        self.offsets = self.open(self.disk)

    def open(self, disk: SimulatedDisk) -> Offsets:
        return Offsets.open(World(clock=self.clock, disk=disk, ids=SeededIds(1)), FOLDER)

    def reopen(self) -> Offsets:
        self.offsets.close()
        self.offsets = self.open(self.disk)
        return self.offsets

    def damage(self, name: str) -> None:
        file = self.disk.open(f"{FOLDER}/{name}", write=True)
        file.write(file.size() - 1, [b"\x00" if file.read(file.size() - 1, 1) != b"\x00" else b"\x01"])
        file.close()


def entry(partition: int, offset: int, *, topic: str = "orders", topic_id: int = 7) -> CommittedOffset:
    return CommittedOffset(topic, topic_id, partition, offset, epoch=1, at_ms=5)


def known(offsets: Offsets) -> dict[int, int]:
    return {each.partition: each.offset for each in offsets.entries()}


def test_commits_survive_a_restart():
    book = Book()
    book.offsets.commit([entry(0, 5), entry(1, 6)])
    book.offsets.commit([entry(0, 8)])
    assert book.reopen().entries() == [entry(0, 8), entry(1, 6)]


def test_an_offset_of_another_topic_of_the_same_name_does_not_count():
    book = Book()
    book.offsets.commit([entry(0, 5)])
    assert book.offsets.of("orders", 7, 0) == entry(0, 5)
    assert book.offsets.of("orders", 8, 0) is None
    assert book.offsets.of("orders", 7, 1) is None


def test_a_commit_of_many_partitions_is_there_wholly_or_not_at_all():
    book = Book()
    book.offsets.wait(book.offsets.commit([entry(p, 1) for p in range(50)], "fsync"))
    stages = [book.disk.kill()]  # a store into a map is no call: the state before it is seen here only
    book.disk.on_call = lambda call: stages.append(book.disk.kill())
    book.offsets.wait(book.offsets.commit([entry(p, 2) for p in range(50)], "fsync"))
    book.disk.on_call = None
    seen = {frozenset(known(book.open(disk)).values()) for disk in [*stages, book.disk.kill()]}
    assert seen == {frozenset({1}), frozenset({2})}


def test_what_was_synced_survives_a_power_cut():
    book = Book()
    book.offsets.wait(book.offsets.commit([entry(0, 5)], "fsync"))
    assert book.offsets.synced
    book.offsets.commit([entry(0, 9)])
    assert not book.offsets.synced
    left = {known(book.open(book.disk.cut(Random(seed))))[0] for seed in range(30)}
    assert left == {5, 9}


def test_a_snapshot_keeps_the_journal_short(monkeypatch):
    monkeypatch.setattr(module, "_SNAPSHOT_FRAMES", 50)
    book = Book()
    for offset in range(500):
        book.offsets.commit([entry(0, offset), entry(1, offset)])
        book.offsets.tick()
    assert book.offsets._snapshot_at >= 450
    assert known(book.reopen()) == {0: 499, 1: 499}
    book.offsets.commit([entry(0, 500)])
    assert known(book.reopen()) == {0: 500, 1: 499}


def test_a_damaged_snapshot_falls_back_to_the_one_before():
    book = Book()
    for offset in range(3):
        book.offsets.commit([entry(0, offset), entry(offset + 1, 1)])
        book.offsets.log.roll()
        book.offsets.snapshot()
    assert book.offsets.log.start > 0
    book.offsets.commit([entry(0, 9)])
    book.offsets.close()
    book.damage(SNAPSHOT)
    assert known(book.open(book.disk)) == {0: 9, 1: 1, 2: 1, 3: 1}


def test_a_damaged_snapshot_never_takes_the_place_of_a_whole_one():
    book = Book()
    for offset in range(3):
        book.offsets.commit([entry(0, offset)])
        book.offsets.snapshot()
    book.offsets.close()
    book.damage(SNAPSHOT)
    whole = book.disk.contents(f"{FOLDER}/{BEFORE}")
    book.offsets = book.open(book.disk)
    book.offsets.snapshot()
    assert book.disk.contents(f"{FOLDER}/{BEFORE}") == whole
    assert known(book.reopen()) == {0: 2}


def test_a_snapshot_cut_short_at_any_call_leaves_the_state_as_it_was():
    book = Book()
    for offset in range(3):
        book.offsets.commit([entry(0, offset)])
        book.offsets.snapshot()
    book.offsets.commit([entry(0, 7)])
    stages: list[SimulatedDisk] = []
    book.disk.on_call = lambda call: stages.append(book.disk.kill())
    book.offsets.snapshot()
    book.disk.on_call = None
    assert len(stages) > 3
    for disk in stages:
        assert known(book.open(disk)) == {0: 7}


def test_without_any_whole_snapshot_it_says_so_instead_of_beginning_anew():
    book = Book()
    for offset in range(3):
        book.offsets.commit([entry(0, offset)])
        book.offsets.log.roll()
        book.offsets.snapshot()
    assert book.offsets.log.start > 0
    book.offsets.close()
    book.damage(SNAPSHOT)
    book.damage(BEFORE)
    with pytest.raises(CorruptData, match="no snapshot covers the events before"):
        book.open(book.disk)


def test_a_damaged_commit_is_passed_over_and_later_ones_count(caplog):
    book = Book()
    for offset in (1, 2, 3):
        book.offsets.commit([entry(0, offset), entry(offset, offset)])
    book.offsets.log.sync()
    segment = next(name for name in book.disk.names(FOLDER) if name.endswith(".log"))
    content = book.disk.contents(f"{FOLDER}/{segment}")
    place = [i for i in range(len(content)) if content.startswith(b"orders", i)][2]
    book.offsets.close()
    file = book.disk.open(f"{FOLDER}/{segment}", write=True)
    file.write(place, [b"x"])
    file.close()
    assert known(book.open(book.disk)) == {0: 3, 1: 1, 3: 3}
    assert "commits damaged" in caplog.text


def test_the_epoch_of_the_membership_is_on_disk_before_anybody_hears_of_it():
    book = Book()
    book.offsets.raise_epoch(12)
    assert book.offsets.synced
    assert book.open(book.disk.kill()).epoch == 12


def test_static_members_survive_a_restart_and_a_snapshot():
    book = Book()
    static = StaticMember("m1", "one", ("orders",), 100, 200, "host:1", (("orders", 0),))
    some = Remembered((static,), {"orders": 3}, "range", "eager")
    book.offsets.remember(some)
    end = book.offsets.log.written_end
    book.offsets.remember(Remembered((static,), {"orders": 3}, "range", "eager"))
    assert book.offsets.log.written_end == end
    assert book.reopen().remembered == some
    book.offsets.snapshot()
    assert book.reopen().remembered == some
    book.offsets.remember(Remembered())
    assert book.reopen().remembered == Remembered()


def test_without_static_members_nothing_is_written_of_the_membership():
    book = Book()
    book.offsets.remember(Remembered((), {"orders": 3}))
    assert book.offsets.log.written_end == 0


def test_a_topic_can_be_forgotten():
    book = Book()
    book.offsets.commit([entry(0, 5), entry(0, 6, topic="prices")])
    book.offsets.forget("orders")
    assert book.reopen().entries() == [entry(0, 6, topic="prices")]
