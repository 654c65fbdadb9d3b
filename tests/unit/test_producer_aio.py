"""The producer for tasks: the same as the one for threads, awaited, and the loop never waits for the disk."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from holdfast import NewMessage
from holdfast.api.aio.producer import AsyncProducer
from holdfast.broker.engine import BrokerEngine
from holdfast.env import Clock, ManualClock, SeededIds, SystemClock, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import Closed, DiskFull, Fenced, InvalidRequest, QueueFull, Unavailable, UnknownTopic
from holdfast.local.publisher import LocalProducerPort
from holdfast.producing.core import producer_settings
from holdfast.settings import ProducerSettings


class Place:
    """A broker on a simulated disk, with topics `one` and `three`, named for their partitions."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.disk, self.clock, self.ids = SimulatedDisk(), clock or ManualClock(), SeededIds(1)
        self.open()
        for name, partitions in (("one", 1), ("three", 3)):
            self.engine.create_topic(name, None, {"partitions": partitions, "min_free_bytes": 0})

    def open(self) -> None:
        self.engine = BrokerEngine.open("/data", world=World(clock=self.clock, disk=self.disk, ids=self.ids))

    def kill(self) -> None:
        self.disk = self.disk.kill()
        self.open()

    def producer(self, *, name: str | None = None, resume: bool = False, **changes: Any) -> AsyncProducer:
        return AsyncProducer(
            LocalProducerPort(self.engine), producer_settings(ProducerSettings(), changes), name=name, resume=resume
        )

    def values(self, topic: str, partition: int = 0) -> list[bytes]:
        log = self.engine.topic(topic).partitions[partition].log
        log.sync()
        return [record.value for record in log.records(0)]


@pytest.fixture
def place() -> Place:
    return Place()


def run(story: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 60))


def test_a_message_is_stored_and_answered(place):
    async def story() -> None:
        async with place.producer() as producer:
            sent = await producer.send("one", b"hello", key="k")
            stored = await sent
            assert sent.done()
            assert (stored.offset, stored.durability, stored.partition) == (0, "fsync", 0)
            assert await sent == stored
        assert place.values("one") == [b"hello"]

    run(story)


def test_many_tasks_share_a_producer_and_its_syncs(place):
    async def story() -> None:
        async with place.producer(linger_ms=50) as producer:
            await (await producer.send("one", b""))
            before = place.disk.calls["sync"]

            async def work(number: int) -> int:
                return (await (await producer.send("one", b"%d" % number))).offset

            offsets = await asyncio.gather(*[work(n) for n in range(80)])
            assert sorted(offsets) == list(range(1, 81))
            assert place.disk.calls["sync"] - before <= 5

    run(story)


def test_lists_are_answered_in_their_order(place):
    async def story() -> None:
        async with place.producer(batch_messages=7) as producer:
            sent = await producer.send_many("three", [b"%d" % i for i in range(100)])
            results = await sent
            assert sent.done()
            for i, stored in enumerate(results):
                assert place.values("three", stored.partition)[stored.offset] == b"%d" % i
            assert len(sent) == 100
            assert await sent[5] == results[5]
            mixed = await (await producer.send_many("one", [b"a", NewMessage(body=b"b", delay=1)]))
            assert (mixed[0].offset, mixed[1].delayed_id) == (0, 0)

    run(story)


def test_flush_and_close_send_what_was_gathered(place):
    async def story() -> None:
        producer = place.producer(linger_ms=60_000)
        await producer.send("one", b"1")
        await producer.flush()
        assert place.values("one") == [b"1"]
        await producer.send("one", b"2")
        await producer.close()
        assert place.values("one") == [b"1", b"2"]
        with pytest.raises(Closed):
            await producer.send("one", b"3")
        await producer.close()

    run(story)


def test_without_acks_nobody_waits(place):
    async def story() -> None:
        async with place.producer(acks="none", linger_ms=60_000) as producer:
            sent = await producer.send("one", b"x")
            assert sent.done()
            assert await sent is None
        assert place.values("one") == [b"x"]

    run(story)


def test_a_lost_answer_stores_nothing_twice(place):
    async def story() -> None:
        partition = place.engine.topic("one").partitions[0]
        real, calls = partition.append, []

        def append(*arguments: Any, **options: Any) -> Any:
            calls.append(real(*arguments, **options))
            if len(calls) == 1:
                raise Unavailable("the answer was lost")
            return calls[-1]

        partition.append = append
        async with place.producer() as producer:
            assert (await (await producer.send("one", b"x"))).offset == 0
        assert place.values("one") == [b"x"]
        assert len(calls) == 2

    run(story)


def test_an_error_is_the_answer(place):
    async def story() -> None:
        def refuse(*arguments: Any, **options: Any) -> Any:
            raise DiskFull("no room")

        place.engine.topic("one").partitions[0].append = refuse
        producer = place.producer(retries=1)
        with pytest.raises(DiskFull):
            await (await producer.send("one", b"x"))
        await producer.send("one", b"y")
        with pytest.raises(DiskFull):
            await producer.flush()
        await producer.send("one", b"z")
        with pytest.raises(DiskFull):
            await producer.close()

    run(story)


def test_a_full_buffer_holds_the_sender_up_and_then_refuses():
    place = Place(SystemClock())  # others work meanwhile, and they need real time

    async def story() -> None:
        def refuse(*arguments: Any, **options: Any) -> Any:
            raise DiskFull("no room")

        producer = place.producer(buffer_bytes=1024, retries=None, retry_backoff_max_ms=100)
        for _ in range(100):
            await producer.send("one", bytes(50))
        await producer.flush()
        place.engine.topic("one").partitions[0].append = refuse
        await producer.send("one", bytes(900))
        producer._core.settings = producer_settings(producer.settings, {"block_ms": 20})
        with pytest.raises(QueueFull):
            await producer.send("one", bytes(200))
        with pytest.raises(QueueFull):
            await producer.send_many("one", [bytes(200)])
        with pytest.raises(Closed, match="closed before the message could be stored"):
            await producer.close(0.05)

    run(story)


def test_one_that_resumes_stores_nothing_a_second_time(place):
    async def story(count: int, resume: bool) -> None:
        async with place.producer(name="loader", resume=resume) as producer:
            for i in range(count):
                await producer.send("three", b"%d" % i, key=b"%d" % i)

    run(lambda: story(30, False))
    place.kill()
    run(lambda: story(50, True))
    stored = [value for i in range(3) for value in place.values("three", i)]
    assert sorted(stored) == sorted(b"%d" % i for i in range(50))


def test_a_name_fences_the_producer_before(place):
    async def story() -> None:
        old, new = place.producer(name="loader"), place.producer(name="loader")
        await old.__aenter__()
        await new.__aenter__()
        with pytest.raises(Fenced):
            await (await old.send("one", b"old"))
        assert (await (await new.send("one", b"new"))).offset == 0
        await new.close()
        await old.close()

    run(story)


def test_wrong_calls_are_refused(place):
    async def story() -> None:
        async with place.producer() as producer:
            for error, topic, body in (
                (UnknownTopic, "none", b""),
                (InvalidRequest, 5, b""),
                (InvalidRequest, "one", 5),
            ):
                with pytest.raises(error):
                    await producer.send(topic, body)
            with pytest.raises(InvalidRequest, match="send_many takes a list"):
                await producer.send_many("one", b"bytes")
            with pytest.raises(InvalidRequest):
                await producer.send_many("one", [b"good", 5])
        assert place.values("one") == [b"good"]

    run(story)


def test_a_producer_belongs_to_one_loop(place):
    producer = place.producer()

    async def send() -> None:
        await producer.send("one", b"x")
        await producer.flush()

    run(send)
    with pytest.raises(InvalidRequest, match="another event loop"):
        run(send)


def test_it_runs_on_a_real_disk(tmp_path):
    engine = BrokerEngine.open(tmp_path / "data")
    engine.create_topic("three", None, {"partitions": 3})

    async def story() -> None:
        async with AsyncProducer(LocalProducerPort(engine), ProducerSettings(linger_ms=1)) as producer:
            sent = [await producer.send("three", b"%d" % i, key=b"%d" % i) for i in range(300)]
            many = await producer.send_many("three", [b"x"] * 1000)
            assert len({(s.partition, s.offset) for s in [await each for each in sent]}) == 300
            assert len(await many) == 1000

    run(story)
    assert sum(partition.log.end for partition in engine.topic("three").partitions) == 1300
    engine.close()
