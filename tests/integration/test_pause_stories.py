"""Pausing and resuming a group, told once for every face: a folder, a server, a folder that another owns."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast import Empty, InvalidRequest
from tests.integration import test_client_stories
from tests.integration.test_client_stories import done, eventually, story

where, place = test_client_stories.where, test_client_stories.place  # fixtures


async def waiting_get(place: Any, queue: Any, timeout: float) -> Any:
    """A get that runs beside the test, in a task or in a thread."""
    if place.tasks:
        return asyncio.create_task(queue.get(timeout=timeout))
    return asyncio.get_running_loop().run_in_executor(None, lambda: queue.get(timeout=timeout))


@story
async def test_a_paused_queue_takes_messages_in_and_hands_none_out(place):
    async with place.queue() as queue:
        await done(queue.put(b"before"))
        held = await done(queue.get())
        assert await done(queue.pause(reason="the printer burns")) is True
        for body in (b"one", b"two"):
            await done(queue.put(body))
        for call in (lambda: queue.get(timeout=0), lambda: queue.get(timeout=0.05), queue.get_nowait):
            with pytest.raises(Empty):
                await done(call())
        assert await done(queue.get_many(10, timeout=0)) == []
        await done(held.extend(60))
        await done(held.ack())
        stats = await done(queue.stats())
        assert (stats.ready, stats.leased, stats.paused.reason) == (2, 0, "the printer burns")
        assert stats.paused.since.year > 2000
        assert [each.body for each in await done(queue.peek(5))] == [b"one", b"two"]
        assert await done(queue.resume()) is True
        assert (await done(queue.stats())).paused is None
        assert [each.body for each in await done(queue.get_many(10, timeout=5))] == [b"one", b"two"]


@story
async def test_pausing_twice_and_resuming_twice_say_so_and_the_first_reason_stays(place):
    async with place.queue() as queue:
        assert await done(queue.resume()) is False
        assert await done(queue.pause(reason="first")) is True
        paused = (await done(queue.stats())).paused
        assert await done(queue.pause(reason="second")) is False
        assert (await done(queue.stats())).paused == paused
        assert await done(queue.resume()) is True
        assert await done(queue.resume()) is False


@story
async def test_a_consumer_that_waits_stays_in_line_and_wakes_at_resume(place):
    async with place.queue() as queue:
        await done(queue.pause())
        waiting = await waiting_get(place, queue, 60)
        await done(queue.put(b"x"))

        async def in_line() -> Any:
            return (await done(queue.stats())).waiters

        await eventually(in_line)
        assert not waiting.done()
        await done(queue.resume())
        message = await asyncio.wait_for(waiting, 60)
        assert message.body == b"x"
        await done(message.ack())


@story
async def test_one_group_is_paused_and_the_others_of_its_topic_go_on(place):
    async with place.broker() as broker:
        await done(broker.create_topic("orders", partitions=2))
        mail = await done(broker.group("orders", "mail"))
        books = await done(broker.group("orders", "books"))
        await done(mail.pause(reason="why not"))
        await done(broker.publish("orders", b"x"))
        assert (await done(books.receive(timeout=5))).body == b"x"
        assert await done(mail.receive_many(5, timeout=0)) == []
        infos = {info.name: info.paused for info in await done(broker.groups("orders"))}
        assert infos["books"] is None
        assert infos["mail"].reason == "why not"
        await done(broker.add_partitions("orders", 2))
        for number in range(4):
            await done(broker.publish("orders", b"y", partition=number))
        assert await done(mail.receive_many(5, timeout=0)) == []
        await done(mail.resume())
        assert len(await done(mail.receive_many(9, timeout=5))) > 0


@story
async def test_a_bad_reason_is_refused_and_resume_without_a_receipt_is_not_resume_of_none(place):
    async with place.queue() as queue:
        for bad in (5, None, "x" * 501, "\ud800"):
            with pytest.raises(InvalidRequest, match="reason="):
                await done(queue.pause(reason=bad))
        assert (await done(queue.stats())).paused is None
        await done(queue.pause())
        with pytest.raises(InvalidRequest, match="a receipt must be a str"):
            await done(queue.resume(None))
        assert (await done(queue.stats())).paused is not None
