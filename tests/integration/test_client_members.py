"""Consumers and producers whose server goes and comes, and leases that nothing of the user's keeps alive."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import holdfast
from holdfast import aio
from tests.integration.http_gear import serving
from tests.integration.proxies import proxied


def test_a_poll_whose_answer_was_cut_gives_the_same_messages(tmp_path: Path):
    with serving(tmp_path) as server, proxied(server.url) as proxy, holdfast.connect(proxy.url) as broker:
        broker.create_topic("orders")
        broker.publish_many("orders", [b"%d" % i for i in range(10)])
        consumer = broker.consumer("orders", group="billing", max_records=4)
        got: list[bytes] = []
        at = 1
        while len(got) < 10:
            broker._port.client.caller.drop_idle()
            proxy.cut_answer_at = at
            at += 150
            got += [message.body for message in consumer.poll(timeout=5)]
        assert got == [b"%d" % i for i in range(10)]
        consumer.close()


def test_a_poll_that_was_given_up_loses_nothing(tmp_path: Path):
    with serving(tmp_path) as server, proxied(server.url) as proxy, holdfast.connect(proxy.url, timeout=1) as broker:
        broker.create_topic("orders")
        broker.publish_many("orders", [b"a", b"b"])
        consumer = broker.consumer("orders", group="billing")
        proxy.swallow_answers = True
        with pytest.raises(holdfast.Unavailable):
            consumer.poll(timeout=0)
        proxy.swallow_answers = False
        assert [message.body for message in consumer.poll(timeout=5)] == [b"a", b"b"]
        consumer.close()


def test_a_consumer_joins_again_after_a_restart_and_goes_on_behind_its_commits(tmp_path: Path):
    with serving(tmp_path) as first:
        port = int(first.url.rpartition(":")[2])
        broker = holdfast.connect(first.url)
        broker.create_topic("orders")
        broker.publish_many("orders", [b"a", b"b"])
        notices: list[str] = []
        consumer = broker.consumer(
            "orders",
            group="billing",
            max_records=1,
            on_assigned=lambda places: notices.append(f"assigned {len(places)}"),
            on_revoked=lambda places: notices.append(f"revoked {len(places)}"),
        )
        assert [message.body for message in consumer.poll(timeout=5)] == [b"a"]
        assert [message.body for message in consumer.poll(timeout=5)] == [b"b"]
    with serving(tmp_path, port=port):
        broker.publish("orders", b"c")
        again: list[bytes] = []
        while b"c" not in again:
            again += [message.body for message in consumer.poll(timeout=10)]
        assert again in ([b"c"], [b"b", b"c"])  # b was in hand, and not committed yet
        assert notices == ["assigned 1", "revoked 1", "assigned 1"]
        consumer.close()
        broker.close()


def test_a_consumer_that_works_longer_than_its_session_stays_a_member(tmp_path: Path):
    with serving(tmp_path) as server, holdfast.connect(server.url) as broker:
        broker.create_topic("orders")
        broker.publish("orders", b"x")
        consumer = broker.consumer("orders", group="billing", session_ms=600, heartbeat_ms=100)
        member = consumer.member_id
        assert len(consumer.poll(timeout=5)) == 1
        time.sleep(1.5)  # the work; the thread beside says that we live
        consumer.commit()
        assert consumer.member_id == member
        consumer.close()


def test_two_consumers_share_the_partitions(tmp_path: Path):
    with serving(tmp_path) as server, holdfast.connect(server.url) as broker:
        broker.create_topic("orders", partitions=4)
        first = broker.consumer("orders", group="billing")
        assert len(first.assignment()) == 4
        second = broker.consumer("orders", group="billing")
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and (len(first.assignment()), len(second.assignment())) != (2, 2):
            first.poll(timeout=0.05)
            second.poll(timeout=0.05)
        assert sorted(first.assignment() + second.assignment()) == [("orders", i) for i in range(4)]
        first.close()
        while time.monotonic() < deadline and len(second.assignment()) != 4:
            second.poll(timeout=0.05)
        assert len(second.assignment()) == 4
        second.close()


def test_an_iteration_that_was_left_goes_on_with_poll_where_it_stood(tmp_path: Path):
    with serving(tmp_path) as server, holdfast.connect(server.url) as broker:
        broker.create_topic("orders")
        broker.publish_many("orders", [b"a", b"b", b"c"])
        consumer = broker.consumer("orders", group="billing")
        for message in consumer:
            assert message.body == b"a"
            break
        assert [message.body for message in consumer.poll(timeout=5)] == [b"b", b"c"]
        consumer.close()


def test_a_producer_stores_each_message_once_though_its_answers_are_cut(tmp_path: Path):
    with serving(tmp_path) as server, proxied(server.url) as proxy, holdfast.connect(proxy.url) as broker:
        broker.create_topic("orders")
        with broker.producer(linger_ms=0) as producer:
            for i in range(20):
                broker._port.client.beside.drop_idle()
                proxy.cut_answer_at = 1 + 17 * i
                assert producer.send("orders", b"%d" % i).result(30) is not None
        assert [each.body for each in broker.read("orders")] == [b"%d" % i for i in range(20)]


def test_a_producer_that_resumes_stores_only_what_is_missing(tmp_path: Path):
    with serving(tmp_path) as server, holdfast.connect(server.url) as broker:
        broker.create_topic("orders")
        with broker.producer(name="importer") as first:
            first.send_many("orders", [b"0", b"1", b"2"])
        with broker.producer(name="importer", resume=True) as second:
            stored = second.send_many("orders", [b"%d" % i for i in range(5)]).result(30)
        assert [each.duplicate for each in stored] == [True, True, True, False, False]
        assert [each.offset for each in stored] == [0, 1, 2, 3, 4]
        assert [each.id for each in stored] == [f"orders-0-{n}" for n in range(5)]
        assert [each.body for each in broker.read("orders")] == [b"%d" % i for i in range(5)]


def test_a_producer_that_closes_does_not_wait_for_a_server_that_is_silent(tmp_path: Path):
    with serving(tmp_path) as server, proxied(server.url) as proxy, holdfast.connect(proxy.url) as broker:
        broker.create_topic("orders")
        producer = broker.producer(linger_ms=0)
        producer.send("orders", b"a").result(30)
        proxy.swallow_answers = True
        sent = producer.send("orders", b"b")
        with pytest.raises(holdfast.Closed, match="it is no longer being sent"):
            producer.close(0.2)
        assert sent.done()
        assert isinstance(sent.exception(), holdfast.Closed)


def test_a_callback_of_a_producer_at_a_server_must_not_wait_for_it(tmp_path: Path):
    with serving(tmp_path) as server, holdfast.connect(server.url) as broker:
        broker.create_topic("orders")
        errors: list[BaseException] = []

        def send_more(_: object) -> None:
            try:
                producer.send("orders", b"y").result(30)
            except holdfast.InvalidRequest as error:
                errors.append(error)

        with broker.producer(linger_ms=0) as producer:
            sent = producer.send("orders", b"x")
            sent.add_done_callback(send_more)
            sent.result(30)
        assert "callback" in str(errors[0])


def test_a_batch_that_failed_for_good_is_not_taken_for_the_next_one(tmp_path: Path):
    with serving(tmp_path) as server, proxied(server.url) as proxy, holdfast.connect(proxy.url, timeout=1) as broker:
        broker.create_topic("orders")
        with broker.producer(linger_ms=0, retries=0) as producer:
            producer.send("orders", b"a").result(30)
            proxy.swallow_answers = True
            with pytest.raises(holdfast.Unavailable):
                producer.send("orders", b"b").result(30)  # stored, but nobody heard of it
            proxy.swallow_answers = False
            assert producer.send("orders", b"c").result(30) is not None
        assert [each.body for each in broker.read("orders")][-1] == b"c"


def test_a_producer_sees_partitions_that_its_own_broker_has_added(tmp_path: Path):
    with serving(tmp_path) as server, holdfast.connect(server.url) as broker:
        broker.create_topic("orders")
        with broker.producer(linger_ms=0) as producer:
            producer.send("orders", b"a").result(30)
            broker.add_partitions("orders", 3)
            assert producer.send("orders", b"b", partition=2).result(30).partition == 2


PROGRAM = """
import asyncio, sys
from holdfast import aio


async def main():
    broker = await aio.connect(sys.argv[1])
    producer = broker.producer(linger_ms=60_000)
    await producer.send("orders", b"x")
    return broker, producer


kept = asyncio.run(main())
"""


def test_what_a_task_sent_to_a_server_is_stored_when_the_program_ends(tmp_path: Path):
    with serving(tmp_path) as server, holdfast.connect(server.url) as broker:
        broker.create_topic("orders")
        subprocess.run([sys.executable, "-c", PROGRAM, server.url], check=True, timeout=60)
        assert [each.body for each in broker.read("orders")] == [b"x"]


def test_a_handler_that_blocks_the_loop_loses_no_lease(tmp_path: Path):
    async def story(url: str) -> None:
        async with aio.open(url, topic="jobs") as queue:
            await queue.put(b"x")
            message = await queue.get(timeout=5, lease=0.5, renew=True)
            time.sleep(1.5)
            assert not message.lost
            await message.ack()

    with serving(tmp_path) as server:
        asyncio.run(story(server.url))


def test_many_threads_share_one_client(tmp_path: Path):
    with serving(tmp_path) as server, holdfast.connect(server.url) as broker:
        queue = broker.queue("jobs")
        done: list[bytes] = []

        def work(number: int) -> None:
            for i in range(20):
                queue.put(b"%d-%d" % (number, i), durability="os")
                with queue.get(timeout=20) as message:
                    done.append(message.body)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(done) == sorted(b"%d-%d" % (number, i) for number in range(6) for i in range(20))
        stats = queue.stats()
        assert (stats.ready, stats.leased) == (0, 0)


@pytest.mark.filterwarnings("ignore:unclosed")
def test_one_client_serves_the_tasks_of_one_loop_after_another(tmp_path: Path):
    with serving(tmp_path) as server:

        async def open_it() -> aio.AsyncQueue[bytes]:
            return await aio.open(server.url, topic="jobs")

        queue = asyncio.run(open_it())
        asyncio.run(queue.put(b"x"))

        async def take() -> bytes:
            message = await queue.get(timeout=5)
            await message.ack()
            await queue.close()
            return message.body

        assert asyncio.run(take()) == b"x"
        gc.collect()  # while the warnings of the loops that are gone are not heeded
