"""The queue for tasks: the same names, awaited."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any

import pytest

import holdfast
from holdfast import Closed, Conflict, Empty, InvalidRequest, LeaseLost, NewMessage
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from tests.unit.queues import FOLDER, PLAIN

AsyncQueue = holdfast.aio.AsyncQueue


class Place:
    """A queue for tasks in a folder of a simulated disk."""

    def __init__(self, **changes: Any) -> None:
        self.disk, self.clock, self.ids = SimulatedDisk(), ManualClock(), SeededIds(1)
        self.changes = {**PLAIN, **changes}

    def open(self, **options: Any) -> Any:
        world = World(clock=self.clock, disk=self.disk, ids=self.ids)
        return holdfast.aio.open(FOLDER, world=world, **{**self.changes, **options})

    def run(self, story: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            async with self.open() as q:
                await story(q)

        asyncio.run(main())


async def bodies(q: Any) -> list[bytes]:
    taken = await q.get_many(100, timeout=0)
    await q.ack_many(taken)
    return [m.body for m in taken]


def test_the_face_for_tasks_has_the_names_of_the_one_for_threads():
    def names(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    assert names(holdfast.aio.AsyncQueue) == names(holdfast.Queue)
    assert names(holdfast.aio.AsyncMessage) == names(holdfast.Message)


def test_put_get_and_settle():
    async def story(q: Any) -> None:
        stored = await q.put(b"a", key="k", headers={"h": "v"}, priority=3, ttl=60, dedup_id="d", correlation_id="c")
        assert (stored.id, stored.offset, stored.durability) == ("jobs-0-0", 0, "fsync")
        assert (await q.put(b"a", dedup_id="d")).duplicate
        assert [each.offset for each in await q.put_many([b"b", NewMessage(body=b"c")])] == [1, 2]
        m = await q.get(timeout=5, lease=30, holder="ann")
        assert (m.body, m.key, dict(m.headers), m.priority) == (b"a", "k", {"h": "v"}, 3)
        assert (m.correlation_id, m.attempt, m.holder) == ("c", 1, "ann")
        await m.ack()
        b, c = await q.get_many(5)
        await b.nack(delay=0, error="why")
        await c.reject("never")
        again = await q.get_nowait()
        assert again.attempt == 2
        await again.extend(10)
        await again.defer()
        assert (await q.get(timeout=0)).attempt == 2

    Place().run(story)


def test_an_await_opens_too():
    place = Place()

    async def story() -> None:
        q = await place.open()
        await q.put(b"x")
        await q.close()
        await q.close()
        assert q.closed
        with pytest.raises(Closed):
            await q.put(b"y")
        with pytest.raises(Closed):
            await q.get()

    asyncio.run(story())


def test_nothing_there_in_time():
    place = Place()

    async def story(q: Any) -> None:
        with pytest.raises(Empty, match=r"within 2\.5 s"):
            await q.get(timeout=2.5)
        assert place.clock.monotonic_ns() == 2_500_000_000
        with pytest.raises(Empty):
            await q.get_nowait()
        assert await q.get_many(3, timeout=1) == []
        assert place.clock.monotonic_ns() == 3_500_000_000

    place.run(story)


def test_the_context_manager_acks_nacks_or_gives_back():
    place = Place()

    async def story(q: Any) -> None:
        await q.put_many([b"a", b"b"])
        async with await q.get() as m:
            assert m.body == b"a"
        assert (await q.stats()).floor == 1
        with pytest.raises(ValueError, match="boom"):
            async with await q.get():
                raise ValueError("boom")
        place.clock.advance(ms=100)
        q._port.engine.tick()
        m = await q.get(timeout=0)
        assert m.attempt == 2
        await m.defer()
        for kind in (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            with pytest.raises(kind):
                async with await q.get(timeout=0) as m:
                    assert m.attempt == 2
                    raise kind

    place.run(story)


def test_a_handler_that_is_cancelled_gives_its_message_back_uncounted():
    async def story(q: Any) -> None:
        await q.put(b"x")
        inside = asyncio.Event()

        async def handle() -> None:
            async with await q.get():
                inside.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(handle())
        await inside.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await q.get(timeout=0)).attempt == 1

    Place().run(story)


def test_a_refused_settling_leaves_the_message_in_hand():
    async def story(q: Any) -> None:
        await q.put(b"x")
        m = await q.get()
        for call in (lambda: m.nack(delay=-1), lambda: m.defer(delay=-1), lambda: m.ack(durability="sometimes")):
            with pytest.raises(InvalidRequest):
                await call()
            assert not m.settled
        await m.ack()

    Place().run(story)


def test_a_lost_lease_is_told():
    place = Place()

    async def story(q: Any) -> None:
        await q.put(b"x")
        m = await q.get(lease=1)
        place.clock.advance(seconds=1)
        q._port.engine.tick()
        assert m.lost
        for call in (m.ack, m.nack, m.defer, m.reject, m.extend, lambda: m.state.save(1), lambda: q.resume(m.receipt)):
            with pytest.raises(LeaseLost):
                await call()

    place.run(story)


def test_a_dropped_message_comes_back():
    async def story(q: Any) -> None:
        await q.put(b"x")
        await q.get()
        gc.collect()
        assert (await q.get(timeout=0)).attempt == 2

    Place(dropped_delay_ms=0).run(story)


def test_states():
    async def story(q: Any) -> None:
        await q.put(b"x")
        m = await q.get()
        assert await m.state.load() is None
        await m.state.save({"a": 1}, durability="fsync")
        other = await q.resume(m.receipt)
        assert await other.state.load() == {"a": 1}
        await m.state.save({"a": 2})
        with pytest.raises(Conflict):
            await other.state.save({"a": 3})
        await m.reject()
        assert (await q.dead.list())[0].state == {"a": 2}

    Place().run(story)


def test_looking_cancelling_and_seeking():
    async def story(q: Any) -> None:
        stored = await q.put_many([b"a", b"b", b"c"])
        later = await q.put(b"later", delay=60)
        assert [m.body for m in await q.peek(5)] == [b"a", b"b", b"c"]
        assert [m.body async for m in q.messages("ready", where='body != "b"')] == [b"a", b"c"]
        assert [m.id async for m in q.messages("delayed", limit=1)] == [later.id]
        assert await q.cancel(later.id)
        assert not await q.cancel(later.id)
        assert await q.cancel(stored[1].id)
        assert await bodies(q) == [b"a", b"c"]
        assert await q.seek("start") == 0
        assert await bodies(q) == [b"a", b"b", b"c"]
        assert await q.seek(offset=2) == 2
        assert await q.seek(time=datetime(2020, 1, 1, tzinfo=UTC)) == 0
        assert await q.seek("end") == 3
        with pytest.raises(InvalidRequest):
            await q.seek()
        with pytest.raises(InvalidRequest):
            [m async for m in q.messages("gone")]
        await q.sync()
        assert (await q.compact()).segments >= 1

    Place().run(story)


def test_dead_letters():
    async def story(q: Any) -> None:
        await q.put_many([b"a", b"b", b"c"])
        for m in await q.get_many(3):
            await m.reject("no user 7")
        letters = await q.dead.list(where='body != "c"', limit=1)
        assert [letter.body for letter in letters] == [b"a"]
        assert (await q.dead.show(letters[0].id)).reason == "REJECTED"
        assert [group.count for group in await q.dead.groups()] == [3]
        assert (await q.dead.redrive(dry_run=True)).matched == 3
        assert (await q.dead.redrive(letters[0].id)).done == 1
        assert (await q.dead.purge(limit=1)).done == 1
        assert [letter.body for letter in await q.dead.list()] == [b"c"]
        assert await bodies(q) == [b"a"]

    Place().run(story)


def test_ack_many_and_nack_many():
    async def story(q: Any) -> None:
        await q.put_many([b"a", b"b", b"c"])
        taken = await q.get_many(3)
        await q.ack_many(taken[:1])
        await q.nack_many(taken[1:], delay=0)
        assert await bodies(q) == [b"b", b"c"]
        with pytest.raises(LeaseLost):
            await q.ack_many(taken)
        with pytest.raises(LeaseLost):
            await q.nack_many(taken)

    Place().run(story)


# Tasks that wait, with the real clock


def real(tmp_path: Any, story: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with holdfast.aio.open(tmp_path / "jobs", min_free_bytes=0) as q:
            await asyncio.wait_for(story(q), 10)

    asyncio.run(main())


async def in_line(q: Any, count: int) -> None:
    while (await q.stats()).waiters < count:
        await asyncio.sleep(0)


def test_iteration_wakes_on_arrival_and_ends_with_the_queue(tmp_path):
    async def story(q: Any) -> None:
        seen: asyncio.Queue[bytes] = asyncio.Queue()

        async def consume() -> str:
            async for m in q:
                async with m:
                    seen.put_nowait(m.body)
            return "ended"

        task = asyncio.create_task(consume())
        await in_line(q, 1)
        loop = asyncio.get_running_loop()
        for n in range(10):
            began = loop.time()
            await q.put(b"%d" % n)
            assert await seen.get() == b"%d" % n
            assert loop.time() - began < 2
        await in_line(q, 1)
        await q.close()
        assert await task == "ended"

    real(tmp_path, story)


def test_a_cancelled_get_loses_nothing_and_lets_the_next_one_be_woken(tmp_path):
    async def story(q: Any) -> None:
        first = asyncio.create_task(q.get())
        await in_line(q, 1)
        second = asyncio.create_task(q.get())
        await in_line(q, 2)
        stored = asyncio.create_task(q.put(b"x"))
        while q._port.deliveries[0].waiters and len(q._port.deliveries[0].waiters) == 2:
            await asyncio.sleep(0)
        first.cancel()  # it was woken, and has not run since
        await stored
        began = asyncio.get_running_loop().time()
        done = await asyncio.gather(first, second, return_exceptions=True)
        assert asyncio.get_running_loop().time() - began < 2
        (m,) = [each for each in done if not isinstance(each, BaseException)]
        assert m.body == b"x"
        await m.ack()
        assert (await q.stats()).waiters == 0

    real(tmp_path, story)


def test_cancelled_gets_leave_the_line(tmp_path):
    async def story(q: Any) -> None:
        tasks = [asyncio.create_task(q.get()) for _ in range(5)]
        await in_line(q, 5)
        for task in tasks[:4]:
            task.cancel()
        await asyncio.gather(*tasks[:4], return_exceptions=True)
        assert (await q.stats()).waiters == 1
        await q.put(b"x")
        assert (await tasks[4]).body == b"x"

    real(tmp_path, story)


def test_tasks_of_two_loops_share_a_queue(tmp_path):
    q = asyncio.run(_opened(tmp_path))

    async def put() -> None:
        await q.put(b"x")

    async def get() -> None:
        async with await q.get(timeout=5) as m:
            assert m.body == b"x"
        await q.close()

    asyncio.run(put())
    asyncio.run(get())


async def _opened(tmp_path: Any) -> Any:
    return await holdfast.aio.open(tmp_path / "jobs", min_free_bytes=0)


def test_the_loop_runs_on_while_a_put_waits_for_the_disk(tmp_path):
    async def story(q: Any) -> None:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        await asyncio.gather(*(q.put(b"%d" % n) for n in range(64)))
        counting.cancel()
        assert turns > 1
        assert len(await bodies(q)) == 64

    real(tmp_path, story)
