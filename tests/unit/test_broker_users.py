"""What first users of the broker ran into, each kept from coming back."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from holdfast import Fenced, InvalidRequest, UnknownGroup, UnknownTopic, open_broker
from holdfast.api.sync.broker import Broker
from holdfast.broker.engine import BrokerEngine
from holdfast.broker.waiters import ThreadWaiter
from holdfast.errors import BadSettings
from holdfast.local.sync.broker import LocalBrokerPort
from tests.unit.streams import FOLDER, Streams, drain


def broker_of(streams: Streams) -> Broker:
    return Broker(LocalBrokerPort(streams.engine, with_threads=False))


def test_what_a_group_has_committed_is_let_go_after_its_last_consumer_left():
    streams = Streams(partitions=1)
    streams.fill(10, partitions=1)
    with streams.consumer() as consumer:
        drain(consumer)
    streams.engine.sync()
    streams.after(seconds=2)
    assert streams.engine.topic("orders").partitions[0].log.pins["stream:analytics"] == 10


def test_a_topic_is_compacted_up_to_what_its_readers_are_through_with_now():
    streams = Streams(partitions=1, cleanup="compact")
    broker = broker_of(streams)
    group = broker.group("orders", "billing")
    with broker.producer() as producer:
        for i in range(50):
            producer.send("orders", b"%d" % i, key="k")
    with broker.consumer("orders", group="analytics") as consumer:
        drain(consumer)
    group.ack_many(group.receive_many(100, timeout=0))
    assert broker.compact_topic("orders").removed_messages == 49
    assert [message.raw for message in broker.read("orders")] == [b"49"]


def test_a_group_in_stream_mode_is_not_deleted_by_the_name_of_one_of_its_topics():
    streams = Streams()
    broker = broker_of(streams)
    broker.create_topic("invoices")
    broker.consumer(["orders", "invoices"], group="analytics").close()
    with pytest.raises(InvalidRequest, match="deleted as a whole"):
        broker.delete_group("analytics", "orders")
    broker.delete_group("analytics")
    assert broker.groups() == []


def test_two_consumers_with_one_instance_id_do_not_put_each_other_out_for_ever():
    streams = Streams()
    streams.fill(3)
    first = streams.consumer(instance_id="one")
    second = streams.consumer(instance_id="one")
    with pytest.raises(Fenced, match="has taken over as 'one'"):
        first.poll(0)
    assert first.closed
    assert len(drain(second)) == 9


def test_an_observer_hears_of_every_group():
    class Ear:
        def __init__(self) -> None:
            self.heard: dict[str, int] = {}

        def count(self, name: str, n: int) -> None:
            self.heard[name] = self.heard.get(name, 0) + n

        def observe(self, name: str, seconds: float) -> None: ...

    streams = Streams()
    streams.engine.close()
    ear = Ear()
    streams.engine = BrokerEngine.open(FOLDER, world=streams.engine.world, settings=streams.settings, observer=ear)
    broker = broker_of(streams)
    broker.publish("orders", b"x")
    broker.group("orders", "billing").receive(timeout=0).ack()
    assert (ear.heard["published"], ear.heard["delivered"], ear.heard["acked"]) == (1, 1, 1)


@pytest.mark.parametrize(
    "call",
    [
        lambda broker, consumer: broker.publish(["orders"], b"x"),
        lambda broker, consumer: broker.reset_offsets(["g"], "orders", to="latest"),
        lambda broker, consumer: broker.create_topic("orders", exist_ok="yes"),
        lambda broker, consumer: consumer.commit(5),
        lambda broker, consumer: consumer.commit(offsets={(7, 0): 1}),
        lambda broker, consumer: consumer.seek(["orders"], 0, 0),
        lambda broker, consumer: consumer.pause("orders", [1]),
        lambda broker, consumer: broker.producer(linger=5),
    ],
)
def test_a_wrong_argument_is_named_by_our_own_error(call: Any):
    streams = Streams()
    with pytest.raises(InvalidRequest):
        call(broker_of(streams), streams.consumer())


def test_an_unknown_setting_of_a_producer_names_the_nearest():
    with pytest.raises(BadSettings, match="did you mean linger_ms"):
        broker_of(Streams()).producer(linger=5)


def test_a_view_of_a_group_tells_which_group_of_which_topic_it_is():
    group = broker_of(Streams()).group("orders", "billing")
    assert (group.topic, group.group) == ("orders", "billing")


def test_a_consumer_that_is_refused_leaves_no_group_behind():
    broker = broker_of(Streams())
    broker.group("orders", "billing")
    with pytest.raises(InvalidRequest, match="in queue mode"):
        broker.consumer("orders", group="billing")
    assert [info.mode for info in broker.groups()] == ["queue"]
    with pytest.raises(UnknownGroup):
        broker.delete_group("billing")


def test_whoever_holds_a_message_counts_as_a_member_of_a_group_in_queue_mode():
    streams = Streams(partitions=2)
    broker = broker_of(streams)
    streams.fill(6, partitions=2)
    group = broker.group("orders", "billing")
    assert [info.members for info in broker.groups()] == [0]
    held = [*group.receive_many(2, timeout=0, holder="anna"), *group.receive_many(2, timeout=0, holder="bert")]
    assert [info.members for info in broker.groups()] == [2]  # both may hold messages of each partition
    with group._port.queue_group.waiters.in_line(ThreadWaiter(streams.clock)):
        assert [info.members for info in broker.groups()] == [3]
    group.ack_many(held)
    assert [info.members for info in broker.groups()] == [0]


def test_what_another_group_has_redriven_leaves_a_stream_without_lag():
    streams = Streams(partitions=1)
    broker = broker_of(streams)
    broker.publish("orders", b"x")
    billing = broker.group("orders", "billing", max_attempts=1)
    with broker.consumer("orders", group="analytics", auto_commit=False) as consumer:
        assert len(consumer.poll(0)) == 1
        consumer.commit()
        billing.receive(timeout=0).reject("no")
        assert billing.dead.redrive().done == 1
        assert consumer.poll(0) == []  # nothing for us, and nothing to commit
        assert [info.lag for info in broker.groups() if info.name == "analytics"] == [0]


def test_what_is_passed_over_is_not_committed_before_what_came_earlier():
    streams = Streams(partitions=1)
    broker = broker_of(streams)
    broker.publish("orders", b"x")
    billing = broker.group("orders", "billing", max_attempts=1)
    with broker.consumer("orders", group="analytics", auto_commit=False) as consumer:
        assert len(consumer.poll(0)) == 1
        billing.receive(timeout=0).reject("no")
        billing.dead.redrive()
        assert consumer.poll(0) == []
        assert consumer.committed("orders", 0) == 0


def test_what_is_passed_over_takes_nothing_along_that_came_behind_it():
    streams = Streams(partitions=1)
    broker = broker_of(streams)
    broker.publish("orders", b"x")
    billing = broker.group("orders", "billing", max_attempts=1)
    with broker.consumer("orders", group="analytics", auto_commit=False) as consumer:
        consumer.poll(0)
        consumer.commit()
        assert consumer.poll(0) == []
        billing.receive(timeout=0).reject("no")
        billing.dead.redrive()
        assert consumer._port.partitions["orders", 0].take(10) == []  # as a poll does that then waits
        broker.publish("orders", b"y")
        assert [message.raw for message in consumer.poll(0)] == [b"y"]
        assert consumer.committed("orders", 0) == 2


def test_a_commit_for_a_partition_that_is_not_there_says_so():
    consumer = Streams().consumer()
    with pytest.raises(UnknownTopic, match="no partition 9"):
        consumer.commit(offsets={("orders", 9): 1})


@pytest.mark.parametrize("name", ["durability", "ack_durability"])
def test_what_is_not_kept_with_a_topic_is_refused_there(name: str):
    broker = broker_of(Streams())
    with pytest.raises(BadSettings, match="each program chooses it for itself"):
        broker.create_topic("invoices", **{name: "os"})
    with pytest.raises(BadSettings, match="each program chooses it for itself"):
        broker.alter_topic("orders", **{name: "os"})
    assert broker.topics() == ["orders"]


def test_a_message_that_is_dropped_for_want_of_dead_letters_is_named_with_its_error(caplog):
    broker = broker_of(Streams(partitions=1, dead_letters=False))
    broker.publish("orders", b"x")
    broker.group("orders", "billing").receive(timeout=0).reject("no such customer")
    assert "message orders-0-0 dropped" in caplog.text
    assert "no such customer" in caplog.text


@pytest.mark.slow
def test_what_a_producer_holds_is_stored_when_the_program_ends(tmp_path):
    program = (
        "import holdfast, sys\n"
        "broker = holdfast.open_broker(sys.argv[1]); broker.create_topic('orders')\n"
        "producer = broker.producer(linger_ms=60_000)\n"
        "for i in range(100): producer.send('orders', b'x')\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "data")], check=True, timeout=60)
    with open_broker(tmp_path / "data") as broker:
        assert broker.describe_topic("orders").messages == 100
