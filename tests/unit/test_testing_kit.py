"""The kit for users' tests: what it promises in its docs."""

from __future__ import annotations

import asyncio
import threading

import pytest

import holdfast
from holdfast.testing import QueueKit, VirtualClock


def failing(message: holdfast.Message) -> None:
    raise ValueError(f"attempt {message.attempt}")


def test_the_fixture_makes_queues_that_end_with_the_test(holdfast_kit):
    first, second = holdfast_kit(max_attempts=3), holdfast_kit(body_type=dict)
    first.queue.put(b"x")
    second.queue.put({"a": 1})
    assert first.queue.get(timeout=0).body == b"x"
    assert second.queue.get(timeout=0).body == {"a": 1}


def test_time_passes_only_when_told_and_fires_retries_in_their_order(holdfast_kit):
    kit = holdfast_kit(max_attempts=3, backoff_jitter_percent=0)
    kit.queue.put(b"pay 7")
    drained = kit.drain(failing)
    assert (drained.handled, drained.failed, str(drained.errors[0])) == (0, 1, "attempt 1")
    assert kit.drain(failing).failed == 0
    kit.clock.advance(minutes=15)
    assert kit.drain(failing).failed == 1
    kit.clock.advance(minutes=15)
    assert kit.drain(failing).failed == 1
    assert [letter.reason for letter in kit.queue.dead.list()] == ["MAX_ATTEMPTS"]


def test_a_lease_ends_in_virtual_time(holdfast_kit):
    kit = holdfast_kit()
    kit.queue.put(b"x")
    message = kit.queue.get(lease=30)
    kit.clock.advance(seconds=29)
    assert not message.lost
    kit.clock.advance(seconds=1)
    assert message.lost


def test_years_pass_in_a_moment(holdfast_kit):
    kit = holdfast_kit()
    kit.queue.put(b"far", delay=3 * 365 * 86_400)
    kit.clock.advance(days=3 * 365 - 1)
    assert kit.queue.stats().ready == 0
    kit.clock.advance(days=1)
    assert kit.queue.stats().ready == 1


def test_waiting_moves_the_clock_to_what_is_waited_for(holdfast_kit):
    kit = holdfast_kit()
    began = kit.clock.now()
    kit.queue.put(b"x", delay=5)
    kit.queue.get(timeout=60).ack()
    assert (kit.clock.now() - began).total_seconds() == pytest.approx(5, abs=0.01)
    with pytest.raises(holdfast.Empty):
        kit.queue.get(timeout=60)
    assert (kit.clock.now() - began).total_seconds() == pytest.approx(65, abs=0.1)


def test_drain_can_move_the_clock_until_nothing_is_left(holdfast_kit):
    kit = holdfast_kit(max_attempts=4)
    kit.queue.put(b"poison")
    kit.queue.put(b"later", delay=3600)
    seen = []

    def handle(message: holdfast.Message) -> None:
        seen.append(message.body)
        if message.body == b"poison":
            raise ValueError("no")

    drained = kit.drain(handle, advance=True)
    assert (drained.handled, drained.failed) == (1, 4)
    assert seen == [b"poison"] * 4 + [b"later"]
    assert kit.queue.stats().dead == 1


@pytest.mark.parametrize("way", ["power_cut", "kill", "reopen"])
def test_what_was_acknowledged_is_there_after_any_end(holdfast_kit, way):
    kit = holdfast_kit(seed=7)
    for n in range(20):
        kit.queue.put(b"%d" % n)
    done = kit.queue.get(timeout=0)
    done.ack(durability="fsync")
    in_hand = kit.queue.get(timeout=0)
    queue = getattr(kit, way)()
    assert queue is kit.queue
    bodies = {message.body for message in queue.get_many(100, timeout=0)}
    assert bodies == {b"%d" % n for n in range(1, 20)}
    assert in_hand.lost


def test_the_same_seed_gives_the_same_run():
    def run(seed: int) -> list[bytes]:
        with QueueKit(seed=seed, durability="os") as kit:
            for n in range(30):
                kit.queue.put(b"%d" % n)
            return [message.body for message in kit.power_cut().peek(100)]

    assert run(3) == run(3)
    assert len({tuple(run(seed)) for seed in range(8)}) > 1


def test_tasks_use_the_same_queue(holdfast_kit):
    kit = holdfast_kit()

    async def story() -> None:
        queue = kit.aio()
        await queue.put(b"x", delay=2)
        async with await queue.get(timeout=10) as message:
            assert message.body == b"x"

    asyncio.run(story())
    assert kit.queue.stats().ready == 0


def test_another_thread_may_put_while_one_waits(holdfast_kit):
    kit = holdfast_kit()
    thread = threading.Timer(0.05, lambda: kit.queue.put(b"x"))
    thread.start()
    assert kit.queue.get().body == b"x"
    thread.join()


def test_the_clock_does_not_run_backwards_but_the_wall_clock_may_be_set(holdfast_kit):
    kit = holdfast_kit()
    with pytest.raises(ValueError, match="backwards"):
        kit.clock.advance(seconds=-1)
    kit.queue.put(b"x", delay=10)
    kit.clock.step_wall(hours=-1)
    kit.clock.advance(seconds=11)
    assert kit.queue.stats().ready == 0
    kit.clock.advance(hours=1)
    assert kit.queue.stats().ready == 1


def test_a_drain_that_never_ends_says_so(holdfast_kit, monkeypatch):
    monkeypatch.setattr("holdfast.testing._MAX_DELIVERIES", 50)
    kit = holdfast_kit()
    kit.queue.put(b"x")
    with pytest.raises(RuntimeError, match="keep putting new messages"):
        kit.drain(lambda message: kit.queue.put(b"y"))


def test_a_virtual_clock_alone_is_a_clock():
    clock = VirtualClock()
    before = clock.now()
    clock.advance(hours=2, minutes=3, seconds=4, ms=5)
    assert (clock.now() - before).total_seconds() == pytest.approx(7384.005, abs=0.001)
