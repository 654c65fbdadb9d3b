"""The gate of group commit: one sync serves all who wait, and nobody is let through before it."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from holdfast.errors import DiskFailed, HoldfastError
from holdfast.storage.gate import SyncGate

# Far longer than anything here takes: only a gate that hangs comes near it.
PATIENCE_S = 30


class HeldSync:
    """A sync that ends when it is told to, in the way it is told to."""

    def __init__(self) -> None:
        self.written = 0
        self.threads: list[threading.Thread] = []  # who did each sync
        self._begun = threading.Semaphore(0)
        self._endings: list[BaseException | None] = []
        self._may_end = threading.Semaphore(0)

    def __call__(self) -> int:
        target = self.written
        self.threads.append(threading.current_thread())
        self._begun.release()
        assert self._may_end.acquire(timeout=PATIENCE_S), "nobody let this sync end"
        ending = self._endings.pop(0)
        if ending is not None:
            raise ending
        return target

    def write(self, end: int) -> int:
        self.written = max(self.written, end)
        return end

    def wait_until_begun(self) -> None:
        assert self._begun.acquire(timeout=PATIENCE_S), "no sync was begun"

    def end(self, error: BaseException | None = None) -> None:
        self._endings.append(error)
        self._may_end.release()

    def never_hold(self) -> None:
        for _ in range(1000):
            self.end()


class Crowd:
    """Threads that wait at a gate, and loops in threads of their own with tasks that wait there."""

    def __init__(self, gate: SyncGate) -> None:
        self._gate = gate
        self._loops: list[tuple[asyncio.AbstractEventLoop, threading.Thread]] = []

    def wait(self, end: int) -> Future[None]:
        """One more thread waits for this end; returns when it runs."""
        runs = threading.Event()
        done: Future[None] = Future()

        def wait() -> None:
            runs.set()
            try:
                done.set_result(self._gate.wait(end))
            except BaseException as error:
                done.set_exception(error)

        # A daemon: should the gate hang, the tests still end.
        threading.Thread(target=wait, name="waiter", daemon=True).start()
        assert runs.wait(PATIENCE_S)
        return done

    def loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        self._loops.append((loop, thread))
        return loop

    def wait_in_task(self, loop: asyncio.AbstractEventLoop, end: int) -> Future[None]:
        """One more task waits for this end; returns when it does."""
        waits = threading.Event()

        async def wait() -> None:
            loop.call_soon(waits.set)  # the loop gets to this once the task is suspended, or done
            await self._gate.wait_async(end)

        future = asyncio.run_coroutine_threadsafe(wait(), loop)
        assert waits.wait(PATIENCE_S)
        return future

    def close(self) -> None:
        for loop, thread in self._loops:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(PATIENCE_S)
            loop.close()


@pytest.fixture
def sync() -> Iterator[HeldSync]:
    held = HeldSync()
    yield held
    held.never_hold()  # a test that failed leaves no thread behind


@pytest.fixture
def gate(sync: HeldSync) -> Iterator[SyncGate]:
    gate = SyncGate(sync, 0)
    yield gate
    sync.never_hold()
    gate.close()


@pytest.fixture
def crowd(gate: SyncGate, sync: HeldSync) -> Iterator[Crowd]:
    crowd = Crowd(gate)
    yield crowd
    sync.never_hold()
    crowd.close()


def all_done(waiters: list[Future[None]]) -> None:
    for waiter in waiters:
        assert waiter.result(PATIENCE_S) is None


def errors_of(waiters: list[Future[None]]) -> list[BaseException | None]:
    return [waiter.exception(PATIENCE_S) for waiter in waiters]


def test_one_sync_serves_every_thread_and_task_that_waits(gate, sync, crowd):
    first = crowd.wait(sync.write(1))
    sync.wait_until_begun()
    loop = crowd.loop()
    others = [crowd.wait(sync.write(2 + i)) for i in range(7)]
    others += [crowd.wait_in_task(loop, sync.write(9 + i)) for i in range(64)]
    sync.end()
    first.result(PATIENCE_S)
    sync.wait_until_begun()
    sync.end()
    all_done(others)
    assert len(sync.threads) == 2
    assert gate.synced_end == 72


def test_nobody_is_let_through_by_a_sync_that_began_before_the_write(gate, sync, crowd):
    early = crowd.wait(sync.write(1))
    sync.wait_until_begun()
    late_task = crowd.wait_in_task(crowd.loop(), sync.write(2))
    late_thread = crowd.wait(sync.write(3))
    sync.end()
    early.result(PATIENCE_S)
    sync.wait_until_begun()  # the second one; the first is over, and has let nobody else through
    assert gate.synced_end == 1
    assert not late_task.done()
    assert not late_thread.done()
    sync.end()
    all_done([late_task, late_thread])


def test_what_is_durable_already_costs_no_sync(sync):
    gate = SyncGate(sync, 5)
    gate.wait(5)
    asyncio.run(gate.wait_async(3))
    assert sync.threads == []


def test_a_failed_sync_reaches_all_who_are_not_covered_and_none_who_are(gate, sync, crowd):
    loop = crowd.loop()
    covered = [crowd.wait(sync.write(5)), crowd.wait_in_task(loop, 4)]
    sync.wait_until_begun()
    uncovered = [crowd.wait(sync.write(6 + i)) for i in range(4)]
    uncovered += [crowd.wait_in_task(loop, sync.write(10 + i)) for i in range(8)]
    sync.end()
    all_done(covered)
    sync.wait_until_begun()
    sync.end(DiskFailed("the disk is gone"))
    errors = errors_of(uncovered)
    assert {type(error) for error in errors} == {DiskFailed}
    assert {str(error) for error in errors} == {"the disk is gone"}
    assert len({id(error) for error in errors}) == len(errors), "a traceback belongs to one thread"


def test_after_a_failure_nothing_is_synced_any_more(gate, sync, crowd):
    sync.write(3)
    sync.end()
    gate.wait(3)
    sync.write(4)
    sync.end(DiskFailed("the disk is gone"))
    for _ in range(3):
        with pytest.raises(DiskFailed):
            gate.wait(4)
        with pytest.raises(DiskFailed):
            asyncio.run(gate.wait_async(4))
    gate.wait(3)
    asyncio.run(gate.wait_async(3))
    assert len(sync.threads) == 2


def test_an_error_that_nobody_foresaw_hangs_nobody(gate, sync, crowd):
    leader = crowd.wait(sync.write(1))
    sync.wait_until_begun()
    others = [crowd.wait(sync.write(2)), crowd.wait_in_task(crowd.loop(), sync.write(3))]
    sync.end(ZeroDivisionError("a bug"))
    assert isinstance(leader.exception(PATIENCE_S), (ZeroDivisionError, DiskFailed))
    assert {type(error) for error in errors_of(others)} == {DiskFailed}
    assert "a bug" in str(others[0].exception())
    assert len(sync.threads) == 1


def test_an_error_in_the_helper_thread_reaches_the_tasks(gate, sync, crowd):
    task = crowd.wait_in_task(crowd.loop(), sync.write(1))
    sync.wait_until_begun()
    sync.end(ZeroDivisionError("a bug"))
    assert isinstance(task.exception(PATIENCE_S), DiskFailed)


def test_a_leader_who_is_interrupted_leaves_the_gate_open_for_others(gate, sync, crowd):
    leader = crowd.wait(sync.write(1))
    sync.wait_until_begun()
    others = [crowd.wait(sync.write(2)), crowd.wait_in_task(crowd.loop(), sync.write(3))]
    sync.end(KeyboardInterrupt())
    assert isinstance(leader.exception(PATIENCE_S), KeyboardInterrupt)
    sync.wait_until_begun()
    sync.end()
    all_done(others)


def test_a_cancelled_task_disturbs_nobody(gate, sync, crowd):
    loop = crowd.loop()
    tasks = [crowd.wait_in_task(loop, sync.write(1 + i)) for i in range(4)]
    sync.wait_until_begun()
    assert tasks[1].cancel()
    sync.end()
    sync.end()
    all_done([tasks[0], *tasks[2:]])
    assert tasks[1].cancelled()


def test_a_cancelled_task_is_no_reason_not_to_sync(gate, sync, crowd):
    task = crowd.wait_in_task(crowd.loop(), sync.write(1))
    sync.wait_until_begun()
    task.cancel()
    sync.end()
    crowd.wait(1).result(PATIENCE_S)
    assert gate.synced_end == 1


def abandoned(gate: SyncGate, loop: asyncio.AbstractEventLoop, end: int) -> None:
    """A task that waits for this end in a loop that is closed without asking it."""

    async def begin() -> asyncio.Task[None]:
        task = asyncio.ensure_future(gate.wait_async(end))
        await asyncio.sleep(0)
        task._log_destroy_pending = False  # that is the point of the test
        return task

    loop.run_until_complete(begin())
    loop.close()


def test_a_loop_that_was_closed_disturbs_nobody(gate, sync, crowd):
    abandoned(gate, asyncio.new_event_loop(), sync.write(1))
    sync.wait_until_begun()
    others = [crowd.wait(1), crowd.wait_in_task(crowd.loop(), 1)]
    sync.end()
    all_done(others)


class LoopThatSeemsOpen(asyncio.SelectorEventLoop):
    """Closes between the question whether it is closed and what is done about the answer."""

    seems_open = False

    def is_closed(self) -> bool:
        return not self.seems_open and super().is_closed()

    def call_soon_threadsafe(self, *args: object, **context: object) -> asyncio.Handle:
        if super().is_closed():
            raise RuntimeError("Event loop is closed")
        return super().call_soon_threadsafe(*args, **context)


def test_a_loop_that_closes_at_the_wrong_moment_disturbs_nobody(gate, sync, crowd):
    loop = LoopThatSeemsOpen()
    abandoned(gate, loop, sync.write(1))
    loop.seems_open = True
    sync.wait_until_begun()
    others = [crowd.wait(1), crowd.wait_in_task(crowd.loop(), 1)]
    sync.end()
    sync.end()
    try:
        all_done(others)
    finally:
        loop.seems_open = False


def test_a_thread_that_led_hands_over_to_the_tasks(gate, sync, crowd):
    leader = crowd.wait(sync.write(1))
    sync.wait_until_begun()
    task = crowd.wait_in_task(crowd.loop(), sync.write(2))
    sync.end()
    leader.result(PATIENCE_S)  # it does not stay to sync for others
    sync.wait_until_begun()
    sync.end()
    task.result(PATIENCE_S)
    assert sync.threads[0].name == "waiter"
    assert sync.threads[1].name.startswith("holdfast-sync")


def test_two_event_loops_wait_at_the_same_gate(gate, sync, crowd):
    first, second = crowd.loop(), crowd.loop()
    tasks = [crowd.wait_in_task(first, sync.write(1))]
    sync.wait_until_begun()
    tasks += [crowd.wait_in_task(loop, sync.write(2 + i)) for i, loop in enumerate([first, second] * 16)]
    sync.end()
    sync.wait_until_begun()
    sync.end()
    all_done(tasks)
    assert len(sync.threads) == 2


def test_a_loop_goes_on_while_its_tasks_wait(gate, sync, crowd):
    loop = crowd.loop()
    task = crowd.wait_in_task(loop, sync.write(1))
    sync.wait_until_begun()
    assert asyncio.run_coroutine_threadsafe(asyncio.sleep(0, "alive"), loop).result(PATIENCE_S) == "alive"
    assert not task.done()
    sync.end()
    task.result(PATIENCE_S)


def test_closing_ends_the_helper_thread(sync):
    gate = SyncGate(sync, 0)
    sync.end()
    asyncio.run(gate.wait_async(sync.write(1)))
    assert sync.threads[0].is_alive()
    gate.close()
    assert not sync.threads[0].is_alive()


@pytest.mark.parametrize("used", [True, False])
def test_who_comes_to_a_closed_gate_gets_an_answer(sync, used):
    gate = SyncGate(sync, 0)
    if used:
        sync.end()
        asyncio.run(gate.wait_async(sync.write(1)))
    gate.close()
    sync.never_hold()
    sync.write(2)
    crowd = Crowd(gate)
    loop = crowd.loop()
    late = [crowd.wait_in_task(loop, 2), crowd.wait(2), crowd.wait_in_task(loop, 2)]
    try:
        for error in errors_of(late):
            assert error is None or isinstance(error, HoldfastError)
    finally:
        crowd.close()
        gate.close()


def test_a_task_that_came_just_before_the_gate_closed_gets_an_answer(sync):
    gate = SyncGate(sync, 0)
    sync.never_hold()

    async def close_behind_it() -> BaseException | None:
        task = asyncio.ensure_future(gate.wait_async(sync.write(1)))
        await asyncio.sleep(0)  # it waits now
        gate.close()
        await asyncio.wait([task], timeout=PATIENCE_S)
        assert task.done(), "it waits for ever"
        return task.exception()

    error = asyncio.run(close_behind_it())
    assert error is None or isinstance(error, HoldfastError)


def test_nobody_is_ever_let_through_too_early(scale):
    """Many threads and tasks at once, with a sync that takes no time: the order is left to chance."""
    written, durable = 0, 0
    lock = threading.Lock()

    def write() -> int:
        nonlocal written
        with lock:
            written += 1
            return written

    def sync() -> int:
        nonlocal durable
        with lock:
            target = written
        durable = target
        return target

    gate = SyncGate(sync, 0)

    def in_a_thread(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(scale(200, 20_000)):
            end = write()
            if rng.random() < 0.2:
                continue
            gate.wait(end)
            assert durable >= end

    async def in_a_task() -> None:
        for _ in range(scale(20, 2_000)):
            end = write()
            await gate.wait_async(end)
            assert durable >= end

    async def in_tasks() -> None:
        await asyncio.gather(*(in_a_task() for _ in range(32)))

    with ThreadPoolExecutor(10) as pool:
        waiting = [pool.submit(in_a_thread, seed) for seed in range(8)]
        waiting += [pool.submit(asyncio.run, in_tasks()) for _ in range(2)]
        for future in waiting:
            future.result()
    gate.close()


def test_tasks_are_served_by_their_own_loop_when_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch):
    ends = iter((1, 2))
    gate = SyncGate(lambda: next(ends), 0)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def story() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            await asyncio.wait_for(gate.wait_async(1), PATIENCE_S)
        await asyncio.wait_for(gate.wait_async(2), PATIENCE_S)

    asyncio.run(story())
    gate.close()
