"""Consumers that wait in line: first come, first served, and no wake-up is ever lost."""

from __future__ import annotations

import asyncio
import threading

import pytest

import holdfast
from holdfast.broker.waiters import TaskWaiter, ThreadWaiter, Waiters
from holdfast.env import ManualClock, SeededIds, SystemClock, World
from holdfast.env.simdisk import SimulatedDisk


class Noting:
    """One who stands in line and only notes that it was woken."""

    def __init__(self) -> None:
        self.woken = False
        self.ticket = 0

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
    waiters = q._station.delivery.waiters

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
