"""Closing a queue or a broker ends the calls that wait on it, wherever the owner is."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import holdfast
import holdfast.aio
from tests.integration.http_gear import serving

LONG_S = 300  # nobody waits that long: a test that does fails
SOON_S = 15  # without the wake-up, a call behind a server notices when its poll ends, after 20 s


@pytest.fixture(params=["folder", "server"])
def place(request, tmp_path):
    if request.param == "folder":
        yield str(tmp_path / "jobs")
        return
    with serving(tmp_path / "jobs") as served:
        yield served.url


def is_waiting(since: float) -> None:
    """Give a call the time to get to its wait."""
    time.sleep(max(0.0, since + 0.5 - time.monotonic()))


def test_a_thread_that_waits_for_a_message_is_woken(place):
    queue = holdfast.open(place)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(queue.get, timeout=LONG_S)
        is_waiting(time.monotonic())
        queue.close()
        with pytest.raises(holdfast.Closed):
            waiting.result(SOON_S)


def test_a_thread_that_waits_for_a_lock_is_woken(place):
    with holdfast.open_broker(place) as holder, ThreadPoolExecutor() as pool:
        lock = holder.locks.acquire("nightly")
        other = holdfast.open_broker(place)
        waiting = pool.submit(other.locks.acquire, "nightly", wait=LONG_S)
        is_waiting(time.monotonic())
        other.close()
        with pytest.raises(holdfast.Closed):
            waiting.result(SOON_S)
        holder.locks.release(lock)


def test_a_task_that_waits_for_a_message_is_woken(place):
    async def story():
        queue = await holdfast.aio.open(place)
        waiting = asyncio.create_task(queue.get(timeout=LONG_S))
        await asyncio.sleep(0.5)
        await queue.close()
        with pytest.raises(holdfast.Closed):
            await asyncio.wait_for(waiting, SOON_S)

    asyncio.run(story())


def test_a_put_that_was_sent_before_is_answered(place):
    queue = holdfast.open(place)
    stop, stored, errors = threading.Event(), [], []

    def put():
        while not stop.is_set():
            try:
                stored.append(queue.put(b"x"))
            except holdfast.Closed:
                return
            except holdfast.HoldfastError as error:
                errors.append(error)
                return

    with ThreadPoolExecutor() as pool:
        puts = [pool.submit(put) for _ in range(4)]
        until = time.monotonic() + SOON_S
        while len(stored) < 100 and time.monotonic() < until:
            time.sleep(0.01)
        queue.close()
        stop.set()
        for one in puts:
            one.result(SOON_S)
    assert errors == []
    with holdfast.open(place) as again:
        assert again.stats().ready == len(stored)
