"""Messages that are done go by age, by bytes and when the disk runs short; what is not done stays, whatever happens."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import DiskFull, UnknownTopic
from holdfast.settings import BrokerSettings, QueueSettings, TopicSettings
from tests.unit import brokers
from tests.unit.queues import FOLDER, PLAIN, Place

DAY = 24 * 3600
KIB = 1024
MIB = 1024 * KIB


def handle_all(q: holdfast.Group[Any]) -> int:
    handled = 0
    while messages := q.receive_many(100, timeout=0):
        q.ack_many(messages)
        handled += len(messages)
    return handled


def put_many(q: holdfast.Queue[Any], count: int) -> None:
    for number in range(count):
        q.put(bytes([number % 256]) * KIB)


def settled(place: Place) -> None:
    """Acks are synced, and retention has had its turn."""
    for _ in range(3):
        place.after(seconds=61)


def test_a_queue_keeps_a_week_and_a_gibibyte_of_what_is_done_unless_told_otherwise():
    settings = QueueSettings()
    assert (settings.retention_ms, settings.retention_done_bytes) == (7 * DAY * 1000, 1024 * MIB)


def test_messages_that_are_done_go_when_they_take_more_than_their_limit():
    place = Place(segment_bytes=16 * KIB, retention_done_bytes=64 * KIB)
    put_many(place.q, 400)
    assert handle_all(place.q) == 400
    settled(place)
    stats = place.q.stats()
    assert stats.bytes <= (64 + 16) * KIB
    assert stats.start > 300
    assert place.q.seek("start") == stats.start, "what is kept can be replayed"
    assert handle_all(place.q) == stats.end - stats.start


def test_messages_that_are_not_done_are_no_part_of_the_limit():
    place = Place(segment_bytes=16 * KIB, retention_done_bytes=64 * KIB)
    put_many(place.q, 400)
    settled(place)
    assert place.q.stats().start == 0
    assert handle_all(place.q) == 400


def test_one_message_in_flight_keeps_all_that_came_behind_it():
    place = Place(segment_bytes=16 * KIB, retention_done_bytes=0, lease_ms=DAY * 1000)
    put_many(place.q, 200)
    held = place.q.get(timeout=0)
    assert handle_all(place.q) == 199
    settled(place)
    assert place.q.stats().start == 0
    held.ack()
    settled(place)
    assert place.q.stats().segments == 1


def test_without_the_limit_all_that_is_done_stays_for_its_time():
    place = Place(segment_bytes=16 * KIB, retention_done_bytes=None)
    put_many(place.q, 400)
    handle_all(place.q)
    settled(place)
    assert place.q.stats().start == 0


class Full(Place):
    """A queue on a disk of few megabytes, which wants one of them free."""

    def __init__(self, capacity_bytes: int = 5 * MIB, **changes: Any) -> None:
        self.disk = SimulatedDisk(capacity_bytes=capacity_bytes)
        self.clock = ManualClock()
        self.ids = SeededIds(1)
        settings = {**PLAIN, "segment_bytes": 64 * KIB, "min_free_bytes": MIB, "retention_done_bytes": 1024 * MIB}
        self.q = self.open(**{**settings, **changes})

    def put_until_refused(self, most: int = 10_000) -> int:
        for number in range(most):
            try:
                self.q.put(b"x" * KIB)
            except DiskFull:
                return number
        raise AssertionError("never refused")


def test_messages_that_are_done_go_before_a_put_is_refused():
    place = Full()
    for _ in range(10):
        put_many(place.q, 1_000)  # together twice as much as the disk has
        assert handle_all(place.q) == 1_000
        place.after(seconds=2)
    assert place.disk.room_bytes() >= MIB


def test_acks_that_are_not_yet_on_disk_count_from_the_next_tick_on():
    place = Full()
    place.put_until_refused()
    handle_all(place.q)
    assert place.put_until_refused() <= 64
    place.tick()
    assert place.put_until_refused() > 1_000


def test_what_is_not_done_stays_when_the_disk_is_full():
    place = Full()
    stored = place.put_until_refused()
    place.after(seconds=61)
    assert place.put_until_refused() <= 64
    assert handle_all(place.q) >= stored


def test_a_queue_without_the_limit_keeps_what_is_done_and_refuses_instead():
    place = Full(retention_done_bytes=None)
    stored = place.put_until_refused()
    handle_all(place.q)
    settled(place)
    assert place.put_until_refused() <= 64
    assert place.q.seek("start") == 0
    assert handle_all(place.q) >= stored


def test_other_queues_of_the_folder_give_what_they_have_done():
    disk = SimulatedDisk(capacity_bytes=5 * MIB)
    clock = ManualClock()
    world = World(clock=clock, disk=disk, ids=SeededIds(1))
    with holdfast.open_broker(FOLDER, world=world) as broker:
        settings = {"segment_bytes": 64 * KIB, "min_free_bytes": MIB}
        for name in ("old", "new"):
            broker.create_topic(name, **settings)
        old, new = broker.group("old", "work"), broker.group("new", "work")
        broker.publish_many("old", [b"x" * KIB] * 2_000)
        handle_all(old)
        for _ in range(3):
            clock.advance(seconds=2)
            broker._port.engine.tick()
        for _ in range(200):
            broker.publish_many("new", [b"x" * KIB] * 10)
        assert new.stats().ready == 2_000
        assert old.stats().start > 0


def test_no_more_goes_than_it_takes_and_the_oldest_first():
    place = Full(capacity_bytes=8 * MIB)
    put_many(place.q, 4_000)
    handle_all(place.q)
    settled(place)
    before = place.q.stats()
    assert before.start == 0
    put_many(place.q, 3_000)
    after = place.q.stats()
    assert 0 < after.start < before.end


def test_a_topic_that_is_read_as_a_stream_keeps_what_its_groups_have_read():
    clock = ManualClock()
    world = World(clock=clock, disk=SimulatedDisk(), ids=SeededIds(1))
    with holdfast.open_broker(FOLDER, world=world) as broker:
        broker.create_topic("orders", segment_bytes=16 * KIB, retention_done_bytes=0, min_free_bytes=0)
        work = broker.group("orders", "work")
        for _ in range(10):
            broker.publish_many("orders", [b"x" * KIB] * 10)
        handle_all(work)
        with broker.consumer("orders", group="statistics", auto_commit=False) as consumer:
            assert len(consumer.poll(timeout=0)) == 100
            consumer.commit()
        for _ in range(3):
            clock.advance(seconds=61)
            broker._port.engine.tick()
        assert work.stats().start == 0
        broker.delete_group("statistics")
        for _ in range(3):
            clock.advance(seconds=61)
            broker._port.engine.tick()
        assert work.stats().start > 80


@pytest.mark.parametrize("tasks", [False, True], ids=["threads", "tasks"])
def test_retention_is_applied_now_and_says_what_is_gone(tasks: bool):
    place = brokers.Place(tasks=tasks)
    place.broker.create_topic("orders", retention_ms=DAY * 1000, dead_retention_ms=2 * DAY * 1000)
    work = place.broker.group("orders", "work", max_attempts=1)
    place.broker.publish_many("orders", [b"one", b"two", b"three"])
    one, two = work.receive_many(2, timeout=0)
    one.ack()
    two.reject("no such street")
    assert place.broker.apply_retention("orders").segments == 0
    place.clock.advance(seconds=DAY + 1)
    assert place.broker.apply_retention("orders").messages == 0, "one of them is not done"
    work.receive(timeout=0).ack()
    gone = place.broker.apply_retention("orders")
    assert (gone.messages, gone.dead_letters, gone.segments, gone.bytes > 0) == (3, 0, 1, True)
    place.clock.advance(seconds=DAY + 1)
    gone = work.apply_retention()
    assert (gone.messages, gone.dead_letters, gone.segments) == (0, 1, 1)
    assert work.stats().dead == 0
    with pytest.raises(UnknownTopic):
        place.broker.apply_retention("nothing")
    place.close()


def test_a_small_queue_lets_go_of_messages_and_dead_letters_in_time_by_itself():
    place = Place(max_attempts=1)
    place.q.put(b"a person's address")
    place.q.put(b"another one's")
    place.q.get(timeout=0).ack()
    place.q.get(timeout=0).reject("moved")
    for hour in range(16 * 24):
        place.after(seconds=3600)
        stats = place.q.stats()
        if hour < 7 * 24 - 1:
            assert (stats.start, stats.dead) == (0, 1)
        if hour >= 7 * 24 + 17:
            assert stats.start == 2
        if hour < 14 * 24 - 1:
            assert stats.dead == 1
    assert (stats.start, stats.dead) == (2, 0)
    assert not any(b"address" in content or b"another one" in content for content in place.files().values())


def test_a_topic_that_is_closed_lets_go_of_its_messages_too():
    settings = BrokerSettings(open_partitions=1, topic=TopicSettings(min_free_bytes=0))
    place = brokers.Place(settings=settings)
    place.broker.create_topic("orders", retention_ms=DAY * 1000)
    place.broker.publish("orders", b"a person's address")
    place.broker.create_topic("other")
    place.broker.publish("other", b"x")
    assert not place.engine.is_open("orders")
    for _ in range(30):
        place.clock.advance(seconds=3600)
        place.engine.tick()
    assert place.broker.describe_topic("orders").messages == 0
    place.close()
