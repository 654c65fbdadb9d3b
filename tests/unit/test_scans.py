"""Scans run few at a time, in turn between callers, with pauses, and not without end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from holdfast.env.world import Abandoned, checkpoint, checkpoints
from holdfast.errors import TooManyWaiters
from holdfast.server import turns as module
from holdfast.server.turns import MOST_WAITING, Full, Scan, Scans


def run(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 60))


class Gate:
    """Work that goes on until it is let go."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.go = threading.Event()
        self.ended = threading.Event()

    def __call__(self, scan: Scan) -> str:
        self.began.set()
        try:
            while not self.go.wait(0.001):
                scan.step()
        finally:
            self.ended.set()
        return threading.current_thread().name


def test_no_more_scans_run_than_there_are_workers_and_none_on_the_threads_of_other_calls() -> None:
    async def story() -> None:
        scans = Scans(2, 100)
        gates = [Gate() for _ in range(5)]
        tasks = [asyncio.create_task(scans.run("a", gate)) for gate in gates]
        for gate in gates[:2]:
            assert await asyncio.to_thread(gate.began.wait, 30)
        assert (scans.running, scans.waiting) == (2, 3)
        assert not any(gate.began.is_set() for gate in gates[2:])
        for gate in gates:
            gate.go.set()
        assert all(name.startswith("holdfast-scan") for name in await asyncio.gather(*tasks))
        await asyncio.sleep(0)
        assert (scans.running, scans.waiting) == (0, 0)
        await scans.close()

    run(story)


def test_callers_have_their_turn_one_after_the_other_however_many_one_has_sent() -> None:
    async def story() -> None:
        scans = Scans(1, 100)
        first, order = Gate(), []
        tasks = [asyncio.create_task(scans.run("greedy", first))]
        await asyncio.to_thread(first.began.wait, 30)
        for caller in ["greedy"] * 10 + ["b", "c", "b"]:
            tasks.append(asyncio.create_task(scans.run(caller, lambda _, name=caller: order.append(name))))
        await asyncio.sleep(0)
        first.go.set()
        await asyncio.gather(*tasks)
        assert order[:6] == ["greedy", "b", "c", "greedy", "b", "greedy"]
        await scans.close()

    run(story)


def test_who_has_too_many_waiting_is_refused_and_others_are_not() -> None:
    async def story() -> None:
        scans = Scans(1, 100)
        first = Gate()
        tasks = [asyncio.create_task(scans.run("greedy", first))]
        await asyncio.to_thread(first.began.wait, 30)
        tasks += [asyncio.create_task(scans.run("greedy", lambda _: None)) for _ in range(MOST_WAITING)]
        await asyncio.sleep(0)
        with pytest.raises(TooManyWaiters, match=f"{MOST_WAITING} of them yours"):
            await scans.run("greedy", lambda _: None)
        assert TooManyWaiters.retryable
        other = asyncio.create_task(scans.run("other", lambda _: "found"))
        await asyncio.sleep(0)
        first.go.set()
        assert await other == "found"
        await asyncio.gather(*tasks)
        assert scans.refused == 1
        await scans.close()

    run(story)


def test_a_scan_whose_caller_is_gone_ends_at_its_next_step_and_its_place_is_free() -> None:
    async def story() -> None:
        scans = Scans(1, 100)
        gate = Gate()
        task = asyncio.create_task(scans.run("a", gate))
        waiting = asyncio.create_task(scans.run("b", lambda _: None))
        await asyncio.to_thread(gate.began.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(gate.ended.wait, 30)
        await waiting
        await scans.close()
        assert not gate.go.is_set()

    run(story)


def test_one_who_leaves_the_line_takes_nobodys_place() -> None:
    async def story() -> None:
        scans = Scans(1, 100)
        gate = Gate()
        first = asyncio.create_task(scans.run("a", gate))
        await asyncio.to_thread(gate.began.wait, 30)
        gone = asyncio.create_task(scans.run("b", lambda _: None))
        await asyncio.sleep(0)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        assert scans.waiting == 0
        late = asyncio.create_task(scans.run("b", lambda _: "found"))
        await asyncio.sleep(0)
        gate.go.set()
        await first
        assert await late == "found"
        await asyncio.sleep(0)
        assert scans.running == 0
        await scans.close()

    run(story)


def test_what_a_scan_raises_reaches_its_caller_and_the_place_is_free() -> None:
    async def story() -> None:
        scans = Scans(1, 100)

        def fail(_: Scan) -> None:
            raise ValueError("no")

        for _ in range(3):
            with pytest.raises(ValueError, match="no"):
                await scans.run("a", fail)
        assert await scans.run("a", lambda _: 1) == 1
        await scans.close()

    run(story)


def test_a_scan_stops_at_its_limit_and_remembers_the_last_place_that_it_saw() -> None:
    scan = Scan(3)
    for offset in (5, 7, 9):
        scan.look(0, offset)
    with pytest.raises(Full):
        scan.look(0, 11)
    assert scan.looked == 3
    assert scan.mark is not None
    assert scan.mark.text == "0.9.0.0"


def test_a_scan_pauses_every_few_messages_so_that_others_get_the_interpreter() -> None:
    scan = Scan(10_000)
    pauses = []
    scan._never.wait = pauses.append  # type: ignore[method-assign,assignment]
    for offset in range(1_000):
        scan.look(0, offset)
    assert len(pauses) == 1_000 // module._STRETCH


def test_whatever_reads_on_a_scans_thread_ends_when_nobody_waits_for_it() -> None:
    scan = Scan(1)

    def work() -> None:
        scan.abandoned = True
        checkpoint()

    with pytest.raises(Abandoned):
        scan.run(work)
    checkpoint()  # elsewhere it is nothing
    with checkpoints(lambda: (_ for _ in ()).throw(KeyError("here"))), pytest.raises(KeyError):
        checkpoint()
