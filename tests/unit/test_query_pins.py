"""What running queries need is not removed: by retention, trimming or compaction, of topics and of queues."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.broker.streams.queries import QueryLease
from holdfast.env import SeededIds, World
from holdfast.errors import InvalidRequest, UnknownGroup
from holdfast.settings import BrokerSettings, TopicSettings
from tests.unit.brokers import FOLDER, Place, taken
from tests.unit.test_compaction import Keyed
from tests.unit.test_retention import Kept

TTL_MS = 60_000
KEPT = BrokerSettings(
    topic=TopicSettings(
        min_free_bytes=0,
        segment_bytes=4096,
        frame_bytes=1024,
        durability="os",
        retention_ms=3_600_000,
        retention_check_ms=1_000,
    )
)


# The log asks when something could go


def test_retention_and_trimming_ask_before_each_segment_and_only_where_one_could_go():
    kept = Kept(retention_segments=2).fill(2)
    asked = []
    kept.log.needed_outside = lambda: asked.append(kept.log.start)
    kept.log.retain()
    kept.log.trim(kept.log.start)
    assert asked == []
    kept.fill(5)
    bases = [segment.base_offset for segment in kept.log.segments()]
    assert kept.log.retain().segments == 3
    assert asked == bases[:3]
    kept.fill(4)
    kept.log.trim(kept.log.end)
    assert len(asked) == 3 + 3


def test_what_somebody_outside_needs_stays():
    kept = Kept(retention_segments=1).fill(6)
    third = kept.log.segments()[2].base_offset
    kept.log.needed_outside = lambda: third + 1
    assert kept.log.retain().start == third
    assert kept.log.trim(kept.log.end).start == third
    kept.log.needed_outside = lambda: None
    assert kept.log.trim(kept.log.end).segments == 3


def test_whoever_comes_while_segments_are_removed_keeps_the_rest():
    kept = Kept(retention_segments=1).fill(6)
    answers = iter([None, None, 0, None])
    kept.log.needed_outside = lambda: next(answers)
    assert kept.log.retain().segments == 2


def test_retention_that_ignores_pins_ignores_those_outside_too_and_trimming_does_not():
    kept = Kept(retention_segments=2, retention_ignores_pins=True).fill(5)
    kept.log.needed_outside = lambda: 0
    assert kept.log.trim(kept.log.end).segments == 0
    assert kept.log.retain().segments == 3


def sealed() -> Keyed:
    keyed = Keyed()
    for number in range(3):
        keyed.put(("a", f"{number}"), ("b", f"{number}"))
        keyed.seal()
    return keyed


def test_compaction_leaves_alone_what_somebody_outside_needs():
    keyed = sealed()
    keyed.log.needed_outside = lambda: 2
    assert keyed.compact().removed_messages == 2
    assert sorted(keyed.there()) == [2, 3, 4, 5]
    keyed.log.needed_outside = lambda: None
    assert keyed.compact().removed_messages == 2
    assert sorted(keyed.there()) == [4, 5]


def test_a_compaction_does_not_begin_with_what_somebody_outside_needs():
    keyed, steps = sealed(), []
    keyed.log.needed_outside = lambda: 3
    keyed.compact(progress=lambda done, total: steps.append((done, total)))
    assert steps == [(0, 1), (1, 1)]


def test_whoever_comes_during_a_compaction_keeps_what_is_not_compacted_yet():
    keyed = sealed()
    answers = iter([None, None, 0])
    keyed.log.needed_outside = lambda: next(answers)
    assert keyed.compact().removed_messages == 2
    assert sorted(keyed.there()) == [2, 3, 4, 5]
    assert not any(name.endswith(".tmp") for name in keyed.disk.names(keyed.log.folder))


# The broker tells it of queries


class Read(Place):
    """A broker, and a query in another process that reads what it holds."""

    def __init__(self, **options: Any) -> None:
        super().__init__(settings=options.pop("settings", KEPT), **options)
        self.broker.create_topic("orders", partitions=2)

    def query(self, group: str = "report", topic: str = "orders", **offsets: int) -> QueryLease:
        """One that goes on at these offsets of the partitions p0 and p1."""
        world = World(clock=self.clock, disk=self.disk, ids=SeededIds(2))
        lease = QueryLease.start(world, FOLDER, group, ttl_ms=TTL_MS)
        topic_id = self.broker.describe_topic(topic).id
        assert lease.hold({topic: (topic_id, {int(name[1:]): offset for name, offset in offsets.items()})})
        return lease

    def fill(self, count: int = 20, topic: str = "orders") -> None:
        for number in range(count):
            self.broker.publish(topic, b"%03d" % number + bytes(1000), partition=number % 2)

    def starts(self, topic: str = "orders") -> list[int]:
        return [partition.start for partition in self.broker.describe_topic(topic).partitions]

    def modes(self) -> list[tuple[str, str]]:
        return [(info.name, info.mode) for info in self.broker.groups()]


@pytest.fixture
def read():
    place = Read()
    yield place
    place.close()


def test_retention_waits_for_a_query_and_goes_on_when_it_has_read(read):
    read.fill()
    lease = read.query(p0=0, p1=9)
    for _ in range(200):  # hours, in which the query runs and reads nothing
        read.after(seconds=30)
        lease.tick()
    first, second = read.starts()
    assert first == 0
    assert 0 < second <= 9
    lease.hold({"orders": (read.broker.describe_topic("orders").id, {0: 8, 1: 9})})
    read.after(seconds=2)
    assert 0 < read.starts()[0] <= 8
    lease.end()
    read.after(seconds=2)
    assert read.starts()[0] > 8


def test_a_query_that_dies_holds_nothing_up_after_its_time_out(read):
    read.fill()
    read.after(seconds=3_600)
    lease = read.query(p0=0, p1=0)
    read.after(seconds=30)
    assert read.starts() == [0, 0]
    assert read.modes() == [("report", "query")]
    read.after(seconds=60)
    assert min(read.starts()) > 0
    assert read.modes() == []
    lease.end()


def test_the_file_of_a_dead_query_goes_though_nothing_else_could(read):
    lease = read.query(p0=0, p1=0)
    read.engine.tick()
    read.clock.advance(ms=TTL_MS)
    assert read.disk.names(f"{FOLDER}/queries") == [lease.file]
    read.engine.tick()
    assert read.disk.names(f"{FOLDER}/queries") == []
    lease.end()


def test_a_new_partition_is_kept_from_its_beginning_for_a_query_that_does_not_know_it(read):
    lease = read.query(p0=0, p1=0)
    read.broker.add_partitions("orders", 1)
    for number in range(20):
        read.broker.publish("orders", b"%03d" % number + bytes(1000), partition=2)
    for _ in range(130):
        read.after(seconds=30)
        lease.tick()
    assert read.starts() == [0, 0, 0]
    lease.end()
    read.after(seconds=2)
    assert read.starts()[2] > 0


def test_a_topic_that_is_read_can_be_deleted_and_the_next_of_its_name_is_not_held_up(read):
    lease = read.query(p0=0, p1=0)
    read.broker.delete_topic("orders")
    read.broker.create_topic("orders", partitions=2)
    read.fill()
    for _ in range(130):
        read.after(seconds=30)
        lease.tick()
    assert min(read.starts()) > 0
    assert read.modes() == []
    lease.end()


def test_a_closed_topic_is_looked_after_with_its_queries_in_mind(read):
    read.fill()
    lease = read.query(p0=0, p1=0)
    read.reopen()
    for _ in range(300):
        read.after(seconds=30)
        lease.tick()
    assert read.starts() == [0, 0]
    lease.end()


def test_trimming_behind_acks_waits_for_a_query(read):
    group = read.broker.group("orders", "billing")
    read.fill()
    assert len(taken(group)) == 20
    lease = read.query(p0=0, p1=8)
    group.compact()
    first, second = read.starts()
    assert first == 0
    assert 0 < second <= 8
    lease.end()
    group.compact()
    assert read.starts() == [10, 10]


def test_a_query_of_dead_letters_is_heard_when_they_are_trimmed(read):
    """Their retention ignores everybody; only trimming, of those that were redriven or purged, waits for a query."""
    group = read.broker.group("orders", "billing", max_attempts=1)
    read.fill(8)
    for message in group.receive_many(8, timeout=0):
        message.reject("no")
    read.after(seconds=1)
    world = World(clock=read.clock, disk=read.disk, ids=SeededIds(2))
    lease = QueryLease.start(world, FOLDER, "triage", ttl_ms=TTL_MS)
    lease.hold({"orders.dlq": (0, {0: 0, 1: 0})})
    topic = read.engine.topic("orders")
    assert topic._dead[0].target.log.needed_outside() == 0
    lease.end()
    assert topic._dead[0].target.log.needed_outside() is None


@pytest.mark.parametrize("tasks", [False, True], ids=["threads", "tasks"])
def test_a_query_is_shown_as_a_group_with_its_lag(tasks):
    read = Read(tasks=tasks)
    read.fill()
    read.clock.advance(seconds=40)
    lease = read.query(p0=4, p1=10)
    read.clock.advance(seconds=5)
    (info,) = read.broker.groups("orders")
    assert (info.name, info.topic, info.mode, info.lag, info.members) == ("report", "orders", "query", 6, 1)
    assert (info.lag_seconds, info.renewed_seconds, info.timeout_seconds) == (45.0, 5.0, 60.0)
    read.broker.delete_group("report")
    assert read.broker.groups() == []
    with pytest.raises(UnknownGroup):
        read.broker.delete_group("report")
    lease.renew()
    assert len(read.broker.groups()) == 1
    lease.end()
    read.close()


def test_a_query_cannot_be_reset(read):
    lease = read.query(p0=0)
    with pytest.raises(InvalidRequest, match="query"):
        read.broker.reset_offsets("report", "orders", to="latest")
    lease.end()


def test_the_lag_of_queries_is_among_the_metrics_of_each_group(read):
    groups = [read.broker.group("orders", name) for name in ("default", "billing")]
    read.fill()
    read.clock.advance(seconds=40)
    quiet = {"queries": 0, "query_lag": 0, "query_lag_seconds": 0.0}
    assert [group.stats().metrics.gauges for group in groups] == [quiet, quiet]
    leases = [read.query("one", p0=10, p1=9), read.query("other", p0=2, p1=10)]
    behind = {"queries": 2, "query_lag": 8, "query_lag_seconds": 40.0}
    assert [group.stats().metrics.gauges for group in groups] == [behind, behind]
    for lease in leases:
        lease.end()


def test_the_folder_is_not_looked_at_while_nothing_could_go(read):
    group = read.broker.group("orders", "billing")
    lease = read.query(p0=0, p1=0)
    read.fill(4)
    read.engine.tick()
    looked = read.disk.calls["names"]
    for _ in range(3):
        read.fill(4)
        assert len(taken(group)) >= 4
        read.engine.tick_due()
    assert read.disk.calls["names"] == looked
    lease.end()
