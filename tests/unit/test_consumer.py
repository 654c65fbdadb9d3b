"""A consumer of a stream group: polls, commits, rebalances, and what becomes of it when it is slow or gone."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from holdfast.api.drafts import Bodies
from holdfast.broker.waiters import ThreadWaiter
from holdfast.errors import BadSettings, Closed, Fenced, InvalidRequest, OffsetOutOfRange, UnknownTopic
from holdfast.local.publisher import Publisher
from tests.unit.streams import Streams, consumer_of, drain, settle, texts


def test_a_lone_consumer_gets_everything_each_partition_in_order():
    streams = Streams()
    streams.fill(5)
    consumer = streams.consumer()
    assert consumer.assignment() == [("orders", 0), ("orders", 1), ("orders", 2)]
    found = drain(consumer, max_records=4)
    assert sorted(found) == [f"{p}-{i}" for p in range(3) for i in range(5)]
    for partition in range(3):
        assert [text for text in found if text.startswith(f"{partition}-")] == [f"{partition}-{i}" for i in range(5)]


def test_a_message_says_where_it_stands():
    streams = Streams()
    streams.put("a", "b", partition=1)
    first, second = streams.consumer(body_type=str).poll(0)
    assert (second.topic, second.partition, second.offset, second.body, second.raw) == ("orders", 1, 1, "b", b"b")
    assert (first.id, first.key, dict(first.headers)) == ("orders-1-0", None, {})
    assert repr(first) == "<StreamMessage orders-1-0: b'a'>"


# Seen in the originals.
def test_a_poll_serves_all_topics_and_partitions_fairly():
    streams = Streams()
    streams.engine.create_topic("prices", changes={"partitions": 2})
    streams.fill(1_000)
    streams.fill(1_000, partitions=2, topic="prices")
    consumer = streams.consumer(["orders", "prices"])
    places = {(m.topic, m.partition) for m in consumer.poll(0, max_records=5)}
    assert len(places) == 5
    counts: dict[object, int] = {}
    for _ in range(10):
        for message in consumer.poll(0, max_records=100):
            counts[message.topic, message.partition] = counts.get((message.topic, message.partition), 0) + 1
    assert set(counts.values()) == {200}


def test_single_polls_go_round():
    streams = Streams()
    streams.fill(5)
    consumer = streams.consumer()
    assert {consumer.poll(0, max_records=1)[0].partition for _ in range(3)} == {0, 1, 2}


def test_one_busy_partition_does_not_starve_the_others():
    streams = Streams()
    streams.put(*["x"] * 1_000, partition=0)
    consumer = streams.consumer()
    consumer.poll(0, max_records=10)
    streams.put("late", partition=2)
    assert "late" in texts(consumer.poll(0, max_records=10))


def test_poll_answers_nothing_when_the_time_is_over():
    streams = Streams()
    consumer = streams.consumer()
    before = streams.clock.monotonic_ns()
    assert consumer.poll(2.5) == []
    assert streams.clock.monotonic_ns() - before == 2_500_000_000


def test_poll_waits_for_a_message_that_comes(tmp_path):
    from holdfast.broker.engine import BrokerEngine

    engine = BrokerEngine.open(tmp_path / "data")
    engine.create_topic("orders", changes={"partitions": 2})
    consumer = consumer_of(engine, "orders", "analytics")
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.extend(texts(consumer.poll(10))))
    thread.start()
    partition = engine.topic("orders").partition(1)
    appended, _ = partition.append([b"x"])
    partition.log.wait(appended)
    thread.join(10)
    assert found == ["x"]
    consumer.close()
    engine.close()


def test_closing_wakes_a_poll_that_waits(tmp_path):
    from holdfast.broker.engine import BrokerEngine

    engine = BrokerEngine.open(tmp_path / "data")
    engine.create_topic("orders")
    consumer = consumer_of(engine, "orders", "analytics")
    ended: list[object] = []

    def wait() -> None:
        ended.extend(consumer)
        ended.append("over")

    thread = threading.Thread(target=wait)
    thread.start()
    consumer.close()
    thread.join(10)
    assert ended == ["over"]
    engine.close()


def test_whatever_concerns_a_consumer_wakes_it():
    streams = Streams(partitions=2)
    consumer = streams.consumer()

    def wakes(event: Callable[[], object]) -> bool:
        waiter = ThreadWaiter(streams.clock)
        consumer.poll(0)
        with consumer._port._line.in_line(waiter):
            event()
            return waiter.woken

    assert not wakes(lambda: None)
    assert wakes(lambda: streams.put("x", partition=0))
    assert wakes(lambda: streams.put("x", partition=1))
    assert wakes(lambda: streams.engine.alter_topic("orders", {"partitions": 3}))
    assert wakes(lambda: streams.put("x", partition=2))
    others = []
    assert wakes(lambda: others.append(streams.consumer()))
    settle(consumer, *others)
    (foreign,) = others[0].assignment()
    assert not wakes(lambda: streams.put("x", partition=foreign[1]))
    assert wakes(lambda: others.pop().close())
    assert wakes(consumer.close)


def test_a_put_that_waits_for_nothing_wakes_the_consumer_of_its_partition_and_nobody_once_that_is_gone():
    streams = Streams(partitions=1)
    publisher = Publisher(streams.engine.topic("orders"), Bodies(bytes), streams.clock)
    consumer = streams.consumer()
    waiter = ThreadWaiter(streams.clock)
    with consumer._port._line.in_line(waiter):
        assert publisher.put_now(b"x", "os") is not None
        assert waiter.woken
    assert texts(consumer.poll(0)) == ["x"]
    (wakeup,) = streams.engine.topic("orders").partition(0).lines
    consumer.close()
    assert wakeup.standing == []


def test_after_a_commit_another_consumer_goes_on_behind_it():
    streams = Streams(partitions=1)
    streams.put("a", "b", "c", "d")
    with streams.consumer(auto_commit=False) as consumer:
        assert texts(consumer.poll(0, max_records=2)) == ["a", "b"]
        consumer.commit()
        assert texts(consumer.poll(0, max_records=1)) == ["c"]
    streams.reopen()
    with streams.consumer(auto_commit=False) as consumer:
        assert drain(consumer) == ["c", "d"]


def test_without_a_commit_all_comes_again():
    streams = Streams(partitions=1)
    streams.put("a", "b")
    for _ in range(2):
        with streams.consumer(auto_commit=False) as consumer:
            assert drain(consumer) == ["a", "b"]


def test_a_commit_may_be_of_messages_or_of_offsets():
    streams = Streams(partitions=2)
    streams.put("a", "b", "c", partition=0)
    streams.put("d", partition=1)
    consumer = streams.consumer(auto_commit=False)
    messages = consumer.poll(0)
    consumer.commit([m for m in messages if m.raw in (b"a", b"b")])
    assert (consumer.committed("orders", 0), consumer.committed("orders", 1)) == (2, 0)
    consumer.commit(offsets={("orders", 0): 1, ("orders", 1): 1})
    assert (consumer.committed("orders", 0), consumer.committed("orders", 1)) == (1, 1)
    consumer.commit()
    assert (consumer.committed("orders", 0), consumer.committed("orders", 1)) == (3, 1)


# Seen in the originals.
def test_auto_commit_really_commits_on_poll():
    streams = Streams(partitions=1)
    streams.put("a", "b")
    consumer = streams.consumer()
    consumer.poll(0)
    streams.clock.advance(seconds=4)
    consumer.poll(0)
    assert consumer.committed("orders", 0) == 0
    streams.clock.advance(seconds=1)
    consumer.poll(0)
    assert consumer.committed("orders", 0) == 2


def test_auto_commit_happens_while_a_poll_waits():
    streams = Streams(partitions=1)
    streams.put("a")
    consumer = streams.consumer()
    consumer.poll(0)
    streams.clock.advance(seconds=1)
    began_ms = streams.clock.now_ns() // 1_000_000
    consumer.poll(60)
    (entry,) = streams.group().offsets.entries()
    assert (entry.offset, entry.at_ms - began_ms) == (1, 4_000)


def test_auto_commit_does_not_commit_what_was_only_just_handed_out():
    streams = Streams(partitions=1)
    streams.put("a")
    consumer = streams.consumer()
    streams.clock.advance(seconds=60)
    assert texts(consumer.poll(0)) == ["a"]
    assert consumer.committed("orders", 0) == 0


def test_auto_commit_commits_on_close():
    streams = Streams(partitions=1)
    streams.put("a", "b")
    consumer = streams.consumer()
    consumer.poll(0)
    consumer.close()
    assert streams.group().lag()[0].messages == 0


def test_what_failed_is_not_committed_on_the_way_out():
    streams = Streams(partitions=1)
    streams.put("a", "b")
    with pytest.raises(ZeroDivisionError), streams.consumer() as consumer:
        consumer.poll(0, max_records=1)
        consumer.poll(0, max_records=1)
        raise ZeroDivisionError
    with streams.consumer() as consumer:
        assert drain(consumer) == ["b"]


def test_auto_commit_commits_when_partitions_are_taken_away():
    streams = Streams(partitions=2)
    streams.put("a", partition=0)
    streams.put("b", partition=1)
    first = streams.consumer()
    first.poll(0)
    second = streams.consumer()
    found = settle(first, second)
    assert found == []
    assert len(first.assignment()) == len(second.assignment()) == 1


def test_iterating_hands_out_one_message_at_a_time():
    streams = Streams(partitions=1)
    streams.put("a", "b", "c")
    with streams.consumer(auto_commit=False) as consumer:
        for message in consumer:
            consumer.commit()
            if message.raw == b"b":
                break
        assert consumer.committed("orders", 0) == 2
        assert drain(consumer) == ["c"]


def test_a_message_of_a_loop_that_failed_comes_again():
    streams = Streams(partitions=1)
    streams.put("a", "b", "c")
    with pytest.raises(ZeroDivisionError), streams.consumer() as consumer:
        for message in consumer:
            if message.raw == b"b":
                raise ZeroDivisionError
    with streams.consumer() as consumer:
        assert drain(consumer) == ["b", "c"]


def test_in_a_loop_a_message_counts_as_handled_with_the_next_also_of_another_partition():
    streams = Streams(partitions=2)
    streams.put("a", partition=0)
    streams.put("b", partition=1)
    seen = []
    with pytest.raises(ZeroDivisionError), streams.consumer() as consumer:
        for message in consumer:
            seen.append(message.raw.decode())
            if len(seen) == 2:
                raise ZeroDivisionError
    with streams.consumer() as consumer:
        assert drain(consumer) == [seen[1]]


def test_a_loop_notices_a_rebalance_between_two_messages():
    streams = Streams(partitions=2)
    streams.fill(3, partitions=2)
    first = streams.consumer()
    found = [next(iter(first))]
    second = streams.consumer()
    found += second.poll(0)
    loop = iter(first)
    found += [next(loop), next(loop)]
    found += second.poll(0, max_records=1) + second.poll(0)
    assert len(second.assignment()) == 1
    found += first.poll(0)
    assert sorted(texts(found)) == ["0-0", "0-1", "0-2", "1-0", "1-1", "1-2"]


def test_two_consumers_share_the_partitions_and_nothing_comes_twice():
    streams = Streams()
    streams.fill(10)
    first, second = streams.consumer(), streams.consumer()
    found = settle(first, second)
    assert sorted(len(c.assignment()) for c in (first, second)) == [1, 2]
    streams.fill(10)
    found += settle(first, second)
    assert sorted(found) == sorted(2 * [f"{p}-{i}" for p in range(3) for i in range(10)])


def test_callbacks_hear_of_what_comes_and_goes():
    streams = Streams(partitions=2)
    notices: list[tuple[str, object]] = []
    first = streams.consumer(
        on_assigned=lambda places: notices.append(("+", places)),
        on_revoked=lambda places: notices.append(("-", places)),
    )
    second = streams.consumer()
    settle(first, second)
    second.close()
    settle(first)
    first.close()
    one, other = ("orders", 0), ("orders", 1)
    assert notices == [("+", [one, other]), ("-", [other]), ("+", [other]), ("-", [one, other])]


def test_in_on_revoked_a_last_commit_still_counts():
    streams = Streams(partitions=2)
    streams.fill(3, partitions=2)
    consumer = streams.consumer(auto_commit=False, on_revoked=lambda _: consumer.commit())
    consumer.poll(0)
    second = streams.consumer(auto_commit=False)
    assert settle(consumer, second) == []
    streams.put("last", partition=consumer.assignment()[0][1])
    consumer.poll(0)
    consumer.close()
    assert settle(second) == []


def test_a_callback_that_fails_does_not_keep_a_consumer_from_leaving():
    streams = Streams()
    consumer = streams.consumer(on_revoked=lambda _: consumer.nothing)
    with pytest.raises(AttributeError):
        consumer.close()
    assert consumer.closed
    assert streams.group().members.members == {}


def test_a_consumer_that_left_gives_all_to_the_others():
    streams = Streams()
    first, second = streams.consumer(), streams.consumer()
    settle(first, second)
    first.close()
    streams.fill(1)
    assert sorted(settle(second)) == ["0-0", "1-0", "2-0"]


def test_the_keeper_shows_that_a_consumer_is_alive():
    streams = Streams()
    consumer = streams.consumer()
    for _ in range(30):
        streams.after(seconds=3)
    assert consumer.member_id in streams.group().members.members


def test_a_consumer_that_does_not_poll_any_more_is_put_out_and_its_late_commit_refused():
    streams = Streams()
    streams.fill(1)
    slow, other = streams.consumer(auto_commit=False), streams.consumer(auto_commit=False)
    settle(slow, other)
    held = slow.poll(0)
    for _ in range(120):
        other.poll(0)
        streams.after(seconds=3)
    assert list(streams.group().members.members) == [other.member_id]
    with pytest.raises(Fenced, match="sent no heartbeat"):
        slow.commit(offsets=dict.fromkeys(slow.assignment(), 1))
    slow.seek_to_start()
    assert held == []


def test_an_evicted_consumer_joins_again_at_the_next_poll():
    streams = Streams(partitions=1)
    streams.put("a", "b")
    lost: list[object] = []
    consumer = streams.consumer(auto_commit=False, on_revoked=lost.extend)
    old = consumer.poll(0)
    streams.clock.advance(seconds=400)
    streams.engine.tick()
    streams.after(seconds=31)
    assert streams.group().members.members == {}
    assert texts(consumer.poll(0)) == ["a", "b"]
    assert lost == [("orders", 0)]
    with pytest.raises(Fenced, match="before this consumer lost partition"):
        consumer.commit(old)
    assert consumer.committed("orders", 0) == 0


def test_a_consumer_that_was_dropped_leaves_the_group():
    streams = Streams()
    consumer = streams.consumer()
    del consumer
    gc.collect()
    streams.after(seconds=3)
    assert streams.group().members.members == {}


def test_a_static_member_comes_back_to_its_partitions_after_a_restart():
    streams = Streams(partitions=4)
    first, second = streams.consumer(instance_id="one"), streams.consumer(instance_id="two")
    settle(first, second)
    before = [first.assignment(), second.assignment()]
    first.close()
    second.close()
    streams.reopen()
    assert streams.consumer(instance_id="two").assignment() == before[1]
    assert streams.consumer(instance_id="one").assignment() == before[0]


def test_a_static_member_that_does_not_come_back_loses_its_place():
    streams = Streams(partitions=4)
    first, second = streams.consumer(instance_id="one"), streams.consumer()
    settle(first, second)
    first.close()
    streams.after(seconds=29)
    assert len(second.assignment()) == 2
    streams.after(seconds=2)
    second.poll(0)
    assert len(second.assignment()) == 4


def test_the_second_of_two_with_one_instance_id_wins():
    streams = Streams(partitions=1)
    streams.put("a")
    first = streams.consumer(instance_id="one", auto_commit=False)
    first.poll(0)
    second = streams.consumer(instance_id="one", auto_commit=False)
    with pytest.raises(Fenced, match="was replaced by"):
        first.commit()
    assert texts(second.poll(0)) == ["a"]


def test_start_latest_begins_behind_what_is_there_and_stays_there():
    streams = Streams(partitions=1)
    streams.put("old")
    streams.consumer(start="latest").close()
    streams.put("new")
    streams.reopen()
    with streams.consumer(start="latest") as consumer:
        assert drain(consumer) == ["new"]


def test_added_partitions_are_read_from_their_first_message_on():
    streams = Streams(partitions=1)
    consumer = streams.consumer(start="latest")
    streams.engine.alter_topic("orders", {"partitions": 2})
    streams.put("a", partition=1)
    assert drain(consumer) == ["a"]
    assert consumer.assignment() == [("orders", 0), ("orders", 1)]


def test_growth_wakes_nobody_in_vain_and_loses_nothing_for_consumers_that_are_away():
    streams = Streams(partitions=1)
    streams.consumer(start="latest").close()
    streams.engine.alter_topic("orders", {"partitions": 2})
    streams.put("a", partition=1)
    assert drain(streams.consumer(start="latest")) == ["a"]


def test_a_topic_of_the_same_name_is_another_topic():
    streams = Streams(partitions=1)
    streams.put("a", "b")
    with streams.consumer() as consumer:
        drain(consumer)
    streams.engine.delete_topic("orders")
    streams.engine.create_topic("orders")
    streams.put("c")
    assert drain(streams.consumer()) == ["c"]


def test_a_consumer_lives_through_the_end_of_its_topic():
    streams = Streams(partitions=2)
    streams.engine.create_topic("prices")
    consumer = streams.consumer(["orders", "prices"])
    streams.engine.delete_topic("orders")
    streams.put("x", topic="prices")
    assert drain(consumer) == ["x"]
    assert consumer.assignment() == [("prices", 0)]
    streams.engine.create_topic("orders")
    streams.put("y")
    streams.after(seconds=3)
    assert drain(consumer) == ["y"]


def test_a_topic_that_was_made_anew_is_read_from_its_start_by_those_who_had_the_old_one():
    streams = Streams(partitions=2)
    streams.fill(3, partitions=2)
    first, second = streams.consumer(), streams.consumer()
    assert len(settle(first, second)) == 6
    streams.engine.delete_topic("orders")
    streams.engine.create_topic("orders", changes={"partitions": 2})
    streams.fill(1, partitions=2)
    assert sorted(settle(first, second)) == ["0-0", "1-0"]
    assert len(first.assignment()) == len(second.assignment()) == 1


def test_a_commit_for_a_topic_that_is_gone_is_refused():
    streams = Streams(partitions=1)
    streams.put("a")
    consumer = streams.consumer(auto_commit=False)
    messages = consumer.poll(0)
    streams.engine.delete_topic("orders")
    with pytest.raises(UnknownTopic, match="was deleted"):
        consumer.commit(messages)
    assert consumer.poll(0) == []
    streams.engine.create_topic("orders")
    streams.put("b")
    other = streams.consumer()  # it is the first to find the new one
    with pytest.raises(Fenced):
        consumer.commit(messages)
    assert sorted(settle(consumer, other)) == ["b"]


def test_seeking_and_positions():
    streams = Streams(partitions=2)
    streams.fill(4, partitions=2)
    consumer = streams.consumer()
    drain(consumer)
    assert consumer.position("orders", 0) == 4
    consumer.seek("orders", 0, 2)
    assert drain(consumer) == ["0-2", "0-3"]
    consumer.seek_to_start("orders", 1)
    assert drain(consumer) == ["1-0", "1-1", "1-2", "1-3"]
    consumer.seek_to_start()
    consumer.seek_to_end("orders", 1)
    assert drain(consumer) == ["0-0", "0-1", "0-2", "0-3"]
    streams.clock.advance(seconds=10)
    between = datetime.fromtimestamp(streams.clock.now_ns() / 1e9, UTC) - timedelta(seconds=5)
    streams.put("new", partition=1)
    consumer.seek_to_time(between)
    assert drain(consumer) == ["new"]


def test_seeking_to_where_nothing_can_be_is_refused():
    streams = Streams(partitions=1)
    streams.put("a")
    consumer = streams.consumer()
    with pytest.raises(OffsetOutOfRange, match="it holds 0 to 0"):
        consumer.seek("orders", 0, 2)
    with pytest.raises(InvalidRequest, match="not assigned to this consumer"):
        consumer.seek("orders", 7, 0)
    with pytest.raises(InvalidRequest):
        consumer.seek("orders", 0, "0")  # type: ignore[arg-type]
    with pytest.raises(OffsetOutOfRange):
        consumer.commit(offsets={("orders", 0): 5})


def test_paused_partitions_give_nothing_and_stay_ours():
    streams = Streams(partitions=2)
    streams.fill(1, partitions=2)
    consumer = streams.consumer()
    consumer.pause("orders", 0)
    assert consumer.paused() == [("orders", 0)]
    assert drain(consumer) == ["1-0"]
    consumer.resume()
    assert drain(consumer) == ["0-0"]


def test_lag_in_messages_and_seconds():
    streams = Streams(partitions=2)
    streams.put("a", "b", "c")
    streams.clock.advance(seconds=7)
    consumer = streams.consumer()
    assert [(each.partition, each.messages, each.seconds) for each in consumer.lag()] == [(0, 3, 7.0), (1, 0, 0.0)]
    drain(consumer)
    assert [each.messages for each in consumer.lag()] == [0, 0]
    assert [each.messages for each in streams.group().lag()] == [3, 0]
    consumer.commit()
    assert [each.messages for each in streams.group().lag()] == [0, 0]


def test_expired_messages_are_passed_over():
    from holdfast.model import Batch

    streams = Streams(partitions=1)
    now_ms = streams.clock.now_ns() // 1_000_000
    batch = Batch(values=[b"a", b"b", b"c"], expires_at_ms=[0, now_ms - 1, now_ms + 60_000])
    streams.engine.topic("orders").partition(0).log.append(batch)
    consumer = streams.consumer()
    assert drain(consumer) == ["a", "c"]
    assert consumer.position("orders", 0) == 3


def test_damaged_messages_are_passed_over_and_told_of(tmp_path, caplog):
    from holdfast.broker.engine import BrokerEngine

    engine = BrokerEngine.open(tmp_path / "data")
    engine.create_topic("orders")
    partition = engine.topic("orders").partition(0)
    for value in (b"a" * 100, b"b" * 100, b"c" * 100):
        appended, _ = partition.append([value])
        partition.log.wait(appended)
    segment = next((tmp_path / "data/topics/orders/0/log").glob("*.log"))
    content = segment.read_bytes()
    with segment.open("r+b") as file:
        file.seek(content.index(b"b" * 100))
        file.write(b"x")
    consumer = consumer_of(engine, "orders", "analytics")
    assert [m.raw[:1] for m in consumer.poll(0)] == [b"a"]
    assert [m.raw[:1] for m in consumer.poll(0)] == [b"c"]
    assert "messages damaged" in caplog.text
    engine.close()


def test_a_group_in_queue_mode_is_not_disturbed():
    streams = Streams(partitions=1)
    streams.put("a", "b")
    queue = streams.engine.topic("orders").group("billing")
    consumer = streams.consumer()
    assert len(queue.receive(1, lease_ms=1_000, holder="ann", detached=False)) == 1
    assert drain(consumer) == ["a", "b"]


def test_a_consumer_is_for_one_thread_at_a_time():
    streams = Streams()
    consumer = streams.consumer()
    consumer._polling = True
    with pytest.raises(InvalidRequest, match="already polling"):
        consumer.poll(0)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"topics": "nope"}, UnknownTopic),
        ({"topics": []}, InvalidRequest),
        ({"topics": 7}, InvalidRequest),
        ({"topics": ["../etc"]}, InvalidRequest),
        ({"group": "../etc"}, InvalidRequest),
        ({"group": 7}, InvalidRequest),
        ({"on_revoked": 7}, InvalidRequest),
        ({"instance_id": 7}, InvalidRequest),
        ({"instance_id": ""}, InvalidRequest),
        ({"body_type": 7}, InvalidRequest),
        ({"start": "middle"}, BadSettings),
        ({"auto_comit": True}, BadSettings),
        ({"session_ms": 1_000}, BadSettings),
    ],
)
def test_bad_arguments_are_refused_and_leave_nothing_behind(change, error):
    streams = Streams()
    with pytest.raises(error):
        streams.consumer(**change)
    assert streams.engine.streams.names() == []


def test_bad_polls_and_commits_are_refused():
    streams = Streams()
    consumer = streams.consumer()
    for options in ({"max_records": 0}, {"max_records": "5"}, {"timeout": -1}, {"timeout": "x"}):
        with pytest.raises(InvalidRequest):
            consumer.poll(**options)
    for options in (
        {"messages": [7]},
        {"messages": [], "offsets": {}},
        {"offsets": 7},
        {"offsets": {"orders": 1}},
        {"offsets": {("orders", 0): "1"}},
    ):
        with pytest.raises(InvalidRequest):
            consumer.commit(**options)
    with pytest.raises(UnknownTopic, match="no partition 99"):
        consumer.commit(offsets={("orders", 99): 0})


def test_a_group_shares_out_in_one_way_only():
    streams = Streams()
    first = streams.consumer(assignor="range")
    with pytest.raises(InvalidRequest, match="assignor='range'"):
        streams.consumer(assignor="sticky")
    first.close()
    streams.consumer(assignor="sticky", rebalance="eager")


def test_eager_and_cooperative_lose_and_double_nothing():
    for rebalance in ("eager", "cooperative"):
        for assignor in ("range", "round_robin", "sticky"):
            streams = Streams(partitions=3)
            first = streams.consumer(rebalance=rebalance, assignor=assignor)
            streams.fill(5)
            found = texts(first.poll(0, max_records=4))
            second = streams.consumer(rebalance=rebalance, assignor=assignor)
            found += settle(first, second)
            assert sorted(found) == [f"{p}-{i}" for p in range(3) for i in range(5)], (rebalance, assignor)


def test_a_closed_consumer_says_so():
    streams = Streams()
    consumer = streams.consumer()
    consumer.close()
    consumer.close()
    for call in (consumer.poll, consumer.commit, consumer.lag, consumer.seek_to_start):
        with pytest.raises(Closed, match="is closed"):
            call()
    assert list(consumer) == []
    other = streams.consumer()
    streams.engine.close()
    with pytest.raises(Closed):
        other.poll(0)
    other.close()


def test_a_callback_that_fails_is_asked_again():
    streams = Streams(partitions=2)
    fail = [True]

    def revoked(places: object) -> None:
        if fail.pop() if fail else False:
            raise ZeroDivisionError

    first = streams.consumer(on_revoked=revoked)
    second = streams.consumer()
    with pytest.raises(ZeroDivisionError):
        settle(first, second)
    settle(first, second)
    assert len(first.assignment()) == len(second.assignment()) == 1
