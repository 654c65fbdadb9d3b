"""Tracing through the faces: every step of a life, what it costs when it is off, and what it may never cost."""

from __future__ import annotations

import asyncio
import errno
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest

import holdfast
from holdfast.api.aio.broker import AsyncBroker
from holdfast.api.sync.broker import Broker
from holdfast.broker.delivery import Delivery
from holdfast.broker.partition import Partition
from holdfast.broker.tracing import TraceStep
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import InvalidRequest
from holdfast.local.aio.broker import AsyncLocalBrokerPort
from holdfast.local.sync.broker import LocalBrokerPort
from tests.unit.queues import FOLDER, Place

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
TRACES = f"{FOLDER}/topics/__traces"


def traced(**changes: Any) -> Place:
    return Place(**{"trace_sample": 1.0, **changes})


def life(place: Place, message: str) -> list[TraceStep]:
    return place.q._port.engine.trace(message)


def names(place: Place, message: str) -> list[str]:
    return [step.step for step in life(place, message)]


def asked(place: Place) -> Broker:
    """A broker beside the queue."""
    return Broker(LocalBrokerPort(place.q._port.engine))


def found(place: Place, **wanted: Any) -> list[TraceStep]:
    return asked(place).search_traces(**wanted)


def test_the_life_of_a_message_from_put_to_ack():
    place = traced()
    stored = place.q.put(b"a", headers={"traceparent": PARENT})
    place.clock.advance(ms=5)
    message = place.q.get(holder="ann")
    message.extend(60)
    place.clock.advance(ms=7)
    message.ack()
    steps = life(place, stored.id)
    assert [step.step for step in steps] == ["published", "leased", "extended", "acked"]
    assert {step.trace_id for step in steps} == {"4bf92f3577b34da6a3ce929d0e0e4736"}
    published, leased, _, acked = steps
    assert published.parent_id == "00f067aa0ba902b7"
    assert leased.parent_id == published.span_id
    assert (leased.group, leased.holder, leased.attempt) == ("default", "ann", 1)
    assert acked.at_ns - published.at_ns == 12_000_000
    assert message.headers["traceparent"] == PARENT


def test_every_short_way_is_traced_as_well():
    place = traced()
    place.q.put(b"a")
    place.q.put_many([b"b", b"c"])
    with place.q.get():
        pass
    taken = place.q.get_many(2)
    place.q.ack_many(taken)
    for n in range(3):
        assert names(place, f"jobs-0-{n}") == ["published", "leased", "acked"]


def test_errors_retries_and_the_way_to_the_dead_and_back():
    place = traced(max_attempts=2)
    stored = place.q.put(b"a")
    place.q.get().nack(error="no route")
    place.after(ms=100)
    with pytest.raises(ValueError, match="broken"), place.q.get():
        raise ValueError("broken")
    (letter,) = place.q.dead.list()
    place.clock.advance(ms=50)
    place.q.dead.redrive([letter.id])
    message = place.q.get()
    message.ack()
    steps = life(place, stored.id)
    assert [(step.step, step.id[7:]) for step in steps] == [
        ("published", "0"),
        ("leased", "0"),
        ("nacked", "0"),
        ("released", "0"),
        ("leased", "0"),
        ("buried", "0"),
        ("redriven", "0"),
        ("published", "1"),
        ("leased", "1"),
        ("acked", "1"),
    ]
    assert steps[2].error == "no route"
    assert steps[5].error.startswith("ValueError: broken")
    assert (steps[6].related, steps[7].related) == ("jobs-0-1", "jobs-0-0")
    assert len({step.trace_id for step in steps}) == 1
    assert life(place, message.id) == steps
    assert message.headers == {}  # our own note is no header of the user's


def test_the_first_lease_of_a_redriven_message_is_told_though_its_consumer_waited_for_it(
    monkeypatch: pytest.MonkeyPatch,
):
    place = traced(max_attempts=1)
    place.q.put(b"a")
    place.q.get().nack()
    append_moved = Partition.append_moved

    def and_taken(self: Partition, batch: Any) -> Any:
        appended = append_moved(self, batch)
        place.clock.advance(ms=1)
        place.q.get().ack()  # by one who waited for it, before anybody could write down that it is back
        return appended

    monkeypatch.setattr(Partition, "append_moved", and_taken)
    place.q.dead.redrive()
    assert sorted(step.step for step in life(place, "jobs-0-1") if step.id == "jobs-0-1") == [
        "acked",
        "leased",
        "published",
    ]


def test_a_message_that_is_redriven_again_and_again_carries_one_note_of_its_trace():
    place = traced()
    place.q.put(b"a")
    for _ in range(3):
        place.q.get().reject("no")
        place.q.dead.redrive()
    (record,) = place.q._port.deliveries[0].partition.log.records(3)
    assert [name for name, _ in record.headers].count("holdfast.trace") == 1
    steps = life(place, "jobs-0-3")
    assert [step.id for step in steps if step.step == "published"] == [f"jobs-0-{n}" for n in range(4)]
    assert len({step.trace_id for step in steps}) == 1
    for before, after in pairwise([step for step in steps if step.step == "published"]):
        assert after.parent_id == before.span_id


def test_a_delayed_message_from_put_to_ack_and_by_its_offset():
    place = traced()
    stored = place.q.put(b"a", delay=10)
    other = place.q.put(b"b", delay=20)
    assert place.q.cancel(other.id)
    place.after(seconds=10)
    message = place.q.get()
    message.ack()
    assert names(place, stored.id) == ["published", "delayed", "released", "leased", "acked"]
    assert life(place, f"jobs-0-{message.offset}") == life(place, stored.id)
    assert life(place, stored.id)[1].due_ms * 1_000_000 == life(place, stored.id)[2].at_ns
    assert names(place, other.id) == ["published", "delayed", "cancelled"]


def test_a_delayed_message_with_a_sampled_parent_is_traced_all_the_way():
    place = traced(trace_sample=1e-12)
    stored = place.q.put(b"a", delay=10, headers={"traceparent": PARENT})
    gone = place.q.put(b"b", delay=10, headers={"traceparent": PARENT})
    place.q.put(b"c", delay=10)
    place.q.cancel(gone.id)
    place.after(seconds=10)
    for message in place.q.get_many(5):
        message.ack()
    assert names(place, stored.id) == ["published", "delayed", "released", "leased", "acked"]
    assert names(place, gone.id) == ["published", "delayed", "cancelled"]
    assert {step.id for step in found(place)} == {stored.id, gone.id}


def test_expiry_cancel_defer_reject_and_lease_end():
    place = traced()
    expired = place.q.put(b"a", ttl=1)
    cancelled = place.q.put(b"b")
    rejected, deferred, ended = place.q.put_many([b"c", b"d", b"e"])
    place.q.cancel(cancelled.id)
    place.clock.advance(seconds=2)
    one, two, _three = place.q.get_many(3)
    one.reject("never")
    two.defer(delay=0)
    place.after(seconds=31)
    assert names(place, expired.id) == ["published", "expired"]
    assert names(place, cancelled.id) == ["published", "cancelled"]
    assert names(place, rejected.id) == ["published", "leased", "buried"]
    assert [(s.step, s.why) for s in life(place, deferred.id)][-1] == ("returned", "deferred")
    assert [(s.step, s.why) for s in life(place, ended.id)][-1] == ("returned", "lease ended")


def test_the_holder_that_was_killed_is_seen_at_the_next_opening():
    place = traced()
    stored = place.q.put(b"a")
    place.q.get(holder="ann")
    place.kill()
    steps = life(place, stored.id)
    assert [(step.step, step.why) for step in steps] == [("published", ""), ("leased", ""), ("returned", "holder gone")]
    assert steps[2].holder == "ann"
    assert steps[2].span_id == steps[1].span_id


def test_closing_gives_back_what_is_in_hand_and_says_so():
    place = traced()
    stored = place.q.put(b"a")
    place.q.get()
    place.reopen()
    assert [step.why for step in life(place, stored.id)] == ["", "", "queue closed"]


def test_a_duplicate_is_no_message_of_its_own():
    place = traced()
    place.q.put(b"a", dedup_id="x")
    place.q.put(b"a", dedup_id="x")
    assert len(found(place)) == 1


def test_a_share_is_traced_wholly_or_not_at_all():
    place = traced(trace_sample=0.3)
    place.q.put_many([b"x"] * 100)
    for message in place.q.get_many(100):
        message.ack()
    steps = found(place, limit=1_000)
    by_id: dict[str, list[str]] = {}
    for step in steps:
        by_id.setdefault(step.id, []).append(step.step)
    assert 10 < len(by_id) < 60
    assert {tuple(life) for life in by_id.values()} == {("published", "leased", "acked")}


def test_without_sampling_nothing_is_hooked_and_nothing_is_written():
    place = Place()
    place.q.put(b"a", headers={"traceparent": PARENT})
    place.q.get().ack()
    place.tick()
    assert found(place) == []
    assert life(place, "jobs-0-0") == []
    assert not place.disk.exists(TRACES)
    delivery = place.q._port.deliveries[0]
    assert delivery.tracer is None
    assert delivery.partition.tracer is None
    assert isinstance(delivery, Delivery)


def test_sampling_is_switched_while_messages_are_in_hand():
    place = Place()
    place.q.put_many([b"a", b"b", b"c"])
    first = place.q.get()
    place.q._port.engine.alter_topic("jobs", {"trace_sample": 1.0})
    second = place.q.get()
    first.ack()
    assert names(place, "jobs-0-0") == ["acked"]
    assert life(place, "jobs-0-0")[0].attempt == 1
    place.q._port.engine.alter_topic("jobs", {"trace_sample": 0.0})
    second.ack()
    place.q.get().ack()
    assert names(place, "jobs-0-1") == ["leased"]
    assert names(place, "jobs-0-2") == []
    assert place.q._port.deliveries[0].tracer is None
    assert place.q._port.deliveries[0].partition.tracer is None
    place.q._port.engine.alter_topic("jobs", {"trace_sample": 0.5})
    assert place.q._port.deliveries[0].tracer is not None


def test_a_trace_that_cannot_be_written_costs_the_message_nothing(caplog):
    place = Place.__new__(Place)
    place.disk, place.clock, place.ids = (
        SimulatedDisk(maps=False),
        holdfast.env.ManualClock(),
        holdfast.env.SeededIds(1),
    )
    place.q = place.open(trace_sample=1.0, min_free_bytes=0)
    place.q.put(b"a")
    log = place.q._port.engine.traces.log.log
    log._writer.fail("writing", OSError(errno.EIO, "gone"))
    place.q.put(b"b")
    for message in place.q.get_many(2):
        message.ack()
    stats = place.q.stats()
    assert (stats.ready, stats.leased, stats.metrics.acked) == (0, 0, 2)
    assert place.q._port.engine.traces.log.lost == 5
    said = [record for record in caplog.records if "trace steps lost" in record.message]
    assert len(said) == 1
    place.tick()
    place.q.close()
    place.q = place.open()
    assert place.q.stats().ready == 0


def test_traces_that_cannot_be_opened_keep_nobody_from_the_queue(caplog):
    place = Place()
    place.disk.open(TRACES, write=True, create=True)  # a file where their folder should be
    place.reopen(trace_sample=1.0)
    place.q.put_many([b"a", b"b"])
    taken = place.q.get_many(5)
    assert [message.body for message in taken] == [b"a", b"b"]
    place.tick()
    place.q.ack_many(taken)
    assert place.q._port.engine.traces.log.lost == 6
    assert found(place) == []
    place.q.close()


def test_steps_are_found_by_topic_time_event_holder_and_error():
    place = traced()
    place.q.put_many([b"a", b"b"])
    place.clock.advance(seconds=100)
    one, two = place.q.get_many(2, holder="ann")
    one.nack(error="No Route")
    two.ack()
    assert [step.step for step in found(place, topic="jobs", event="nacked")] == ["nacked"]
    assert found(place, topic="others") == []
    assert {step.step for step in found(place, since=timedelta(seconds=50))} == {"leased", "nacked", "acked"}
    assert {step.step for step in found(place, until=timedelta(seconds=50))} == {"published"}
    assert [step.offset for step in found(place, error="no route")] == [0]
    assert len(found(place, holder="ann")) == 4
    assert [step.step for step in found(place, limit=2)] == ["published", "published"]
    assert [step.step for step in found(place, limit=1, last=True)] == ["acked"]
    numbers = asked(place).trace_stats(topic="jobs")
    assert (numbers.messages, numbers.steps["leased"]) == (2, 2)
    assert numbers.first_delivery.max == 100.0


def test_tasks_ask_the_same():
    place = traced()
    stored = place.q.put(b"a")
    tasks = AsyncBroker(AsyncLocalBrokerPort(place.q._port.engine))

    async def ask() -> None:
        assert await tasks.trace(stored.id) == asked(place).trace(stored.id)
        assert await tasks.search_traces(event="published", last=True) == found(place, event="published")
        assert await tasks.trace_stats(topic="jobs", since=timedelta(1)) == asked(place).trace_stats(topic="jobs")
        with pytest.raises(InvalidRequest):
            await tasks.search_traces(limit=-1)

    asyncio.run(ask())


def test_a_question_that_makes_no_sense_is_refused():
    place = traced()
    for wrong in (
        {"limit": 0},
        {"limit": True},
        {"last": 1},
        {"event": "lease"},
        {"topic": 5},
        {"since": "yesterday"},
        {"until": 5},
        {"since": timedelta(seconds=-1)},
    ):
        with pytest.raises(InvalidRequest):
            found(place, **wrong)
    for message in ("nonsense", "", None, 5, "0-1", "d7"):
        with pytest.raises(InvalidRequest):
            life(place, message)
    assert life(place, "jobs-0-0") == life(place, "jobs-0-99") == life(place, "others-3-1") == []
    place.q.close()
    with pytest.raises(holdfast.Closed):
        life(place, "jobs-0-0")
    with pytest.raises(holdfast.Closed):
        found(place)


def test_each_group_has_its_own_deliveries_of_one_message():
    place = traced()
    engine = place.q._port.engine
    place.q.put(b"a")
    topic = engine.topic("jobs")
    billing = topic.group("billing")
    for group, holder in ((topic.group("default"), "ann"), (billing, "bob")):
        ((delivery, (delivered,)),) = group.receive(1, lease_ms=1_000, holder=holder, detached=False)
        delivery.ack([delivered.receipt])
    steps = life(place, "jobs-0-0")
    assert [(step.step, step.group, step.holder) for step in steps] == [
        ("published", "", ""),
        ("leased", "default", "ann"),
        ("acked", "default", "ann"),
        ("leased", "billing", "bob"),
        ("acked", "billing", "bob"),
    ]
    assert len({step.span_id for step in steps}) == 3
    assert len({step.trace_id for step in steps}) == 1


def test_a_message_that_came_back_for_one_group_is_no_step_of_another():
    place = traced()
    topic = place.q._port.engine.topic("jobs")
    topic.group("billing")
    place.q.put(b"a")
    place.q.get().reject("no")
    (letter,) = place.q.dead.list()
    place.q.dead.redrive([letter.id])
    taken = topic.group("billing").receive(5, lease_ms=1_000, holder="bob", detached=False)
    assert [one.record.offset for _, some in taken for one in some] == [0]
    assert [(step.step, step.group) for step in life(place, "jobs-0-1") if step.id == "jobs-0-1"] == [
        ("published", "default")
    ]


def test_old_traces_are_dropped_by_upkeep():
    place = traced()
    place.q.put(b"a")
    place.after(seconds=2 * 86_400)
    place.q.put(b"b")
    place.after(seconds=6 * 86_400)
    assert [step.offset for step in found(place)] == [1]


def broker_on(place: Place) -> holdfast.Broker:
    """A broker in a folder of its own on the same disk, with a traced topic of three partitions."""
    broker = holdfast.open_broker("/data/shop", world=place.world)
    broker.create_topic("orders", partitions=3, trace_sample=1.0, min_free_bytes=0)
    return broker


def test_a_broker_tells_the_lives_of_messages_in_every_partition():
    broker = broker_on(Place())
    stored = [broker.publish("orders", b"a", partition=number) for number in range(3)]
    assert [one.id for one in stored] == ["orders-0-0", "orders-1-0", "orders-2-0"]
    billing = broker.group("orders", "billing")
    for message in billing.receive_many(3):
        message.ack()
    for one in stored:
        assert [step.step for step in broker.trace(one.id)] == ["published", "leased", "acked"]
    assert len({broker.trace(one.id)[0].trace_id for one in stored}) == 3
    assert {step.partition for step in broker.search_traces(topic="orders", event="acked")} == {0, 1, 2}
    assert broker.trace_stats(topic="orders").messages == 3
    assert "__traces" not in broker.topics()
    broker.close()


def test_what_a_producer_sends_is_traced_once():
    broker = broker_on(Place())
    with broker.producer(linger_ms=0) as producer:
        sent = [producer.send("orders", b"%d" % n, key=f"k{n}") for n in range(20)]
        plain = producer.send("orders", b"x", headers={"traceparent": PARENT}, partition=1)
        producer.flush()
        ids = {future.result().id for future in sent}
        assert broker.trace(plain.result().id)[0].parent_id == "00f067aa0ba902b7"
    published = [step.id for step in broker.search_traces(event="published", limit=1_000)]
    assert sorted(published) == sorted({*ids, plain.result().id})
    broker.close()


def test_a_group_with_ordering_keys_and_added_partitions_are_traced():
    broker = broker_on(Place())
    ordered = broker.group("orders", "ordered", key_order=True)
    broker.publish_many("orders", [holdfast.NewMessage(body=b"%d" % n, key="k") for n in range(3)])
    for _ in range(3):
        (message,) = ordered.receive_many(5)
        message.ack()
    assert len(broker.search_traces(group="ordered", event="acked")) == 3
    broker.add_partitions("orders", 1)
    stored = broker.publish("orders", b"new", partition=3)
    (message,) = ordered.receive_many(5)
    message.ack()
    assert [step.step for step in broker.trace(stored.id)] == ["published", "leased", "acked"]
    broker.close()


def test_a_topic_that_is_made_again_begins_other_lives():
    broker = broker_on(Place())
    first = broker.publish("orders", b"a", partition=0)
    before = broker.trace(first.id)
    broker.delete_topic("orders")
    assert broker.trace(first.id) == before
    broker.create_topic("orders", trace_sample=1.0, min_free_bytes=0)
    again = broker.publish("orders", b"a")
    assert again.id == first.id
    (step,) = broker.trace(first.id)
    assert step.trace_id != before[0].trace_id
    broker.close()
