"""Consumers that wait in line: first come, first served, and no wake-up is ever lost."""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack
from typing import Any

import pytest

import holdfast
from holdfast import Empty
from holdfast.api.drafts import Bodies
from holdfast.broker.waiters import TaskWaiter, ThreadWaiter, Waiters
from holdfast.env import ManualClock, SeededIds, SystemClock, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.local.aio.broker import queue_here_async
from holdfast.server.served import MOST_AT_ONCE, ServedGroup, wanted_at_once
from tests.unit.queues import Place


class Noting:
    """One who stands in line and only notes that it was woken."""

    def __init__(self) -> None:
        self.woken = False
        self.ticket = 0
        self.count = 1

    def wake(self) -> None:
        self.woken = True


def test_the_first_in_line_is_woken_first():
    waiters, first, second = Waiters(), Noting(), Noting()
    with waiters.in_line(first), waiters.in_line(second):
        assert (len(waiters), bool(waiters)) == (2, True)
        waiters.wake()
        assert (first.woken, second.woken, len(waiters)) == (True, False, 1)
        waiters.wake()
        assert second.woken
        waiters.wake()  # nobody is left
    assert (len(waiters), bool(waiters)) == (0, False)


def test_who_comes_back_with_nothing_stands_where_it_stood():
    waiters, first, second, third = Waiters(), Noting(), Noting(), Noting()
    with waiters.in_line(first), waiters.in_line(second):
        waiters.wake()
        with waiters.in_line(third), waiters.in_line(first):  # what it was woken for was gone
            waiters.wake()
            assert (first.woken, second.woken, third.woken) == (True, False, False)
            waiters.wake()
            assert (second.woken, third.woken) == (True, False)


def test_as_many_are_woken_as_asked():
    waiters, line = Waiters(), [Noting() for _ in range(5)]
    for each in line:
        waiters._line.append(each)
    waiters.wake(0)
    waiters.wake(3)
    assert [each.woken for each in line] == [True, True, True, False, False]
    waiters.wake_all()
    assert all(each.woken for each in line)


def test_who_leaves_the_line_is_not_woken():
    waiters, first, second = Waiters(), Noting(), Noting()
    with waiters.in_line(second):
        with waiters.in_line(first):
            pass
        waiters.wake(2)
        assert (first.woken, second.woken) == (False, True)


def test_who_is_woken_and_fails_hands_the_wake_up_on():
    waiters, first, second = Waiters(), Noting(), Noting()
    waiters._line.append(first)
    with pytest.raises(KeyboardInterrupt), waiters.in_line(second):
        raise KeyboardInterrupt
    assert not first.woken
    failing = Noting()
    waiters._line.clear()
    with pytest.raises(KeyboardInterrupt), waiters.in_line(failing):
        waiters._line.append(second)
        waiters.wake()
        assert failing.woken
        raise KeyboardInterrupt
    assert second.woken


def test_standing_in_line_again_begins_anew():
    waiters, first = Waiters(), Noting()
    with waiters.in_line(first):
        waiters.wake()
    with waiters.in_line(first):
        assert not first.woken
        assert len(waiters) == 1


def test_a_thread_wakes_when_it_is_woken():
    waiter = ThreadWaiter(SystemClock())
    done = threading.Event()

    def wait() -> None:
        waiter.wait(None)
        done.set()

    thread = threading.Thread(target=wait)
    thread.start()
    waiter.wake()
    assert done.wait(4)
    thread.join()
    assert waiter.woken


def test_a_thread_that_was_woken_before_does_not_wait():
    clock = ManualClock()
    waiter = ThreadWaiter(clock)
    waiter.wake()
    waiter.wait(3)
    assert clock.monotonic_ns() == 0
    waiter.wait(3)
    assert clock.monotonic_ns() == 3_000_000_000


def test_who_waits_for_a_time_gets_it_on_a_clock_that_is_moved():
    clock = ManualClock()
    ThreadWaiter(clock).wait(3_600)
    assert clock.monotonic_ns() == 3_600_000_000_000
    ThreadWaiter(clock).wait(None)  # until another thread wakes it, or for a look
    assert clock.monotonic_ns() == 3_600_000_000_000


def test_a_task_is_woken_from_another_thread():
    async def story() -> bool:
        waiter = TaskWaiter(SystemClock())
        threading.Timer(0.01, waiter.wake).start()
        await waiter.wait(4)
        return waiter.woken

    assert asyncio.run(story())


@pytest.mark.parametrize("steps", range(6))
def test_a_task_that_is_cancelled_just_as_it_is_woken_ends(steps: int):
    async def story() -> bool:
        waiter = TaskWaiter(SystemClock())
        task = asyncio.create_task(waiter.wait(None))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiter.wake()
        for _ in range(steps):
            await asyncio.sleep(0)
        running = task.cancel()
        await asyncio.wait([task])
        return not running or task.cancelled()

    assert asyncio.run(story())


def test_waking_a_task_whose_loop_is_closed_harms_nobody():
    async def story() -> TaskWaiter:
        return TaskWaiter(SystemClock())

    asyncio.run(story()).wake()


def test_a_wake_up_that_comes_as_the_time_ends_goes_to_the_next_in_line():
    class Clock(ManualClock):
        """At the last look at the time a message arrives."""

        when_late = None

        def monotonic_ns(self) -> int:
            now_ns = super().monotonic_ns()
            if self.when_late is not None and now_ns >= 2_000_000_000:
                call, self.when_late = self.when_late, None
                call()
            return now_ns

    clock = Clock()
    world = World(clock=clock, disk=SimulatedDisk(), ids=SeededIds(1))
    q = holdfast.open("/data/jobs", world=world, min_free_bytes=0)
    behind = Noting()
    waiters = q._port.deliveries[0].waiters

    def arrive() -> None:
        waiters._line.append(behind)  # another consumer, who came later
        q.put(b"x")

    clock.when_late = arrive
    try:
        m = q.get(timeout=2)
    except holdfast.Empty:
        assert behind.woken
    else:
        assert m.body == b"x"
    q.close()


# Nobody who comes later is served before those who wait


class Line:
    """A queue at which some stand in line, asleep; they take their turns when the test says so."""

    def __init__(self, *counts: int) -> None:
        self.place = Place(durability="os")
        self.q, self.group = self.place.q, self.place.q._port.queue_group
        self.waiters = [ThreadWaiter(self.place.clock, count) for count in counts]
        self.stays = [ExitStack() for _ in counts]
        for stay, waiter in zip(self.stays, self.waiters, strict=True):
            stay.enter_context(self.group.in_line(waiter))

    @property
    def woken(self) -> list[bool]:
        return [waiter.woken for waiter in self.waiters]

    def turn(self, number: int, count: int | None = None) -> int:
        """How many one of them gets who stands there again and looks."""
        waiter = self.waiters[number]
        self.group.waiters.stand(waiter)
        return self.take(count or waiter.count, waiter)

    def take(self, count: int, waiter: ThreadWaiter | None = None) -> int:
        found = self.group.receive(count, lease_ms=60_000, holder="ann", detached=False, waiter=waiter)
        return sum(len(taken) for _, taken in found)


def test_who_comes_while_another_is_on_its_way_to_a_message_finds_nothing():
    line = Line(1)
    line.q.put(b"a")
    assert line.woken == [True]
    assert line.take(1) == 0
    with pytest.raises(Empty):
        line.q.get(timeout=0)
    with pytest.raises(Empty):
        line.q.get(timeout=0, lease=5)
    assert line.q.get_many(5, timeout=0) == []
    assert line.turn(0) == 1


def test_who_comes_later_and_has_time_waits_behind_those_in_line():
    line = Line(1)
    line.q.put(b"a")
    got: list[bytes] = []
    thread = threading.Thread(target=lambda: got.append(line.q.get().body))
    thread.start()
    while thread.is_alive() and not line.q.stats().waiters:
        pass
    assert line.turn(0) == 1
    line.stays[0].close()
    line.q.put(b"b")
    thread.join(30)
    assert got == [b"b"]


def test_who_comes_later_gets_what_those_in_line_leave():
    line = Line(1, 5)
    line.q.put_many([b"%d" % n for n in range(8)])
    assert [line.take(1), line.take(9), line.take(1)] == [1, 1, 0]
    assert [line.turn(1), line.turn(0)] == [5, 1]


def test_who_was_woken_goes_before_those_behind_it_whoever_runs_first():
    line = Line(1, 1, 1)
    line.q.put(b"a")
    line.group.waiters.wake_all()
    assert [line.turn(2), line.turn(1), line.turn(0)] == [0, 0, 1]


def test_who_comes_before_anybody_was_told_of_a_message_leaves_it_to_them_and_wakes_them():
    line = Line(1, 1)
    line.q._port.deliveries[0].partition.log.append([b"a"], durability="os")
    assert line.woken == [False, False]
    assert line.take(1) == 0
    assert line.woken == [True, False]


def test_who_leaves_with_less_than_it_might_have_taken_wakes_the_next():
    line = Line(5, 1, 1)
    line.q.put_many([b"a", b"b", b"c"])
    assert [line.turn(1), line.turn(2)] == [0, 0]
    assert line.turn(0, count=1) == 1
    assert line.woken == [False, False, False]
    line.stays[0].close()
    assert line.woken == [False, True, False]
    assert line.turn(1) == 1
    line.stays[1].close()
    assert line.woken[2]
    assert line.turn(2) == 1


def test_who_leaves_when_nothing_is_left_wakes_nobody():
    line = Line(1, 1)
    line.q.put(b"a")
    assert line.turn(0) == 1
    line.stays[0].close()
    assert line.woken == [False, False]


def test_who_fails_in_its_turn_leaves_the_message_to_the_next():
    line = Line(1, 1)
    line.q.put(b"a")
    line.group.waiters.stand(line.waiters[0])
    assert line.woken == [False, False]
    with pytest.raises(KeyboardInterrupt), line.stays[0]:
        raise KeyboardInterrupt
    assert line.woken == [False, True]
    assert line.turn(1) == 1


def test_nobody_waits_for_one_who_was_woken_and_does_not_come():
    line = Line(1)
    line.q.put(b"a")
    line.place.clock.advance(ms=900)
    assert line.take(1) == 0
    line.place.clock.advance(ms=101)
    assert line.take(1) == 1
    assert line.turn(0) == 0


def test_a_call_that_takes_many_has_its_place_in_line_for_the_first_of_them():
    line = Line(200, 1)
    served: Any = ServedGroup(line.q._port.engine, line.group, Bodies(None))
    line.q.put_many([b"x"] * 150)
    wanted = wanted_at_once(200, 0, None, None)
    assert served.port.take_ready(wanted) == []
    assert line.turn(1) == 0
    found = served.port.take_ready(wanted, line.waiters[0])
    assert sum(len(taken) for _, taken in found) == MOST_AT_ONCE


def test_a_thread_that_waits_is_served_before_one_that_comes_by(tmp_path):
    with holdfast.open(tmp_path / "jobs", durability="os", min_free_bytes=0) as q:
        got: list[bytes] = []

        def wait() -> None:
            message = q.get(timeout=30)
            got.append(message.body)
            message.ack()

        for n in range(30):
            thread = threading.Thread(target=wait)
            thread.start()
            while not q.stats().waiters:
                pass
            q.put(b"%d" % n)
            with pytest.raises(Empty):
                q.get(timeout=0)
            thread.join(30)
        assert got == [b"%d" % n for n in range(30)]


def test_a_task_that_waits_is_served_before_one_that_comes_by():
    async def story() -> None:
        place = Place(durability="os")
        q: Any = queue_here_async(place.q._port.engine, place.q._port.queue_group, None)
        waiting = asyncio.create_task(q.get())
        while not place.q.stats().waiters:
            await asyncio.sleep(0)
        place.q.put(b"a")
        with pytest.raises(Empty):
            await q.get_nowait()
        message = await waiting
        assert message.body == b"a"
        await message.ack()

    asyncio.run(story())


def test_thousands_in_line_are_counted_and_not_looked_at_one_by_one():
    clock, looks, line = ManualClock(), [0], []

    class Looked(ThreadWaiter):
        def is_late(self) -> bool:
            looks[0] += 1
            return super().is_late()

    waiters = Waiters()
    with ExitStack() as stack:
        for _ in range(2_000):
            line.append(Looked(clock))
            stack.enter_context(waiters.in_line(line[-1]))
        assert [waiters.claims_before(each) for each in line] == list(range(2_000))
        waiters.wake(1_000)
        assert [waiters.claims_before(each) for each in line] == list(range(2_000))
        clock.advance(seconds=2)  # they do not come
        assert [waiters.claims_before(each) for each in line[1_000:]] == list(range(1_000))
        waiters.stand(line[0])  # one does after all
        assert waiters.claims_before(line[1_000]) == 1
        assert waiters.claims_before(None) == 1_001
    assert looks[0] < 4 * 2_000
    assert not waiters._on_the_way
    assert not waiters._late
    assert not waiters._greedy
