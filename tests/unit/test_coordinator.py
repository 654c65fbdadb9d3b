"""A stream group and the broker around it: retention, resets, lag, restarts, deletion, what is told of it."""

from __future__ import annotations

import pytest

from holdfast.broker.streams import To
from holdfast.errors import Fenced, InvalidRequest, UnknownGroup, UnknownTopic
from holdfast.membership.members import check
from holdfast.settings import ConsumerSettings
from tests.unit.streams import FOLDER, Streams, drain, settle


def test_retention_waits_for_what_a_group_has_not_committed():
    streams = Streams(partitions=1, segment_messages=10, retention_ms=1_000)
    consumer = streams.consumer(auto_commit=False)
    for _ in range(5):
        streams.put(*["x"] * 10)
    log = streams.engine.topic("orders").partition(0).log
    streams.after(seconds=120)
    assert log.start == 0
    consumer.poll(0, max_records=25)
    consumer.commit()
    streams.after(seconds=2)
    streams.after(seconds=120)
    assert log.start == 20
    assert drain(consumer) == ["x"] * 25


def test_retention_waits_for_a_group_without_consumers_too_also_after_a_restart():
    streams = Streams(partitions=1, segment_messages=10, retention_ms=1_000)
    streams.consumer().close()
    for _ in range(3):
        streams.put(*["x"] * 10)
    streams.reopen()
    log = streams.engine.topic("orders").partition(0).log
    assert log.pins["stream:analytics"] == 0
    streams.after(seconds=120)
    assert log.start == 0


def test_pins_follow_what_is_on_disk_only():
    streams = Streams(partitions=1)
    streams.put("a", "b")
    consumer = streams.consumer(auto_commit=False)
    log = streams.engine.topic("orders").partition(0).log
    consumer.poll(0)
    consumer.commit()
    streams.engine.tick()
    assert not streams.group().offsets.synced
    assert log.pins["stream:analytics"] == 0
    streams.after(seconds=2)
    assert log.pins["stream:analytics"] == 2


def test_a_topic_may_let_retention_go_before_its_groups():
    streams = Streams(partitions=1, segment_messages=10, retention_ms=1_000, retention_ignores_pins=True)
    consumer = streams.consumer()
    for _ in range(3):
        streams.put(*["x"] * 10)
    streams.after(seconds=120)
    streams.put("new")
    assert drain(consumer)[-1] == "new"
    assert consumer.position("orders", 0) == 31


def test_a_reset_with_dry_run_only_says_what_it_would_do():
    streams = Streams(partitions=2)
    streams.fill(4, partitions=2)
    with streams.consumer() as consumer:
        drain(consumer)
    for dry_run in (True, False):
        found = streams.group().reset("orders", To(end="earliest"), dry_run=dry_run)
        assert [(each.partition, each.before, each.after, each.messages) for each in found] == [
            (0, 4, 0, 4),
            (1, 4, 0, 4),
        ]
    assert len(drain(streams.consumer())) == 8


def test_resets_to_a_time_an_offset_and_the_end():
    streams = Streams(partitions=1)
    streams.put("a", "b")
    streams.clock.advance(seconds=10)
    streams.put("c")
    with streams.consumer() as consumer:
        drain(consumer)
    group = streams.group()
    assert group.reset("orders", To(time_ns=streams.clock.now_ns() - 5_000_000_000))[0].after == 2
    assert group.reset("orders", To(offset=1))[0].after == 1
    assert group.reset("orders", To(offset=99))[0].after == 3
    assert group.reset("orders", To(end="latest"), partition=0)[0].after == 3
    streams.kill()
    assert streams.group().committed(streams.engine.topic("orders"), 0) == 3


def test_a_reset_under_consumers_at_work_is_refused():
    streams = Streams()
    consumer = streams.consumer()
    with pytest.raises(InvalidRequest, match="close them first"):
        streams.group().reset("orders", To(end="earliest"))
    assert streams.group().reset("orders", To(end="latest"), dry_run=True)
    consumer.close()
    streams.group().reset("orders", To(offset=0))


def test_bad_resets_are_refused():
    streams = Streams()
    streams.consumer().close()
    with pytest.raises(UnknownGroup, match="known groups: analytics"):
        streams.group("nobody")
    with pytest.raises(UnknownTopic):
        streams.group().reset("nothing", To(end="earliest"))
    with pytest.raises(UnknownTopic):
        streams.group().reset("orders", To(end="earliest"), partition=3)
    for choices in ({}, {"end": "latest", "offset": 3}):
        with pytest.raises(InvalidRequest, match="exactly one"):
            To(**choices)


def test_a_new_group_can_be_given_its_place_by_a_reset():
    streams = Streams(partitions=1)
    streams.put("a", "b", "c")
    streams.engine.streams.group("fresh", create=True).reset("orders", To(offset=2))
    assert drain(streams.consumer(group="fresh")) == ["c"]


def test_what_is_told_of_a_group():
    streams = Streams(partitions=2)
    streams.put("a", "b")
    first, second = streams.consumer(), streams.consumer(instance_id="two", holder="tests")
    facts = streams.group().describe()
    assert (facts.state, len(facts.members)) == ("rebalancing", 2)
    settle(first, second)
    facts = streams.group().describe()
    assert (facts.state, facts.assignor, facts.rebalance) == ("stable", "sticky", "cooperative")
    assert [member.instance_id for member in facts.members] == ["", "two"]
    assert facts.members[1].holder == "tests"
    assert sorted(place for member in facts.members for place in member.partitions) == [("orders", 0), ("orders", 1)]
    assert [each.messages for each in facts.lag] == [2, 0]
    first.close()
    second.close()
    streams.after(seconds=31)
    assert streams.group().describe().state == "empty"


def test_members_of_an_earlier_process_are_refused_after_a_restart():
    streams = Streams(partitions=1)
    streams.put("a")
    consumer = streams.consumer()
    member, epoch = consumer.member_id, streams.group().members.epoch
    streams.kill()
    group = streams.group()
    assert group.members.epoch >= epoch
    other = streams.consumer()
    assert group.epoch_of(other.member_id) > epoch
    with pytest.raises(Fenced, match="is not a member"):
        group.commit(member, epoch, {("orders", 0): 1})


def test_a_commit_of_several_partitions_is_refused_as_a_whole():
    streams = Streams(partitions=2)
    streams.fill(1, partitions=2)
    first, second = streams.consumer(auto_commit=False), streams.consumer(auto_commit=False)
    settle(first, second)
    with pytest.raises(Fenced):
        first.commit(offsets={("orders", 0): 1, ("orders", 1): 1})
    assert [each.offset for each in streams.group().lag()] == [0, 0]


def test_a_deleted_group_is_gone_for_good_and_keeps_nothing():
    streams = Streams(partitions=1)
    streams.put("a")
    with streams.consumer() as consumer:
        with pytest.raises(InvalidRequest, match="close its consumers first"):
            streams.engine.streams.delete("analytics")
        drain(consumer)
    streams.engine.streams.delete("analytics")
    assert "stream:analytics" not in streams.engine.topic("orders").partition(0).log.pins
    with pytest.raises(UnknownGroup):
        streams.engine.streams.delete("analytics")
    streams.kill()
    assert streams.engine.streams.names() == []
    assert drain(streams.consumer()) == ["a"]


def test_a_deletion_that_was_cut_short_is_whole_or_not_begun():
    streams = Streams(partitions=1)
    streams.put("a")
    with streams.consumer() as consumer:
        drain(consumer)
    stages = []
    streams.disk.on_call = lambda call: stages.append(streams.disk.kill())
    streams.engine.streams.delete("analytics")
    streams.disk.on_call = None
    assert len(stages) > 3
    seen = set()
    for disk in stages:
        streams.disk = disk
        streams.engine = streams.open()
        seen.add(tuple(streams.engine.streams.names()))
        assert not [name for name in disk.names(f"{FOLDER}/groups") if name.startswith(".")]
        if seen == {("analytics",)}:
            assert streams.group().lag()[0].messages == 0
        streams.engine.close()
    assert seen == {("analytics",), ()}


def test_a_lost_tail_is_noticed_and_not_skipped_over():
    streams = Streams(partitions=1)
    streams.put("a", "b", "c", "d")
    with streams.consumer() as consumer:
        drain(consumer)
    log = streams.engine.topic("orders").partition(0).log
    log.append([b"e"])
    log.truncate(4)
    with streams.consumer() as consumer:
        assert consumer.position("orders", 0) == 4
    streams.put("e", "f")
    with streams.consumer() as consumer:
        drain(consumer)
        assert consumer.position("orders", 0) == 6
    log.truncate(4)
    streams.put("g", "h", "i")
    assert drain(streams.consumer()) == ["g", "h", "i"]


def test_topics_are_held_only_while_a_member_wants_them():
    streams = Streams()
    consumer = streams.consumer()
    assert streams.engine.topic("orders").busy
    consumer.close()
    assert not streams.engine.topic("orders").busy
    with pytest.raises(UnknownTopic):
        streams.group().join(["orders", "nothing"], ConsumerSettings())
    assert not streams.engine.topic("orders").busy


def test_a_group_has_one_mode_on_a_topic():
    streams = Streams()
    streams.engine.topic("orders").group("billing")
    with pytest.raises(InvalidRequest, match="in queue mode"):
        streams.consumer(group="billing")


def test_a_tick_says_when_it_is_due_again():
    streams = Streams()
    assert streams.engine.streams.tick() is None
    consumer = streams.consumer(heartbeat_ms=700)
    assert 0 < streams.engine.streams.tick() <= 700
    consumer.close()
    streams.after(seconds=2)
    assert streams.engine.streams.tick() is None


def test_groups_do_not_know_of_each_other():
    streams = Streams(partitions=1)
    streams.put("a")
    one, two = streams.consumer(group="one"), streams.consumer(group="two")
    assert drain(one) == drain(two) == ["a"]
    one.close()
    assert [each.messages for each in streams.group("two").lag()] == [1]
    assert streams.engine.streams.names() == ["one", "two"]


def test_many_consumers_that_come_and_go_leave_a_sound_group():
    streams = Streams(partitions=5)
    group = None
    alive = []
    for number in range(12):
        alive.append(streams.consumer(instance_id=f"i{number}" if number % 4 == 0 else None))
        group = streams.group()
        settle(*alive)
        if number % 3 == 2:
            alive.pop(0).close()
        streams.after(seconds=3)
        assert check(group.members) == []
    streams.after(seconds=31)
    for consumer in alive:
        consumer.poll(0)
    settle(*alive)
    owned = sorted(place for consumer in alive for place in consumer.assignment())
    assert owned == [("orders", number) for number in range(5)]
