"""Queries and owners in any order, with clocks that are set: the living find what they need, the dead keep nothing."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from holdfast.broker.streams.queries import QueryLease
from holdfast.env import SeededIds, World
from tests.unit.brokers import FOLDER
from tests.unit.test_query_pins import TTL_MS, Read


@dataclass
class Reader:
    """A query as we know it: where it is, and when it last said so."""

    lease: QueryLease
    offset: int
    renewed_ms: int


class QueriesMachine(RuleBasedStateMachine):
    """One topic, whose messages are too old as soon as they are written."""

    def __init__(self) -> None:
        super().__init__()
        self.read = Read()
        self.read.broker.alter_topic("orders", retention_ms=1)
        self.readers: list[Reader] = []
        self.seed = 10

    @property
    def now_ms(self) -> int:
        return self.read.clock.monotonic_ns() // 1_000_000

    @property
    def log(self):
        return self.read.engine.topic("orders").partitions[0].log

    def live(self) -> list[Reader]:
        """Those in time; whoever once was not can rely on nothing any more."""
        late = [reader for reader in self.readers if self.now_ms - reader.renewed_ms >= TTL_MS]
        for reader in late:
            self.lose(reader)
        return self.readers

    def lose(self, reader: Reader) -> None:
        """Killed, or so slow that it counts as dead: nobody takes its file away in order."""
        reader.lease._ended = True
        self.readers.remove(reader)

    @rule(behind=st.integers(0, 8), here=st.booleans())
    def begin(self, behind: int, here: bool) -> None:
        self.seed += 1
        ids = self.read.ids if here else SeededIds(self.seed)
        lease = QueryLease.start(World(self.read.clock, self.read.disk, ids), FOLDER, "report", ttl_ms=TTL_MS)
        offset = max(self.log.start, self.log.end - behind)
        reader = Reader(lease, offset, self.now_ms)
        self.hold(reader)
        self.readers.append(reader)

    def hold(self, reader: Reader) -> None:
        topic_id = self.read.engine.topic("orders").id
        assert reader.lease.hold({"orders": (topic_id, {0: reader.offset})})

    @precondition(lambda self: self.live())
    @rule(which=st.integers(0, 100), by=st.integers(1, 5))
    def move(self, which: int, by: int) -> None:
        reader = self.readers[which % len(self.readers)]
        moved = min(reader.offset + by, self.log.end)
        if moved > reader.offset:
            reader.offset, reader.renewed_ms = moved, self.now_ms
            self.hold(reader)

    @precondition(lambda self: self.live())
    @rule(which=st.integers(0, 100))
    def renew(self, which: int) -> None:
        reader = self.readers[which % len(self.readers)]
        assert reader.lease.renew()
        reader.renewed_ms = self.now_ms

    @precondition(lambda self: self.live())
    @rule(which=st.integers(0, 100), in_order=st.booleans())
    def end(self, which: int, in_order: bool) -> None:
        reader = self.readers[which % len(self.readers)]
        if in_order:
            reader.lease.end()
            self.readers.remove(reader)
        else:
            self.lose(reader)

    @rule(count=st.integers(1, 8))
    def publish(self, count: int) -> None:
        for _ in range(count):
            self.read.broker.publish("orders", bytes(1000), partition=0)

    @rule(ms=st.sampled_from([1, 1_000, TTL_MS // 3, TTL_MS - 1, TTL_MS, 10 * TTL_MS]))
    def wait(self, ms: int) -> None:
        self.read.clock.advance(ms=ms)

    @rule(hours=st.integers(-1_000, 1_000))
    def set_clock(self, hours: int) -> None:
        self.read.clock.step_wall(ns=hours * 3_600 * 10**9)

    @rule(how=st.sampled_from(["retain", "tick", "trim"]))
    def release(self, how: str) -> None:
        if how == "trim":
            self.log.trim(self.log.end)
        elif how == "retain":
            self.log.retain()
        else:
            self.read.engine.tick()

    @rule(how=st.sampled_from(["reopen", "kill"]))
    def another_owner(self, how: str) -> None:
        getattr(self.read, how)()
        for reader in self.readers:  # the disk of a killed process is another object here
            old = reader.lease._world
            reader.lease._world = World(old.clock, self.read.disk, old.ids)

    @invariant()
    def what_live_queries_need_is_there(self) -> None:
        for reader in self.live():
            assert self.log.start <= reader.offset

    @precondition(lambda self: not self.live())
    @rule()
    def nothing_is_kept_for_the_dead(self) -> None:
        self.read.engine.tick()  # from now on at the latest it is known how the files are
        self.read.clock.advance(ms=TTL_MS)
        self.read.engine.tick()
        self.log.trim(self.log.end)
        assert len(self.log.segments()) <= 1
        assert self.read.modes() == []

    def teardown(self) -> None:
        for reader in self.readers:
            reader.lease._ended = True
        self.read.close()


TestQueries = QueriesMachine.TestCase
