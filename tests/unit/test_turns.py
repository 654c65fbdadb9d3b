"""A caller that asks for much waits for itself, and nobody else waits for it."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest

from holdfast.server.turns import CALLER, CallTurns, FairThreads, Pool, other_turns

_PATIENCE_S = 60


def test_so_many_calls_of_one_caller_begin_in_a_round_and_others_need_not_wait_for_the_rest():
    async def story() -> list[str]:
        turns, begun = CallTurns(at_once=3), []

        async def call(name: str, number: int) -> None:
            turn = turns.begin(name)
            if turn is not None:
                await turn
            begun.append(f"{name}{number}")

        flood = [asyncio.ensure_future(call("a", i)) for i in range(9)]
        other = [asyncio.ensure_future(call("b", i)) for i in range(2)]
        await asyncio.gather(*flood, *other)
        for _ in range(3):  # rounds without calls
            await asyncio.sleep(0)
        assert not turns._lines
        assert not turns._begun
        assert not turns._round_is_due
        return begun

    begun = asyncio.run(story())
    assert [name for name in begun if name[0] == "a"] == [f"a{i}" for i in range(9)], "in their order"
    assert begun.index("b1") == 4, "behind those of this round, before all that stand in line"


def test_of_the_long_calls_of_one_caller_one_slice_is_done_in_a_round():
    async def story() -> None:
        rounds, done = 0, []

        async def long(caller: str, name: str, slices: int) -> None:
            CALLER.set(caller)
            for _ in range(slices):
                done.append((rounds, caller, name))
                await other_turns()

        async def count() -> None:
            nonlocal rounds
            while True:
                await asyncio.sleep(0)
                rounds += 1

        beside = asyncio.ensure_future(count())
        gone = asyncio.ensure_future(long("a", "gone", 50))
        tasks = [asyncio.ensure_future(long("a", f"{i}", 5)) for i in range(4)]
        tasks.append(asyncio.ensure_future(long("b", "0", 5)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait_for(asyncio.gather(*tasks), _PATIENCE_S)
        beside.cancel()
        later = [(at, caller) for at, caller, _ in done if at]  # behind the first slices, which are calls that begin
        assert len(later) == len(set(later)), "one a round"
        assert max(at for at, caller, _ in done if caller == "b") < max(at for at, caller, _ in done if caller == "a")
        assert [name for _, caller, name in done if caller == "a" and name != "gone"] == ["0", "1", "2", "3"] * 5

    asyncio.run(story())


def test_who_gives_up_its_turn_takes_none_from_those_behind_it():
    async def story() -> None:
        turns = CallTurns(at_once=1)
        assert turns.begin("a") is None
        gone, stays = turns.begin("a"), turns.begin("a")
        assert gone is not None
        assert stays is not None
        gone.cancel()
        await asyncio.wait_for(stays, _PATIENCE_S)

    asyncio.run(story())


class Work:
    """Something that takes until it is let go, and notes that it was begun."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.some_began = threading.Condition()
        self.go_on = threading.Event()

    def do(self, name: str) -> str:
        with self.some_began:
            self.begun.append(name)
            self.some_began.notify_all()
        assert self.go_on.wait(_PATIENCE_S)
        return name

    def wait_for(self, count: int) -> None:
        with self.some_began:
            assert self.some_began.wait_for(lambda: len(self.begun) >= count, _PATIENCE_S)


def submitted(threads: FairThreads, caller: str | None, work: Any, *args: Any) -> Future[Any]:
    def submit() -> Future[Any]:
        CALLER.set(caller)
        return threads.submit(work, *args)

    return contextvars.copy_context().run(submit)


def test_one_caller_never_has_all_threads():
    work, threads = Work(), FairThreads(each=2)
    try:
        many = [submitted(threads, "a", work.do, "a") for _ in range(50)]
        work.wait_for(2)
        other = submitted(threads, "b", work.do, "b")
        work.wait_for(3)
        assert sorted(work.begun) == ["a", "a", "b"], "the others of the first caller have not begun"
        many[-1].cancel()
        work.go_on.set()
        assert other.result(_PATIENCE_S) == "b"
        assert [each.result(_PATIENCE_S) for each in many[:-1]] == ["a"] * 49
        nobody = submitted(threads, None, work.do, "c")
        assert nobody.result(_PATIENCE_S) == "c"
    finally:
        work.go_on.set()
        threads.shutdown()
    assert not threads._lines
    assert not threads._running


def test_an_error_of_the_work_is_told_and_the_next_thing_is_done():
    def fail() -> None:
        raise LookupError("not there")

    with FairThreads(each=1) as threads:
        failed = submitted(threads, "a", fail)
        after = submitted(threads, "a", int)
        assert isinstance(failed.exception(_PATIENCE_S), LookupError)
        assert after.result(_PATIENCE_S) == 0


def test_what_stands_in_line_when_the_threads_end_is_given_up():
    work, threads = Work(), FairThreads(each=1)
    first = submitted(threads, "a", work.do, "a")
    rest = [submitted(threads, "a", work.do, "a") for _ in range(3)]
    work.wait_for(1)
    threads.shutdown(wait=False)
    work.go_on.set()
    assert first.result(_PATIENCE_S) == "a"
    threads.shutdown()
    assert all(each.cancelled() for each in rest)


def test_large_bodies_of_one_caller_leave_a_thread_to_others():
    async def story() -> None:
        pool, go_on, done = Pool(), threading.Event(), []

        def slow(_: object, name: str) -> None:
            assert go_on.wait(_PATIENCE_S)
            done.append(name)

        def of(caller: str, work: Any, *given: str) -> asyncio.Task[None]:
            context = contextvars.copy_context()
            context.run(CALLER.set, caller)
            return asyncio.get_running_loop().create_task(pool.run(work, *given), context=context)

        flood = [of("a", slow, f"a{i}") for i in range(6)]
        await asyncio.sleep(0)
        await asyncio.wait_for(of("b", lambda _: None), _PATIENCE_S)
        assert done == []
        go_on.set()
        await asyncio.gather(*flood)
        assert done == [f"a{i}" for i in range(6)]
        pool.close()

    asyncio.run(story())


@pytest.mark.parametrize("cancels", [True, False])
def test_nobody_waits_for_work_that_the_end_of_the_threads_leaves_undone(cancels: bool):
    threads = FairThreads(1, 1)
    begun, over = threading.Event(), threading.Event()

    def work() -> bool:
        begun.set()
        return over.wait(_PATIENCE_S)

    first = submitted(threads, "a", work)
    assert begun.wait(_PATIENCE_S)
    behind, in_line = submitted(threads, "b", work), [submitted(threads, "a", work) for _ in range(5_000)]
    threads.shutdown(wait=False, cancel_futures=cancels)
    over.set()
    assert first.result(_PATIENCE_S) is True
    assert outcome(behind) == ("cancelled" if cancels else True)
    assert set(map(outcome, in_line)) == {"cancelled"}


def outcome(future: Future[Any]) -> Any:
    try:
        return future.result(_PATIENCE_S)
    except CancelledError:
        return "cancelled"
