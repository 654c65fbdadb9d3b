"""Faults that were seen in the systems that Holdfast unites: each one is shown not to be in topics and groups."""

from __future__ import annotations

import errno
import random
from collections import Counter

import pytest

from holdfast import NewMessage
from holdfast.env import SeededIds
from tests.unit.brokers import Place, polled, taken


@pytest.fixture
def place():
    made = Place()
    made.broker.create_topic("orders", partitions=2)
    return made


def restarts(place: Place) -> list[Place]:
    """The broker after a kill, after power cuts, and after an orderly restart."""
    found = []
    for disk, seed in [
        (place.disk.kill(), 1),
        *[(place.disk.cut(random.Random(seed)), 100 + seed) for seed in range(8)],
    ]:
        other = Place.__new__(Place)
        other.disk, other.clock, other.ids, other.settings, other._loop = (
            disk,
            place.clock,
            SeededIds(seed),
            place.settings,
            None,
        )
        other.broker = other.open()
        found.append(other)
    place.reopen()
    return [*found, place]


# What a reader gets


def test_an_urgent_message_does_not_make_a_reader_skip_those_before_it(place):
    """Strict priority with one cursor: [5] came first, the cursor was 6, and 0 to 4 were never seen."""
    for number in range(5):
        place.broker.publish("orders", b"%d" % number, partition=0)
    place.broker.publish("orders", b"5", partition=0, priority=9)
    consumer = place.broker.consumer("orders", group="readers")
    first = consumer.poll(0, max_records=1)
    assert [message.body for message in first] == [b"0"]
    assert polled(consumer) == [b"1", b"2", b"3", b"4", b"5"]
    workers = place.broker.group("orders", "billing")
    urgent = workers.receive(timeout=0)
    assert urgent.body == b"5"
    urgent.ack()
    place.reopen()
    assert taken(place.broker.group("orders", "billing")) == [b"0", b"1", b"2", b"3", b"4"]


def test_a_delayed_message_reaches_readers_that_are_far_ahead(place):
    """The cursor went past a delayed message, which then came to nobody."""
    place.broker.publish("orders", b"later", delay=5, partition=0)
    place.broker.publish("orders", b"now", partition=0)
    consumer, workers = place.broker.consumer("orders", group="readers"), place.broker.group("orders", "billing")
    assert (polled(consumer), taken(workers)) == ([b"now"], [b"now"])
    place.after(seconds=6)
    assert (polled(consumer), taken(workers)) == ([b"later"], [b"later"])


def test_a_delayed_message_stays_delayed_after_a_restart_each_in_its_partition(place):
    """After a restart delayed messages were visible at once; the index knew offsets without partitions."""
    for partition in range(2):
        place.broker.publish("orders", b"%d" % partition, delay=60 * (partition + 1), partition=partition)
    for other in restarts(place):
        workers = other.broker.group("orders", "billing")
        assert taken(workers) == []
    for expected in ([b"0"], [b"1"]):
        place.after(seconds=61)
        assert taken(place.broker.group("orders", "billing")) == expected


def test_a_cancelled_message_comes_to_no_group(place):
    """Cancelling a delayed message made it visible."""
    stored = place.broker.publish("orders", b"x", delay=60)
    billing, audit = place.broker.group("orders", "billing"), place.broker.group("orders", "audit")
    assert billing.cancel(stored.id)
    place.after(seconds=61)
    assert (taken(billing), taken(audit)) == ([], [])


def test_a_poll_serves_all_topics(place):
    """Only the first of several topics was read."""
    place.broker.create_topic("mails", partitions=3)
    place.broker.create_topic("clicks")
    expected = []
    for topic, partitions in (("orders", 2), ("mails", 3), ("clicks", 1)):
        for partition in range(partitions):
            body = f"{topic}-{partition}".encode()
            place.broker.publish(topic, body, partition=partition)
            expected.append(body)
    consumer = place.broker.consumer(["orders", "mails", "clicks"], group="readers")
    assert sorted(message.body for message in consumer.poll(0)) == sorted(expected)


def test_a_message_that_has_expired_comes_to_nobody(place):
    """A time to live was taken, and never looked at."""
    place.broker.publish("orders", b"x", ttl=5)
    place.broker.create_topic("mails", ttl_ms=5_000)
    place.broker.publish("mails", b"x")
    place.after(seconds=6)
    for topic in ("orders", "mails"):
        assert taken(place.broker.group(topic, "billing")) == []
        assert polled(place.broker.consumer(topic, group="readers")) == []


def test_bodies_are_any_bytes(place):
    """Bodies were text, and others came back mangled."""
    body = bytes(range(256)) * 3
    place.broker.publish("orders", body)
    assert taken(place.broker.group("orders", "billing")) == [body]
    assert polled(place.broker.consumer("orders", group="readers")) == [body]


# Groups


def test_what_one_group_holds_the_others_get_as_well(place):
    """Messages in flight were known by topic, partition and offset, without the group."""
    for number in range(6):
        place.broker.publish("orders", b"%d" % number)
    billing, audit = place.broker.group("orders", "billing"), place.broker.group("orders", "audit")
    held = billing.receive_many(3, timeout=0)
    everything = [b"%d" % number for number in range(6)]
    assert polled(place.broker.consumer("orders", group="readers")) == everything
    assert taken(audit) == everything
    rest = billing.receive_many(10, timeout=0)
    assert len(rest) == 3  # what is in flight does not end the batch, either
    assert sorted(message.body for message in held + rest) == everything
    billing.ack_many(held + rest)
    for group in (billing, audit):
        assert group.stats().floor == 6


def test_an_ack_counts_for_the_next_receive_and_after_a_restart(place):
    """Acked messages came again with the next poll, and after a restart."""
    for number in range(4):
        place.broker.publish("orders", b"%d" % number)
    workers = place.broker.group("orders", "billing")
    workers.receive(timeout=0).ack(durability="fsync")
    first = workers.receive(timeout=0)
    first.ack(durability="fsync")
    assert len(workers.receive_many(10, timeout=0)) == 2
    for other in restarts(place):
        assert len(other.broker.group("orders", "billing").receive_many(10, timeout=0)) == 2


def test_a_nacked_message_comes_to_whoever_asks_next(place):
    """A nack made a receipt that nobody was given, until the message was dead."""
    place.broker.publish("orders", b"x")
    workers = place.broker.group("orders", "billing", max_attempts=5)
    for attempt in range(1, 5):
        message = workers.receive(timeout=0)
        assert message.attempt == attempt
        message.nack(delay=0)
    place.clock.advance(seconds=31)
    workers.receive(timeout=0)
    place.after(seconds=31)  # and the lease of the fifth ends
    assert [letter.reason for letter in workers.dead.list()] == ["MAX_ATTEMPTS"]


def test_a_rejected_message_does_not_hold_up_the_committed_offset(place):
    """A reject left a hole, and the committed offset stayed in front of it for ever."""
    for number in range(4):
        place.broker.publish("orders", b"%d" % number, partition=0)
    workers = place.broker.group("orders", "billing")
    first, second, third, fourth = workers.receive_many(4, timeout=0)
    third.ack()
    fourth.ack()
    assert workers.stats().floor == 0
    second.reject("never")
    assert workers.stats().floor == 0
    first.ack()
    assert workers.stats().floor == 4  # the end of the contiguous run
    assert [each.lag for each in place.broker.groups("orders")] == [0]


def test_a_long_backoff_of_one_message_holds_up_no_other(place):
    """One at a time slept through each backoff."""
    for number in range(5):
        place.broker.publish("orders", b"%d" % number, partition=number % 2)
    workers = place.broker.group("orders", "billing")
    messages = workers.receive_many(5, timeout=0)
    messages[0].nack(delay=3_600)
    for message in messages[1:]:
        message.nack(delay=1)
    place.after(seconds=2)
    assert len(taken(workers)) == 4


def test_a_redriven_message_comes_to_its_own_group_only(place):
    for number in range(4):
        place.broker.publish("orders", b"%d" % number)
    billing, audit = place.broker.group("orders", "billing"), place.broker.group("orders", "audit")
    consumer = place.broker.consumer("orders", group="readers")
    assert len(taken(audit)) == len(polled(consumer)) == 4
    for message in billing.receive_many(4, timeout=0):
        message.reject("never")
    assert (audit.dead.list(), audit.stats().dead, billing.stats().dead) == ([], 0, 4)
    assert billing.dead.redrive().done == 4
    assert (taken(audit), polled(consumer)) == ([], [])
    assert len(taken(billing)) == 4
    assert polled(place.broker.consumer("orders", group="others")) == [b"0", b"1", b"2", b"3"]
    assert taken(place.broker.group("orders", "new")) == [b"0", b"1", b"2", b"3"]


def test_a_message_that_one_group_has_redriven_counts_for_no_other(place):
    for number in range(4):
        place.broker.publish("orders", b"%d" % number)
    billing, audit = place.broker.group("orders", "billing"), place.broker.group("orders", "audit")
    idle = place.broker.group("orders", "idle")
    assert len(taken(audit)) == 4
    for message in billing.receive_many(4, timeout=0):
        message.reject("never")
    assert billing.dead.redrive().done == 4
    assert [group.stats().ready for group in (billing, audit, idle)] == [4, 0, 4]
    assert {info.name: info.lag for info in place.broker.groups("orders")} == {"billing": 4, "audit": 0, "idle": 4}
    assert place.broker.group("orders", "new").stats().ready == 4
    place.broker.reset_offsets("audit", "orders", to="earliest")
    assert audit.stats().ready == 4
    assert len(taken(audit)) == 4
    place.broker.sync()
    for other in restarts(place):
        ready = {name: other.broker.group("orders", name).stats().ready for name in ("billing", "audit", "idle", "new")}
        assert ready == {"billing": 4, "audit": 0, "idle": 4, "new": 4}


# Streams


def test_auto_commit_commits(place):
    """Nothing ever called it."""
    for number in range(4):
        place.broker.publish("orders", b"%d" % number, partition=0)
    consumer = place.broker.consumer("orders", group="readers")
    assert len(consumer.poll(0)) == 4
    place.clock.advance(seconds=6)
    assert consumer.poll(0) == []
    assert consumer.committed("orders", 0) == 4
    place.broker.sync()
    for other in restarts(place)[:-1]:
        assert polled(other.broker.consumer("orders", group="readers")) == []


def test_members_that_come_and_go_leave_no_partition_without_an_owner(place):
    """Membership changes lost assignments."""
    place.broker.add_partitions("orders", 5)
    rng, consumers, seen = random.Random(1), [], Counter()
    for step in range(60):
        if len(consumers) < 2 or (len(consumers) < 5 and rng.random() < 0.3):
            consumers.append(place.broker.consumer("orders", group="readers"))
        elif rng.random() < 0.2:
            consumers.pop(rng.randrange(len(consumers))).close()
        place.broker.publish("orders", b"%d" % step)
        for consumer in consumers:
            seen.update(message.body for message in consumer.poll(0))
    for _ in range(3):
        for consumer in consumers:
            seen.update(message.body for message in consumer.poll(0))
    owned = [each for consumer in consumers for each in consumer.assignment()]
    assert sorted(owned) == [("orders", number) for number in range(7)]
    assert seen == Counter({b"%d" % step: 1 for step in range(60)})


# Topics


def test_settings_of_a_topic_are_there_after_a_restart(place):
    """Retention was 0 after a restart."""
    place.broker.create_topic("mails", partitions=4, retention_hours=5, max_attempts=7, codec="zstd")
    place.broker.alter_topic("orders", lease_ms=5_000)
    place.broker.group("mails", "billing", key_order=True)
    for other in restarts(place):
        mails = other.broker.describe_topic("mails")
        assert (mails.settings["retention_ms"], mails.settings["max_attempts"]) == (18_000_000, 7)
        assert (mails.settings["codec"], len(mails.partitions)) == ("zstd", 4)
        assert other.broker.describe_topic("orders").settings["lease_ms"] == 5_000
        with other.engine.using("mails") as topic:
            assert topic.groups["billing"].settings.key_order
        assert topic.settings.retention_ms == 18_000_000


def test_a_new_broker_has_no_topics_and_makes_none_by_itself():
    """Each start put demonstration data into a topic of its own."""
    place = Place()
    assert place.broker.topics() == []
    assert place.reopen().topics() == []


def test_a_producer_whose_append_failed_has_not_used_up_the_sequence(place):
    """The sequence was recorded before the append: the failed message was lost, a duplicate was said to be at 0."""
    producer = place.broker.producer(linger_ms=0, retries=3)
    for number in range(3):
        producer.send("orders", b"%d" % number, partition=1)
        producer.flush()
    place.disk.faults.fail(1, errno.ENOSPC, sticky=False, calls=frozenset({"reserve"}))
    sent = [producer.send("orders", b"x" * 70_000, partition=1) for _ in range(2)]
    producer.flush()
    assert place.disk.faults.fired == ["reserve"]
    assert [each.result(0).offset for each in sent] == [3, 4]
    assert len(place.broker.read("orders", partition=1)) == 5


def test_a_batch_with_keys_for_several_partitions_keeps_the_order_of_each_key(place):
    messages = [NewMessage(body=b"%d" % number, key=f"k{number % 3}") for number in range(30)]
    place.broker.publish_many("orders", messages)
    consumer = place.broker.consumer("orders", group="readers")
    orders: dict[str, list[int]] = {}
    while some := consumer.poll(0, max_records=4):
        for message in some:
            orders.setdefault(message.key, []).append(int(message.body))
    assert orders == {f"k{key}": list(range(key, 30, 3)) for key in range(3)}
