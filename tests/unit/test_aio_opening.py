"""What takes a while to open, for tasks: awaited, entered, or given to asyncio as a coroutine would be."""

from __future__ import annotations

import asyncio
import gc
import warnings
from pathlib import Path

import pytest

from holdfast import aio
from holdfast.api import AsyncOpening
from holdfast.errors import UnknownTopic


def test_it_can_be_given_to_everything_that_takes_a_coroutine(tmp_path: Path):
    async def main() -> None:
        async with aio.open_broker(tmp_path / "data", durability="os") as broker:
            await broker.create_topic("orders")
            opening = broker.group("orders", "a")
            assert asyncio.iscoroutine(opening)
            assert isinstance(opening, AsyncOpening)
            assert (await asyncio.create_task(opening)).group == "a"
            assert (await asyncio.ensure_future(broker.group("orders", "b"))).group == "b"
            many = await asyncio.gather(*[broker.group("orders", name) for name in "cd"])
            assert [each.group for each in many] == ["c", "d"]
            assert (await asyncio.wait_for(broker.group("orders", "e"), 30)).group == "e"
            async with asyncio.TaskGroup() as tasks:
                task = tasks.create_task(broker.group("orders", "f"))
            assert task.result().group == "f"
            async with asyncio.timeout(30), broker.group("orders", "g") as group:
                assert group.group == "g"
            assert group.closed
            assert (await broker.group("orders", "h")).group == "h"

    asyncio.run(main())
    assert asyncio.run(_topic_of(tmp_path / "other")) == "jobs"


async def _topic_of(folder: Path) -> str:
    async with await asyncio.create_task(aio.open(folder, topic="jobs")) as queue:
        return queue.topic


def test_an_error_and_a_cancellation_come_out_of_its_task(tmp_path: Path):
    async def main() -> None:
        async with aio.open_broker(tmp_path / "data", durability="os") as broker:
            with pytest.raises(UnknownTopic):
                await asyncio.create_task(broker.group("nowhere", "a"))
            await broker.create_topic("orders")
            task = asyncio.create_task(broker.group("orders", "a"))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await broker.group("orders", "a")).group == "a"

    asyncio.run(main())


def test_each_await_opens_anew_and_one_that_nobody_awaits_is_nobodys_trouble(tmp_path: Path):
    async def main() -> None:
        async with aio.open_broker(tmp_path / "data", durability="os") as broker:
            await broker.create_topic("orders")
            opening = broker.group("orders", "a")
            first, second = await opening, await opening
            assert first is not second
            broker.group("orders", "never")
            opening.close()
            gc.collect()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(main())
