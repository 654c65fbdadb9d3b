"""The worker with async handlers, and on queues for tasks."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import Reject, Worker
from holdfast.local.aio.broker import queue_here_async
from tests.unit.workers import PATIENCE_S, Place, ended, eventually


@pytest.fixture
def place(tmp_path: Path):
    place = Place(tmp_path)
    yield place
    place.q.close()


def for_tasks(place: Place) -> Any:
    """The queue as tasks see it."""
    return queue_here_async(place.q._port.engine, place.q._port.queue_group, None)


@pytest.mark.parametrize("face", ["threads", "tasks"])
def test_async_handlers_run_side_by_side_and_their_ends_count(place: Place, face: str):
    place.q.put_many([b"good"] * 6 + [b"bad", b"never"])
    together = asyncio.Barrier(8)

    async def handler(message: Any) -> None:
        if message.attempt == 1:
            await together.wait()  # all eight are there at once
        if message.raw == b"never":
            raise Reject("no")
        if message.raw == b"bad" and message.attempt == 1:
            raise ValueError("once")

    queue = place.q if face == "threads" else for_tasks(place)
    with place.worker(handler, queue=queue) as worker:
        eventually(lambda: worker.health().handled == 7)
    health = worker.health()
    assert (health.failed, health.rejected) == (1, 1)
    assert [str(error) for error, _ in place.errors] == ["once"]
    assert (place.q.stats().ready, place.q.stats().leased, place.q.stats().dead) == (0, 0, 1)


def test_a_plain_handler_may_have_a_queue_for_tasks(place: Place):
    place.q.put_many([b"good", b"bad"])

    def handler(message: Any) -> None:
        if message.raw == b"bad" and message.attempt == 1:
            raise ValueError("once")

    with place.worker(handler, queue=for_tasks(place)) as worker:
        eventually(lambda: worker.health().handled == 2)
    assert worker.health().failed == 1


def test_an_async_handler_that_has_had_its_time_is_cancelled(place: Place):
    place.q.put(b"slow")
    begun, tidied = threading.Event(), []

    async def handler(message: Any) -> None:
        if message.attempt > 1:
            return
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            tidied.append(message.lost)

    with place.worker(handler, queue=for_tasks(place), time_limit=5, concurrency=1) as worker:
        assert begun.wait(PATIENCE_S)
        place.clock.advance(seconds=5)
        eventually(lambda: worker.health().handled == 1)
    assert tidied == [False]  # it was still its own while it tidied up
    assert (worker.health().timed_out, worker.health().failed) == (1, 0)
    assert [str(error) for error, _ in place.errors] == ["the handler ran for longer than its time limit of 5 s"]


def test_one_that_will_not_be_cancelled_is_left_behind(place: Place):
    place.q.put(b"stubborn")
    begun, stubborn = threading.Event(), threading.Event()

    async def handler(message: Any) -> None:
        if message.attempt > 1:
            return
        begun.set()
        for _ in range(2):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                stubborn.set()

    with place.worker(handler, queue=for_tasks(place), time_limit=5, concurrency=1) as worker:
        assert begun.wait(PATIENCE_S)
        place.clock.advance(seconds=5)
        assert stubborn.wait(PATIENCE_S)
        place.clock.advance(seconds=5)
        eventually(lambda: worker.health().handled == 1)
    assert worker.health().timed_out == 1


def test_a_handler_that_blocks_the_loop_neither_loses_its_lease_nor_stops_the_clock(tmp_path: Path):
    place = Place(tmp_path)
    place.q.put(b"blocks")
    leases = place.q._port.deliveries[0].group.leases
    lost = []

    async def handler(message: Any) -> None:
        first_ms = leases[message.offset].until_ms
        eventually(lambda: leases[message.offset].until_ms > first_ms + 100)  # nothing else runs on the loop meanwhile
        lost.append(message.lost)
        assert worker.health().running == 1

    worker = place.worker(handler, queue=for_tasks(place), lease=0.1)
    worker.start()
    eventually(lambda: worker.health().handled == 1)
    assert ended(worker) == 0
    assert (lost, place.errors) == ([False], [])
    place.q.close()


def test_a_blocked_loop_is_silence(place: Place):
    place.q.put(b"blocks")
    begun, go = threading.Event(), threading.Event()

    async def handler(message: Any) -> None:
        begun.set()
        go.wait(PATIENCE_S)

    worker = place.worker(handler, queue=for_tasks(place), exit_after_silence=60)
    worker.start()
    assert begun.wait(PATIENCE_S)
    # However late it asks for more: there is no answer any more.
    eventually(lambda: place.clock.advance(seconds=30) or worker.health().status == "draining")
    go.set()
    assert worker.wait(PATIENCE_S) == 4


def test_what_runs_at_the_end_of_the_drain_is_cancelled_and_given_back(place: Place):
    place.q.put(b"endless")
    begun, cancelled = threading.Event(), threading.Event()

    async def handler(message: Any) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    worker = place.worker(handler, queue=for_tasks(place), drain=10)
    worker.start()
    assert begun.wait(PATIENCE_S)
    worker.stop()
    eventually(lambda: worker.health().status == "draining")
    place.clock.advance(seconds=10)
    assert worker.wait(PATIENCE_S) == 1
    assert cancelled.wait(PATIENCE_S)
    (listed,) = [*place.q.messages("ready"), *place.q.messages("delayed")]
    assert (listed.attempts, listed.error.partition(":")[0]) == (1, "shutdown")


def test_hooks_may_be_async(place: Place):
    place.q.put(b"bad")
    calls: list[Any] = []

    async def handler(message: Any) -> None:
        if message.attempt == 1:
            raise ValueError("bad")

    async def on_start() -> None:
        calls.append("start")

    async def on_stop() -> None:
        calls.append("stop")

    async def on_error(error: BaseException, message: Any) -> None:
        calls.append((str(error), message.raw))

    with place.worker(handler, on_start=on_start, on_stop=on_stop, on_error=on_error) as worker:
        eventually(lambda: worker.health().handled == 1)
    assert calls == ["start", ("bad", b"bad"), "stop"]


def test_in_an_event_loop_of_ones_own(tmp_path: Path):
    async def main() -> tuple[int, list[Any], bool]:
        async with holdfast.aio.open(tmp_path / "q") as queue:
            await queue.put_many([b"a", b"b"])
            seen = []
            here = asyncio.get_running_loop()

            async def handler(message: Any) -> None:
                seen.append((message.body, asyncio.get_running_loop() is here))
                if len(seen) == 2:
                    worker.stop()

            worker = Worker(handler, queue=queue, poll=0.02)
            code = await worker.run_async()
            return code, sorted(seen), (await queue.stats()).leased == 0

    assert asyncio.run(main()) == (0, [(b"a", True), (b"b", True)], True)


def test_a_handler_that_is_cut_off_is_cancelled_in_the_loop_of_the_user(tmp_path: Path):
    async def main() -> tuple[int, bool]:
        async with holdfast.aio.open(tmp_path / "q") as queue:
            await queue.put(b"endless")
            cancelled = asyncio.Event()

            async def handler(message: Any) -> None:
                worker.stop()
                try:
                    await asyncio.Event().wait()
                finally:
                    cancelled.set()

            worker = Worker(handler, queue=queue, poll=0.02, drain=0.05)
            code = await worker.run_async()
            async with asyncio.timeout(PATIENCE_S):
                return code, await cancelled.wait()

    assert asyncio.run(main()) == (1, True)


def test_a_cancelled_run_ends_in_order(tmp_path: Path):
    async def main() -> None:
        async with holdfast.aio.open(tmp_path / "q") as queue:
            await queue.put(b"a")
            begun, go = asyncio.Event(), asyncio.Event()

            async def handler(message: Any) -> None:
                begun.set()
                await go.wait()

            worker = Worker(handler, queue=queue, poll=0.02)
            running = asyncio.create_task(worker.run_async(signals=False))
            await begun.wait()
            running.cancel()
            await asyncio.sleep(0)
            go.set()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert worker.health().handled == 1

    asyncio.run(main())


def test_a_folder_is_opened_with_the_face_that_suits_the_handler(tmp_path: Path):
    with holdfast.open_broker(tmp_path / "data") as broker:
        broker.create_topic("a")
        broker.publish("a", b"1")
    kinds = []

    async def handler(message: Any) -> None:
        kinds.append(type(message))
        await message.ack()

    with Worker(handler, queue="a", at=tmp_path / "data") as worker:
        eventually(lambda: worker.health().handled == 1)
    assert kinds == [holdfast.aio.AsyncMessage]
    with holdfast.open(tmp_path / "data") as queue:
        queue.put(b"2")
    with Worker(handler, queue=tmp_path / "data") as worker:
        eventually(lambda: worker.health().handled >= 1)
    assert kinds[1:]
    assert set(kinds) == {holdfast.aio.AsyncMessage}
