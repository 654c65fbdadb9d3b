"""Groups in stream mode and producers where things go wrong half-way: errors, signals, topics made anew, restarts."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from holdfast import NewMessage
from holdfast.api.aio.producer import AsyncProducer
from holdfast.api.sync.producer import Producer
from holdfast.broker.engine import BrokerEngine
from holdfast.broker.messages import RoundRobin
from holdfast.errors import Closed, DiskFull, InvalidRequest, QueueFull, Unavailable, UnknownTopic
from holdfast.local.publisher import LocalProducerPort
from holdfast.producing.core import producer_settings
from holdfast.producing.rounds import ThreadRounds
from holdfast.settings import ProducerSettings
from tests.unit.streams import Streams, async_consumer_of, drain, settle, texts

without_thread = partial(ThreadRounds, thread=False)  # whoever waits does its work: time does not run by itself


def producer_of(streams: Streams, *, name: str | None = None, resume: bool = False, **changes: Any) -> Producer:
    settings = producer_settings(ProducerSettings(), changes)
    return Producer(LocalProducerPort(streams.engine), settings, name=name, resume=resume, rounds=without_thread)


def values(streams: Streams, partition: int = 0, topic: str = "orders") -> list[bytes]:
    log = streams.engine.topic(topic).partitions[partition].log
    log.sync()
    return [record.value for record in log.records(0)]


def failing_once(call: Any, error: BaseException) -> Any:
    """The same, but its first call only fails."""
    failed: list[bool] = []

    def instead(*arguments: Any, **options: Any) -> Any:
        if not failed:
            failed.append(True)
            raise error
        return call(*arguments, **options)

    return instead


def failing(error: Exception) -> Any:
    def instead(*_: Any, **__: Any) -> Any:
        raise error

    return instead


@pytest.mark.parametrize("error", [KeyboardInterrupt(), DiskFull("cannot be read")])
def test_what_a_poll_had_read_when_it_failed_comes_with_the_next(error):
    streams = Streams()
    streams.fill(3)
    consumer = streams.consumer()
    feed = next(iter(consumer._port.partitions.values()))
    feed._follower.records = failing_once(feed._follower.records, error)
    with pytest.raises(type(error)):
        consumer.poll(0)
    assert sorted(drain(consumer)) == sorted(f"{p}-{i}" for p in range(3) for i in range(3))


def test_a_loop_that_was_interrupted_while_it_read_skips_nothing():
    streams = Streams()
    streams.fill(3)
    consumer = streams.consumer()
    feed = next(iter(consumer._port.partitions.values()))
    feed._follower.records = failing_once(feed._follower.records, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        next(iter(consumer))
    assert sorted(drain(consumer)) == sorted(f"{p}-{i}" for p in range(3) for i in range(3))


def test_in_a_loop_messages_that_are_not_for_the_group_are_committed_too():
    streams = Streams(partitions=2)
    streams.put("a")
    consumer = streams.consumer(auto_commit_ms=1)
    messages = iter(consumer)
    assert next(messages).raw == b"a"
    topic = streams.engine.topic("orders")
    producer = producer_of(streams)
    producer.send("orders", b"short-lived", ttl=1, partition=0).result()
    streams.clock.advance(seconds=2)
    streams.put("b", partition=1)
    assert next(messages).raw == b"b"
    streams.clock.advance(seconds=2)
    streams.put("c", partition=1)
    assert next(messages).raw == b"c"
    consumer.close()
    assert streams.group().committed(topic, 0) == 2


def test_one_that_resumes_does_not_count_what_was_sent_before_its_sequences_began():
    streams = Streams(partitions=2)
    first = producer_of(streams, name="loader")
    first.send_many("orders", [b"0", b"1", b"2"], partition=0).result()
    first.close()
    second = producer_of(streams, name="loader")  # begins anew, and is killed when partition 0 has nothing of it
    second.send("orders", b"a", partition=1).result()
    streams.kill()
    third = producer_of(streams, name="loader", resume=True)
    assert third.send("orders", b"a", partition=1).result().duplicate
    sent = third.send_many("orders", [b"b", b"c", b"d", b"e"], partition=0).result()
    assert [each.duplicate for each in sent] == [False] * 4
    assert values(streams) == [b"0", b"1", b"2", b"b", b"c", b"d", b"e"]


def test_a_topic_made_anew_with_fewer_partitions_takes_all_messages():
    streams = Streams(partitions=3)
    producer = producer_of(streams, batch_messages=1)
    producer.send_many("orders", [b"%d" % i for i in range(6)]).result()
    streams.engine.delete_topic("orders")
    streams.engine.create_topic("orders", changes={"partitions": 1})
    sent = [producer.send("orders", b"%d" % i) for i in range(6)]
    sent += [producer.send("orders", b"%d" % i, key=f"k{i}") for i in range(6)]
    sent.append(producer.send_many("orders", [b"x"] * 20))
    producer.flush()
    assert [each.exception() for each in sent] == [None] * len(sent)
    assert len(values(streams)) == 32
    with pytest.raises(UnknownTopic):
        producer.send("orders", b"", partition=2)


def test_a_batch_is_waited_for_where_it_was_written():
    streams = Streams(partitions=1)
    producer = producer_of(streams)
    producer.send_many("orders", [b"0", b"1", b"2"]).result()
    sent = producer.send("orders", b"3")
    write = producer._core.sender.write

    def written_and_gone(parcel: Any) -> Any:
        answer = write(parcel)
        producer._core.sender.write = write
        streams.engine.delete_topic("orders")
        streams.engine.create_topic("orders")
        producer.send("orders", b"new")
        return answer

    producer._core.sender.write = written_and_gone
    producer._core.accumulator.hurry()
    producer._rounds.round()
    assert sent.result().offset == 3


def test_a_send_inside_a_callback_does_not_wait_for_room():
    streams = Streams(partitions=1)
    producer = producer_of(streams, buffer_bytes=1024, linger_ms=60_000)
    errors: list[BaseException] = []

    def more(_: Any) -> None:
        try:
            for _ in range(3):
                producer.send("orders", b"x" * 600)
        except InvalidRequest as error:
            errors.append(error)

    producer.send("orders", b"x").add_done_callback(more)
    thread = threading.Thread(target=producer.flush, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert "callback" in str(errors[0])


def test_what_is_sent_while_a_producer_closes_is_answered():
    streams = Streams(partitions=1)
    producer = producer_of(streams)
    late: list[Any] = []
    release = producer._core.release

    def meanwhile(now_ns: int | None = None) -> Any:
        if producer._rounds.stopping and not late:
            route = producer._core.destinations["orders"]
            late.append(producer._add(route.outboxes[0], b"late"))
        return release(now_ns)

    producer.send("orders", b"x").result()
    producer._core.release = meanwhile
    with suppress(Closed):
        producer.close()
    assert late[0] is None or late[0].done()


def test_a_child_after_a_fork_waits_for_nothing(tmp_path):
    engine = BrokerEngine.open(tmp_path / "data")
    engine.create_topic("orders")
    producer = Producer(LocalProducerPort(engine), ProducerSettings(linger_ms=60_000))
    sent = producer.send("orders", b"x")
    child = os.fork()
    if not child:
        status = 1
        try:
            threading.Timer(10, lambda: os._exit(2)).start()
            try:
                sent.result(timeout=30)
            except Closed:
                producer.flush(timeout=30)
                producer.close()
                status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    producer.close()
    assert sent.result().offset == 0
    engine.close()


def test_offsets_of_a_topic_that_is_gone_are_not_committed_to_the_one_of_its_name():
    streams = Streams(partitions=1)
    streams.put("a", "b")
    refused: list[type] = []

    def revoked(places: Any) -> None:
        try:
            consumer.commit(offsets={("orders", 0): 2})
        except UnknownTopic as error:
            refused.append(type(error))

    consumer = streams.consumer(auto_commit=False, on_revoked=revoked)
    assert len(consumer.poll(0)) == 2
    streams.engine.delete_topic("orders")
    streams.engine.create_topic("orders")
    streams.put("c", "d", "e")
    streams.engine.tick()
    assert drain(consumer) == ["c", "d", "e"]
    assert refused == [UnknownTopic]


def test_a_commit_knows_a_topic_that_was_made_anew_meanwhile():
    streams = Streams(partitions=1)
    streams.put("a", "b")
    consumer = streams.consumer(auto_commit=False)
    assert len(consumer.poll(0)) == 2
    commit = streams.group().commit

    def later(*arguments: Any, **options: Any) -> Any:
        streams.engine.delete_topic("orders")
        streams.engine.create_topic("orders")
        streams.put("c", "d", "e")
        streams.engine.tick()
        return commit(*arguments, **options)

    consumer._port.stream_group.commit = later
    with pytest.raises(UnknownTopic):
        consumer.commit()
    consumer._port.stream_group.commit = commit
    assert drain(consumer) == ["c", "d", "e"]


def test_a_deleted_topic_does_not_keep_the_others_from_being_committed():
    streams = Streams(partitions=1)
    streams.engine.create_topic("returns")
    streams.put("a")
    streams.put("b", topic="returns")
    consumer = streams.consumer(["orders", "returns"])
    assert sorted(texts(consumer.poll(0))) == ["a", "b"]
    streams.engine.delete_topic("returns")
    consumer.close()
    assert streams.group().committed(streams.engine.topic("orders"), 0) == 1


def test_a_trimmed_partition_does_not_keep_the_others_from_being_committed():
    streams = Streams(partitions=2)
    streams.put("a", "b", "c", "d")
    streams.put("x", partition=1)
    consumer = streams.consumer()
    assert sorted(texts(consumer.poll(0, max_records=2))) == ["a", "x"]
    log = streams.engine.topic("orders").partitions[0].log
    log.roll()
    log.unpin("stream:analytics")
    log.trim(4)
    assert log.start == 4
    consumer.close()
    topic = streams.engine.topic("orders")
    assert [streams.group().committed(topic, number) for number in (0, 1)] == [4, 1]


def test_one_that_was_put_out_joins_again_though_one_of_its_topics_is_gone():
    streams = Streams(partitions=1)
    streams.engine.create_topic("returns")
    consumer = streams.consumer(["orders", "returns"], max_poll_ms=1_000)
    streams.engine.delete_topic("returns")
    streams.after(seconds=40)
    streams.after(seconds=40)
    assert not streams.group().members.members
    streams.put("a")
    assert drain(consumer) == ["a"]
    streams.engine.create_topic("returns")
    streams.put("b", topic="returns")
    streams.engine.tick()
    assert drain(consumer) == ["b"]


def test_a_join_that_was_interrupted_leaves_nobody_behind():
    streams = Streams(partitions=4)
    consumer = streams.consumer()
    other = streams.consumer()
    settle(consumer, other)
    streams.group().leave(other.member_id, other._port.epoch)
    epoch_of = other._port.stream_group.epoch_of
    other._port.stream_group.epoch_of = failing_once(epoch_of, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        other.poll(0)
    other._port.stream_group.epoch_of = epoch_of
    for _ in range(4):
        settle(consumer, other)
        streams.after(seconds=10)
    settle(consumer, other)
    assert len(streams.group().members.members) == 2
    assert len(consumer.assignment()) == len(other.assignment()) == 2


def test_a_callback_for_new_partitions_that_fails_is_asked_again():
    streams = Streams(partitions=1)
    streams.put("a", "b", "c")
    notices: list[Any] = []

    def assigned(places: Any) -> None:
        notices.append(places)
        if len(notices) == 2:
            raise ZeroDivisionError
        for each in consumers:
            each.seek("orders", 0, 2)

    consumers: list[Any] = []
    consumer = streams.consumer(on_assigned=assigned, max_poll_ms=1_000)
    consumers.append(consumer)
    streams.after(seconds=40)
    with pytest.raises(ZeroDivisionError):
        consumer.poll(0)
    assert drain(consumer) == ["c"]


def test_delayed_messages_that_found_no_room_do_not_change_what_is_known_of_the_others():
    streams = Streams(partitions=1)
    first = producer_of(streams, name="loader", buffer_bytes=1024, block_ms=0, linger_ms=60_000)
    first.send("orders", b"0" * 900, delay=5)
    with pytest.raises(QueueFull):
        first.send("orders", b"1" * 900, delay=5)
    first.flush()
    first.send("orders", b"1" * 900, delay=5)
    first.flush()
    streams.kill()
    again = producer_of(streams, name="loader", resume=True)
    sent = again.send_many("orders", [NewMessage(body=b"%d" % i * 900, delay=5) for i in range(3)]).result()
    assert [each.duplicate for each in sent] == [True, True, False]


def test_a_message_that_found_no_room_does_not_lose_its_turn():
    streams = Streams(partitions=2)
    first = producer_of(streams, name="loader", buffer_bytes=1024, block_ms=0, linger_ms=60_000)
    for i in range(150):
        try:
            first.send("orders", b"%d" % i * 100)
        except QueueFull:
            first.flush()
            first.send("orders", b"%d" % i * 100)
    first.flush()
    assert len(values(streams, 0)) == 100
    streams.kill()
    again = producer_of(streams, name="loader", resume=True)
    sent = again.send_many("orders", [b"%d" % i * 100 for i in range(200)]).result()
    assert [each.duplicate for each in sent] == [True] * 150 + [False] * 50


def test_a_list_that_found_no_room_does_not_lose_its_turns():
    streams = Streams(partitions=2)
    first = producer_of(streams, name="loader", buffer_bytes=4096, block_ms=0, linger_ms=60_000)
    bodies = [b"%03d" % i * 10 for i in range(350)]
    taken = 0
    while taken < len(bodies):
        try:
            taken += len(first.send_many("orders", bodies[taken:]))
        except QueueFull as error:
            note = getattr(error, "__notes__", ["the first 0 of"])[0]
            taken += int(note.split()[2])
            first.flush()
    first.flush()
    assert values(streams, 0) == bodies[:100] + bodies[200:300]
    assert values(streams, 1) == bodies[100:200] + bodies[300:]


def test_a_poll_while_a_topic_is_being_deleted_is_no_error():
    streams = Streams(partitions=1)
    streams.put("a")
    consumer = streams.consumer()
    feed = next(iter(consumer._port.partitions.values()))
    records = feed._follower.records

    def gone(*arguments: Any) -> Any:
        streams.engine.delete_topic("orders")
        return records(*arguments)

    feed._follower.records = gone
    assert consumer.poll(0) == []
    assert drain(consumer) == []
    assert consumer.assignment() == []


@pytest.mark.parametrize("looping", [False, True])
def test_what_another_thread_has_in_hand_is_not_committed_when_a_consumer_is_closed(looping):
    streams = Streams(partitions=1)
    streams.put("a", "b", "c")
    consumer = streams.consumer()
    in_hand, go_on = threading.Event(), threading.Event()

    def work() -> None:
        if looping:
            messages = iter(consumer)
            assert [next(messages).raw, next(messages).raw] == [b"a", b"b"]
        else:
            consumer.poll(0, max_records=1)
            consumer.poll(0, max_records=1)
        in_hand.set()
        go_on.wait(30)

    worker = threading.Thread(target=work)
    worker.start()
    assert in_hand.wait(30)
    consumer.close()
    go_on.set()
    worker.join()
    assert drain(streams.consumer()) == ["b", "c"]


def test_what_a_thread_had_that_has_ended_is_committed_when_a_consumer_is_closed():
    streams = Streams(partitions=1)
    streams.put("a", "b", "c")
    consumer = streams.consumer()
    worker = threading.Thread(target=consumer.poll, args=(0, 2))
    worker.start()
    worker.join()
    consumer.close()
    assert drain(streams.consumer()) == ["c"]


def test_retention_leaves_what_tells_how_far_a_producer_had_come_before_a_kill():
    streams = Streams(partitions=1, segment_bytes=64 * 1024, retention_ms=1_000)
    first = producer_of(streams, name="loader")
    sent = first.send_many("orders", [b"%d" % i * 1000 for i in range(300)]).result()
    assert len(sent) == 300
    streams.kill()
    log = streams.engine.topic("orders").partitions[0].log
    log.roll()
    streams.clock.advance(seconds=3600)
    log.retain()
    again = producer_of(streams, name="loader", resume=True)
    sent = again.send_many("orders", [b"%d" % i * 1000 for i in range(301)]).result()
    assert [each.duplicate for each in sent] == [True] * 300 + [False]


def test_tasks_send_on_to_a_topic_made_anew_with_fewer_partitions():
    streams = Streams(partitions=3)

    async def send() -> None:
        async with AsyncProducer(LocalProducerPort(streams.engine), ProducerSettings(batch_messages=1)) as producer:
            await (await producer.send_many("orders", [b"%d" % i for i in range(6)]))
            streams.engine.delete_topic("orders")
            streams.engine.create_topic("orders", changes={"partitions": 1})
            for i in range(6):
                await (await producer.send("orders", b"%d" % i))

    asyncio.run(asyncio.wait_for(send(), 30))
    assert len(values(streams)) == 6


def test_a_round_of_tasks_that_failed_is_not_the_last(caplog):
    streams = Streams(partitions=1)

    async def send() -> None:
        async with AsyncProducer(LocalProducerPort(streams.engine)) as producer:
            producer._core.next_ns = failing_once(producer._core.next_ns, ZeroDivisionError())
            await (await producer.send("orders", b"a"))
            await (await producer.send("orders", b"b"))

    asyncio.run(asyncio.wait_for(send(), 30))
    assert values(streams) == [b"a", b"b"]
    assert "a round failed" in caplog.text


def test_what_another_task_has_in_hand_is_not_committed_when_a_consumer_is_closed():
    streams = Streams(partitions=1)
    streams.put("a", "b", "c")

    async def work() -> None:
        consumer = await async_consumer_of(streams.engine, "orders", "analytics")
        in_hand, go_on = asyncio.Event(), asyncio.Event()

        async def handle() -> None:
            await consumer.poll(0, max_records=1)
            await consumer.poll(0, max_records=1)
            in_hand.set()
            await go_on.wait()

        task = asyncio.create_task(handle())
        await in_hand.wait()
        await consumer.close()
        go_on.set()
        await task

    asyncio.run(asyncio.wait_for(work(), 30))
    assert drain(streams.consumer()) == ["b", "c"]


def test_what_a_poll_with_a_time_limit_of_its_own_answered_is_committed_when_a_consumer_is_closed():
    streams = Streams(partitions=1)
    streams.put("a", "b", "c")

    async def work() -> None:
        consumer = await async_consumer_of(streams.engine, "orders", "analytics")
        assert len(await asyncio.wait_for(consumer.poll(max_records=2), 30)) == 2
        await consumer.close()

    asyncio.run(asyncio.wait_for(work(), 30))
    assert drain(streams.consumer()) == ["c"]


def test_in_a_loop_what_is_handled_is_committed_every_few_seconds():
    streams = Streams(partitions=1)
    streams.put(*[str(i) for i in range(10)])
    consumer = streams.consumer(auto_commit_ms=5_000)
    messages = iter(consumer)
    for _ in range(6):
        next(messages)
        streams.clock.advance(seconds=2)
    assert streams.group().committed(streams.engine.topic("orders"), 0) >= 2


def test_a_static_member_keeps_its_place_when_it_polls_while_the_broker_closes():
    streams = Streams(partitions=2)
    consumer = streams.consumer(instance_id="one")
    mine = consumer.assignment()
    topic = streams.engine.topic("orders")
    close = topic.close

    def while_closing() -> None:
        close()
        with pytest.raises(Closed):
            consumer._port.join()

    topic.close = while_closing
    streams.reopen()
    assert [facts.partitions for facts in streams.group().describe().members] == [tuple(mine)]


def test_turns_that_are_given_back_are_taken_again():
    for stick in (1, 3, 100):
        turns, plain = RoundRobin(stick), RoundRobin(stick)
        taken: list[int] = []
        for given_back in (0, 1, 2, 7, 250, 0, 3):
            taken += [turns.take(3) for _ in range(given_back + 5)]
            turns.give_back(given_back, 3)
            del taken[len(taken) - given_back :]
        assert taken == [plain.take(3) for _ in taken]


def test_a_time_limit_is_for_all_messages_of_a_call():
    streams = Streams(partitions=3)
    producer = producer_of(streams, retries=None, batch_messages=1)
    producer.send("orders", b"first").result()
    for partition in streams.engine.topic("orders").partitions:
        partition.append = failing(DiskFull("no room"))
    sent = producer.send_many("orders", [b"a", b"b", b"c"])
    began_ns = streams.clock.monotonic_ns()
    with pytest.raises(Unavailable, match="still being sent"):
        sent.result(timeout=5)
    assert streams.clock.monotonic_ns() - began_ns < 6e9


def test_the_answers_of_a_long_list_are_in_its_order():
    streams = Streams(partitions=3)
    producer = producer_of(streams)
    sent = producer.send_many("orders", [NewMessage(body=b"%d" % i, key=f"k{i}") for i in range(50)])
    producer.flush()
    places = [(each.partition, each.offset) for each in sent.result()]
    assert [(each.result().partition, each.result().offset) for each in sent] == places
    assert sent[-1].result().offset == places[-1][1]
    assert [each.result().offset for each in sent[3:5]] == [offset for _, offset in places[3:5]]
    with pytest.raises(IndexError):
        sent[50]


def test_a_topic_that_was_opened_for_a_producer_closed_meanwhile_takes_nothing():
    streams = Streams(partitions=1)
    producer = producer_of(streams)
    hold = streams.engine.hold

    def slowly(*arguments: Any) -> Any:
        topic = hold(*arguments)
        producer.close()
        return topic

    streams.engine.hold = slowly
    with pytest.raises(Closed):
        producer.send("orders", b"x")
    assert not streams.engine.topic("orders").busy


def test_tasks_get_their_turns_again_where_there_was_no_room():
    streams = Streams(partitions=2)
    bodies = [b"%03d" % i * 10 for i in range(450)]

    async def send() -> None:
        settings = ProducerSettings(buffer_bytes=4096, block_ms=0, linger_ms=60_000)
        async with AsyncProducer(LocalProducerPort(streams.engine), settings, name="loader") as producer:
            taken = 0
            while taken < 300:
                try:
                    taken += len(await producer.send_many("orders", bodies[taken:300]))
                except QueueFull as error:
                    taken += int(error.__notes__[0].split()[2]) if hasattr(error, "__notes__") else 0
                    await producer.flush()
            for body in bodies[300:]:
                try:
                    await producer.send("orders", body)
                except QueueFull:
                    await producer.flush()
                    await producer.send("orders", body)

    asyncio.run(asyncio.wait_for(send(), 30))
    assert values(streams, 0) == bodies[:100] + bodies[200:300] + bodies[400:]
    assert values(streams, 1) == bodies[100:200] + bodies[300:400]


@pytest.mark.parametrize("how", ["all", "messages"])
def test_what_was_handled_can_be_committed_though_retention_took_it_away(how):
    streams = Streams(partitions=1)
    streams.put("a", "b", "c", "d")
    consumer = streams.consumer(auto_commit=False)
    messages = consumer.poll(0, max_records=2)
    log = streams.engine.topic("orders").partitions[0].log
    log.roll()
    log.unpin("stream:analytics")
    log.trim(4)
    consumer.commit(messages if how == "messages" else None)
    assert consumer.committed("orders", 0) == 4


def test_a_deleted_topic_has_no_lag():
    streams = Streams(partitions=1)
    streams.engine.create_topic("returns")
    streams.put("a")
    consumer = streams.consumer(["orders", "returns"])
    streams.engine.delete_topic("returns")
    assert [(each.topic, each.messages) for each in consumer.lag()] == [("orders", 1)]
    streams.engine.delete_topic("orders")
    assert consumer.lag() == []


def send_all(producer: Producer, count: int) -> None:
    """Messages with keys, in turn and delayed, some of them together."""
    for i in range(count):
        options = {"delay": 5} if i % 5 == 3 else {"key": f"k{i}"} if i % 3 == 0 else {}
        producer.send("orders", b"new-%d" % i, **options)
        if i % 4 == 0:
            producer.flush()
    producer.close()


@pytest.mark.parametrize("end", ["kill", "power cut"])
def test_wherever_it_ends_one_that_resumes_stores_each_message_once(end):
    streams = Streams(partitions=3)
    before = producer_of(streams, name="loader")
    for i in range(7):
        before.send("orders", b"old-%d" % i, key=f"k{i}")
    before.close()
    producer = producer_of(streams, name="loader")
    stages: list[Any] = []
    rng = random.Random(1)
    disk = streams.disk
    disk.on_call = lambda _: stages.append(disk.kill() if end == "kill" else disk.cut(rng))
    send_all(producer, 20)
    streams.after(seconds=1)
    streams.engine.close()
    disk.on_call = None
    assert len(stages) > 100
    for stage in stages[:: len(stages) // 25]:
        streams.disk = stage
        streams.engine = streams.open()
        send_all(producer_of(streams, name="loader", resume=True), 30)
        streams.after(seconds=10)
        stored = [value for number in range(3) for value in values(streams, number)]
        assert sorted(stored) == sorted([b"old-%d" % i for i in range(7)] + [b"new-%d" % i for i in range(30)])
        streams.engine.close()


def test_a_commit_to_disk_is_on_disk_though_it_was_committed_before():
    streams = Streams(partitions=1)
    streams.put("a", "b")
    consumer = streams.consumer(auto_commit=False)
    consumer.poll(0)
    consumer.commit()
    assert not streams.group().offsets.synced
    consumer.commit(durability="fsync")
    assert streams.group().offsets.synced
