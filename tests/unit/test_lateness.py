"""Delayed messages are released on time, whatever else there is to do: puts, spills, other topics."""

from __future__ import annotations

import asyncio
import random
import threading
import time
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast import NewMessage
from holdfast.broker.delayed import DelaySettings, DelayStore
from holdfast.broker.delayed.intake import RecentBatches
from holdfast.broker.delayed.upkeep import in_due_order
from holdfast.codec.frame import Frame
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.model import Batch
from holdfast.settings import LogSettings
from tests.unit.queues import Place

HOUR_S = 3_600
PATIENCE_S = 60


def lateness_ms(partition: Any) -> list[int]:
    """Of all that were released, from the due time to the write into the log."""
    records = [record for frame in partition.log.read(0) for record in frame.records()]
    return [record.timestamp_ns // 1_000_000 - record.due_at_ms for record in records]


def slow_down(disk: SimulatedDisk, clock: ManualClock, ms: int) -> None:
    """From now on each write and each sync takes so long."""

    def pass_time(call: str) -> None:
        if call in {"write", "sync"}:
            clock.advance(ms=ms)

    disk.on_call = pass_time


def test_messages_that_come_due_during_a_spill_do_not_wait_for_its_end():
    place = Place(durability="os")
    partition = place.q._port.deliveries[0].partition
    place.q.put_many([NewMessage(body=b"far", delay=HOUR_S) for _ in range(8_000)])
    place.q.put_many([NewMessage(body=b"near", delay=0.1 * n) for n in range(1, 21)])
    began_ms = place.clock.now_ns() // 1_000_000
    slow_down(place.disk, place.clock, ms=20)
    assert partition.delayed is not None
    partition.delayed.spill(began_ms)
    took_ms = place.clock.now_ns() // 1_000_000 - began_ms
    assert took_ms > 1_000
    found = lateness_ms(partition)
    assert len(found) > 10
    assert max(found) <= 300


def test_a_spill_pauses_while_it_lets_go_of_what_it_has_moved():
    place = Place(durability="os")
    partition = place.q._port.deliveries[0].partition
    place.q.put_many([NewMessage(body=b"far", delay=HOUR_S) for _ in range(10_000)])
    store = partition.delayed
    assert store is not None
    pauses: list[int] = []
    partition.on_pause = lambda: pauses.append(len(store._state.runs))
    store.spill(place.clock.now_ns() // 1_000_000)
    assert pauses.count(0) > 40  # while it reads and writes
    assert len(pauses) - pauses.count(0) >= 3  # while it drops ten thousand timers


def test_a_spill_never_sorts_the_keys_of_all_its_messages():
    """To sort some hundred thousand takes a second, in which no other thread runs."""
    place = Store()
    place.put(*[n * 7919 % 30_011 for n in range(30_000)])
    log = place.store.intake
    list(log.read(0))
    tracemalloc.start()
    count = sum(1 for _ in in_due_order(lambda: log.read(0), lambda _: True, memory_bytes=1 << 20))
    most_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 30_000
    assert most_bytes < 3 << 20


def test_whoever_compacts_releases_nothing_by_that():
    """Files are removed then, with pauses in the keeper's hand; whoever else removes them may hold locks."""
    place = Place(segment_bytes=4_096, frame_bytes=1_024)
    partition = place.q._port.deliveries[0].partition
    for n in range(20):
        place.q.put(bytes(900), delay=n + 1)
    place.clock.advance(seconds=15)
    assert partition.release() == 15
    assert partition.delayed is not None
    segments = len(partition.delayed.intake.segments())
    place.clock.advance(seconds=1)
    place.q.compact()
    assert len(partition.delayed.intake.segments()) < segments - 1
    assert (place.q.stats().ready, place.q.stats().delayed) == (15, 5)
    place.tick()
    assert (place.q.stats().ready, place.q.stats().delayed) == (16, 4)


def test_a_spill_of_one_topic_does_not_hold_up_the_messages_of_another():
    disk, clock = SimulatedDisk(), ManualClock()
    world = World(clock=clock, disk=disk, ids=SeededIds(1))
    with holdfast.open_broker("/shop", world=world, durability="os") as broker:
        for name in ("busy", "other"):
            broker.create_topic(name, min_free_bytes=0)
        broker.publish_many("busy", [NewMessage(body=b"far", delay=HOUR_S) for _ in range(8_000)])
        broker.publish("other", b"near", delay=0.5)
        slow_down(disk, clock, ms=20)
        busy, other = (broker._port.engine.topic(name).partitions[0] for name in ("busy", "other"))
        busy.delayed.spill(clock.now_ns() // 1_000_000)
        assert len(found := lateness_ms(other)) == 1
        assert found[0] <= 300


def test_what_cannot_be_released_meanwhile_does_not_end_the_spill():
    place = Place(durability="os")
    partition = place.q._port.deliveries[0].partition
    place.q.put_many([NewMessage(body=b"far", delay=HOUR_S) for _ in range(500)])
    place.q.put(b"near", delay=1)
    place.clock.advance(seconds=2)
    assert partition.delayed is not None
    close, partition.log.wait = partition.log.wait, _refuse  # type: ignore[method-assign]
    partition.delayed.spill(place.clock.now_ns() // 1_000_000)
    partition.log.wait = close  # type: ignore[method-assign]
    place.tick()
    assert place.q.stats().delayed == 500
    assert place.q.get(timeout=0).body == b"near"


def _refuse(appended: object) -> None:
    raise holdfast.Unavailable("not now")


def test_whoever_puts_helps_when_releases_are_behind():
    place = Place()
    place.q.put_many([NewMessage(body=b"%d" % n, delay=1) for n in range(50)])
    place.clock.advance(seconds=2)  # and nobody ticks
    place.q.put(b"another", delay=60)
    assert place.q.stats().ready == 50


def test_a_task_that_puts_helps_as_well():
    disk, clock = SimulatedDisk(), ManualClock()

    async def story() -> None:
        world = World(clock=clock, disk=disk, ids=SeededIds(1))
        async with holdfast.aio.open("/jobs", world=world, min_free_bytes=0) as queue:
            await queue.put_many([NewMessage(body=b"%d" % n, delay=1) for n in range(50)])
            clock.advance(seconds=2)
            await queue.put(b"another", delay=60)
            assert (await queue.stats()).ready == 50

    asyncio.run(story())


def test_a_put_releases_a_portion_for_each_thousand_that_it_brings_and_no_more():
    place = Place(durability="os")
    place.q.put_many([NewMessage(body=b"", delay=1) for _ in range(9_000)])
    place.clock.advance(seconds=2)
    place.q.put(b"one", delay=60)
    assert place.q.stats().ready == 1_000
    place.q.put_many([NewMessage(body=b"", delay=60) for _ in range(1_001)])
    assert place.q.stats().ready == 1_000 + 2_000 + 4_000  # a portion is twice the last one while they are late


@pytest.mark.parametrize(("work_ms", "most"), [(100, 1_000), (20, 2_000), (10, 4_000), (1, 8_000)])
def test_a_portion_is_larger_while_releases_are_late_unless_its_work_takes_long(work_ms, most):
    """What comes due meanwhile waits for the end of it."""
    place = Place(durability="os")
    partition = place.q._port.deliveries[0].partition
    write, portions = partition.log.write, []

    def counted(batch: Batch, **options: Any) -> Any:
        portions.append(len(batch.values))
        place.clock.advance(ms=len(batch.values) // 1_000 * work_ms)
        return write(batch, **options)

    place.q.put_many([NewMessage(body=b"", delay=1) for _ in range(16_000)])
    place.clock.advance(seconds=2)
    partition.log.write = counted  # type: ignore[method-assign, assignment]
    assert partition.release() == 16_000
    assert (portions[0], max(portions)) == (1_000, most)


@pytest.mark.parametrize(("sync_ms", "most"), [(5, 1_000), (200, 8_000)])
def test_a_portion_is_larger_where_a_sync_takes_longer_than_the_rest(sync_ms, most):
    place = Place(durability="os")
    partition = place.q._port.deliveries[0].partition
    write, portions = partition.log.write, []

    def counted(batch: Batch, **options: Any) -> Any:
        portions.append(len(batch.values))
        place.clock.advance(ms=len(batch.values) // 50)
        return write(batch, **options)

    place.q.put_many([NewMessage(body=b"", delay=1) for _ in range(1_000)])
    place.q.put_many([NewMessage(body=b"", delay=1.1) for _ in range(10_000)])
    partition.sync()
    place.clock.advance(seconds=1)
    partition.log.write = counted  # type: ignore[method-assign, assignment]
    place.disk.on_call = lambda call: place.clock.advance(ms=sync_ms if call == "sync" else 0)
    assert partition.release() == 1_000
    place.clock.advance(ms=100)
    assert partition.release() == 10_000
    assert portions[:2] == [1_000, most]


def test_a_tick_ends_though_there_is_always_more_that_is_due():
    """Leases, syncs and the messages of other topics wait for the end of it."""
    place = Place(durability="os")
    partition = place.q._port.deliveries[0].partition
    place.q.put_many([NewMessage(body=b"", delay=0.01 * n) for n in range(1, 501)])
    slow_down(place.disk, place.clock, ms=20)
    place.clock.advance(seconds=1)
    place.tick()
    assert 100 <= place.q.stats().ready < 150
    assert partition.delayed is not None
    while len(partition.delayed):
        place.tick()
    assert place.q.stats().ready == 500


class Store:
    """A store of delayed messages on a simulated disk, with small frames."""

    def __init__(self, delays: DelaySettings | None = None) -> None:
        self.clock = ManualClock()
        self.now_ms = self.clock.now_ns() // 1_000_000
        world = World(clock=self.clock, disk=SimulatedDisk(), ids=SeededIds(1))
        settings = LogSettings(min_free_bytes=0, frame_bytes=4_096, durability="os")
        self.store = DelayStore.open(world, "/delayed", settings, delays)
        self.called = 0
        self.store.on_attention = self._call

    def _call(self) -> None:
        self.called += 1

    def put(self, *dues_ms: int) -> int:
        """Answers how often somebody was called for."""
        self.called = 0
        batch = Batch(values=[b"%d" % due_ms for due_ms in dues_ms], due_at_ms=[self.now_ms + due for due in dues_ms])
        self.store.wait(self.store.write(batch))
        return self.called

    def release(self, at_ms: int) -> list[int]:
        found = self.store.due(self.now_ms + at_ms, 1_000)
        self.store.released([each.id for each in found], 1)
        self.store.check()
        return [each.due_at_ms - self.now_ms for each in found]


def test_messages_that_come_due_soon_after_they_were_put_are_not_read_from_the_disk(monkeypatch: pytest.MonkeyPatch):
    place = Store()
    place.store.tick(place.now_ms)  # so that it knows the time
    dues_ms = list(range(1, 3_001))
    random.Random(1).shuffle(dues_ms)
    for n in range(0, 3_000, 100):
        place.put(*dues_ms[n : n + 100], HOUR_S * 1_000)
    recent = place.store._state.intake._recent
    assert recent.total_bytes > 3_000
    monkeypatch.setattr(Frame, "records", None)
    released = [due for at_ms in range(0, 3_001, 10) for due in place.release(at_ms)]
    assert released == sorted(dues_ms)
    assert (recent.total_bytes, recent._firsts, recent._batches, recent._lasts) == (0, [], [], [])


def test_memory_for_what_was_just_put_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("holdfast.broker.delayed.intake._RECENT_BYTES", 10_000)
    place = Store()
    place.store.tick(place.now_ms)
    for due_ms in range(1, 101):
        place.put(*range(due_ms, due_ms + 10))
    recent = place.store._state.intake._recent
    assert 9_000 < recent.total_bytes <= 10_000
    assert len(place.release(1_000)) == 1_000
    assert recent.total_bytes == 0


def test_a_spill_lets_go_of_what_was_just_put():
    place = Store()
    place.store.tick(place.now_ms)
    place.put(1, 2, 3)
    place.store.spill(place.now_ms)
    assert place.store._state.intake._recent.total_bytes == 0
    assert place.release(3) == [1, 2, 3]


_MESSAGES = st.fixed_dictionaries(
    {
        "values": st.binary(max_size=5),
        "keys": st.none() | st.binary(max_size=3),
        "headers": st.lists(st.tuples(st.text(max_size=3), st.binary(max_size=3)), max_size=3),
        "priorities": st.integers(0, 9),
        "expires_at_ms": st.integers(0, 2**40),
        "due_at_ms": st.integers(1, 20_000),
        "flags": st.integers(0, 3),
    }
)


@given(
    st.lists(st.lists(_MESSAGES, min_size=1, max_size=4), max_size=4),
    st.sets(st.sampled_from(["keys", "headers", "priorities", "expires_at_ms", "flags"])),
    st.lists(st.integers(0, 15), max_size=4),
)
def test_what_was_just_put_is_as_if_it_were_read_from_the_disk(batches, used, cancelled):
    """In the same order, and without those that were cancelled: the fused form of `due` and the general one agree."""
    place = Store()
    place.store.tick(place.now_ms)
    columns = [*used, "values"]
    for messages in batches:
        dues_ms = [place.now_ms + message["due_at_ms"] for message in messages]
        chosen = {name: [message[name] for message in messages] for name in columns}
        place.store.wait(place.store.write(Batch(**chosen, due_at_ms=dues_ms)))
        place.clock.advance(ms=1)
    known = [place.store.cancel(message_id) for message_id in cancelled]
    now_ms, recent = place.now_ms + 20_000, place.store._state.intake._recent
    fused = place.store.due(now_ms, 100)
    place.store._state.intake._recent = RecentBatches()
    place.store._due_here = lambda now_ms, limit: None  # type: ignore[method-assign]
    assert place.store.due(now_ms, 100) == fused
    assert len(fused) == sum(map(len, batches)) - sum(known)
    assert recent.total_bytes or not any(message["due_at_ms"] <= 10_000 for batch in batches for message in batch)


def test_a_frame_is_unpacked_once_for_all_of_its_messages_that_are_due_soon(monkeypatch: pytest.MonkeyPatch):
    place = Store()
    dues_ms = list(range(1, 3_001))
    random.Random(1).shuffle(dues_ms)
    place.put(*dues_ms)
    unpacked = 0
    records = Frame.records

    def counted(frame: Frame) -> Any:
        nonlocal unpacked
        unpacked += 1
        return records(frame)

    monkeypatch.setattr(Frame, "records", counted)
    released = [due for at_ms in range(0, 3_001, 10) for due in place.release(at_ms)]
    assert released == sorted(dues_ms)
    frames = sum(1 for _ in place.store.intake.read(0))
    assert frames < unpacked + 1 <= frames + 1
    assert place.store._state.intake._near_bytes == 0


def test_what_is_kept_in_memory_goes_with_a_cancellation_and_with_a_spill():
    place = Store()
    place.put(1, 2_000, 3_000, 4_000)
    assert place.release(1) == [1]
    intake = place.store._state.intake
    assert sorted(intake._near) == [1, 2, 3]
    assert place.store.cancel(2)
    assert sorted(intake._near) == [1, 3]
    place.store.spill(place.now_ms)
    assert (intake._near, intake._near_bytes) == ({}, 0)
    assert place.release(5_000) == [2_000, 4_000]


def test_memory_for_messages_that_are_due_soon_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("holdfast.broker.delayed.intake._NEAR_BYTES", 10_000)
    place = Store()
    place.put(*range(1, 1_001))
    intake = place.store._state.intake
    for at_ms in range(1, 1_001, 20):
        place.release(at_ms)
        assert intake._near_bytes <= 11_000
    assert place.release(1_000) == list(range(982, 1_001))
    assert (intake._near, intake._near_bytes) == ({}, 0)


def test_messages_that_do_not_all_fit_in_memory_are_not_unpacked_one_by_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("holdfast.broker.delayed.intake._NEAR_BYTES", 200_000)  # for a sixth of them
    place = Store()
    dues_ms = list(range(1, 3_001))
    random.Random(1).shuffle(dues_ms)
    place.put(*dues_ms)
    unpacked, records = 0, Frame.records

    def counted(frame: Frame) -> Any:
        nonlocal unpacked
        unpacked += 1
        return records(frame)

    monkeypatch.setattr(Frame, "records", counted)
    released = [due for at_ms in range(0, 3_001, 10) for due in place.release(at_ms)]
    assert released == sorted(dues_ms)
    frames = sum(1 for _ in place.store.intake.read(0))
    assert unpacked < 20 * frames < len(dues_ms)
    assert place.store._state.intake._near_bytes == 0


def test_what_comes_due_within_seconds_is_not_spilled_however_much_comes_in():
    """Writing it to runs would take the time that its release needs, and save nothing."""
    place = Store(DelaySettings(spill_messages=10))
    place.put(*range(1, 1_001))
    place.store.tick(place.now_ms)
    assert place.store._state.runs == []
    place.put(HOUR_S * 1_000)
    place.store.tick(place.now_ms)
    assert sum(run.messages for run in place.store._state.runs) == 1_001  # the one would keep the intake long


def test_only_a_message_that_is_due_sooner_than_all_others_calls_for_attention():
    place = Store()
    assert place.put(500) >= 1  # the log calls, too, the first time: it is to be synced
    assert place.put(600, 700) == 0
    assert place.put(400, 900) == 1
    assert place.put(*range(1_000, 12_000)) == 1  # many: somebody is to look whether it is time to spill


def test_a_message_behind_one_that_was_cancelled_calls_for_attention_when_somebody_has_looked():
    place = Store()
    place.put(100)
    place.store.tick(place.now_ms)
    assert place.store.cancel(0)
    assert place.store.tick(place.now_ms) is not None  # to save
    assert place.store.next_due_ms() is None
    assert place.put(500) >= 1


def test_releases_keep_up_with_puts_that_never_stop(tmp_path):
    """In real time, so with much patience: what was put long ago is not still waiting when the putting ends."""
    with holdfast.open(tmp_path, durability="os", min_free_bytes=0) as queue:
        partition = queue._port.deliveries[0].partition
        done = threading.Event()

        def put() -> None:
            while not done.is_set():
                queue.put_many([NewMessage(body=b"x", delay=0.2) for _ in range(100)])

        threads = [threading.Thread(target=put) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(3)
        done.set()
        for thread in threads:
            thread.join()
        deadline = time.monotonic() + PATIENCE_S
        while partition.delayed is not None and len(partition.delayed) and time.monotonic() < deadline:
            time.sleep(0.01)
        found = sorted(lateness_ms(partition))
        assert found
        assert found[len(found) // 2] < 5_000
