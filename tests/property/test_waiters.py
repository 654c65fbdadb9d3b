"""Those who wait are served in the order of their coming, whoever cancels, times out or comes by meanwhile."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.api.aio.group import AsyncGroup
from holdfast.broker.waiters import ThreadWaiter, Waiters
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.local.aio.group import AsyncLocalGroupPort

counts = st.sampled_from([1, 1, 1, 2, 5])
picks = st.integers(0, 20)
actions = st.one_of(
    st.tuples(st.just("wait"), counts, st.sampled_from([None, 1, 5])),
    st.tuples(st.just("look"), counts),
    st.tuples(st.just("put"), st.integers(1, 4), st.integers(0, 2)),
    st.tuples(st.just("cancel"), picks),
    st.tuples(st.just("give_back"), picks),
    st.tuples(st.just("ack"), picks),
    st.tuples(st.just("time"), st.sampled_from([0.5, 1, 5])),
    st.tuples(st.just("steps"), st.integers(1, 3)),
    st.tuples(st.just("rest")),
)
plans = st.lists(actions, min_size=5, max_size=40)


class StillClock(ManualClock):
    """Nobody looks by himself: whoever waits is woken, or its time is over, or it waits for ever."""

    def __init__(self) -> None:
        super().__init__()
        self._alarms: list[tuple[int, asyncio.Event]] = []

    async def wait_async(self, event: asyncio.Event, timeout_s: float | None) -> bool:
        if timeout_s is not None:
            self._alarms.append((self.monotonic_ns() + round(timeout_s * 1e9), event))
        return await event.wait()

    def run_on(self, seconds: float) -> None:
        self.advance(seconds=seconds)
        for at_ns, event in self._alarms:
            if at_ns <= self.monotonic_ns():
                event.set()


@dataclass
class Asked:
    """One who asked for messages, the how manieth of all, and what came of it."""

    number: int
    count: int
    task: asyncio.Task[Any] | None = None
    got: int = 0
    over: bool = False


class Story:
    """Tasks at a queue with a clock that stands still, and what must be so whatever they do."""

    def __init__(self, partitions: int, **settings: Any) -> None:
        self.clock = StillClock()
        world = World(clock=self.clock, disk=SimulatedDisk(), ids=SeededIds(1))
        self.broker = holdfast.open_broker("/data", world=world, durability="os")
        self.broker.create_topic("jobs", partitions=partitions, min_free_bytes=0)
        self.q = self.broker.group("jobs", "workers", lease_ms=3_600_000, **settings)
        port = self.q._port
        self.tasks_view: AsyncGroup[Any] = AsyncGroup(AsyncLocalGroupPort(port.engine, port.queue_group, port.bodies))
        self.asked: list[Asked] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.held: list[Any] = []

    @property
    def waiting(self) -> list[Asked]:
        return [each for each in self.asked if each.task is not None and not each.over]

    def wait(self, count: int, timeout_s: float | None) -> None:
        async def get() -> None:  # it has come when it begins to run
            asked = Asked(len(self.asked), count, asyncio.current_task())
            self.asked.append(asked)
            try:
                self.note(asked, await self.tasks_view.receive_many(count, timeout=timeout_s))
            finally:
                asked.over = True

        self.tasks.append(asyncio.ensure_future(get()))

    def look(self, count: int) -> None:
        asked = Asked(len(self.asked), count)
        self.asked.append(asked)
        self.note(asked, self.q.receive_many(count, timeout=0))

    def note(self, asked: Asked, messages: list[Any]) -> None:
        asked.got, asked.over = len(messages), True
        self.held += messages
        if not messages:
            later = [other.number for other in self.asked[asked.number + 1 :] if other.got]
            assert not later, f"{asked.number} got nothing, and {later} came later"

    def put(self, count: int, key: int) -> None:
        for _ in range(count):
            self.broker.publish("jobs", b"x", key=b"%d" % key if key else None)

    def cancel(self, pick: int) -> None:
        if self.waiting:
            self.waiting[pick % len(self.waiting)].task.cancel()

    def give_back(self, pick: int) -> Any:
        return self.held.pop(pick % len(self.held)).defer() if self.held else None

    def ack(self, pick: int) -> Any:
        return self.held.pop(pick % len(self.held)).ack() if self.held else None

    async def time(self, seconds: float) -> None:
        await self.steps(5)  # or those who were woken would be late, and not be waited for
        self.clock.run_on(seconds)

    async def steps(self, many: int) -> None:
        """Let those run who can, so many times."""
        for _ in range(many):
            await asyncio.sleep(0)

    async def rest(self) -> None:
        """Until nobody has anything to do; then nothing lies there while somebody waits, and nobody was passed over."""
        await self.steps(50)
        patient = [each.number for each in self.waiting]
        if patient:
            assert not self.q.peek(1), f"{patient} wait, and messages are ready"
            served = [each.number for each in self.asked if each.got and each.number > patient[0]]
            assert not served, f"{patient} wait, and {served} came later and were served"

    async def run(self, plan: list[tuple[Any, ...]]) -> None:
        for name, *arguments in plan:
            done = getattr(self, name)(*arguments)
            if isawaitable(done):
                await done
        await self.rest()
        for task in self.tasks:
            task.cancel()
        results = await asyncio.gather(*self.tasks, return_exceptions=True)
        wrong = [result for result in results if isinstance(result, AssertionError)]
        assert not wrong, wrong
        line = self.q._port.queue_group.waiters
        assert (list(line.standing), len(line)) == ([], 0)
        self.broker.close()


@pytest.mark.parametrize("partitions", [1, 3])
@given(plan=plans)
def test_nobody_is_passed_over_and_nothing_lies_while_somebody_waits(partitions: int, plan: list[tuple[Any, ...]]):
    asyncio.run(Story(partitions).run(plan))


@given(plan=plans)
def test_so_it_is_where_keys_hold_messages_back(plan: list[tuple[Any, ...]]):
    asyncio.run(Story(1, key_order=True).run(plan))


@given(plan=plans)
def test_so_it_is_where_a_limit_holds_messages_back(plan: list[tuple[Any, ...]]):
    asyncio.run(Story(1, key_group_concurrency=1).run(plan))


@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("stand"), st.integers(0, 9), st.integers(1, 3)),
            st.tuples(st.just("leave"), st.integers(0, 9), st.just(0)),
            st.tuples(st.just("wake"), st.integers(1, 4), st.just(0)),
            st.tuples(st.just("pass"), st.integers(1, 1_500), st.just(0)),
        ),
        max_size=60,
    )
)
def test_claims_are_those_of_all_before_who_are_not_late(steps: list[tuple[str, int, int]]):
    clock, waiters = ManualClock(), Waiters()
    places: dict[int, tuple[ExitStack, ThreadWaiter]] = {}
    for verb, number, count in steps:
        if verb == "stand" and number in places:
            waiters.stand(places[number][1])
        elif verb == "stand":
            stack, waiter = ExitStack(), ThreadWaiter(clock, count)
            stack.enter_context(waiters.in_line(waiter))
            places[number] = stack, waiter
        elif verb == "leave" and number in places:
            places.pop(number)[0].close()
        elif verb == "wake":
            waiters.wake(number)
        elif verb == "pass":
            clock.advance(ms=number)
        for waiter in [None, *waiters.standing]:
            before = waiters.standing if waiter is None else waiters.standing[: waiters.standing.index(waiter)]
            assert waiters.claims_before(waiter) == sum(each.count for each in before if not each.is_late())
    for stack, _ in places.values():
        stack.close()
    assert not waiters._on_the_way
    assert not waiters._late
