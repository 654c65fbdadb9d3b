"""Faults that were seen in the systems that Holdfast unites: each one is shown not to be in the queue."""

from __future__ import annotations

import gc
import random
import tracemalloc

import pytest

import holdfast
from holdfast.broker.dedup.window import DedupIndex
from holdfast.broker.delivery import Delivery
from holdfast.broker.folder.layout import group_folder
from holdfast.broker.metrics import Metrics
from holdfast.env import SeededIds
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.settings import TopicSettings
from tests.unit.queues import FOLDER, Place, bodies

SMALL_SEGMENTS = {"segment_bytes": 4_096, "frame_bytes": 1_024}


class Line:
    """One who stands in line and only notes that it was woken."""

    count = 1

    def __init__(self) -> None:
        self.woken = False
        self.ticket = 0

    def wake(self) -> None:
        self.woken = True


def restarts(place: Place) -> list[Place]:
    """The queue after an orderly restart, after a kill, and after power cuts."""
    found = [elsewhere(place, place.disk.kill(), place.ids)]
    found += [elsewhere(place, place.disk.cut(random.Random(seed)), SeededIds(100 + seed)) for seed in range(10)]
    place.reopen()
    return [place, *found]


def elsewhere(place: Place, disk: SimulatedDisk, ids: SeededIds) -> Place:
    """Another process, at the same time, with what is left of the disk."""
    other = Place.__new__(Place)
    other.disk, other.clock, other.ids = disk, place.clock, ids
    other.q = other.open()
    return other


# Delivery


def test_delivery_is_at_least_once_and_a_nack_brings_the_message_back():
    place = Place()
    place.q.put(b"work")
    for attempt in (1, 2, 3):
        m = place.q.get(timeout=0)
        assert (m.body, m.attempt) == (b"work", attempt)
        m.nack(error="not yet", delay=0)
    place.q.get(timeout=0).ack()
    assert place.q.stats().floor == 1


def test_what_was_taken_and_not_acked_comes_again_after_a_kill():
    place = Place()
    place.q.put_many([b"a", b"b"])
    held = place.q.get(timeout=0)
    place.kill()
    assert bodies(place.q) == [b"a", b"b"]
    assert held.body == b"a"


def test_what_is_done_does_not_come_back_after_a_restart():
    place = Place()
    place.q.put_many([b"%d" % n for n in range(10)])
    taken = place.q.get_many(10)
    for m in taken[::2]:
        m.ack(durability="fsync")
    for other in restarts(place):
        assert sorted(bodies(other.q)) == [b"1", b"3", b"5", b"7", b"9"]
        assert bodies(other.reopen()) == []


def test_what_was_being_worked_on_comes_once_after_a_restart_and_the_old_holder_can_do_nothing():
    place = Place()
    place.q.put(b"slow")
    old = place.q.get(timeout=0)
    receipt = old.receipt
    place.kill()
    m = place.q.get(timeout=0)
    assert m.attempt == 2
    with pytest.raises(holdfast.Empty):
        place.q.get(timeout=0)
    with pytest.raises(holdfast.LeaseLost):
        place.q.resume(receipt)
    m.ack()
    assert place.q.stats().floor == 1


def test_an_ack_moves_the_floor():
    place = Place()
    place.q.put_many([b"a", b"b", b"c"])
    a, b, c = place.q.get_many(3)
    b.ack()
    assert place.q.stats().floor == 0
    a.ack()
    assert place.q.stats().floor == 2
    c.ack()
    assert place.q.stats().floor == 3


def test_a_reject_does_not_hold_the_floor_back():
    place = Place()
    place.q.put_many([b"%d" % n for n in range(5)])
    taken = place.q.get_many(5)
    taken[0].reject("never")
    for m in taken[1:]:
        m.ack()
    assert place.q.stats().floor == 5
    assert place.kill().stats().floor == 5


def test_the_leases_of_one_group_do_not_block_another():
    place = Place()
    place.q.put_many([b"a", b"b"])
    partition = place.q._port.deliveries[0].partition
    folder = group_folder(FOLDER, "jobs", 0, "auditors")
    auditors = Delivery.open(place.world, partition.log, folder, TopicSettings(), Metrics())
    held = place.q.get_many(2)
    taken = auditors.receive(5, lease_ms=1_000, holder="ann")
    assert [delivered.record.value for delivered in taken] == [b"a", b"b"]
    auditors.ack([delivered.receipt for delivered in taken])
    assert not any(m.lost for m in held)
    assert (auditors.group.floor, place.q.stats().floor) == (2, 0)
    auditors.close()


def test_a_retry_reaches_the_one_who_waits():
    place = Place()
    place.q.put_many([b"a", b"b"])
    a, b = place.q.get_many(2)
    waiters, line = place.q._port.deliveries[0].waiters, Line()
    with waiters.in_line(line):
        a.nack(delay=0)
        assert line.woken
        line.woken = False
        waiters._line.append(line)
        b.nack(delay=2)
        assert not line.woken
        place.after(seconds=2)
        assert line.woken
    assert [m.body for m in place.q.get_many(2, timeout=0)] == [b"a", b"b"]


def test_a_retry_that_waits_blocks_nobody_else():
    place = Place()
    place.q.put_many([b"stuck", b"b", b"c"])
    place.q.get(timeout=0).nack(delay=3_600)
    assert bodies(place.q) == [b"b", b"c"]
    place.q.put(b"d")
    m = place.q.get(timeout=0)
    m.nack(delay=1)
    place.after(seconds=1)
    assert bodies(place.q) == [b"d"]
    place.after(seconds=3_599)
    assert bodies(place.q) == [b"stuck"]


def test_a_worker_that_crashes_does_not_loop_for_ever():
    place = Place(max_attempts=3)
    place.q.put(b"poison")
    for _ in range(3):
        held = place.q.get(timeout=0)
        place.kill()
        assert held is not None
    assert (place.q.stats().ready, place.q.stats().dead) == (0, 1)
    assert [failure.why for failure in place.q.dead.list()[0].failures] == [
        "holder gone",
        "holder gone",
        "MAX_ATTEMPTS",
    ]


def test_a_worker_that_hangs_does_not_loop_for_ever():
    place = Place(max_attempts=3)
    place.q.put(b"poison")
    held = []
    for _ in range(3):
        held.append(place.q.get(timeout=0, lease=5))
        place.after(seconds=5)
        place.after(seconds=5)
    assert all(m.lost for m in held)
    assert (place.q.stats().ready, place.q.stats().dead) == (0, 1)


def test_streaming_waits_for_no_clock():
    place = Place()
    place.q.put_many([b"%d" % n for n in range(1_000)])
    before_ns = place.clock.monotonic_ns()
    seen = 0
    for m in place.q:
        with m:
            seen += 1
        if seen == 1_000:
            break
    assert place.clock.monotonic_ns() == before_ns


# Priorities


def test_older_messages_of_low_priority_survive_a_restart():
    place = Place(**SMALL_SEGMENTS)
    for n in range(100):
        place.q.put(b"%d" % n + bytes(200), priority=n % 3)
    urgent = place.q.get_many(33)
    assert {m.priority for m in urgent} == {2}
    for m in urgent:
        m.ack(durability="fsync")
    for other in restarts(place):
        left = other.q.get_many(100, timeout=0)
        assert len({m.id for m in left}) == 67
        assert [m.priority for m in left] == [1] * 33 + [0] * 34


def test_priorities_over_several_segments_deliver_each_message_once():
    place = Place(**SMALL_SEGMENTS)
    for n in range(100):
        place.q.put(b"%d" % n + bytes(200), priority=n % 10)
    assert place.q.stats().segments > 3
    seen = []
    while len(seen) < 200:
        try:
            m = place.q.get(timeout=0)
        except holdfast.Empty:
            break
        seen.append(m.offset)
        m.ack()
    assert sorted(seen) == list(range(100))
    assert seen == sorted(seen, key=lambda offset: (-(offset % 10), offset))


def test_a_batch_obeys_priorities():
    place = Place()
    for priority in (0, 5, 9, 1, 5):
        place.q.put(b"%d" % priority, priority=priority)
    assert [m.body for m in place.q.get_many(4)] == [b"9", b"5", b"5", b"1"]


# Delays


def test_a_delayed_message_is_neither_early_nor_forgotten_after_a_restart():
    place = Place()
    place.q.put(b"later", delay=10)
    place.clock.advance(seconds=9.999)
    for other in restarts(place):
        other.tick()
        assert (bodies(other.q), other.q.stats().delayed) == ([], 1)
    place.clock.advance(ms=1)
    for other in restarts(place):
        other.tick()
        assert bodies(other.q) == [b"later"]
        assert bodies(other.kill()) == []


def test_a_delayed_message_that_came_due_while_nobody_was_there_comes_at_opening():
    place = Place()
    place.q.put(b"later", delay=10)
    place.q.close()
    place.clock.advance(seconds=3_600)
    place.q = place.open()
    place.tick()
    assert bodies(place.q) == [b"later"]


def test_a_cancelled_message_never_comes():
    place = Place()
    stored = place.q.put(b"later", delay=10)
    assert place.q.cancel(stored.id)
    assert bodies(place.q) == []
    places = restarts(place)
    place.clock.advance(seconds=20)
    for other in places:
        other.tick()
        assert (bodies(other.q), other.q.stats().delayed) == ([], 0)


@pytest.mark.parametrize("delay_ms", [1, 250, 999, 1_001, 1_750])
def test_delays_below_a_second_count_to_the_millisecond(delay_ms):
    place = Place()
    place.q.put(b"put", delay=delay_ms / 1_000)
    place.q.put(b"nacked")
    place.q.get(timeout=0).nack(delay=delay_ms / 1_000)
    place.after(ms=delay_ms - 1)
    assert bodies(place.q) == []
    place.after(ms=1)
    assert sorted(bodies(place.q)) == [b"nacked", b"put"]


# Dedup


def test_dedup_survives_a_crash():
    place = Place()
    first = place.q.put(b"a", dedup_id="a")
    later = place.q.put(b"b", dedup_id="b", delay=100)
    for other in restarts(place):
        for body, known in ((b"a", first), (b"b", later)):
            again = other.q.put(body, dedup_id=body)
            assert (again.duplicate, again.id) == (True, known.id)
        assert other.q.stats().end == 1


def test_dedup_does_not_switch_itself_off_when_memory_is_full():
    place = Place(durability="os")
    place.q.put(b"", dedup_id="first")
    index = place.q._port.queue_group.topic.duplicates.index
    assert isinstance(index, DedupIndex)
    index._max_recent = 100
    for n in range(500):
        assert not place.q.put(b"", dedup_id=f"id {n}").duplicate
        if n % 60 == 0:
            place.tick()
    assert index._runs
    for q in (place.q, place.kill()):
        assert all(q.put(b"", dedup_id=f"id {n}").duplicate for n in range(500))


# Dead letters


@pytest.mark.parametrize("codec", ["gzip", "zstd", "lz4"])
def test_a_compressed_message_reaches_the_dead_letters_as_it_was(codec):
    body = b"the same words again and again " * 200
    place = Place()
    place.q.put(body, codec=codec, key="k", headers={"a": "b"})
    place.q.get(timeout=0).reject("why")
    for q in (place.q, place.kill()):
        (letter,) = q.dead.list()
        assert (letter.body, letter.key, dict(letter.headers)) == (body, "k", {"a": "b"})
    place.q.dead.redrive()
    assert bodies(place.q) == [body]


def test_a_dead_letter_that_is_moved_by_half_blocks_nobody_and_is_not_doubled():
    place = Place()
    place.q.put_many([b"bad", b"good"])
    m = place.q.get(timeout=0)
    stages = []
    place.disk.on_call = lambda call: stages.append(place.disk.kill())
    m.reject("why")
    place.disk.on_call = None
    assert len(stages) > 10
    for disk in stages:
        place.disk = disk
        place.q = place.open()
        left = bodies(place.q)
        letters = [letter.body for letter in place.q.dead.list()]
        assert (left, letters) in (([b"good"], [b"bad"]), ([b"bad", b"good"], [])), (left, letters)
        assert place.q.stats().floor == 2
        place.q.close()


def test_dead_letters_can_be_read_and_put_back():
    place = Place(max_attempts=1)
    place.q.put(b"a", key="k")
    place.q.get(timeout=0).nack(error=ValueError("cannot"))
    (letter,) = place.q.dead.list()
    assert (letter.body, letter.key, letter.reason) == (b"a", "k", "MAX_ATTEMPTS")
    assert letter.error.startswith("ValueError: cannot")
    assert place.q.dead.redrive().done == 1
    assert place.q.dead.list() == []
    assert bodies(place.q) == [b"a"]


# Storage


def test_an_empty_body_leaves_everything_readable():
    place = Place()
    place.q.put(b"before")
    place.q.put(b"")
    place.q.put(b"later", delay=1)
    place.q.put(b"", delay=1)
    place.q.put(b"after")
    for other in restarts(place):
        assert [m.body for m in other.q.peek(9)] == [b"before", b"", b"after"]
    place.reopen()
    place.after(seconds=1)
    assert bodies(place.q) == [b"before", b"", b"after", b"later", b""]


def test_payloads_do_not_stay_in_memory(tmp_path):
    with holdfast.open(tmp_path / "jobs", durability="os", min_free_bytes=0) as q:
        q.put(b"warm")
        gc.collect()
        tracemalloc.start()
        try:
            for n in range(1_000):
                q.put(n.to_bytes(2) * 5_000, priority=n % 2)
            gc.collect()
            used, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert used < 1_000_000
