"""Acts on single messages, told once for every face: a folder, a server, a folder that another owns."""

from __future__ import annotations

import pytest

from holdfast import Empty, InvalidRequest, LeaseLost
from tests.integration import test_client_stories
from tests.integration.test_client_stories import done, story

where, place = test_client_stories.where, test_client_stories.place  # fixtures


@story
async def test_a_message_that_is_taken_back_is_ready_at_once_and_its_holder_can_no_longer_ack_it(place):
    async with place.queue() as queue:
        stored = await done(queue.put(b"x"))
        held = await done(queue.get(lease=600))
        with pytest.raises(Empty):
            await done(queue.get(timeout=0))
        assert await done(queue.take_back(stored.id)) is True
        again = await done(queue.get(timeout=10))
        assert (again.id, again.attempt) == (stored.id, 1)
        with pytest.raises(LeaseLost):
            await done(held.ack())
        await done(again.ack())
        assert await done(queue.take_back(stored.id)) is False


@story
async def test_a_message_that_nobody_holds_is_not_taken_back(place):
    async with place.queue() as queue:
        stored = await done(queue.put(b"x"))
        assert await done(queue.take_back(stored.id)) is False
        assert (await done(queue.get(timeout=10))).id == stored.id


@story
async def test_a_delayed_message_runs_now(place):
    async with place.queue() as queue:
        stored = await done(queue.put(b"x", delay=3600))
        with pytest.raises(Empty):
            await done(queue.get(timeout=0))
        assert await done(queue.run_now(stored.id)) is True
        message = await done(queue.get(timeout=10))
        assert (message.id, message.body) == (stored.id, b"x")
        await done(message.ack())
        assert await done(queue.run_now(stored.id)) is False


@story
async def test_a_message_that_waits_for_its_retry_runs_now(place):
    async with place.queue() as queue:
        stored = await done(queue.put(b"x"))
        await done((await done(queue.get(timeout=10))).nack(delay=3600))
        with pytest.raises(Empty):
            await done(queue.get(timeout=0))
        assert await done(queue.run_now(stored.id)) is True
        assert (await done(queue.get(timeout=10))).attempt == 2


@story
async def test_an_id_that_never_was_is_refused(place):
    async with place.queue() as queue:
        await done(queue.put(b"x"))
        for act in (queue.take_back, queue.run_now):
            with pytest.raises(InvalidRequest):
                await done(act("other-0-1"))
            with pytest.raises(InvalidRequest):
                await done(act(7))
