"""Running queries and owners that come, go and die at any moment: what a live query needs is there."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

import holdfast
from holdfast.broker.streams.queries import Queries, QueryLease
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.settings import BrokerSettings, TopicSettings
from holdfast.storage import LogReader
from tests.unit.test_query_pins import Read

ROOT = "/data/broker"
TTL_MS = 60_000


class Stopped(Exception):
    """The process ends here."""


def a_run(read: Read) -> None:
    """Retention, of partitions whose messages are all too old."""
    read.engine.topic("orders").retain()


def old(read: Read) -> Read:
    read.fill(60)
    read.clock.advance(seconds=4_000)
    return read


def test_a_query_that_comes_at_any_moment_of_a_retention_run_keeps_all_but_the_segment_in_hand():
    changes: list[str] = []
    read = old(Read())
    read.disk.on_call = changes.append
    a_run(read)
    assert changes.count("remove") > 10
    for moment in range(len(changes)):
        read, left, found = old(Read()), moment, []

        def come(call: str, read: Read = read, found: list[int] = found) -> None:
            nonlocal left
            left -= 1
            if left == -1:
                read.disk.on_call = None
                read.lease = read.query(p0=0, p1=0)
                found += [partition.log.start for partition in read.engine.topic("orders").partitions]

        read.disk.on_call = come
        a_run(read)
        # One that is being removed is no longer counted by the log; whether it may go was asked before.
        assert read.starts() == found, f"moment {moment}"
        read.lease.end()
        read.close()


def test_where_a_query_is_told_to_begin_stays_at_whichever_moment_of_a_retention_run_it_comes():
    changes: list[str] = []
    read = old(Read())
    read.disk.on_call = changes.append
    a_run(read)
    for moment in range(len(changes)):
        read, left, begun_at = old(Read()), moment, []

        def come(call: str, read: Read = read, begun_at: list[int] = begun_at) -> None:
            nonlocal left
            left -= 1
            if left == -1:
                read.disk.on_call = None
                read.lease = read.query()  # of all partitions everything, before it looks
                begun_at += [
                    LogReader(partition.log.folder, world=read.world).lasting_start
                    for partition in read.engine.topic("orders").partitions
                ]

        read.disk.on_call = come
        a_run(read)
        read.disk.on_call = None
        a_run(read)
        assert all(start <= first for start, first in zip(read.starts(), begun_at, strict=True)), f"moment {moment}"
        assert [
            LogReader(p.log.folder, world=read.world).lasting_start for p in read.engine.topic("orders").partitions
        ] == (read.starts()), "nothing is being removed any more"
        read.lease.end()
        read.close()


def test_a_query_killed_at_any_moment_of_a_move_leaves_its_old_place_or_its_new_one():
    calls = moved_until(None)[0]
    assert calls > 3
    for moment in range(calls):
        _, disk, clock = moved_until(moment)
        owner = Queries(World(clock, disk.kill(), SeededIds(3)), ROOT)
        assert owner.floor("orders", 7, 0) in (100, 150)
        clock.advance(ms=300_000)
        assert owner.floor("orders", 7, 0) is None
        owner.tidy()
        assert owner._world.disk.names(f"{ROOT}/queries") == []


def test_whatever_a_power_cut_leaves_of_a_query_it_is_kept_for_its_time_and_no_longer(scale):
    calls = moved_until(None)[0]
    for seed in range(scale(100, 5_000)):
        rng = random.Random(seed)
        _, disk, clock = moved_until(rng.randrange(calls))
        owner = Queries(World(clock, disk.cut(rng), SeededIds(3)), ROOT)
        assert owner.floor("orders", 7, 0) in (None, 0, 100, 150), f"seed {seed}"
        clock.advance(ms=300_000)
        assert owner.floor("orders", 7, 0) is None, f"seed {seed}"
        owner.tidy()
        left = owner._world.disk
        assert not left.exists(f"{ROOT}/queries") or left.names(f"{ROOT}/queries") == []


def moved_until(moment: int | None) -> tuple[int, SimulatedDisk, ManualClock]:
    """A query that moves on and is stopped behind that change of the disk; how many changes it makes otherwise."""
    disk, clock, changes = SimulatedDisk(), ManualClock(), 0

    def stop(call: str) -> None:
        nonlocal changes
        changes += 1
        if moment is not None and changes > moment:
            raise Stopped

    disk.make_folder(f"{ROOT}/topics")
    lease = QueryLease.start(World(clock, disk, SeededIds(2)), ROOT, "report", ttl_ms=TTL_MS)
    lease.hold({"orders": (7, {0: 100})})
    disk.on_call = stop
    with suppress(Stopped):
        lease.hold({"orders": (7, {0: 150})})
    disk.on_call = None
    lease._ended = True  # nobody is there to end it
    return changes, disk, clock


def test_an_owner_killed_at_any_moment_leaves_what_a_query_needs_to_the_next_one():
    for moment in range(0, 60, 3):
        read, left = old(Read()), moment
        lease = read.query(p0=12, p1=3)

        def stop(call: str) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise Stopped

        read.disk.on_call = stop
        with suppress(Stopped):
            a_run(read)
        read.disk.on_call = None
        read.kill()
        a_run(read)
        first, second = read.starts()
        assert 6 < first <= 12
        assert second <= 3
        assert read.modes() == [("report", "query")]
        lease._ended = True
        read.close()


HELD = """
import sys
from holdfast.broker.folder.contents import Catalog
from holdfast.broker.streams.queries import QueryLease, renewing
from holdfast.env import real_world

world = real_world()
lease = renewing(QueryLease.start(world, sys.argv[1], "report", ttl_ms=1_500))
assert lease.hold({"orders": (Catalog(world, sys.argv[1]).facts("orders").id, {0: 0})})
print("held", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("ending", ["kill", "exit"])
def test_a_query_of_another_process_holds_until_it_ends_or_its_time_out_after_a_kill(tmp_path, ending):
    topic = TopicSettings(
        min_free_bytes=0,
        segment_bytes=4096,
        frame_bytes=1024,
        durability="os",
        retention_segments=1,
        retention_check_ms=50,
    )
    folder = tmp_path / "data"
    with holdfast.open_broker(folder, settings=BrokerSettings(topic=topic)) as broker:
        broker.create_topic("orders")
        with a_query(folder) as query:
            assert query.stdout.readline() == "held\n"
            until = time.monotonic() + 3  # twice its time-out: it is renewed, and the keeper applies retention
            while time.monotonic() < until:
                broker.publish("orders", bytes(1000))
                assert broker.describe_topic("orders").partitions[0].start == 0
                time.sleep(0.01)
            assert [info.mode for info in broker.groups()] == ["query"]
            if ending == "kill":
                query.kill()
            else:
                query.stdin.close()
        if ending == "exit":
            assert list((folder / "queries").iterdir()) == []
        give_up = time.monotonic() + 20
        while broker.groups():
            assert time.monotonic() < give_up
            time.sleep(0.01)
        broker._port.engine.topic("orders").retain()
        assert broker.describe_topic("orders").partitions[0].segments == 1


def a_query(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HELD, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
