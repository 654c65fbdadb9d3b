"""The queue where calls are interrupted, cancelled, or meet each other: signals, threads, tasks, closing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

import holdfast
import holdfast.aio
from holdfast import CorruptData, Empty, LeaseLost
from holdfast.broker.partition import Draft
from holdfast.broker.waiters import ThreadWaiter
from holdfast.delivery.image import check
from holdfast.env import ManualClock
from holdfast.storage.keeper import Keeper
from tests.unit.queues import Place


class Interrupted(BaseException):
    """Raised by a signal handler."""


def interrupted_at(step: int, call: Callable[[], object]) -> bool:
    """Run the call, and raise where the interpreter looks for signals for the `step`-th time; False if it ended before.

    That is: when a function of Python begins, and when one of C has returned.
    """
    left = step

    def look(frame: FrameType, event: str, argument: object) -> None:
        nonlocal left
        if event not in ("call", "c_return") or "holdfast" not in frame.f_code.co_filename or in_test_gear(frame):
            return
        left -= 1
        if left == 0:
            sys.setprofile(None)
            raise Interrupted

    sys.setprofile(look)
    try:
        with contextlib.suppress(Interrupted):
            call()
    finally:
        sys.setprofile(None)
    return left <= 0


def in_test_gear(frame: FrameType) -> bool:
    """The simulated disk stands for C code, where nothing is interrupted."""
    at: FrameType | None = frame
    while at is not None:
        if "/env/" in at.f_code.co_filename or at.f_code.co_name == "__del__":
            return True
        at = at.f_back
    return False


def expect_sound(place: Place) -> None:
    """Nothing is locked, everything works on, and what another process would read says the same."""
    delivery = place.q._port.deliveries[0]
    assert not delivery.lock.locked()
    assert not place.q._port.deliveries[0].partition.log._writer.lock.locked()
    assert not delivery.journal.log._writer.lock.locked()
    place.q.put(b"behind")
    bodies = []
    while True:
        try:
            message = place.q.get(timeout=0)
        except Empty:
            break
        bodies.append(message.body)
        message.ack()
    assert bodies[-1] == b"behind"
    seen = place.q._port.deliveries[0].partition.log
    assert [record.offset for record in seen.records(seen.start)] == list(range(seen.start, seen.end))
    assert check(delivery.group) == []
    place.kill()
    assert check(place.q._port.deliveries[0].group) == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt in a generator's end
@pytest.mark.parametrize("durability", ["os", "fsync"])
@pytest.mark.slow
def test_a_signal_at_any_moment_of_put_get_and_ack_leaves_the_queue_sound(durability):
    step = 0
    while True:
        step += 1
        place = Place(durability=durability)
        place.q.put(b"first")

        def call(q: holdfast.Queue[Any] = place.q) -> None:
            q.put(b"second")
            q.put_many([b"third", b"fourth"])
            q.get().ack()
            q.get(timeout=0).nack(delay=0)

        if not interrupted_at(step, call):
            assert step > 100
            return
        expect_sound(place)


def test_all_that_a_sync_lets_be_seen_wakes_as_many_consumers():
    place = Place(durability="os")
    log, waiters = place.q._port.deliveries[0].partition.log, place.q._port.deliveries[0].waiters
    held = log.write([b"held until it is synced"], durability="fsync")
    place.q.put(b"behind it, and not to be seen before it")
    with pytest.raises(Empty):
        place.q.get(timeout=0)
    first, second = ThreadWaiter(place.clock), ThreadWaiter(place.clock)
    with waiters.in_line(first), waiters.in_line(second):
        log.wait(held)
        assert first.woken
        assert second.woken


def test_a_put_that_is_cancelled_while_it_is_synced_still_wakes_a_consumer(tmp_path):
    async def story() -> None:
        async with holdfast.aio.open(tmp_path / "jobs", durability="fsync", min_free_bytes=0) as q:
            delivery = q._port.deliveries[0]
            go_on = threading.Event()
            sync = delivery.partition.log._gate._sync

            def slowly() -> int:
                go_on.wait(10)
                return sync()

            delivery.partition.log._gate._sync = slowly
            getting = asyncio.create_task(q.get())
            putting = asyncio.create_task(q.put(b"one"))
            while not delivery.waiters or delivery.partition.log.written_end == 0:
                await asyncio.sleep(0)
            putting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await putting
            go_on.set()
            message = await asyncio.wait_for(getting, 3)  # sooner than anybody looks by himself
            assert message.body == b"one"
            await message.ack()

    asyncio.run(story())


def test_a_delayed_put_tells_the_keeper_before_it_waits_for_its_sync():
    place = Place()
    calls: list[str] = []
    place.q._port.engine.on_attention = lambda: calls.append("attention")
    draft = Draft(b"later", due_at_ms=place.clock.now_ns() // 1_000_000 + 5_000)
    place.q._port.deliveries[0].partition.publish([draft])
    assert calls


def test_two_compactions_at_once_save_the_dedup_ids_one_after_the_other():
    place = Place()
    place.q.put(b"x", dedup_id="1")
    partition = place.q._port.deliveries[0].partition
    inner: list[threading.Thread] = []
    sync = partition.sync

    def sync_and_save_again() -> None:
        if not inner:
            inner.append(threading.Thread(target=place.q.compact))
            inner[0].start()
        sync()

    partition.sync = sync_and_save_again  # type: ignore[method-assign]
    place.q.compact()
    inner[0].join(10)
    assert not inner[0].is_alive()
    assert place.q.put(b"x", dedup_id="1").duplicate
    index = place.q._port.queue_group.topic.duplicates.index
    assert index is not None
    assert index._saving is None


def test_the_pin_of_the_log_never_overtakes_a_seek():
    place = Place()
    for i in range(3):
        place.q.put(b"%d" % i)
        place.q.get().ack()
    delivery = place.q._port.deliveries[0]
    place.q.sync()
    delivery.pin()
    delivery.pin()
    assert delivery.partition.log.pins[delivery.journal.log.folder] == 3
    pin = delivery.partition.log.pin

    def pin_while_somebody_seeks(name: str, offset: int) -> None:
        delivery.partition.log.pin = pin  # type: ignore[method-assign]
        seeking = threading.Thread(target=place.q.seek, args=("start",))
        seeking.start()
        seeking.join(0.2)
        pin(name, offset)
        seekers.append(seeking)

    seekers: list[threading.Thread] = []
    delivery.partition.log.pin = pin_while_somebody_seeks  # type: ignore[method-assign]
    delivery.pin()
    seekers[0].join(10)
    assert delivery.partition.log.pins[delivery.journal.log.folder] == 0


def test_a_keeper_outlives_a_tick_that_fails_in_a_way_that_nobody_thought_of():
    class Odd:
        folder = "/odd"
        on_attention: Callable[[], None]
        before_close: Callable[[], None]

        def __init__(self) -> None:
            self.ticks = 0
            self.ticked_again = threading.Event()

        def tick(self) -> int | None:
            self.ticks += 1
            if self.ticks == 1:
                raise ZeroDivisionError
            self.ticked_again.set()
            return None

    odd = Odd()
    keeper = Keeper(odd)
    keeper.start()
    odd.on_attention()
    assert odd.ticked_again.wait(10)
    keeper.stop()


def test_a_slow_redrive_keeps_its_rate():
    place = Place(durability="os")
    for i in range(3):
        place.q.put(b"%d" % i)
        place.q.get().reject("no")

    class Hasty(ManualClock):
        """Nobody sleeps longer than 5 s in one go, as on the machine's own clock."""

        def wait(self, event: threading.Event, timeout_s: float | None) -> bool:
            assert timeout_s is not None
            return super().wait(event, min(timeout_s, 5))

    place.clock.__class__ = Hasty
    before_ns = place.clock.monotonic_ns()
    assert place.q.dead.redrive(rate=0.05).done == 3
    assert place.clock.monotonic_ns() - before_ns == 40_000_000_000


def test_resuming_a_message_that_cannot_be_read_says_so():
    place = Place()
    place.q.put(b"x" * 100)
    message = place.q.get()
    place.q._port.deliveries[0].fetch = lambda offsets: []  # type: ignore[method-assign,assignment]
    with pytest.raises(CorruptData, match="cannot be read"):
        place.q.resume(message.receipt)


def test_an_ack_of_very_many_messages_of_which_some_are_lost_takes_no_time():
    place = Place(durability="os")
    place.q.put_many([b"x"] * 20_000)
    messages = place.q.get_many(20_000)
    messages[-1].ack()
    began = time.monotonic()
    with pytest.raises(LeaseLost) as lost:
        place.q.ack_many(messages)
    assert time.monotonic() - began < 5  # quadratic: half a minute
    assert lost.value.offsets == (19_999,)
    assert place.q.stats().leased == 0


def test_an_opening_that_is_cancelled_does_not_keep_the_folder(tmp_path):
    async def story() -> None:
        begun, go_on = threading.Event(), threading.Event()

        class Slow:
            def __fspath__(self) -> str:
                begun.set()
                go_on.wait(10)
                return str(tmp_path / "jobs")

        async def enter() -> None:
            async with holdfast.aio.open(Slow(), min_free_bytes=0):
                raise AssertionError("it was cancelled before")

        entering = asyncio.create_task(enter())
        while not begun.is_set():
            await asyncio.sleep(0.001)
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering
        go_on.set()

    gc.disable()  # which would let go of it, sooner or later
    try:
        asyncio.run(story())  # ends when its threads have
        with holdfast.open(tmp_path / "jobs", min_free_bytes=0) as q:
            assert q.stats().ready == 0
    finally:
        gc.enable()


def test_the_first_delayed_message_does_not_read_the_whole_log():
    place = Place()
    place.q.put_many([b"x"] * 100)
    log = place.q._port.deliveries[0].partition.log
    read = log.read

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("read the log")

    log.read = refuse  # type: ignore[method-assign]
    place.q.put(b"later", delay=60)
    log.read = read  # type: ignore[method-assign]


def test_a_listing_of_what_is_in_hand_reads_some_at_a_time():
    place = Place(durability="os")
    place.q.put_many([b"x"] * 1_000)
    messages = place.q.get_many(1_000)
    sizes: list[int] = []
    fetch = place.q._port.deliveries[0].fetch

    def counted(offsets: Any) -> Any:
        sizes.append(len(offsets))
        return fetch(offsets)

    place.q._port.deliveries[0].fetch = counted  # type: ignore[method-assign]
    found = place.q.messages("leased")
    next(found)
    place.q.ack_many(messages[256:])
    assert len(list(found)) == 255
    assert max(sizes) == 256


def test_messages_that_die_in_one_call_are_moved_in_one_go():
    place = Place(durability="os", max_attempts=1)
    place.q.put_many([b"1", b"2", b"3"])
    place.q.nack_many(place.q.get_many(3), error="no")
    graves = place.q._port.deliveries[0].dead.open()
    assert [frame.next_offset for frame in graves.target.log.read(0)] == [3]


def test_a_nack_of_many_says_which_was_lost_and_nacks_the_others():
    place = Place(durability="os", max_attempts=1)
    place.q.put_many([b"1", b"2"])
    messages = place.q.get_many(2)
    messages[0].ack()
    with pytest.raises(LeaseLost, match="message 0"):
        place.q.nack_many(messages)
    assert [letter.body for letter in place.q.dead.list()] == [b"2"]


def test_a_detached_lease_is_renewed_only_as_long_as_somebody_has_the_message_in_hand():
    place = Place()
    place.q.put(b"x")
    message: Any = place.q.get(detached=True, renew=True, lease=30)
    for _ in range(10):
        place.clock.advance(seconds=9)
        place.q._port.engine.tick()
    assert not message.lost
    del message
    gc.collect()
    place.clock.advance(seconds=29)
    place.q._port.engine.tick()
    assert place.q.stats().leased == 1
    place.clock.advance(seconds=2)
    place.q._port.engine.tick()
    assert place.q.stats().leased == 0
