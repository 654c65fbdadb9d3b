"""The producer: messages gathered by partition, stored in batches, each once and in order, within a bounded buffer."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

import holdfast
from holdfast import NewMessage
from holdfast.api.sync.producer import Producer
from holdfast.broker.engine import BrokerEngine
from holdfast.broker.messages import TEXT_KEY, partition_for
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import (
    BadBody,
    BadSettings,
    Closed,
    DiskFailed,
    DiskFull,
    Fenced,
    InvalidRequest,
    MessageTooLarge,
    QueueFull,
    Unavailable,
    UnknownTopic,
)
from holdfast.local.publisher import LocalProducerPort
from holdfast.producing.core import producer_settings
from holdfast.producing.parcels import Sent
from holdfast.producing.rounds import ThreadRounds
from holdfast.settings import ProducerSettings

without_thread = partial(ThreadRounds, thread=False)  # whoever waits does its work: time does not run by itself

FOLDER = "/data"


class Place:
    """A broker on a simulated disk, with topics `one` and `three`, named for their partitions."""

    def __init__(self) -> None:
        self.disk, self.clock, self.ids = SimulatedDisk(), ManualClock(), SeededIds(1)
        self.open()
        for name, partitions in (("one", 1), ("three", 3)):
            self.engine.create_topic(name, None, {"partitions": partitions, "min_free_bytes": 0})

    def open(self) -> None:
        self.world = World(clock=self.clock, disk=self.disk, ids=self.ids)
        self.engine = BrokerEngine.open(FOLDER, world=self.world)

    def kill(self) -> None:
        """The process is gone (kill -9); another one opens the folder."""
        self.disk = self.disk.kill()
        self.open()

    def producer(self, *, name: str | None = None, resume: bool = False, **changes: Any) -> Producer:
        settings = producer_settings(ProducerSettings(), changes)
        return Producer(LocalProducerPort(self.engine), settings, name=name, resume=resume, rounds=without_thread)

    def log(self, topic: str, partition: int = 0) -> Any:
        return self.engine.topic(topic).partitions[partition].log

    def values(self, topic: str, partition: int = 0) -> list[bytes]:
        log = self.log(topic, partition)
        log.sync()
        return [record.value for record in log.records(0)]

    def batches(self, topic: str, partition: int = 0) -> list[int]:
        log = self.log(topic, partition)
        log.sync()
        return [frame.count for frame in log.read(0)]

    def partitions(self) -> list[Any]:
        return [partition for name in ("one", "three") for partition in self.engine.topic(name).partitions]

    def fill_disk(self) -> None:
        """No write succeeds any more, until there is room again."""

        def refuse(*arguments: Any, **options: Any) -> Any:
            raise DiskFull("no room")

        for partition in self.partitions():
            partition.append = refuse

    def free_disk(self) -> None:
        for partition in self.partitions():
            del partition.append


@pytest.fixture
def place() -> Place:
    return Place()


def test_a_message_is_stored_and_answered(place):
    producer = place.producer()
    sent = producer.send("one", b"hello")
    assert not sent.done()
    stored = sent.result()
    assert sent.done()
    assert (stored.topic, stored.partition, stored.offset, stored.durability) == ("one", 0, 0, "fsync")
    assert (stored.id, stored.duplicate, sent.exception()) == ("one-0-0", False, None)
    assert place.values("one") == [b"hello"]


def test_enough_messages_are_sent_at_once(place):
    producer = place.producer(batch_messages=3, linger_ms=1000)
    sent = [producer.send("one", b"%d" % i) for i in range(2)]
    producer._rounds.round()
    assert place.values("one") == []
    sent.append(producer.send("one", b"2"))
    producer._rounds.round()
    assert all(each.done() for each in sent)
    assert place.batches("one") == [3]


def test_enough_bytes_are_sent_at_once(place):
    producer = place.producer(batch_bytes=100, linger_ms=1000)
    producer.send("one", bytes(99))
    producer._rounds.round()
    assert place.batches("one") == []
    producer.send("one", bytes(1))
    producer._rounds.round()
    assert place.batches("one") == [2]


def test_messages_wait_no_longer_than_they_may_linger(place):
    producer = place.producer(linger_ms=5)
    producer.send("one", b"")
    place.clock.advance(ms=3)
    producer.send("one", b"")
    later_ns = producer._rounds.round()
    assert place.batches("one") == []
    assert later_ns - place.clock.monotonic_ns() == 2_000_000
    place.clock.advance(ms=2)
    producer._rounds.round()
    assert place.batches("one") == [2]


def test_with_no_linger_every_message_is_due(place):
    producer = place.producer(linger_ms=0)
    producer.send("one", b"")
    producer._rounds.round()
    assert place.batches("one") == [1]


def test_flush_sends_what_was_gathered(place):
    producer = place.producer(linger_ms=60_000)
    sent = [producer.send("three", b"", partition=i) for i in range(3)]
    producer.flush()
    assert [each.result(0).partition for each in sent] == [0, 1, 2]
    assert place.clock.monotonic_ns() == 0


def test_a_result_that_does_not_come_in_time_may_be_asked_for_again(place):
    sent = place.producer(linger_ms=60_000).send("one", b"")
    with pytest.raises(Unavailable, match="no response from partition 0 of one within 2 s"):
        sent.result(2)
    with pytest.raises(Unavailable):
        sent.exception(timedelta(seconds=1))
    assert place.clock.monotonic_ns() == 3_000_000_000
    assert sent.result().offset == 0


def test_a_key_has_its_partition(place):
    producer = place.producer()
    for i in range(20):
        key = f"order-{i}" if i % 2 else b"order-%d" % i
        producer.send("three", b"%d" % i, key=key)
    producer.send("three", b"wide", key="größe")
    producer.flush()
    for i in range(20):
        assert b"%d" % i in place.values("three", partition_for(b"order-%d" % i, 3))
    wide = partition_for("größe".encode(), 3)
    assert b"wide" in place.values("three", wide)
    record = next(r for r in place.log("three", wide).records(0) if r.value == b"wide")
    assert (record.key, record.flags) == ("größe".encode(), TEXT_KEY)


def test_messages_with_and_without_keys_keep_their_columns(place):
    producer = place.producer()
    keys = [None, b"a", None, "b", None, b"c"]
    for i, key in enumerate(keys):
        producer.send("one", b"%d" % i, key=key, headers={"x": "y"} if i == 4 else None)
    producer.send_many("one", [b"6", b"7"])
    producer.flush()
    records = list(place.log("one").records(0))
    assert [r.value for r in records] == [b"%d" % i for i in range(8)]
    assert [r.key for r in records] == [None, b"a", None, b"b", None, b"c", None, None]
    assert [r.flags & TEXT_KEY for r in records] == [0, 0, 0, TEXT_KEY, 0, 0, 0, 0]
    assert [bool(r.headers) for r in records] == [False] * 4 + [True] + [False] * 3


def test_what_a_signal_left_of_a_message_is_not_taken_for_the_next_one(place):
    producer = place.producer()
    producer.send("one", b"0", key="a")
    lane = producer._core.destinations["one"].outboxes[0]
    lane.open.add_key(b"of a message that never came", TEXT_KEY)
    producer.send("one", b"1", key=b"b")
    lane.open.add_key(b"of another one")
    producer.flush()
    assert [(r.value, r.key, r.flags) for r in place.log("one").records(0)] == [(b"0", b"a", TEXT_KEY), (b"1", b"b", 0)]


def test_messages_without_keys_are_spread_evenly(place):
    producer = place.producer(batch_messages=10)
    producer.send_many("three", [b""] * 300)
    for _ in range(300):
        producer.send("three", b"")
    producer.flush()
    assert [len(place.values("three", i)) for i in range(3)] == [200, 200, 200]


def test_all_that_put_takes_is_stored(place):
    producer = place.producer()
    producer.send("one", b"x", key="k", headers={"a": "b"}, priority=7, ttl=60, correlation_id="c")
    producer.flush()
    (record,) = place.log("one").records(0)
    now_ms = place.clock.now_ns() // 1_000_000
    assert (record.key, record.priority) == (b"k", 7)
    assert now_ms < record.expires_at_ms <= now_ms + 60_000
    assert dict(record.headers)["a"] == b"b"


def test_a_delayed_message_waits_for_its_time(place):
    producer = place.producer()
    sent = producer.send("one", b"later", delay=60)
    producer.send("one", b"now")
    producer.flush()
    assert sent.result().delayed_id == 0
    assert place.values("one") == [b"now"]
    place.clock.advance(seconds=60)
    place.engine.tick()
    assert place.values("one") == [b"now", b"later"]


def test_a_dedup_id_is_heeded(place):
    producer = place.producer()
    first = producer.send("three", b"x", dedup_id="once")
    again = producer.send("three", b"x", dedup_id="once")
    producer.flush()
    assert not first.result().duplicate
    assert again.result().duplicate
    assert (again.result().offset, again.result().partition) == (first.result().offset, first.result().partition)


@pytest.mark.parametrize(("acks", "durability", "syncs"), [("leader", "os", 0), ("all", "fsync", 1)])
def test_acks_say_what_an_answer_means(place, acks, durability, syncs):
    producer = place.producer(acks=acks)
    producer.send("one", b"").result()
    before = place.disk.calls["sync"]
    assert producer.send("one", b"").result().durability == durability
    assert place.disk.calls["sync"] - before == syncs


def test_without_acks_nobody_waits(place):
    producer = place.producer(acks="none")
    sent = producer.send("one", b"x")
    assert sent.done()
    assert (sent.result(), sent.exception()) == (None, None)
    assert place.values("one") == []
    called = []
    sent.add_done_callback(called.append)
    assert called == [sent]
    producer.flush()
    assert place.values("one") == [b"x"]


def test_without_acks_a_loss_is_logged(place, caplog):
    producer = place.producer(acks="none", retries=0)
    producer.send("one", b"").result()
    producer.flush()
    place.fill_disk()
    producer.send("one", b"x")
    producer.flush()
    assert "messages not stored" in caplog.messages


def test_one_sync_serves_many_batches(place):
    producer = place.producer(batch_messages=1000)
    producer.send("one", b"").result()
    before = place.disk.calls["sync"]
    sent = producer.send_many("one", [b"x"] * 10_000)
    producer.flush()
    assert len(place.batches("one")) > 5
    assert place.disk.calls["sync"] - before == 1
    assert len(sent.result(0)) == 10_000


def test_a_list_is_answered_in_its_order(place):
    producer = place.producer(batch_messages=7)
    sent = producer.send_many("three", [b"%d" % i for i in range(100)])
    assert not sent.done()
    results = sent.result()
    assert sent.done()
    assert sent.exception() is None
    for i, stored in enumerate(results):
        assert place.values("three", stored.partition)[stored.offset] == b"%d" % i
    assert [each.result(0) for each in sent] == results
    assert sent[3].result(0) == results[3]
    assert [each.result(0) for each in sent[-2:]] == results[-2:]
    assert len(sent) == 100


def test_a_list_may_hold_new_messages(place):
    producer = place.producer()
    messages = [NewMessage(body=b"%d" % i, key=f"k{i}") if i % 2 else b"%d" % i for i in range(30)]
    results = producer.send_many("three", messages).result()
    for i, stored in enumerate(results):
        assert place.values("three", stored.partition)[stored.offset] == b"%d" % i
        if i % 2:
            assert stored.partition == partition_for(f"k{i}".encode(), 3)
    assert producer.send_many("three", []).result() == []
    assert {s.partition for s in producer.send_many("three", (b"a", b"b"), partition=2).result()} == {2}


def test_a_list_of_large_messages_becomes_several_batches(place):
    producer = place.producer()
    producer.send_many("one", [bytes(50_000)] * 20).result()
    assert max(place.batches("one")) <= 4
    assert sum(place.batches("one")) == 20


def test_callbacks_are_called_with_the_answer(place):
    producer = place.producer()
    called: list[Sent] = []
    sent = producer.send("one", b"")
    sent.add_done_callback(called.append)
    sent.add_done_callback(lambda each: 1 / 0)
    sent.add_done_callback(called.append)
    assert called == []
    producer.flush()
    assert called == [sent, sent]
    sent.add_done_callback(called.append)
    assert called == [sent] * 3


def test_a_callback_must_not_wait(place):
    producer = place.producer(linger_ms=0)
    errors = []

    def wait(sent: Sent) -> None:
        for call in (producer.flush, producer.close, producer.send("one", b"more").result):
            try:
                call()
            except InvalidRequest as error:
                errors.append(str(error))

    producer.send("one", b"").add_done_callback(wait)
    producer.flush()
    assert len(errors) == 3
    assert "a callback of a producer must not wait" in errors[0]
    producer.flush()
    assert place.values("one") == [b"", b"more"]


def test_an_answer_does_not_keep_the_messages(place):
    producer = place.producer()
    sent = producer.send("one", bytes(1000), key="k")
    sent.result()
    assert not sent._parcel.values


def test_a_full_disk_is_tried_again_with_growing_pauses(place):
    producer = place.producer(linger_ms=0, retries=5, retry_backoff_ms=100, retry_backoff_max_ms=300)
    producer.send("one", b"0").result()
    place.fill_disk()
    sent = producer.send("one", b"1")
    pauses = [(producer._rounds.round() - place.clock.monotonic_ns()) // 1_000_000]
    for _ in range(3):
        place.clock.advance(ms=pauses[-1])
        pauses.append((producer._rounds.round() - place.clock.monotonic_ns()) // 1_000_000)
    assert pauses == [100, 200, 300, 300]
    later = producer.send("one", b"2")
    place.free_disk()
    assert sent.result().offset == 1
    assert later.result().offset == 2
    assert place.values("one") == [b"0", b"1", b"2"]


def test_a_lane_that_waits_does_not_hold_up_the_others(place):
    producer = place.producer(linger_ms=0)
    for i in range(3):
        producer.send("three", b"", partition=i).result()
    real = place.engine.topic("three").partitions[1].append

    def fail(*arguments: Any, **options: Any) -> Any:
        raise DiskFull("no room")

    place.engine.topic("three").partitions[1].append = fail
    stuck = producer.send("three", b"x", partition=1)
    assert producer.send("three", b"x", partition=2).result().offset == 1
    assert not stuck.done()
    place.engine.topic("three").partitions[1].append = real
    assert stuck.result().offset == 1


def test_after_the_last_attempt_the_error_is_the_answer_and_the_next_message_is_sent(place):
    producer = place.producer(linger_ms=0, retries=2)
    producer.send("one", b"0").result()
    place.fill_disk()
    sent = producer.send("one", b"lost")
    with pytest.raises(DiskFull):
        sent.result()
    assert isinstance(sent.exception(), DiskFull)
    place.free_disk()
    assert producer.send("one", b"1").result().offset == 1
    assert place.values("one") == [b"0", b"1"]
    producer.flush()


def test_flush_and_close_raise_an_error_that_nobody_was_told_of(place):
    producer = place.producer(linger_ms=0, retries=0)
    producer.send("one", b"").result()
    place.fill_disk()
    producer.send("one", b"")
    with pytest.raises(DiskFull):
        producer.flush()
    producer.flush()
    producer.send("one", b"")
    with pytest.raises(DiskFull):
        producer.close()


def test_a_failed_disk_is_not_tried_again(place):
    producer = place.producer()
    producer.send("one", b"").result()
    place.disk.faults.fail(1, errno.EIO, sticky=False, calls=frozenset({"sync"}))
    with pytest.raises(DiskFailed):
        producer.send("one", b"").result()


def test_a_batch_whose_answer_was_lost_is_stored_once(place):
    producer = place.producer(linger_ms=0)
    producer.send("one", b"0").result()
    partition = place.engine.topic("one").partitions[0]
    real = partition.append
    calls = []

    def append(*arguments: Any, **options: Any) -> Any:
        calls.append(real(*arguments, **options))
        if len(calls) == 1:
            raise Unavailable("the answer was lost")
        return calls[-1]

    partition.append = append
    sent = [producer.send("one", b"1"), producer.send("one", b"2")]
    assert [each.result().offset for each in sent] == [1, 2]
    assert place.values("one") == [b"0", b"1", b"2"]
    assert calls[1][1] is not None


def test_a_batch_that_failed_although_it_was_stored_does_not_swallow_the_next_one(place):
    producer = place.producer(linger_ms=0, retries=0)
    partition = place.engine.topic("one").partitions[0]
    real = partition.append

    def append(*arguments: Any, **options: Any) -> Any:
        del partition.append
        real(*arguments, **options)
        raise Unavailable("the answer was lost")

    partition.append = append
    with pytest.raises(Unavailable):
        producer.send("one", b"0").result()
    assert producer.send("one", b"1").result().offset == 1
    assert place.values("one") == [b"0", b"1"]


def test_batches_behind_one_that_must_wait_stay_behind_it(place):
    producer = place.producer(linger_ms=0, retry_backoff_ms=1)
    producer.send_many("one", [b"%d" % i for i in range(3_000)])
    partition = place.engine.topic("one").partitions[0]

    def append(*arguments: Any, **options: Any) -> Any:
        del partition.append
        raise DiskFull("no room")

    partition.append = append
    producer.flush()
    assert place.values("one") == [b"%d" % i for i in range(3_000)]


def test_what_is_stored_leaves_the_buffer(place):
    producer = place.producer(linger_ms=0, retries=None)
    producer.send("three", b"", partition=0).result()
    place.engine.topic("three").partitions[1].append = None  # not to be called: it is never due
    producer.send("three", bytes(100), partition=1)
    producer._core.destinations["three"].outboxes[1].retry_at_ns = 10**18
    producer.send("three", bytes(1000), partition=0).result()
    assert producer._core.accumulator.buffered == 100 + 64


def test_messages_of_another_kind_send_those_before_them(place):
    producer = place.producer(batch_messages=3, linger_ms=1000)
    first = producer.send("one", b"")
    for _ in range(3):
        producer.send("one", b"", delay=60)
    producer._rounds.round()
    assert first.done()


def test_without_idempotence_it_may_be_stored_twice(place):
    producer = place.producer(linger_ms=0, idempotent=False)
    partition = place.engine.topic("one").partitions[0]
    real, calls = partition.append, []

    def append(*arguments: Any, **options: Any) -> Any:
        calls.append(real(*arguments, **options))
        if len(calls) == 1:
            raise Unavailable("the answer was lost")
        return calls[-1]

    partition.append = append
    producer.send("one", b"1").result()
    assert place.values("one") == [b"1", b"1"]


def test_a_delayed_batch_whose_answer_was_lost_is_stored_once(place):
    producer = place.producer(linger_ms=0)
    partition = place.engine.topic("one").partitions[0]
    real, calls = partition.publish, []

    def publish(*arguments: Any, **options: Any) -> Any:
        calls.append(real(*arguments, **options))
        if len(calls) == 1:
            raise Unavailable("the answer was lost")
        return calls[-1]

    partition.publish = publish
    producer.send_many("one", [NewMessage(body=b"a", delay=1), NewMessage(body=b"b", delay=1)]).result()
    place.clock.advance(seconds=2)
    place.engine.tick()
    assert place.values("one") == [b"a", b"b"]


def test_a_full_buffer_holds_the_sender_up_and_then_refuses(place):
    producer = place.producer(buffer_bytes=1024, linger_ms=0, block_ms=500, retries=None, retry_backoff_max_ms=100)
    producer.send("one", b"").result()
    place.fill_disk()
    producer.send("one", bytes(900))
    with pytest.raises(QueueFull, match=r"buffer of 1024 bytes is full.*within 500 ms"):
        producer.send("one", bytes(200))
    assert place.clock.monotonic_ns() >= 500_000_000
    with pytest.raises(QueueFull) as caught:
        producer.send_many("three", [bytes(100)] * 2_000)
    assert not hasattr(caught.value, "__notes__")
    place.free_disk()
    producer.send("one", bytes(300))
    producer.flush()
    assert list(map(len, place.values("one"))) == [0, 900, 300]


def test_a_full_buffer_makes_way_by_itself(place):
    producer = place.producer(buffer_bytes=10_000, linger_ms=60_000)
    for i in range(500):
        producer.send("one", b"%d" % i)
    producer.send_many("one", [b"%d" % i for i in range(500, 1000)])
    assert place.clock.monotonic_ns() == 0
    producer.flush()
    assert place.values("one") == [b"%d" % i for i in range(1000)]


def test_a_message_larger_than_the_buffer_is_sent_alone(place):
    producer = place.producer(buffer_bytes=1024)
    producer.send("one", bytes(5000))
    producer.send("one", bytes(6000))
    producer.flush()
    assert list(map(len, place.values("one"))) == [5000, 6000]


def test_empty_messages_fill_the_buffer_as_well(place):
    producer = place.producer(buffer_bytes=1024, linger_ms=60_000)
    for _ in range(100):
        producer.send("one", b"")
    assert producer._core.accumulator.buffered <= 1024 + 64


def test_a_name_fences_the_producer_before(place):
    old = place.producer(name="loader")
    old.send("one", b"0").result()
    new = place.producer(name="loader")
    sent = old.send("one", b"of the old")
    with pytest.raises(Fenced):
        sent.result()
    with pytest.raises(Closed, match="ended with an error"):
        old.send("one", b"")
    assert new.send("one", b"1").result().offset == 1
    assert place.values("one") == [b"0", b"1"]


def test_one_that_resumes_stores_nothing_a_second_time(place):
    first = place.producer(name="loader")
    sent = [first.send("three", b"%d" % i, key=f"k{i}") for i in range(50)]
    first.flush()
    places = [each.result().id for each in sent]
    place.kill()
    again = place.producer(name="loader", resume=True)
    sent = [again.send("three", b"%d" % i, key=f"k{i}") for i in range(80)]
    again.flush()
    assert [each.result().id for each in sent][:50] == places
    assert [each.result().duplicate for each in sent] == [True] * 50 + [False] * 30
    stored = [value for i in range(3) for value in place.values("three", i)]
    assert sorted(stored) == sorted(b"%d" % i for i in range(80))


def test_one_that_resumes_gives_the_same_turns_again_whatever_its_settings(place):
    first = place.producer(name="loader", batch_messages=10)
    first.send_many("three", [b"%d" % i for i in range(450)])
    first.flush()
    place.kill()
    again = place.producer(name="loader", resume=True, batch_messages=77)
    for i in range(600):
        again.send("three", b"%d" % i)
    again.flush()
    stored = [value for i in range(3) for value in place.values("three", i)]
    assert sorted(stored) == sorted(b"%d" % i for i in range(600))


def test_one_that_resumes_stores_no_delayed_message_a_second_time(place):
    first = place.producer(name="loader")
    first.send_many("one", [NewMessage(body=b"%d" % i, delay=5) for i in range(5)]).result()
    place.kill()
    again = place.producer(name="loader", resume=True)
    results = again.send_many("one", [NewMessage(body=b"%d" % i, delay=5) for i in range(8)]).result()
    assert [each.duplicate for each in results] == [True] * 5 + [False] * 3
    again.close()
    fresh = place.producer(name="loader")
    assert not fresh.send("one", b"0", delay=5).result().duplicate


def test_one_that_does_not_resume_begins_anew(place):
    for _ in range(2):
        producer = place.producer(name="loader")
        producer.send_many("one", [b"a", b"b"]).result()
        place.kill()
    assert place.values("one") == [b"a", b"b"] * 2
    resumed = place.producer(name="loader", resume=True)
    assert [each.duplicate for each in resumed.send_many("one", [b"a", b"b", b"c"]).result()] == [True, True, False]


def test_resuming_twice_counts_from_the_beginning(place):
    for count in (3, 5, 9):
        producer = place.producer(name="loader", resume=True)
        producer.send_many("one", [b"%d" % i for i in range(count)]).result()
        place.kill()
    assert place.values("one") == [b"%d" % i for i in range(9)]


def test_a_batch_of_which_only_some_offsets_are_known_is_answered_for(place):
    """Some were stored by the one before, others by an attempt without an answer; the partition forgot where."""

    class Unheard(LocalProducerPort):
        attempts = 0

        def append(self, parcel: Any, identity: Any, durability: Any) -> Any:
            waiting = super().append(parcel, identity, durability)
            self.attempts += 1
            if self.attempts == 1:
                waiting[0].sequences._entries[identity.id].runs.clear()
                raise Unavailable("no answer came")
            return waiting

    place.producer(name="loader").send_many("one", [b"a", b"b"]).result()
    place.kill()
    settings = producer_settings(ProducerSettings(), {"retry_backoff_ms": 1})
    again = Producer(Unheard(place.engine), settings, name="loader", resume=True, rounds=without_thread)
    results = again.send_many("one", [b"a", b"b", b"c", b"d"]).result()
    assert [(each.offset, each.duplicate) for each in results] == [(0, True), (1, True), (None, True), (None, True)]
    assert place.values("one") == [b"a", b"b", b"c", b"d"]


def test_a_named_producer_ends_with_its_first_error(place):
    """Otherwise later messages would be counted as those that are missing."""
    producer = place.producer(name="loader", linger_ms=0, retries=0)
    producer.send("one", b"0").result()
    place.fill_disk()
    lost = producer.send("one", b"1")
    with pytest.raises(DiskFull):
        lost.result()
    place.free_disk()
    with pytest.raises(Closed, match="no room"):
        producer.send("one", b"2")
    again = place.producer(name="loader", resume=True)
    assert [s.duplicate for s in again.send_many("one", [b"0", b"1", b"2"]).result()] == [True, False, False]
    assert place.values("one") == [b"0", b"1", b"2"]


def test_a_producer_that_was_forgotten_goes_on(place):
    producer = place.producer()
    producer.send("one", b"0").result()
    place.engine.topic("one").partitions[0].sequences._entries.clear()
    assert producer.send("one", b"1").result().offset == 1
    assert producer.send("one", b"2").result().offset == 2


def test_a_producer_goes_on_after_its_topic_was_let_go(place):
    producer = place.producer()
    producer.send("one", b"0").result()
    topic = place.engine.topic("one")
    place.clock.advance(seconds=2)
    producer._rounds.round()
    assert not topic.busy
    topic.close()
    assert producer.send("one", b"1").result().offset == 1
    assert place.engine.topic("one") is not topic


def test_a_topic_stays_open_while_something_is_on_its_way(place):
    producer = place.producer(linger_ms=60_000)
    producer.send("one", b"0")
    place.clock.advance(seconds=30)
    producer._rounds.round()
    assert place.engine.topic("one").busy
    producer.close()
    assert not place.engine.topic("one").busy


@pytest.mark.parametrize("name", [None, "loader"])
def test_another_topic_of_the_same_name_begins_anew(place, name):
    producer = place.producer(name=name)
    producer.send_many("one", [b"0", b"1"]).result()
    place.engine.delete_topic("one")
    with pytest.raises(UnknownTopic):
        producer.send("one", b"2")
    place.engine.create_topic("one")
    assert producer.send("one", b"3").result().offset == 0


def test_a_topic_that_goes_while_something_is_on_its_way_answers_with_an_error(place):
    producer = place.producer(linger_ms=60_000)
    sent = producer.send("one", b"")
    place.engine.delete_topic("one")
    with pytest.raises(Closed):
        sent.result()


def test_partitions_that_are_added_are_used(place):
    producer = place.producer(batch_messages=1)
    producer.send_many("one", [b""] * 4).result()
    place.engine.alter_topic("one", {"partitions": 2})
    producer.send_many("one", [b""] * 4).result()
    assert len(place.values("one", 1)) == 2


def test_settings_that_change_are_followed(place):
    producer = place.producer()
    producer.send("one", bytes(2000)).result()
    place.engine.alter_topic("one", {"max_message_bytes": 1000, "ttl_ms": 5_000})
    with pytest.raises(MessageTooLarge, match="the limit of one is 1000"):
        producer.send("one", bytes(2000))
    producer.send("one", b"x").result()
    assert next(place.log("one").records(1)).expires_at_ms


@pytest.mark.parametrize(
    ("error", "arguments", "options"),
    [
        (BadBody, ("one", "text"), {}),
        (BadBody, ("one", None), {}),
        (UnknownTopic, ("none", b""), {}),
        (InvalidRequest, (5, b""), {}),
        (InvalidRequest, ([], b""), {}),
        (InvalidRequest, ("../up", b""), {}),
        (InvalidRequest, ("one", b""), {"key": 5}),
        (InvalidRequest, ("one", b""), {"key": "\ud800"}),
        (InvalidRequest, ("one", b""), {"priority": 10}),
        (InvalidRequest, ("one", b""), {"priority": True}),
        (InvalidRequest, ("one", b""), {"headers": 5}),
        (InvalidRequest, ("one", b""), {"delay": -1}),
        (UnknownTopic, ("one", b""), {"partition": 1}),
        (UnknownTopic, ("one", b""), {"partition": "0"}),
        (MessageTooLarge, ("one", bytes(11 * 1024 * 1024)), {}),
        (MessageTooLarge, ("one", b""), {"key": bytes(11 * 1024 * 1024)}),
        (MessageTooLarge, ("one", b""), {"headers": {"a": bytes(11 * 1024 * 1024)}}),
    ],
)
def test_a_wrong_call_is_refused_and_nothing_is_sent(place, error, arguments, options):
    producer = place.producer()
    with pytest.raises(error):
        producer.send(*arguments, **options)
    producer.flush()
    assert place.values("one") == []
    assert producer.send("one", b"x").result().offset == 0


def test_a_wrong_list_is_refused(place):
    producer = place.producer()
    for wrong in (b"bytes", "text", 5, None, {"a": 1}):
        with pytest.raises(InvalidRequest, match="send_many takes a list"):
            producer.send_many("one", wrong)
    with pytest.raises(BadBody) as caught:
        producer.send_many("one", [b"good", "bad", b"good"])
    assert caught.value.__notes__ == ["the first 1 of 3 messages were sent"]
    with pytest.raises(MessageTooLarge):
        producer.send_many("one", [b"good", bytes(11 * 1024 * 1024)])
    with pytest.raises(UnknownTopic):
        producer.send_many("one", [b"good"], partition=7)
    producer.flush()
    assert place.values("one") == [b"good"]


def test_wrong_settings_are_refused(place):
    for changes in ({"acks": "some"}, {"linger_ms": -1}, {"batch_messages": 0}, {"retries": "many"}):
        with pytest.raises(BadSettings):
            place.producer(**changes)
    with pytest.raises(InvalidRequest, match="unknown setting lingers"):
        place.producer(lingers=5)
    with pytest.raises(InvalidRequest, match="resume=True needs a name"):
        place.producer(resume=True)
    with pytest.raises(InvalidRequest, match="with a name is idempotent"):
        place.producer(name="x", idempotent=False)
    with pytest.raises(InvalidRequest, match="resume=5"):
        place.producer(name="x", resume=5)
    with pytest.raises(InvalidRequest, match=r"producer '\.\./x' cannot be used"):
        place.producer(name="../x")


def test_closing_sends_what_is_left(place):
    with place.producer(linger_ms=60_000) as producer:
        sent = producer.send("one", b"x")
    assert sent.result(0).offset == 0
    with pytest.raises(Closed, match="the producer in /data is closed"):
        producer.send("one", b"")
    producer.close()
    assert "closed" in repr(producer)


def test_what_cannot_be_sent_in_time_is_answered_when_it_closes(place):
    producer = place.producer(retries=None, linger_ms=0)
    producer.send("one", b"").result()
    place.fill_disk()
    sent = producer.send("one", b"")
    with pytest.raises(Closed, match="closed before the message could be stored"):
        producer.close(3)
    assert isinstance(sent.exception(), Closed)


def test_an_error_inside_with_is_not_hidden_by_one_of_closing(place):
    producer = place.producer(linger_ms=0, retries=0)
    producer.send("one", b"").result()
    with pytest.raises(ZeroDivisionError) as caught, producer:
        place.fill_disk()
        producer.send("one", b"")
        1 / 0  # noqa: B018
    assert "messages were not stored" in caught.value.__notes__[0]


def test_a_closed_broker_answers_with_an_error(place):
    producer = place.producer(linger_ms=60_000)
    sent = producer.send("one", b"")
    place.engine.close()
    with pytest.raises(Closed):
        producer.send("one", b"")
    assert isinstance(sent.exception(), Closed)
    producer.close()


def test_names_alone_do_not_make_a_folder_that_cannot_be_opened(place):
    disk = SimulatedDisk()
    world = World(clock=place.clock, disk=disk, ids=place.ids)
    engine = BrokerEngine.open("/new", world=world)
    Producer(LocalProducerPort(engine), name="loader", rounds=without_thread).close()
    engine.close()
    BrokerEngine.open("/new", world=world).close()


def test_what_is_sent_is_counted(place):
    producer = place.producer()
    producer.send_many("one", [b"abc"] * 5).result()
    numbers = place.engine.topic("one").metrics.snapshot()
    assert numbers.published == 5
    assert numbers.published_bytes == 15


def test_bodies_may_have_a_type(place):
    producer = Producer(LocalProducerPort(place.engine), body_type=dict, rounds=without_thread)
    producer.send("one", {"a": 1}, key="k")
    producer.send_many("one", [{"b": 2}, NewMessage(body={"c": 3})])
    with pytest.raises(BadBody):
        producer.send("one", b"bytes")
    producer.close()
    assert place.values("one") == [b'{"a":1}', b'{"b":2}', b'{"c":3}']


def test_a_broker_that_closes_lets_its_producers_send_what_they_have(place):
    broker = holdfast.open_broker(FOLDER + "2", world=place.world)
    broker.create_topic("orders")
    producer = broker.producer(linger_ms=60_000, acks="leader")
    sent = producer.send("orders", b"x")
    broker.close()
    assert sent.result(0).offset == 0
    assert producer.closed


@pytest.fixture
def engine(tmp_path):
    engine = BrokerEngine.open(tmp_path / "data")
    engine.create_topic("three", None, {"partitions": 3})
    yield engine
    engine.close()


def test_many_threads_share_a_producer(engine):
    with Producer(LocalProducerPort(engine), ProducerSettings(acks="leader", buffer_bytes=50_000)) as producer:

        def work(number: int) -> None:
            for i in range(500):
                producer.send("three", b"%d %d" % (number, i), key=b"%d" % number)
            producer.send_many("three", [b"%d" % number] * 500)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        producer.flush()
    values = [r.value for partition in engine.topic("three").partitions for r in partition.log.records(0)]
    assert len(values) == 4_000
    for number in range(4):
        own = [int(v.split()[1]) for v in values if v.startswith(b"%d " % number)]
        assert own == list(range(500))


def test_its_thread_sends_by_itself(engine):
    producer = Producer(LocalProducerPort(engine), ProducerSettings(linger_ms=1))
    assert producer._rounds._thread is None
    assert producer.send("three", b"x").result(timeout=30).durability == "fsync"
    producer.close()
    assert not producer._rounds._thread.is_alive()


def test_a_child_after_a_fork_sends_nothing(engine):
    producer = Producer(LocalProducerPort(engine), ProducerSettings(linger_ms=1_000))
    producer.send("three", b"x", partition=0)
    child = os.fork()
    if not child:
        try:
            producer.send("three", b"of the child", partition=0)
        except Closed:
            producer.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    producer.close()
    assert [r.value for r in engine.topic("three").partitions[0].log.records(0)] == [b"x"]


def test_a_producer_that_nobody_holds_sends_what_it_has_and_ends(engine):
    producer = Producer(LocalProducerPort(engine), ProducerSettings(linger_ms=50))
    producer.send("three", b"x", partition=0)
    thread = producer._rounds._thread
    del producer
    deadline = time.monotonic() + 30
    while thread.is_alive() and time.monotonic() < deadline:
        gc.collect()
        thread.join(0.05)
    assert not thread.is_alive()
    assert [r.value for r in engine.topic("three").partitions[0].log.records(0)] == [b"x"]
