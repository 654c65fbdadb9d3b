"""The consumer for tasks: the same as for threads, awaited."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast.api.aio.consumer import AsyncConsumer
from holdfast.broker.engine import BrokerEngine
from holdfast.errors import Closed, Fenced, InvalidRequest
from tests.unit.streams import Streams, async_consumer_of, texts


def run(story: Any) -> None:
    asyncio.run(story)


async def settle(*consumers: AsyncConsumer[Any]) -> list[str]:
    found: list[str] = []
    for _ in range(3):
        for consumer in consumers:
            found += texts(await consumer.poll(0))
    return found


def test_poll_commit_and_go_on():
    async def story() -> None:
        streams = Streams()
        streams.fill(2)
        async with await async_consumer_of(streams.engine, "orders", "analytics", auto_commit=False) as consumer:
            assert sorted(texts(await consumer.poll(0))) == ["0-0", "0-1", "1-0", "1-1", "2-0", "2-1"]
            await consumer.commit(durability="fsync")
            streams.put("new")
        async with await async_consumer_of(streams.engine, "orders", "analytics") as consumer:
            assert texts(await consumer.poll(0)) == ["new"]
            assert await consumer.poll(0.5) == []

    run(story())


def test_a_task_that_waits_is_woken_by_an_arrival(tmp_path):
    async def story() -> None:
        engine = BrokerEngine.open(tmp_path / "data")
        engine.create_topic("orders", changes={"partitions": 2})
        consumer = await async_consumer_of(engine, ["orders"], "analytics")
        waiting = asyncio.create_task(consumer.poll(10))
        await asyncio.sleep(0)
        partition = engine.topic("orders").partition(1)
        appended, _ = partition.append([b"x"])
        await partition.log.wait_async(appended)
        assert texts(await asyncio.wait_for(waiting, 10)) == ["x"]
        await consumer.close()
        engine.close()

    run(story())


def test_callbacks_may_be_coroutines_and_two_share_what_is_there():
    async def story() -> None:
        streams = Streams(partitions=2)
        notices: list[str] = []

        async def revoked(places: object) -> None:
            await asyncio.sleep(0)
            notices.append(f"-{places}")

        first = await async_consumer_of(
            streams.engine, "orders", "analytics", on_revoked=revoked, on_assigned=lambda places: notices.append("+")
        )
        second = await async_consumer_of(streams.engine, "orders", "analytics")
        await settle(first, second)
        assert notices == ["+", "-[('orders', 1)]"]
        streams.fill(3, partitions=2)
        assert sorted(await settle(first, second)) == ["0-0", "0-1", "0-2", "1-0", "1-1", "1-2"]
        await first.close()
        assert notices[-1] == "-[('orders', 0)]"

    run(story())


def test_iterating_counts_a_message_as_handled_with_the_next():
    async def story() -> None:
        streams = Streams(partitions=1)
        streams.put("a", "b", "c")
        with pytest.raises(ZeroDivisionError):
            async with await async_consumer_of(streams.engine, "orders", "analytics") as consumer:
                async for message in consumer:
                    if message.raw == b"b":
                        raise ZeroDivisionError
        consumer = await async_consumer_of(streams.engine, "orders", "analytics")
        assert texts(await consumer.poll(0)) == ["b", "c"]

    run(story())


def test_closing_ends_an_iteration_that_waits(tmp_path):
    async def story() -> None:
        engine = BrokerEngine.open(tmp_path / "data")
        engine.create_topic("orders")
        consumer = await async_consumer_of(engine, "orders", "analytics")

        async def all_of_it() -> list[Any]:
            return [message async for message in consumer]

        waiting = asyncio.create_task(all_of_it())
        await asyncio.sleep(0)
        await consumer.close()
        assert await asyncio.wait_for(waiting, 10) == []
        with pytest.raises(Closed):
            await consumer.poll(0)
        engine.close()

    run(story())


def test_a_cancelled_poll_takes_nothing_along(tmp_path):
    async def story() -> None:
        engine = BrokerEngine.open(tmp_path / "data")
        engine.create_topic("orders")
        consumer = await async_consumer_of(engine, "orders", "analytics")
        waiting = asyncio.create_task(consumer.poll(10))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        partition = engine.topic("orders").partition(0)
        appended, _ = partition.append([b"x"])
        await partition.log.wait_async(appended)
        assert texts(await consumer.poll(10)) == ["x"]
        await consumer.close()
        engine.close()

    run(story())


def test_an_evicted_task_is_refused_and_joins_again():
    async def story() -> None:
        streams = Streams(partitions=1)
        streams.put("a")
        consumer = await async_consumer_of(streams.engine, "orders", "analytics", auto_commit=False)
        await consumer.poll(0)
        streams.clock.advance(seconds=400)
        streams.after(seconds=31)
        with pytest.raises(Fenced):
            await consumer.commit()
        assert texts(await consumer.poll(0)) == ["a"]

    run(story())


def test_bad_arguments_are_refused():
    async def story() -> None:
        streams = Streams()
        with pytest.raises(InvalidRequest):
            await async_consumer_of(streams.engine, "orders", "../etc")
        consumer = await async_consumer_of(streams.engine, "orders", "analytics")
        with pytest.raises(InvalidRequest):
            await consumer.poll(max_records=0)

    run(story())
