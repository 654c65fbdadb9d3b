"""Taskiq on Holdfast: broker, results and schedules, with its real worker program, and with FastAPI's dependencies."""

from __future__ import annotations

import asyncio
import gc
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import holdfast
from tests.integration.frameworks_gear import Site, until
from tests.integration.process_gear import server_process
from tests.tidy import markdown
from tests.tidy.repo import ROOT

pytest.importorskip("taskiq")

from taskiq.depends.progress_tracker import TaskProgress, TaskState
from taskiq.exceptions import ResultGetError
from taskiq.receiver import Receiver
from taskiq.result import TaskiqResult
from taskiq.scheduler.scheduled_task import ScheduledTask

from holdfast.integrations.taskiq import HoldfastBroker, HoldfastResultBackend, HoldfastScheduleSource

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROGRAM = """
import asyncio
import os

import taskiq_fastapi
from fastapi import FastAPI, Request
from holdfast.integrations.taskiq import HoldfastBroker, HoldfastResultBackend, HoldfastScheduleSource
from notes_kept import note, sleep_until
from taskiq import TaskiqDepends, TaskiqScheduler

PLACE = os.environ["PLACE"]
broker = HoldfastBroker(PLACE, lease=2).with_result_backend(HoldfastResultBackend(PLACE))
source = HoldfastScheduleSource(PLACE)
scheduler = TaskiqScheduler(broker, [source])
api = FastAPI()
api.state.shop = "corner shop"
taskiq_fastapi.init(broker, "program:api")


@broker.task("gated")
def gated(name):
    note("began", name)
    sleep_until(name)
    note("ended", name)


@broker.task("count")
async def count(number):
    note("ran", number)


@broker.task("add")
async def add(x, y):
    return x + y


@broker.task("fail")
async def fail():
    raise ValueError("the printer is on fire")


@broker.task("shop")
async def shop(request: Request = TaskiqDepends()):
    return request.app.state.shop


@broker.task("at_once", ack_type="when_received")
def at_once(name):
    note("began", name)
    sleep_until(name)


async def once(work):
    await broker.startup()
    try:
        return await work()
    finally:
        await broker.shutdown()


def send_gated(name, delay=None):
    asyncio.run(once(lambda: gated.kicker().with_labels(**({} if delay is None else {"delay": delay})).kiq(name)))


senders = asyncio.new_event_loop()
started = []


def send_count(number):
    if not started:
        started.append(senders.run_until_complete(broker.startup()))
    senders.run_until_complete(count.kiq(number))
"""
FILES = {"program.py": PROGRAM}
ELSEWHERE = b'{"task_id": "1", "task_name": "elsewhere", "labels": {}, "args": [], "kwargs": {}}'
WORKER = ["-m", "taskiq", "worker", "program:broker", "--workers", "1"]


@pytest.fixture(params=["folder", "server"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    if request.param == "folder":
        yield Site(tmp_path, f"holdfast://{tmp_path}/data", f"{tmp_path}/data", FILES, WORKER)
        return
    with server_process(tmp_path / "data", "--no-console") as server:
        yield Site(tmp_path, f"holdfast+{server.url}", server.url, FILES, WORKER)


def test_results_dependencies_labels_and_ack_types(site: Site):
    with site.worker():
        printed = site.run(
            "async def work():\n"
            "    print((await (await add.kiq(2, 3)).wait_result(timeout=60)).return_value)\n"
            "    print(repr((await (await fail.kiq()).wait_result(timeout=60)).error))\n"
            "    print((await (await shop.kiq()).wait_result(timeout=60)).return_value)\n"
            "    await count.kicker().with_labels(priority=7, queue_name='other').kiq(1)\n"
            "    await at_once.kiq('a')\n"
            "asyncio.run(once(work))\n"
        )
        assert printed.splitlines() == ["5", "ValueError('the printer is on fire')", "corner shop"]
        until(lambda: ["began", "a"] in site.notes(), "the task begins")
        with site.broker() as broker:
            assert next(broker.queue("other").messages("ready")).priority == 7
            queue = broker.queue("taskiq")
            until(lambda: queue.stats().floor == 4, "the task is acked before it has ended")
        site.open_gate("a")


def test_what_taskiq_would_drop_is_a_dead_letter(tmp_path: Path):
    site = Site(tmp_path, f"{tmp_path}/data", f"{tmp_path}/data", FILES, WORKER)
    with site.broker() as broker, broker.queue("taskiq") as queue:
        queue.put(b"not a task")
        queue.put(ELSEWHERE, headers={"task": "elsewhere"})
        queue.put(b"{}", headers={"task": "add"})
        with site.worker():
            until(lambda: len(queue.dead.list()) == 3, "all are dead letters")
        errors = [letter.error for letter in queue.dead.list()]
        assert "the message is not a task" in errors[0]
        assert "there is no task elsewhere" in errors[1]
        assert "the message is not a task" in errors[2]


def broker_of_one_task(place: str) -> tuple[HoldfastBroker, Any]:
    broker = HoldfastBroker(place)

    @broker.task("add")
    async def add(x: int) -> int:
        return x

    return broker, add


def task_id(data: bytes) -> str:
    return str(json.loads(data)["task_id"])


def test_a_result_of_a_run_that_lost_its_lease_does_not_replace_that_of_the_next(tmp_path: Path):
    place = f"{tmp_path}/data"
    backend = HoldfastResultBackend[str](place)
    broker = HoldfastBroker(place, lease=60).with_result_backend(backend)
    gates = {"first": asyncio.Event(), "second": asyncio.Event()}
    names = iter(gates)
    began: list[str] = []

    @broker.task("gated")
    async def gated() -> str:
        began.append(name := next(names))
        await gates[name].wait()
        return name

    async def begin(tasks: Any, receiver: Receiver) -> tuple[Any, asyncio.Task[None]]:
        ackable, before = await anext(tasks), len(began)
        running = asyncio.create_task(receiver.callback(ackable))
        while len(began) == before:
            await asyncio.sleep(0.01)
        return ackable.ack, running

    async def story() -> None:
        await broker.startup()
        receiver = Receiver(broker, run_startup=False, max_async_tasks=2)
        task = await gated.kiq()
        tasks = broker.listen()
        ack, late = await begin(tasks, receiver)
        with holdfast.open_broker(place) as other:
            assert await asyncio.to_thread(other.queue("taskiq").take_back, ack.message.id)
        _, again = await begin(tasks, receiver)
        gates["second"].set()
        await again
        while not ack.message.lost:
            await asyncio.sleep(0.01)
        gates["first"].set()
        await late
        result = await backend.get_result(task.task_id)
        assert (result.return_value, "holdfast_delivery" in result.labels) == ("second", False)
        await tasks.aclose()
        await broker.shutdown()

    asyncio.run(story())


@pytest.mark.parametrize("ack_type", ["when_received", "when_executed", "when_saved"])
def test_the_type_of_acks_decides_when_a_task_is_acked(ack_type: str, tmp_path: Path):
    floors: dict[str, int] = {}

    def look(when: str) -> None:
        floors[when] = int(queue.stats().floor)

    class Backend(HoldfastResultBackend[int]):
        async def set_result(self, task_id: str, result: TaskiqResult[int]) -> None:
            await asyncio.to_thread(look, "when it is saved")
            await super().set_result(task_id, result)

    place = f"{tmp_path}/data"
    broker = HoldfastBroker(place).with_result_backend(Backend(place))

    @broker.task("look", ack_type=ack_type)
    async def run() -> int:
        await asyncio.to_thread(look, "when it runs")
        return 1

    async def story() -> None:
        await broker.startup()
        task = await run.kiq()
        tasks = broker.listen()
        await Receiver(broker, run_startup=False).callback(await anext(tasks))
        assert (await task.get_result()).return_value == 1
        await tasks.aclose()
        await broker.shutdown()

    with holdfast.open_broker(place) as other:
        other.create_topic("taskiq")
        queue = other.queue("taskiq")
        asyncio.run(story())
        look("afterwards")
    acked = ["when_received", "when_executed", "when_saved"].index(ack_type)
    assert [floors[when] for when in ("when it runs", "when it is saved", "afterwards")] == [
        int(acked == 0), int(acked <= 1), 1,
    ]  # fmt: skip


def test_a_message_that_taskiq_drops_returns_to_its_queue(tmp_path: Path):
    broker, add = broker_of_one_task(f"{tmp_path}/data")

    async def story() -> None:
        await add.kiq(1)
        tasks = broker.listen()
        first = await anext(tasks)
        data = first.data
        del first  # as after an error in a middleware: nobody has acked it, and nobody will
        gc.collect()
        again = await asyncio.wait_for(anext(tasks), 60)
        await again.ack()
        assert task_id(again.data) == task_id(data)
        await tasks.aclose()
        await broker.shutdown()

    asyncio.run(story())


def test_a_worker_goes_on_when_its_queue_is_deleted(tmp_path: Path):
    broker, add = broker_of_one_task(f"{tmp_path}/data")

    async def story() -> None:
        await add.kiq(1)
        tasks = broker.listen()
        await (await anext(tasks)).ack()
        waiting = asyncio.ensure_future(anext(tasks))
        await asyncio.sleep(0)
        with holdfast.open_broker(tmp_path / "data") as other:
            other.delete_topic("taskiq")
        await add.kiq(2)
        await (await asyncio.wait_for(waiting, 60)).ack()
        await tasks.aclose()
        await broker.shutdown()

    asyncio.run(story())


@pytest.mark.parametrize("kind", ["folder", "server"])
def test_one_event_loop_after_the_other_uses_a_broker(kind: str, tmp_path: Path):
    if kind == "folder":
        use_in_loops(f"{tmp_path}/data")
        return
    with server_process(tmp_path / "data", "--no-console") as server:
        use_in_loops(server.url)


def use_in_loops(place: str) -> None:
    broker, add = broker_of_one_task(place)

    async def story(number: int) -> None:
        await asyncio.gather(*(add.kiq(number) for _ in range(5)))
        tasks = broker.listen()
        for _ in range(5):
            await (await anext(tasks)).ack()
        waiting = asyncio.ensure_future(anext(tasks))
        await asyncio.sleep(0)
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
        await broker.shutdown()

    for number in range(4):
        asyncio.run(story(number))
    with holdfast.open_broker(place) as opened:
        assert opened.queue("taskiq").stats().floor == 20


def test_an_opening_that_was_cancelled_is_begun_again(tmp_path: Path):
    broker, add = broker_of_one_task(f"{tmp_path}/data")
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        opening = loop.create_task(broker.startup())
        for _ in range(3):
            loop.run_until_complete(asyncio.sleep(0))
        for task in asyncio.all_tasks(loop):
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            loop.run_until_complete(opening)
        loop.run_until_complete(add.kiq(1))
        loop.run_until_complete(broker.shutdown())


def test_results_expire_and_schedules_are_kept(tmp_path: Path):
    async def story() -> None:
        place = f"{tmp_path}/data"
        backend = HoldfastResultBackend[int](place, keep_results=0.05)
        result = TaskiqResult(is_err=False, return_value=5, execution_time=0.1)
        await backend.set_result("one", result)
        while await backend.is_result_ready("one"):
            await asyncio.sleep(0.01)
        with pytest.raises(ResultGetError):
            await backend.get_result("one")
        await backend.remove_expired()
        lasting = HoldfastResultBackend[int](place)
        await lasting.set_result("two", result)
        assert (await lasting.get_result("two")).return_value == 5
        await lasting.set_progress("two", TaskProgress(state=TaskState.STARTED, meta={"done": 3}))
        progress = await lasting.get_progress("two")
        assert progress is not None
        assert progress.meta == {"done": 3}
        assert await lasting.get_progress("three") is None

        source, other = HoldfastScheduleSource(place), HoldfastScheduleSource(place)
        hourly = ScheduledTask(task_name="add", labels={}, args=[1, 2], kwargs={}, cron="0 * * * *")
        once = ScheduledTask(task_name="add", labels={}, args=[], kwargs={}, time=datetime.now(UTC))
        await asyncio.gather(source.add_schedule(hourly), other.add_schedule(once))
        assert {each.schedule_id for each in await source.get_schedules()} == {hourly.schedule_id, once.schedule_id}
        await source.post_send(once)
        await source.post_send(hourly)
        assert await other.get_schedules() == [hourly]
        await other.delete_schedule(hourly.schedule_id)
        assert await source.get_schedules() == []
        for each in (backend, lasting, source, other):
            await each.shutdown()

    asyncio.run(story())
    with holdfast.open_broker(tmp_path / "data", share=False) as broker:  # all have closed it
        assert "taskiq.result.one" not in broker.documents.list()


def test_the_scheduler_sends_what_a_program_adds(tmp_path: Path):
    site = Site(tmp_path, f"{tmp_path}/data", f"{tmp_path}/data", FILES, WORKER)
    site.run(
        "from datetime import UTC, datetime\n"
        "async def work():\n"
        "    await count.schedule_by_time(source, datetime.now(UTC), 'soon')\n"
        "    await source.shutdown()\n"
        "asyncio.run(once(work))\n"
    )
    beat = Site(tmp_path, site.place, site.url, FILES, ["-m", "taskiq", "scheduler", "program:scheduler"])
    with site.worker(), beat.worker("--update-interval", "1"):
        until(lambda: ["ran", "soon"] in site.notes(), "the task is sent when it is due")


def test_the_program_of_the_guide(tmp_path: Path):
    page = (ROOT / "docs" / "how-to" / "use-with-taskiq.md").read_text("utf-8")
    (code,) = [block.code for block in markdown.blocks(page) if re.match(r"# shop\.py\n", block.code)]
    site = Site(tmp_path, "", "", {"shop.py": code}, ["-m", "taskiq", "worker", "shop:broker", "--workers", "1"])
    with site.worker():
        (tmp_path / "program.py").write_text("from shop import *\n")
        assert site.run("asyncio.run(main())") == "cat.png-small"
