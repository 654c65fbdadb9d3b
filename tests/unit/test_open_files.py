"""Logs close their files when too many are open, and nobody notices: not their owner, not who reads, not a crash."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.env import ManualClock, OpenFiles, SeededIds, World, real_world
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import DiskFailed, Unavailable
from holdfast.settings import BrokerSettings, LogSettings, TopicSettings
from holdfast.storage.frames import SegmentIndex
from holdfast.storage.log import Log
from holdfast.storage.log_files import DESCRIPTORS, LogFiles
from tests.unit.brokers import Place, taken

FEW = BrokerSettings(
    open_files=60, open_partitions=10_000, topic=TopicSettings(min_free_bytes=0, durability="os", backoff_ms=100)
)
# What a scan, a snapshot or a sync has open for a moment, and what is not a log's.
SLACK = 40


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def world(most: int = 1) -> World:
    real = real_world()
    return World(clock=real.clock, disk=real.disk, ids=real.ids, open_files=OpenFiles(most))


def at_rest(broker: Any) -> int:
    return sum(p.log._writer.resting for topic in broker._port.engine.open_topics() for p in topic.partitions)


def test_a_log_that_rests_has_no_descriptor_and_goes_on_when_it_is_used(tmp_path):
    both = world(most=DESCRIPTORS)
    before = descriptors()
    with Log.open(tmp_path / "a", LogSettings(min_free_bytes=0), both) as log:
        log.append([b"one"])
        assert descriptors() == before + DESCRIPTORS
        assert log._files.rest(wait=False)
        assert descriptors() == before
        assert [record.value for record in log.records(0)] == [b"one"]
        assert descriptors() == before
        log.append_one(b"two")
        assert descriptors() == before + DESCRIPTORS
        assert [record.value for record in log.records(0)] == [b"one", b"two"]
    assert descriptors() == before
    with Log.open(tmp_path / "a") as log:
        assert log.report.clean
        assert [record.value for record in log.records(0)] == [b"one", b"two"]


def test_what_is_not_synced_keeps_its_files_until_somebody_can_wait(tmp_path):
    with Log.open(tmp_path / "a", LogSettings(min_free_bytes=0, durability="os"), world()) as log:
        log.append([b"one"])
        assert not log._files.rest(wait=False)
        assert log._files.rest(wait=True)
        assert log.synced_end == 1


def test_a_log_that_rests_is_trimmed_rolled_truncated_and_closed_as_any_other(tmp_path):
    with Log.open(tmp_path / "a", LogSettings(min_free_bytes=0, segment_bytes=4096), world()) as log:
        for number in range(20):
            log.append([b"%d" % number * 1000])
        assert log._files.rest(wait=False)
        log.roll()
        assert log._files.rest(wait=True)
        assert log.trim(10).segments > 0
        log.truncate(15)
        assert log.end == 15
        assert log._files.rest(wait=True)
    with Log.open(tmp_path / "a") as log:
        assert log.report.clean
        assert log.end == 15


def test_a_log_that_was_rolled_by_its_age_has_no_descriptor_either_when_it_rests(tmp_path):
    both = World(clock=ManualClock(), disk=real_world().disk, ids=real_world().ids, open_files=OpenFiles(1))
    before = descriptors()
    with Log.open(tmp_path / "a", LogSettings(min_free_bytes=0, segment_ms=1_000), both) as log:
        log.append([b"one"], durability="fsync")
        both.clock.advance(seconds=2)
        log.tick()
        assert len(log.segments()) == 2
        assert log._files.rest(wait=True)
        assert descriptors() == before
        log.append([b"two"])
        assert [record.value for record in log.records(0)] == [b"one", b"two"]


def test_a_follower_finds_its_place_again(tmp_path):
    with Log.open(tmp_path / "a", LogSettings(min_free_bytes=0), world()) as log:
        follower = log.follower()
        for number in range(10):
            log.append_one(b"%d" % number)
            assert follower.record(number).value == b"%d" % number
            assert log._files.rest(wait=False)


def test_readers_may_come_while_files_are_closed_and_opened():
    both = World(clock=ManualClock(), disk=SimulatedDisk(), ids=SeededIds(1), open_files=OpenFiles(1))
    log = Log.open("a", LogSettings(min_free_bytes=0), both)
    log.append([b"one"], durability="fsync")
    over = threading.Event()

    def come_and_go() -> None:
        while not over.is_set():
            held = [log.follower() for _ in range(50)]
            held.clear()

    readers = threading.Thread(target=come_and_go)
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        readers.start()
        for _ in range(1_000):
            assert log._files.rest(wait=False)
            log.append([b"more"], durability="fsync")
    finally:
        over.set()
        readers.join()
        sys.setswitchinterval(usual)
        log.close()


def test_a_segment_may_be_let_go_for_others_while_its_index_is_asked(tmp_path):
    class LetGoMeanwhile(SegmentIndex):
        """One whose segment another thread lets go of as soon as it is looked at."""

        def __getattribute__(self, name: str) -> Any:
            segment.close_files()
            return super().__getattribute__(name)

    with Log.open(tmp_path / "a", LogSettings(min_free_bytes=0), world()) as log:
        log.append([b"one"])
        log.roll()
        segment = log._writer.segments[0]
        known = segment.index_to(1)
        index = LetGoMeanwhile(0, known.spacing_bytes)
        for name in SegmentIndex.__slots__:
            setattr(index, name, getattr(known, name))
        for ask in (lambda: segment.index_to(1), lambda: segment.opened(1)[2]):
            segment.use_index(index)
            assert ask().next_offset == 1
        segment.use_index(index)
        segment.save_index()


def test_a_log_whose_folder_had_another_owner_meanwhile_takes_nothing_more(tmp_path):
    with Log.open(tmp_path / "a", LogSettings(min_free_bytes=0), world()) as log:
        log.append([b"one"])
        assert log._files.rest(wait=False)
        with Log.open(tmp_path / "a") as other:
            other.append([b"foreign"])
        with pytest.raises(DiskFailed):
            log.append([b"two"])
    with Log.open(tmp_path / "a") as log:
        assert [record.value for record in log.records(0)] == [b"one", b"foreign"]


def test_files_that_cannot_be_opened_refuse_one_call_and_no_more(tmp_path, monkeypatch):
    both = world()
    with Log.open(tmp_path / "a", LogSettings(min_free_bytes=0), both) as log:
        log.append([b"one"])
        assert log._files.rest(wait=False)

        def refuse(*args: Any, **options: Any) -> Any:
            raise OSError(24, "Too many open files")

        with monkeypatch.context() as patch:
            patch.setattr(type(both.disk), "open", refuse)
            with pytest.raises(Unavailable, match="no file descriptor left"):
                log.append([b"two"])
        log.append([b"two"])
        assert [record.value for record in log.records(0)] == [b"one", b"two"]


def test_a_log_that_was_used_is_passed_over_once(tmp_path):
    both = world(most=2 * DESCRIPTORS)
    logs = [Log.open(tmp_path / str(number), LogSettings(min_free_bytes=0), both) for number in range(2)]
    logs[0].append([b"a"])
    logs.append(Log.open(tmp_path / "2", LogSettings(min_free_bytes=0), both))
    assert [log._writer.resting for log in logs] == [False, True, False]
    for log in logs:
        log.close()
    assert both.open_files.count == 0


def test_whoever_can_wait_is_told_again_after_it_had_files_closed(tmp_path):
    both = world(most=2 * DESCRIPTORS)
    files, notices = both.open_files, []
    files.on_too_many = lambda: notices.append(files.count)
    logs = []
    for number in range(6):
        logs.append(Log.open(tmp_path / str(number), LogSettings(min_free_bytes=0, durability="os"), both))
        logs[-1].append([b"unsynced"])
        if files.too_many:
            assert len(notices) == number - 1
            while files.tick() is not None:
                pass
    assert len(notices) == 4
    assert files.count <= 2 * DESCRIPTORS
    for log in logs:
        log.close()


def test_who_opens_files_when_there_are_far_too_many_has_others_synced_and_closed_first(tmp_path):
    both = world(most=100)
    files, most, before = both.open_files, 150, descriptors()
    settings = LogSettings(min_free_bytes=0, durability="os")
    with ExitStack() as logs:
        all_logs = [logs.enter_context(Log.open(tmp_path / f"{n}", settings, both)) for n in range(60)]
        for turn in range(3):
            for log in all_logs:  # nobody ticks: those that may not wait can close nothing that is not synced
                log.append_one(b"%d" % turn)
                assert files.count <= most + DESCRIPTORS
                assert descriptors() - before <= most + DESCRIPTORS + SLACK
        for log in all_logs:
            assert [record.value for record in log.records(0)] == [b"0", b"1", b"2"]


def test_who_may_not_wait_looks_at_few_logs_however_many_wait_for_a_sync(tmp_path, monkeypatch):
    both = world(most=100)
    looks: list[int] = []
    used = LogFiles.used
    monkeypatch.setattr(LogFiles, "used", lambda files: looks.append(1) or used(files))
    with ExitStack() as logs:
        for number in range(29):
            log = logs.enter_context(
                Log.open(tmp_path / str(number), LogSettings(min_free_bytes=0, durability="os"), both)
            )
            log.append_one(b"unsynced")
        assert both.open_files.count > 100
        assert len(looks) <= 9 * 5


def test_threads_that_open_each_others_files_all_come_to_an_end(tmp_path):
    both = world(most=50)
    with ExitStack() as logs:
        settings = LogSettings(min_free_bytes=0, durability="os")
        all_logs = [logs.enter_context(Log.open(tmp_path / f"{n}", settings, both)) for n in range(40)]

        def write(first: int) -> None:
            for number in range(200):
                all_logs[(first + number * 7) % 40].append_one(b"%d" % first)

        threads = [threading.Thread(target=write, args=(number,), daemon=True) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert not any(thread.is_alive() for thread in threads)
        assert sum(log.end for log in all_logs) == 6 * 200


def test_a_log_that_is_woken_while_others_close_files_is_still_counted(tmp_path):
    both = world()
    with Log.open(tmp_path / "a", LogSettings(min_free_bytes=0), both) as log:
        log.append([b"one"])
        rest = log._files.rest

        def rest_and_wake(*, wait: bool) -> bool:
            rested = rest(wait=wait)
            log.append([b"two"])  # as another thread may at this moment
            return rested

        log._files.used()
        log._files.rest = rest_and_wake
        both.open_files.rest_idle()
        del log._files.rest
        assert not log._writer.resting
        assert both.open_files.count == DESCRIPTORS


def test_many_partitions_and_groups_go_through_use_with_few_files(tmp_path):
    before = descriptors()
    with holdfast.open_broker(tmp_path / "data", settings=FEW) as broker:
        for name in ("a", "b"):
            broker.create_topic(name, partitions=12)
        groups = [broker.group(name, f"g{number}") for name in ("a", "b") for number in range(3)]
        for turn in range(3):
            for name in ("a", "b"):
                for number in range(12):
                    broker.publish(name, b"%d" % turn, partition=number, durability="fsync")
            for group in groups:
                found = group.receive_many(100, timeout=0)
                assert sorted(message.body for message in found) == [b"%d" % turn] * 12
                group.ack_many(found)
            assert at_rest(broker) > 10
            broker._port.engine.tick()
            assert broker._port.engine.world.open_files.count <= FEW.open_files
        broker._port.engine.tick()
        assert descriptors() - before <= FEW.open_files + SLACK
        for group in groups:
            assert group.stats().ready == 0
            group.close()
    assert descriptors() <= before + 1


def test_messages_in_hand_delays_retries_and_order_outlive_closed_files():
    place = Place(settings=BrokerSettings(open_files=50, topic=TopicSettings(min_free_bytes=0, backoff_ms=100)))
    broker = place.broker
    broker.create_topic("orders")
    group = broker.group("orders", "default")
    for number in range(5):
        broker.publish("orders", b"%d" % number)
    broker.publish("orders", b"late", delay=10)
    held = group.receive(timeout=0)
    failed = group.receive(timeout=0)
    failed.nack(error="once")

    def rest_all() -> int:
        logs = place.engine.world.open_files
        rested = 0
        for known, _ in list(logs._openers.values()):
            rested += known().rest(wait=True)
        return rested

    assert rest_all() >= 3
    held.extend(60)
    assert rest_all() >= 1
    held.ack()
    rest_all()
    place.after(seconds=5)
    rest_all()
    found = group.receive_many(10, timeout=0)
    assert [message.body for message in found] == [b"1", b"2", b"3", b"4"]
    assert found[0].attempt == 2
    rest_all()
    place.after(seconds=5)
    assert group.receive(timeout=0).body == b"late"
    rest_all()
    place.kill()
    rest_all()
    assert taken(place.broker.group("orders", "default")) == [b"1", b"2", b"3", b"4", b"late"]
    place.close()


def test_who_waits_is_woken_by_a_message_into_a_log_that_rested(tmp_path: Path):
    with holdfast.open_broker(tmp_path / "data", settings=FEW) as broker:
        broker.create_topic("orders")
        group = broker.group("orders", "default")
        got: list[bytes] = []
        waiting = threading.Thread(target=lambda: got.append(group.receive(timeout=30).body))
        waiting.start()
        while not group._port.queue_group.waiters:
            threading.Event().wait(0.01)
        for delivery in group._port.queue_group.deliveries:
            assert delivery.partition.log._files.rest(wait=True)
            assert delivery.journal.log._files.rest(wait=True)
        broker.publish("orders", b"a")
        waiting.join(30)
        assert got == [b"a"]
        group.close()
