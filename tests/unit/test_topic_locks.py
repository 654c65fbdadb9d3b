"""One topic that takes long (to open, to grow, to go) holds up no other, and nothing is opened twice or left behind."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.broker.check import check_folder
from holdfast.env import World, real_world
from holdfast.env.disk import File, RealDisk
from holdfast.errors import BadSettings, Closed, HoldfastError, TopicExists, UnknownTopic
from holdfast.settings import BrokerSettings, TopicSettings
from tests.unit.brokers import Place

SETTINGS = BrokerSettings(topic=TopicSettings(min_free_bytes=0, durability="os"))
LONG_S = 30


class HeldDisk(RealDisk):
    """A disk on which whoever touches a topic named `slow` waits, once it is `held`, until it is let go."""

    def __init__(self) -> None:
        self.held = False
        self.reached = threading.Event()
        self.released = threading.Event()

    def _wait(self, path: str) -> None:
        if self.held and "slow" in path:
            self.reached.set()
            assert self.released.wait(LONG_S)

    def open(self, path: str, *, write: bool = False, create: bool = False) -> File:
        self._wait(path)
        return super().open(path, write=write, create=create)

    def rename(self, old: str, new: str) -> None:
        self._wait(old)
        super().rename(old, new)


class Held:
    """A broker whose topic `slow` can be stopped in the middle of anything that is done to it."""

    def __init__(self, folder: Path) -> None:
        self.disk = HeldDisk()
        self.folder = folder
        self.broker = self.open()
        self.threads: list[threading.Thread] = []

    def open(self) -> Any:
        real = real_world()
        world = World(clock=real.clock, disk=self.disk, ids=real.ids)
        return holdfast.open_broker(self.folder, settings=SETTINGS, world=world)

    def begin(self, call: Callable[[], object]) -> list[object]:
        """Do something to `slow` on a thread, which is stuck in the middle of it from now on."""
        self.disk.held = True
        outcome = self.aside(call)
        assert self.disk.reached.wait(LONG_S)
        return outcome

    def aside(self, call: Callable[[], object]) -> list[object]:
        outcome: list[object] = []

        def run() -> None:
            try:
                outcome.append(call())
            except HoldfastError as error:
                outcome.append(error)

        thread = threading.Thread(target=run, daemon=True)
        self.threads.append(thread)
        thread.start()
        return outcome

    def end(self) -> None:
        self.disk.held = False
        self.disk.released.set()
        for thread in self.threads:
            thread.join(LONG_S)
            assert not thread.is_alive()


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    held = Held(tmp_path / "data")
    try:
        yield held
    finally:
        held.disk.held = False
        held.disk.released.set()
        held.broker.close()


WAYS: dict[str, Callable[[Any], object]] = {
    "opening": lambda broker: broker.publish("slow", b"a"),
    "looking": lambda broker: broker.describe_topic("slow"),
    "growing": lambda broker: broker.add_partitions("slow", 20),
    "altering": lambda broker: broker.alter_topic("slow", max_attempts=3),
    "a group": lambda broker: broker.group("slow", "new"),
    "deleting": lambda broker: broker.delete_topic("slow"),
    "creating": lambda broker: broker.create_topic("slow-too", partitions=4),
}


def use_another(broker: Any) -> list[str]:
    """All that is done to a topic in its life, to one that is not `slow`."""
    broker.create_topic("other")
    broker.publish("other", b"a")
    group = broker.group("other", "default")
    message = group.receive(timeout=0)
    message.ack()
    assert group.stats().ready == 0
    broker.alter_topic("other", max_attempts=7)
    broker.add_partitions("other", 1)
    assert broker.describe_topic("other").partitions[-1].number == 1
    broker.publish("known", b"b")  # it is there, and is opened only now
    found = broker.topics()
    group.close()
    broker.delete_topic("other")
    return found


@pytest.mark.parametrize("way", WAYS)
def test_another_topic_goes_through_its_life_while_one_is_stuck(held, way):
    for name in ("slow", "known"):
        held.broker.create_topic(name)
    held.broker.close()
    held.broker = held.open()
    if way == "growing":
        held.broker.describe_topic("slow")
    stuck = held.begin(lambda: WAYS[way](held.broker))
    done = held.aside(lambda: use_another(held.broker))
    held.threads[-1].join(LONG_S / 2)
    assert done
    assert {"known", "other"} <= set(done[0])
    assert not stuck, "it should still be stuck"
    held.end()
    assert [isinstance(found, HoldfastError) for found in stuck] == [False]


def test_the_keeper_looks_after_others_while_the_sweep_opens_one(held):
    held.broker.create_topic("slow")
    held.broker.close()
    held.broker = held.open()
    engine = held.broker._port.engine
    held.broker.create_topic("other")
    group = held.broker.group("other", "default")
    engine.keep()
    engine._sweep._due_ns = 0
    held.disk.held = True
    engine._sweep.on_attention()
    assert held.disk.reached.wait(LONG_S)
    held.broker.publish("other", b"late", delay=0.05)
    assert group.receive(timeout=LONG_S).body == b"late"
    group.close()
    held.end()


def test_closing_waits_for_whoever_opens_a_topic_and_leaves_nothing_open(held):
    held.broker.create_topic("slow", partitions=20)
    held.broker.close()
    held.broker = held.open()
    opening = held.begin(lambda: held.broker.publish("slow", b"a"))
    closing = held.aside(held.broker.close)
    held.threads[-1].join(0.2)
    assert not closing
    with pytest.raises(holdfast.Busy):
        held.open()
    held.end()
    assert closing == [None]
    assert isinstance(opening[0], Closed)
    held.broker = held.open()
    held.broker.publish("slow", b"b")
    assert held.broker.group("slow", "default").receive(timeout=0).body == b"b"


def test_two_threads_that_want_a_topic_open_it_once(held):
    held.broker.create_topic("slow")
    held.broker.close()
    held.broker = held.open()
    engine = held.broker._port.engine
    first = held.begin(lambda: engine.topic("slow"))
    others = [held.aside(lambda: engine.hold("slow", threading.Event())) for _ in range(5)]
    held.end()
    assert len({id(found[0]) for found in (first, *others)}) == 1


def test_a_name_that_nobody_uses_has_no_lock():
    place = Place()
    for number in range(10):
        place.broker.create_topic(f"t{number}")
        place.broker.publish(f"t{number}", b"a")
    assert place.engine._locks_of._locks == {}
    assert place.engine._locks_of._threads == {}
    place.close()


def test_growth_that_is_not_continued_leaves_a_topic_with_what_was_added(tmp_path):
    from holdfast.broker.changes import change_topic, grow_topic

    with holdfast.open_broker(tmp_path / "data", settings=SETTINGS) as broker:
        broker.create_topic("orders", partitions=2)
        group = broker.group("orders", "default")
        wanted = change_topic(broker._port.engine, "orders", {"partitions": 9_000})
        assert grow_topic(broker._port.engine, "orders", wanted)
        assert grow_topic(broker._port.engine, "orders", wanted)
        count = len(broker.describe_topic("orders").partitions)
        assert 2 < count < 100
        broker.publish("orders", b"last", partition=count - 1)
        assert group.receive(timeout=0).body == b"last"
        assert broker._port.engine.topic("orders").settings.partitions == count
        group.close()
    with holdfast.open_broker(tmp_path / "data", settings=SETTINGS) as broker:
        assert len(broker.describe_topic("orders").partitions) == count


def test_a_topic_can_be_deleted_while_it_grows(held):
    held.broker.create_topic("slow")
    held.broker.describe_topic("slow")
    growing = held.begin(lambda: held.broker.alter_topic("slow", partitions=10_000))
    deleting = held.aside(lambda: held.broker.delete_topic("slow"))
    held.end()
    assert deleting == [None]
    assert isinstance(growing[0], UnknownTopic | Closed)
    assert held.broker.topics() == []


def test_growth_ends_soon_after_its_task_is_cancelled(tmp_path):
    async def story() -> tuple[int, int]:
        async with await holdfast.aio.open_broker(tmp_path / "data", settings=SETTINGS) as broker:
            await broker.create_topic("orders")
            growing = asyncio.ensure_future(broker.alter_topic("orders", partitions=10_000))
            topic = broker._port.engine.topic("orders")
            while len(topic.partitions) < 20:
                await asyncio.sleep(0.01)
            growing.cancel()
            await asyncio.wait([growing])
            # Behind the step that was under way.
            count = len((await broker.alter_topic("orders", max_attempts=4)).partitions)
            await broker.publish("orders", b"a", partition=count - 1)
            return count, len((await broker.describe_topic("orders")).partitions)

    count, later = asyncio.run(story())
    assert 20 <= count == later < 1_000


class PausedDisk(RealDisk):
    """A disk on which whoever makes this folder, or one in it, waits until it is let go."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.reached = threading.Event()
        self.released = threading.Event()

    def make_folder(self, path: str) -> None:
        if f"{self.folder}/" in f"{path}/":
            self.reached.set()
            assert self.released.wait(LONG_S)
        super().make_folder(path)

    def world(self) -> World:
        real = real_world()
        return World(clock=real.clock, disk=self, ids=real.ids)


async def leave_in_the_middle(disk: PausedDisk, task: asyncio.Future[Any]) -> None:
    """Cancel a task that is at work on a thread, which is in the middle of it."""
    assert await asyncio.to_thread(disk.reached.wait, LONG_S)
    task.cancel()
    await asyncio.wait([task])
    disk.released.set()


WAYS_TO_OPEN: dict[str, Callable[[Any], Any]] = {
    "create": lambda broker: broker.create_topic("orders", partitions=60),
    "queue": lambda broker: broker.queue("orders", partitions=60),
}


@pytest.mark.parametrize("way", WAYS_TO_OPEN)
def test_a_topic_is_not_made_any_further_when_its_task_is_cancelled_and_whoever_comes_next_goes_on(tmp_path, way):
    disk, made = PausedDisk("/orders/20"), tmp_path / "data/topics/orders"

    async def story() -> None:
        async with await holdfast.aio.open_broker(tmp_path / "data", settings=SETTINGS, world=disk.world()) as broker:
            await leave_in_the_middle(disk, asyncio.ensure_future(WAYS_TO_OPEN[way](broker)))
            await broker._port.at("orders").aside(lambda: None)  # behind what was under way
            assert not (made / "21").exists()
            assert len((await broker.describe_topic("orders")).partitions) == 60
            await broker.publish("orders", b"a", partition=59)
            group = await broker.group("orders", "default")
            assert (await group.receive(timeout=0)).body == b"a"

    asyncio.run(story())
    with holdfast.open_broker(tmp_path / "data", settings=SETTINGS) as broker:
        assert len(broker.describe_topic("orders").partitions) == 60


@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_nothing_is_left_of_a_group_whose_task_is_cancelled_while_it_is_made(tmp_path, start):
    disk, topic = PausedDisk("/orders/20/groups/new"), tmp_path / "data/topics/orders"

    async def story() -> None:
        async with await holdfast.aio.open_broker(tmp_path / "data", settings=SETTINGS, world=disk.world()) as broker:
            await broker.create_topic("orders", partitions=40)
            await broker.publish("orders", b"before", partition=3)
            await leave_in_the_middle(disk, asyncio.ensure_future(broker.group("orders", "new", start=start)))
            await broker._port.at("orders").aside(lambda: None)
            assert [*topic.glob("*/groups/new"), *topic.glob("groups/new.json")] == []
            assert (await broker.describe_topic("orders")).groups == []
            group = await broker.group("orders", "new", start=start)
            await broker.publish("orders", b"after", partition=3)
            found = [message.body for message in await group.receive_many(5, timeout=0)]
            assert found == ([b"after"] if start == "latest" else [b"before", b"after"])

    asyncio.run(story())
    with holdfast.open_broker(tmp_path / "data", settings=SETTINGS) as broker:
        assert broker.describe_topic("orders").groups == ["new"]
    assert check_folder(tmp_path / "data").ok


def test_places_for_dead_letters_are_not_made_any_further_when_the_task_is_cancelled(tmp_path):
    disk, made = PausedDisk("/orders.dlq/20"), tmp_path / "data/topics/orders.dlq"

    async def story() -> None:
        async with await holdfast.aio.open_broker(tmp_path / "data", settings=SETTINGS, world=disk.world()) as broker:
            await broker.create_topic("orders", partitions=40)
            looking = asyncio.ensure_future(broker.describe_topic("orders.dlq"))
            await leave_in_the_middle(disk, looking)
            await asyncio.to_thread(broker._port.engine.topic("orders").dead_partition, 20)  # behind what was under way
            assert not (made / "21").exists()
            assert len((await broker.describe_topic("orders.dlq")).partitions) == 40

    asyncio.run(story())


def test_many_tasks_that_want_one_slow_topic_leave_the_threads_to_others(tmp_path):
    async def story(held: Held) -> None:
        real = real_world()
        world = World(clock=real.clock, disk=held.disk, ids=real.ids)
        async with await holdfast.aio.open_broker(held.folder, settings=SETTINGS, world=world) as broker:
            held.disk.held = True
            wanting = [asyncio.ensure_future(broker.publish("slow", b"a")) for _ in range(200)]
            wanting += [asyncio.ensure_future(broker.group("slow", f"g{number}")) for number in range(200)]
            while not held.disk.reached.is_set():
                await asyncio.sleep(0.01)
            async with asyncio.timeout(LONG_S):
                await broker.create_topic("other")
                await broker.publish("other", b"b")
                assert (await (await broker.group("other", "default")).receive(timeout=0)).body == b"b"
            assert not any(task.done() for task in wanting)
            for task in wanting[5:200] + wanting[205:]:
                task.cancel()
            held.disk.held = False
            held.disk.released.set()
            done = await asyncio.gather(*wanting, return_exceptions=True)
            assert not [each for each in done[:5] + done[200:205] if isinstance(each, BaseException)]

    held = Held(tmp_path / "data")
    held.broker.create_topic("slow")
    held.broker.close()
    asyncio.run(story(held))


_ALLOWED = (UnknownTopic, TopicExists, Closed, BadSettings)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_topics_that_come_go_grow_and_are_let_go_at_once_stay_whole(tmp_path, seed):
    settings = BrokerSettings(open_partitions=3, topic=TopicSettings(min_free_bytes=0, durability="os"))
    broker = holdfast.open_broker(tmp_path / "data", settings=settings)
    names = [f"t{number}" for number in range(5)]
    surprises: list[BaseException] = []
    begin = threading.Barrier(6)

    def work(number: int) -> None:
        rng = random.Random(seed * 100 + number)
        ways: list[Callable[[str], object]] = [
            lambda name: broker.create_topic(name, partitions=rng.randrange(1, 4)),
            lambda name: broker.publish(name, b"a"),
            lambda name: broker.publish(name, b"a"),
            lambda name: broker.group(name, f"g{rng.randrange(2)}").close(),
            lambda name: broker.add_partitions(name, 1),
            lambda name: broker.alter_topic(name, max_attempts=rng.randrange(1, 9)),
            broker.describe_topic,
            lambda name: broker.groups(),
            broker.delete_topic,
        ]
        begin.wait()
        for _ in range(60):
            try:
                rng.choice(ways)(rng.choice(names))
            except _ALLOWED:
                pass
            except BaseException as error:
                surprises.append(error)
                return

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    if seed % 2:
        threads[0].join(LONG_S)
        broker.close()
    for thread in threads:
        thread.join(2 * LONG_S)
        assert not thread.is_alive()
    for surprise in surprises:
        raise surprise
    broker.close()
    with holdfast.open_broker(tmp_path / "data", settings=settings) as broker:
        for name in broker.topics():
            broker.publish(name, b"last")
            bodies = [message.body for message in broker.group(name, "fresh").receive_many(1_000, timeout=0)]
            assert b"last" in bodies
        left = [entry.name for entry in (tmp_path / "data" / "topics").iterdir()]
        assert not [name for name in left if name.startswith(".")]
