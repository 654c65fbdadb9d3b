"""Running queries: a lease in a file, what it keeps from going, and how it ends in order or without a word."""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import threading

import pytest

from holdfast.broker.streams.queries import MOST_TTL_MS, Queries, QueryLease, list_queries, renewing
from holdfast.env import ManualClock, SeededIds, World, real_world
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import Closed, InvalidRequest

ROOT = "/data/broker"
FOLDER = f"{ROOT}/queries"
TTL_MS = 60_000
ORDERS = {"orders": (7, {0: 100, 1: 200})}


class Shared:
    """A data folder that an owner and queries share; each process has numbers of its own."""

    def __init__(self) -> None:
        self.disk = SimulatedDisk()
        self.clock = ManualClock()
        self.ids = SeededIds(1)
        self.disk.make_folder(f"{ROOT}/topics")
        self.owner = Queries(self.world, ROOT)

    @property
    def world(self) -> World:
        return World(clock=self.clock, disk=self.disk, ids=self.ids)

    def lease(self, group: str = "report", **options) -> QueryLease:
        return QueryLease.start(self.world, ROOT, group, ttl_ms=options.pop("ttl_ms", TTL_MS), **options)

    def elsewhere(self, group: str = "report", *, boot_id: int = 5) -> QueryLease:
        """A lease of a machine with another clock: nothing but a change of its file tells that it lives."""
        ids = SeededIds(boot_id)
        return QueryLease.start(World(clock=self.clock, disk=self.disk, ids=ids), ROOT, group, ttl_ms=TTL_MS)

    def floor(self, topic: str = "orders", topic_id: int = 7, partition: int = 0) -> int | None:
        return self.owner.floor(topic, topic_id, partition)

    def put(self, name: str, content: bytes) -> None:
        self.disk.make_folder(FOLDER)
        file = self.disk.open(f"{FOLDER}/{name}", write=True, create=True)
        file.truncate(0)
        file.write(0, [content])
        file.close()

    @property
    def files(self) -> list[str]:
        return self.disk.names(FOLDER) if self.disk.exists(FOLDER) else []


@pytest.fixture
def shared() -> Shared:
    return Shared()


# The query's side


def test_a_folder_without_queries_needs_nothing(shared):
    assert shared.floor() is None
    assert shared.owner.running() == []
    assert list_queries(shared.world, ROOT) == []
    assert not shared.disk.exists(FOLDER)


def test_a_query_keeps_what_it_holds_until_it_moves_on_or_ends(shared):
    lease = shared.lease()
    assert shared.files == []
    assert lease.hold(ORDERS)
    assert (shared.floor(partition=0), shared.floor(partition=1)) == (100, 200)
    assert lease.hold({"orders": (7, {0: 150, 1: 200})})
    assert shared.floor() == 150
    lease.end()
    lease.end()
    assert shared.floor() is None
    assert shared.files == []


def test_a_partition_that_is_not_named_is_needed_from_its_beginning(shared):
    lease = shared.lease()
    lease.hold(ORDERS)
    assert shared.floor(partition=2) == 0
    assert shared.floor(topic="mails") is None


def test_another_topic_of_the_same_name_is_not_needed(shared):
    lease = shared.lease()
    lease.hold(ORDERS)
    assert shared.floor(topic_id=8) is None


def test_the_query_that_is_furthest_behind_counts(shared):
    one, other = shared.lease("one"), shared.lease("other")
    one.hold(ORDERS)
    other.hold({"orders": (7, {0: 40}), "mails": (9, {0: 1})})
    assert shared.floor() == 40
    other.end()
    assert shared.floor() == 100
    one.end()


def test_two_queries_of_one_group_have_a_file_each(shared):
    one, other = shared.lease(), shared.lease()
    one.hold(ORDERS)
    other.hold({"orders": (7, {0: 300})})
    assert len(shared.files) == 2
    one.end()
    assert shared.floor() == 300
    other.end()


def test_the_same_positions_are_not_written_again(shared):
    lease = shared.lease()
    lease.hold(ORDERS)
    writes = shared.disk.calls["rename"]
    assert lease.hold({"orders": (7, {1: 200, 0: 100})})
    assert shared.disk.calls["rename"] == writes
    lease.end()


def test_the_file_tells_people_who_runs_and_since_when(shared):
    lease = shared.lease()
    lease.hold(ORDERS)
    written = json.loads(shared.disk.contents(f"{FOLDER}/{lease.file}"))
    assert written["topics"] == {"orders": {"id": 7, "partitions": {"0": 100, "1": 200}}}
    assert (written["version"], written["kind"], written["group"], written["renewed"]) == (1, "spark", "report", 1)
    shared.clock.advance(seconds=12)
    (query,) = list_queries(shared.world, ROOT)
    assert (query.group, query.holder, query.ttl_ms) == ("report", "simulation:1", TTL_MS)
    assert (query.renewed_ms_ago, query.stale) == (12_000, False)
    shared.clock.advance(seconds=50)
    assert list_queries(shared.world, ROOT)[0].stale
    lease.end()


def test_it_is_renewed_every_third_of_its_time_out(shared):
    lease = shared.lease()
    assert lease.tick() == TTL_MS // 3
    assert not lease.renew()
    assert shared.files == []
    lease.hold(ORDERS)
    shared.clock.advance(ms=15_000)
    assert lease.tick() == 5_000
    shared.clock.advance(ms=5_000)
    assert lease.tick() == TTL_MS // 3
    assert list_queries(shared.world, ROOT)[0].renewed_ms_ago == 0
    shared.clock.advance(ms=10_000)
    lease.hold({"orders": (7, {0: 101})})
    shared.clock.advance(ms=10_000)
    assert lease.tick() == 10_000
    lease.end()
    with pytest.raises(Closed):
        lease.tick()
    assert not lease.hold(ORDERS)
    assert not lease.renew()
    assert shared.files == []


def test_a_folder_that_cannot_be_written_is_warned_of_once_and_tried_again(shared, caplog):
    lease = shared.lease()
    shared.disk.faults.fail(1, errno.EACCES, sticky=True)
    with caplog.at_level(logging.WARNING):
        assert not lease.hold(ORDERS)
        assert not lease.hold(ORDERS)
        lease.tick()
    assert [record.message for record in caplog.records] == ["a query cannot keep what it has not read from retention"]
    shared.disk.faults.clear()
    lease.tick()
    assert shared.floor() == 100
    lease.end()


def test_a_data_folder_that_was_taken_away_does_not_come_back(shared):
    lease = shared.lease()
    lease.hold(ORDERS)
    shared.disk = lease._world.disk
    shared.disk.remove(f"{FOLDER}/{lease.file}")
    for folder in (FOLDER, f"{ROOT}/topics", ROOT):
        shared.disk.remove_folder(folder)
    assert not lease.renew()
    assert not shared.disk.exists(ROOT)
    lease.end()


@pytest.mark.parametrize("group", ["", "../out", "a b", ".hidden", None])
def test_a_group_must_have_a_name_that_groups_may_have(shared, group):
    with pytest.raises(InvalidRequest, match="group"):
        shared.lease(group)


@pytest.mark.parametrize("ttl_ms", [0, 999, -1, MOST_TTL_MS + 1, 1e6, True])
def test_a_time_out_lies_between_a_second_and_a_week(shared, ttl_ms):
    with pytest.raises(InvalidRequest, match="timeout"):
        shared.lease(ttl_ms=ttl_ms)


def test_a_lease_that_nobody_has_any_more_ends(shared):
    lease = shared.lease()
    lease.hold(ORDERS)
    del lease
    gc.collect()
    assert shared.files == []


def test_a_thread_renews_it_until_it_ends(tmp_path):
    (tmp_path / "topics").mkdir()
    world = real_world()
    lease = renewing(QueryLease.start(world, str(tmp_path), "report", ttl_ms=1_000))
    written = threading.Event()
    write = lease.put

    def noted(content: bytes) -> None:
        write(content)
        if lease._renewed > 1:
            written.set()

    lease.put = noted
    lease.hold(ORDERS)
    lease.on_attention()
    assert written.wait(20)
    assert Queries(world, str(tmp_path)).floor("orders", 7, 0) == 100
    keeper = lease.before_close.__self__
    lease.end()
    assert not keeper._thread.is_alive()
    assert os.listdir(tmp_path / "queries") == []


def test_a_forked_child_leaves_its_parents_lease_alone(tmp_path):
    (tmp_path / "topics").mkdir()
    lease = QueryLease.start(real_world(), str(tmp_path), "report", ttl_ms=TTL_MS)
    lease.hold(ORDERS)
    with lease._lock:  # as another thread of the parent may have at that moment
        child = os.fork()
        if child == 0:
            left_alone = not lease.hold({"orders": (7, {0: 999})})
            lease.end()
            os._exit(0 if left_alone else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert Queries(real_world(), str(tmp_path)).floor("orders", 7, 0) == 100
    lease.end()


# The owner's side


def test_a_query_that_is_not_renewed_in_time_is_dead_and_its_file_goes(shared):
    lease = shared.elsewhere()
    lease.hold(ORDERS)
    assert shared.floor() == 100
    shared.clock.advance(ms=TTL_MS - 1)
    assert shared.floor() == 100
    shared.clock.advance(ms=1)
    assert shared.floor() is None
    assert shared.files == []
    lease.renew()  # it was only slow, and is there again
    assert shared.floor() == 100
    lease.end()


def test_a_query_that_is_renewed_lives_however_long_nobody_looked(shared):
    lease = shared.elsewhere()
    lease.hold(ORDERS)
    assert shared.floor() == 100
    for _ in range(10):
        shared.clock.advance(ms=TTL_MS // 3)
        lease.tick()
    assert shared.floor() == 100
    lease.end()


@pytest.mark.parametrize("days", [-400, 400])
def test_a_wall_clock_that_is_set_neither_ends_a_query_nor_keeps_a_dead_one(shared, days):
    leases = [shared.lease("here"), shared.elsewhere("elsewhere")]
    for lease in leases:
        lease.hold(ORDERS)
    assert len(shared.owner.running()) == 2
    shared.clock.step_wall(ns=days * 86_400 * 10**9)
    assert len(shared.owner.running()) == 2
    shared.clock.advance(ms=TTL_MS - 1)
    assert len(shared.owner.running()) == 2
    shared.clock.advance(ms=1)
    assert shared.owner.running() == []
    for lease in leases:
        lease.end()


def test_an_owner_that_has_just_come_knows_the_dead_of_its_own_machine_at_once(shared):
    here, elsewhere = shared.lease("here"), shared.elsewhere("elsewhere")
    here.hold(ORDERS)
    elsewhere.hold({"orders": (7, {0: 30})})
    shared.clock.advance(ms=TTL_MS)
    shared.owner = Queries(shared.world, ROOT)
    assert [query.group for query in shared.owner.running()] == ["elsewhere"]
    shared.clock.advance(ms=TTL_MS)
    assert shared.owner.running() == []
    here.end()
    elsewhere.end()


def test_a_query_from_before_a_restart_of_the_machine_is_given_its_time(shared):
    lease = shared.lease()
    shared.clock.advance(seconds=10_000)
    lease.hold(ORDERS)
    shared.clock, shared.ids = ManualClock(), SeededIds(99)
    shared.owner = Queries(shared.world, ROOT)
    assert shared.floor() == 100
    shared.clock.advance(ms=TTL_MS)
    assert shared.floor() is None


def test_one_that_comes_back_is_judged_by_its_changes_and_not_by_its_clock(shared):
    """In a container with a clock of its own a file may seem old as soon as it is written."""
    lease = shared.lease()
    lease._world = World(clock=ManualClock(), disk=shared.disk, ids=shared.ids)  # far behind ours
    shared.clock.advance(seconds=1_000)
    lease.hold(ORDERS)
    assert shared.floor() is None
    lease.renew()
    assert shared.floor() == 100
    shared.clock.advance(ms=TTL_MS - 1)
    assert shared.floor() == 100
    shared.clock.advance(ms=1)
    assert shared.floor() is None
    lease.end()


def test_one_whose_clock_is_ahead_of_ours_is_judged_by_its_changes(shared):
    ahead = ManualClock()
    ahead.advance(seconds=1_000)
    lease = QueryLease.start(World(ahead, shared.disk, shared.ids), ROOT, "report", ttl_ms=TTL_MS)
    lease.hold(ORDERS)
    shared.clock.advance(seconds=1)
    assert list_queries(shared.world, ROOT)[0].renewed_ms_ago == 0
    assert shared.floor() == 100
    shared.clock.advance(ms=TTL_MS)
    assert shared.floor() is None
    lease.end()


def test_one_that_is_renewed_just_as_the_owner_gives_it_up_stays(shared):
    lease = shared.elsewhere()
    lease.hold(ORDERS)
    assert shared.floor() == 100
    shared.clock.advance(ms=TTL_MS)
    look, looks = shared.disk.open, []

    def look_and_renew(path, **options):
        found = look(path, **options)
        if path.endswith(".json"):
            looks.append(path)
            if len(looks) == 1:
                content = found.read(0, found.size())
                lease.renew()
                found = shared.disk.open("/old", write=True, create=True)
                found.write(0, [content])
        return found

    shared.disk.make_folder("/")
    shared.disk.open = look_and_renew
    assert shared.floor() == 100
    assert shared.files == [lease.file]
    lease.end()


GARBAGE = {
    "nothing": b"",
    "half of it": b'{"version":1,"group":"repo',
    "zeros, as after a power cut": bytes(300),
    "no object": b"[1, 2]",
    "another type": b'{"version":1,"ttl_ms":60000,"topics":7}',
    "no bytes of text": b"\xff\xfe\x00",
    "an offset below nothing": b'{"version":1,"group":"r","kind":"spark","ttl_ms":60000,"renewed":1,"renewed_at_ms":1,'
    b'"renewed_mono_ms":1,"boot_id":1,"pid":1,"host":"h","topics":{"orders":{"id":7,"partitions":{"0":-1}}}}',
    "a time-out of ages": b'{"version":1,"ttl_ms":999999999999999999}',
}


@pytest.mark.parametrize("content", GARBAGE.values(), ids=GARBAGE.keys())
def test_a_file_that_cannot_be_understood_keeps_everything_for_its_time(shared, caplog, content):
    shared.put("report@0000000a.json", content)
    with caplog.at_level(logging.WARNING):
        assert shared.floor() == 0
        assert shared.floor(topic="mails", topic_id=1, partition=5) == 0
    assert len(caplog.records) == 1
    assert shared.owner.running() == []
    (query,) = list_queries(shared.world, ROOT)
    assert query.wrong
    assert query.group == "report"
    shared.clock.advance(seconds=299)
    assert shared.floor() == 0
    shared.clock.advance(seconds=1)
    assert shared.floor() is None
    assert shared.files == []


def test_a_file_of_a_newer_version_keeps_everything_for_as_long_as_it_is_renewed(shared, caplog):
    with caplog.at_level(logging.WARNING):
        for count in range(4):
            shared.put("report@0000000a.json", b'{"version":2,"ttl_ms":1000,"renewed":%d,"pins":{}}' % count)
            assert shared.floor() == 0
            shared.clock.advance(ms=900)
    assert len(caplog.records) == 1
    assert "version 2" in caplog.records[0].error
    shared.clock.advance(ms=100)
    assert shared.floor() is None


def test_what_is_no_file_of_a_query_is_left_alone(shared):
    for name in ("README", ".DS_Store", "report.json", "report@12.json"):
        shared.put(name, b"?")
    shared.disk.make_folder(f"{FOLDER}/old@0000000a")
    assert shared.floor() is None
    shared.clock.advance(seconds=10_000)
    shared.owner.tidy()
    assert len(shared.files) == 5


def test_what_a_killed_query_left_half_written_goes_in_time_and_keeps_nothing(shared):
    shared.put("report@0000000a.json.tmp", b'{"version":1')
    assert shared.floor() is None
    shared.clock.advance(seconds=299)
    shared.owner.tidy()
    assert len(shared.files) == 1
    shared.clock.advance(seconds=1)
    shared.owner.tidy()
    assert shared.files == []


@pytest.mark.parametrize("call", ["names", "open", "read"])
def test_a_folder_that_cannot_be_read_keeps_everything_and_is_warned_of_once(shared, caplog, call):
    lease = shared.lease()
    lease.hold(ORDERS)
    shared.disk.faults.fail(1, errno.EIO, sticky=True, calls=frozenset({call}))
    assert list_queries(shared.world, ROOT)[0].wrong
    with caplog.at_level(logging.WARNING):
        assert shared.floor() == 0
        shared.clock.advance(seconds=10_000)
        assert shared.floor() == 0
    assert len(caplog.records) == 1
    shared.disk.faults.clear()
    assert shared.floor() is None
    lease.end()


def test_a_dead_query_whose_file_cannot_be_removed_counts_no_more(shared):
    lease = shared.lease()
    lease.hold(ORDERS)
    assert shared.floor() == 100
    shared.clock.advance(ms=TTL_MS)
    shared.disk.faults.fail(1, errno.EROFS, sticky=True, calls=frozenset({"remove"}))
    assert shared.floor() is None
    assert shared.floor() is None
    shared.disk.faults.clear()
    lease.end()


def test_removing_a_groups_queries_takes_their_files_until_they_are_written_again(shared):
    lease, other = shared.lease(), shared.lease("other")
    lease.hold(ORDERS)
    other.hold({"orders": (7, {0: 500})})
    assert shared.owner.remove("report") == 1
    assert shared.owner.remove("report") == 0
    assert shared.floor() == 500
    lease.renew()
    assert shared.floor() == 100
    lease.end()
    other.end()
